//! What pods of another kubelet on this node have that the agent cannot give them again.

use std::fs;
use std::path::Path;

use super::Finding;
use crate::node;

/// Where a kubelet has the volumes of CSI drivers, in a pod's directory: with files, and raw devices.
const CSI: [&str; 2] = ["volumes/kubernetes.io~csi", "volumeDevices/kubernetes.io~csi"];

/// By the files in the root directory; none where there are no such pods.
pub(super) fn findings(root: &Path) -> Vec<Finding> {
    csi_volumes(root).into_iter().chain(devices(root)).collect()
}

fn csi_volumes(root: &Path) -> Option<Finding> {
    let has_entries = |dir: &Path| fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some());
    let pods = fs::read_dir(root.join("pods")).into_iter().flatten().flatten();
    let count = pods.filter(|pod| CSI.iter().any(|dir| has_entries(&pod.path().join(dir)))).count();
    let found = format!("mounted for pods in {}: {count}", root.join("pods").display());
    let cost = "their containers are not started again, and deleted pods stay Terminating: drain them first";
    (count > 0).then(|| Finding::lack("CSI volumes", found, cost))
}

fn devices(root: &Path) -> Option<Finding> {
    let names: Vec<String> = node::device_resources(root).into_iter().collect();
    let cost = "the node offers none of them, and pods that have some run on unmanaged: drain them first";
    (!names.is_empty()).then(|| Finding::lack("device plugins", format!("of a kubelet: {}", names.join(", ")), cost))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_of_csi_drivers_and_devices_of_another_kubelet_are_named() {
        let root = tempfile::tempdir().expect("a folder");
        for dir in ["pods/a/volumes/kubernetes.io~nfs/v", "pods/b/volumes/kubernetes.io~csi", "device-plugins"] {
            fs::create_dir_all(root.path().join(dir)).expect("folders");
        }
        assert!(findings(root.path()).is_empty(), "the last one of the driver is unmounted");
        for dir in ["pods/b/volumes/kubernetes.io~csi/pv", "pods/c/volumeDevices/kubernetes.io~csi/pv"] {
            fs::create_dir_all(root.path().join(dir)).expect("folders");
        }
        let checkpoint = r#"{"Data":{"RegisteredDevices":{"example.com/gpu":[],"example.com/nic":[]}},"Checksum":1}"#;
        fs::write(root.path().join("device-plugins/kubelet_internal_checkpoint"), checkpoint).expect("a file");
        let found = findings(root.path());
        let shown: Vec<(&str, &str)> = found.iter().map(|one| (one.topic.as_str(), one.found.as_str())).collect();
        let volumes = format!("mounted for pods in {}: 2", root.path().join("pods").display());
        let devices = "of a kubelet: example.com/gpu, example.com/nic";
        assert_eq!(shown, [("CSI volumes", volumes.as_str()), ("device plugins", devices)]);
        assert!(found.iter().all(|one| one.cost.is_some() && !one.fatal), "{found:?}");
        assert!(findings(&root.path().join("none")).is_empty());
    }
}
