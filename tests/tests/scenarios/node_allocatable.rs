//! Cgroups of pods on a real kernel and runtime, cgroup v1 or v2: QoS classes, node allocatable, pods, protection of memory,
//! and an agent restart that changes none of them. The witnesses are the kernel's files.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use keblet::cgroups::Hierarchies;
use keblet::cgroups::Layout;
use keblet::cgroups::arithmetic;
use keblet_peers::ContainerView;
use keblet_tests::standalone::StandaloneNode;
use serde_json::Value;
use serde_json::json;

/// The kernel's line of a cgroup update in the agent's log.
const UPDATED: &str = "updated the limits of a cgroup";
const ENFORCED: &str = "Updated Node Allocatable limit across pods";
const MIB: u64 = 1 << 20;
/// Larger limits mean none.
const UNLIMITED: u64 = 1 << 62;

/// Files of the machine's cgroups.
struct Kernel {
    layout: Layout,
}

impl Kernel {
    fn detect() -> Result<Self> {
        Ok(Self { layout: Hierarchies::detect()?.layout })
    }

    fn folder(&self, controller: &str, path: &str) -> Result<PathBuf> {
        let mount = self.layout.mount_of(controller).with_context(|| format!("{controller} is not mounted"))?;
        Ok(mount.join(path.trim_start_matches('/')))
    }

    /// The number in a file of a cgroup.
    fn number(&self, controller: &str, path: &str, v1: &str, v2: &str) -> Result<u64> {
        let file = self.folder(controller, path)?.join(if self.layout.is_v2() { v2 } else { v1 });
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        match text.trim() {
            "max" => Ok(u64::MAX),
            number => number.parse().with_context(|| format!("{number:?} in {}", file.display())),
        }
    }

    /// CPU weight of a cgroup, in the unit of its file, beside the one that so many thousandths of a CPU give.
    fn weights(&self, path: &str, milli_cpu: i64) -> Result<(u64, u64)> {
        let shares = arithmetic::shares(milli_cpu);
        let expected = if self.layout.is_v2() { arithmetic::weight(shares) } else { shares };
        Ok((self.number("cpu", path, "cpu.shares", "cpu.weight")?, expected))
    }

    fn memory_limit(&self, path: &str) -> Result<u64> {
        self.number("memory", path, "memory.limit_in_bytes", "memory.max")
    }

    fn pids(&self, path: &str) -> Result<u64> {
        self.number("pids", path, "pids.max", "pids.max")
    }

    /// Quota and period of a cgroup, microseconds; -1 for no quota.
    fn cpu_max(&self, path: &str) -> Result<(i64, u64)> {
        let folder = self.folder("cpu", path)?;
        let text = |file: &str| fs::read_to_string(folder.join(file)).with_context(|| format!("{file} of {path}"));
        if !self.layout.is_v2() {
            return Ok((text("cpu.cfs_quota_us")?.trim().parse()?, text("cpu.cfs_period_us")?.trim().parse()?));
        }
        let text = text("cpu.max")?;
        let (quota, period) = text.trim().split_once(' ').context("two numbers")?;
        Ok((if quota == "max" { -1 } else { quota.parse()? }, period.parse()?))
    }

    /// The cgroup of a running container's process in the hierarchy of memory limits.
    fn cgroup_of(&self, container: &ContainerView) -> Result<String> {
        let pid = container.pid.context("it does not run")?;
        let memberships = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        let is_v2 = self.layout.is_v2();
        let path = memberships.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            let fits = if is_v2 { controllers.is_empty() } else { controllers.split(',').any(|name| name == "memory") };
            fits.then(|| path.to_owned())
        });
        path.with_context(|| format!("no memory cgroup in {memberships}"))
    }

    /// The cgroup of a container's pod.
    fn pod_of(&self, container: &ContainerView) -> Result<String> {
        let path = self.cgroup_of(container)?;
        path.rsplit_once('/').map(|(pod, _)| pod.to_owned()).with_context(|| format!("no parent of {path}"))
    }

    /// Creates a cgroup below one whose controllers are enabled, in every hierarchy.
    fn create(&self, path: &str) -> Result<()> {
        for mount in self.layout.mounts() {
            let folder = mount.join(path.trim_start_matches('/'));
            fs::create_dir(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        }
        Ok(())
    }
}

