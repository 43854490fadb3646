//! Kernel features of this node, and what is lost without each of them. Observation reads a few files and makes a few test
//! calls; the assessment is pure.

use std::fmt;
use std::io;
use std::os::fd::FromRawFd as _;
use std::os::fd::OwnedFd;
use std::path::Path;

use super::btf;
use super::pidfd::PidFd;
use super::proc;
use crate::cgroups::Hierarchy;
use crate::cgroups::HierarchyKind;
use crate::filesystem::read_mounts;
use crate::filesystem::try_openat2;

/// What takes the place of the probes.
const WITHOUT_PROBES: &str = "no probes: exits come from pidfds, OOM kills from the kernel log and counters of cgroups";

/// Effective capabilities of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities(u64);

/// Capabilities that matter to the agent, by their bit.
const NAMED: [(&str, u32); 9] = [
    ("CAP_DAC_OVERRIDE", 1),
    ("CAP_KILL", 5),
    ("CAP_NET_ADMIN", 12),
    ("CAP_SYS_PTRACE", 19),
    ("CAP_SYS_ADMIN", 21),
    ("CAP_SYS_RESOURCE", 24),
    ("CAP_SYSLOG", 34),
    ("CAP_PERFMON", 38),
    ("CAP_BPF", 39),
];

impl Capabilities {
    /// From the text of `/proc/<pid>/status`.
    pub fn parse(status: &str) -> Option<Self> {
        let bits = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
        u64::from_str_radix(bits.trim(), 16).ok().map(Self)
    }

    /// Capabilities of this process; none if `/proc` is not readable.
    pub fn of_this_process() -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        Self::parse(&status).unwrap_or_default()
    }

    /// Whether the capability called `name` is among them; false for names unknown here.
    pub fn has(self, name: &str) -> bool {
        NAMED.iter().any(|(known, bit)| *known == name && self.0 & (1 << bit) != 0)
    }

    /// Which of the two capabilities that loading probes needs are missing. CAP_SYS_ADMIN stands for both.
    pub fn lacking_for_bpf(self) -> Vec<&'static str> {
        if self.has("CAP_SYS_ADMIN") {
            return Vec::new();
        }
        ["CAP_BPF", "CAP_PERFMON"].into_iter().filter(|name| !self.has(name)).collect()
    }
}

impl fmt::Display for Capabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = NAMED.iter().map(|(name, _)| *name).filter(|name| self.has(name)).collect();
        if names.is_empty() { f.write_str("none") } else { f.write_str(&names.join(" ")) }
    }
}

/// One feature that a node has or lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    /// Which feature.
    pub topic: &'static str,
    /// What was found.
    pub found: String,
    /// What is lost, if it is missing.
    pub cost: Option<String>,
}

/// Features as observed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeFacts {
    /// Kernel release, as `uname -r` prints it.
    pub kernel: String,
    /// The kernel provides its type information (BTF).
    pub btf: bool,
    /// Effective capabilities of this process.
    pub capabilities: Capabilities,
    /// The error of `bpf()`, if it fails.
    pub bpf_refused: Option<String>,
    /// The error of `openat2()`, if it fails.
    pub openat2_refused: Option<String>,
    /// This process can open a pidfd.
    pub pidfd: bool,
    /// This process runs in the host's PID namespace.
    pub host_pid_namespace: bool,
    /// The hierarchy in which containers are identified.
    pub hierarchy: Option<Hierarchy>,
    /// Controllers with the version of their hierarchy, by name.
    pub controllers: Vec<(String, CgroupVersion)>,
    /// Pressure stall information is compiled in and enabled.
    pub psi: bool,
    /// tracefs is mounted.
    pub tracefs: bool,
    /// Limit of locked memory in bytes; `None` for unlimited.
    pub memlock: Option<u64>,
}

/// Version of the hierarchy a controller is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CgroupVersion {
    /// A hierarchy of its own.
    V1,
    /// The unified hierarchy.
    V2,
}

