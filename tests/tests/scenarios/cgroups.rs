//! The cgroups of a node: classes, pods and containers, their values, and that a restart of the agent changes none of
//! them. Runs with cgroup v1 and v2 and, in the machine of `cargo xtask vm`, with both drivers; the expected values are
//! those of the hierarchy that is found.

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;

use keblet_peers::BUSYBOX_IMAGE;
use keblet_tests::cgroups::CgroupFiles;
use keblet_tests::cgroups::Driver;
use keblet_tests::cgroups::Version;
use keblet_tests::standalone::StandaloneNode;
use serde_json::Value;
use serde_json::json;

const PIDS: u64 = 77;

/// A node with the driver of this run, and its cgroup files.
struct Cgroups {
    node: StandaloneNode,
    files: CgroupFiles,
    driver: Driver,
    root: String,
}

impl Cgroups {
    fn start(changes: Value) -> Result<Self> {
        let (files, driver) = (CgroupFiles::of_machine()?, Driver::of_test());
        let mut config = json!({ "cgroupDriver": driver.name(), "podPidsLimit": PIDS });
        if driver == Driver::Systemd {
            // A slice of the private runtime would have to be there before.
            config["cgroupRoot"] = json!("");
        }
        if let (Some(config), Some(changes)) = (config.as_object_mut(), changes.as_object()) {
            config.extend(changes.clone());
        }
        let mut node = StandaloneNode::with(config)?;
        let root = match driver {
            Driver::Cgroupfs => node.containerd.ready().cgroup_root.clone(),
            Driver::Systemd => "/".to_owned(),
        };
        node.start()?;
        Ok(Self { node, files, driver, root })
    }

    /// Writes the manifest of a pod whose container has these resources.
    fn write(&self, name: &str, resources: &Value) -> Result<()> {
        let mut pod = self.node.pod(name, &["run", "--stamp", &self.node.stamp(name)]);
        pod["spec"]["containers"][0]["resources"] = resources.clone();
        self.node.layout.write_manifest(name, &pod)
    }

    fn path(&self, components: &[&str]) -> String {
        self.driver.path(&self.root, components)
    }

    /// The pod's cgroup, in the class given by its component below `kubepods`, empty for Guaranteed.
    fn pod(&mut self, name: &str, class: &str) -> Result<String> {
        let uid = self.node.until("the pod's uid", |node| Ok(node.uid(name)))?;
        let pod = format!("pod{uid}");
        let components: Vec<&str> = ["kubepods", class, &pod].into_iter().filter(|part| !part.is_empty()).collect();
        Ok(self.path(&components))
    }

    /// The cgroup of the pod's running container, which must be directly below the pod's.
    fn container(&mut self, name: &str, pod: &str) -> Result<String> {
        let pid = self.node.until_running(name)?.pid.context("a running container has a pid")?;
        let path = self.files.of_process(pid)?;
        let parent = path.rsplit_once('/').map(|(parent, _)| parent);
        ensure!(parent == Some(pod), "{name} runs in {path} instead of a child of {pod}");
        Ok(path)
    }

    /// Compares shares (as v1 has them), quota, memory limit and process limit of a cgroup.
    fn check(&self, path: &str, shares: u64, quota: Option<u64>, memory: Option<u64>, pids: Option<u64>) -> Result<()> {
        let files = &self.files;
        let found = (files.shares(path)?, files.quota(path)?, files.memory(path)?, files.pids(path)?);
        let expected = (files.expected_shares(shares), quota, memory, pids);
        ensure!(found == expected, "{path}: shares, quota, memory, pids are {found:?} instead of {expected:?}");
        Ok(())
    }
}

