//! The volumes of a pod's spec by name, and how its containers use them. A pod may have thousands of both: their properties
//! are looked up in sets that are built once.

use std::collections::HashMap;
use std::collections::HashSet;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::Volume;
use k8s_openapi::api::core::v1::VolumeDevice;
use k8s_openapi::api::core::v1::VolumeMount;

use super::api::NestedMounts;
use super::uid_of;
use crate::model::spec;

/// A pod with its volumes by name.
#[derive(Clone, Debug)]
pub struct PodVolumes<'a> {
    uid: &'a str,
    by_name: HashMap<&'a str, &'a Volume>,
}

impl<'a> PodVolumes<'a> {
    /// Those of the spec; of several with one name the first.
    pub fn of(pod: &'a Pod) -> Self {
        let mut by_name = HashMap::new();
        for volume in volumes(pod) {
            by_name.entry(volume.name.as_str()).or_insert(volume);
        }
        Self { uid: uid_of(pod), by_name }
    }

    /// The volume of this name.
    pub fn get(&self, name: &str) -> Option<&'a Volume> {
        self.by_name.get(name).copied()
    }

    /// The pod's UID.
    pub(super) fn uid(&self) -> &'a str {
        self.uid
    }
}

/// How containers use the volumes of their pod.
#[derive(Debug)]
pub(super) struct ContainerUses {
    mounted: HashSet<String>,
    devices: HashSet<String>,
    /// Where they mount one volume inside another.
    pub(super) nested: NestedMounts,
}

impl ContainerUses {
    pub(super) fn of(pod: &Pod) -> Self {
        Self {
            mounted: mounted_names(pod).map(str::to_owned).collect(),
            devices: device_names(pod).map(str::to_owned).collect(),
            nested: NestedMounts::of(volume_mounts(pod)),
        }
    }

    /// Whether some container mounts the volume, and whether some uses it as a device.
    pub(super) fn of_volume(&self, volume: &str) -> (bool, bool) {
        (self.mounted.contains(volume), self.devices.contains(volume))
    }
}

/// All volumes of the spec.
pub(super) fn volumes(pod: &Pod) -> impl Iterator<Item = &Volume> {
    pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten())
}

/// Volumes some container mounts, or uses as a device; others are not set up.
pub(super) fn mounted_volumes(pod: &Pod) -> impl Iterator<Item = &Volume> {
    let used: HashSet<&str> = mounted_names(pod).chain(device_names(pod)).collect();
    volumes(pod).filter(move |volume| used.contains(volume.name.as_str()))
}

fn mounted_names(pod: &Pod) -> impl Iterator<Item = &str> {
    volume_mounts(pod).flatten().map(|mount| mount.name.as_str())
}

fn device_names(pod: &Pod) -> impl Iterator<Item = &str> {
    volume_devices(pod).flatten().map(|device| device.name.as_str())
}

/// The `volumeMounts` of each container that has some.
fn volume_mounts(pod: &Pod) -> impl Iterator<Item = &[VolumeMount]> {
    let lasting = spec::lasting_containers(pod).map(|container| container.spec.volume_mounts.as_deref());
    let ephemeral = spec::ephemeral_containers(pod).iter().map(|container| container.volume_mounts.as_deref());
    lasting.chain(ephemeral).flatten()
}

/// The `volumeDevices` of each container that has some.
fn volume_devices(pod: &Pod) -> impl Iterator<Item = &[VolumeDevice]> {
    let lasting = spec::lasting_containers(pod).map(|container| container.spec.volume_devices.as_deref());
    let ephemeral = spec::ephemeral_containers(pod).iter().map(|container| container.volume_devices.as_deref());
    lasting.chain(ephemeral).flatten()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use k8s_openapi::api::core::v1::EmptyDirVolumeSource;
    use serde_json::json;

    use super::*;
    use crate::volumes::Volumes;

    fn names(pod: &Pod) -> Vec<&str> {
        mounted_volumes(pod).map(|volume| volume.name.as_str()).collect()
    }

    #[test]
    fn volumes_that_some_container_uses() {
        let mounts = |name: &str| json!([{"name": name, "mountPath": "/m"}]);
        let volumes = ["a", "b", "c", "d", "e", "f"].map(|name| json!({"name": name}));
        let pod: Pod = serde_json::from_value(json!({"spec": {
            "volumes": volumes,
            "initContainers": [{"name": "i", "volumeMounts": mounts("b")}],
            "containers": [
                {"name": "c", "volumeMounts": mounts("a"), "volumeDevices": [{"name": "a", "devicePath": "/dev/x"}]},
                {"name": "d", "volumeDevices": [{"name": "e", "devicePath": "/dev/x"}]},
                {"name": "none", "volumeMounts": mounts("missing")},
            ],
            "ephemeralContainers": [{"name": "e", "volumeMounts": mounts("d")}],
        }}))
        .expect("a pod");
        assert_eq!(names(&pod), ["a", "b", "d", "e"]);
        let uses = ContainerUses::of(&pod);
        let of_each = ["a", "b", "c", "d", "e"].map(|name| uses.of_volume(name));
        assert_eq!(of_each, [(true, true), (true, false), (false, false), (true, false), (false, true)]);
    }

    /// As many as an object of the API server has room for.
    #[test]
    fn thousands_of_volumes_are_found_by_name() {
        const COUNT: usize = 30_000;
        let volume =
            |name: String| Volume { name, empty_dir: Some(EmptyDirVolumeSource::default()), ..Volume::default() };
        let mount = |name: String| VolumeMount { mount_path: format!("/{name}"), name, ..VolumeMount::default() };
        let all = || (0..COUNT).map(|number| format!("v{number}"));
        let mut pod: Pod = serde_json::from_value(json!({"spec": {"containers": [{"name": "c"}]}})).expect("a pod");
        let spec = pod.spec.as_mut().expect("a spec");
        spec.volumes = Some(all().map(volume).collect());
        spec.containers[0].volume_mounts = Some(all().map(mount).collect());

        let volumes = Volumes::new(Path::new("/r"));
        assert_eq!(mounted_volumes(&pod).count(), COUNT);
        assert_eq!(volumes.plugins_wanted(&pod).count(), COUNT);
        assert!(volumes.groups(&pod).is_empty());
        let (of_pod, uses) = (PodVolumes::of(&pod), ContainerUses::of(&pod));
        for name in all() {
            assert_eq!(of_pod.get(&name).map(|volume| &volume.name), Some(&name));
            assert_eq!(uses.of_volume(&name), (true, false));
            assert!(!volumes.is_read_only(&of_pod, &name) && !volumes.is_relabelled(&of_pod, &name));
        }
    }

    #[test]
    fn of_volumes_with_one_name_the_first_counts() {
        let volumes = json!([{"name": "v", "emptyDir": {}}, {"name": "v", "hostPath": {"path": "/"}}]);
        let pod: Pod = serde_json::from_value(json!({"spec": {"containers": [], "volumes": volumes}})).expect("a pod");
        let volumes = PodVolumes::of(&pod);
        assert!(volumes.get("v").is_some_and(|volume| volume.empty_dir.is_some()) && volumes.get("none").is_none());
    }
}
