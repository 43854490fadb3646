//! Properties of this machine that the configuration depends on, and the kernel tunables it sets.

use std::fs;
use std::path::Path;

use anyhow::Context as _;
use anyhow::ensure;
use nix::sys::statfs::CGROUP2_SUPER_MAGIC;
use nix::sys::statfs::statfs;

use crate::config::ConfigError;
use crate::config::HostFacts;
use crate::config::Settings;
use crate::config::Violation;
use crate::kernel::sysctl;
use crate::node::Machine;
use crate::node::RootFs;
use crate::node::Sizes;
use crate::node::resources;
use crate::node::resources::ResourceConfig;

const PROC_SYS: &str = "/proc/sys";
const ONLINE_CPUS: &str = "/sys/devices/system/cpu/online";

/// Reads what the configuration's checks need.
pub fn facts() -> HostFacts {
    HostFacts {
        cgroup_v1: is_cgroup_v1(Path::new("/sys/fs/cgroup")),
        swap_active: swap_active(&fs::read_to_string("/proc/swaps").unwrap_or_default()),
        online_cpus: fs::read_to_string(ONLINE_CPUS).unwrap_or_default().trim().to_owned(),
    }
}

/// Sets the kernel tunables a kubelet relies on, unless `protectKernelDefaults` forbids it. A tunable that cannot be set is
/// a warning: the agent runs without privileges too.
pub fn set_tunables(settings: &Settings) {
    if settings.kubelet.protect_kernel_defaults {
        return;
    }
    for error in sysctl::apply(Path::new(PROC_SYS), false) {
        tracing::warn!("{error}");
    }
}

/// Compares the tunables that [`set_tunables`] may not set.
///
/// # Errors
/// With `protectKernelDefaults`, [`ConfigError::Invalid`] with each tunable that differs.
pub fn check_tunables(settings: &Settings) -> Result<(), ConfigError> {
    match settings.kubelet.protect_kernel_defaults {
        true => reject_start(settings, &sysctl::apply(Path::new(PROC_SYS), true)),
        false => Ok(()),
    }
}

/// Checks that this machine has what is reserved of it, without which the agent does not start.
///
/// # Errors
/// [`ConfigError::Invalid`] with a resource of which more is reserved than there is.
pub fn check_reservations(settings: &Settings) -> Result<(), ConfigError> {
    // Until the agent has made the directory, the nearest one above it counts.
    let existing = settings.flags.root_dir.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/"));
    let machine = Machine::read(Path::new("/"), existing, &RootFs::default());
    machine.sizes.map_or(Ok(()), |sizes| reservations_fit(settings, &sizes))
}

fn reservations_fit(settings: &Settings, sizes: &Sizes) -> Result<(), ConfigError> {
    let config = ResourceConfig::new(&settings.kubelet, settings.flags.experimental_allocatable_ignore_eviction);
    resources::check(sizes, &config).map_err(|error| {
        let maps =
            [("systemReserved", &settings.kubelet.system_reserved), ("kubeReserved", &settings.kubelet.kube_reserved)];
        let reserving = maps.into_iter().find(|(_, map)| map.contains_key(&error.resource));
        let field = match reserving {
            // It replaces `cpu` of both maps.
            _ if error.resource == "cpu" && !settings.kubelet.reserved_system_cpus.is_empty() => {
                "reservedSystemCPUs".to_owned()
            }
            Some((field, _)) => format!("{field}.{}", error.resource),
            None => "evictionHard".to_owned(),
        };
        let violation = Violation { origin: settings.origin(&field), field, message: error.to_string() };
        ConfigError::Invalid { violations: vec![violation] }
    })
}

fn reject_start(settings: &Settings, errors: &[sysctl::TunableError]) -> Result<(), ConfigError> {
    const FIELD: &str = "protectKernelDefaults";
    let violation = |error: &sysctl::TunableError| Violation {
        origin: settings.origin(FIELD),
        field: FIELD.to_owned(),
        message: error.to_string(),
    };
    let violations: Vec<Violation> = errors.iter().map(violation).collect();
    if violations.is_empty() { Ok(()) } else { Err(ConfigError::Invalid { violations }) }
}

/// The name of this node: `--hostname-override`, or the hostname; trimmed and in lower case.
///
/// # Errors
/// The hostname cannot be read, or the name is empty.
pub fn node_name(hostname_override: &str) -> anyhow::Result<String> {
    let name = match hostname_override {
        "" => nix::unistd::gethostname().context("cannot read the hostname")?.to_string_lossy().into_owned(),
        name => name.to_owned(),
    };
    let name = name.trim().to_lowercase();
    ensure!(!name.is_empty(), "the hostname is empty; name the node by --hostname-override");
    Ok(name)
}

/// Anything but a cgroup v2 file system counts as v1, hybrid hosts included.
fn is_cgroup_v1(root: &Path) -> bool {
    statfs(root).map_or(true, |stat| stat.filesystem_type() != CGROUP2_SUPER_MAGIC)
}

/// `/proc/swaps` has a heading and a line per swap area.
fn swap_active(swaps: &str) -> bool {
    swaps.lines().skip(1).any(|line| !line.trim().is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::load;

    #[test]
    fn a_reservation_above_the_capacity_names_what_reserves_it() {
        let sizes = Sizes { cpus: 4, memory: 8 << 30, pids: i64::MAX, ..Sizes::default() };
        let found = |flag: &str, text: &str| {
            let settings = load(&[(flag, text)].into_iter().collect()).expect("acceptable");
            reservations_fit(&settings, &sizes).map_err(|error| error.to_string())
        };
        assert_eq!(found("kube-reserved", "memory=8Gi"), Ok(()));
        let text = |place: &str, reserved: &str| {
            Err(format!(
                "invalid configuration: {place}: invalid Node Allocatable configuration. Resource \"memory\" has a \
                 reservation of {reserved} but capacity of 8Gi. Expected capacity >= reservation."
            ))
        };
        let kube = text("--kube-reserved: kubeReserved.memory", "9Gi");
        assert_eq!(found("kube-reserved", "memory=9Gi"), kube);
        let hard = text("--eviction-hard: evictionHard", "10Gi");
        assert_eq!(found("eviction-hard", "memory.available<10Gi"), hard);
        let cpus = found("reserved-cpus", "0-7").expect_err("more than there are");
        assert!(cpus.starts_with("invalid configuration: --reserved-cpus: reservedSystemCPUs: "), "{cpus}");
    }

    #[test]
    fn swap_areas() {
        let heading = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n";
        assert!(!swap_active(""));
        assert!(!swap_active(heading));
        assert!(swap_active(&format!("{heading}/dev/sda2  partition  8388604  0  -2\n")));
    }

    #[test]
    fn node_names() {
        assert_eq!(node_name(" Node-1 ").unwrap(), "node-1");
        assert!(node_name("  ").is_err());
        assert!(!node_name("").unwrap().is_empty());
    }

    #[test]
    fn other_file_systems_are_v1() {
        assert!(is_cgroup_v1(Path::new("/proc")));
        assert!(is_cgroup_v1(Path::new("/nonexistent")));
    }
}
