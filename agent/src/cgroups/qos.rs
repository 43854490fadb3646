//! Values of the QoS classes, which follow from the requests of their pods. They are computed and written as the kubelet
//! does it: before a pod cgroup is created, after a pod was killed, and every minute.
//!
//! The present values are read from the kernel: nothing is remembered, so a restart of the agent, or a node taken over from
//! another kubelet, changes nothing. Until every source of pods has been read, weights and protections are only raised.

use super::CgroupError;
use super::CgroupName;
use super::CgroupValues;
use super::Cgroups;
use super::Layout;
use super::Requested;
use super::arithmetic;
use super::current::Current;
use super::usage::CgroupPlace;
use super::values::UNLIMITED;
use crate::model::LoggedReasons;
use crate::model::QosClass;

/// All classes; the cgroup of the Guaranteed one is `kubepods`.
const CLASSES: [QosClass; 3] = [QosClass::Guaranteed, QosClass::Burstable, QosClass::BestEffort];
/// What has failed if none of them can be read.
const READING: &str = "reading";

/// What the classes get besides their CPU weight.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QosPolicy {
    /// Requested memory is protected (`memoryReservationPolicy: TieredReservation`, KEP-2570).
    pub protects_memory: bool,
    /// `qosReserved`.
    pub reserved: Option<ReservedMemory>,
    /// Huge page sizes of the node, bytes. The classes have no limit of them.
    pub hugepage_sizes: Vec<u64>,
}

/// `qosReserved.memory`: requested memory of higher classes that lower ones cannot use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservedMemory {
    /// How much of the requests, percent.
    pub percent: i64,
    /// Memory of the node without what is reserved for daemons, bytes.
    pub allocatable: i64,
}

/// Values of the classes in the order of [`CLASSES`]. Pure.
fn values(requested: &Requested, policy: &QosPolicy) -> [CgroupValues; 3] {
    let bytes = |amount: i64| u64::try_from(amount).unwrap_or(0);
    let protected = |amount: i64| policy.protects_memory.then(|| bytes(amount));
    let base = CgroupValues {
        hugepages: policy.hugepage_sizes.iter().map(|size| (*size, UNLIMITED)).collect(),
        ..CgroupValues::default()
    };
    // A limit from an incomplete sum would be too high.
    let reserved = policy.reserved.filter(|_| requested.is_complete);
    let below = |limit: i64, request: i64, percent: i64| limit - request.saturating_mul(percent) / 100;
    let burstable = reserved.map(|r| below(r.allocatable, requested.guaranteed_memory, r.percent));
    let best_effort = reserved.zip(burstable).map(|(r, limit)| below(limit, requested.burstable_memory, r.percent));
    let all = requested.guaranteed_memory.saturating_add(requested.burstable_memory);
    [
        CgroupValues { memory_min: protected(all), memory_low: protected(requested.burstable_memory), ..base.clone() },
        CgroupValues {
            cpu_shares: arithmetic::shares(requested.burstable_milli_cpu),
            memory_low: protected(requested.burstable_memory),
            memory_max: burstable.map(bytes),
            ..base.clone()
        },
        CgroupValues { cpu_shares: arithmetic::MIN_SHARES, memory_max: best_effort.map(bytes), ..base },
    ]
}

impl Cgroups {
    /// The values of the classes depend on pods of this one.
    pub(super) fn depends_on(&self, class: QosClass) -> bool {
        let by_memory = self.policy.protects_memory || self.policy.reserved.is_some();
        class == QosClass::Burstable || (class == QosClass::Guaranteed && by_memory)
    }

    /// Writes what differs from the values that the QoS classes should have. Failures are logged, once for each change of
    /// the reason. True once every source of pods has been read.
    pub async fn update_qos_classes(&self) -> bool {
        let Some(requests) = &self.requests else { return true };
        let mut logged = self.qos.lock().await;
        let requested = requests.requested();
        if let Some(metrics) = self.metrics.as_ref().filter(|_| self.policy.protects_memory) {
            metrics.cgroups.protected_memory(requested.guaranteed_memory, requested.burstable_memory);
        }
        let wanted = values(&requested, &self.policy);
        let names = CLASSES.map(|class| self.root.class(class));
        let differing = match self.differing_classes(&names, wanted, requested.is_complete).await {
            Ok(differing) => differing,
            Err(error) => {
                if logged.is_new(READING, &error.to_string()) {
                    tracing::warn!(%error, "cannot read the cgroups of the QoS classes");
                }
                return requested.is_complete;
            }
        };
        logged.succeeded(READING);
        for (name, values) in names.iter().zip(differing) {
            if !values.is_empty() {
                self.write_class(name, values, &mut logged).await;
            }
        }
        requested.is_complete
    }

