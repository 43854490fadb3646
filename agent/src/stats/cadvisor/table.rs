//! cAdvisor's families of one cgroup, sorted by name, and the sources of their values.

use prometheus::proto::MetricType;

use super::Row;
use super::Values;
use crate::cgroups::usage::DiskTraffic;
use crate::cgroups::usage::MemoryDetail;
use crate::cgroups::usage::MemoryUsage;
use crate::cgroups::usage::Throttling;
use crate::kernel::usage::InterfaceUsage;
use crate::stats::family::float;
use crate::stats::family::unix_seconds;

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

fn throttling(row: &Row, of: fn(&Throttling) -> f64) -> Option<f64> {
    row.detail.throttling.as_ref().map(of)
}

fn disks(row: &Row, out: &mut Values<'_>, of: fn(&DiskTraffic) -> u64) {
    for disk in &row.detail.disks {
        let device = out.device((disk.major, disk.minor));
        out.with(&[("device", device.as_str())], Some(float(of(disk))));
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

fn pressure(row: &Row, micros: u64) -> Option<f64> {
    row.has_pressure.then(|| float(micros) / 1e6)
}

fn faults(row: &Row, out: &mut Values<'_>) {
    let (Some(all), Some(own)) = (row.usage.memory, row.detail.memory) else { return };
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
        out.with(&[("cpu", "total")], row.usage.cpu.map(seconds));
    }),
    counter("container_cpu_user_seconds_total", "Processor time of programs.", |row, out| {
        out.one(row.detail.cpu_user.map(seconds));
    }),
    counter("container_fs_reads_bytes_total", "Bytes read from disks.", |row, out| {
        disks(row, out, |disk| disk.read_bytes);
    }),
    counter("container_fs_reads_total", "Read requests to disks.", |row, out| disks(row, out, |disk| disk.reads)),
    counter("container_fs_writes_bytes_total", "Bytes written to disks.", |row, out| {
        disks(row, out, |disk| disk.write_bytes);
    }),
    counter("container_fs_writes_total", "Write requests to disks.", |row, out| disks(row, out, |disk| disk.writes)),
    gauge("container_last_seen", "Unix time of the measurement.", |_, out| {
        let at = out.scrape.at.and_then(unix_seconds).map(f64::trunc);
        out.one(at);
    }),
    gauge("container_memory_cache", "Bytes of file pages.", |row, out| out.one(detail(row, |of| Some(of.cache)))),
    counter("container_memory_failcnt", "Times the memory limit was met.", |row, out| {
        out.one(detail(row, |of| of.limit_hits));
    }),
    counter("container_memory_failures_total", "Page faults.", faults),
    gauge("container_memory_kernel_usage", "Bytes of the kernel's memory.", |row, out| {
        out.one(detail(row, |of| of.kernel));
    }),
    gauge("container_memory_mapped_file", "Bytes of mapped file pages.", |row, out| {
        out.one(detail(row, |of| Some(of.mapped_file)));
    }),
    gauge("container_memory_max_usage_bytes", "The most memory there ever was.", |row, out| {
        out.one(detail(row, |of| of.peak));
    }),
    gauge("container_memory_rss", "Bytes of anonymous memory.", |row, out| {
        out.one(memory(row, |of| Some(of.rss)));
    }),
    gauge("container_memory_swap", "Bytes in swap.", |row, out| out.one(memory(row, |of| of.swap))),
    gauge("container_memory_total_active_file_bytes", "Bytes of file pages used lately.", |row, out| {
        out.one(detail(row, |of| Some(of.active_file)));
    }),
    gauge("container_memory_total_inactive_file_bytes", "Bytes of file pages not used lately.", |row, out| {
        out.one(detail(row, |of| Some(of.inactive_file)));
    }),
    gauge("container_memory_usage_bytes", "Bytes of all memory that is charged.", |row, out| {
        out.one(memory(row, |of| Some(of.usage)));
    }),
    gauge("container_memory_working_set_bytes", "Bytes in use lately.", |row, out| {
        out.one(memory(row, |of| Some(of.working_set)));
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
    counter("container_oom_events_total", "Processes killed for want of memory.", |row, out| {
        out.one(detail(row, |of| of.oom_kills));
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
    gauge("container_processes", "Processes.", |row, out| out.one(row.detail.processes.map(float))),
    gauge("container_spec_cpu_period", "Period of the processor quota in microseconds.", |row, out| {
        out.one(row.detail.cpu_period.map(float));
    }),
    gauge("container_spec_cpu_quota", "Processor time in each period, in microseconds.", |row, out| {
        out.one(row.detail.cpu_quota.map(float));
    }),
    gauge("container_spec_cpu_shares", "Share in processor time.", |row, out| {
        out.one(row.detail.cpu_shares.map(float));
    }),
    gauge("container_spec_memory_limit_bytes", "Memory at most; 0 without a limit.", |row, out| {
        out.one(memory(row, |of| Some(of.limit.unwrap_or(0))));
    }),
    gauge("container_spec_memory_reservation_limit_bytes", "Memory that is left; 0 without that.", |row, out| {
        out.one(detail(row, |of| Some(of.reservation.unwrap_or(0))));
    }),
    gauge("container_spec_memory_swap_limit_bytes", "Swap at most; 0 without a limit.", |row, out| {
        out.one(memory(row, |of| Some(of.swap_limit.unwrap_or(0))));
    }),
    gauge("container_start_time_seconds", "Unix time of the start.", |row, out| {
        out.one(row.started_at.and_then(unix_seconds).map(f64::trunc));
    }),
    gauge("container_threads", "Processes and threads.", |row, out| out.one(row.usage.tasks.map(float))),
    gauge("container_threads_max", "Processes and threads at most; 0 without a limit.", |row, out| {
        out.one(is_measured(row).then(|| float(row.detail.tasks_max.unwrap_or(0))));
    }),
];
