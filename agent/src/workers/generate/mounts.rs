//! CRI mounts and devices. Pure.

use std::path::Path;

use k8s_openapi::api::core::v1::Volume;
use k8s_openapi::api::core::v1::VolumeDevice;
use k8s_openapi::api::core::v1::VolumeMount;
use keblet_proto::cri::v1 as cri;

use super::GenerateError;
use crate::model::recursive_read_only;
use crate::model::spec;

/// Where the hosts file is mounted.
pub const HOSTS_FILE: &str = "/etc/hosts";

/// The host side of a volume mount.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct MountSource {
    /// Path on the node.
    pub host_path: String,
    /// The volume cannot be written, whatever the mount says.
    pub read_only: bool,
    /// The runtime is to relabel the files for the container (SELinux).
    pub selinux_relabel: bool,
}

/// One `volumeMounts` entry. `supports_recursive_read_only`: the runtime handler has the feature (KEP-3857).
///
/// # Errors
/// An unknown propagation; a recursive read-only mode that contradicts the mount's other fields, or that the runtime handler
/// lacks.
pub fn volume_mount(
    mount: &VolumeMount,
    source: MountSource,
    supports_recursive_read_only: bool,
) -> Result<cri::Mount, GenerateError> {
    let propagation = match mount.mount_propagation.as_deref() {
        None | Some("None") => cri::MountPropagation::PropagationPrivate,
        Some("HostToContainer") => cri::MountPropagation::PropagationHostToContainer,
        Some("Bidirectional") => cri::MountPropagation::PropagationBidirectional,
        Some(mode) => return Err(GenerateError::MountPropagation { mode: mode.to_owned() }),
    };
    let recursive_read_only = recursive_read_only(mount, supports_recursive_read_only)?;
    let path = &mount.mount_path;
    Ok(cri::Mount {
        container_path: if path.starts_with('/') { path.clone() } else { spec::absolute_path(path) },
        host_path: source.host_path,
        readonly: mount.read_only.unwrap_or(false) || source.read_only,
        selinux_relabel: source.selinux_relabel,
        propagation: propagation as i32,
        recursive_read_only,
        ..Default::default()
    })
}

/// True if the agent made the volume's files, so that the runtime may relabel them; false for `hostPath` and others.
pub fn is_relabelled(volume: &Volume) -> bool {
    volume.empty_dir.is_some()
        || volume.config_map.is_some()
        || volume.secret.is_some()
        || volume.projected.is_some()
        || volume.downward_api.is_some()
}

/// One `volumeDevices` entry.
pub fn device(wanted: &VolumeDevice, on_host: &Path, read_only: bool) -> cri::Device {
    cri::Device {
        container_path: wanted.device_path.clone(),
        host_path: on_host.to_string_lossy().into_owned(),
        permissions: if read_only { "r" } else { "mrw" }.to_owned(),
    }
}

/// A writable file that the agent makes for the container. `selinux`: SELinux is enabled on the node.
pub fn agent_file(container_path: &str, host_path: String, selinux: bool) -> cri::Mount {
    let container_path = spec::absolute_path(container_path);
    cri::Mount { container_path, host_path, selinux_relabel: selinux, ..Default::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(json: serde_json::Value) -> VolumeMount {
        serde_json::from_value(json).expect("a mount")
    }

    #[test]
    fn properties_follow_the_spec() {
        let source = || MountSource { host_path: "/host".into(), ..MountSource::default() };
        let plain = mount(serde_json::json!({"name": "v", "mountPath": "data"}));
        let out = volume_mount(&plain, source(), false).expect("valid");
        assert_eq!((out.container_path.as_str(), out.readonly, out.propagation), ("/data", false, 0));
        assert!(!out.selinux_relabel && !out.recursive_read_only);
        let read_only = volume_mount(&plain, MountSource { read_only: true, ..source() }, false).expect("valid");
        assert!(read_only.readonly);
        let relabelled = volume_mount(&plain, MountSource { selinux_relabel: true, ..source() }, false).expect("valid");
        assert!(relabelled.selinux_relabel);
        let slave = mount(serde_json::json!({"name": "v", "mountPath": "/d", "mountPropagation": "HostToContainer"}));
        assert_eq!(volume_mount(&slave, source(), false).expect("valid").propagation, 1);
        let shared = mount(serde_json::json!({"name": "v", "mountPath": "/d", "mountPropagation": "Bidirectional"}));
        assert_eq!(volume_mount(&shared, source(), false).expect("valid").propagation, 2);
        let none = mount(serde_json::json!({"name": "v", "mountPath": "/d", "mountPropagation": "None"}));
        assert_eq!(volume_mount(&none, source(), false).expect("valid").propagation, 0);
        let newer = mount(serde_json::json!({"name": "v", "mountPath": "/d", "mountPropagation": "Newer"}));
        let error = volume_mount(&newer, source(), false).expect_err("unknown").to_string();
        assert_eq!(error, "invalid MountPropagation mode: \"Newer\"");
    }

    #[test]
    fn files_of_the_agent_are_mounted_at_absolute_paths() {
        for (path, expected) in [
            ("/dev/termination-log", "/dev/termination-log"),
            ("log", "/log"),
            ("./log/", "/log"),
            ("/dev//./shm/../log", "/dev/log"),
            ("../log", "/log"),
        ] {
            assert_eq!(agent_file(path, "/host".to_owned(), false).container_path, expected, "{path}");
        }
    }

    #[test]
    fn devices_can_be_read_only() {
        let wanted = VolumeDevice { name: "v".into(), device_path: "/dev/x".into() };
        for (read_only, expected) in [(false, "mrw"), (true, "r")] {
            let made = device(&wanted, Path::new("/r/link"), read_only);
            assert_eq!((made.container_path, made.host_path), ("/dev/x".into(), "/r/link".into()));
            assert_eq!(made.permissions, expected);
        }
    }

    #[test]
    fn recursive_read_only_mounts_need_the_runtime() {
        let strict = mount(serde_json::json!({"name": "v", "mountPath": "/d", "readOnly": true,
            "recursiveReadOnly": "Enabled"}));
        let out = volume_mount(&strict, MountSource::default(), true).expect("valid");
        assert!(out.readonly && out.recursive_read_only);
        let error = volume_mount(&strict, MountSource::default(), false).expect_err("rejected").to_string();
        let expected = r#"failed to resolve recursive read-only mode: volume "v" requested recursive read-only mode, but it is not supported by the runtime"#;
        assert_eq!(error, expected);
    }

    #[test]
    fn volumes_of_the_agent_are_relabelled_and_host_paths_are_not() {
        for (volume, expected) in [
            (serde_json::json!({"name": "own", "emptyDir": {}}), true),
            (serde_json::json!({"name": "map", "configMap": {"name": "m"}}), true),
            (serde_json::json!({"name": "secret", "secret": {"secretName": "s"}}), true),
            (serde_json::json!({"name": "token", "projected": {"sources": []}}), true),
            (serde_json::json!({"name": "labels", "downwardAPI": {"items": []}}), true),
            (serde_json::json!({"name": "host", "hostPath": {"path": "/var/lib"}}), false),
            (serde_json::json!({"name": "share", "nfs": {"server": "s", "path": "/"}}), false),
        ] {
            let volume: Volume = serde_json::from_value(volume).expect("a volume");
            assert_eq!(is_relabelled(&volume), expected, "{}", volume.name);
        }
    }
}
