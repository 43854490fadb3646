//! Files made from one object or from the pod itself. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;

use bytes::Bytes;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::core::v1::DownwardAPIVolumeFile;
use k8s_openapi::api::core::v1::KeyToPath;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::Secret;

use super::payload::File;
use super::payload::Payload;
use crate::model::Amount;
use crate::model::DownwardError;
use crate::model::downward;
use crate::model::downward::NamedContainers;
use crate::volumes::VolumeError;

/// Which files are made of one source, and how.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form<'a> {
    /// Keys and their paths; all keys if empty.
    pub(super) items: &'a [KeyToPath],
    /// `defaultMode`.
    pub(super) mode: u32,
    /// Missing keys are left out.
    pub(super) optional: bool,
}

/// An object with values by key.
trait Keyed: Send + Sync + 'static {
    fn keys(&self) -> Vec<&str>;
    fn value(&self, key: &str) -> Option<&[u8]>;
}

impl Keyed for ConfigMap {
    fn keys(&self) -> Vec<&str> {
        let text = self.data.iter().flatten().map(|(key, _)| key.as_str());
        let binary = self.binary_data.iter().flatten().map(|(key, _)| key.as_str());
        text.chain(binary).collect()
    }

    fn value(&self, key: &str) -> Option<&[u8]> {
        let binary = self.binary_data.as_ref().and_then(|data| data.get(key));
        binary.map(|value| value.0.as_slice()).or_else(|| Some(self.data.as_ref()?.get(key)?.as_bytes()))
    }
}

impl Keyed for Secret {
    fn keys(&self) -> Vec<&str> {
        self.data.iter().flatten().map(|(key, _)| key.as_str()).collect()
    }

    fn value(&self, key: &str) -> Option<&[u8]> {
        Some(self.data.as_ref()?.get(key)?.0.as_slice())
    }
}

/// One value of an object. It keeps the object instead of a copy: pods can name one value for any number of files.
struct Value<T> {
    object: Arc<T>,
    key: String,
}

impl<T: Keyed> Value<T> {
    fn of(object: &Arc<T>, key: &str) -> Option<Bytes> {
        object.value(key)?;
        Some(Bytes::from_owner(Self { object: object.clone(), key: key.to_owned() }))
    }
}

impl<T: Keyed> AsRef<[u8]> for Value<T> {
    fn as_ref(&self) -> &[u8] {
        self.object.value(&self.key).unwrap_or_default()
    }
}

/// The files of a ConfigMap; `None`: it does not exist and is optional.
pub(super) fn of_config_map(object: Option<&Arc<ConfigMap>>, form: Form<'_>) -> Result<Payload, VolumeError> {
    chosen(object, form, "configmap references non-existent config key")
}

/// The files of a Secret; `None`: it does not exist and is optional.
pub(super) fn of_secret(object: Option<&Arc<Secret>>, form: Form<'_>) -> Result<Payload, VolumeError> {
    chosen(object, form, "references non-existent secret key")
}

fn chosen<T: Keyed>(object: Option<&Arc<T>>, form: Form<'_>, missing: &'static str) -> Result<Payload, VolumeError> {
    let mut payload = Payload::default();
    let value = |key: &str| object.and_then(|object| Value::of(object, key));
    let file = |data, mode| File { data, mode, owner: None };
    if form.items.is_empty() {
        for key in object.map(|object| object.keys()).unwrap_or_default() {
            payload.put(key, file(value(key).unwrap_or_default(), form.mode))?;
        }
        return Ok(payload);
    }
    for item in form.items {
        let Some(data) = value(&item.key) else {
            if form.optional {
                continue;
            }
            return Err(VolumeError::MissingKey { what: missing, key: item.key.clone() });
        };
        payload.put(&item.path, file(data, item.mode.map_or(form.mode, mode)))?;
    }
    Ok(payload)
}

/// Fields of a pod as files (the downward API).
pub(super) struct Downward<'a> {
    containers: NamedContainers<'a>,
    allocatable: &'a BTreeMap<String, Amount>,
    /// Values by the path of their field: annotations are large, and pods can name one for any number of files.
    fields: Mutex<BTreeMap<String, Bytes>>,
}

impl<'a> Downward<'a> {
    pub(super) fn new(pod: &'a Pod, allocatable: &'a BTreeMap<String, Amount>) -> Self {
        Self { containers: NamedContainers::of(pod), allocatable, fields: Mutex::default() }
    }

