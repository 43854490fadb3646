//! The machine metrics of `/metrics/cadvisor`, read per scrape.

use std::collections::BTreeSet;
use std::fs;

use prometheus::Registry;
use prometheus::proto::MetricFamily;

use super::register::Register;

const LABELS: [&str; 3] = ["boot_id", "machine_id", "system_uuid"];

/// All machine metrics.
pub(super) fn gather() -> Vec<MetricFamily> {
    let registry = Registry::new();
    let register = Register::new(&registry);
    let identity = ["/proc/sys/kernel/random/boot_id", "/etc/machine-id", "/sys/class/dmi/id/product_uuid"]
        .map(|path| fs::read_to_string(path).unwrap_or_default().trim().to_owned());
    let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    for (name, help, value) in [
        ("machine_cpu_physical_cores", "Physical CPU cores.", topology(&cpus).cores),
        ("machine_cpu_cores", "Logical CPU cores.", topology(&cpus).processors),
        ("machine_cpu_sockets", "CPU sockets.", topology(&cpus).sockets),
        ("machine_memory_bytes", "Memory installed.", kibibytes(&memory, "MemTotal:")),
        ("machine_swap_bytes", "Swap installed.", kibibytes(&memory, "SwapTotal:")),
    ] {
        let gauge = register.float_gauges(name, help, &LABELS);
        gauge.with_label_values(&identity).set(value);
    }
    let failed = register.gauge("machine_scrape_error", "1 if the machine could not be looked at.");
    failed.set((cpus.is_empty() || memory.is_empty()).into());
    registry.gather()
}

#[derive(Debug, PartialEq)]
struct Topology {
    processors: f64,
    cores: f64,
    sockets: f64,
}

/// From `/proc/cpuinfo`. Processors that name neither core nor socket are a core each, in one socket.
fn topology(text: &str) -> Topology {
    let (mut processors, mut cores, mut sockets) = (0, BTreeSet::new(), BTreeSet::new());
    for block in text.split("\n\n").filter(|block| block.contains("processor")) {
        let value = |wanted: &str| {
            let line = block.lines().find(|line| line.split(':').next().is_some_and(|name| name.trim() == wanted))?;
            line.split_once(':').map(|(_, value)| value.trim().to_owned())
        };
        let socket = value("physical id").unwrap_or_default();
        cores.insert((socket.clone(), value("core id").unwrap_or_else(|| format!("processor {processors}"))));
        sockets.insert(socket);
        processors += 1;
    }
    Topology { processors: f64::from(processors), cores: cores.len() as f64, sockets: sockets.len() as f64 }
}

fn kibibytes(table: &str, name: &str) -> f64 {
    let line = table.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    line.trim().trim_end_matches("kB").trim().parse::<f64>().unwrap_or_default() * 1024.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topologies() {
        let block = |n: u32, socket: u32, core: u32| {
            format!("processor\t: {n}\nphysical id\t: {socket}\ncore id\t\t: {core}\ncpu cores\t: 2\n\n")
        };
        let text: String = [(0, 0, 0), (1, 0, 1), (2, 0, 0), (3, 1, 0)].map(|(n, s, c)| block(n, s, c)).concat();
        assert_eq!(topology(&text), Topology { processors: 4.0, cores: 3.0, sockets: 2.0 });
        let bare = "processor\t: 0\nBogoMIPS\t: 50\n\nprocessor\t: 1\n\nHardware\t: x\n";
        assert_eq!(topology(bare), Topology { processors: 2.0, cores: 2.0, sockets: 1.0 });
    }

    #[test]
    fn this_machine() {
        let families = gather();
        let value = |name: &str| {
            let family = families.iter().find(|family| family.name() == name).expect(name);
            family.get_metric()[0].get_gauge().get_value()
        };
        assert!(value("machine_cpu_cores") >= 1.0);
        assert!(value("machine_memory_bytes") > 1e6);
        assert_eq!(value("machine_scrape_error"), 0.0);
    }
}
