//! TLS settings of the main port.

use std::sync::Arc;

use rustls::CipherSuite;
use rustls::DigitallySignedStruct;
use rustls::DistinguishedName;
use rustls::ServerConfig;
use rustls::SignatureScheme;
use rustls::SupportedCipherSuite;
use rustls::SupportedProtocolVersion;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::CryptoProvider;
use rustls::crypto::SupportedKxGroup;
use rustls::crypto::aws_lc_rs;
use rustls::crypto::aws_lc_rs::cipher_suite;
use rustls::crypto::aws_lc_rs::kx_group;
use rustls::crypto::verify_tls12_signature;
use rustls::crypto::verify_tls13_signature;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::UnixTime;
use rustls::server::ClientHello;
use rustls::server::ResolvesServerCert;
use rustls::server::danger::ClientCertVerified;
use rustls::server::danger::ClientCertVerifier;
use rustls::sign::CertifiedKey;
use rustls::version::TLS12;
use rustls::version::TLS13;
use tokio::sync::watch;

use super::error::SetupError;
use crate::config::CIPHER_SUITES;
use crate::config::ConfigError;
use crate::config::KubeletConfiguration;
use crate::config::Settings;
use crate::config::Violation;

/// The serving certificate; handshakes fail while it is `None`.
pub type Serving = watch::Receiver<Option<Arc<CertifiedKey>>>;

/// The validated TLS settings.
#[derive(Clone, Debug)]
pub(super) struct TlsSettings {
    provider: Arc<CryptoProvider>,
    versions: Vec<&'static SupportedProtocolVersion>,
}

/// Aliases of cipher suites.
const ALIASES: [(&str, &str); 2] = [
    ("TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305", "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256"),
    ("TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305", "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256"),
];
/// Suites of TLS 1.3, on which configuration has no effect.
const SUITES_13: [&str; 3] = ["TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"];
/// HTTP/2 needs one of these.
const FOR_HTTP2: [CipherSuite; 2] =
    [CipherSuite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256];

/// Checks the TLS settings of the main port, if it is served: the agent does not start with one that is not supported.
///
/// # Errors
/// [`ConfigError::Invalid`] with the first such setting.
pub fn check_tls(settings: &Settings) -> Result<(), ConfigError> {
    let (field, message) = match TlsSettings::read(&settings.kubelet) {
        Err(SetupError::Tls { field, problem }) if settings.kubelet.enable_server => (field, problem),
        _ => return Ok(()),
    };
    let violation = Violation { origin: settings.origin(&field), field, message };
    Err(ConfigError::Invalid { violations: vec![violation] })
}

impl TlsSettings {
    /// # Errors
    /// A setting is unknown or not supported.
    pub(super) fn new(config: &KubeletConfiguration) -> Result<Self, SetupError> {
        let (settings, left_out) = Self::read(config)?;
        if !left_out.is_empty() {
            let left_out = left_out.join(", ");
            tracing::warn!(
                field = "tlsCipherSuites",
                left_out,
                "some cipher suites are left out: only those with forward secrecy and authenticated encryption are offered"
            );
        }
        Ok(settings)
    }

    /// The settings, and the configured suites that are left out.
    fn read(config: &KubeletConfiguration) -> Result<(Self, Vec<String>), SetupError> {
        let versions = versions(&config.tls_min_version)?;
        let Suites { offered: cipher_suites, left_out } = match versions.contains(&&TLS12) {
            true => suites(&config.tls_cipher_suites)?,
            false => Suites { offered: tls13(), left_out: Vec::new() },
        };
        let kx_groups = groups(&config.tls_curve_preferences)?;
        let provider = CryptoProvider { cipher_suites, kx_groups, ..aws_lc_rs::default_provider() };
        Ok((Self { provider: Arc::new(provider), versions }, left_out))
    }

    pub(super) fn provider(&self) -> &Arc<CryptoProvider> {
        &self.provider
    }

    /// A server's configuration. With `hints`, the authorities of client certificates, certificates are asked for.
    ///
    /// # Errors
    /// The cipher suites and versions cannot be combined.
    pub(super) fn server(
        &self,
        serving: Serving,
        hints: Option<Vec<DistinguishedName>>,
        http2: bool,
    ) -> Result<ServerConfig, SetupError> {
        let builder = ServerConfig::builder_with_provider(self.provider.clone());
        let builder = builder.with_protocol_versions(&self.versions).map_err(|error| SetupError::Tls {
            field: "tlsCipherSuites, tlsMinVersion".to_owned(),
            problem: error.to_string(),
        })?;
        let builder = match hints {
            Some(hints) => {
                builder.with_client_cert_verifier(Arc::new(Unverified { hints, provider: self.provider.clone() }))
            }
            None => builder.with_no_client_auth(),
        };
        let mut server = builder.with_cert_resolver(Arc::new(Current(serving)));
        if http2 {
            server.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        }
        Ok(server)
    }
}

