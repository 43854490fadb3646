//! An iSCSI disk: the checked settings of a volume, and its record on the node.
//!
//! `iscsi.json` lies in the place of the global mount, under it while it is mounted. It is a kubelet's, so that either can
//! detach what the other has attached.

use std::fs;
use std::path::Path;
use std::path::PathBuf;

use k8s_openapi::api::core::v1::ISCSIPersistentVolumeSource;
use k8s_openapi::api::core::v1::ISCSIVolumeSource;
use serde::Deserialize;
use serde::Serialize;

use super::NAME;
use crate::filesystem;
use crate::model::iscsi;
use crate::volumes::PodDirs;
use crate::volumes::VolumeError;
use crate::volumes::error::OnPath as _;
use crate::volumes::layout;

/// The record of a disk, in its place.
const RECORD: &str = "iscsi.json";
/// What is written before it is renamed.
const PARTIAL: &str = ".iscsi.json";
/// Longest record.
const MAX_RECORD: usize = 64 * 1024;
/// Most portals of a disk: one after another is logged in to while other disks of the target wait, and a portal may not
/// answer.
const MAX_PORTALS: usize = 64;
/// What the directories of interfaces begin with.
const INTERFACE: &str = "iface-";
/// What stands between target and unit in the name of a place.
const UNIT: &str = "-lun-";
/// The interface of a volume that names none.
const DEFAULT_INTERFACE: &str = "default";

/// The settings of a volume, unchecked.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(in crate::volumes) struct IscsiSource {
    pub(in crate::volumes) target_portal: String,
    pub(in crate::volumes) portals: Vec<String>,
    pub(in crate::volumes) iqn: String,
    pub(in crate::volumes) lun: i32,
    pub(in crate::volumes) interface: String,
    pub(in crate::volumes) initiator: String,
    pub(in crate::volumes) fs_type: String,
    pub(in crate::volumes) read_only: bool,
    pub(in crate::volumes) chap_discovery: bool,
    pub(in crate::volumes) chap_session: bool,
    /// Name of the secret, and its namespace unless it is the pod's; empty if none is named.
    pub(in crate::volumes) secret: (String, String),
}

macro_rules! iscsi_source {
    ($source:expr, $secret:expr) => {
        IscsiSource {
            target_portal: $source.target_portal.clone(),
            portals: $source.portals.clone().unwrap_or_default(),
            iqn: $source.iqn.clone(),
            lun: $source.lun,
            interface: $source.iscsi_interface.clone().unwrap_or_default(),
            initiator: $source.initiator_name.clone().unwrap_or_default(),
            fs_type: $source.fs_type.clone().unwrap_or_default(),
            read_only: $source.read_only == Some(true),
            chap_discovery: $source.chap_auth_discovery == Some(true),
            chap_session: $source.chap_auth_session == Some(true),
            secret: $secret,
        }
    };
}

impl From<&ISCSIVolumeSource> for IscsiSource {
    fn from(source: &ISCSIVolumeSource) -> Self {
        let secret = source.secret_ref.as_ref().map(|secret| secret.name.clone()).unwrap_or_default();
        iscsi_source!(source, (secret, String::new()))
    }
}

impl From<&ISCSIPersistentVolumeSource> for IscsiSource {
    fn from(source: &ISCSIPersistentVolumeSource) -> Self {
        let secret = source.secret_ref.clone().unwrap_or_default();
        iscsi_source!(source, (secret.name.unwrap_or_default(), secret.namespace.unwrap_or_default()))
    }
}

