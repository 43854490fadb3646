//! The machine metrics of `/metrics/cadvisor`, read per scrape.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use prometheus::Registry;
use prometheus::proto::MetricFamily;

use super::register::Register;

const LABELS: [&str; 3] = ["boot_id", "machine_id", "system_uuid"];
/// `/proc/cpuinfo` has a form of its own on each architecture, and names cores and sockets on few.
const PROCESSORS: &str = "/sys/devices/system/cpu";

/// All machine metrics.
pub(super) fn gather() -> Vec<MetricFamily> {
    let registry = Registry::new();
    let register = Register::new(&registry);
    let identity = identity(Path::new("/"));
    let cpus = topology(Path::new(PROCESSORS));
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    for (name, help, value) in [
        ("machine_cpu_physical_cores", "Physical CPU cores.", cpus.cores),
        ("machine_cpu_cores", "Logical CPU cores.", cpus.processors),
        ("machine_cpu_sockets", "CPU sockets.", cpus.sockets),
        ("machine_memory_bytes", "Memory installed.", kibibytes(&memory, "MemTotal:")),
        ("machine_swap_bytes", "Swap installed.", kibibytes(&memory, "SwapTotal:")),
    ] {
        let gauge = register.float_gauges(name, help, &LABELS);
        gauge.with_label_values(&identity).set(value);
    }
    let failed = register.gauge("machine_scrape_error", "1 if the machine could not be looked at.");
    failed.set((cpus.processors == 0.0 || memory.is_empty()).into());
    registry.gather()
}

/// The values of [`LABELS`], those of the Node object: each of the first of its files below `root` that has one.
fn identity(root: &Path) -> [String; 3] {
    let machine = ["etc/machine-id", "var/lib/dbus/machine-id"];
    let firmware = ["sys/class/dmi/id/product_uuid", "proc/device-tree/system-id", "proc/device-tree/vm,uuid"];
    let system = [&firmware[..], &machine[..]].concat();
    let text = |path: &&str| {
        let content = fs::read_to_string(root.join(path)).unwrap_or_default();
        content.trim_matches(|c: char| c.is_whitespace() || c == '\0').to_owned()
    };
    let first = |paths: &[&str]| paths.iter().map(text).find(|found| !found.is_empty()).unwrap_or_default();
    [first(&["proc/sys/kernel/random/boot_id"]), first(&machine), first(&system)]
}

#[derive(Debug, PartialEq)]
struct Topology {
    processors: f64,
    cores: f64,
    sockets: f64,
}

/// Processors that are online, by their folders `cpu<number>`. One that names neither core nor socket is a core of its own,
/// in the one socket.
fn topology(folder: &Path) -> Topology {
    let (mut processors, mut cores, mut sockets) = (0, BTreeSet::new(), BTreeSet::new());
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_number = |digits: &str| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        let value = |file: &str| Some(fs::read_to_string(entry.path().join(file)).ok()?.trim().to_owned());
        // One that cannot be taken offline need not have the file.
        if !name.strip_prefix("cpu").is_some_and(is_number) || value("online").as_deref() == Some("0") {
            continue;
        }
        let socket = value("topology/physical_package_id").unwrap_or_default();
        cores.insert((socket.clone(), value("topology/core_id").unwrap_or(name)));
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
    fn a_machine_without_firmware_has_the_machine_id_as_system_uuid() {
        let folder = tempfile::tempdir().expect("a folder");
        let with = |file: &str, text: &str| {
            let file = folder.path().join(file);
            fs::create_dir_all(file.parent().expect("a parent")).expect("folders");
            fs::write(file, text).expect("a file");
            identity(folder.path())
        };
        assert_eq!(with("etc/machine-id", "0123\n"), ["", "0123", "0123"]);
        assert_eq!(with("sys/class/dmi/id/product_uuid", "ab-cd\n"), ["", "0123", "ab-cd"]);
    }

    #[test]
    fn topologies() {
        let folder = tempfile::tempdir().expect("a folder");
        let put = |file: &str, text: &str| {
            let file = folder.path().join(file);
            fs::create_dir_all(file.parent().expect("a parent")).expect("folders");
            fs::write(file, text).expect("a file");
        };
        let found = || topology(folder.path());
        assert_eq!(found(), Topology { processors: 0.0, cores: 0.0, sockets: 0.0 });
        for (cpu, socket, core) in [(0, "0\n", "0\n"), (1, "0\n", "1\n"), (2, "0\n", "0\n"), (13, "1\n", "0\n")] {
            put(&format!("cpu{cpu}/topology/physical_package_id"), socket);
            put(&format!("cpu{cpu}/topology/core_id"), core);
        }
        put("cpu1/online", "1\n");
        put("cpu4/online", "0\n");
        put("cpufreq/policy0/affected_cpus", "0\n");
        assert_eq!(found(), Topology { processors: 4.0, cores: 3.0, sockets: 2.0 });
        (0..=13).for_each(|cpu| _ = fs::remove_dir_all(folder.path().join(format!("cpu{cpu}/topology"))));
        assert_eq!(found(), Topology { processors: 4.0, cores: 4.0, sockets: 1.0 });
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