/// TLS 1.0 and 1.1 are not supported: where they are allowed, 1.2 is the minimum.
fn versions(least: &str) -> Result<Vec<&'static SupportedProtocolVersion>, SetupError> {
    match least {
        "" | "VersionTLS10" | "VersionTLS11" | "VersionTLS12" => Ok(vec![&TLS13, &TLS12]),
        "VersionTLS13" => Ok(vec![&TLS13]),
        other => {
            let problem = format!("{other:?} is not a TLS version such as VersionTLS12");
            Err(SetupError::Tls { field: "tlsMinVersion".to_owned(), problem })
        }
    }
}

fn is_tls13(suite: &SupportedCipherSuite) -> bool {
    matches!(suite, SupportedCipherSuite::Tls13(_))
}

fn tls13() -> Vec<SupportedCipherSuite> {
    aws_lc_rs::ALL_CIPHER_SUITES.iter().filter(|suite| is_tls13(suite)).copied().collect()
}

/// The cipher suites of a configuration.
struct Suites {
    offered: Vec<SupportedCipherSuite>,
    /// Known suites that are not supported.
    left_out: Vec<String>,
}

/// All suites of TLS 1.3, then the configured ones in their order. Suites that are known but not supported are left
/// out, as long as one is supported.
fn suites(names: &[String]) -> Result<Suites, SetupError> {
    if names.is_empty() {
        return Ok(Suites { offered: aws_lc_rs::DEFAULT_CIPHER_SUITES.to_vec(), left_out: Vec::new() });
    }
    let (mut offered, mut left_out) = (tls13(), Vec::new());
    let wrong = |field: String, problem: String| SetupError::Tls { field, problem };
    for (index, name) in names.iter().enumerate() {
        if SUITES_13.contains(&name.as_str()) {
            continue;
        }
        match suite(name) {
            Some(suite) if offered.contains(&suite) => {}
            Some(suite) => offered.push(suite),
            None if CIPHER_SUITES.contains(&name.as_str()) => left_out.push(name.clone()),
            None => {
                let field = format!("tlsCipherSuites[{index}]");
                return Err(wrong(field, format!("{name:?} is not a known cipher suite")));
            }
        }
    }
    if offered.iter().all(is_tls13) && !left_out.is_empty() {
        let problem = format!(
            "none of {} is offered: only suites with forward secrecy and authenticated encryption are",
            left_out.join(", ")
        );
        return Err(wrong("tlsCipherSuites".to_owned(), problem));
    }
    if !offered.iter().any(|suite| FOR_HTTP2.contains(&suite.suite())) {
        let problem = "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256 or TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256 must be among \
                       them, because HTTP/2 needs one of both";
        return Err(wrong("tlsCipherSuites".to_owned(), problem.to_owned()));
    }
    Ok(Suites { offered, left_out })
}

fn suite(name: &str) -> Option<SupportedCipherSuite> {
    let name = ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |(_, name)| name);
    let suite = match name {
        "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256" => cipher_suite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
        "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384" => cipher_suite::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
        "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256" => cipher_suite::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
        "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256" => cipher_suite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
        "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384" => cipher_suite::TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
        "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256" => cipher_suite::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
        _ => return None,
    };
    Some(suite)
}

/// Key exchange groups by their numbers; without any, all that are offered, as with Go. The order of the client counts.
fn groups(numbers: &[i32]) -> Result<Vec<&'static dyn SupportedKxGroup>, SetupError> {
    if numbers.is_empty() {
        return Ok(vec![
            kx_group::X25519MLKEM768,
            kx_group::SECP256R1MLKEM768,
            kx_group::X25519,
            kx_group::SECP256R1,
            kx_group::SECP384R1,
        ]);
    }
    let known = |number: i32| -> Option<&'static dyn SupportedKxGroup> {
        Some(match number {
            23 => kx_group::SECP256R1,
            24 => kx_group::SECP384R1,
            29 => kx_group::X25519,
            4587 => kx_group::SECP256R1MLKEM768,
            4588 => kx_group::X25519MLKEM768,
            _ => return None,
        })
    };
    let group = |(index, number): (usize, &i32)| {
        known(*number).ok_or_else(|| SetupError::Tls {
            field: format!("tlsCurvePreferences[{index}]"),
            problem: format!("key exchange group {number} is not offered; 23, 24, 29, 4587 and 4588 are"),
        })
    };
    numbers.iter().enumerate().map(group).collect()
}

/// Presents the current serving certificate.
#[derive(Debug)]
struct Current(Serving);

impl ResolvesServerCert for Current {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let current = self.0.borrow().clone();
        if current.is_none() {
            tracing::warn!("no serving certificate available for the kubelet");
        }
        current
    }
}

/// Accepts any client certificate whose key the client has: it is verified per request, where a 401 can be answered
/// instead of closing the connection.
#[derive(Debug)]
struct Unverified {
    hints: Vec<DistinguishedName>,
    provider: Arc<CryptoProvider>,
}