    /// The files of a downwardAPI volume or source.
    pub(super) fn files(&self, items: &[DownwardAPIVolumeFile], default_mode: u32) -> Result<Payload, VolumeError> {
        let (mut payload, mut failed) = (Payload::default(), Vec::new());
        for item in items {
            match self.value(item) {
                Ok(data) => {
                    let mode = item.mode.map_or(default_mode, mode);
                    payload.put(&item.path, File { data, mode, owner: None })?;
                }
                Err(error) => failed.push(error.into()),
            }
        }
        VolumeError::all_of(failed).map_or(Ok(payload), Err)
    }

    fn value(&self, item: &DownwardAPIVolumeFile) -> Result<Bytes, DownwardError> {
        if let Some(field) = &item.field_ref {
            return self.field(&field.field_path);
        }
        match &item.resource_field_ref {
            Some(resource) => {
                downward::resource_field(&self.containers, None, resource, self.allocatable).map(Bytes::from)
            }
            None => Ok(Bytes::new()),
        }
    }

    fn field(&self, path: &str) -> Result<Bytes, DownwardError> {
        // Changed one entry at a time: a panic elsewhere leaves it usable.
        let mut fields = self.fields.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = fields.get(path) {
            return Ok(known.clone());
        }
        let value = Bytes::from(downward::metadata_field(self.containers.pod, path)?);
        fields.insert(path.to_owned(), value.clone());
        Ok(value)
    }
}

