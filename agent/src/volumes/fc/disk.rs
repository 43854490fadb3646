//! A Fibre Channel disk: the checked settings of a volume, and what the name of its place says. As upstream, it has
//! no record.

use std::path::Path;
use std::path::PathBuf;

use k8s_openapi::api::core::v1::FCVolumeSource;

use super::NAME;
use crate::model::fc;
use crate::volumes::PodDirs;
use crate::volumes::VolumeError;
use crate::volumes::error::OnPath as _;
use crate::volumes::layout;

/// Most names of one disk: its place is named by all of them.
const MAX_IDS: usize = 64;
/// Longest name of a file.
const MAX_NAME: usize = 255;
/// What joins several names in the name of a place.
const JOINT: &str = "-";

/// The settings of a volume, unchecked.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(in crate::volumes) struct FcSource {
    pub(in crate::volumes) target_wwns: Vec<String>,
    pub(in crate::volumes) lun: Option<i32>,
    pub(in crate::volumes) wwids: Vec<String>,
    pub(in crate::volumes) fs_type: String,
    pub(in crate::volumes) read_only: bool,
}

impl From<&FCVolumeSource> for FcSource {
    fn from(source: &FCVolumeSource) -> Self {
        Self {
            target_wwns: source.target_wwns.clone().unwrap_or_default(),
            lun: source.lun,
            wwids: source.wwids.clone().unwrap_or_default(),
            fs_type: source.fs_type.clone().unwrap_or_default(),
            read_only: source.read_only == Some(true),
        }
    }
}

impl FcSource {
    /// The unit, if targets are named: it comes before identifiers, as upstream.
    fn unit(&self) -> Option<i32> {
        self.lun.filter(|_| !self.target_wwns.is_empty())
    }
}

/// What identifies a disk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::volumes) struct FcDisk {
    /// World Wide Names of the targets that have it, if it is a unit; otherwise its World Wide Identifiers, with underscores
    /// for spaces.
    pub(super) ids: Vec<String>,
    /// The logical unit.
    pub(super) lun: Option<u8>,
}

impl FcDisk {
    /// The disk of a volume with these settings.
    ///
    /// # Errors
    /// A field that cannot be used.
    pub(in crate::volumes) fn of(source: &FcSource) -> Result<Self, VolumeError> {
        let disk = match source.unit() {
            Some(lun) => {
                let lun = fc::check_lun(lun).map_err(|problem| wrong("lun", &lun.to_string(), problem))?;
                Self { ids: source.target_wwns.clone(), lun: Some(lun) }
            }
            None => Self { ids: source.wwids.iter().map(|id| id.replace(' ', "_")).collect(), lun: None },
        };
        disk.check()?;
        Ok(disk)
    }

    /// Checks what becomes the name of a place.
    fn check(&self) -> Result<(), VolumeError> {
        if self.ids.is_empty() {
            return Err(wrong("targetWWNs", "", "must be set with lun, or wwids"));
        }
        for id in &self.ids {
            match self.lun {
                Some(_) => fc::check_wwn(id).map_err(|problem| wrong("targetWWNs", id, problem))?,
                None => fc::check_wwid(id).map_err(|problem| wrong("wwids", id, problem))?,
            }
        }
        let name = self.directory();
        if self.ids.len() > MAX_IDS || name.len() > MAX_NAME {
            let field = if self.lun.is_some() { "targetWWNs" } else { "wwids" };
            return Err(wrong(field, &name, "must be at most 64, which are the name of a directory together"));
        }
        Ok(())
    }

    /// Name of the directory of the place.
    fn directory(&self) -> String {
        let ids = self.ids.join(JOINT);
        self.lun.map_or_else(|| ids.clone(), |lun| format!("{ids}{}{lun}", fc::UNIT))
    }

    /// Where it is mounted for the node, or its raw device is used from.
    pub(in crate::volumes) fn place(&self, dirs: &PodDirs, is_block: bool) -> PathBuf {
        root(dirs, is_block).join(self.directory())
    }