impl ClientCertVerifier for Unverified {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &self.hints
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::load;

    fn settings(change: impl FnOnce(&mut KubeletConfiguration)) -> Result<TlsSettings, String> {
        let mut config = KubeletConfiguration::default();
        change(&mut config);
        TlsSettings::new(&config).map_err(|error| error.to_string())
    }

    fn suites_of(names: &[&str]) -> Result<Vec<CipherSuite>, String> {
        let settings = settings(|config| config.tls_cipher_suites = names.iter().map(ToString::to_string).collect())?;
        Ok(settings.provider.cipher_suites.iter().map(SupportedCipherSuite::suite).collect())
    }

    #[test]
    fn suites_are_those_named() {
        assert!(suites_of(&[]).expect("defaults").len() >= 9);
        let named =
            ["TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305", "TLS_AES_128_GCM_SHA256", "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"];
        let expected = [
            CipherSuite::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
            CipherSuite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
        ];
        let found = suites_of(&named).expect("acceptable");
        assert_eq!(found[found.len() - 2..], expected);
        assert_eq!(found.len(), 5, "those of TLS 1.3 are always there");
    }

    #[test]
    fn unknown_suites_are_refused() {
        let unknown = suites_of(&["TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", "TLS_RSA_WITH_NOTHING"]);
        assert!(unknown.expect_err("refused").starts_with("tlsCipherSuites[1]: \"TLS_RSA_WITH_NOTHING\""));
        let none = suites_of(&["TLS_AES_128_GCM_SHA256", "TLS_RSA_WITH_AES_128_CBC_SHA"]).expect_err("refused");
        assert!(none.starts_with("tlsCipherSuites: none of TLS_RSA_WITH_AES_128_CBC_SHA is offered"), "{none}");
        let http2 = suites_of(&["TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384"]).expect_err("refused");
        assert!(http2.starts_with("tlsCipherSuites: ") && http2.contains("HTTP/2"), "{http2}");
        let modern = settings(|config| {
            config.tls_min_version = "VersionTLS13".to_owned();
            config.tls_cipher_suites = vec!["TLS_RSA_WITH_AES_128_CBC_SHA".to_owned()];
        });
        assert_eq!(modern.expect("suites have no effect on TLS 1.3").versions, [&TLS13]);
    }

    #[test]
    fn a_check_names_what_keeps_the_port_from_being_served() {
        let found = |name: &str, text: &str, served: &str| {
            let flags = [(name, text), ("enable-server", served)];
            let settings = load(&flags.into_iter().collect()).expect("well-formed");
            check_tls(&settings).map_err(|error| error.to_string())
        };
        let (suites, without_http2) = ("tls-cipher-suites", "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384");
        let refused = found(suites, without_http2, "true").expect_err("refused");
        assert!(refused.starts_with("invalid configuration: --tls-cipher-suites: tlsCipherSuites: "), "{refused}");
        assert_eq!(found(suites, without_http2, "false"), Ok(()), "there is no port");
        assert_eq!(found("tls-min-version", "VersionTLS13", "true"), Ok(()));
    }

    /// The names of a hardened node's list that was written for a server with more suites.
    #[test]
    fn unsupported_suites_are_left_out() {
        let names = CIPHER_SUITES.map(str::to_owned);
        let suites = suites(&names).expect("a node that starts");
        let left_out = names.iter().filter(|name| suite(name).is_none() && !SUITES_13.contains(&name.as_str()));
        assert_eq!(suites.left_out, left_out.cloned().collect::<Vec<_>>());
        assert!(suites.left_out.contains(&"TLS_RSA_WITH_AES_256_GCM_SHA384".to_owned()));
        assert_eq!(suites.offered.len(), 9, "three of TLS 1.3, six below; aliases are no suites of their own");
    }

    #[test]
    fn groups_and_versions() {
        let groups = |numbers: &[i32]| settings(|config| config.tls_curve_preferences = numbers.to_vec());
        let names: Vec<_> = groups(&[24, 4588]).expect("known").provider.kx_groups.iter().map(|g| g.name()).collect();
        assert_eq!(names, [rustls::NamedGroup::secp384r1, rustls::NamedGroup::X25519MLKEM768]);
        let default = groups(&[]).expect("the default");
        let names: Vec<_> = default.provider.kx_groups.iter().map(|g| u16::from(g.name())).collect();
        assert_eq!(names, [4588, 4587, 29, 23, 24], "as with Go");
        assert!(groups(&[23, 25]).expect_err("unknown").starts_with("tlsCurvePreferences[1]: key exchange group 25"));
        let version = settings(|config| config.tls_min_version = "TLS1.2".to_owned());
        assert!(version.expect_err("unknown").starts_with("tlsMinVersion: \"TLS1.2\""));
    }
}
