//! Recursive read-only volume mounts (KEP-3857). Pure.

use k8s_openapi::api::core::v1::VolumeMount;

/// Why `recursiveReadOnly` of a volume mount cannot be honoured. The texts are upstream's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RecursiveReadOnlyError {
    /// `readOnly` is not true.
    #[error("volume {volume:?} requested recursive read-only mode, but it is not read-only")]
    NotReadOnly {
        /// `volumeMounts[].name`.
        volume: String,
    },
    /// `mountPropagation` is neither unset nor `None`.
    #[error(
        "volume {volume:?} requested recursive read-only mode, but it is not compatible with propagation {propagation:?}"
    )]
    Propagation {
        /// `volumeMounts[].name`.
        volume: String,
        /// `volumeMounts[].mountPropagation`.
        propagation: String,
    },
    /// Mode `Enabled` on a runtime handler without the feature.
    #[error("volume {volume:?} requested recursive read-only mode, but it is not supported by the runtime")]
    Unsupported {
        /// `volumeMounts[].name`.
        volume: String,
    },
    /// A value that the API does not define.
    #[error("unknown recursive read-only mode {mode:?}")]
    UnknownMode {
        /// `volumeMounts[].recursiveReadOnly`.
        mode: String,
    },
}

/// True if the mount is to be made read-only recursively. `supported`: the pod's runtime handler has the feature.
///
/// # Errors
/// The mount requests a mode that contradicts its other fields, or that the runtime lacks. `IfPossible` never fails for lack
/// of support.
pub fn recursive_read_only(mount: &VolumeMount, supported: bool) -> Result<bool, RecursiveReadOnlyError> {
    let volume = || mount.name.clone();
    let mode = mount.recursive_read_only.as_deref().unwrap_or("Disabled");
    if mode == "Disabled" {
        return Ok(false);
    }
    if mount.read_only != Some(true) {
        return Err(RecursiveReadOnlyError::NotReadOnly { volume: volume() });
    }
    if let Some(propagation) = mount.mount_propagation.as_deref().filter(|propagation| *propagation != "None") {
        let propagation = propagation.to_owned();
        return Err(RecursiveReadOnlyError::Propagation { volume: volume(), propagation });
    }
    match mode {
        "IfPossible" => Ok(supported),
        "Enabled" if supported => Ok(true),
        "Enabled" => Err(RecursiveReadOnlyError::Unsupported { volume: volume() }),
        mode => Err(RecursiveReadOnlyError::UnknownMode { mode: mode.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_and_their_conflicts() {
        let not_read_only = r#"volume "v" requested recursive read-only mode, but it is not read-only"#;
        let propagation = r#"volume "v" requested recursive read-only mode, but it is not compatible with propagation "Bidirectional""#;
        let unsupported = r#"volume "v" requested recursive read-only mode, but it is not supported by the runtime"#;
        let table = [
            (None, true, None, true, Ok(false)),
            (Some("Disabled"), false, None, true, Ok(false)),
            (Some("IfPossible"), true, None, true, Ok(true)),
            (Some("IfPossible"), true, Some("None"), false, Ok(false)),
            (Some("Enabled"), true, None, true, Ok(true)),
            (Some("Enabled"), true, None, false, Err(unsupported)),
            (Some("Enabled"), false, None, true, Err(not_read_only)),
            (Some("IfPossible"), false, None, true, Err(not_read_only)),
            (Some("IfPossible"), true, Some("Bidirectional"), true, Err(propagation)),
            (Some("Sometimes"), true, None, true, Err(r#"unknown recursive read-only mode "Sometimes""#)),
        ];
        for (mode, read_only, propagation, supported, expected) in table {
            let mount = VolumeMount {
                name: "v".to_owned(),
                recursive_read_only: mode.map(str::to_owned),
                read_only: Some(read_only),
                mount_propagation: propagation.map(str::to_owned),
                ..VolumeMount::default()
            };
            let resolved = recursive_read_only(&mount, supported).map_err(|error| error.to_string());
            assert_eq!(resolved, expected.map_err(str::to_owned), "{mode:?} {read_only} {propagation:?} {supported}");
        }
    }
}
