//! Intents to pull an image and records of pulled images: their form in files, and how credentials are added. Pure.
//!
//! The form is that of upstream (`kubelet.config.k8s.io/v1beta1`, KEP-2535), so that a node can change between kubelets.

use std::collections::BTreeMap;
use std::time::SystemTime;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde::Deserialize;
use serde::Serialize;

/// Version that is written.
const VERSION: &str = "kubelet.config.k8s.io/v1beta1";
/// Version that is read and rewritten at start.
const OLD_VERSION: &str = "kubelet.config.k8s.io/v1alpha1";
const INTENT: &str = "ImagePullIntent";
const PULLED: &str = "ImagePulledRecord";

/// A pull that was begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Intent {
    kind: String,
    #[serde(rename = "apiVersion")]
    version: String,
    /// The image as the pod's spec names it.
    pub(super) image: String,
}

/// An image that this agent has pulled, and which pods may use it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PulledRecord {
    kind: String,
    #[serde(rename = "apiVersion")]
    version: String,
    #[serde(rename = "lastUpdatedTime", default)]
    last_updated: Option<Time>,
    /// The runtime's id of the image.
    #[serde(rename = "imageRef")]
    pub(super) image_ref: String,
    /// Credentials by the image's name without tag and digest.
    #[serde(rename = "credentialMapping", default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) credentials: BTreeMap<String, Access>,
}

/// Credentials that an image was pulled with.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub(super) struct Access {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) kubernetes_secrets: Vec<SecretUse>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) kubernetes_service_accounts: Vec<AccountUse>,
    /// All pods of the node may use the image.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(super) node_pods_accessible: bool,
}

/// A pull secret and the entry of it that was used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct SecretUse {
    /// Its UID.
    pub uid: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Hash of user and password.
    pub credential_hash: String,
}

/// A service account whose token got the credentials.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AccountUse {
    /// Its UID.
    pub uid: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

/// The credential that an image was pulled with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CredentialSource {
    /// An entry of a pull secret.
    Secret(SecretUse),
    /// Credentials of a plugin for a service account.
    ServiceAccount(AccountUse),
    /// Whatever all pods of the node have: files, plugins without service account, or no credential at all.
    Node,
}

impl SecretUse {
    /// Order and identity of secrets in a record.
    fn coordinates(&self) -> (&str, &str, &str) {
        (&self.namespace, &self.name, &self.uid)
    }

    /// True if both are the same object, whatever its content.
    pub(super) fn is_same_object(&self, other: &Self) -> bool {
        self.coordinates() == other.coordinates()
    }
}

impl Intent {
    pub(super) fn new(image: &str) -> Self {
        Self { kind: INTENT.to_owned(), version: VERSION.to_owned(), image: image.to_owned() }
    }

    /// Reads either version; the second value is true for the old one.
    ///
    /// # Errors
    /// What is wrong with the content.
    pub(super) fn read(content: &[u8]) -> Result<(Self, bool), String> {
        let mut read: Self = serde_json::from_slice(content).map_err(|error| error.to_string())?;
        let old = check_version(&read.kind, INTENT, &mut read.version)?;
        Ok((read, old))
    }
}

impl PulledRecord {
    /// A record without credentials.
    pub(super) fn new(image_ref: &str) -> Self {
        Self {
            kind: PULLED.to_owned(),
            version: VERSION.to_owned(),
            last_updated: None,
            image_ref: image_ref.to_owned(),
            credentials: BTreeMap::new(),
        }
    }

    /// As [`Intent::read`].
    ///
    /// # Errors
    /// As [`Intent::read`].
    pub(super) fn read(content: &[u8]) -> Result<(Self, bool), String> {
        let mut read: Self = serde_json::from_slice(content).map_err(|error| error.to_string())?;
        let old = check_version(&read.kind, PULLED, &mut read.version)?;
        Ok((read, old))
    }

    /// Sets the time of the update, in whole seconds.
    pub(super) fn updated(&mut self, now: SystemTime) {
        let now = Timestamp::try_from(now).ok();
        self.last_updated = now.and_then(|now| Timestamp::from_second(now.as_second()).ok()).map(Time);
    }

    /// When it was written last.
    pub(super) fn last_updated(&self) -> SystemTime {
        self.last_updated.as_ref().map_or(SystemTime::UNIX_EPOCH, |time| SystemTime::from(time.0))
    }

