//! The machine metrics of `/metrics/cadvisor`, read per scrape.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use prometheus::Registry;
use prometheus::proto::MetricFamily;

use super::register::Register;

const LABELS: [&str; 3] = ["boot_id", "machine_id", "system_uuid"];
/// `/proc/cpuinfo` has a form of its own on each architecture, and names cores and sockets on few.
const PROCESSORS: &str = "/sys/devices/system/cpu";
/// Memory controllers that a driver of the kernel watches (EDAC), with their modules; virtual machines have none.
const MEMORY_CONTROLLERS: &str = "/sys/devices/system/edac/mc";

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
    let [boot, machine, system] = &identity;
    let by_type = ["boot_id", "machine_id", "system_uuid", "type"];
    let counts = register.float_gauges("machine_dimm_count", "Memory modules.", &by_type);
    let sizes = register.float_gauges("machine_dimm_capacity_bytes", "Memory of the modules.", &by_type);
    for (kind, modules) in memory_modules(Path::new(MEMORY_CONTROLLERS)) {
        let labels = [boot.as_str(), machine.as_str(), system.as_str(), kind.as_str()];
        counts.with_label_values(&labels).set(modules.count);
        sizes.with_label_values(&labels).set(modules.bytes);
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
        let value = |file: &str| Some(fs::read_to_string(entry.path().join(file)).ok()?.trim().to_owned());
        // One that cannot be taken offline need not have the file.
        if !is_numbered(&name, "cpu") || value("online").as_deref() == Some("0") {
            continue;
        }
        let socket = value("topology/physical_package_id").unwrap_or_default();
        cores.insert((socket.clone(), value("topology/core_id").unwrap_or(name)));
        sockets.insert(socket);
        processors += 1;
    }
    Topology { processors: f64::from(processors), cores: cores.len() as f64, sockets: sockets.len() as f64 }
}

/// The name is the prefix and a number.
fn is_numbered(name: &str, prefix: &str) -> bool {
    let number = name.strip_prefix(prefix).unwrap_or_default();
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

/// Memory modules of one type.
#[derive(Debug, Default, PartialEq)]
struct Modules {
    count: f64,
    bytes: f64,
}

/// Memory modules by type, in folders `mc<number>/dimm<number>`. What cannot be read is left out.
fn memory_modules(folder: &Path) -> BTreeMap<String, Modules> {
    let below = |folder: &Path, prefix: &str| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let numbered = entries.filter(|entry| is_numbered(&entry.file_name().to_string_lossy(), prefix));
        numbered.map(|entry| entry.path()).collect::<Vec<_>>()
    };
    let mut found: BTreeMap<String, Modules> = BTreeMap::new();
    for module in below(folder, "mc").iter().flat_map(|controller| below(controller, "dimm")) {
        let text = |file: &str| Some(fs::read_to_string(module.join(file)).ok()?.trim().to_owned());
        let mebibytes = text("size").and_then(|size| size.parse::<f64>().ok());
        let Some((kind, mebibytes)) = text("dimm_mem_type").zip(mebibytes) else { continue };
        let of_kind = found.entry(kind).or_default();
        of_kind.count += 1.0;
        of_kind.bytes += mebibytes * 1024.0 * 1024.0;
    }
    found
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
    fn memory_modules_by_type() {
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!(memory_modules(&folder.path().join("none")), BTreeMap::new(), "no driver");
        for (module, kind, size) in [
            ("mc0/dimm0", "Registered-DDR4\n", "16384\n"),
            ("mc1/dimm10", "Registered-DDR4\n", "8192\n"),
            ("mc1/dimm2", "Unbuffered-DDR4\n", "1\n"),
            ("mc1/dimm3", "Unbuffered-DDR4\n", "?\n"),
            ("mc1/power", "Unbuffered-DDR4\n", "1\n"),
            ("power/dimm0", "Unbuffered-DDR4\n", "1\n"),
        ] {
            let module = folder.path().join(module);
            fs::create_dir_all(&module).expect("folders");
            fs::write(module.join("dimm_mem_type"), kind).expect("a file");
            fs::write(module.join("size"), size).expect("a file");
        }
        let expected = [
            ("Registered-DDR4".to_owned(), Modules { count: 2.0, bytes: 25_769_803_776.0 }),
            ("Unbuffered-DDR4".to_owned(), Modules { count: 1.0, bytes: 1_048_576.0 }),
        ];
        assert_eq!(memory_modules(folder.path()), expected.into());
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
