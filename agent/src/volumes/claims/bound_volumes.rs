//! The persistent volumes that pods on this node use. A claim's binding never changes: it is read once for each pod, and
//! restarts of its containers do not depend on the API server.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use k8s_openapi::api::core::v1::HostPathVolumeSource;
use k8s_openapi::api::core::v1::LocalVolumeSource;
use k8s_openapi::api::core::v1::NFSVolumeSource;
use k8s_openapi::api::core::v1::PersistentVolume;

use crate::volumes::disks::DiskSource;
use crate::volumes::flex_volume;
use crate::volumes::flex_volume::FlexSource;
use crate::volumes::host_path;
use crate::volumes::nfs;

const GID_ANNOTATION: &str = "pv.beta.kubernetes.io/gid";
const OPTIONS_ANNOTATION: &str = "volume.beta.kubernetes.io/mount-options";

/// A persistent volume as one pod uses it.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct BoundVolume {
    /// Its name.
    pub(super) name: String,
    /// Its UID, by which events refer to it.
    pub(super) uid: Option<String>,
    pub(super) source: Source,
    /// It is a local volume that is a directory, not a device.
    pub(super) is_directory: bool,
    /// Containers get the device itself, not files on it.
    pub(super) is_block: bool,
    /// The claim is used read-only.
    pub(super) read_only: bool,
    /// Only one pod may use it at a time.
    pub(super) is_exclusive: bool,
    /// Options for mount(8).
    pub(super) options: Vec<String>,
    /// A group that its files belong to, which the pod's processes join.
    pub(super) gid: Option<i64>,
    /// When it was read, the claim had less than its capacity.
    pub(super) is_larger: bool,
}

#[cfg(test)]
impl BoundVolume {
    /// A volume of this source that any number of pods may use, with files that may be written.
    pub(super) fn plain(name: &str, source: Source) -> Self {
        Self {
            name: name.to_owned(),
            uid: None,
            source,
            is_directory: false,
            is_block: false,
            read_only: false,
            is_exclusive: false,
            options: Vec::new(),
            gid: None,
            is_larger: false,
        }
    }
}

/// The sources of persistent volumes that this agent provides, and those it does not.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Source {
    HostPath(HostPathVolumeSource),
    Local(LocalVolumeSource),
    Nfs(NFSVolumeSource),
    /// iSCSI or Fibre Channel.
    Disk(DiskSource),
    Flex(Box<FlexSource>),
    /// The driver's name. No driver is registered at this agent.
    Csi(String),
    Other,
}

impl Source {
    pub(super) fn of(volume: &PersistentVolume) -> Self {
        let Some(spec) = &volume.spec else { return Self::Other };
        if let Some(source) = &spec.host_path {
            Self::HostPath(source.clone())
        } else if let Some(source) = &spec.local {
            Self::Local(source.clone())
        } else if let Some(source) = &spec.nfs {
            Self::Nfs(source.clone())
        } else if let Some(source) = DiskSource::of_volume(spec) {
            Self::Disk(source)
        } else if let Some(source) = &spec.flex_volume {
            Self::Flex(Box::new(source.into()))
        } else if let Some(source) = &spec.csi {
            Self::Csi(source.driver.clone())
        } else {
            Self::Other
        }
    }

    /// The plugin by which the volume's directories are named; `None` if it has none.
    pub(super) fn plugin(&self) -> Option<&'static str> {
        match self {
            Self::HostPath(_) => Some(host_path::NAME),
            Self::Local(_) => Some(super::LOCAL),
            Self::Nfs(_) => Some(nfs::NAME),
            Self::Disk(source) => Some(source.plugin()),
            Self::Flex(source) => flex_volume::plugin_of(source),
            Self::Csi(_) | Self::Other => None,
        }
    }
}

/// Mount options of a volume; those of the older annotation take precedence. Empty ones are left out, as upstream.
pub(super) fn options(volume: &PersistentVolume) -> Vec<String> {
    let annotated = volume.metadata.annotations.as_ref().and_then(|all| all.get(OPTIONS_ANNOTATION));
    let mut options: Vec<String> = match annotated {
        Some(options) => options.split(',').map(str::to_owned).collect(),
        None => volume.spec.as_ref().and_then(|spec| spec.mount_options.clone()).unwrap_or_default(),
    };
    options.retain(|option| !option.is_empty());
    options
}

/// The group in a volume's annotation; one that is no number is ignored, as upstream.
pub(super) fn gid(volume: &PersistentVolume) -> Option<i64> {
    volume.metadata.annotations.as_ref()?.get(GID_ANNOTATION)?.parse().ok().filter(|gid| *gid >= 0)
}

/// What one pod uses, by volume.
type OfPod = HashMap<String, Arc<BoundVolume>>;