/// What is needed to attach a disk and to detach it again, in the form of `iscsi.json`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(in crate::volumes) struct DiskRecord {
    /// Name of the volume.
    #[serde(rename = "VolName")]
    pub(super) volume: String,
    /// Portals with their ports; the first one names the place.
    pub(super) portals: Vec<String>,
    /// Name of the target.
    #[serde(rename = "Iqn")]
    pub(in crate::volumes) target: String,
    /// Number of the logical unit.
    pub(in crate::volumes) lun: String,
    /// The interface that the volume names.
    #[serde(rename = "InitIface")]
    pub(super) base_interface: String,
    /// The interface that is used: the same, or an own one with another name of the initiator.
    #[serde(rename = "Iface")]
    pub(super) interface: String,
    /// Name of the initiator of an own interface.
    #[serde(rename = "InitiatorName")]
    pub(super) initiator: String,
    /// A kubelet writes a null.
    #[serde(skip_deserializing)]
    metrics_provider: Option<()>,
}

impl DiskRecord {
    /// The record of a volume with this name and these settings.
    ///
    /// # Errors
    /// A field that cannot be used.
    pub(in crate::volumes) fn of(volume: &str, source: &IscsiSource) -> Result<Self, VolumeError> {
        let mut portals: Vec<String> = Vec::new();
        let all = std::iter::once(("targetPortal", &source.target_portal))
            .chain(source.portals.iter().map(|portal| ("portals", portal)));
        for (field, text) in all {
            let portal = iscsi::portal(text).map_err(|problem| wrong(field, text, problem))?;
            if portals.contains(&portal) {
                continue;
            }
            if portals.len() >= MAX_PORTALS {
                return Err(wrong(field, text, "must be one of at most 64"));
            }
            portals.push(portal);
        }
        let base = if source.interface.is_empty() { DEFAULT_INTERFACE } else { &source.interface };
        let interface = match source.initiator.is_empty() {
            true => base.to_owned(),
            false => own_interface(&portals, volume),
        };
        let lun = iscsi::check_lun(source.lun).map_err(|problem| wrong("lun", &source.lun.to_string(), problem))?;
        let record = Self {
            volume: volume.to_owned(),
            portals,
            target: source.iqn.clone(),
            lun: lun.to_string(),
            base_interface: base.to_owned(),
            interface,
            initiator: source.initiator.clone(),
            metrics_provider: None,
        };
        record.check()?;
        Ok(record)
    }

    /// Checks what becomes arguments and paths.
    fn check(&self) -> Result<(), VolumeError> {
        self.unit()?;
        for portal in &self.portals {
            iscsi::portal(portal).map_err(|problem| wrong("portals", portal, problem))?;
        }
        if self.portals.is_empty() {
            return Err(wrong("portals", "", "must have one"));
        }
        iscsi::check_name(&self.target).map_err(|problem| wrong("iqn", &self.target, problem))?;
        let interface = |name: &String| iscsi::check_interface(name).map_err(|p| wrong("iscsiInterface", name, p));
        interface(&self.interface)?;
        interface(&self.base_interface)?;
        if !self.initiator.is_empty() {
            iscsi::check_name(&self.initiator).map_err(|problem| wrong("initiatorName", &self.initiator, problem))?;
        }
        Ok(())
    }

    /// The number of the logical unit.
    ///
    /// # Errors
    /// It is none.
    pub(super) fn unit(&self) -> Result<u8, VolumeError> {
        self.lun.parse().map_err(|_| wrong("lun", &self.lun, "must be between 0 and 255, inclusive"))
    }

    /// True if the interface was made for this volume.
    pub(super) fn owns_interface(&self) -> bool {
        !self.initiator.is_empty() && self.interface == own_interface(&self.portals, &self.volume)
    }

    /// Name of the directory of the place.
    fn directory(&self) -> String {
        let portal = self.portals.first().map(String::as_str).unwrap_or_default();
        format!("{portal}-{}{UNIT}{}", self.target, self.lun)
    }

    /// Where it is mounted for the node, or its raw device is used from.
    pub(in crate::volumes) fn place(&self, dirs: &PodDirs, is_block: bool) -> PathBuf {
        root(dirs, is_block).join(format!("{INTERFACE}{}", self.interface)).join(self.directory())
    }

