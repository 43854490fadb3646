//! Names on the runtime and on disk: labels, annotations, log files, directories of a pod. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Pod;

use crate::model::PodRef;
use crate::model::pod_ref;
use crate::model::runtime_keys;
use crate::model::spec;

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Longest file name on the usual file systems.
const MAX_FILE_NAME: usize = 255;

/// `metadata.name`, empty if absent.
pub fn pod_name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

/// `metadata.namespace`, empty if absent.
pub fn pod_namespace(pod: &Pod) -> &str {
    pod.metadata.namespace.as_deref().unwrap_or_default()
}

/// `metadata.uid`, empty if absent.
pub fn pod_uid(pod: &Pod) -> &str {
    pod.metadata.uid.as_deref().unwrap_or_default()
}

/// The pod as messages name it: `name_namespace(uid)`.
pub fn describe(pod: &Pod) -> String {
    format!("{}_{}({})", pod_name(pod), pod_namespace(pod), pod_uid(pod))
}

/// The three labels every sandbox and container of a pod carries.
fn identity_labels(pod: &Pod) -> BTreeMap<String, String> {
    BTreeMap::from([
        (runtime_keys::POD_NAME.to_owned(), pod_name(pod).to_owned()),
        (runtime_keys::POD_NAMESPACE.to_owned(), pod_namespace(pod).to_owned()),
        (runtime_keys::POD_UID.to_owned(), pod_uid(pod).to_owned()),
    ])
}

/// Labels of a sandbox: the pod's own and its identity, which takes precedence.
pub fn sandbox_labels(pod: &Pod) -> BTreeMap<String, String> {
    let mut labels = pod.metadata.labels.clone().unwrap_or_default();
    labels.extend(identity_labels(pod));
    labels
}

/// Annotations of a sandbox: the pod's own. A static pod has one more that identifies the agent that derived its UID.
pub fn sandbox_annotations(pod: &Pod) -> BTreeMap<String, String> {
    let mut annotations = pod.metadata.annotations.clone().unwrap_or_default();
    if spec::is_static(pod) {
        annotations.insert(runtime_keys::STATIC_UID.to_owned(), format!("{VERSION}/{}", pod_uid(pod)));
    }
    annotations
}

/// The UID in the mark of a static pod's sandbox, if this version of the agent has made it: another one may derive other UIDs
/// from the same manifest.
pub fn static_uid_of_mark(annotations: &BTreeMap<String, String>) -> Option<&str> {
    annotations.get(runtime_keys::STATIC_UID)?.strip_prefix(VERSION)?.strip_prefix('/')
}

/// Labels of a container.
pub fn container_labels(pod: &Pod, container: &str) -> BTreeMap<String, String> {
    let mut labels = identity_labels(pod);
    labels.insert(runtime_keys::CONTAINER_NAME.to_owned(), container.to_owned());
    labels
}

/// Annotations of a container: what the agent reads back after a restart.
pub fn container_annotations(pod: &Pod, container: &Container, hash: u64, restarts: u32) -> BTreeMap<String, String> {
    let mut annotations = BTreeMap::from([
        (runtime_keys::HASH.to_owned(), format!("{hash:x}")),
        (runtime_keys::RESTART_COUNT.to_owned(), restarts.to_string()),
        (runtime_keys::TERMINATION_PATH.to_owned(), container.termination_message_path.clone().unwrap_or_default()),
        (runtime_keys::TERMINATION_POLICY.to_owned(), container.termination_message_policy.clone().unwrap_or_default()),
    ]);
    let mut set = |key: &str, value: Option<String>| {
        if let Some(value) = value {
            annotations.insert(key.to_owned(), value);
        }
    };
    set(runtime_keys::DELETION_GRACE, pod.metadata.deletion_grace_period_seconds.map(|s| s.to_string()));
    let spec_grace = pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds);
    set(runtime_keys::TERMINATION_GRACE, spec_grace.map(|s| s.to_string()));
    let pre_stop = container.lifecycle.as_ref().and_then(|lifecycle| lifecycle.pre_stop.as_ref());
    set(runtime_keys::PRE_STOP, pre_stop.and_then(|handler| serde_json::to_string(handler).ok()));
    let ports = container.ports.as_ref().filter(|ports| !ports.is_empty());
    set(runtime_keys::PORTS, ports.and_then(|ports| serde_json::to_string(ports).ok()));
    annotations
}

/// Name of the pod's directory below the pod logs directory.
pub fn log_dir_name(pod: &Pod) -> String {
    pod_ref(pod).log_dir_name()
}

/// The UID in a name made by [`log_dir_name`].
pub fn uid_of_log_dir(name: &str) -> Option<&str> {
    name.rsplit_once('_').map(|(_, uid)| uid)
}

/// A container's log file relative to its pod's log directory.
pub fn log_path(container: &str, restarts: u32) -> String {
    format!("{container}/{restarts}.log")
}

