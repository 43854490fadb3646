//! Files made from one object or from the pod itself. Pure.

use std::collections::BTreeMap;

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

/// The files of a ConfigMap; `None`: it does not exist and is optional.
pub(super) fn of_config_map(object: Option<&ConfigMap>, form: Form<'_>) -> Result<Payload, VolumeError> {
    let text = object.iter().flat_map(|object| object.data.iter().flatten());
    let binary = object.iter().flat_map(|object| object.binary_data.iter().flatten());
    let text = text.map(|(key, value)| (key.as_str(), value.as_bytes()));
    let all = text.chain(binary.map(|(key, value)| (key.as_str(), value.0.as_slice())));
    chosen(all.collect(), form, "configmap references non-existent config key")
}

/// The files of a Secret; `None`: it does not exist and is optional.
pub(super) fn of_secret(object: Option<&Secret>, form: Form<'_>) -> Result<Payload, VolumeError> {
    let all = object.iter().flat_map(|object| object.data.iter().flatten());
    let all = all.map(|(key, value)| (key.as_str(), value.0.as_slice()));
    chosen(all.collect(), form, "references non-existent secret key")
}

fn chosen(data: BTreeMap<&str, &[u8]>, form: Form<'_>, missing: &'static str) -> Result<Payload, VolumeError> {
    let mut payload = Payload::default();
    let file = |data: &[u8], mode| File { data: data.to_owned(), mode, owner: None };
    if form.items.is_empty() {
        for (key, value) in data {
            payload.put(key, file(value, form.mode))?;
        }
        return Ok(payload);
    }
    for item in form.items {
        let Some(value) = data.get(item.key.as_str()) else {
            if form.optional {
                continue;
            }
            return Err(VolumeError::MissingKey { what: missing, key: item.key.clone() });
        };
        payload.put(&item.path, file(value, item.mode.map_or(form.mode, mode)))?;
    }
    Ok(payload)
}

/// The files of a downwardAPI volume or source.
pub(super) fn of_downward_api(
    pod: &Pod,
    items: &[DownwardAPIVolumeFile],
    default_mode: u32,
    allocatable: &BTreeMap<String, Amount>,
) -> Result<Payload, VolumeError> {
    let (mut payload, mut failed) = (Payload::default(), Vec::new());
    for item in items {
        match value(pod, item, allocatable) {
            Ok(text) => {
                let mode = item.mode.map_or(default_mode, mode);
                payload.put(&item.path, File { data: text.into_bytes(), mode, owner: None })?;
            }
            Err(error) => failed.push(error.into()),
        }
    }
    VolumeError::all_of(failed).map_or(Ok(payload), Err)
}

fn value(
    pod: &Pod,
    item: &DownwardAPIVolumeFile,
    allocatable: &BTreeMap<String, Amount>,
) -> Result<String, DownwardError> {
    if let Some(field) = &item.field_ref {
        return downward::metadata_field(pod, &field.field_path);
    }
    match &item.resource_field_ref {
        Some(resource) => downward::resource_field(pod, None, resource, allocatable),
        None => Ok(String::new()),
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

    fn shown(payload: &Payload) -> Vec<String> {
        let show =
            |(path, file): (&str, &File)| format!("{path} {:o} {}", file.mode, String::from_utf8_lossy(&file.data));
        payload.files().map(show).collect()
    }

    #[test]
    fn keys_become_files() {
        let map: ConfigMap =
            serde_json::from_value(json!({"data": {"a": "1", "b.conf": "two"}, "binaryData": {"c": "AAEC"}}))
                .expect("a ConfigMap");
        let all = of_config_map(Some(&map), form(&[])).expect("files");
        assert_eq!(shown(&all), ["a 644 1", "b.conf 644 two", "c 644 \0\u{1}\u{2}"]);
        let some = items(json!([{"key": "b.conf", "path": "etc/b"}, {"key": "c", "path": "c", "mode": 256}]));
        let chosen = of_config_map(Some(&map), form(&some)).expect("files");
        assert_eq!(shown(&chosen), ["c 400 \0\u{1}\u{2}", "etc/b 644 two"]);
        let secret: Secret = serde_json::from_value(json!({"data": {"k": "djE="}})).expect("a Secret");
        assert_eq!(shown(&of_secret(Some(&secret), form(&[])).expect("files")), ["k 644 v1"]);
    }

    #[test]
    fn missing_objects_and_keys() {
        let wanted = items(json!([{"key": "x", "path": "x"}]));
        let error = |result: Result<Payload, VolumeError>| result.expect_err("missing").to_string();
        let map = ConfigMap::default();
        let text = error(of_config_map(Some(&map), form(&wanted)));
        assert_eq!(text, "configmap references non-existent config key: x");
        let text = error(of_secret(Some(&Secret::default()), form(&wanted)));
        assert_eq!(text, "references non-existent secret key: x");
        let optional = Form { optional: true, ..form(&wanted) };
        assert_eq!(of_config_map(None, optional).expect("nothing").len(), 0);
        assert_eq!(of_secret(None, Form { optional: true, ..form(&[]) }).expect("nothing").len(), 0);
        for path in ["../x", "/x", "..data/x"] {
            let unsafe_path = items(json!([{"key": "x", "path": path}]));
            let map: ConfigMap = serde_json::from_value(json!({"data": {"x": ""}})).expect("a ConfigMap");
            assert!(error(of_config_map(Some(&map), form(&unsafe_path))).starts_with("invalid path"), "{path}");
        }
        let unsafe_key: ConfigMap =
            serde_json::from_value(json!({"data": {"../../etc/cron.d/x": ""}})).expect("a ConfigMap");
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
        let payload = of_downward_api(&pod, &files, 0o644, &allocatable).expect("files");
        assert_eq!(shown(&payload), ["labels 440 a=\"1\"", "name 644 p", "r/cpu 644 250", "r/memory 644 1024"]);
        let wrong: Vec<DownwardAPIVolumeFile> = serde_json::from_value(json!([
            {"path": "a", "fieldRef": {"fieldPath": "spec.nodeName"}},
            {"path": "b", "resourceFieldRef": {"containerName": "x", "resource": "limits.cpu"}},
        ]))
        .expect("files");
        let error = of_downward_api(&pod, &wrong, 0o644, &allocatable).expect_err("refused").to_string();
        assert_eq!(error, "[unsupported fieldPath: spec.nodeName, container x not found]");
    }
}
