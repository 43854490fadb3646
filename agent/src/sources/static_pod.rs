//! What makes a pod from a file or URL a static pod: UID, name, namespace, node, annotations, toleration, phase.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::Toleration;

use super::adoption::Adoptions;
use super::hash::Fnv128;
use crate::model::ConfigSource;

/// `kubernetes.io/config.hash`: the UID of the static pod's content.
pub const CONFIG_HASH: &str = "kubernetes.io/config.hash";
/// `kubernetes.io/config.source`: the source's name.
pub const CONFIG_SOURCE: &str = "kubernetes.io/config.source";
/// `kubernetes.io/config.seen`: when this agent first saw the pod.
pub const CONFIG_SEEN: &str = "kubernetes.io/config.seen";
/// `kubernetes.io/config.mirror`: marks the API copy of a static pod.
pub const CONFIG_MIRROR: &str = "kubernetes.io/config.mirror";

/// Where a manifest comes from and where its pods shall run.
#[derive(Clone, Copy, Debug)]
pub struct Origin<'a> {
    /// File or http.
    pub source: ConfigSource,
    /// The file's path or the URL; part of the UID.
    pub location: &'a str,
    /// This node.
    pub node_name: &'a str,
    /// Feature gate PreventStaticPodAPIReferences.
    pub prevent_api_references: bool,
    /// Pods that run already, with the manifest's last change in nanoseconds since the Unix epoch; `None`: since the agent was
    /// started.
    pub adoptions: Option<(&'a Adoptions, Option<i64>)>,
}

/// Completes a pod (with API defaults applied). The error is a field's path and what is wrong with it.
///
/// # Errors
/// Path of the field and what is wrong with it.
pub fn establish(pod: &mut Pod, origin: &Origin<'_>) -> Result<(), (&'static str, String)> {
    let Some(name) = pod.metadata.name.clone().filter(|name| !name.is_empty()) else {
        return Err(("metadata.name", "Required value: name is needed for the pod".to_owned()));
    };
    // What was copied from the API would pass for the API's copy of a static pod, and never run.
    if pod.metadata.annotations.as_ref().is_some_and(|a| a.contains_key(CONFIG_MIRROR)) {
        let message = format!("Forbidden: {CONFIG_MIRROR} marks the API's copy of a static pod");
        return Err(("metadata.annotations", message));
    }
    let given = pod.metadata.uid.clone().filter(|uid| !uid.is_empty());
    let content = match given {
        Some(_) => String::new(),
        None => content_uid(pod, origin).map_err(|message| ("metadata", message))?,
    };
    pod.metadata.name = Some(format!("{name}-{}", origin.node_name.to_lowercase()));
    if pod.metadata.namespace.as_deref().unwrap_or_default().is_empty() {
        pod.metadata.namespace = Some("default".to_owned());
    }
    let adopted = |content: &str| origin.adoptions.and_then(|(known, changed)| known.uid_of(pod, content, changed));
    let uid = given.or_else(|| adopted(&content)).unwrap_or(content);
    let annotations = pod.metadata.annotations.get_or_insert_default();
    annotations.insert(CONFIG_HASH.to_owned(), uid.clone());
    annotations.insert(CONFIG_SOURCE.to_owned(), origin.source.as_str().to_owned());
    pod.metadata.uid = Some(uid);

    let spec = pod.spec.get_or_insert_default();
    spec.node_name = Some(origin.node_name.to_owned());
    if origin.source == ConfigSource::File {
        tolerate_no_execute(spec.tolerations.get_or_insert_default());
    }
    pod.status.get_or_insert_default().phase = Some("Pending".to_owned());
    Ok(())
}

/// 128-bit FNV-1a over the pod as the API would write it in JSON, then host and location. Equal content at an equal
/// place gives an equal UID, whatever the spelling; another agent's UID for it differs.
fn content_uid(pod: &Pod, origin: &Origin<'_>) -> Result<String, String> {
    let mut hash = Fnv128::default();
    serde_json::to_writer(&mut hash, pod).map_err(|error| format!("Invalid value: cannot be written: {error}"))?;
    if origin.source == ConfigSource::File {
        hash.update(format!("host:{}", origin.node_name).as_bytes());
        hash.update(format!("file:{}", origin.location).as_bytes());
    } else {
        hash.update(format!("url:{}", origin.location).as_bytes());
    }
    Ok(hash.to_string())
}

/// Static pods stay when the node gets a NoExecute taint.
fn tolerate_no_execute(tolerations: &mut Vec<Toleration>) {
    let wanted = Toleration {
        operator: Some("Exists".to_owned()),
        effect: Some("NoExecute".to_owned()),
        ..Toleration::default()
    };
    let empty = |text: &Option<String>| text.as_deref().unwrap_or_default().is_empty();
    let same =
        |t: &Toleration| empty(&t.key) && empty(&t.value) && t.operator == wanted.operator && t.effect == wanted.effect;
    match tolerations.iter().position(same) {
        Some(index) => tolerations[index] = wanted,
        None => tolerations.push(wanted),
    }
}
