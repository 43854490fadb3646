//! Certificates of pods (KEP-4317) for projected volumes: the agent generates a key, requests a certificate from the signer
//! that the volume names, and replaces both at the time that the signer states. Keys are kept in memory only: an agent that
//! is restarted requests new certificates.
//!
//! ```text
//!  volume ─▶ get ─▶ key, PodCertificateRequest ─▶ signer
//!             ▲                                     │
//!             └── pod is woken ◀── watch ◀── issued, denied, failed
//! ```

mod key;
mod projected_certificate;
mod tracker;

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;
use std::time::SystemTime;

use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1beta1::PodCertificateRequestSpec;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodCertificateProjection;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::Api;
use kube::Client;
use kube::api::ApiResource;
use kube::api::PostParams;
use kube::core::TypeMeta;
use secrecy::SecretString;
use tokio::sync::watch;

use super::error::ObjectError;
use super::error::code;
use super::error::describe;
use super::panics::Panics;
use super::registration::Listeners;
use super::retry::Retry;
use super::served::served;
use super::token::Tokens;
use crate::apiserver::recovery::Recovered;
use crate::model::Clock;
use crate::model::PodUid;
use crate::recorder::EventType;
use projected_certificate::Pending;
use projected_certificate::ProjectedCertificate;
use projected_certificate::Standing;
use tracker::CertificateRequest;
use tracker::Outcome;
use tracker::Tracker;

/// Versions of the API, the preferred one first.
const VERSIONS: [&str; 2] = ["v1", "v1beta1"];
const KIND: &str = "PodCertificateRequest";
const PLURAL: &str = "podcertificaterequests";
/// How long a volume waits for a signer; after that the answer wakes its pod.
const FIRST_ISSUE: Duration = Duration::from_secs(1);
/// How long each request to the API server may take.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Which certificate: that of one source of one volume of a pod.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct CertificateKey {
    /// UID of the pod.
    pub pod: PodUid,
    /// The volume's name.
    pub volume: String,
    /// The source's position in the volume.
    pub source: usize,
}

/// A certificate with its key.
#[derive(Clone, Debug)]
pub struct PodCertificate {
    /// The key, PKCS#8 in PEM.
    pub key: SecretString,
    /// The certificate and those that lead to its authority, PEM.
    pub chain: String,
    /// When it is to be read again.
    pub refresh_at: Option<SystemTime>,
}

/// An event on a pod: type, reason, message.
pub(crate) type EventSink<'a> = &'a (dyn Fn(EventType, &str, &str) + Sync);

/// The certificates of all pods.
pub(super) struct PodCertificates {
    client: Client,
    recovered: Recovered,
    clock: Clock,
    node: Option<watch::Receiver<Option<Arc<Node>>>>,
    listeners: Arc<Listeners>,
    panics: Panics,
    watched: tokio::sync::OnceCell<(ApiResource, Tracker)>,
    sources: Mutex<HashMap<CertificateKey, Source>>,
}

/// One source of one volume.
struct Source {
    signer: String,
    /// As of the last access to `held`, which is locked while a certificate is requested.
    standing: Standing,
    held: Arc<tokio::sync::Mutex<ProjectedCertificate>>,
}

impl PodCertificates {
    pub(super) fn new(
        client: Client,
        recovered: Recovered,
        clock: Clock,
        node: Option<watch::Receiver<Option<Arc<Node>>>>,
        panics: Panics,
    ) -> Self {
        let (listeners, watched, sources) = (Arc::default(), tokio::sync::OnceCell::new(), Mutex::default());
        Self { client, recovered, clock, node, listeners, panics, watched, sources }
    }

    /// Pods notified when a signer has answered.
    pub(super) fn listeners(&self) -> &Listeners {
        &self.listeners
    }

    pub(super) fn forget_pod(&self, uid: &PodUid) {
        self.all().retain(|key, _| key.pod != *uid);
    }

