//! One CertificateSigningRequest, from its creation to the issued certificate.

use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::certificates::v1::CertificateSigningRequestSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::PostParams;
use kube::runtime::watcher::Config;
use rcgen::KeyPair;

use super::pair::Pair;
use super::template::Purpose;
use super::template::Template;
use crate::apiserver::recovery::Recovered;
use crate::apiserver::tls::PairError;
use crate::apiserver::watch;
use crate::apiserver::watch::Event;

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// Key or request cannot be generated.
    #[error("cannot generate the request: {0}")]
    Make(#[from] rcgen::Error),
    /// The API server does not accept the request.
    #[error("cannot create CertificateSigningRequest: {0}")]
    Create(#[source] kube::Error),
    /// It was denied, failed, or was deleted.
    #[error("CertificateSigningRequest {name}: {why}")]
    Refused {
        /// Its name.
        name: String,
        /// What happened.
        why: String,
    },
    /// It was neither approved nor denied in time.
    #[error("CertificateSigningRequest {name} was not issued within {after:?}")]
    TimedOut {
        /// Its name.
        name: String,
        /// The timeout.
        after: Duration,
    },
    /// The issued certificate does not match the key.
    #[error("CertificateSigningRequest {name}: the issued certificate is unusable: {source}")]
    Certificate {
        /// Its name.
        name: String,
        /// What is wrong with it.
        source: PairError,
    },
}

/// The object to create, with a request of this key; without a name the server generates one.
pub(super) fn object(purpose: Purpose, key: &KeyPair, request: &str, name: Option<&str>) -> CertificateSigningRequest {
    CertificateSigningRequest {
        metadata: ObjectMeta {
            name: name.map(str::to_owned),
            generate_name: name.is_none().then(|| "csr-".to_owned()),
            ..ObjectMeta::default()
        },
        spec: CertificateSigningRequestSpec {
            request: ByteString(request.as_bytes().to_vec()),
            signer_name: purpose.signer().to_owned(),
            usages: Some(purpose.usages(key)),
            ..CertificateSigningRequestSpec::default()
        },
        status: None,
    }
}

/// Requests a certificate with a new key, and waits for it until `timeout`. `created` is called with the outcome of the
/// creation; `recovered` ends pauses after outages of the API server.
///
/// # Errors
/// The step that failed.
pub(super) async fn obtain(
    client: &kube::Client,
    recovered: Recovered,
    template: &Template,
    timeout: Duration,
    created: impl FnOnce(Result<(), &kube::Error>),
) -> Result<Pair, RequestError> {
    let key = KeyPair::generate()?;
    let request = object(template.purpose, &key, &template.request(&key)?, None);
    let requests: Api<CertificateSigningRequest> = Api::all(client.clone());
    let answer = requests.create(&PostParams::default(), &request).await;
    created(answer.as_ref().map(drop));
    let request = answer.map_err(RequestError::Create)?;
    let name = request.metadata.name.clone().unwrap_or_default();
    tracing::info!(csr = name, signer = template.purpose.signer(), "certificate requested");
    let chain = signed(&requests, &request, recovered, timeout).await?;
    Pair::parse(&chain, &key.serialize_pem()).map_err(|source| RequestError::Certificate { name, source })
}

/// Waits until `request` is approved and issued.
///
/// # Errors
/// It was denied, failed or deleted, or was not issued in time.
pub(super) async fn signed(
    requests: &Api<CertificateSigningRequest>,
    request: &CertificateSigningRequest,
    recovered: Recovered,
    timeout: Duration,
) -> Result<String, RequestError> {
    let name = request.metadata.name.clone().unwrap_or_default();
    let uid = request.metadata.uid.clone().unwrap_or_default();
    let mine = format!("metadata.name={name}");
    let waiting = async {
        // The watch retries every error. If one failed the attempt, a node that may not read requests would create one after
        // the other.
        let mut events = std::pin::pin!(watch::follow(requests.clone(), Config::default().fields(&mine), recovered));
        let mut present = true;
        while let Some(event) = events.next().await {
            let outcome = match &event {
                Event::Init => {
                    present = false;
                    None
                }
                Event::InitApply(seen) | Event::Apply(seen) => {
                    present = true;
                    outcome(seen, &uid)
                }
                Event::InitKeep(_) => {
                    present = true;
                    None
                }
                Event::InitDone if present => None,
                Event::InitDone | Event::Delete(_) => Some(Err("it was deleted".to_owned())),
            };
            if let Some(outcome) = outcome {
                return outcome;
            }
        }
        Err("the watch ended".to_owned())
    };
    match tokio::time::timeout(timeout, waiting).await {
        Ok(Ok(chain)) => Ok(chain),
        Ok(Err(why)) => Err(RequestError::Refused { name, why }),
        Err(_) => Err(RequestError::TimedOut { name, after: timeout }),
    }
}

/// The chain, or why there will be none; `None` while the request is pending.
pub(super) fn outcome(request: &CertificateSigningRequest, uid: &str) -> Option<Result<String, String>> {
    if request.metadata.uid.as_deref() != Some(uid) {
        return Some(Err("it was replaced by another one of the same name".to_owned()));
    }
    let status = request.status.as_ref()?;
    let conditions = status.conditions.as_deref().unwrap_or_default();
    let holds = |kind: &str| conditions.iter().find(|condition| condition.type_ == kind);
    for (kind, said) in [("Denied", "it was denied"), ("Failed", "it failed")] {
        if let Some(condition) = holds(kind) {
            let reason = condition.reason.as_deref().unwrap_or_default();
            let message = condition.message.as_deref().unwrap_or_default();
            return Some(Err(format!("{said}: {}: {}", reason.escape_debug(), message.escape_debug())));
        }
    }
    let certificate = status.certificate.as_ref().filter(|certificate| !certificate.0.is_empty())?;
    holds("Approved")?;
    Some(String::from_utf8(certificate.0.clone()).map_err(|_| "its certificate is not PEM text".to_owned()))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use serde_json::json;

    use super::*;

    fn request(uid: &str, status: Value) -> CertificateSigningRequest {
        serde_json::from_value(json!({
            "metadata": {"name": "csr-x", "uid": uid},
            "spec": {"request": "", "signerName": "s"},
            "status": status,
        }))
        .expect("a request")
    }

    #[test]
    fn outcomes_of_requests() {
        let condition = |kind: &str| json!([{"type": kind, "status": "True", "reason": "R", "message": "a\nb"}]);
        let certificate = "UEVN";
        let table = [
            (json!({}), "-"),
            (json!({"conditions": condition("Approved")}), "-"),
            (json!({"certificate": certificate}), "-"),
            (json!({"conditions": condition("Approved"), "certificate": ""}), "-"),
            (json!({"conditions": condition("Approved"), "certificate": certificate}), "PEM"),
            (json!({"conditions": condition("Denied"), "certificate": certificate}), "! it was denied: R: a\\nb"),
            (json!({"conditions": condition("Failed")}), "! it failed: R: a\\nb"),
        ];
        let shown = |outcome: Option<Result<String, String>>| match outcome {
            None => "-".to_owned(),
            Some(Ok(chain)) => chain,
            Some(Err(why)) => format!("! {why}"),
        };
        for (status, expected) in table {
            assert_eq!(shown(outcome(&request("u", status.clone()), "u")), expected, "{status}");
        }
        assert!(shown(outcome(&request("v", json!({})), "u")).starts_with("! it was replaced"));
    }

    #[test]
    fn requests_name_signer_and_usages() {
        let key = KeyPair::generate().expect("a key");
        let made = object(Purpose::Serving, &key, "PEM", None);
        assert_eq!(made.metadata.generate_name.as_deref(), Some("csr-"));
        assert_eq!(made.spec.signer_name, "kubernetes.io/kubelet-serving");
        assert_eq!(made.spec.usages.expect("usages"), ["digital signature", "server auth"]);
        assert_eq!(made.spec.expiration_seconds, None);
        let named = object(Purpose::Client, &key, "PEM", Some("node-csr-x"));
        assert_eq!((named.metadata.name.as_deref(), named.metadata.generate_name), (Some("node-csr-x"), None));
    }
}
