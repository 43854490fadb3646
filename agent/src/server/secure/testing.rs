//! A scripted API server for reviews, and certificates for tests.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::BoxFuture;
use k8s_openapi::api::authentication::v1::TokenReviewStatus;
use k8s_openapi::api::authorization::v1::SubjectAccessReviewSpec;
use k8s_openapi::api::authorization::v1::SubjectAccessReviewStatus;
use rcgen::BasicConstraints;
use rcgen::CertificateParams;
use rcgen::DistinguishedName;
use rcgen::DnType;
use rcgen::ExtendedKeyUsagePurpose;
use rcgen::IsCa;
use rcgen::Issuer;
use rcgen::KeyPair;
use rcgen::KeyUsagePurpose;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::PrivateKeyDer;

use super::review::ReviewError;
use super::review::Reviews;

type TokenScript = dyn Fn(&str) -> Result<TokenReviewStatus, ReviewError> + Send + Sync;
type AccessScript = dyn Fn(&SubjectAccessReviewSpec) -> Result<SubjectAccessReviewStatus, ReviewError> + Send + Sync;

/// Answers reviews by a script and counts them.
pub(in crate::server) struct Script {
    token: Box<TokenScript>,
    access: Box<AccessScript>,
    asked: AtomicUsize,
    delay: std::sync::Mutex<Duration>,
}

fn unscripted<T>() -> Result<T, ReviewError> {
    Err(ReviewError { message: "not in the script".to_owned(), again: false, after: None })
}

impl Script {
    pub(in crate::server) fn new(
        token: impl Fn(&str) -> Result<TokenReviewStatus, ReviewError> + Send + Sync + 'static,
        access: impl Fn(&SubjectAccessReviewSpec) -> Result<SubjectAccessReviewStatus, ReviewError> + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self { token: Box::new(token), access: Box::new(access), asked: 0.into(), delay: Default::default() })
    }

    pub(in crate::server) fn tokens(
        token: impl Fn(&str) -> Result<TokenReviewStatus, ReviewError> + Send + Sync + 'static,
    ) -> Arc<Self> {
        Self::new(token, |_| unscripted())
    }

    pub(in crate::server) fn access(
        access: impl Fn(&SubjectAccessReviewSpec) -> Result<SubjectAccessReviewStatus, ReviewError> + Send + Sync + 'static,
    ) -> Arc<Self> {
        Self::new(|_| unscripted(), access)
    }

    pub(in crate::server) fn slow(self: Arc<Self>, delay: Duration) -> Arc<Self> {
        *self.delay.lock().expect("not poisoned") = delay;
        self
    }

    pub(in crate::server) fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }

    async fn wait(&self) {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let delay = *self.delay.lock().expect("not poisoned");
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
    }
}

impl Reviews for Script {
    fn token<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Result<TokenReviewStatus, ReviewError>> {
        Box::pin(async move {
            self.wait().await;
            (self.token)(token)
        })
    }

    fn access<'a>(
        &'a self,
        spec: &'a SubjectAccessReviewSpec,
    ) -> BoxFuture<'a, Result<SubjectAccessReviewStatus, ReviewError>> {
        Box::pin(async move {
            self.wait().await;
            (self.access)(spec)
        })
    }
}

/// A certificate with its key.
pub(in crate::server) struct Pair {
    /// The certificate first.
    pub(in crate::server) chain: Vec<CertificateDer<'static>>,
    key: KeyPair,
}

impl Pair {
    pub(in crate::server) fn chain_pem(&self) -> String {
        self.chain.iter().map(|der| pem(der)).collect()
    }

    pub(in crate::server) fn key_pem(&self) -> String {
        self.key.serialize_pem()
    }

    pub(in crate::server) fn private(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::try_from(self.key.serialize_der()).expect("a key")
    }
}

fn pem(der: &[u8]) -> String {
    use base64::Engine as _;
    let text = base64::engine::general_purpose::STANDARD.encode(der);
    let lines: Vec<&str> = text.as_bytes().chunks(64).map(|line| std::str::from_utf8(line).expect("ASCII")).collect();
    format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", lines.join("\n"))
}

/// A certificate authority for tests.
pub(in crate::server) struct Authority {
    params: CertificateParams,
    key: KeyPair,
    certificate: CertificateDer<'static>,
}

fn params(name: &str, organizations: &[&str]) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    for organization in organizations {
        params.distinguished_name.push(DnType::OrganizationName, *organization);
    }
    if !name.is_empty() {
        params.distinguished_name.push(DnType::CommonName, name);
    }
    params
}

fn authority(name: &str) -> CertificateParams {
    let mut params = params(name, &[]);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    params
}

impl Authority {
    pub(in crate::server) fn new(name: &str) -> Self {
        let (params, key) = (authority(name), KeyPair::generate().expect("a key"));
        let certificate = params.self_signed(&key).expect("a certificate").der().clone();
        Self { params, key, certificate }
    }

    pub(in crate::server) fn intermediate(&self, name: &str) -> Self {
        let params = authority(name);
        let Pair { chain, key } = self.sign(params.clone());
        Self { params, key, certificate: chain[0].clone() }
    }

    pub(in crate::server) fn der(&self) -> CertificateDer<'static> {
        self.certificate.clone()
    }

    pub(in crate::server) fn pem(&self) -> String {
        pem(&self.certificate)
    }

    /// A client of this name, in these groups.
    pub(in crate::server) fn client(&self, name: &str, groups: &[&str]) -> Pair {
        let mut params = params(name, groups);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(params)
    }

    /// A client with an expired certificate.
    pub(in crate::server) fn expired(&self, name: &str) -> Pair {
        let mut params = params(name, &[]);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        (params.not_before, params.not_after) = (rcgen::date_time_ymd(2000, 1, 1), rcgen::date_time_ymd(2001, 1, 1));
        self.sign(params)
    }

    /// A server of this name.
    pub(in crate::server) fn server(&self, name: &str) -> Pair {
        let mut params = params(name, &[]);
        params.subject_alt_names = CertificateParams::new(vec![name.to_owned()]).expect("a name").subject_alt_names;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.sign(params)
    }

    fn sign(&self, params: CertificateParams) -> Pair {
        let key = KeyPair::generate().expect("a key");
        let issuer = Issuer::from_params(&self.params, &self.key);
        let certificate = params.signed_by(&key, &issuer).expect("a certificate");
        Pair { chain: vec![certificate.der().clone()], key }
    }
}