    /// The disk by the name of its place; two readings if that can be one identifier with a dash or several identifiers.
    pub(in crate::volumes) fn of_place(place: &Path) -> Vec<Self> {
        let Some(name) = place.file_name().and_then(|name| name.to_str()) else { return Vec::new() };
        let split = |ids: &str| ids.split(JOINT).map(str::to_owned).collect::<Vec<_>>();
        let mut readings = match name.rsplit_once(fc::UNIT) {
            Some((ids, lun)) => match lun.parse() {
                Ok(lun) => vec![Self { ids: split(ids), lun: Some(lun) }],
                Err(_) => Vec::new(),
            },
            None => vec![Self { ids: vec![name.to_owned()], lun: None }, Self { ids: split(name), lun: None }],
        };
        readings.dedup();
        readings.retain(|disk| disk.check().is_ok());
        readings
    }
}

/// Name of a volume's disk in the status of the Node. As upstream, Go's notation of the lists.
pub(in crate::volumes) fn status_name(source: &FcSource) -> String {
    match source.unit() {
        Some(lun) => name_of(&source.target_wwns, Some(lun)),
        None => name_of(&source.wwids, None),
    }
}

fn name_of(ids: &[String], lun: Option<i32>) -> String {
    let ids = ids.join(" ");
    lun.map_or_else(|| format!("{NAME}/[{ids}]"), |lun| format!("{NAME}/[{ids}]:{lun}"))
}

/// Names that the Node's status may have for the disk of a place: it has underscores for spaces.
pub(in crate::volumes) fn names_of_place(place: &Path) -> Vec<String> {
    let names = |disk: FcDisk| {
        let lun = disk.lun.map(i32::from);
        let spaced: Vec<String> = disk.ids.iter().map(|id| id.replace('_', " ")).collect();
        [name_of(&disk.ids, lun), name_of(&spaced, lun)]
    };
    let mut all: Vec<String> = FcDisk::of_place(place).into_iter().flat_map(names).collect();
    all.dedup();
    all
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
    let mut places = layout::entries(&root(dirs, is_block))?;
    places.retain(|place| !FcDisk::of_place(place).is_empty());
    Ok(places)
}

/// Removes a place on which nothing is mounted. Blocking.
///
/// # Errors
/// It holds something.
pub(in crate::volumes) fn remove_place(place: &Path) -> Result<(), VolumeError> {
    match std::fs::remove_dir(place) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        removed => removed.on("remove", place),
    }
}