fn mem_total() -> Result<u64> {
    let meminfo = fs::read_to_string("/proc/meminfo")?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")).context("no MemTotal")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse::<u64>()? * 1024)
}

fn pid_capacity() -> Result<u64> {
    let limit =
        |name: &str| -> Result<u64> { Ok(fs::read_to_string(format!("/proc/sys/kernel/{name}"))?.trim().parse()?) };
    Ok(limit("pid_max")?.min(limit("threads-max")?))
}

fn cpus() -> Result<i64> {
    let count = nix::unistd::sysconf(nix::unistd::SysconfVar::_NPROCESSORS_ONLN)?;
    count.context("the number of processors is not known")
}

fn write_pod_with(node: &StandaloneNode, name: &str, resources: Value) -> Result<()> {
    let mut pod = node.pod(name, &["run", "--stamp", &node.stamp(name)]);
    pod["spec"]["containers"][0]["resources"] = resources;
    node.layout.write_manifest(name, &pod)
}

/// Writes a Guaranteed, a Burstable and a BestEffort pod.
fn write_pods(node: &StandaloneNode) -> Result<()> {
    let same = json!({ "cpu": "250m", "memory": "64Mi" });
    write_pod_with(node, "guaranteed", json!({ "requests": same, "limits": same }))?;
    let (requests, limits) = (json!({ "cpu": "100m", "memory": "32Mi" }), json!({ "memory": "128Mi" }));
    write_pod_with(node, "burstable", json!({ "requests": requests, "limits": limits }))?;
    write_pod_with(node, "best-effort", json!({}))
}

fn oom_score(container: &ContainerView) -> Result<i64> {
    let pid = container.pid.context("it does not run")?;
    Ok(fs::read_to_string(format!("/proc/{pid}/oom_score_adj"))?.trim().parse()?)
}

fn lines_with(node: &StandaloneNode, message: &str) -> usize {
    node.log().iter().filter(|line| line.to_string().contains(message)).count()
}

/// Changes fields of the agent's configuration file.
fn reconfigure(node: &StandaloneNode, changes: &Value) -> Result<()> {
    let mut config: Value = serde_json::from_slice(&fs::read(&node.layout.config)?)?;
    if let (Some(config), Some(changes)) = (config.as_object_mut(), changes.as_object()) {
        config.extend(changes.clone());
    }
    fs::write(&node.layout.config, config.to_string()).context("cannot write the configuration")
}