impl NodeFacts {
    /// Observes this node.
    pub fn observe() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let mounts = read_mounts(Path::new("/proc/self/mountinfo")).unwrap_or_default();
        Self {
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            btf: Path::new(btf::VMLINUX).exists(),
            capabilities: Capabilities::of_this_process(),
            bpf_refused: bpf_allowed().err().map(|error| error.to_string()),
            openat2_refused: try_openat2().err().map(|error| error.to_string()),
            pidfd: PidFd::open(std::process::id()).is_ok(),
            host_pid_namespace: proc::in_host_pid_namespace(),
            hierarchy: Hierarchy::find().ok(),
            controllers: controllers(&read("/proc/cgroups"), &unified_controllers(&mounts)),
            // The files exist but cannot be read while PSI is compiled in and disabled.
            psi: std::fs::read("/proc/pressure/memory").is_ok(),
            tracefs: mounts.lines().any(|line| line.contains(" - tracefs ")),
            memlock: memlock(),
        }
    }

    /// All features, with what is lost without the missing ones. Pure.
    pub fn assess(&self) -> Vec<Fact> {
        let fact = |topic, found: String, cost: Option<&str>| Fact { topic, found, cost: cost.map(str::to_owned) };
        vec![
            fact("kernel", self.kernel.clone(), self.kernel_cost()),
            fact("type information (BTF)", self.yes_no(self.btf), (!self.btf).then_some(WITHOUT_PROBES)),
            fact(
                "capabilities",
                self.capabilities.to_string(),
                (!self.capabilities.lacking_for_bpf().is_empty())
                    .then_some("no probes: loading them needs CAP_BPF and CAP_PERFMON"),
            ),
            fact(
                "bpf()",
                self.bpf_refused.clone().unwrap_or_else(|| "allowed".to_owned()),
                self.bpf_refused.as_ref().map(|_| WITHOUT_PROBES),
            ),
            fact(
                "openat2()",
                self.openat2_refused.clone().unwrap_or_else(|| "allowed".to_owned()),
                self.openat2_refused
                    .as_ref()
                    .map(|_| "volumes are neither set up nor removed: it came with 5.6, and nothing replaces it"),
            ),
            fact(
                "pidfd",
                self.yes_no(self.pidfd),
                (!self.pidfd).then_some("restarts wait for the runtime's event, about 45 ms after a container exits"),
            ),
            fact(
                "PID namespace",
                if self.host_pid_namespace { "the host's" } else { "its own" }.to_owned(),
                (!self.host_pid_namespace)
                    .then_some("no probes, whose pids are the host's; pidfds only if the runtime is in the same one"),
            ),
            self.hierarchy_fact(),
            self.controllers_fact(),
            fact("pressure (PSI)", self.yes_no(self.psi), self.psi_cost()),
            fact("tracefs", if self.tracefs { "mounted" } else { "not mounted" }.to_owned(), None),
            self.memlock_fact(),
        ]
    }

    fn psi_cost(&self) -> Option<&'static str> {
        if !self.psi {
            return Some(
                "no pressure events: eviction relies on periodic readings of its signals, and policies find nothing",
            );
        }
        if self.capabilities.has("CAP_SYS_RESOURCE") {
            return None;
        }
        Some(match version(&self.kernel) {
            Some(old) if old < (6, 4) => {
                "no pressure events without CAP_SYS_RESOURCE before 6.4: pressure is read periodically"
            }
            _ => "without CAP_SYS_RESOURCE windows of pressure events are 2 s and longer: eviction is woken later",
        })
    }

    fn yes_no(&self, has: bool) -> String {
        if has { "yes" } else { "no" }.to_owned()
    }

    fn kernel_cost(&self) -> Option<&'static str> {
        let version = version(&self.kernel)?;
        match version {
            old if old < (5, 3) => Some("neither probes (5.8) nor pidfd (5.3)"),
            old if old < (5, 8) => Some("no probes: ring buffers came with 5.8"),
            old if old < (6, 9) => Some("OOM victims often lack name and sizes, which the kernel reports since 6.9"),
            _ => None,
        }
    }

    fn hierarchy_fact(&self) -> Fact {
        let topic = "cgroup hierarchy of containers";
        match &self.hierarchy {
            Some(hierarchy) => {
                let kind = match hierarchy.kind {
                    HierarchyKind::Unified => "v2".to_owned(),
                    HierarchyKind::V1(controller) => format!("v1 {}", controller.as_str()),
                };
                let cost = match hierarchy.kind {
                    HierarchyKind::Unified => None,
                    HierarchyKind::V1(_) => {
                        Some("no memory.events and no PSI per pod: v1 hosts need failCgroupV1: false".to_owned())
                    }
                };
                Fact { topic, found: format!("{kind} at {}", hierarchy.mount.display()), cost }
            }
            None => Fact {
                topic,
                found: "none".to_owned(),
                cost: Some("no probes: cgroup v2 or the v1 memory controller must be mounted".to_owned()),
            },
        }
    }

    fn controllers_fact(&self) -> Fact {
        let list = |version| {
            let names: Vec<&str> =
                self.controllers.iter().filter(|(_, v)| *v == version).map(|(name, _)| name.as_str()).collect();
            names.join(" ")
        };
        let missing: Vec<&str> = ["cpu", "cpuset", "memory", "pids"]
            .into_iter()
            .filter(|name| !self.controllers.iter().any(|(known, _)| known == name))
            .collect();
        Fact {
            topic: "cgroup controllers",
            found: format!("v1: {}; v2: {}", or_none(list(CgroupVersion::V1)), or_none(list(CgroupVersion::V2))),
            cost: (!missing.is_empty()).then(|| format!("not limited or measured per pod: {}", missing.join(", "))),
        }
    }

    fn memlock_fact(&self) -> Fact {
        let found = self.memlock.map_or("unlimited".to_owned(), |bytes| format!("{} KiB", bytes / 1024));
        let counts = version(&self.kernel).is_some_and(|version| version < (5, 11));
        let too_small = self.memlock.is_some_and(|bytes| bytes < 4 << 20);
        let cost = (counts && too_small && !self.capabilities.has("CAP_SYS_RESOURCE")).then(|| {
            "no probes: before 5.11 their maps count as locked memory (raise LimitMEMLOCK to 4 MiB)".to_owned()
        });
        Fact { topic: "locked memory", found, cost }
    }
}

