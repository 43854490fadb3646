//! Plans executed on a real containerd: the environment of the pod's process, the calls of a restart, and that nothing
//! of the pod remains.

mod claims;

use std::fs;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;
use std::time::Instant;

use k8s_openapi::api::core::v1::Pod;
use keblet::cgroups::CgroupName;
use keblet::cgroups::Cgroups;
use keblet::cgroups::Driver;
use keblet::cgroups::Hierarchies;
use keblet::cgroups::Layout;
use keblet::images::Images;
use keblet::images::PullLimits;
use keblet::model::Clock;
use keblet::model::ContainerClass;
use keblet::model::ContainerResources;
use keblet::model::ContainerState;
use keblet::model::ContainerStatus;
use keblet::model::PodActions;
use keblet::model::PodRef;
use keblet::model::PodSnapshot;
use keblet::model::SandboxPlan;
use keblet::model::SandboxStatus;
use keblet::model::StartContainer;
use keblet::model::TerminationFile;
use keblet::model::pod_ref;
use keblet::pacing::Pacing;
use keblet::pacing::PacingPolicy;
use keblet::recorder::Recorder;
use keblet::runtime::CallObserver;
use keblet::runtime::FinishedCall;
use keblet::runtime::Operation;
use keblet::runtime::Runtime;
use keblet::runtime::RuntimeEndpoint;
use keblet::runtime::RuntimeOptions;
use keblet::volumes::Volumes;
use keblet::workers::act::ActContext;
use keblet::workers::act::ActServices;
use keblet::workers::act::NodeFiles;
use keblet::workers::act::PassContext;
use keblet::workers::act::TerminationOptions;
use keblet::workers::act::cleanup_orphan;
use keblet::workers::act::cleanup_pod;
use keblet::workers::act::execute;
use keblet::workers::act::terminate_pod;
use keblet::workers::generate::NodeSettings;
use keblet::workers::generate::ResourceSettings;
use keblet_peers::BUSYBOX_IMAGE;
use keblet_peers::Cache;
use keblet_peers::Options;
use keblet_peers::PrivateContainerd;
use keblet_proto::cri::v1 as cri;
use serde_json::json;
use tokio::sync::watch;

const TIMEOUT: Duration = Duration::from_secs(20);
const UID: &str = "0a1b2c3d-act";

fn layout() -> Layout {
    Hierarchies::detect().unwrap().layout
}

/// Calls to the runtime, in order.
#[derive(Debug, Default)]
struct Calls(Mutex<Vec<Operation>>);

impl Calls {
    fn take(&self) -> Vec<Operation> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl CallObserver for Calls {
    fn finished(&self, call: FinishedCall) {
        self.0.lock().unwrap().push(call.operation);
    }
}

struct Node {
    calls: Arc<Calls>,
    containerd: PrivateContainerd,
    dir: PathBuf,
    cgroup_root: String,
    ctx: ActContext,
}

impl Node {
    async fn start() -> Self {
        let containerd = PrivateContainerd::start(&Cache::locate(), &Options::default()).unwrap();
        let dir = containerd.ready().dir.clone();
        let cgroup_root = format!("{}/act", containerd.ready().cgroup_root);
        make_cgroup(&cgroup_root);
        let endpoint: RuntimeEndpoint = containerd.endpoint().parse().unwrap();
        let calls = Arc::new(Calls::default());
        let options = RuntimeOptions { observer: calls.clone(), ..RuntimeOptions::default() };
        let runtime = Runtime::new(&endpoint, None, options);
        let root = CgroupName::parse(&cgroup_root).unwrap();
        let cgroups = Cgroups::new(layout(), Driver::Cgroupfs, root).unwrap();
        cgroups.ensure_tree().await.unwrap();
        let resources = ResourceSettings {
            cfs_period: Some(100_000),
            memory_capacity: 1 << 32,
            single_process_oom_kill: true,
            ..Default::default()
        };
        let settings = NodeSettings { pod_logs_dir: dir.join("act/logs"), resources, ..Default::default() };
        fs::create_dir_all(dir.join("act/links")).unwrap();
        let files = NodeFiles { log_links: Some(dir.join("act/links")), ..NodeFiles::default() };
        let (_, network) = watch::channel(None);
        let ctx = ActContext::new(ActServices {
            runtime: runtime.clone(),
            images: Images::new(runtime, PullLimits::default()),
            volumes: Volumes::new(&dir.join("act/root")),
            cgroups: Some(cgroups),
            settings,
            files,
            network,
            recorder: Recorder::default(),
            clock: Clock::System,
            pacing: Pacing::for_this_machine(PacingPolicy::default()),
        });
        Self { calls, containerd, dir, cgroup_root, ctx }
    }

    async fn stop(self) {
        self.ctx.cgroups.unwrap().destroy_tree().await.unwrap();
        remove_cgroup(&self.cgroup_root);
        self.containerd.stop().unwrap();
    }

    fn log(&self, attempt: u32) -> PathBuf {
        self.dir.join(format!("act/logs/default_probe_{UID}/main/{attempt}.log"))
    }

