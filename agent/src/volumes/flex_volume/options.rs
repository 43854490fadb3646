//! What a driver is given: the settings of a volume, its pod, and the values of a Secret, as one JSON object (upstream:
//! `NewOptionsForDriver`, `addSecretsToOptions`).

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::api::core::v1::FlexPersistentVolumeSource;
use k8s_openapi::api::core::v1::FlexVolumeSource;
use k8s_openapi::api::core::v1::Pod;

use super::FlexError;
use crate::objects::Objects;
use crate::volumes::VolumeError;

const FS_TYPE: &str = "kubernetes.io/fsType";
const READ_WRITE: &str = "kubernetes.io/readwrite";
const VOLUME: &str = "kubernetes.io/pvOrVolumeName";
const FS_GROUP: &str = "kubernetes.io/mounterArgs.FsGroup";
const POD_NAME: &str = "kubernetes.io/pod.name";
const POD_NAMESPACE: &str = "kubernetes.io/pod.namespace";
const POD_UID: &str = "kubernetes.io/pod.uid";
const SERVICE_ACCOUNT: &str = "kubernetes.io/serviceAccount.name";
const SECRET: &str = "kubernetes.io/secret";

/// Options by name.
pub(super) type Options = BTreeMap<String, String>;

/// The settings of a volume.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(in crate::volumes) struct FlexSource {
    /// Name of the driver, `vendor/driver`.
    pub(in crate::volumes) driver: String,
    pub(in crate::volumes) fs_type: String,
    pub(in crate::volumes) read_only: bool,
    pub(in crate::volumes) options: BTreeMap<String, String>,
    /// Name of the secret, and its namespace unless it is the pod's; empty if none is named.
    pub(in crate::volumes) secret: (String, String),
}

impl From<&FlexVolumeSource> for FlexSource {
    fn from(source: &FlexVolumeSource) -> Self {
        let secret = source.secret_ref.as_ref().map(|secret| secret.name.clone()).unwrap_or_default();
        Self {
            driver: source.driver.clone(),
            fs_type: source.fs_type.clone().unwrap_or_default(),
            read_only: source.read_only == Some(true),
            options: source.options.clone().unwrap_or_default(),
            secret: (secret, String::new()),
        }
    }
}

impl From<&FlexPersistentVolumeSource> for FlexSource {
    fn from(source: &FlexPersistentVolumeSource) -> Self {
        let secret = source.secret_ref.clone().unwrap_or_default();
        Self {
            driver: source.driver.clone(),
            fs_type: source.fs_type.clone().unwrap_or_default(),
            read_only: source.read_only == Some(true),
            options: source.options.clone().unwrap_or_default(),
            secret: (secret.name.unwrap_or_default(), secret.namespace.unwrap_or_default()),
        }
    }
}

/// The options of every call for the volume of this name, with these besides. Those of the volume itself take precedence, as
/// upstream: the API server admits none of the names above.
pub(super) fn of_volume(source: &FlexSource, volume: &str, read_only: bool, more: Options) -> String {
    let access = if read_only { "ro" } else { "rw" };
    let own = [(FS_TYPE, source.fs_type.as_str()), (READ_WRITE, access), (VOLUME, volume)];
    let mut all: Options = own.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    all.extend(more);
    all.extend(source.options.clone());
    // Texts can always be written.
    serde_json::to_string(&all).unwrap_or_default()
}

/// What a mount for this pod is given besides: the pod, and its group.
pub(super) fn of_pod(pod: &Pod, fs_group: Option<u32>) -> Options {
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let account = pod.spec.as_ref().and_then(|spec| spec.service_account_name.clone()).unwrap_or_default();
    let meta = &pod.metadata;
    let named = [
        (POD_NAME, text(&meta.name)),
        (POD_NAMESPACE, text(&meta.namespace)),
        (POD_UID, text(&meta.uid)),
        (SERVICE_ACCOUNT, account),
    ];
    let group = fs_group.map(|group| (FS_GROUP, group.to_string()));
    named.into_iter().chain(group).map(|(name, value)| (name.to_owned(), value)).collect()
}

