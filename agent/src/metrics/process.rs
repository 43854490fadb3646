//! The standard `process_*` families, read from `/proc` per scrape, which waits for no disk.

use std::fs;
use std::io;

use nix::unistd::SysconfVar;
use nix::unistd::sysconf;
use prometheus::Counter;
use prometheus::Gauge;
use prometheus::core::Collector;
use prometheus::core::Desc;
use prometheus::proto::MetricFamily;

use super::register::Register;

/// Registers the families; returns the process's start as Unix time in seconds, 0 if `/proc` cannot be read.
pub(super) fn register(register: &Register<'_>) -> f64 {
    let process = Process { start: started().unwrap_or(0.0) };
    register.add(Ok(process.clone()));
    process.start
}

#[derive(Clone, Debug)]
struct Process {
    start: f64,
}

/// Fields of `/proc/self/stat`, in its units (proc_pid_stat(5)).
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    cpu_ticks: u64,
    start_ticks: u64,
    virtual_bytes: u64,
    resident_pages: u64,
}

impl Stat {
    /// Fields are counted from after the command name, which may hold anything.
    fn parse(text: &str) -> Option<Self> {
        let (_, rest) = text.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
        Some(Self {
            cpu_ticks: number(11)? + number(12)?,
            start_ticks: number(19)?,
            virtual_bytes: number(20)?,
            resident_pages: number(21)?,
        })
    }

    fn read() -> io::Result<Option<Self>> {
        fs::read_to_string("/proc/self/stat").map(|text| Self::parse(&text))
    }
}

fn system(variable: SysconfVar, otherwise: f64) -> f64 {
    sysconf(variable).ok().flatten().map_or(otherwise, |value| value as f64)
}

fn ticks_per_second() -> f64 {
    system(SysconfVar::CLK_TCK, 100.0)
}

fn started() -> Option<f64> {
    let boot = fs::read_to_string("/proc/stat").ok()?;
    let boot: f64 = boot.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    Some(boot + Stat::read().ok()??.start_ticks as f64 / ticks_per_second())
}

/// The soft limit of open files.
fn max_files(limits: &str) -> Option<f64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

impl Process {
    /// Name, help and value of each gauge that can be read now.
    fn gauges(&self, stat: Option<&Stat>) -> Vec<(&'static str, &'static str, f64)> {
        let mut gauges = vec![("process_start_time_seconds", "Unix time at which the process started.", self.start)];
        if let Some(stat) = stat {
            let resident = stat.resident_pages as f64 * system(SysconfVar::PAGE_SIZE, 4096.0);
            gauges.push(("process_resident_memory_bytes", "Resident memory.", resident));
            gauges.push(("process_virtual_memory_bytes", "Virtual memory.", stat.virtual_bytes as f64));
        }
        if let Ok(files) = fs::read_dir("/proc/self/fd") {
            // The directory being read is one of them.
            gauges.push(("process_open_fds", "Open files.", files.count().saturating_sub(1) as f64));
        }
        // Dashboards of Kubernetes query this name; the counterpart of goroutines are the tasks of the async runtime.
        let tasks = tokio::runtime::Handle::try_current().map_or(0, |runtime| runtime.metrics().num_alive_tasks());
        gauges.push((
            "go_goroutines",
            "Tasks of the async runtime, under the name that dashboards query.",
            tasks as f64,
        ));
        let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
        if let Some(limit) = max_files(&limits) {
            gauges.push(("process_max_fds", "Open files at most.", limit));
        }
        gauges
    }
}

impl Collector for Process {
    fn desc(&self) -> Vec<&Desc> {
        Vec::new()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let stat = Stat::read().ok().flatten();
        let mut families = Vec::new();
        for (name, help, value) in self.gauges(stat.as_ref()) {
            if let Ok(gauge) = Gauge::new(name, help) {
                gauge.set(value);
                families.extend(gauge.collect());
            }
        }
        if let Some(stat) = stat
            && let Ok(counter) = Counter::new("process_cpu_seconds_total", "Processor time used.")
        {
            counter.inc_by(stat.cpu_ticks as f64 / ticks_per_second());
            families.extend(counter.collect());
        }
        families
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_with_an_awkward_name() {
        let text =
            "42 (a) b (c)) S 1 42 42 0 -1 4194560 1 2 3 4 50 25 7 8 20 0 3 0 1234 5678592 321 18446744073709551615";
        let expected = Stat { cpu_ticks: 75, start_ticks: 1234, virtual_bytes: 5_678_592, resident_pages: 321 };
        assert_eq!(Stat::parse(text), Some(expected));
        assert_eq!(Stat::parse("42 (short) S 1"), None);
    }

    #[test]
    fn limits() {
        let text = "Limit                     Soft Limit           Hard Limit           Units     \n\
                    Max open files            1024                 524288               files     \n";
        assert_eq!(max_files(text), Some(1024.0));
        assert_eq!(max_files(""), None);
    }
}