#[test]
#[ignore = "real runtime"]
fn pods_of_each_class_have_their_limits_and_keep_them_over_a_restart() -> Result<()> {
    let mut cgroups = Cgroups::start(json!({}))?;
    let all = json!({ "cpu": "250m", "memory": "64Mi" });
    cgroups.write("guaranteed", &json!({ "requests": all, "limits": all }))?;
    let requests = json!({ "cpu": "100m", "memory": "32Mi" });
    cgroups.write("burstable", &json!({ "requests": requests, "limits": { "memory": "128Mi" } }))?;
    cgroups.write("besteffort", &json!({}))?;

    let guaranteed = cgroups.pod("guaranteed", "")?;
    let container = cgroups.container("guaranteed", &guaranteed)?;
    cgroups.check(&guaranteed, 256, Some(25_000), Some(64 << 20), Some(PIDS))?;
    ensure!(cgroups.files.memory(&container)? == Some(64 << 20), "the container has another memory limit");
    ensure!(cgroups.files.quota(&container)? == Some(25_000), "the container has another quota");

    let burstable = cgroups.pod("burstable", "burstable")?;
    let container = cgroups.container("burstable", &burstable)?;
    cgroups.check(&burstable, 102, None, Some(128 << 20), Some(PIDS))?;
    ensure!(cgroups.files.memory(&container)? == Some(128 << 20), "the container has another memory limit");
    if cgroups.files.version == Version::V2 {
        let group = cgroups.files.read(&container, "memory", "", "memory.oom.group")?;
        ensure!(group == "1", "memory.oom.group of {container} is {group}");
    }

    let besteffort = cgroups.pod("besteffort", "besteffort")?;
    cgroups.container("besteffort", &besteffort)?;
    cgroups.check(&besteffort, 2, None, None, Some(PIDS))?;

    // The class has the sum of its pods' requests.
    let class = cgroups.path(&["kubepods", "burstable"]);
    let expected = cgroups.files.expected_shares(102);
    let files = cgroups.files;
    cgroups.node.until_true("the weight of the class", |_| Ok(files.shares(&class)? == expected))?;
    let class = cgroups.path(&["kubepods", "besteffort"]);
    ensure!(files.shares(&class)? == files.expected_shares(2), "another weight of {class}");

    let kubepods = cgroups.path(&["kubepods"]);
    let before = (files.values_below(&kubepods)?, running(&mut cgroups.node)?);
    cgroups.node.kill_agent()?;
    cgroups.node.start()?;
    cgroups.node.until_true("the restarted agent knows its pods", |node| {
        Ok(NAMES.iter().all(|name| node.status(name)["phase"] == "Running"))
    })?;
    let after = (files.values_below(&kubepods)?, running(&mut cgroups.node)?);
    ensure!(before == after, "the restart changed something:\n{before:#?}\n{after:#?}");

    cgroups.node.layout.remove_manifest("burstable")?;
    let directory = files.directory("memory", &burstable);
    cgroups.node.until_true("the pod's cgroup removed", |_| Ok(!directory.exists()))?;
    cgroups.node.stop()
}

const NAMES: [&str; 3] = ["guaranteed", "burstable", "besteffort"];

/// Ids of the running containers.
fn running(node: &mut StandaloneNode) -> Result<Vec<String>> {
    NAMES.iter().map(|name| Ok(node.until_running(name)?.id)).collect()
}

/// The state of a terminated container `main`.
fn terminated(node: &mut StandaloneNode, name: &str) -> Result<Value> {
    node.until(&format!("{name} terminated"), |node| {
        let state = node.status(name)["containerStatuses"][0]["state"]["terminated"].clone();
        Ok((!state.is_null()).then_some(state))
    })
}

#[test]
#[ignore = "real runtime"]
fn container_at_its_memory_limit_is_reported_as_oom_killed() -> Result<()> {
    let mut cgroups = Cgroups::start(json!({}))?;
    for (name, command) in [("hungry", json!(["/probe", "oom", "--mb", "64"])), ("ordinary", json!(["/probe", "exit"]))]
    {
        let mut pod = cgroups.node.pod(name, &[]);
        pod["spec"]["restartPolicy"] = json!("Never");
        let container = &mut pod["spec"]["containers"][0];
        container["command"] = command;
        container["resources"] = json!({ "limits": { "memory": "24Mi" } });
        cgroups.node.layout.write_manifest(name, &pod)?;
    }
    let hungry = terminated(&mut cgroups.node, "hungry")?;
    ensure!(hungry["reason"] == "OOMKilled" && hungry["exitCode"] == 137, "{hungry}");
    let ordinary = terminated(&mut cgroups.node, "ordinary")?;
    ensure!(ordinary["reason"] == "Completed" && ordinary["exitCode"] == 0, "{ordinary}");
    cgroups.node.stop()
}

