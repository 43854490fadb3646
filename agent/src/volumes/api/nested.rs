//! Mount points inside a volume: a container that mounts another volume below this one needs a directory there, and this
//! one is read-only for it.

use std::collections::BTreeSet;
use std::path::Component;
use std::path::Path;
use std::path::PathBuf;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::VolumeMount;

use super::payload::Payload;
use crate::model::spec;
use crate::volumes::VolumeError;
use crate::volumes::error::OnPath as _;

/// Paths below `volume`, relative to it, at which some container mounts another volume. Of paths within each other only
/// the outermost.
pub(super) fn of(pod: &Pod, volume: &str) -> Vec<String> {
    let lasting = spec::lasting_containers(pod).map(|container| container.spec.volume_mounts.as_deref());
    let ephemeral = spec::ephemeral_containers(pod).iter().map(|container| container.volume_mounts.as_deref());
    let mut found = BTreeSet::new();
    for mounts in lasting.chain(ephemeral).flatten() {
        for own in mounts.iter().filter(|mount| mount.name == volume) {
            let Some(base) = cleaned(own) else { continue };
            let below =
                mounts.iter().filter_map(cleaned).filter_map(|path| Some(path.strip_prefix(&base).ok()?.to_owned()));
            found.extend(below.filter(|path| !path.as_os_str().is_empty()));
        }
    }
    let outermost = |path: &&PathBuf| !path.ancestors().skip(1).any(|above| found.contains(above));
    found.iter().filter(outermost).filter_map(|path| path.to_str()).map(str::to_owned).collect()
}

/// The mount path relative to `/`; `None` if it contains `..`.
fn cleaned(mount: &VolumeMount) -> Option<PathBuf> {
    let parts = Path::new(&mount.mount_path)
        .components()
        .filter(|part| !matches!(part, Component::RootDir | Component::CurDir));
    parts.map(|part| matches!(part, Component::Normal(_)).then_some(part)).collect()
}

/// Makes the directories, except where the volume has content of that name.
pub(super) fn make(dir: &Path, nested: &[String], payload: &Payload) -> Result<(), VolumeError> {
    let own = payload.top_names();
    for path in nested {
        let first = path.split('/').next().unwrap_or(path);
        if own.contains(first) || first.starts_with("..") {
            continue;
        }
        let target = dir.join(path);
        use std::os::unix::fs::DirBuilderExt as _;
        std::fs::DirBuilder::new().recursive(true).mode(0o755).create(&target).on("create", &target)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn mount_paths_inside_a_volume() {
        let pod = |mounts: &[(&str, &str)]| -> Pod {
            let mounts: Vec<_> = mounts.iter().map(|(name, path)| json!({"name": name, "mountPath": path})).collect();
            serde_json::from_value(json!({"spec": {"containers": [{"name": "c", "volumeMounts": mounts}]}}))
                .expect("a pod")
        };
        for (mounts, expected) in [
            (vec![("v", "/a"), ("w", "/b")], vec![]),
            (vec![("v", "/a"), ("w", "/a/b")], vec!["b"]),
            (vec![("v", "/a/"), ("w", "a/b/c"), ("x", "/a/b/c/d"), ("y", "/a/z")], vec!["b/c", "z"]),
            (vec![("v", "/a"), ("w", "/ab")], vec![]),
            (vec![("v", "/a"), ("w", "/a/../b")], vec![]),
            (vec![("v", "/a"), ("v", "/c"), ("w", "/c/d")], vec!["d"]),
        ] {
            assert_eq!(of(&pod(&mounts), "v"), expected, "{mounts:?}");
        }
    }
}
