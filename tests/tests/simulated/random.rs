//! The whole agent under random schedules: exits, lost and malformed events, failing, hanging and late calls, runtime
//! restarts, agent restarts, an unavailable API server, pods added, removed and deleted with their grace period. Static
//! and API pods, on the host's network and on their own, with volumes, init containers, sidecars, image pulls, in-place
//! resizes, hooks and probes whose answers change, on a containerd 1.7 and on a runtime with every feature. Afterwards:
//!
//! - no container name ever had two running instances in a pod,
//! - no restart count decreased,
//! - no agent reported an exit twice, and every exit was reported,
//! - within minutes after the faults end, the desired pods run and are ready or have finished, with the resources that they
//!   desire, and nothing else is left.
//!
//! See [`seeds`] for the choice of seeds; a failure prints seed, schedule and trace.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::EmptyDirVolumeSource;
use k8s_openapi::api::core::v1::Volume;
use k8s_openapi::api::core::v1::VolumeMount;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use keblet::model::Pod;
use keblet_proto::cri::v1::ContainerState;
use keblet_proto::cri::v1::ContainerStatus;
use keblet_proto::cri::v1::PodSandboxState;
use keblet_proto::cri::v1::PodSandboxStatus;
use keblet_tests::cri::*;
use keblet_tests::node::Agent;
use keblet_tests::node::Api;
use keblet_tests::node::PodOf;
use keblet_tests::node::Seen;
use keblet_tests::node::SensorSet;
use keblet_tests::node::folder;
use keblet_tests::node::pod;
use keblet_tests::seeds;
use serde_json::Value;
use serde_json::json;
use tokio::time::Instant;
use tokio::time::sleep;

const SPAN: Duration = Duration::from_secs(25);
/// A call that takes effect five minutes late, then a crash-loop back-off, or a relist that finds a lost event's exit.
const CONVERGENCE: Duration = Duration::from_secs(15 * 60);
/// How long the final state has to last.
const STABLE: Duration = Duration::from_secs(5);
const NAMES: [&str; 8] = ["a", "b", "c", "d", "e", "h", "j", "p"];
/// The image that has to be pulled.
const PULLED: &str = "registry.example/app:1";

/// Whether the pod comes from the API server and is deleted with a grace period.
fn from_api(name: &str) -> bool {
    matches!(name, "d" | "e" | "h" | "j" | "p")
}

fn pod_called(name: &str, generation: u32) -> PodOf {
    let pod = match name {
        "a" => pod("a").running("main", "exit 1 700ms until 2").running("side", "run"),
        "b" => pod("b").own_network().after("init", "exit 0 20ms").running("main", "run"),
        "c" => pod("c").host_pid().running("main", "exit 0 1s until 2 fork"),
        "d" => pod("d").from_api().own_network().sidecar("proxy", "exit 1 2s until 1").running("main", "term 2s"),
        "e" => pod("e").from_api().restarted("OnFailure").running("main", "exit 1 900ms until 1 term ignore"),
        "h" => pod("h").from_api().own_network().running("main", "term 1s").running("side", "run"),
        "p" => pod("p").from_api().own_network().running("main", "exit 1 5s until 1").sidecar("proxy", "run"),
        _ => pod("j").from_api().own_network().restarted("Never").sidecar("proxy", "run").running("main", "exit 0 2s"),
    };
    pod.uid(&uid(name, generation))
}

fn uid(name: &str, generation: u32) -> String {
    format!("{name}-uid-{generation}")
}

/// The desired pod, with a volume, and with images that API pods have to pull.
fn built(name: &str, generation: u32, deleting: bool) -> Pod {
    let pod = pod_called(name, generation);
    let mut pod = Arc::unwrap_or_clone(if deleting { pod.deleting() } else { pod }.build());
    let spec = pod.spec.as_mut().expect("a spec");
    let empty_dir = Some(EmptyDirVolumeSource::default());
    spec.volumes = Some(vec![Volume { name: "data".to_owned(), empty_dir, ..Volume::default() }]);
    let mount = VolumeMount { name: "data".to_owned(), mount_path: "/data".to_owned(), ..VolumeMount::default() };
    for container in spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()) {
        container.volume_mounts = Some(vec![mount.clone()]);
    }
    if from_api(name) {
        for container in &mut spec.containers {
            equip(container, name);
            container.image = Some(PULLED.to_owned());
            container.image_pull_policy = Some(if name == "e" { "Always" } else { "IfNotPresent" }.to_owned());
        }
    }
    Arc::new(pod)
}