fn or_none(text: String) -> String {
    if text.is_empty() { "none".to_owned() } else { text }
}

/// Major and minor number of a kernel release, such as `6.1.0-25-amd64`.
pub fn version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Controllers from `/proc/cgroups` (name, hierarchy, ...; hierarchy 0 means v2 or unused) and from `cgroup.controllers`
/// of v2.
fn controllers(v1: &str, v2: &str) -> Vec<(String, CgroupVersion)> {
    let own_hierarchy = v1.lines().filter(|line| !line.starts_with('#')).filter_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let name = fields.next()?;
        let hierarchy: u32 = fields.next()?.parse().ok()?;
        (hierarchy != 0).then(|| (name.to_owned(), CgroupVersion::V1))
    });
    let unified = v2.split_ascii_whitespace().map(|name| (name.to_owned(), CgroupVersion::V2));
    let mut all: Vec<_> = own_hierarchy.chain(unified).collect();
    all.sort_by(|(a, _), (b, _)| a.cmp(b));
    all
}

fn unified_controllers(mounts: &str) -> String {
    let mount =
        mounts.lines().filter(|line| line.contains(" - cgroup2 ")).filter_map(|line| line.split(' ').nth(4)).next();
    let path = mount.map(|mount| Path::new(mount).join("cgroup.controllers"));
    path.and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default()
}

fn memlock() -> Option<u64> {
    let (soft, _) = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_MEMLOCK).ok()?;
    (soft != libc::RLIM_INFINITY).then_some(soft)
}