    /// The number of sources by signer and state.
    pub(super) fn states(&self) -> BTreeMap<(String, &'static str), usize> {
        let (now, mut states) = (self.clock.wall(), BTreeMap::new());
        for source in self.all().values() {
            *states.entry((source.signer.clone(), source.standing.state(now))).or_default() += 1;
        }
        states
    }

    fn all(&self) -> MutexGuard<'_, HashMap<CertificateKey, Source>> {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is held for a source.
    fn held(&self, key: &CertificateKey, signer: &str) -> Arc<tokio::sync::Mutex<ProjectedCertificate>> {
        let new = || Source { signer: signer.to_owned(), standing: Standing::default(), held: Arc::default() };
        self.all().entry(key.clone()).or_insert_with(new).held.clone()
    }

    /// Records the state of a source's certificate for metrics.
    fn note(&self, key: &CertificateKey, standing: Standing) {
        if let Some(source) = self.all().get_mut(key) {
            source.standing = standing;
        }
    }

    /// The Node object.
    ///
    /// # Errors
    /// It was not received yet.
    fn node(&self) -> Result<Arc<Node>, ObjectError> {
        let node = self.node.as_ref().and_then(|node| node.borrow().clone());
        node.ok_or_else(|| ObjectError::Api("the Node object was not received yet".to_owned()))
    }

    /// The API, and the watch of this node's requests, which begins with the first call.
    ///
    /// # Errors
    /// The API server does not serve this API, or its discovery fails.
    async fn watched(&self) -> Result<&(ApiResource, Tracker), ObjectError> {
        let start = || async {
            let node = self.node()?.metadata.name.clone().unwrap_or_default();
            let found = served(&self.client, KIND, PLURAL, &VERSIONS).await;
            let resource = found.map_err(|error| ObjectError::Api(describe(&error)))?;
            let resource = resource.ok_or(ObjectError::NotServed { kind: PLURAL })?;
            let api = Api::all_with(self.client.clone(), &resource);
            let (recovered, listeners) = (self.recovered.clone(), self.listeners.clone());
            let tracker = Tracker::start(api, &node, recovered, listeners, &self.panics);
            Ok((resource, tracker))
        };
        self.watched.get_or_try_init(start).await
    }

    /// The certificate for a source of a volume: the present one, or a new one if there is none. One that is to be replaced
    /// is served until its successor is issued. A refusal is final.
    ///
    /// # Errors
    /// None was issued, or not yet; the request cannot be made.
    pub(super) async fn get(
        &self,
        tokens: &Tokens,
        pod: &Pod,
        key: &CertificateKey,
        wanted: &PodCertificateProjection,
        notify: EventSink<'_>,
    ) -> Result<PodCertificate, ObjectError> {
        let held = self.held(key, &wanted.signer_name);
        let (resource, tracker) = self.watched().await?;
        let mut held = held.lock().await;
        self.settle(&mut held, tracker, notify);
        if held.is_due(self.clock.wall()) {
            match self.request(tokens, resource, tracker, pod, wanted).await {
                Ok(pending) => held.requested(pending),
                Err(error) if held.current.is_none() => return Err(error),
                Err(error) => {
                    tracing::warn!(pod = %crate::model::pod_ref(pod), volume = key.volume, %error, "cannot request a new certificate");
                    held.request_failed(self.clock.wall());
                }
            }
            if let (None, Some(pending)) = (&held.current, &held.pending) {
                tracker.until_answered(&pending.name, FIRST_ISSUE).await;
            }
            self.settle(&mut held, tracker, notify);
        }
        self.note(key, held.standing());
        held.notices(self.clock.wall())
            .into_iter()
            .for_each(|(reason, message)| notify(EventType::Warning, reason, message));
        held.answer(self.clock.wall())
    }

