//! Reads samples. Blocks for the time of a few files of the kernel: two for the node, about six for each pod.

use std::path::Path;
use std::path::PathBuf;

use tokio::time::Instant;

use super::reclaim::ReclaimStalls;
use super::sample::NodeSample;
use super::sample::PodSample;
use crate::cgroups::Layout;
use crate::cgroups::arithmetic::page_size;
use crate::cgroups::memory_high;
use crate::cgroups::usage::CgroupPlace;
use crate::cgroups::usage::Pressure;
use crate::config::pressure::PressureResource;
use crate::kernel::vmstat::Reclaim;
use crate::model::PodUid;

const OF_NODE: &str = "/proc/pressure";

/// The pressure file of a cgroup, or with no path that of the node, which cgroup v1 has too. `None` if there is none.
pub fn pressure_file(layout: &Layout, path: Option<&str>, resource: PressureResource) -> Option<PathBuf> {
    let Some(path) = path else { return Some(Path::new(OF_NODE).join(resource.as_str())) };
    let mount = layout.mount_of(resource.as_str()).filter(|_| layout.is_v2())?;
    Some(mount.join(path.trim_start_matches('/')).join(format!("{}.pressure", resource.as_str())))
}

/// A pod to be read.
#[derive(Clone, PartialEq, Debug)]
pub struct PodPlace {
    /// The pod.
    pub uid: PodUid,
    /// `namespace/name`
    pub name: String,
    /// It is never evicted.
    pub critical: bool,
    /// Its priority.
    pub priority: i32,
    /// Bytes of memory that it requests.
    pub requested: u64,
    /// The path of its cgroup in every hierarchy.
    pub path: String,
}

/// Reads the node and its pods. Cheap to clone.
#[derive(Clone)]
pub struct PressureReader {
    layout: Layout,
    /// The cgroup of all pods, if there is one.
    kubepods: Option<String>,
    /// Without probes none.
    stalls: Option<ReclaimStalls>,
}

impl PressureReader {
    /// Of this machine.
    pub fn new(layout: Layout, kubepods: Option<String>, stalls: Option<ReclaimStalls>) -> Self {
        Self { layout, kubepods, stalls }
    }

    /// The node; `available`: bytes of memory that it has left.
    pub fn node(&self, available: Option<u64>) -> NodeSample {
        let of = |path: Option<&str>| {
            let file = pressure_file(&self.layout, path, PressureResource::Memory)?;
            Pressure::try_read(&file).ok()
        };
        let Reclaim { scanned, refaulted } = Reclaim::read();
        let kubepods = self.kubepods.as_deref();
        NodeSample {
            at: Instant::now(),
            node: of(None),
            kubepods: kubepods.and_then(|path| of(Some(path))),
            scanned,
            refaulted,
            limit_hits: kubepods.map(|path| CgroupPlace::at(&self.layout, path).stalls().own_max_hits),
            available,
        }
    }

    /// The pods whose cgroups exist.
    pub fn pods(&self, places: &[PodPlace]) -> Vec<PodSample> {
        places.iter().filter_map(|place| self.pod(place)).collect()
    }

    fn pod(&self, pod: &PodPlace) -> Option<PodSample> {
        let place = CgroupPlace::at(&self.layout, &pod.path);
        let memory = place.read_memory()?;
        let stalls = place.stalls();
        let micros = |pressure: Pressure| std::time::Duration::from_micros(pressure.some.total);
        let highs = place.memory_folder().filter(|_| self.layout.is_v2()).map(memory_high::set_in);
        Some(PodSample {
            uid: pod.uid.clone(),
            name: pod.name.clone(),
            critical: pod.critical,
            priority: pod.priority,
            requested: pod.requested,
            working_set: memory.working_set,
            waited: stalls.memory.map(micros),
            reclaimed: self.stalls.as_ref().and_then(|counted| counted.of_pod(&pod.path)).map(|stalls| stalls.time),
            refaulted: stalls.refaulted_pages.saturating_mul(page_size()),
            high_hits: stalls.high_hits,
            max_hits: stalls.max_hits,
            throttled: stalls.throttled,
            highs: highs.unwrap_or_default(),
        })
    }

