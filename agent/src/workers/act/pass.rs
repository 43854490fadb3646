//! What one pass over a pod works with.

use std::sync::Arc;

use super::PodError;
use super::TerminationOptions;
use crate::model::Pod;
use crate::model::PodRef;
use crate::model::PodSnapshot;
use crate::model::QosClass;
use crate::model::qos;
use crate::workers::generate::GenerateError;
use crate::workers::generate::names;

/// The pod of a pass and what follows from it, computed once when the pass has its snapshot.
#[derive(Clone, Debug)]
pub struct PassContext {
    /// The desired pod.
    pub pod: Pod,
    /// Its identity.
    pub pod_ref: PodRef,
    /// What the runtime reported, sampled after the worker's last action.
    pub snapshot: Arc<PodSnapshot>,
    /// QoS class, which also determines the pod's cgroup; the error says which quantity cannot be parsed.
    pub qos_class: Result<QosClass, GenerateError>,
    /// Effective grace period, once the pod's termination is requested.
    pub termination_options: TerminationOptions,
}

impl PassContext {
    /// The context of a pass over `pod` as of `snapshot`.
    pub fn new(pod_ref: PodRef, pod: Pod, snapshot: Arc<PodSnapshot>, termination_options: TerminationOptions) -> Self {
        let qos_class = qos::qos_class(&pod).map_err(GenerateError::from);
        Self { pod, pod_ref, snapshot, qos_class, termination_options }
    }

    /// The same pass with a newer snapshot.
    #[must_use]
    pub fn with_snapshot(&self, snapshot: Arc<PodSnapshot>) -> Self {
        Self { snapshot, ..self.clone() }
    }

    /// The pod's UID.
    pub fn uid(&self) -> &str {
        self.pod_ref.uid.as_str()
    }

    /// The pod as upstream's messages name it.
    pub fn describe(&self) -> String {
        names::describe(&self.pod)
    }

    /// The class of the pod's cgroup.
    ///
    /// # Errors
    /// A quantity of the spec cannot be parsed.
    pub fn cgroup_class(&self) -> Result<QosClass, PodError> {
        self.qos_class.clone().map_err(|source| PodError::InvalidSpec { source })
    }
}