/// Permission bits of a mode in the API.
pub(super) fn mode(mode: i32) -> u32 {
    u32::try_from(mode).unwrap_or(0) & 0o777
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn form(items: &[KeyToPath]) -> Form<'_> {
        Form { items, mode: 0o644, optional: false }
    }

    fn items(json: serde_json::Value) -> Vec<KeyToPath> {
        serde_json::from_value(json).expect("items")
    }

    fn config_map(json: serde_json::Value) -> Arc<ConfigMap> {
        Arc::new(serde_json::from_value(json).expect("a ConfigMap"))
    }

    fn shown(payload: &Payload) -> Vec<String> {
        let show =
            |(path, file): (&str, &File)| format!("{path} {:o} {}", file.mode, String::from_utf8_lossy(&file.data));
        payload.files().map(show).collect()
    }

    #[test]
    fn keys_become_files() {
        let map = config_map(json!({"data": {"a": "1", "b.conf": "two"}, "binaryData": {"c": "AAEC"}}));
        let all = of_config_map(Some(&map), form(&[])).expect("files");
        assert_eq!(shown(&all), ["a 644 1", "b.conf 644 two", "c 644 \0\u{1}\u{2}"]);
        let some = items(json!([{"key": "b.conf", "path": "etc/b"}, {"key": "c", "path": "c", "mode": 256}]));
        let chosen = of_config_map(Some(&map), form(&some)).expect("files");
        assert_eq!(shown(&chosen), ["c 400 \0\u{1}\u{2}", "etc/b 644 two"]);
        let secret: Secret = serde_json::from_value(json!({"data": {"k": "djE="}})).expect("a Secret");
        let secret = Arc::new(secret);
        assert_eq!(shown(&of_secret(Some(&secret), form(&[])).expect("files")), ["k 644 v1"]);
    }

    #[test]
    fn files_of_one_value_share_it() {
        let place = |(_, file): (&str, &File)| file.data.as_ptr();
        let places = |payload: &Payload| payload.files().map(place).collect::<Vec<_>>();
        let wanted: Vec<_> = (0..1000_usize).map(|number| json!({"key": "k", "path": number.to_string()})).collect();
        let wanted = items(json!(wanted));
        let map = config_map(json!({"data": {"k": "x".repeat(64_000)}}));
        let held = map.data.as_ref().expect("data")["k"].as_ptr();
        let payload = of_config_map(Some(&map), form(&wanted)).expect("files");
        assert_eq!(places(&payload), [held; 1000], "no copy is made");
        let pod: Pod =
            serde_json::from_value(json!({"metadata": {"annotations": {"a": "x".repeat(64_000)}}})).expect("a pod");
        let field = |path: String| json!({"path": path, "fieldRef": {"fieldPath": "metadata.annotations"}});
        let wanted: Vec<_> = (0..1000_usize).map(|number| field(number.to_string())).collect();
        let wanted: Vec<DownwardAPIVolumeFile> = serde_json::from_value(json!(wanted)).expect("files");
        let allocatable = BTreeMap::new();
        let downward = Downward::new(&pod, &allocatable);
        let one = downward.files(&wanted[..1], 0o644).expect("files");
        let all = downward.files(&wanted, 0o644).expect("files");
        assert_eq!(places(&all), [places(&one)[0]; 1000], "all sources of a volume share it");
    }

    /// Searching all containers for each file would take minutes.
    #[test]
    fn thousands_of_files_name_one_of_thousands_of_containers() {
        const COUNT: usize = 20_000;
        let limits = |number: usize| json!({"limits": {"cpu": number.to_string()}});
        let container = |number: usize| json!({"name": format!("c{number}"), "resources": limits(number)});
        let containers: Vec<_> = (0..COUNT).map(container).collect();
        let pod: Pod = serde_json::from_value(json!({"spec": {"containers": containers}})).expect("a pod");
        let last = json!({"containerName": format!("c{}", COUNT - 1), "resource": "limits.cpu"});
        let file = |number: usize| json!({"path": number.to_string(), "resourceFieldRef": last});
        let files: Vec<_> = (0..COUNT).map(file).collect();
        let files: Vec<DownwardAPIVolumeFile> = serde_json::from_value(json!(files)).expect("files");
        let allocatable = BTreeMap::new();
        let payload = Downward::new(&pod, &allocatable).files(&files, 0o644).expect("files");
        assert_eq!(payload.len(), COUNT);
        assert_eq!(payload.get("7").expect("a file").data, (COUNT - 1).to_string());
    }

    #[test]
    fn missing_objects_and_keys() {
        let wanted = items(json!([{"key": "x", "path": "x"}]));
        let error = |result: Result<Payload, VolumeError>| result.expect_err("missing").to_string();
        let map = Arc::new(ConfigMap::default());
        let text = error(of_config_map(Some(&map), form(&wanted)));
        assert_eq!(text, "configmap references non-existent config key: x");
        let text = error(of_secret(Some(&Arc::default()), form(&wanted)));
        assert_eq!(text, "references non-existent secret key: x");
        let optional = Form { optional: true, ..form(&wanted) };
        assert_eq!(of_config_map(None, optional).expect("nothing").len(), 0);
        assert_eq!(of_secret(None, Form { optional: true, ..form(&[]) }).expect("nothing").len(), 0);
        for path in ["../x", "/x", "..data/x"] {
            let unsafe_path = items(json!([{"key": "x", "path": path}]));
            let map = config_map(json!({"data": {"x": ""}}));
            assert!(error(of_config_map(Some(&map), form(&unsafe_path))).starts_with("invalid path"), "{path}");
        }
        let unsafe_key = config_map(json!({"data": {"../../etc/cron.d/x": ""}}));
        assert!(error(of_config_map(Some(&unsafe_key), form(&[]))).starts_with("invalid path"));
    }

    #[test]
    fn downward_api_files() {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p", "labels": {"a": "1"}},
            "spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": "250m"}}}]}}))
        .expect("a pod");
        let allocatable = BTreeMap::from([("memory".to_owned(), Amount::bytes(1 << 30))]);
        let files: Vec<DownwardAPIVolumeFile> = serde_json::from_value(json!([
            {"path": "name", "fieldRef": {"fieldPath": "metadata.name"}},
            {"path": "labels", "mode": 288, "fieldRef": {"fieldPath": "metadata.labels"}},
            {"path": "r/cpu", "resourceFieldRef": {"containerName": "c", "resource": "requests.cpu", "divisor": "1m"}},
            {"path": "r/memory", "resourceFieldRef": {"containerName": "c", "resource": "limits.memory", "divisor": "1Mi"}},
        ]))
        .expect("files");
        let downward = Downward::new(&pod, &allocatable);
        let payload = downward.files(&files, 0o644).expect("files");
        assert_eq!(shown(&payload), ["labels 440 a=\"1\"", "name 644 p", "r/cpu 644 250", "r/memory 644 1024"]);
        let wrong: Vec<DownwardAPIVolumeFile> = serde_json::from_value(json!([
            {"path": "a", "fieldRef": {"fieldPath": "spec.nodeName"}},
            {"path": "b", "resourceFieldRef": {"containerName": "x", "resource": "limits.cpu"}},
        ]))
        .expect("files");
        let error = downward.files(&wrong, 0o644).expect_err("refused").to_string();
        assert_eq!(error, "[unsupported fieldPath: spec.nodeName, container x not found]");
    }
}