    /// Bytes of memory that are charged to the cgroup at `path`; `None` once it was removed.
    pub fn held(&self, path: &str) -> Option<u64> {
        CgroupPlace::at(&self.layout, path).read_memory().map(|memory| memory.usage)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::*;

    fn place(name: &str) -> PodPlace {
        let path = format!("/kubepods/pod{name}");
        PodPlace { uid: name.into(), name: format!("ns/{name}"), critical: false, priority: 1, requested: 5, path }
    }

    #[tokio::test]
    async fn pods_of_version_2_and_one_that_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::V2 { mount: dir.path().to_owned() };
        let pod = dir.path().join("kubepods/poda");
        fs::create_dir_all(pod.join("main")).unwrap();
        let put = |name: &str, text: &str| fs::write(pod.join(name), text).unwrap();
        put("memory.current", "1000\n");
        put("memory.stat", "inactive_file 400\nworkingset_refault_file 2\n");
        put("memory.pressure", "some avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\n");
        put("memory.events", "high 3\nmax 4\n");
        put("main/memory.high", "800\n");
        let reader = PressureReader::new(layout.clone(), Some("/kubepods".to_owned()), None);
        let found = reader.pods(&[place("gone"), place("a")]);
        assert_eq!(found.len(), 1, "{found:?}");
        let sample = &found[0];
        assert_eq!((sample.uid.as_str(), sample.working_set, sample.requested), ("a", 600, 5));
        assert_eq!((sample.waited, sample.reclaimed), (Some(Duration::from_millis(1500)), None));
        assert_eq!((sample.refaulted, sample.high_hits, sample.max_hits), (2 * page_size(), 3, 4));
        assert_eq!((sample.highs.len(), sample.highs[0].bytes), (1, 800));
        assert_eq!((reader.held("/kubepods/poda"), reader.held("/kubepods/podgone")), (Some(1000), None));
        fs::remove_file(pod.join("memory.current")).unwrap();
        assert_eq!(reader.pods(&[place("a")]), [], "it vanishes while it is read");
        let file = pressure_file(&layout, Some("/kubepods"), PressureResource::Io);
        assert_eq!(file, Some(dir.path().join("kubepods/io.pressure")));
    }

    #[tokio::test]
    async fn version_1_has_the_pressure_of_the_node_alone() {
        let dir = tempfile::tempdir().unwrap();
        let controllers = [("memory".to_owned(), dir.path().to_owned())].into();
        let layout = Layout::V1 { controllers, unified: None };
        fs::create_dir_all(dir.path().join("kubepods/poda")).unwrap();
        let put = |name: &str, text: &str| fs::write(dir.path().join("kubepods").join(name), text).unwrap();
        put("poda/memory.usage_in_bytes", "1000\n");
        put("poda/memory.stat", "total_inactive_file 400\n");
        put("memory.failcnt", "7\n");
        let reader = PressureReader::new(layout.clone(), Some("/kubepods".to_owned()), None);
        let sample = &reader.pods(&[place("a")])[0];
        assert_eq!((sample.working_set, sample.waited, sample.highs.len()), (600, None, 0));
        let node = reader.node(Some(3));
        assert_eq!((node.kubepods, node.limit_hits, node.available), (None, Some(7), Some(3)));
        assert_eq!(pressure_file(&layout, Some("/kubepods"), PressureResource::Memory), None);
        assert!(pressure_file(&layout, None, PressureResource::Cpu).is_some());
    }

    #[tokio::test]
    async fn without_a_memory_controller_no_pod_is_found() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("kubepods/poda")).unwrap();
        let v2 = Layout::V2 { mount: dir.path().to_owned() };
        let v1 = Layout::V1 { controllers: [("cpu".to_owned(), dir.path().to_owned())].into(), unified: None };
        for layout in [v2, v1] {
            let reader = PressureReader::new(layout, Some("/kubepods".to_owned()), None);
            assert_eq!(reader.pods(&[place("a")]), []);
            assert_eq!((reader.held("/kubepods/poda"), reader.node(Some(3)).available), (None, Some(3)));
        }
    }
}