    /// Waits until the log has a line with `text` and returns the log.
    async fn log_with(&self, attempt: u32, text: &str) -> String {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let log = fs::read_to_string(self.log(attempt)).unwrap_or_default();
            if log.contains(text) {
                return log;
            }
            assert!(Instant::now() < deadline, "no {text:?} in {log}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn snapshot(&self) -> PodSnapshot {
        let sampled_at = tokio::time::Instant::now();
        let pod = PodRef { uid: UID.into(), namespace: "default".into(), name: "probe".into() };
        let selector = [("io.kubernetes.pod.uid".to_owned(), UID.to_owned())];
        let filter = cri::PodSandboxFilter { label_selector: selector.clone().into(), ..Default::default() };
        let sandboxes = self.ctx.runtime.list_pod_sandboxes(filter).await.unwrap();
        let filter = cri::ContainerFilter { label_selector: selector.into(), ..Default::default() };
        let mut containers = Vec::new();
        for container in self.ctx.runtime.list_containers(filter).await.unwrap() {
            containers.push(self.ctx.runtime.container_status(&container.id, false).await.unwrap().status);
        }
        containers.sort_by_key(|status| std::cmp::Reverse(status.created_at));
        let sandbox_id = sandboxes.first().map(|sandbox| sandbox.id.clone()).unwrap_or_default();
        PodSnapshot {
            sandboxes: sandboxes.into_iter().map(sandbox).collect(),
            containers: containers.into_iter().map(|status| container(status, &sandbox_id)).collect(),
            ips: vec!["192.0.2.1".to_owned()],
            ..PodSnapshot::empty(pod, sampled_at)
        }
    }

    /// Terminates the pod, and removes all that is left of it.
    async fn remove(&self, pod: &Pod, snapshot: PodSnapshot) {
        let latest = Arc::new(snapshot);
        let options = TerminationOptions { grace: Some(1), immediately: false };
        terminate_pod(&self.ctx, pod, || latest.clone(), options).await.unwrap();
        let ended = self.snapshot().await;
        assert_eq!(ended.running().count(), 0);
        cleanup_pod(&self.ctx, &pass(pod, ended)).await.unwrap();
        cleanup_orphan(&self.ctx, UID).await.unwrap();
    }
}

fn make_cgroup(path: &str) {
    for mount in layout().mounts() {
        let mut dir = mount.to_owned();
        for component in path.split('/').filter(|component| !component.is_empty()) {
            let parent = dir.clone();
            dir.push(component);
            if fs::create_dir(&dir).is_ok() {
                for file in ["cpuset.cpus", "cpuset.mems"] {
                    let inherited = fs::read_to_string(parent.join(file)).unwrap_or_default();
                    let _ = fs::write(dir.join(file), inherited);
                }
            }
        }
    }
}

fn remove_cgroup(path: &str) {
    for mount in layout().mounts() {
        fs::remove_dir(mount.join(path.trim_start_matches('/'))).unwrap();
    }
}

fn sandbox(sandbox: cri::PodSandbox) -> SandboxStatus {
    SandboxStatus {
        ready: sandbox.state() == cri::PodSandboxState::SandboxReady,
        attempt: sandbox.metadata.unwrap_or_default().attempt,
        id: sandbox.id.into(),
        created_at: sandbox.created_at,
        ips: Vec::new(),
        reports_network: true,
        host_network: false,
        shares_pid_namespace: false,
        runtime_handler: String::new(),
        is_static: false,
    }
}

fn container(status: cri::ContainerStatus, sandbox_id: &str) -> ContainerStatus {
    let state = match status.state() {
        cri::ContainerState::ContainerCreated => ContainerState::Created,
        cri::ContainerState::ContainerRunning => ContainerState::Running,
        cri::ContainerState::ContainerExited => ContainerState::Exited,
        cri::ContainerState::ContainerUnknown => ContainerState::Unknown,
    };
    let metadata = status.metadata.unwrap_or_default();
    ContainerStatus {
        id: status.id.into(),
        sandbox_id: sandbox_id.into(),
        name: metadata.name,
        attempt: metadata.attempt,
        state,
        created_at: status.created_at,
        started_at: status.started_at,
        finished_at: 0,
        exit_code: None,
        reason: status.reason,
        message: status.message,
        image: String::new(),
        image_ref: status.image_ref,
        hash: 0,
        restart_count: metadata.attempt,
        user: None,
        stop_signal: None,
        resources: ContainerResources::default(),
        log_path: status.log_path,
        termination: TerminationFile::default(),
        pid: None,
        proven: None,
        exit_observed: false,
    }
}

/// A pod whose process prints its environment.
fn pod(host_dir: &Path, script: &str) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "probe", "namespace": "default", "uid": UID},
        "spec": {
            "enableServiceLinks": true, "restartPolicy": "Always", "terminationGracePeriodSeconds": 2,
            "dnsPolicy": "Default", "hostname": "from-pod",
            "volumes": [{"name": "empty", "emptyDir": {}}, {"name": "host", "hostPath": {"path": host_dir}}],
            "containers": [{
                "name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never",
                "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File",
                "command": ["/bin/sh", "-c", script], "args": ["$(GREETING)"],
                "env": [{"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                    {"name": "GREETING", "value": "hello $(NAME)"}],
                "resources": {"requests": {"cpu": "100m"}, "limits": {"memory": "64Mi", "cpu": "500m"}},
                "securityContext": {"runAsUser": 1234},
                "volumeMounts": [{"name": "empty", "mountPath": "/empty"},
                    {"name": "host", "mountPath": "/part", "subPath": "inner", "readOnly": true}],
            }],
        },
    }))
    .unwrap()
}

