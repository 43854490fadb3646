//! Types of the Summary API (`k8s.io/kubelet/pkg/apis/stats/v1alpha1`). Plain data.

use k8s_openapi::jiff::Timestamp;
use serde::Serialize;
use serde::Serializer;

use crate::cgroups::usage::Pressure;
use crate::cgroups::usage::PressureLine;

/// Nanoseconds since the Unix epoch, serialised in whole seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Time(pub(super) i64);

impl Serialize for Time {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let time = Timestamp::from_second(self.0.div_euclid(1_000_000_000)).unwrap_or(Timestamp::UNIX_EPOCH);
        serializer.collect_str(&time.strftime("%Y-%m-%dT%H:%M:%SZ"))
    }
}

/// A structure of the API; absent fields are omitted.
macro_rules! api {
    ($($(#[$meta:meta])* $name:ident { $($field:ident $json:literal: $type:ty,)* ? $($optional:ident $other:literal: $kind:ty,)* })*) => {$(
        $(#[$meta])*
        #[derive(Clone, Debug, Serialize)]
        pub(super) struct $name {
            $(#[serde(rename = $json)] pub(super) $field: $type,)*
            $(#[serde(rename = $other, skip_serializing_if = "Option::is_none")] pub(super) $optional: Option<$kind>,)*
        }
    )*};
}

api! {
    /// The summary.
    Body { node "node": NodeStats, pods "pods": Vec<PodStats>, ? }
    NodeStats { name "nodeName": String, start_time "startTime": Time, ?
        system_containers "systemContainers": Vec<ContainerStats>, cpu "cpu": Cpu, memory "memory": Memory, io "io": Io,
        network "network": Network, fs "fs": Fs, runtime "runtime": RuntimeStats, rlimit "rlimit": Rlimit,
        swap "swap": Swap, }
    PodStats { pod "podRef": PodReference, start_time "startTime": Time, containers "containers": Vec<ContainerStats>, ?
        cpu "cpu": Cpu, memory "memory": Memory, io "io": Io, network "network": Network,
        volume "volume": Vec<VolumeStats>, ephemeral_storage "ephemeral-storage": Fs, process_stats "process_stats": ProcessStats, swap "swap": Swap, }
    PodReference { name "name": String, namespace "namespace": String, uid "uid": String, ? }
    ContainerStats { name "name": String, start_time "startTime": Time, ?
        cpu "cpu": Cpu, memory "memory": Memory, io "io": Io, rootfs "rootfs": Fs, logs "logs": Fs, swap "swap": Swap, }
    Cpu { time "time": Time, ? usage_nano_cores "usageNanoCores": u64,
        usage_core_nano_seconds "usageCoreNanoSeconds": u64, psi "psi": Psi, }
    Memory { time "time": Time, ? available_bytes "availableBytes": u64, usage_bytes "usageBytes": u64,
        working_set_bytes "workingSetBytes": u64, rss_bytes "rssBytes": u64, page_faults "pageFaults": u64,
        major_page_faults "majorPageFaults": u64, psi "psi": Psi, }
    Io { time "time": Time, ? psi "psi": Psi, }
    Psi { full "full": PsiData, some "some": PsiData, ? }
    PsiData { total "total": u64, avg10 "avg10": f64, avg60 "avg60": f64, avg300 "avg300": f64, ? }
    Swap { time "time": Time, ? available_bytes "swapAvailableBytes": u64, usage_bytes "swapUsageBytes": u64, }
    /// The default interface inline, and all of them.
    Network { time "time": Time, name "name": String, ? rx_bytes "rxBytes": u64, rx_errors "rxErrors": u64,
        tx_bytes "txBytes": u64, tx_errors "txErrors": u64, interfaces "interfaces": Vec<Interface>, }
    Interface { name "name": String, ? rx_bytes "rxBytes": u64, rx_errors "rxErrors": u64, tx_bytes "txBytes": u64,
        tx_errors "txErrors": u64, }
    Fs { time "time": Time, ? available_bytes "availableBytes": u64, capacity_bytes "capacityBytes": u64,
        used_bytes "usedBytes": u64, inodes_free "inodesFree": u64, inodes "inodes": u64,
        inodes_used "inodesUsed": u64, }
    VolumeStats { time "time": Time, name "name": String, ? available_bytes "availableBytes": u64,
        capacity_bytes "capacityBytes": u64, used_bytes "usedBytes": u64, inodes_free "inodesFree": u64,
        inodes "inodes": u64, inodes_used "inodesUsed": u64, claim "pvcRef": ClaimReference, }
    ClaimReference { name "name": String, namespace "namespace": String, ? }
    RuntimeStats { ? image_fs "imageFs": Fs, container_fs "containerFs": Fs, }
    Rlimit { time "time": Time, ? max_pid "maxpid": i64, current "curproc": i64, }
    ProcessStats { ? process_count "process_count": u64, }
}

impl From<Pressure> for Psi {
    fn from(pressure: Pressure) -> Self {
        Self { full: pressure.full.into(), some: pressure.some.into() }
    }
}

impl From<PressureLine> for PsiData {
    fn from(line: PressureLine) -> Self {
        Self { total: line.total, avg10: line.avg10, avg60: line.avg60, avg300: line.avg300 }
    }
}