    /// Takes over the answer of the signer, if there is one.
    fn settle(&self, held: &mut ProjectedCertificate, tracker: &Tracker, notify: EventSink<'_>) {
        let Some(pending) = &held.pending else { return };
        match tracker.outcome(&pending.name) {
            Some(Outcome::Pending) => {}
            // Deleted before it was answered, by a controller that removes old ones.
            None => held.pending = None,
            Some(Outcome::Issued(issued)) => {
                held.issued(&issued, Duration::from_secs(fastrand::u64(..=projected_certificate::MAX_JITTER_SECONDS)))
            }
            Some(Outcome::Refused(refusal)) => {
                let message = format!(
                    "PodCertificateRequest {}/{} {}, reason={:?}, message={:?}",
                    pending.namespace,
                    pending.name,
                    refusal.verb(),
                    refusal.reason,
                    refusal.message
                );
                notify(EventType::Warning, refusal.verdict, &message);
                held.refused(refusal);
            }
        }
    }

    /// Generates a key and creates the request for its certificate.
    async fn request(
        &self,
        tokens: &Tokens,
        resource: &ApiResource,
        tracker: &Tracker,
        pod: &Pod,
        wanted: &PodCertificateProjection,
    ) -> Result<Pending, ObjectError> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let account = pod.spec.as_ref().and_then(|spec| spec.service_account_name.as_deref()).unwrap_or_default();
        let (account_object, made) =
            tokio::join!(tokens.account(namespace, account), key::generate(wanted.key_type.clone()));
        let (account_object, made) = (account_object?, made?);
        let node = self.node()?;
        let spec = PodCertificateRequestSpec {
            max_expiration_seconds: wanted.max_expiration_seconds,
            node_name: node.metadata.name.clone().unwrap_or_default(),
            node_uid: node.metadata.uid.clone().unwrap_or_default(),
            pod_name: pod.metadata.name.clone().unwrap_or_default(),
            pod_uid: pod.metadata.uid.clone().unwrap_or_default(),
            service_account_name: account.to_owned(),
            service_account_uid: account_object.metadata.uid.unwrap_or_default(),
            signer_name: wanted.signer_name.clone(),
            stub_pkc_s10_request: ByteString(made.request),
            unverified_user_annotations: wanted.user_annotations.clone(),
            ..PodCertificateRequestSpec::default()
        };
        let object = CertificateRequest {
            types: Some(TypeMeta { api_version: resource.api_version.clone(), kind: resource.kind.clone() }),
            metadata: metadata(pod),
            spec,
            status: None,
        };
        let api = Api::<CertificateRequest>::namespaced_with(self.client.clone(), namespace, resource);
        let created = create(&api, &object).await?;
        let name = created.metadata.name.unwrap_or_default();
        tracker.created(&name, pod.metadata.uid.as_deref().unwrap_or_default().into());
        Ok(Pending { namespace: namespace.to_owned(), name, key: made.key })
    }
}

/// The request belongs to its pod, and goes with it.
fn metadata(pod: &Pod) -> ObjectMeta {
    let owner = OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Pod".to_owned(),
        name: pod.metadata.name.clone().unwrap_or_default(),
        uid: pod.metadata.uid.clone().unwrap_or_default(),
        ..OwnerReference::default()
    };
    ObjectMeta {
        generate_name: Some("req-".to_owned()),
        namespace: pod.metadata.namespace.clone(),
        owner_references: Some(vec![owner]),
        ..ObjectMeta::default()
    }
}

/// The API server's authorizer receives a pod of this node a moment after the node does: a 403 is retried soon.
async fn create(api: &Api<CertificateRequest>, object: &CertificateRequest) -> Result<CertificateRequest, ObjectError> {
    let mut retry = Retry::default();
    loop {
        match tokio::time::timeout(TIMEOUT, api.create(&PostParams::default(), object)).await {
            Ok(Ok(created)) => return Ok(created),
            Ok(Err(error)) => match (code(&error) == Some(403)).then(|| retry.soon()).flatten() {
                Some(soon) => tokio::time::sleep(soon).await,
                None => return Err(ObjectError::NoCertificate(describe(&error))),
            },
            Err(_) => {
                let cause = format!("the API server did not answer within {TIMEOUT:?}");
                return Err(ObjectError::NoCertificate(cause));
            }
        }
    }
}
