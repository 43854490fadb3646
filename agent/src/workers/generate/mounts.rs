//! Mount properties in the terms of the runtime. Pure.

use k8s_openapi::api::core::v1::VolumeMount;
use keblet_proto::cri::v1 as cri;

use super::GenerateError;

/// Where the hosts file belongs.
pub const HOSTS_FILE: &str = "/etc/hosts";

/// One `volumeMounts` entry with its host path. `read_only`: the volume itself cannot be written. `recursive_read_only` tells whether the runtime handler can do
/// recursive read-only mounts (KEP-3857).
///
/// # Errors
/// A recursive read-only mount that the runtime cannot do.
pub fn volume_mount(
    container: &str,
    mount: &VolumeMount,
    host_path: String,
    read_only: bool,
    recursive_read_only: bool,
) -> Result<cri::Mount, GenerateError> {
    let readonly = mount.read_only.unwrap_or(false);
    let recursive = match mount.recursive_read_only.as_deref() {
        Some("Enabled") if !recursive_read_only => {
            return Err(GenerateError::RecursiveReadOnly {
                container: container.to_owned(),
                mount: mount.name.clone(),
            });
        }
        Some("Enabled") => true,
        Some("IfPossible") => readonly && recursive_read_only,
        _ => false,
    };
    let propagation = match mount.mount_propagation.as_deref() {
        Some("HostToContainer") => cri::MountPropagation::PropagationHostToContainer,
        Some("Bidirectional") => cri::MountPropagation::PropagationBidirectional,
        _ => cri::MountPropagation::PropagationPrivate,
    };
    let path = &mount.mount_path;
    Ok(cri::Mount {
        container_path: if path.starts_with('/') { path.clone() } else { format!("/{path}") },
        host_path,
        readonly: readonly || read_only,
        propagation: propagation as i32,
        recursive_read_only: recursive,
        ..Default::default()
    })
}

/// A file the agent makes for the container, writable.
pub fn agent_file(container_path: &str, host_path: String) -> cri::Mount {
    cri::Mount { container_path: container_path.to_owned(), host_path, ..Default::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn properties_follow_the_spec() {
        let mount = |json: serde_json::Value| -> VolumeMount { serde_json::from_value(json).expect("a mount") };
        let plain = mount(serde_json::json!({"name": "v", "mountPath": "data"}));
        let out = volume_mount("c", &plain, "/host".into(), false, false).expect("valid");
        assert_eq!((out.container_path.as_str(), out.readonly, out.propagation), ("/data", false, 0));
        let slave = mount(serde_json::json!({"name": "v", "mountPath": "/d", "mountPropagation": "HostToContainer",
            "readOnly": true, "recursiveReadOnly": "IfPossible"}));
        let out = volume_mount("c", &slave, "/host".into(), false, true).expect("valid");
        assert_eq!((out.propagation, out.recursive_read_only), (1, true));
        assert!(!volume_mount("c", &slave, "/host".into(), false, false).expect("valid").recursive_read_only);
        let strict = mount(serde_json::json!({"name": "v", "mountPath": "/d", "readOnly": true,
            "recursiveReadOnly": "Enabled"}));
        assert!(volume_mount("c", &plain, "/host".into(), true, false).expect("valid").readonly);
        let error = volume_mount("c", &strict, "/host".into(), false, false).expect_err("refused").to_string();
        assert!(error.contains("\"v\"") && error.contains("\"c\""), "{error}");
    }
}
