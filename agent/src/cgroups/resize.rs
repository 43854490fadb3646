//! Which values of a pod's cgroup a resize changes, and in which direction: what grows is written before the cgroups of its
//! containers, what shrinks after them (KEP-1287).

use std::path::Path;

use super::CgroupError;
use super::CgroupValues;
use super::Cgroups;
use super::Layout;
use super::arithmetic;
use super::current::Current;
use super::usage::CgroupPlace;
use super::values::UNLIMITED;
use crate::model::QosClass;

/// Direction of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The pod may use more.
    Increase,
    /// The pod may use less.
    Decrease,
}

impl Change {
    fn of<T: Ord>(has: T, wanted: T) -> Self {
        if wanted > has { Self::Increase } else { Self::Decrease }
    }
}

/// Values that a pod's cgroup has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PodLimits {
    /// In the unit of `cpu.shares`.
    pub cpu_shares: Option<u64>,
    /// Quota (-1 for none) and period, microseconds.
    pub cpu_max: Option<(i64, u64)>,
    /// Bytes; [`UNLIMITED`] or more for none.
    pub memory_max: Option<u64>,
}

/// How the values of a pod's cgroup differ from wanted ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodChanges {
    /// The present values.
    pub has: PodLimits,
    /// Of the memory limit.
    pub memory: Option<Change>,
    /// `memory.min`, `memory.low` and `memory.high` that differ.
    pub protection: CgroupValues,
    /// Of quota and period.
    pub quota: Option<Change>,
    /// Of the CPU weight.
    pub shares: Option<Change>,
}

/// Compares. A limit that is not wanted stays: limits are not removed. Pure.
fn changes(current: &Current, wanted: &CgroupValues, is_v2: bool, page: u64) -> PodChanges {
    let differing = current.differing(wanted, is_v2, page);
    let weight = if is_v2 { arithmetic::weight(wanted.cpu_shares) } else { wanted.cpu_shares };
    // CPU time per period, compared as a share; no quota is the highest.
    let share = |(quota, period): (i64, u64)| match u128::try_from(quota) {
        Ok(quota) => quota * 1_000_000 / u128::from(period.max(1)),
        Err(_) => u128::MAX,
    };
    let shares_of = |weight: u64| if is_v2 { arithmetic::shares_of_weight(weight) } else { weight };
    PodChanges {
        has: PodLimits {
            cpu_shares: current.cpu_weight.map(shares_of),
            cpu_max: current.cpu_max,
            memory_max: current.memory_max,
        },
        memory: differing.memory_max.map(|wanted| Change::of(current.memory_max.unwrap_or(UNLIMITED), wanted)),
        protection: CgroupValues {
            memory_min: differing.memory_min,
            memory_low: differing.memory_low,
            memory_high: differing.memory_high,
            ..CgroupValues::default()
        },
        quota: differing.cpu_max.zip(current.cpu_max).map(|(wanted, has)| Change::of(share(has), share(wanted))),
        shares: (differing.cpu_shares > 0).then(|| Change::of(current.cpu_weight.unwrap_or(0), weight)),
    }
}

impl Cgroups {
    /// How the pod's cgroup differs from these values.
    ///
    /// # Errors
    /// The cgroup does not exist.
    pub async fn pod_changes(
        &self,
        class: QosClass,
        uid: &str,
        wanted: &CgroupValues,
    ) -> Result<PodChanges, CgroupError> {
        let name = self.root.pod(class, uid)?;
        self.check_exists(&name).await?;
        let wanted = self.rounded(wanted);
        // Values that are not to be changed are read too.
        let asked = CgroupValues {
            cpu_shares: wanted.cpu_shares.max(arithmetic::MIN_SHARES),
            cpu_max: wanted.cpu_max.or(Some((-1, arithmetic::DEFAULT_CFS_PERIOD))),
            memory_max: wanted.memory_max.or(Some(UNLIMITED)),
            ..wanted.clone()
        };
        let compare = move |layout: &Layout, path: &str| {
            let current = Current::read(layout, path, &asked);
            Ok(changes(&current, &wanted, layout.is_v2(), arithmetic::page_size()))
        };
        self.blocking(&name.path(self.driver), compare).await
    }

    /// Bytes of memory that the pod uses; `None` if that is not readable.
    pub async fn pod_memory_in_use(&self, class: QosClass, uid: &str) -> Option<u64> {
        let path = self.root.pod(class, uid).ok()?.path(self.driver);
        let read =
            |layout: &Layout, path: &str| Ok(CgroupPlace::at(layout, path).read_memory().map(|memory| memory.usage));
        self.blocking(&path, read).await.ok().flatten()
    }