/// Number of the next instance by the log files of earlier ones: one more than the highest `N` of the
/// files called `N.log` or `N.log.<something>`; `None` if there is none.
pub fn restarts_by_logs<'a>(files: impl IntoIterator<Item = &'a str>) -> Option<u32> {
    files
        .into_iter()
        .filter_map(|name| name.split_once(".log").and_then(|(number, _)| number.parse::<u32>().ok()))
        .max()
        .map(|highest| highest.saturating_add(1))
}

/// Name of the link in the node's flat folder of container logs. The end of one that is too long for a file
/// is cut off, as by a kubelet: a log gets no second link when a node changes from one agent to the other.
pub fn log_link_name(pod: &PodRef, container: &str, id: &str) -> String {
    const SUFFIX: &str = ".log";
    let mut name = format!("{}_{container}-{id}", pod.full_name());
    name.truncate(name.floor_char_boundary(MAX_FILE_NAME - SUFFIX.len()));
    name + SUFFIX
}

/// The container id, or its beginning, in a name made by [`log_link_name`].
pub fn id_of_log_link(name: &str) -> Option<&str> {
    name.strip_suffix(".log")?.rsplit_once('-').map(|(_, id)| id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod() -> Pod {
        serde_json::from_value(serde_json::json!({
            "metadata": {"name": "web-node1", "namespace": "default", "uid": "u1", "labels": {"app": "web",
                "io.kubernetes.pod.uid": "forged"}},
            "spec": {"terminationGracePeriodSeconds": 7, "containers": [{"name": "c", "image": "i",
                "ports": [{"containerPort": 80, "protocol": "TCP"}],
                "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File"}]},
        }))
        .expect("a pod")
    }

    #[test]
    fn the_identity_wins_over_the_pods_own_labels() {
        let labels = sandbox_labels(&pod());
        assert_eq!(labels["io.kubernetes.pod.uid"], "u1");
        assert_eq!(labels["app"], "web");
        let labels = container_labels(&pod(), "c");
        assert_eq!(labels["io.kubernetes.container.name"], "c");
        assert!(!labels.contains_key("app"));
    }

    #[test]
    fn sandboxes_of_static_pods_are_marked() {
        let annotated = |source: &str| {
            let mut pod = pod();
            pod.metadata.annotations = Some([("kubernetes.io/config.source".to_owned(), source.to_owned())].into());
            sandbox_annotations(&pod)
        };
        assert_eq!(static_uid_of_mark(&annotated("file")), Some("u1"));
        assert_eq!(annotated("api").get(runtime_keys::STATIC_UID), None);
        let of_another = BTreeMap::from([(runtime_keys::STATIC_UID.to_owned(), "0.0.1/u1".to_owned())]);
        assert_eq!(static_uid_of_mark(&of_another), None, "it may derive UIDs differently");
        assert_eq!((annotated("file").len(), annotated("api").len()), (2, 1), "with the pod's own");
    }

    #[test]
    fn annotations_hold_what_the_agent_reads_back() {
        let pod = pod();
        let container = &pod.spec.as_ref().expect("a spec").containers[0];
        let annotations = container_annotations(&pod, container, 0xbeef, 3);
        let expected = [
            ("io.kubernetes.container.hash", "beef"),
            ("io.kubernetes.container.ports", r#"[{"containerPort":80,"protocol":"TCP"}]"#),
            ("io.kubernetes.container.restartCount", "3"),
            ("io.kubernetes.container.terminationMessagePath", "/dev/termination-log"),
            ("io.kubernetes.container.terminationMessagePolicy", "File"),
            ("io.kubernetes.pod.terminationGracePeriod", "7"),
        ];
        let expected: BTreeMap<String, String> = expected.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        assert_eq!(annotations, expected);
    }

    #[test]
    fn log_names_round_trip() {
        let pod = pod();
        assert_eq!(log_dir_name(&pod), "default_web-node1_u1");
        assert_eq!(uid_of_log_dir("default_web-node1_u1"), Some("u1"));
        assert_eq!(log_path("c", 4), "c/4.log");
        let name = log_link_name(&pod_ref(&pod), "c", "0123abc");
        assert_eq!(name, "web-node1_default_c-0123abc.log");
        assert_eq!(id_of_log_link(&name), Some("0123abc"));
        let (container, id) = ("x".repeat(205), "f".repeat(27));
        let long = log_link_name(&pod_ref(&pod), &container, &"f".repeat(64));
        assert_eq!(long, format!("web-node1_default_{container}-{id}.log"), "255 bytes, as the kubelet's");
        assert_eq!(id_of_log_link(&long), Some(id.as_str()));
    }

    #[test]
    fn the_restart_count_follows_the_log_files() {
        assert_eq!(restarts_by_logs([]), None);
        assert_eq!(restarts_by_logs(["0.log"]), Some(1));
        assert_eq!(restarts_by_logs(["2.log", "10.log.20260101-000000.gz", "x.log", "9"]), Some(11));
        assert_eq!(restarts_by_logs(["other"]), None);
    }
}