/// A request that can be changed; hooks and probes, which run the commands scripted for the container.
fn equip(container: &mut Container, pod: &str) {
    let exec = || json!({ "exec": { "command": ["scripted"] } });
    match (pod, container.name.as_str()) {
        ("h", "main") => {
            let hooks = json!({ "postStart": exec(), "preStop": exec() });
            container.lifecycle = Some(serde_json::from_value(hooks).expect("hooks"));
        }
        ("h", "side") => request_cpu(container, 100),
        ("p", "main") => {
            let probe = |changes: Value| {
                let mut probe = exec();
                probe.as_object_mut().expect("a probe").extend(changes.as_object().expect("fields").clone());
                Some(serde_json::from_value(probe).expect("a probe"))
            };
            container.startup_probe = probe(json!({ "periodSeconds": 1, "failureThreshold": 5 }));
            container.liveness_probe = probe(json!({ "periodSeconds": 2, "failureThreshold": 2 }));
            container.readiness_probe = probe(json!({ "periodSeconds": 1 }));
        }
        _ => {}
    }
}

/// Sets the container's CPU request, in thousandths.
fn request_cpu(container: &mut Container, milli: u32) {
    let requests = container.resources.get_or_insert_default().requests.get_or_insert_default();
    requests.insert("cpu".to_owned(), Quantity(format!("{milli}m")));
}

/// One schedule's node, agent and desired pods.
struct Scenario<'a> {
    seed: u64,
    sim: SimRuntime,
    root: &'a Path,
    sensors: SensorSet,
    rng: fastrand::Rng,
    api: Api,
    desired: BTreeMap<&'static str, u32>,
    /// API pods whose deletion was requested and whose object the agent has not deleted yet.
    deleting: BTreeMap<&'static str, u32>,
    generation: u32,
    /// Reports of each agent's PLEG, oldest first.
    seen: Vec<Seen>,
    agent: Option<Agent>,
}