    /// The disk as the names of its place identify it: all but further portals and the name of the initiator.
    pub(in crate::volumes) fn of_place(place: &Path) -> Option<Self> {
        let name = |path: &Path| path.file_name()?.to_str().map(str::to_owned);
        let (directory, parent) = (name(place)?, name(place.parent()?)?);
        let interface = parent.strip_prefix(INTERFACE)?.to_owned();
        let (disk, lun) = directory.rsplit_once(UNIT)?;
        let target = ["-iqn.", "-eui.", "-naa."].iter().filter_map(|kind| disk.find(kind)).min()?;
        let (portal, target) = (disk[..target].to_owned(), disk[target + 1..].to_owned());
        let (base_interface, lun) = (interface.clone(), lun.to_owned());
        let record = Self { portals: vec![portal], target, lun, base_interface, interface, ..Self::default() };
        record.check().is_ok().then_some(record)
    }

    /// Writes the record into its place, on which nothing is mounted. Blocking.
    ///
    /// # Errors
    /// A directory or the file cannot be made.
    pub(super) fn write(&self, place: &Path) -> Result<(), VolumeError> {
        layout::make_dirs(place)?;
        let path = place.join(RECORD);
        let text = serde_json::to_string(self).unwrap_or_default() + "\n";
        filesystem::replace(&path, PARTIAL, text.as_bytes(), 0o644).on("write", &path)
    }

    /// Reads the record of a place on which nothing is mounted; without one, or with one that cannot be used, the disk by
    /// the place's names. Blocking.
    ///
    /// # Errors
    /// They identify no disk.
    pub(in crate::volumes) fn read(place: &Path) -> Result<Self, VolumeError> {
        let path = place.join(RECORD);
        let text = filesystem::read_bounded(&path, MAX_RECORD);
        let record = text.ok().and_then(|text| serde_json::from_slice::<Self>(&text).ok());
        if let Some(record) = record.filter(|record| record.check().is_ok()) {
            return Ok(record);
        }
        tracing::warn!(path = %path.display(), "no usable record of an iSCSI disk; the name of its directory is used");
        Self::of_place(place).ok_or_else(|| VolumeError::NotAFileName { name: place.to_string_lossy().into_owned() })
    }

    /// Removes the record and its place. Blocking.
    ///
    /// # Errors
    /// The place holds something else.
    pub(in crate::volumes) fn remove(place: &Path) -> Result<(), VolumeError> {
        for name in [RECORD, PARTIAL] {
            let path = place.join(name);
            match fs::remove_file(&path) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                removed => removed.on("remove", &path)?,
            }
        }
        fs::remove_dir(place).on("remove", place)?;
        if let Some(interface) = place.parent() {
            // Other disks may have the interface.
            let _ = fs::remove_dir(interface);
        }
        Ok(())
    }
}

/// Names that the Node's status may have for the disk of a place: the default port is in the place only.
pub(in crate::volumes) fn names_of_place(place: &Path) -> Vec<String> {
    let Some(record) = DiskRecord::of_place(place) else { return Vec::new() };
    let portal = record.portals.concat();
    let without_port = portal.strip_suffix(":3260").map(str::to_owned);
    let portals = [Some(portal.clone()), without_port].into_iter().flatten();
    portals.map(|portal| status_name(&portal, &record.target, &record.lun)).collect()
}

/// Name of a disk in the status of the Node, from the portal as the volume has it.
pub(in crate::volumes) fn status_name(portal: &str, target: &str, lun: &str) -> String {
    format!("{NAME}/{portal}:{target}:{lun}")
}

/// Directory of the places.
fn root(dirs: &PodDirs, is_block: bool) -> PathBuf {
    let root = dirs.plugin(NAME);
    if is_block { root.join(layout::DEVICES) } else { root }
}