/// Creates the smallest possible map.
///
/// # Errors
/// The system call is not permitted or not implemented.
pub(super) fn bpf_allowed() -> io::Result<()> {
    /// The beginning of `union bpf_attr` as `BPF_MAP_CREATE` reads it.
    #[repr(C)]
    struct MapCreate {
        map_type: u32,
        key_size: u32,
        value_size: u32,
        max_entries: u32,
    }
    const BPF_MAP_CREATE: libc::c_long = 0;
    const BPF_MAP_TYPE_ARRAY: u32 = 2;
    let attr = MapCreate { map_type: BPF_MAP_TYPE_ARRAY, key_size: 4, value_size: 4, max_entries: 1 };
    // SAFETY: the kernel reads as many bytes as the third argument says, which is the size of `attr`.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, BPF_MAP_CREATE, &raw const attr, size_of::<MapCreate>()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just opened this descriptor for us alone.
    drop(unsafe { OwnedFd::from_raw_fd(fd as i32) });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> NodeFacts {
        NodeFacts {
            kernel: "6.12.9-amd64".to_owned(),
            btf: true,
            capabilities: Capabilities(u64::MAX),
            pidfd: true,
            host_pid_namespace: true,
            hierarchy: Hierarchy::choose("1 2 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n", "0::/\n"),
            controllers: controllers("", "cpu cpuset memory pids"),
            psi: true,
            ..NodeFacts::default()
        }
    }

    fn costs(facts: &NodeFacts) -> Vec<&'static str> {
        facts.assess().into_iter().filter(|fact| fact.cost.is_some()).map(|fact| fact.topic).collect()
    }

    #[test]
    fn a_complete_node_lacks_nothing() {
        assert_eq!(costs(&good()), Vec::<&str>::new());
    }

    #[test]
    fn each_missing_feature_is_reported_once() {
        type Remove = fn(&mut NodeFacts);
        let lacking: [(&str, Remove); 10] = [
            ("kernel", |facts| facts.kernel = "5.4.0".to_owned()),
            ("type information (BTF)", |facts| facts.btf = false),
            ("capabilities", |facts| facts.capabilities = Capabilities(1 << 39 | 1 << 24)),
            ("bpf()", |facts| facts.bpf_refused = Some("Operation not permitted".to_owned())),
            ("openat2()", |facts| facts.openat2_refused = Some("Function not implemented".to_owned())),
            ("pidfd", |facts| facts.pidfd = false),
            ("PID namespace", |facts| facts.host_pid_namespace = false),
            ("cgroup hierarchy of containers", |facts| facts.hierarchy = None),
            ("cgroup controllers", |facts| facts.controllers.clear()),
            ("pressure (PSI)", |facts| facts.psi = false),
        ];
        for (topic, remove) in lacking {
            let mut facts = good();
            remove(&mut facts);
            assert_eq!(costs(&facts), vec![topic]);
        }
    }

    #[test]
    fn without_probes_other_sources_of_oom_kills_are_named() {
        for facts in [
            NodeFacts { btf: false, ..good() },
            NodeFacts { bpf_refused: Some("Operation not permitted".to_owned()), ..good() },
        ] {
            let costs: Vec<_> = facts.assess().into_iter().filter_map(|fact| fact.cost).collect();
            assert!(costs.concat().ends_with("OOM kills from the kernel log and counters of cgroups"), "{costs:?}");
        }
    }

    #[test]
    fn locked_memory_counts_on_old_kernels_only() {
        let mut facts = good();
        facts.memlock = Some(64 << 10);
        facts.capabilities = Capabilities(1 << 39 | 1 << 38);
        assert_eq!(costs(&facts), vec!["pressure (PSI)"], "windows need CAP_SYS_RESOURCE");
        facts.kernel = "5.10.0".to_owned();
        assert_eq!(costs(&facts), vec!["kernel", "pressure (PSI)", "locked memory"]);
        facts.capabilities = Capabilities(1 << 39 | 1 << 38 | 1 << 24);
        assert_eq!(costs(&facts), vec!["kernel"]);
    }

    #[test]
    fn capabilities_are_read_from_status() {
        let status = "Name:\tx\nCapEff:\t000001fffeffffff\nCapBnd:\t0\n";
        let caps = Capabilities::parse(status).expect("well formed");
        assert!(caps.has("CAP_BPF") && caps.has("CAP_SYS_ADMIN"));
        assert!(!caps.has("CAP_SYS_RESOURCE"));
        assert_eq!(caps.lacking_for_bpf(), Vec::<&str>::new());
        assert_eq!(Capabilities::default().lacking_for_bpf(), vec!["CAP_BPF", "CAP_PERFMON"]);
        assert_eq!(Capabilities(1 << 39).lacking_for_bpf(), vec!["CAP_PERFMON"]);
        assert_eq!(Capabilities(1 << 39).to_string(), "CAP_BPF");
        assert_eq!(Capabilities::default().to_string(), "none");
        assert_eq!(Capabilities::parse("CapEff:\tzz\n"), None);
    }

    #[test]
    fn controllers_are_sorted_by_hierarchy() {
        let v1 = "#subsys_name\thierarchy\tnum_cgroups\tenabled\nmemory\t4\t9\t1\ncpu\t0\t9\t1\n";
        assert_eq!(
            controllers(v1, "cpu io\n"),
            vec![
                ("cpu".to_owned(), CgroupVersion::V2),
                ("io".to_owned(), CgroupVersion::V2),
                ("memory".to_owned(), CgroupVersion::V1),
            ]
        );
    }

    #[test]
    fn versions_are_read_from_releases() {
        assert_eq!(version("6.18.44-fc-v669"), Some((6, 18)));
        assert_eq!(version("5.10"), Some((5, 10)));
        assert_eq!(version("x"), None);
    }

    #[test]
    fn this_node_can_be_observed() {
        let facts = NodeFacts::observe();
        assert!(version(&facts.kernel).is_some(), "{}", facts.kernel);
        assert_eq!(facts.assess().len(), 12);
    }
}
