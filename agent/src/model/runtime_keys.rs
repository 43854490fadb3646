//! Keys of the labels and annotations of containers and sandboxes on the runtime.

/// Label: the pod's name.
pub const POD_NAME: &str = "io.kubernetes.pod.name";
/// Label: the pod's namespace.
pub const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
/// Label: the pod's UID.
pub const POD_UID: &str = "io.kubernetes.pod.uid";
/// Label: the container's name in the spec.
pub const CONTAINER_NAME: &str = "io.kubernetes.container.name";
/// Annotation of this agent's sandboxes of static pods: the UID that it derived from the manifest, or adopted. Another
/// kubelet's sandboxes have none.
pub const STATIC_UID: &str = "keblet.dev/static-pod-uid";
/// Annotation: hash of the container's definition, hexadecimal.
pub const HASH: &str = "io.kubernetes.container.hash";
/// Annotation: how often the container was restarted.
pub const RESTART_COUNT: &str = "io.kubernetes.container.restartCount";
/// Annotation: path of the termination message inside the container.
pub const TERMINATION_PATH: &str = "io.kubernetes.container.terminationMessagePath";
/// Annotation: `File` or `FallbackToLogsOnError`.
pub const TERMINATION_POLICY: &str = "io.kubernetes.container.terminationMessagePolicy";
/// Annotation: the preStop handler, JSON.
pub const PRE_STOP: &str = "io.kubernetes.container.preStopHandler";
/// Annotation: the container's ports, JSON.
pub const PORTS: &str = "io.kubernetes.container.ports";
/// Annotation: `metadata.deletionGracePeriodSeconds` of the pod.
pub const DELETION_GRACE: &str = "io.kubernetes.pod.deletionGracePeriod";
/// Annotation: `spec.terminationGracePeriodSeconds` of the pod.
pub const TERMINATION_GRACE: &str = "io.kubernetes.pod.terminationGracePeriod";