#[test]
#[ignore = "real runtime"]
fn qos_classes_and_pods_have_the_limits_of_a_kubelet() -> Result<()> {
    let kernel = Kernel::detect()?;
    let reserved = json!({ "cpu": "100m", "memory": "64Mi", "pid": "100" });
    let mut node = StandaloneNode::with(json!({
        "enforceNodeAllocatable": ["pods"], "systemReserved": reserved, "podPidsLimit": 77,
    }))?;
    write_pods(&node)?;
    node.start()?;
    let [guaranteed, burstable, best_effort] =
        [node.until_running("guaranteed")?, node.until_running("burstable")?, node.until_running("best-effort")?];
    node.until_true("node allocatable", |node| Ok(node.log_contains(&["NodeAllocatableEnforced", ENFORCED])))?;
    let root = format!("{}/kubepods", node.containerd.ready().cgroup_root);

    ensure!(kernel.memory_limit(&root)? / 4096 == (mem_total()? - 64 * MIB) / 4096, "{}", kernel.memory_limit(&root)?);
    ensure!(kernel.pids(&root)? == pid_capacity()? - 100, "{}", kernel.pids(&root)?);
    let (weight, expected) = kernel.weights(&root, cpus()? * 1000 - 100)?;
    ensure!(weight == expected, "kubepods has the CPU weight {weight} instead of {expected}");
    for (class, milli_cpu) in [("burstable", 100), ("besteffort", 0)] {
        let path = format!("{root}/{class}");
        let right =
            |_: &mut StandaloneNode| kernel.weights(&path, milli_cpu).map(|(weight, expected)| weight == expected);
        node.until_true(&format!("the CPU weight of {class}"), right)?;
        ensure!(kernel.memory_limit(&path)? >= UNLIMITED, "{class} has a memory limit");
    }

    let parents = [("", &guaranteed), ("/burstable", &burstable), ("/besteffort", &best_effort)];
    for (class, container) in parents {
        let pod = kernel.pod_of(container)?;
        ensure!(pod.starts_with(&format!("{root}{class}/pod")), "{pod}");
        ensure!(kernel.pids(&pod)? == 77, "{pod}: {}", kernel.pids(&pod)?);
    }
    let pods = [&guaranteed, &burstable, &best_effort].map(|container| kernel.pod_of(container));
    let [guaranteed_pod, burstable_pod, best_effort_pod] = pods;
    let (guaranteed_pod, burstable_pod, best_effort_pod) = (guaranteed_pod?, burstable_pod?, best_effort_pod?);
    for (pod, milli_cpu) in [(&guaranteed_pod, 250), (&burstable_pod, 100), (&best_effort_pod, 0)] {
        let (weight, expected) = kernel.weights(pod, milli_cpu)?;
        ensure!(weight == expected, "{pod} has the CPU weight {weight} instead of {expected}");
    }
    ensure!(kernel.cpu_max(&guaranteed_pod)? == (25_000, 100_000), "{:?}", kernel.cpu_max(&guaranteed_pod)?);
    ensure!(kernel.cpu_max(&burstable_pod)?.0 == -1, "{:?}", kernel.cpu_max(&burstable_pod)?);
    ensure!(kernel.memory_limit(&guaranteed_pod)? == 64 * MIB, "{}", kernel.memory_limit(&guaranteed_pod)?);
    ensure!(kernel.memory_limit(&burstable_pod)? == 128 * MIB, "{}", kernel.memory_limit(&burstable_pod)?);
    ensure!(kernel.memory_limit(&best_effort_pod)? >= UNLIMITED, "{}", kernel.memory_limit(&best_effort_pod)?);
    ensure!(kernel.memory_limit(&kernel.cgroup_of(&burstable)?)? == 128 * MIB);

    // Without CAP_SYS_RESOURCE neither the agent nor the runtime can lower a score.
    let may_lower = !node.log_contains(&["cannot set oomScoreAdj"]);
    let scores = [oom_score(&guaranteed)?, oom_score(&best_effort)?];
    ensure!(scores[1] == 1000 && (scores[0] == -997 || !may_lower), "{scores:?}");
    let expected = (1000 - 1000 * i64::try_from(32 * MIB)? / i64::try_from(mem_total()?)?).clamp(3, 999);
    ensure!(oom_score(&burstable)? == expected, "{} instead of {expected}", oom_score(&burstable)?);
    let agent = node.agent_pid()?;
    let own = fs::read_to_string(format!("/proc/{agent}/oom_score_adj"))?;
    ensure!(own.trim() == "-999" || !may_lower, "{own}");
    if kernel.layout.is_v2() {
        let group = kernel.number("memory", &kernel.cgroup_of(&best_effort)?, "", "memory.oom.group")?;
        ensure!(group == 1, "an OOM kill leaves processes of the container");
    }

    node.layout.remove_manifest("burstable")?;
    let gone = kernel.folder("memory", &burstable_pod)?;
    node.until_true("the pod's cgroup is removed", |_| Ok(!gone.exists()))?;
    let lowest = |_: &mut StandaloneNode| {
        kernel.weights(&format!("{root}/burstable"), 0).map(|(weight, expected)| weight == expected)
    };
    node.until_true("the class has no weight left", lowest)?;
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn agent_restart_changes_no_cgroup() -> Result<()> {
    let kernel = Kernel::detect()?;
    let reserved = json!({ "cpu": "100m", "memory": "64Mi" });
    let mut node = StandaloneNode::with(json!({ "enforceNodeAllocatable": ["pods"], "kubeReserved": reserved }))?;
    write_pods(&node)?;
    node.start()?;
    let names = ["guaranteed", "burstable", "best-effort"];
    let before: BTreeMap<&str, ContainerView> =
        names.into_iter().map(|name| Ok((name, node.until_running(name)?))).collect::<Result<_>>()?;
    node.until_true("node allocatable", |node| Ok(node.log_contains(&[ENFORCED])))?;
    ensure!(lines_with(&node, UPDATED) == 1, "{} updates at the first start", lines_with(&node, UPDATED));

    // A value that only a resize may set shows that the cgroup is not written again.
    let pod = kernel.pod_of(&before["burstable"])?;
    let file = kernel.folder("cpu", &pod)?.join(if kernel.layout.is_v2() { "cpu.weight" } else { "cpu.shares" });
    fs::write(&file, "77").with_context(|| format!("cannot write {}", file.display()))?;
    let class = format!("{}/kubepods/burstable", node.containerd.ready().cgroup_root);
    let weight = kernel.weights(&class, 100)?;
    ensure!(weight.0 == weight.1, "{weight:?}");

    for starts in 2..=3 {
        node.kill_agent()?;
        node.start()?;
        node.until_true("node allocatable again", |node| Ok(lines_with(node, ENFORCED) >= starts))?;
        node.until_true("the agent works again", |node| Ok(lines_with(node, "node agent started") >= starts))?;
        for (name, container) in &before {
            ensure!(node.until_running(name)? == *container, "{name} was restarted");
        }
        ensure!(lines_with(&node, UPDATED) == 1, "a cgroup was written again");
        ensure!(fs::read_to_string(&file)?.trim() == "77", "the pod's cgroup was written again");
        ensure!(kernel.weights(&class, 100)? == weight, "the weight of the Burstable class changed");
    }
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn reserved_cgroup_is_limited_and_must_exist() -> Result<()> {
    let kernel = Kernel::detect()?;
    let mut node = StandaloneNode::new()?;
    node.write_running_pod("web")?;
    node.start()?;
    let web = node.until_running("web")?;
    node.kill_agent()?;

    // The first start has enabled the controllers below the root.
    let daemons = format!("{}/daemons", node.containerd.ready().cgroup_root);
    kernel.create(&daemons)?;
    reconfigure(
        &node,
        &json!({
            "enforceNodeAllocatable": ["pods", "kube-reserved"],
            "kubeReserved": { "cpu": "200m", "memory": "96Mi", "pid": "50" }, "kubeReservedCgroup": daemons,
        }),
    )?;
    node.start()?;
    let message = format!("Updated limits on kube reserved cgroup {daemons}");
    node.until_true("the reservation is enforced", |node| Ok(node.log_contains(&[&message])))?;
    ensure!(kernel.memory_limit(&daemons)? == 96 * MIB, "{}", kernel.memory_limit(&daemons)?);
    ensure!(kernel.pids(&daemons)? == 50, "{}", kernel.pids(&daemons)?);
    let (weight, expected) = kernel.weights(&daemons, 200)?;
    ensure!(weight == expected, "{weight} instead of {expected}");
    node.until_true("the agent works", |node| Ok(node.running("web")?.is_some()))?;
    node.kill_agent()?;

    reconfigure(&node, &json!({ "kubeReservedCgroup": format!("{daemons}/none") }))?;
    node.start()?;
    let ended = node.until_true("a refusal", |_| Ok(false)).expect_err("it must not start").to_string();
    ensure!(ended.contains("the agent exited"), "{ended}");
    let words = ["FailedNodeAllocatableEnforcement", "Failed to enforce Kube Reserved Cgroup Limits on"];
    ensure!(node.log_contains(&words), "no event");
    ensure!(node.running("web")? == Some(web), "the pod was touched");

    reconfigure(&node, &json!({ "kubeReservedCgroup": daemons }))?;
    node.start()?;
    node.until_true("it starts with the right cgroup", |node| Ok(lines_with(node, &message) >= 2))?;
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn the_agent_moves_to_its_configured_cgroup() -> Result<()> {
    let kernel = Kernel::detect()?;
    let mut node = StandaloneNode::new()?;
    let cgroup = format!("{}/agent", node.containerd.ready().cgroup_root);
    reconfigure(&node, &json!({ "kubeletCgroups": cgroup }))?;
    node.write_running_pod("web")?;
    node.start()?;
    node.until_running("web")?;
    for start in 1..=2 {
        let agent = node.agent_pid()?.to_string();
        for controller in ["cpu", "memory", "pids"] {
            let file = kernel.folder(controller, &cgroup)?.join("cgroup.procs");
            let is_there = |_: &mut StandaloneNode| {
                Ok(fs::read_to_string(&file).is_ok_and(|pids| pids.lines().any(|pid| pid == agent)))
            };
            node.until_true(&format!("process {agent} in {}", file.display()), is_there)?;
        }
        if start == 1 {
            node.kill_agent()?;
            node.start()?;
        }
    }
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn vm_tiered_reservation_protects_requested_memory() -> Result<()> {
    let kernel = Kernel::detect()?;
    if !kernel.layout.is_v2() {
        keblet_skip::skip("memory is protected on cgroup v2 only");
        return Ok(());
    }
    let mut node = StandaloneNode::with(json!({
        "memoryReservationPolicy": "TieredReservation", "memoryThrottlingFactor": 0.5,
    }))?;
    write_pods(&node)?;
    node.start()?;
    let [guaranteed, burstable, best_effort] =
        [node.until_running("guaranteed")?, node.until_running("burstable")?, node.until_running("best-effort")?];
    let root = format!("{}/kubepods", node.containerd.ready().cgroup_root);
    let value = |path: &str, file: &str| kernel.number("memory", path, "", file);
    let classes = |_: &mut StandaloneNode| {
        let kubepods = (value(&root, "memory.min")?, value(&root, "memory.low")?);
        Ok(kubepods == (96 * MIB, 32 * MIB) && value(&format!("{root}/burstable"), "memory.low")? == 32 * MIB)
    };
    node.until_true("the protection of the classes", classes)?;
    for path in [kernel.pod_of(&guaranteed)?, kernel.cgroup_of(&guaranteed)?] {
        ensure!(value(&path, "memory.min")? == 64 * MIB, "{path}: {}", value(&path, "memory.min")?);
    }
    for path in [kernel.pod_of(&burstable)?, kernel.cgroup_of(&burstable)?] {
        ensure!(value(&path, "memory.low")? == 32 * MIB, "{path}: {}", value(&path, "memory.low")?);
    }
    let high = value(&kernel.cgroup_of(&burstable)?, "memory.high")?;
    ensure!(high == 80 * MIB, "throttled from {high}");
    ensure!(value(&kernel.cgroup_of(&guaranteed)?, "memory.high")? == u64::MAX, "request and limit are equal");
    ensure!(value(&kernel.cgroup_of(&best_effort)?, "memory.high")? < UNLIMITED, "throttled by what is allocatable");
    node.kill_agent()?;

    // Without the policy a protection that is left would keep memory from others.
    reconfigure(&node, &json!({ "memoryReservationPolicy": "None" }))?;
    node.start()?;
    let cleared = |_: &mut StandaloneNode| {
        let left = [value(&root, "memory.min")?, value(&root, "memory.low")?];
        Ok(left == [0, 0] && value(&format!("{root}/burstable"), "memory.low")? == 0)
    };
    node.until_true("the protection of the classes is removed", cleared)?;
    // A start that is interrupted ends only when the probes are loaded, which takes long under emulation.
    node.until_true("the agent reports its pods", |node| Ok(node.status("guaranteed")["phase"] == "Running"))?;
    node.stop()
}