    /// Bytes of memory that the cgroup of a container uses, which has to be one below the pod's; `pid` is one of its
    /// processes. `None` if that is not readable.
    pub async fn container_memory_in_use(&self, class: QosClass, uid: &str, container: &str, pid: u32) -> Option<u64> {
        let path = self.root.pod(class, uid).ok()?.path(self.driver);
        let container = container.to_owned();
        let read = move |layout: &Layout, path: &str| {
            let memberships = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
            Ok(memory_below(layout, path, &memberships, &container))
        };
        self.blocking(&path, read).await.ok().flatten()
    }
}

/// Bytes of memory that the container's cgroup uses, if it is one below `pod`. `memberships` is the text of
/// `/proc/<pid>/cgroup` of one of its processes.
fn memory_below(layout: &Layout, pod: &str, memberships: &str, container: &str) -> Option<u64> {
    let place = CgroupPlace::named(layout, memberships, container)?;
    let is_below = Path::new(&place.path(layout)?).starts_with(pod);
    is_below.then(|| place.read_memory().map(|memory| memory.usage)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    fn current() -> Current {
        Current {
            cpu_weight: Some(39),
            cpu_max: Some((50_000, 100_000)),
            memory_max: Some(400 << 20),
            memory_min: Some(0),
            ..Current::default()
        }
    }

    fn wanted() -> CgroupValues {
        CgroupValues {
            cpu_shares: 1024,
            cpu_max: Some((50_000, 100_000)),
            memory_max: Some(400 << 20),
            ..CgroupValues::default()
        }
    }

    #[test]
    fn equal_values_do_not_change() {
        let found = changes(&current(), &wanted(), true, PAGE);
        let has = PodLimits { cpu_shares: Some(998), cpu_max: current().cpu_max, memory_max: Some(400 << 20) };
        assert_eq!(found, PodChanges { has, ..PodChanges::default() });
    }

    #[test]
    fn directions() {
        let of = |change: fn(&mut CgroupValues)| {
            let mut wanted = wanted();
            change(&mut wanted);
            let found = changes(&current(), &wanted, true, PAGE);
            [found.memory, found.quota, found.shares]
        };
        let (increase, decrease) = (Some(Change::Increase), Some(Change::Decrease));
        assert_eq!(of(|values| values.memory_max = Some(500 << 20)), [increase, None, None]);
        assert_eq!(of(|values| values.memory_max = Some(300 << 20)), [decrease, None, None]);
        assert_eq!(of(|values| values.cpu_max = Some((60_000, 100_000))), [None, increase, None]);
        assert_eq!(of(|values| values.cpu_max = Some((-1, 100_000))), [None, increase, None]);
        assert_eq!(of(|values| values.cpu_max = Some((50_000, 200_000))), [None, decrease, None]);
        assert_eq!(of(|values| values.cpu_shares = 2048), [None, None, increase]);
        assert_eq!(of(|values| values.cpu_shares = 2), [None, None, decrease]);
        let removed = |values: &mut CgroupValues| (values.memory_max, values.cpu_max) = (None, None);
        assert_eq!(of(removed), [None; 3], "limits are not removed");
    }

    #[test]
    fn shares_of_cgroup_v1_are_compared_as_they_are() {
        let current = Current { cpu_weight: Some(1024), ..current() };
        for (cpu_shares, change) in [(2048, Some(Change::Increase)), (512, Some(Change::Decrease)), (1024, None)] {
            let found = changes(&current, &CgroupValues { cpu_shares, ..wanted() }, false, PAGE);
            assert_eq!((found.has.cpu_shares, found.shares), (Some(1024), change), "{cpu_shares}");
        }
    }

    #[test]
    fn the_memory_of_a_container_that_has_divided_its_cgroup_counts_whole() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::V2 { mount: dir.path().to_owned() };
        for (cgroup, bytes) in [("kubepods/pod1/c1", "500"), ("kubepods/pod1/c1/init", "20")] {
            let folder = dir.path().join(cgroup);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("memory.current"), bytes).unwrap();
        }
        let of = |pod: &str, container: &str| memory_below(&layout, pod, "0::/kubepods/pod1/c1/init\n", container);
        assert_eq!(of("/kubepods/pod1", "c1"), Some(500));
        assert_eq!(of("/kubepods/pod1", "c2"), None, "the process is in another container");
        assert_eq!(of("/kubepods/pod", "c1"), None, "and that in another pod");
    }

    #[test]
    fn a_first_limit_is_a_decrease() {
        let unlimited = Current { memory_max: Some(UNLIMITED), cpu_max: Some((-1, 100_000)), ..current() };
        let found = changes(&unlimited, &wanted(), true, PAGE);
        assert_eq!([found.memory, found.quota], [Some(Change::Decrease); 2]);
        let protected = CgroupValues { memory_min: Some(PAGE), ..wanted() };
        let protection = CgroupValues { memory_min: Some(PAGE), ..CgroupValues::default() };
        assert_eq!(changes(&current(), &protected, true, PAGE).protection, protection);
    }
}
