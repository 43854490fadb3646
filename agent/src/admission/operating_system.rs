//! Pods for another operating system (`spec.os.name`, KEP-2802, and the label `kubernetes.io/os`). Pure.

use super::Decision;
use super::Input;

const OS: &str = "linux";
const OS_LABEL: &str = "kubernetes.io/os";

pub(super) fn check(input: Input<'_>) -> Decision {
    let labels = input.pod.metadata.labels.as_ref();
    if labels.and_then(|labels| labels.get(OS_LABEL)).is_some_and(|os| os != OS) {
        let message = "Failed to admit pod as the `kubernetes.io/os` label doesn't match node label";
        return Decision::reject("PodOSSelectorNodeLabelDoesNotMatch", message);
    }
    let os = input.pod.spec.as_ref().and_then(|spec| spec.os.as_ref());
    if os.is_some_and(|os| os.name != OS) {
        return Decision::reject("PodOSNotSupported", "Failed to admit pod as the OS field doesn't match node OS");
    }
    Decision::Admit
}