    /// Removes a protection of memory that an earlier configuration left. Failures are logged.
    pub async fn clear_memory_protection(&self) {
        let none = CgroupValues { memory_low: Some(0), ..CgroupValues::default() };
        let classes =
            [(QosClass::Guaranteed, CgroupValues { memory_min: Some(0), ..none.clone() }), (QosClass::Burstable, none)];
        for (class, values) in classes {
            if let Err(error) = self.update_existing(&self.root.class(class), &values).await {
                tracing::warn!(class = class.as_str(), %error, "cannot remove the memory protection of a QoS class");
            }
        }
    }

    async fn differing_classes(
        &self,
        names: &[CgroupName; 3],
        wanted: [CgroupValues; 3],
        is_complete: bool,
    ) -> Result<Vec<CgroupValues>, CgroupError> {
        let paths = names.each_ref().map(|name| name.path(self.driver));
        let read = move |layout: &Layout, _: &str| {
            let is_v2 = layout.is_v2();
            let differing = |(path, wanted): (String, CgroupValues)| {
                let current = Current::read(layout, &path, &wanted);
                let differing = current.differing(&wanted, is_v2, arithmetic::page_size());
                if is_complete { differing } else { current.raising(&differing, is_v2) }
            };
            Ok(paths.into_iter().zip(wanted).map(differing).collect())
        };
        self.blocking(&self.kubepods_path(), read).await
    }

    /// A limit below the present usage, which the kernel of v1 refuses, is set to that usage: the class cannot grow.
    async fn write_class(&self, name: &CgroupName, values: CgroupValues, logged: &mut LoggedReasons) {
        let path = name.path(self.driver);
        let Err(mut error) = self.counted("update", self.write(name, &values)).await else {
            logged.succeeded(&path);
            return tracing::debug!(cgroup = path, ?values, "updated a QoS class");
        };
        if let Some(limit) = values.memory_max
            && let Some(usage) = self.memory_usage(&path).await.filter(|usage| *usage > limit)
        {
            let values = CgroupValues { memory_max: Some(usage), ..values };
            match self.counted("update", self.write(name, &values)).await {
                Ok(()) if logged.is_new(&path, "its usage is above its limit") => {
                    return tracing::info!(cgroup = path, limit, usage, "limited a QoS class to its usage");
                }
                Ok(()) => {
                    return tracing::debug!(cgroup = path, limit, usage, "limited a QoS class to its usage again");
                }
                Err(second) => error = second,
            }
        }
        match logged.is_new(&path, &error.to_string()) {
            true => tracing::warn!(cgroup = path, %error, "cannot update a QoS class"),
            false => tracing::debug!(cgroup = path, %error, "cannot update a QoS class again"),
        }
    }

    async fn memory_usage(&self, path: &str) -> Option<u64> {
        let read =
            |layout: &Layout, path: &str| Ok(CgroupPlace::at(layout, path).read_memory().map(|memory| memory.usage));
        self.blocking(path, read).await.ok().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: i64 = 1 << 20;

    fn requested() -> Requested {
        Requested {
            burstable_milli_cpu: 1500,
            guaranteed_memory: 100 * MIB,
            burstable_memory: 60 * MIB,
            is_complete: true,
        }
    }

    #[test]
    fn weights_and_huge_pages_are_always_set() {
        let policy = QosPolicy { hugepage_sizes: vec![2 << 20], ..QosPolicy::default() };
        let [kubepods, burstable, best_effort] = values(&requested(), &policy);
        assert_eq!([kubepods.cpu_shares, burstable.cpu_shares, best_effort.cpu_shares], [0, 1536, 2]);
        for class in [&kubepods, &burstable, &best_effort] {
            assert_eq!(class.hugepages, [(2 << 20, UNLIMITED)].into());
            assert_eq!(class.memory_max, None);
        }
        assert_eq!([kubepods.memory_min, kubepods.memory_low, burstable.memory_low], [None; 3]);
    }

    #[test]
    fn tiers_protect_requested_memory() {
        let policy = QosPolicy { protects_memory: true, ..QosPolicy::default() };
        let [kubepods, burstable, best_effort] = values(&requested(), &policy);
        assert_eq!((kubepods.memory_min, kubepods.memory_low), (Some(160 << 20), Some(60 << 20)));
        assert_eq!((burstable.memory_min, burstable.memory_low), (None, Some(60 << 20)));
        assert_eq!((best_effort.memory_min, best_effort.memory_low), (None, None));
    }

    #[test]
    fn lower_classes_cannot_use_reserved_memory() {
        let reserved = Some(ReservedMemory { percent: 50, allocatable: 1000 * MIB });
        let policy = QosPolicy { reserved, ..QosPolicy::default() };
        let limits = |requested: &Requested| values(requested, &policy).map(|class| class.memory_max);
        assert_eq!(limits(&requested()), [None, Some(950 << 20), Some(920 << 20)]);
        assert_eq!(limits(&Requested { is_complete: false, ..requested() }), [None; 3]);
    }
}
