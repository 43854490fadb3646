//! Volume mounts and block devices of a container.

use std::collections::HashSet;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::VolumeDevice;
use k8s_openapi::api::core::v1::VolumeMount;

use super::super::field::Findings;
use super::super::field::Path;
use super::container::Volumes;
use super::text;
use super::volume::VolumeKind;

pub(super) fn check_all(container: &Container, volumes: &Volumes<'_>, path: &Path, findings: &mut Findings) {
    let privileged = container.security_context.as_ref().and_then(|c| c.privileged) == Some(true);
    let mounts = container.volume_mounts.as_deref().unwrap_or_default();
    let devices = container.volume_devices.as_deref().unwrap_or_default();
    let of_devices = Taken::of(devices.iter().map(|device| (&*device.name, &*device.device_path)), "volumeDevices");
    let mut places = HashSet::new();
    for (i, mount) in mounts.iter().enumerate() {
        let path = path.child("volumeMounts").index(i);
        name(&mount.name, volumes, &path, findings);
        place(&mount.mount_path, "mountPath", &mut places, &path, findings);
        of_devices.check(&mount.name, (&mount.mount_path, "mountPath"), &path, findings);
        check(mount, privileged, &path, findings);
    }
    let of_mounts = Taken::of(mounts.iter().map(|mount| (&*mount.name, &*mount.mount_path)), "volumeMounts");
    check_devices(devices, volumes, &of_mounts, &path.child("volumeDevices"), findings);
}

/// Block devices: each volume once, and not as files too.
fn check_devices(
    devices: &[VolumeDevice],
    volumes: &Volumes<'_>,
    of_mounts: &Taken<'_>,
    path: &Path,
    findings: &mut Findings,
) {
    let (mut names, mut places) = (HashSet::new(), HashSet::new());
    for (i, device) in devices.iter().enumerate() {
        let (path, of) = (path.index(i), device.name.as_str());
        name(of, volumes, &path, findings);
        if !of.is_empty() && !names.insert(of) {
            findings.invalid(&path.child("name"), of, "must be unique");
        }
        if volumes.get(of).is_some_and(|&kind| kind != VolumeKind::Claim) {
            let message = "can only use volume source type of PersistentVolumeClaim or Ephemeral for block mode";
            findings.invalid(&path.child("name"), of, message);
        }
        place(&device.device_path, "devicePath", &mut places, &path, findings);
        if device.device_path.split('/').any(|part| part == "..") {
            findings.invalid(&path.child("devicePath"), &device.device_path, "can not contain backsteps ('..')");
        }
        of_mounts.check(of, (&device.device_path, "devicePath"), &path, findings);
    }
}

/// Names and paths of the other list, which this one must not have.
struct Taken<'a> {
    names: HashSet<&'a str>,
    places: HashSet<&'a str>,
    list: &'static str,
}

impl<'a> Taken<'a> {
    fn of(entries: impl Iterator<Item = (&'a str, &'a str)>, list: &'static str) -> Self {
        let (names, places) = entries.unzip();
        Self { names, places, list }
    }

    fn check(&self, name: &str, (place, field): (&str, &str), path: &Path, findings: &mut Findings) {
        if self.names.contains(name) {
            findings.invalid(&path.child("name"), name, &format!("must not already exist in {}", self.list));
        }
        if self.places.contains(place) {
            let message = format!("must not already exist as a path in {}", self.list);
            findings.invalid(&path.child(field), place, &message);
        }
    }
}

fn name(name: &str, volumes: &Volumes<'_>, path: &Path, findings: &mut Findings) {
    if name.is_empty() {
        findings.required(&path.child("name"), "");
    } else if !volumes.contains_key(name) {
        findings.not_found(&path.child("name"), name);
    }
}

fn place<'a>(place: &'a str, field: &str, taken: &mut HashSet<&'a str>, path: &Path, findings: &mut Findings) {
    let path = path.child(field);
    if place.is_empty() {
        findings.required(&path, "");
    } else if !taken.insert(place) {
        findings.invalid(&path, place, "must be unique");
    }
    super::no_control(place, &path, findings);
}

fn check(mount: &VolumeMount, privileged: bool, path: &Path, findings: &mut Findings) {
    let sub_path = text(&mount.sub_path);
    let expression = text(&mount.sub_path_expr);
    super::local_path(sub_path, &path.child("subPath"), findings);
    super::local_path(expression, &path.child("subPathExpr"), findings);
    if !sub_path.is_empty() && !expression.is_empty() {
        let path = path.child("subPathExpr");
        findings.invalid(&path, expression, "subPathExpr and subPath are mutually exclusive");
    }
    let propagation = mount.mount_propagation.as_deref();
    if let Some(propagation) = propagation {
        let path = path.child("mountPropagation");
        findings.one_of(&path, propagation, &["Bidirectional", "HostToContainer", "None"]);
        if propagation == "Bidirectional" && !privileged {
            findings.forbidden(&path, "Bidirectional mount propagation is available only to privileged containers");
        }
    }
    if let Some(recursive) = mount.recursive_read_only.as_deref() {
        let path = path.child("recursiveReadOnly");
        findings.one_of(&path, recursive, &["Disabled", "Enabled", "IfPossible"]);
        if recursive != "Disabled" && mount.read_only != Some(true) {
            findings.forbidden(&path, "may only be specified when readOnly is true");
        }
        if recursive != "Disabled" && !matches!(propagation, None | Some("None")) {
            findings.forbidden(&path, "may only be specified when mountPropagation is None or not specified");
        }
    }
}