fn wrong(field: &'static str, value: &str, problem: &'static str) -> VolumeError {
    let value = value.chars().take(256).collect();
    VolumeError::DiskField { kind: "fc", field, value, problem }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn texts(all: &[&str]) -> Vec<String> {
        all.iter().map(|text| (*text).to_owned()).collect()
    }

    fn unit(wwns: &[&str], lun: i32) -> FcSource {
        FcSource { target_wwns: texts(wwns), lun: Some(lun), ..FcSource::default() }
    }

    fn identified(wwids: &[&str]) -> FcSource {
        FcSource { wwids: texts(wwids), ..FcSource::default() }
    }

    #[test]
    fn sources_of_volumes() {
        let source = json!({"targetWWNs": ["50060e801049cfd1"], "lun": 0, "wwids": ["3600a"],
            "fsType": "xfs", "readOnly": true});
        let source: FCVolumeSource = serde_json::from_value(source).expect("a source");
        let source = FcSource::from(&source);
        let all = FcSource { wwids: texts(&["3600a"]), ..unit(&["50060e801049cfd1"], 0) };
        assert_eq!(source, FcSource { fs_type: "xfs".to_owned(), read_only: true, ..all });
        let disk = FcDisk::of(&source).expect("a disk");
        assert_eq!((disk.ids, disk.lun), (texts(&["50060e801049cfd1"]), Some(0)), "the unit comes first");
        let of_target = FcSource { lun: None, ..source };
        assert_eq!(FcDisk::of(&of_target).expect("a disk").ids, ["3600a"]);
    }

    #[test]
    fn the_place_is_a_kubelets_and_tells_the_disk() {
        let dirs = PodDirs::new(Path::new("/r"));
        let plugin = Path::new("/r/plugins/kubernetes.io/fc");
        for (source, directory) in [
            (unit(&["50060e801049cfd1"], 0), "50060e801049cfd1-lun-0"),
            (unit(&["50060e801049cfd1", "50060e801049cfd2"], 255), "50060e801049cfd1-50060e801049cfd2-lun-255"),
            (identified(&["3600508b400105e210000900000490000"]), "3600508b400105e210000900000490000"),
            (identified(&["SVENDOR a", "b"]), "SVENDOR_a-b"),
            (identified(&["0QEMU_drive-1"]), "0QEMU_drive-1"),
        ] {
            let disk = FcDisk::of(&source).expect(directory);
            assert_eq!(disk.place(&dirs, false), plugin.join(directory));
            assert_eq!(disk.place(&dirs, true), plugin.join("volumeDevices").join(directory));
            assert!(FcDisk::of_place(&plugin.join(directory)).contains(&disk), "{directory}");
        }
        assert_eq!(FcDisk::of_place(Path::new("/r/3600a")).len(), 1);
        for place in ["volumeDevices", "a-lun-256", "-lun-0", "a-lun-", "a b/..", "", "x\u{e4}"] {
            assert!(FcDisk::of_place(Path::new(place)).is_empty(), "{place}");
        }
    }

    #[test]
    fn names_in_the_status_of_the_node() {
        assert_eq!(status_name(&unit(&["a", "b"], 7)), "kubernetes.io/fc/[a b]:7");
        assert_eq!(status_name(&identified(&["A b", "c"])), "kubernetes.io/fc/[A b c]");
        assert_eq!(names_of_place(Path::new("a-b-lun-7")), ["kubernetes.io/fc/[a b]:7"]);
        assert_eq!(names_of_place(Path::new("3600a")), ["kubernetes.io/fc/[3600a]"]);
        let expected = ["[A_b-c]", "[A b-c]", "[A_b c]", "[A b c]"].map(|name| format!("kubernetes.io/fc/{name}"));
        assert_eq!(names_of_place(Path::new("A_b-c")), expected, "each may be in the volume");
        assert!(names_of_place(Path::new("volumeDevices")).is_empty());
    }

    #[test]
    fn what_names_no_disk_or_another_place_is_refused() {
        for (source, expected) in [
            (FcSource::default(), "fc: targetWWNs \"\": must be set with lun, or wwids"),
            (FcSource { lun: None, ..unit(&["a"], 0) }, "fc: targetWWNs \"\": must be set with lun, or wwids"),
            (unit(&["a"], -1), "fc: lun \"-1\": must be between 0 and 255"),
            (unit(&["a"], 256), "fc: lun \"256\": must be between 0 and 255"),
            (unit(&["a", "../b"], 0), "fc: targetWWNs \"../b\": must be at most 32"),
            (unit(&[""], 0), "fc: targetWWNs \"\": must be at most 32"),
            (identified(&["../../x"]), "fc: wwids \"../../x\": must begin with a letter or digit"),
            (identified(&["volumeDevices"]), "fc: wwids \"volumeDevices\": must not be the name of other places"),
            (identified(&["a-lun-0"]), "fc: wwids \"a-lun-0\": must not be the name of other places"),
            (identified(&["a"; 65]), "fc: wwids \"a-a-"),
            (identified(&[&"a".repeat(128), &"b".repeat(127)]), "fc: wwids \"aaa"),
        ] {
            let error = FcDisk::of(&source).expect_err(expected).to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn places_are_listed_and_removed() {
        let root = tempfile::tempdir().expect("a folder");
        let dirs = PodDirs::new(root.path());
        assert!(places(&dirs, false).expect("a list").is_empty());
        let disk = FcDisk::of(&unit(&["a"], 0)).expect("a disk");
        let all = [disk.place(&dirs, false), disk.place(&dirs, true)];
        for place in &all {
            std::fs::create_dir_all(place).expect("a folder");
        }
        assert_eq!(places(&dirs, false).expect("a list"), all[..1]);
        assert_eq!(places(&dirs, true).expect("a list"), all[1..]);
        std::fs::write(all[0].join("other"), "").expect("a file");
        assert!(remove_place(&all[0]).is_err() && all[0].join("other").exists());
        std::fs::remove_file(all[0].join("other")).expect("removed");
        for _ in 0..2 {
            remove_place(&all[0]).expect("removed, or not there");
        }
        assert!(!all[0].exists());
    }
}