    /// Adds the credential that the image was pulled with under `name`. Access for the whole node replaces single
    /// credentials and stays. Returns whether something has changed.
    pub(super) fn add(&mut self, name: &str, source: &CredentialSource) -> bool {
        let is_new = !self.credentials.contains_key(name);
        let access = self.credentials.entry(name.to_owned()).or_default();
        if access.node_pods_accessible {
            return false;
        }
        let before = access.clone();
        match source {
            CredentialSource::Node => *access = Access { node_pods_accessible: true, ..Access::default() },
            CredentialSource::Secret(used) => {
                access.kubernetes_secrets.retain(|known| !known.is_same_object(used));
                access.kubernetes_secrets.push(used.clone());
                access.kubernetes_secrets.sort_by(|a, b| a.coordinates().cmp(&b.coordinates()));
            }
            CredentialSource::ServiceAccount(used) => {
                access.kubernetes_service_accounts.retain(|known| known != used);
                access.kubernetes_service_accounts.push(used.clone());
                let order = |used: &AccountUse| (used.namespace.clone(), used.name.clone(), used.uid.clone());
                access.kubernetes_service_accounts.sort_by_key(order);
            }
        }
        is_new || *access != before
    }
}

/// Kind and version are known; the version becomes the current one. True if it was the old one.
fn check_version(kind: &str, expected: &str, version: &mut String) -> Result<bool, String> {
    if kind != expected || (version != VERSION && version != OLD_VERSION) {
        return Err(format!("expected {expected} of {VERSION}, got {kind:?} of {version:?}"));
    }
    let old = version == OLD_VERSION;
    VERSION.clone_into(version);
    Ok(old)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn secret(name: &str, uid: &str, hash: &str) -> CredentialSource {
        let [uid, namespace, name, credential_hash] = [uid, "ns", name, hash].map(str::to_owned);
        CredentialSource::Secret(SecretUse { uid, namespace, name, credential_hash })
    }

    #[test]
    fn files_are_those_of_upstream() {
        let intent = r#"{"kind":"ImagePullIntent","apiVersion":"kubelet.config.k8s.io/v1beta1","image":"busybox"}"#;
        assert_eq!(serde_json::to_string(&Intent::new("busybox")).expect("json"), intent);
        let mut record = PulledRecord::new("sha256:1");
        record.updated(SystemTime::UNIX_EPOCH + Duration::from_millis(1_767_323_045_678));
        let head = r#"{"kind":"ImagePulledRecord","apiVersion":"kubelet.config.k8s.io/v1beta1","#;
        let bare = format!(r#"{head}"lastUpdatedTime":"2026-01-02T03:04:05Z","imageRef":"sha256:1"}}"#);
        assert_eq!(serde_json::to_string(&record).expect("json"), bare);
        record.add("r.io/a", &secret("s", "u", ""));
        record.add("r.io/b", &CredentialSource::Node);
        let mapping = concat!(
            r#""credentialMapping":{"r.io/a":{"kubernetesSecrets":[{"uid":"u","namespace":"ns","name":"s","credentialHash":""}]},"#,
            r#""r.io/b":{"nodePodsAccessible":true}}}"#
        );
        let full = format!("{},{mapping}", &bare[..bare.len() - 1]);
        assert_eq!(serde_json::to_string(&record).expect("json"), full);
        assert_eq!(PulledRecord::read(full.as_bytes()), Ok((record.clone(), false)));
        let old = full.replace("v1beta1", "v1alpha1");
        assert_eq!(PulledRecord::read(old.as_bytes()), Ok((record, true)));
    }

    #[test]
    fn unknown_content_is_an_error() {
        let good = r#"{"kind":"ImagePullIntent","apiVersion":"kubelet.config.k8s.io/v1beta1","image":"a"}"#;
        Intent::read(good.as_bytes()).expect("valid");
        for (from, to) in [
            ("v1beta1", "v1"),
            ("PullIntent", "Pull"),
            (r#""image""#, r#""image":"b","image""#),
            (r#""image""#, r#""more":1,"image""#),
            ("}", ""),
        ] {
            let bad = good.replacen(from, to, 1);
            assert!(Intent::read(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn credentials_are_merged() {
        let mut record = PulledRecord::new("id");
        assert!(record.add("a", &secret("z", "u1", "h1")));
        assert!(record.add("a", &secret("b", "u2", "h2")));
        assert!(!record.add("a", &secret("b", "u2", "h2")), "the same again");
        assert!(record.add("a", &secret("z", "u1", "h3")), "a new hash");
        let found: Vec<_> = record.credentials["a"]
            .kubernetes_secrets
            .iter()
            .map(|used| (used.name.as_str(), used.credential_hash.as_str()))
            .collect();
        assert_eq!(found, [("b", "h2"), ("z", "h3")]);
        let account = CredentialSource::ServiceAccount(AccountUse { uid: "u".into(), ..AccountUse::default() });
        assert!(record.add("a", &account) && !record.add("a", &account));
        assert!(record.add("a", &CredentialSource::Node));
        let all = Access { node_pods_accessible: true, ..Access::default() };
        assert_eq!(record.credentials["a"], all);
        assert!(!record.add("a", &secret("z", "u1", "h1")) && !record.add("a", &CredentialSource::Node));
        assert_eq!(record.credentials["a"], all, "for good");
    }
}