fn plan(sandbox: SandboxPlan, restart_count: Option<u32>) -> PodActions {
    let start = StartContainer {
        class: ContainerClass::Regular,
        index: 0,
        name: "main".to_owned(),
        restart_count,
        last_finished_at: None,
        replaces: Vec::new(),
        blocked: None,
    };
    PodActions {
        kill_pod: false,
        sandbox,
        kill: Vec::new(),
        remove: Vec::new(),
        prune: Vec::new(),
        resize: None,
        start: vec![start],
        await_confirmation: false,
    }
}

fn pass(pod: &Pod, snapshot: PodSnapshot) -> PassContext {
    PassContext::new(pod_ref(pod), Arc::new(pod.clone()), Arc::new(snapshot), TerminationOptions::default())
}

const CREATE: SandboxPlan = SandboxPlan::Create { attempt: 0, replaces: None };

#[tokio::test]
#[ignore = "real runtime"]
async fn pod_starts_and_terminates_on_containerd() {
    let node = Node::start().await;
    let host = node.dir.join("act/host");
    fs::create_dir_all(host.join("inner")).unwrap();
    fs::write(host.join("inner/file"), "from the host\n").unwrap();
    let script = "echo $0; id -u; hostname; cat /part/file; touch /part/x || echo readonly; echo kept >/empty/data; \
        grep managed /etc/hosts; echo final message >/dev/termination-log; cat /proc/self/cgroup; sleep 600";
    let pod = pod(&host, script);
    let outcome = execute(&node.ctx, &pass(&pod, node.snapshot().await), &plan(CREATE, None)).await;
    assert!(outcome.is_ok(), "{outcome:?}");
    let cgroup = format!("{}/kubepods/burstable/pod{UID}", node.cgroup_root);
    let log = node.log_with(0, &cgroup).await;
    for expected in [
        "hello probe",
        " F 1234\n",
        " F from-pod
",
        "from the host",
        "readonly",
        "Kubernetes-managed hosts file",
    ] {
        assert!(log.contains(expected), "no {expected:?} in {log}");
    }
    let memory = layout().mount_of("memory").unwrap().join(cgroup.trim_start_matches('/'));
    let limit = fs::read_to_string(memory.join("memory.limit_in_bytes")).unwrap();
    assert_eq!(limit.trim(), (64 << 20).to_string());
    let messages = node.dir.join(format!("act/root/pods/{UID}/containers/main"));
    let message = fs::read_dir(messages).unwrap().next().unwrap().unwrap();
    assert_eq!(fs::read_to_string(message.path()).unwrap(), "final message\n");
    assert_eq!(fs::read_dir(node.dir.join("act/links")).unwrap().count(), 1);

    let snapshot = node.snapshot().await;
    assert_eq!(snapshot.running().count(), 1);
    node.remove(&pod, snapshot).await;
    assert!(!node.dir.join(format!("act/root/pods/{UID}")).exists());
    assert!(!memory.exists());
    assert!(host.join("inner/file").exists());
    node.stop().await;
}

#[tokio::test]
#[ignore = "real runtime"]
async fn container_restart_takes_two_runtime_calls() {
    let node = Node::start().await;
    let host = node.dir.join("act/host");
    fs::create_dir_all(host.join("inner")).unwrap();
    let pod = pod(&host, "true");
    let outcome = execute(&node.ctx, &pass(&pod, node.snapshot().await), &plan(CREATE, None)).await;
    assert!(outcome.is_ok(), "{outcome:?}");
    for round in 1..=3 {
        let snapshot = settled(&node).await;
        let keep = SandboxPlan::Keep(snapshot.sandboxes[0].id.clone());
        node.calls.take();
        let outcome = execute(&node.ctx, &pass(&pod, snapshot), &plan(keep, Some(round))).await;
        assert!(outcome.is_ok(), "{outcome:?}");
        let calls = node.calls.take();
        assert_eq!(calls, [Operation::CreateContainer, Operation::StartContainer]);
    }
    let snapshot = settled(&node).await;
    node.remove(&pod, snapshot).await;
    node.stop().await;
}

/// Waits until all containers have exited.
async fn settled(node: &Node) -> PodSnapshot {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let snapshot = node.snapshot().await;
        if snapshot.containers.iter().all(|container| container.state == ContainerState::Exited) {
            return snapshot;
        }
        assert!(Instant::now() < deadline, "still running: {snapshot:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