impl Scenario<'_> {
    fn start_agent(&mut self) {
        self.agent = None;
        let seen = Seen::default();
        let desired = |name: &str, generation: u32| {
            if from_api(name) { self.api.pod(name) } else { Some(built(name, generation, false)) }
        };
        let all = self.desired.iter().chain(&self.deleting);
        let pods = all.filter_map(|(name, generation)| desired(name, *generation)).collect();
        self.agent =
            Some(Agent::start_observed_in_cluster(&self.sim, self.sensors, self.root, pods, seen.clone(), &self.api));
        self.seen.push(seen);
    }

    async fn agent_action(&mut self) {
        self.deliver_deletions().await;
        let name = NAMES[self.rng.usize(..NAMES.len())];
        if self.rng.bool() {
            self.change_answers();
        }
        if self.rng.bool() {
            self.resize().await;
        }
        match self.rng.u8(0..7) {
            0 => self.start_agent(),
            1 => self.api.set_unavailable(self.rng.bool()),
            2..=4 if self.desired.contains_key(name) => self.remove(name).await,
            _ => self.add(name).await,
        }
    }

    /// Hooks and probes succeed, fail, or take longer than they may.
    fn change_answers(&mut self) {
        let takes = Duration::from_millis(if self.rng.bool() { 50 } else { self.rng.u64(0..8000) });
        let answer = ExecResult { code: i32::from(self.rng.u8(0..2)), takes, ..ExecResult::default() };
        self.sim.script_exec(if self.rng.bool() { "h" } else { "p" }, "main", answer);
    }

    /// Changes the CPU request of a container in place.
    async fn resize(&mut self) {
        let milli = self.rng.u32(1..9) * 100;
        let pod = self.api.pod("h").filter(|_| self.desired.contains_key("h"));
        let (Some(agent), Some(pod)) = (&self.agent, pod) else { return };
        let mut pod = Arc::unwrap_or_clone(pod);
        pod.metadata.generation = Some(pod.metadata.generation.unwrap_or_default() + 1);
        let containers = &mut pod.spec.as_mut().expect("a spec").containers;
        request_cpu(containers.iter_mut().find(|container| container.name == "side").expect("the container"), milli);
        agent.update(self.api.put(&Arc::new(pod))).await;
    }

    async fn remove(&mut self, name: &'static str) {
        let (Some(agent), Some(generation)) = (&self.agent, self.desired.remove(name)) else { return };
        if from_api(name) {
            agent.update(self.api.put(&built(name, generation, true))).await;
            self.deleting.insert(name, generation);
        } else {
            agent.remove(built(name, generation, false)).await;
        }
    }

    async fn add(&mut self, name: &'static str) {
        let taken = self.desired.contains_key(name) || self.deleting.contains_key(name);
        let (Some(agent), false) = (&self.agent, taken) else { return };
        self.generation += 1;
        let pod = built(name, self.generation, false);
        agent.add(if from_api(name) { self.api.put(&pod) } else { pod }).await;
        self.desired.insert(name, self.generation);
    }

    /// Removes deleted objects from the agent's desired pods, as its watch would.
    async fn deliver_deletions(&mut self) {
        let deleted = |name: &&str| self.api.pod(name).is_none();
        let deleted: Vec<_> = self.deleting.keys().copied().filter(deleted).collect();
        for name in deleted {
            if let (Some(agent), Some(generation)) = (&self.agent, self.deleting.remove(name)) {
                agent.remove(built(name, generation, true)).await;
            }
        }
    }

    /// Containers of this desired pod that run in the final state.
    fn runs(&self, name: &str, generation: u32) -> &'static [&'static str] {
        match name {
            "a" | "h" => &["main", "side"],
            "d" | "p" => &["proxy", "main"],
            // Restarted on failure only: a scheduled exit with code 0 completes it.
            "e" if self.reports_success(name, generation) => &[],
            "j" => &[],
            _ => &["main"],
        }
    }

    /// Whether the runtime reports exit code 0. A code lost with the runtime's restart is reported as 255, a failure.
    fn reports_success(&self, name: &str, generation: u32) -> bool {
        let uid = uid(name, generation);
        let of_pod = |id: &str| self.sim.trace(|trace| trace.instance(id).is_some_and(|i| i.pod_uid == uid));
        let succeeded = |s: &ContainerStatus| s.state() == ContainerState::ContainerExited && s.exit_code == 0;
        self.sim.statuses(name).iter().any(|status| succeeded(status) && of_pod(&status.id))
    }

    /// A difference from the desired state.
    fn difference(&self) -> Option<String> {
        if !self.deleting.is_empty() {
            return Some(format!("{:?} are not deleted", self.deleting));
        }
        let expected: usize = self.desired.iter().map(|(name, generation)| self.runs(name, *generation).len()).sum();
        let live = self.sim.trace(Trace::live_count);
        if live != expected {
            return Some(format!("{live} containers run instead of {expected}"));
        }
        if let Some(left) = self.left_directory() {
            return Some(format!("the directory of {left} is left"));
        }
        NAMES.into_iter().find_map(|name| self.pod_difference(name).map(|what| format!("{name}: {what}")))
    }

    /// The directory of a pod that is not desired.
    fn left_directory(&self) -> Option<String> {
        let desired: Vec<_> = self.desired.iter().map(|(name, generation)| uid(name, *generation)).collect();
        let entries = std::fs::read_dir(self.root.join("pods")).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).find(|found| !desired.contains(found))
    }

    fn pod_difference(&self, name: &str) -> Option<String> {
        let generation = self.desired.get(name).copied();
        let uid = generation.map(|generation| uid(name, generation));
        let sandboxes = self.sim.sandboxes(name);
        let same_uid = |s: &PodSandboxStatus| s.metadata.as_ref().map(|metadata| &metadata.uid) == uid.as_ref();
        if !sandboxes.iter().all(same_uid) {
            return Some("an old sandbox is left".to_owned());
        }
        let (uid, runs) = (uid?, self.runs(name, generation?));
        let ready = sandboxes.iter().filter(|s| s.state() == PodSandboxState::SandboxReady).count();
        if ready != usize::from(!runs.is_empty()) {
            return Some(format!("{ready} ready sandboxes"));
        }
        let is_missing = |container: &&&str| {
            !self.sim.trace(|t| t.live(name, container).is_some_and(|i| i.pod_uid == uid && past_its_crashes(name, i)))
        };
        if let Some(missing) = runs.iter().find(is_missing) {
            return Some(format!("{missing} does not run"));
        }
        let phase = || self.api.pod(name).and_then(|pod| pod.status.as_ref()?.phase.clone()).unwrap_or_default();
        let expected: &[&str] = match name {
            "j" => &["Succeeded", "Failed"],
            _ if runs.is_empty() => &["Succeeded"],
            _ => &["Running"],
        };
        if from_api(name) && !expected.contains(&phase().as_str()) {
            return Some(format!("phase {:?}", phase()));
        }
        if name == "h" && !self.is_resized(name) {
            return Some("not resized".to_owned());
        }
        (name == "p" && !self.is_ready(name)).then(|| "not ready".to_owned())
    }

    /// The runtime has what container `side` requests, and the status says of no resize that it is to be done.
    fn is_resized(&self, name: &str) -> bool {
        let Some(pod) = self.api.pod(name) else { return false };
        let containers = pod.spec.as_ref().map(|spec| &spec.containers);
        let side = containers.into_iter().flatten().find(|container| container.name == "side");
        let cpu = side.and_then(|side| side.resources.as_ref()?.requests.as_ref()?.get("cpu"));
        let milli = cpu.and_then(|cpu| cpu.0.strip_suffix('m')?.parse::<i64>().ok());
        let runs = |status: &ContainerStatus| {
            status.state() == ContainerState::ContainerRunning
                && status.metadata.as_ref().is_some_and(|metadata| metadata.name == "side")
        };
        let applied = self.sim.statuses(name).into_iter().find(runs).and_then(|status| status.resources?.linux);
        let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
        let is_open = conditions.into_iter().flatten().any(|condition| condition.type_.starts_with("PodResize"));
        applied.map(|linux| linux.cpu_shares) == milli.map(|milli| milli * 1024 / 1000) && !is_open
    }

    fn is_ready(&self, name: &str) -> bool {
        let pod = self.api.pod(name);
        let conditions = pod.as_ref().and_then(|pod| pod.status.as_ref()?.conditions.as_ref());
        conditions.into_iter().flatten().any(|condition| condition.type_ == "Ready" && condition.status == "True")
    }

    /// Waits until the desired state is reached and lasts.
    async fn settle(&mut self, plan: &str) {
        let start = Instant::now();
        let mut since = None;
        while since.is_none_or(|since: Instant| since.elapsed() < STABLE) {
            self.deliver_deletions().await;
            match self.difference() {
                None => _ = since.get_or_insert_with(Instant::now),
                Some(what) => {
                    let (seed, sensors) = (self.seed, self.sensors);
                    assert!(
                        start.elapsed() < CONVERGENCE,
                        "seed {seed}, {sensors:?}: {what}\n{plan}\n{}",
                        self.sim.trace(Trace::to_string)
                    );
                    since = None;
                }
            }
            sleep(Duration::from_secs(1)).await;
        }
    }

    /// Invariants of all moments, checked once at the end.
    fn judge(&self, plan: &str) {
        let trace = self.sim.trace(Trace::clone);
        let context = || format!("seed {}, {:?}\n{plan}\n{trace}", self.seed, self.sensors);
        assert!(trace.duplicates().is_empty(), "{:#?}\n{}", trace.duplicates(), context());
        // Init containers and sidecars run again in a new sandbox.
        let restarted = |i: &&Instance| !["init", "proxy"].contains(&i.container.as_str());
        let fallen: Vec<_> = trace.fallen_attempts().into_iter().filter(restarted).collect();
        assert!(fallen.is_empty(), "{fallen:#?}\n{}", context());
        for instance in trace.instances().iter().filter(|i| i.exited.is_some()) {
            let reports: Vec<usize> = self.seen.iter().map(|seen| seen.exit_count(&instance.id)).collect();
            assert!(reports.iter().all(|n| *n <= 1), "{} exited {reports:?} times\n{}", instance.id, context());
            assert!(reports.contains(&1), "the exit of {} was not reported\n{}", instance.id, context());
        }
    }
}