/// With cgroup v2 all processes of the container are killed with the chosen one, which the kernel counts twice
/// (`memory.oom.group`).
#[test]
#[ignore = "real runtime"]
fn a_killed_family_of_processes_is_one_oom_kill() -> Result<()> {
    let mut cgroups = Cgroups::start(json!({}))?;
    let mut pod = cgroups.node.pod("family", &[]);
    pod["spec"]["restartPolicy"] = json!("Never");
    let container = &mut pod["spec"]["containers"][0];
    container["image"] = json!(BUSYBOX_IMAGE);
    container["command"] = json!(["sh", "-c", "sleep 600 & sleep 600 & tail /dev/zero; exit 3"]);
    container["resources"] = json!({ "limits": { "memory": "24Mi" } });
    cgroups.node.layout.write_manifest("family", &pod)?;
    let code = match cgroups.files.version {
        Version::V2 => 137,
        Version::V1 => 3,
    };
    let terminated = terminated(&mut cgroups.node, "family")?;
    ensure!(terminated["exitCode"] == code, "{terminated}");
    let text = cgroups.node.metrics().context("metrics")?;
    let has_kills = |line: &&str| line.starts_with("keblet_oom_kills_total{") && !line.ends_with(" 0");
    let kills: Vec<&str> = text.lines().filter(has_kills).collect();
    // Members of the group that end with the init process of their PID namespace do not count as kills.
    let count: f64 = kills.iter().filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum();
    let has_records = kills.iter().all(|kill| kill.contains("confidence=\"kernel\""));
    ensure!(has_records && (1.0..=4.0).contains(&count), "{kills:?}");
    let events = cgroups.node.cadvisor("container_oom_events_total{container=\"main\"");
    let of_pod = events.iter().find(|line| line.contains("pod=\"family"));
    ensure!(of_pod.is_some_and(|line| line.contains("} 1")), "{events:?}");
    cgroups.node.stop()
}

#[test]
#[ignore = "real runtime"]
fn a_static_pod_edited_in_place_is_resized_without_a_restart() -> Result<()> {
    let mut cgroups = Cgroups::start(json!({}))?;
    let uid = "6f0c8a52-3a4b-4c0e-9a53-5d2a3f0e7b11";
    let write = |cgroups: &Cgroups, cpu: &str, memory: &str| {
        let mut pod = cgroups.node.pod("web", &["run", "--stamp", &cgroups.node.stamp("web")]);
        let amounts = json!({ "cpu": cpu, "memory": memory });
        pod["metadata"]["uid"] = json!(uid);
        pod["spec"]["containers"][0]["resources"] = json!({ "requests": amounts, "limits": amounts });
        cgroups.node.layout.write_manifest("web", &pod)
    };
    write(&cgroups, "250m", "64Mi")?;
    let pod = cgroups.pod("web", "")?;
    let container = cgroups.container("web", &pod)?;
    let pid = cgroups.node.until_running("web")?.pid;
    cgroups.check(&pod, 256, Some(25_000), Some(64 << 20), Some(PIDS))?;

    for (cpu, memory, shares, quota, bytes) in
        [("500m", "128Mi", 512, 50_000, 128_u64 << 20), ("100m", "96Mi", 102, 10_000, 96 << 20)]
    {
        write(&cgroups, cpu, memory)?;
        let (files, of_pod, of_container) = (cgroups.files, pod.clone(), container.clone());
        cgroups.node.until_true("the limits of pod and container", move |_| {
            let values = |path: &str| Ok::<_, anyhow::Error>((files.quota(path)?, files.memory(path)?));
            let expected = (Some(quota), Some(bytes));
            Ok(values(&of_pod)? == expected && values(&of_container)? == expected)
        })?;
        cgroups.check(&pod, shares, Some(quota), Some(bytes), Some(PIDS))?;
    }
    // An agent that is killed and started again finds what it has applied.
    cgroups.node.kill_agent()?;
    cgroups.node.start()?;
    write(&cgroups, "300m", "96Mi")?;
    let (files, of_container) = (cgroups.files, container.clone());
    cgroups.node.until_true("another quota", move |_| Ok(files.quota(&of_container)? == Some(30_000)))?;
    ensure!(cgroups.node.until_running("web")?.pid == pid, "the process was restarted");
    ensure!(cgroups.node.starts("web") == 1, "the container was started again");
    cgroups.node.stop()
}