/// Places of disks that are attached, or were begun to be. Blocking.
///
/// # Errors
/// A directory cannot be listed.
pub(in crate::volumes) fn places(dirs: &PodDirs, is_block: bool) -> Result<Vec<PathBuf>, VolumeError> {
    let root = root(dirs, is_block);
    let mut found = Vec::new();
    for interface in layout::entries(&root)? {
        let is_interface = interface.file_name().is_some_and(|name| name.to_string_lossy().starts_with(INTERFACE));
        if is_interface {
            found.extend(layout::entries(&interface)?);
        }
    }
    Ok(found)
}

fn own_interface(portals: &[String], volume: &str) -> String {
    format!("{}:{volume}", portals.first().map(String::as_str).unwrap_or_default())
}

fn wrong(field: &'static str, value: &str, problem: &'static str) -> VolumeError {
    let value = value.chars().take(256).collect();
    VolumeError::DiskField { kind: "iscsi", field, value, problem }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::filesystem::testing::InPlace;
    use crate::filesystem::testing::in_time;

    fn iscsi_source(change: impl FnOnce(&mut IscsiSource)) -> IscsiSource {
        let (target_portal, iqn) = ("192.0.2.1".to_owned(), "iqn.2001-04.com.example:a".to_owned());
        let mut source = IscsiSource { target_portal, iqn, lun: 7, ..IscsiSource::default() };
        change(&mut source);
        source
    }

    #[test]
    fn sources_of_pods_and_persistent_volumes() {
        let source = json!({"targetPortal": "192.0.2.1", "portals": ["192.0.2.2"], "iqn": "iqn.2001-04.com.example:a", "lun": 7,
            "iscsiInterface": "iser", "initiatorName": "iqn.2001-04.com.example:me", "fsType": "xfs", "readOnly": true,
            "chapAuthDiscovery": true, "chapAuthSession": true, "secretRef": {"name": "s"}});
        let of_pod: ISCSIVolumeSource = serde_json::from_value(source.clone()).expect("a source");
        let all = iscsi_source(|source| {
            source.portals = vec!["192.0.2.2".to_owned()];
            source.interface = "iser".to_owned();
            source.initiator = "iqn.2001-04.com.example:me".to_owned();
            source.fs_type = "xfs".to_owned();
            (source.read_only, source.chap_discovery, source.chap_session) = (true, true, true);
            source.secret.0 = "s".to_owned();
        });
        assert_eq!(IscsiSource::from(&of_pod), all);
        let mut of_volume = source;
        of_volume["secretRef"]["namespace"] = "storage".into();
        let of_volume: ISCSIPersistentVolumeSource = serde_json::from_value(of_volume).expect("a source");
        assert_eq!(
            IscsiSource::from(&of_volume),
            IscsiSource { secret: ("s".to_owned(), "storage".to_owned()), ..all }
        );
    }

    #[test]
    fn the_place_and_record_are_a_kubelets() {
        let dirs = PodDirs::new(Path::new("/r"));
        let record = DiskRecord::of("v", &iscsi_source(|_| {})).expect("valid");
        let disk = "192.0.2.1:3260-iqn.2001-04.com.example:a-lun-7";
        let plugin = Path::new("/r/plugins/kubernetes.io/iscsi");
        assert_eq!(record.place(&dirs, false), plugin.join("iface-default").join(disk));
        assert_eq!(record.place(&dirs, true), plugin.join("volumeDevices/iface-default").join(disk));
        let expected = json!({"VolName": "v", "Portals": ["192.0.2.1:3260"], "Iqn": "iqn.2001-04.com.example:a", "Lun": "7",
            "InitIface": "default", "Iface": "default", "InitiatorName": "", "MetricsProvider": null});
        assert_eq!(serde_json::to_value(&record).expect("JSON"), expected);
        let read: DiskRecord = serde_json::from_value(expected).expect("a record");
        assert_eq!(read, record);

        let own =
            DiskRecord::of("v", &iscsi_source(|source| source.initiator = "iqn.2001-04.com.example:me".to_owned()));
        let own = own.expect("valid");
        assert!(own.owns_interface() && !record.owns_interface());
        assert_eq!((own.interface.as_str(), own.base_interface.as_str()), ("192.0.2.1:3260:v", "default"));
        assert_eq!(own.place(&dirs, false), plugin.join("iface-192.0.2.1:3260:v").join(disk));
    }

    #[test]
    fn portals_have_a_bound() {
        let portals = |count: usize| (1..count).map(|number| format!("host-{number}.{}", "x".repeat(240)));
        let of = |portals: Vec<String>| DiskRecord::of("v", &iscsi_source(|source| source.portals = portals));
        let record = of(portals(64).chain(portals(64)).collect()).expect("each counts once");
        assert_eq!(record.portals.len(), MAX_PORTALS);
        let text = serde_json::to_vec(&record).expect("JSON");
        assert!(text.len() < MAX_RECORD, "it can be read again: {} bytes", text.len());
        let error = of(portals(65).collect()).expect_err("too many").to_string();
        assert!(error.contains("host-64") && error.ends_with("must be one of at most 64"), "{error}");
    }

    #[test]
    fn what_cannot_be_an_argument_or_a_part_of_a_path_is_refused() {
        let with = |change: fn(&mut IscsiSource)| {
            DiskRecord::of("v", &iscsi_source(change)).map(|_| ()).map_err(|error| error.to_string())
        };
        type Change = fn(&mut IscsiSource);
        let table: [(Change, &str); 12] = [
            (|a| a.iqn.clear(), "iqn \"\": must begin with"),
            (|a| a.iqn = "--login".to_owned(), "iqn \"--login\": must begin with"),
            (
                |a| a.iqn = "iqn.2001-04.com.example:../../../etc".to_owned(),
                "iqn \"iqn.2001-04.com.example:../../../etc\": ",
            ),
            (|a| a.target_portal.clear(), "targetPortal \"\": must be an IP address"),
            (|a| a.target_portal = "-p".to_owned(), "targetPortal \"-p\": must be an IP address"),
            (|a| a.target_portal = "192.0.2.1/../x".to_owned(), "targetPortal \"192.0.2.1/../x\": "),
            (|a| a.portals.push("a b".to_owned()), "portals \"a b\": must be an IP address"),
            (|a| a.lun = -1, "lun \"-1\": must be between 0 and 255"),
            (|a| a.lun = 256, "lun \"256\": must be between 0 and 255"),
            (|a| a.interface = "../default".to_owned(), "iscsiInterface \"../default\": must be a name"),
            (|a| a.interface = "-o".to_owned(), "iscsiInterface \"-o\": must be a name"),
            (|a| a.initiator = "-v".to_owned(), "initiatorName \"-v\": must begin with"),
        ];
        for (change, expected) in table {
            let error = with(change).expect_err(expected);
            assert!(error.starts_with(&format!("iscsi: {expected}")), "{error}");
        }
        let own = iscsi_source(|source| source.initiator = "iqn.2001-04.com.example:me".to_owned());
        for volume in ["../v", "a/b", "v w", &"v".repeat(64)] {
            assert!(DiskRecord::of(volume, &own).is_err(), "{volume:?} would name an interface");
        }
    }

    #[test]
    fn portals_are_listed_once_with_their_ports() {
        let record = DiskRecord::of(
            "v",
            &iscsi_source(|source| {
                source.portals = ["192.0.2.2", "192.0.2.1:3260", "[fd00::1]:861"].map(str::to_owned).into()
            }),
        );
        assert_eq!(record.expect("valid").portals, ["192.0.2.1:3260", "192.0.2.2:3260", "[fd00::1]:861"]);
    }

    #[test]
    fn a_place_tells_its_disk() {
        let dirs = PodDirs::new(Path::new("/r"));
        for (portal, target, lun, interface) in [
            ("192.0.2.1:3260", "iqn.2001-04.com.example:a-lun-3", 7, "default"),
            ("[fd00::1]:861", "eui.0123456789ABCDEF", 0, "iser"),
            ("storage-1.example:3260", "naa.52004567BA64678D", 255, "default"),
        ] {
            let record = DiskRecord::of(
                "v",
                &IscsiSource {
                    target_portal: portal.to_owned(),
                    iqn: target.to_owned(),
                    lun,
                    interface: interface.to_owned(),
                    ..IscsiSource::default()
                },
            );
            let record = record.expect("valid");
            let read = DiskRecord::of_place(&record.place(&dirs, false)).expect("a disk");
            assert_eq!(read, DiskRecord { volume: String::new(), ..record });
        }
        for place in ["iface-default/x", "iface-default/192.0.2.1:3260-iqn.2001-04.com.example:a-lun-x", "other/a", ""]
        {
            assert_eq!(DiskRecord::of_place(Path::new(place)), None, "{place}");
        }
    }

    #[test]
    fn names_in_the_status_of_the_node() {
        assert_eq!(
            status_name("192.0.2.1", "iqn.2001-04.com.example:a", "7"),
            "kubernetes.io/iscsi/192.0.2.1:iqn.2001-04.com.example:a:7"
        );
        let dirs = PodDirs::new(Path::new("/r"));
        let names = |portal: &str| {
            let source = iscsi_source(|source| source.target_portal = portal.to_owned());
            names_of_place(&DiskRecord::of("v", &source).expect("valid").place(&dirs, false))
        };
        let name = |portal: &str| status_name(portal, "iqn.2001-04.com.example:a", "7");
        assert_eq!(names("192.0.2.1"), [name("192.0.2.1:3260"), name("192.0.2.1")], "either may be in the volume");
        assert_eq!(names("192.0.2.1:861"), [name("192.0.2.1:861")]);
        assert!(names_of_place(Path::new("x")).is_empty());
    }

    #[test]
    fn records_are_written_read_and_removed() {
        let root = tempfile::tempdir().expect("a folder");
        let dirs = PodDirs::new(root.path());
        let record =
            DiskRecord::of("v", &iscsi_source(|source| source.portals = vec!["192.0.2.2".to_owned()])).expect("valid");
        let place = record.place(&dirs, false);
        assert!(places(&dirs, false).expect("a list").is_empty());
        record.write(&place).expect("written");
        assert_eq!(DiskRecord::read(&place).expect("a record"), record);
        assert_eq!(places(&dirs, false).expect("a list"), std::slice::from_ref(&place));
        assert!(places(&dirs, true).expect("a list").is_empty());

        // One that is damaged, or would lead elsewhere, is not used.
        for text in
            ["", "{}", r#"{"Portals": ["-p"], "Iqn": "iqn.2001-04.com.example:a", "Lun": "7", "Iface": "default"}"#]
        {
            fs::write(place.join("iscsi.json"), text).expect("written");
            let read = DiskRecord::read(&place).expect("the names of the place");
            assert_eq!((read.portals.len(), read.target), (1, record.target.clone()), "{text}");
        }
        fs::remove_file(place.join("iscsi.json")).expect("removed");
        InPlace::Pipe.put(&place.join("iscsi.json")).expect("a pipe");
        let of_thread = place.clone();
        let read = in_time(move || DiskRecord::read(&of_thread)).expect("no other process is waited for");
        assert_eq!(read.expect("the names of the place").target, record.target);
        fs::write(place.join("other"), "").expect("written");
        assert!(DiskRecord::remove(&place).is_err() && place.join("other").exists());
        fs::remove_file(place.join("other")).expect("removed");
        DiskRecord::remove(&place).expect("removed");
        assert!(!place.parent().expect("a folder").exists());
    }
}