fn past_its_crashes(name: &str, instance: &Instance) -> bool {
    let crashes = match (name, instance.container.as_str()) {
        ("a" | "c", "main") => 2,
        ("d", "proxy") | ("e" | "p", "main") => 1,
        _ => 0,
    };
    instance.attempt >= crashes
}

async fn schedule(seed: u64) {
    let folder = folder();
    let features = if seed.is_multiple_of(2) { Features::containerd_1_7() } else { Features::all() };
    let sim = SimRuntime::new(Options { seed, jitter: 0.3, features, ..Options::default() });
    sim.images(|images| {
        images.store("busybox", 1);
        images.publish(PULLED, 1);
    });
    let sensors = [
        SensorSet::ALL,
        SensorSet::EVENTS,
        SensorSet::ALL,
        SensorSet { probes: false, ..SensorSet::ALL },
        SensorSet::LISTS,
    ];
    let mut scenario = Scenario {
        seed,
        sim: sim.clone(),
        root: folder.path(),
        sensors: sensors[usize::try_from(seed % 5).expect("small")],
        rng: fastrand::Rng::with_seed(seed),
        api: Api::default(),
        desired: NAMES.iter().map(|name| (*name, 0)).collect(),
        deleting: BTreeMap::new(),
        generation: 0,
        seen: Vec::new(),
        agent: None,
    };
    for name in NAMES.into_iter().filter(|name| from_api(name)) {
        scenario.api.put(&built(name, 0, false));
    }
    scenario.start_agent();
    let targets: Vec<_> = NAMES.iter().map(|name| (name.to_string(), "main".to_owned())).collect();
    let faults = FaultSchedule::random(seed, SPAN, 14, &targets);
    let plan = format!("{faults:#?}");
    faults.run(&sim, async || scenario.agent_action().await).await;
    scenario.api.set_unavailable(false);
    ["h", "p"].iter().for_each(|name| sim.script_exec(name, "main", ExecResult::default()));
    scenario.settle(&plan).await;
    scenario.judge(&plan);
}

#[test]
fn random_schedules_first_half() {
    seeds::run(0..50, schedule);
}

#[test]
fn random_schedules_second_half() {
    seeds::run(50..100, schedule);
}
