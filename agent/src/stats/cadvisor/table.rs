//! cAdvisor's families of one cgroup, sorted by name, and the sources of their values.

use prometheus::proto::MetricType;

use super::Row;
use super::Values;
use crate::cgroups::usage::DiskTraffic;
use crate::cgroups::usage::FileCounters;
use crate::cgroups::usage::MemoryDetail;
use crate::cgroups::usage::MemoryUsage;
use crate::cgroups::usage::ReclaimCounters;
use crate::cgroups::usage::Throttling;
use crate::kernel::usage::DiskUsage;
use crate::kernel::usage::InterfaceUsage;
use crate::stats::descriptors::OpenFiles;
use crate::stats::family::float;
use crate::stats::family::unix_seconds;
use crate::stats::filesystems::Traffic;

/// One family.
pub(super) struct Of {
    pub(super) name: &'static str,
    pub(super) help: &'static str,
    pub(super) kind: MetricType,
    /// Adds the values of a row.
    pub(super) values: fn(&Row, &mut Values<'_>),
}

const fn counter(name: &'static str, help: &'static str, values: fn(&Row, &mut Values<'_>)) -> Of {
    Of { name, help, kind: MetricType::COUNTER, values }
}

const fn gauge(name: &'static str, help: &'static str, values: fn(&Row, &mut Values<'_>)) -> Of {
    Of { name, help, kind: MetricType::GAUGE, values }
}

/// Nanoseconds as seconds.
fn seconds(nanos: u64) -> f64 {
    float(nanos) / 1e9
}

fn memory(row: &Row, of: fn(&MemoryUsage) -> Option<u64>) -> Option<f64> {
    row.usage.memory.as_ref().and_then(of).map(float)
}

fn detail(row: &Row, of: fn(&MemoryDetail) -> Option<u64>) -> Option<f64> {
    row.detail.memory.as_ref().and_then(of).map(float)
}

/// A counter of `memory.stat`.
fn counters(row: &Row, of: fn(&FileCounters) -> u64) -> Option<f64> {
    row.detail.memory.map(|_| float(of(&row.usage.counters)))
}

/// Reclaim of a cgroup; nothing with v1.
fn reclaim(row: &Row, of: fn(&ReclaimCounters) -> u64) -> Option<f64> {
    row.detail.memory?;
    row.usage.counters.reclaim.as_ref().map(|counters| float(of(counters)))
}

/// Sizes of the machine's file systems.
fn sizes(row: &Row, out: &mut Values<'_>, of: fn(&DiskUsage) -> u64) {
    for disk in &row.file_systems {
        out.with(&[("device", disk.device.as_str())], Some(float(of(&disk.usage))));
    }
}

/// What the devices of the machine's file systems did.
fn traffic(row: &Row, out: &mut Values<'_>, of: fn(&Traffic) -> f64) {
    for disk in &row.file_systems {
        out.with(&[("device", disk.device.as_str())], disk.traffic.as_ref().map(of));
    }
}

fn millis(millis: u64) -> f64 {
    float(millis) / 1e3
}

fn open(row: &Row, of: fn(&OpenFiles) -> Option<u64>) -> Option<f64> {
    row.open.as_ref().and_then(of).map(float)
}

fn throttling(row: &Row, of: fn(&Throttling) -> f64) -> Option<f64> {
    row.detail.throttling.as_ref().map(of)
}

fn disks(row: &Row, out: &mut Values<'_>, of: fn(&DiskTraffic) -> u64) {
    for disk in &row.detail.disks {
        let device = out.device((disk.major, disk.minor));
        out.with(&[("device", device.as_str())], Some(float(of(disk))));
    }
}

/// Requests: those of the cgroup to disks, and, of the machine's file systems, those to their devices that are none of these.
fn requests(row: &Row, out: &mut Values<'_>, of_disk: fn(&DiskTraffic) -> u64, of_device: fn(&Traffic) -> u64) {
    disks(row, out, of_disk);
    let counted: Vec<String> = row.detail.disks.iter().map(|disk| out.device((disk.major, disk.minor))).collect();
    for disk in row.file_systems.iter().filter(|disk| !counted.contains(&disk.device)) {
        out.with(&[("device", disk.device.as_str())], disk.traffic.as_ref().map(|traffic| float(of_device(traffic))));
    }
}

fn wires(row: &Row, out: &mut Values<'_>, of: fn(&InterfaceUsage) -> u64) {
    for interface in &row.interfaces {
        out.with(&[("interface", interface.name.as_str())], Some(float(of(interface))));
    }
}

/// A row with usage, unlike that of a sandbox, which has a network only.
fn is_measured(row: &Row) -> bool {
    row.usage.cpu.is_some() || row.usage.memory.is_some()
}

/// A row with a cgroup or with usage, unlike that of a container of which only the OOM events are left. Alerts count a
/// container without `container_last_seen` as gone.
fn exists(row: &Row) -> bool {
    !row.id.is_empty() || is_measured(row)
}

fn pressure(row: &Row, micros: u64) -> Option<f64> {
    row.has_pressure.then(|| float(micros) / 1e6)
}

fn faults(row: &Row, out: &mut Values<'_>) {
    let (Some(all), own) = (row.usage.memory, row.usage.counters) else { return };
    // Usage that the runtime has reported has no cgroup.
    if row.detail.memory.is_none() {
        return;
    }
    for (kind, scope, count) in [
        ("pgfault", "container", own.own_page_faults),
        ("pgfault", "hierarchy", all.page_faults),
        ("pgmajfault", "container", own.own_major_page_faults),
        ("pgmajfault", "hierarchy", all.major_page_faults),
    ] {
        out.with(&[("failure_type", kind), ("scope", scope)], Some(float(count)));
    }
}

fn blkio(row: &Row, out: &mut Values<'_>) {
    for disk in &row.detail.disks {
        let (device, major, minor) =
            (out.device((disk.major, disk.minor)), disk.major.to_string(), disk.minor.to_string());
        for (operation, bytes) in [("Read", disk.read_bytes), ("Write", disk.write_bytes)] {
            let labels = [("device", &*device), ("major", &*major), ("minor", &*minor), ("operation", operation)];
            out.with(&labels, Some(float(bytes)));
        }
    }
}

/// All but `cadvisor_version_info` and `container_scrape_error`.
pub(super) const FAMILIES: &[Of] = &[
    counter("container_blkio_device_usage_total", "Bytes read from and written to disks.", blkio),
    counter("container_cpu_cfs_burst_periods_total", "Periods in which the quota was exceeded.", |row, out| {
        out.one(throttling(row, |of| float(of.burst_periods)));
    }),
    counter("container_cpu_cfs_burst_seconds_total", "Time that was used beyond the quota.", |row, out| {
        out.one(throttling(row, |of| seconds(of.burst)));
    }),
    counter("container_cpu_cfs_periods_total", "Enforcement periods of the processor quota.", |row, out| {
        out.one(throttling(row, |of| float(of.periods)));
    }),
    counter("container_cpu_cfs_throttled_periods_total", "Periods in which the quota was used up.", |row, out| {
        out.one(throttling(row, |of| float(of.throttled_periods)));
    }),
    counter("container_cpu_cfs_throttled_seconds_total", "Time for which tasks were held back.", |row, out| {
        out.one(throttling(row, |of| seconds(of.throttled)));
    }),
    counter("container_cpu_system_seconds_total", "Processor time of the kernel.", |row, out| {
        out.one(row.detail.cpu_system.map(seconds));
    }),
    counter("container_cpu_usage_seconds_total", "Processor time.", |row, out| {
        // As cAdvisor: nothing until there is some.
        out.with(&[("cpu", "total")], row.usage.cpu.filter(|nanos| *nanos > 0).map(seconds));
    }),
    counter("container_cpu_user_seconds_total", "Processor time of programs.", |row, out| {
        out.one(row.detail.cpu_user.map(seconds));
    }),
    gauge("container_creation_time_seconds", "Unix time of the creation.", |row, out| {
        out.one(row.started_at.and_then(unix_seconds).map(f64::trunc));
    }),
    gauge("container_file_descriptors", "Open files.", |row, out| out.one(open(row, |of| Some(of.files)))),
    gauge("container_fs_inodes_free", "Inodes left on the file system.", |row, out| {
        sizes(row, out, |of| of.inodes_free);
    }),
    gauge("container_fs_inodes_total", "Inodes of the file system.", |row, out| sizes(row, out, |of| of.inodes)),
    gauge("container_fs_io_current", "Requests in progress.", |row, out| {
        traffic(row, out, |of| float(of.in_progress));
    }),
    counter("container_fs_io_time_seconds_total", "Time in which requests were in progress.", |row, out| {
        traffic(row, out, |of| millis(of.io_time));
    }),
    counter("container_fs_io_time_weighted_seconds_total", "The same, once for each request.", |row, out| {
        traffic(row, out, |of| millis(of.weighted_time));
    }),
    gauge("container_fs_limit_bytes", "Size of the file system.", |row, out| sizes(row, out, |of| of.capacity)),
    counter("container_fs_read_seconds_total", "Time that reading took.", |row, out| {
        traffic(row, out, |of| millis(of.read_time));
    }),
    counter("container_fs_reads_bytes_total", "Bytes read from disks.", |row, out| {
        disks(row, out, |disk| disk.read_bytes);
    }),
    counter("container_fs_reads_merged_total", "Read requests that were merged.", |row, out| {
        traffic(row, out, |of| float(of.reads_merged));
    }),
    counter("container_fs_reads_total", "Read requests to disks.", |row, out| {
        requests(row, out, |disk| disk.reads, |device| device.reads);
    }),
    counter("container_fs_sector_reads_total", "Sectors read.", |row, out| {
        traffic(row, out, |of| float(of.sectors_read));
    }),
    counter("container_fs_sector_writes_total", "Sectors written.", |row, out| {
        traffic(row, out, |of| float(of.sectors_written));
    }),
    gauge("container_fs_usage_bytes", "Bytes used on the file system.", |row, out| sizes(row, out, |of| of.used)),
    counter("container_fs_write_seconds_total", "Time that writing took.", |row, out| {
        traffic(row, out, |of| millis(of.write_time));
    }),
    counter("container_fs_writes_bytes_total", "Bytes written to disks.", |row, out| {
        disks(row, out, |disk| disk.write_bytes);
    }),
    counter("container_fs_writes_merged_total", "Write requests that were merged.", |row, out| {
        traffic(row, out, |of| float(of.writes_merged));
    }),
    counter("container_fs_writes_total", "Write requests to disks.", |row, out| {
        requests(row, out, |disk| disk.writes, |device| device.writes);
    }),
    gauge("container_health_state", "Always -1: there are no health checks of runtimes.", |row, out| {
        out.one((!row.container.is_empty() && exists(row)).then_some(-1.0));
    }),
    gauge("container_last_seen", "Unix time of the measurement.", |row, out| {
        let at = out.scrape.at.and_then(unix_seconds).map(f64::trunc);
        out.one(at.filter(|_| exists(row)));
    }),
    gauge("container_memory_cache", "Bytes of file pages.", |row, out| out.one(counters(row, |of| of.cache))),
    counter("container_memory_events_high_total", "Times memory.high was exceeded.", |row, out| {
        out.one(detail(row, |of| of.high_hits));
    }),
    counter("container_memory_events_max_total", "Times memory.max was met.", |row, out| {
        // With v1 it is container_memory_failcnt alone.
        out.one(detail(row, |of| of.high_hits.and(of.limit_hits)));
    }),
    counter("container_memory_failcnt", "Times the memory limit was met.", |row, out| {
        out.one(detail(row, |of| of.limit_hits));
    }),
    counter("container_memory_failures_total", "Page faults.", faults),
    gauge("container_memory_file_dirty_bytes", "Bytes of file pages not written back yet.", |row, out| {
        out.one(reclaim(row, |of| of.file_dirty));
    }),
    gauge("container_memory_file_writeback_bytes", "Bytes of file pages being written back.", |row, out| {
        out.one(reclaim(row, |of| of.file_writeback));
    }),
    gauge("container_memory_kernel_usage", "Bytes of the kernel's memory.", |row, out| {
        out.one(detail(row, |of| of.kernel));
    }),
    gauge("container_memory_mapped_file", "Bytes of mapped file pages.", |row, out| {
        out.one(counters(row, |of| of.mapped_file));
    }),
    gauge("container_memory_max_usage_bytes", "The most memory there ever was.", |row, out| {
        out.one(detail(row, |of| of.peak));
    }),
    counter("container_memory_pgscan_total", "Pages looked at to reclaim memory.", |row, out| {
        out.one(reclaim(row, |of| of.scanned));
    }),
    counter("container_memory_pgsteal_total", "Pages reclaimed.", |row, out| {
        out.one(reclaim(row, |of| of.reclaimed));
    }),
    gauge("container_memory_rss", "Bytes of anonymous memory.", |row, out| {
        out.one(memory(row, |of| Some(of.rss)));
    }),
    gauge("container_memory_swap", "Bytes in swap.", |row, out| out.one(memory(row, |of| of.swap))),
    gauge("container_memory_total_active_file_bytes", "Bytes of file pages used lately.", |row, out| {
        out.one(counters(row, |of| of.active_file));
    }),
    gauge("container_memory_total_inactive_file_bytes", "Bytes of file pages not used lately.", |row, out| {
        out.one(counters(row, |of| of.inactive_file));
    }),
    gauge("container_memory_usage_bytes", "Bytes of all memory that is charged.", |row, out| {
        out.one(memory(row, |of| Some(of.usage)));
    }),
    gauge("container_memory_working_set_bytes", "Bytes in use lately.", |row, out| {
        out.one(memory(row, |of| Some(of.working_set)));
    }),
    counter("container_memory_workingset_refault_anon_total", "Anonymous pages needed again.", |row, out| {
        out.one(reclaim(row, |of| of.refaults_anon));
    }),
    counter("container_memory_workingset_refault_file_total", "File pages needed again.", |row, out| {
        out.one(reclaim(row, |of| of.refaults_file));
    }),
    counter("container_network_receive_bytes_total", "Bytes received.", |row, out| {
        wires(row, out, |wire| wire.rx_bytes);
    }),
    counter("container_network_receive_errors_total", "Failed receptions.", |row, out| {
        wires(row, out, |wire| wire.rx_errors);
    }),
    counter("container_network_receive_packets_dropped_total", "Received packets dropped.", |row, out| {
        wires(row, out, |wire| wire.rx_dropped);
    }),
    counter("container_network_receive_packets_total", "Packets received.", |row, out| {
        wires(row, out, |wire| wire.rx_packets);
    }),
    counter("container_network_transmit_bytes_total", "Bytes sent.", |row, out| wires(row, out, |wire| wire.tx_bytes)),
    counter("container_network_transmit_errors_total", "Failed transmissions.", |row, out| {
        wires(row, out, |wire| wire.tx_errors);
    }),
    counter("container_network_transmit_packets_dropped_total", "Packets dropped instead of sent.", |row, out| {
        wires(row, out, |wire| wire.tx_dropped);
    }),
    counter("container_network_transmit_packets_total", "Packets sent.", |row, out| {
        wires(row, out, |wire| wire.tx_packets);
    }),
    counter("container_oom_events_total", "OOM kills, over all instances of a container.", |row, out| {
        out.one(row.oom_events.map(float).or_else(|| detail(row, |of| of.oom_kills)));
    }),
    counter("container_pressure_cpu_stalled_seconds_total", "Time in which no task had a processor.", |row, out| {
        out.one(pressure(row, row.usage.cpu_pressure.full.total));
    }),
    counter("container_pressure_cpu_waiting_seconds_total", "Time in which some task had no processor.", |row, out| {
        out.one(pressure(row, row.usage.cpu_pressure.some.total));
    }),
    counter("container_pressure_io_stalled_seconds_total", "Time in which all tasks waited for a disk.", |row, out| {
        out.one(pressure(row, row.usage.io_pressure.full.total));
    }),
    counter("container_pressure_io_waiting_seconds_total", "Time in which some task waited for a disk.", |row, out| {
        out.one(pressure(row, row.usage.io_pressure.some.total));
    }),
    counter("container_pressure_memory_stalled_seconds_total", "Time in which all waited for memory.", |row, out| {
        out.one(pressure(row, row.usage.memory_pressure.full.total));
    }),
    counter("container_pressure_memory_waiting_seconds_total", "Time in which some waited for memory.", |row, out| {
        out.one(pressure(row, row.usage.memory_pressure.some.total));
    }),
    gauge("container_processes", "Processes.", |row, out| {
        out.one(row.detail.processes.as_ref().map(|all| float(all.len() as u64)))
    }),
    gauge("container_sockets", "Open sockets.", |row, out| out.one(open(row, |of| Some(of.sockets)))),
    gauge("container_spec_cpu_period", "Period of the processor quota in microseconds.", |row, out| {
        out.one(row.detail.limits.cpu_period.map(float));
    }),
    gauge("container_spec_cpu_quota", "Processor time in each period, in microseconds.", |row, out| {
        out.one(row.detail.limits.cpu_quota.map(float));
    }),
    gauge("container_spec_cpu_shares", "Share in processor time.", |row, out| {
        out.one(row.detail.limits.cpu_shares.map(float));
    }),
    gauge("container_spec_memory_limit_bytes", "Memory at most; 0 without a limit.", |row, out| {
        out.one(memory(row, |of| Some(of.limit.unwrap_or(0))));
    }),
    gauge("container_spec_memory_reservation_limit_bytes", "Memory that is left; 0 without that.", |row, out| {
        out.one(row.detail.memory.map(|_| float(row.detail.limits.memory_reservation.unwrap_or(0))));
    }),
    gauge("container_spec_memory_swap_limit_bytes", "Swap at most; 0 without a limit.", |row, out| {
        out.one(memory(row, |of| Some(of.swap_limit.unwrap_or(0))));
    }),
    gauge("container_start_time_seconds", "Unix time of the start.", |row, out| {
        out.one(row.started_at.and_then(unix_seconds).map(f64::trunc));
    }),
    gauge("container_threads", "Processes and threads.", |row, out| out.one(row.usage.tasks.map(float))),
    gauge("container_threads_max", "Processes and threads at most; 0 without a limit.", |row, out| {
        out.one(is_measured(row).then(|| float(row.detail.limits.tasks_max.unwrap_or(0))));
    }),
    gauge("container_ulimits_soft", "Soft limit of open files of the first process.", |row, out| {
        out.with(&[("ulimit", "max_open_files")], open(row, |of| of.soft_limit));
    }),
];