/// What pods use, by UID. Clones share it.
#[derive(Clone, Debug, Default)]
pub(in crate::volumes) struct BoundVolumes(Arc<Mutex<HashMap<String, OfPod>>>);

impl BoundVolumes {
    fn all(&self) -> MutexGuard<'_, HashMap<String, OfPod>> {
        // Changed one entry at a time: a panic elsewhere leaves it usable.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the pod's volume is, if it is known.
    pub(super) fn get(&self, uid: &str, volume: &str) -> Option<Arc<BoundVolume>> {
        self.all().get(uid)?.get(volume).cloned()
    }

    /// Records what the pod's volume is; `None` if only one pod may use it and another one that is known does.
    pub(super) fn put(&self, uid: &str, volume: &str, used: BoundVolume) -> Option<Arc<BoundVolume>> {
        let mut all = self.all();
        let mut others = all.iter().filter(|(other, _)| *other != uid).flat_map(|(_, volumes)| volumes.values());
        if used.is_exclusive && others.any(|other| other.name == used.name) {
            return None;
        }
        let used = Arc::new(used);
        all.entry(uid.to_owned()).or_default().insert(volume.to_owned(), used.clone());
        Some(used)
    }

    pub(super) fn forget(&self, uid: &str) {
        self.all().remove(uid);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn used(name: &str, is_exclusive: bool) -> BoundVolume {
        BoundVolume { is_exclusive, ..BoundVolume::plain(name, Source::Other) }
    }

    #[test]
    fn an_exclusive_volume_is_used_by_one_pod() {
        let known = BoundVolumes::default();
        assert!(known.put("u-1", "v", used("pv", true)).is_some());
        assert!(known.put("u-1", "w", used("pv", true)).is_some(), "twice in one pod");
        assert!(known.put("u-2", "v", used("pv", true)).is_none());
        assert!(known.put("u-2", "v", used("other", true)).is_some());
        assert!(known.put("u-2", "v", used("shared", false)).is_some());
        assert!(known.put("u-3", "v", used("shared", false)).is_some());
        known.forget("u-1");
        assert!(known.get("u-1", "v").is_none());
        assert!(known.put("u-3", "v", used("pv", true)).is_some());
        assert_eq!(known.get("u-3", "v").expect("known").name, "pv");
    }

    #[test]
    fn sources_and_options() {
        let volume = |spec| -> PersistentVolume {
            serde_json::from_value(json!({"metadata": {}, "spec": spec})).expect("a volume")
        };
        assert!(matches!(Source::of(&volume(json!({"hostPath": {"path": "/p"}}))), Source::HostPath(_)));
        assert!(matches!(Source::of(&volume(json!({"local": {"path": "/p"}}))), Source::Local(_)));
        assert!(matches!(Source::of(&volume(json!({"nfs": {"server": "s", "path": "/p"}}))), Source::Nfs(_)));
        let iscsi = json!({"targetPortal": "192.0.2.1", "iqn": "iqn.2001-04.com.example:a", "lun": 1,
            "secretRef": {"name": "s", "namespace": "storage"}});
        let source = Source::of(&volume(json!({"iscsi": iscsi})));
        let Source::Disk(DiskSource::Iscsi(source)) = source else { panic!("another source") };
        assert_eq!((source.lun, source.secret), (1, ("s".to_owned(), "storage".to_owned())));
        let source = Source::of(&volume(json!({"fc": {"targetWWNs": ["50060e801049cfd1"], "lun": 1}})));
        assert_eq!(source.plugin(), Some("kubernetes.io/fc"));
        let Source::Disk(DiskSource::Fc(source)) = source else { panic!("another source") };
        assert_eq!((source.target_wwns.len(), source.lun), (1, Some(1)));
        let flex = json!({"driver": "example.com/d", "secretRef": {"name": "s", "namespace": "storage"}});
        let flex = Source::of(&volume(json!({"flexVolume": flex})));
        assert_eq!(flex.plugin(), Some("example.com/d"));
        let csi = volume(json!({"csi": {"driver": "d", "volumeHandle": "h"}, "mountOptions": ["noatime"]}));
        assert_eq!((Source::of(&csi), options(&csi)), (Source::Csi("d".to_owned()), vec!["noatime".to_owned()]));
        let mut annotated = csi;
        assert_eq!(gid(&annotated), None);
        for (text, expected) in [("1234", Some(1234)), ("-1", None), ("staff", None)] {
            annotated.metadata.annotations = Some([(GID_ANNOTATION.to_owned(), text.to_owned())].into());
            assert_eq!(gid(&annotated), expected);
        }
        for (text, expected) in [("ro,noexec", vec!["ro", "noexec"]), ("", vec![]), ("ro,,", vec!["ro"])] {
            annotated.metadata.annotations = Some([(OPTIONS_ANNOTATION.to_owned(), text.to_owned())].into());
            assert_eq!(options(&annotated), expected, "{text:?}");
        }
    }
}