/// The values of the Secret that a volume names, in base64. `namespace`: the pod's.
///
/// # Errors
/// It cannot be read, or its type is not the name of the driver.
pub(super) async fn secrets(objects: &Objects, source: &FlexSource, namespace: &str) -> Result<Options, VolumeError> {
    let (name, stated) = (&source.secret.0, source.secret.1.as_str());
    let namespace = if stated.is_empty() { namespace } else { stated };
    if name.is_empty() || namespace.is_empty() {
        return Ok(Options::new());
    }
    let secret = objects.secret_now(namespace, name).await?;
    if secret.type_.as_deref() != Some(source.driver.as_str()) {
        let (namespace, name, driver) = (namespace.into(), name.as_str().into(), source.driver.as_str().into());
        return Err(FlexError::SecretType { namespace, name, driver }.into());
    }
    let values = secret.data.unwrap_or_default().into_iter();
    Ok(values.map(|(key, value)| (format!("{SECRET}/{key}"), STANDARD.encode(value.0))).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use serde_json::json;

    use super::*;
    use crate::volumes::testing::Replies;
    use crate::volumes::testing::objects;

    fn source(more: Value) -> FlexSource {
        let mut source = json!({"driver": "example.com/d", "options": {"share": "s"}});
        source.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        FlexSource::from(&serde_json::from_value::<FlexVolumeSource>(source).expect("a source"))
    }

    #[test]
    fn options_of_a_mount_are_upstreams() {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u-1"},
            "spec": {"containers": [], "serviceAccountName": "a"}}))
        .expect("a pod");
        let parsed = |source: &FlexSource, group| -> Value {
            let text = of_volume(source, "v", source.read_only, of_pod(&pod, group));
            serde_json::from_str(&text).expect("JSON")
        };
        let expected = json!({"kubernetes.io/fsType": "", "kubernetes.io/readwrite": "rw",
            "kubernetes.io/pvOrVolumeName": "v", "kubernetes.io/pod.name": "p", "kubernetes.io/pod.namespace": "ns",
            "kubernetes.io/pod.uid": "u-1", "kubernetes.io/serviceAccount.name": "a", "share": "s"});
        assert_eq!(parsed(&source(json!({})), None), expected);
        let shown = parsed(&source(json!({"fsType": "ext4", "readOnly": true})), Some(77));
        assert_eq!(shown["kubernetes.io/fsType"], "ext4");
        assert_eq!(shown["kubernetes.io/readwrite"], "ro");
        assert_eq!(shown["kubernetes.io/mounterArgs.FsGroup"], "77");
        let device = of_volume(&source(json!({})), "v", false, Options::new());
        assert!(!device.contains("pod.name"), "a device is mounted for no pod: {device}");
    }

    #[test]
    fn the_secret_of_a_persistent_volume_may_be_of_another_namespace() {
        let of = |reference: Value| {
            let source = json!({"driver": "d", "secretRef": reference, "readOnly": true});
            FlexSource::from(&serde_json::from_value::<FlexPersistentVolumeSource>(source).expect("a source"))
        };
        let named = of(json!({"name": "s", "namespace": "storage"}));
        assert_eq!(named.secret, ("s".to_owned(), "storage".to_owned()));
        assert!(named.read_only);
        assert_eq!(source(json!({"secretRef": {"name": "s"}})).secret, ("s".to_owned(), String::new()));
    }

    #[tokio::test]
    async fn values_of_a_secret_of_the_drivers_type_are_passed_in_base64() {
        let replies = Replies::default();
        for (name, kind) in [("right", "example.com/d"), ("wrong", "Opaque")] {
            let secret = json!({"type": kind, "data": {"user": "bWU="}});
            replies.lock().expect("unpoisoned").insert(format!("/api/v1/namespaces/ns/secrets/{name}"), secret);
        }
        let (objects, _node) = objects(&replies);
        let read = async |name: &str| {
            let found = secrets(&objects, &source(json!({"secretRef": {"name": name}})), "ns").await;
            found.map_err(|error| error.to_string())
        };
        let expected: Options = [("kubernetes.io/secret/user".to_owned(), "bWU=".to_owned())].into();
        assert_eq!(read("right").await, Ok(expected));
        let error = "couldn't get secret ns/wrong err: cannot get secret of type example.com/d";
        assert_eq!(read("wrong").await, Err(error.to_owned()));
        assert!(read("absent").await.is_err());
        let none = secrets(&objects, &source(json!({})), "ns").await.expect("none is named");
        assert!(none.is_empty());
    }
}
