//! Plans executed against a fake runtime, on paused time.

mod events;
mod fake;
mod hooks;
mod image_access;
mod image_volumes;
mod images;
mod prefetch;
mod starts;
mod terminations;
mod user_namespaces;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::Pod;
use keblet_proto::cri::v1 as cri;
use serde_json::Value;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;

use super::*;
use crate::images::AccessRecords;
use crate::images::Images;
use crate::images::PullLimits;
use crate::images::VerificationPolicy;
use crate::metrics::Metrics;
use crate::model::testing;
use crate::model::*;
use crate::pacing::Pacing;
use crate::pacing::PacingPolicy;
use crate::recorder::testing::RecordedEvents;
use crate::recorder::testing::listening;
use crate::volumes::Volumes;
use crate::workers::generate::NodeSettings;
use crate::workers::generate::ResourceSettings;
use fake::Fake;

/// A node in a temporary folder.
struct Node {
    dir: tempfile::TempDir,
    runtime: Fake,
    network: watch::Sender<Option<String>>,
    events: RecordedEvents,
    ctx: ActContext,
}

impl Node {
    fn new() -> Self {
        Self::with_cgroups(None)
    }

    fn with_cgroups(cgroups: Option<crate::cgroups::Cgroups>) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        std::fs::write(dir.path().join("resolv.conf"), "nameserver 192.0.2.53\n").expect("a file");
        std::fs::create_dir(dir.path().join("links")).expect("a folder");
        let runtime = Fake::default();
        let client = runtime.client();
        let (network, ready) = watch::channel(None);
        let (recorder, events) = listening();
        let limits = PullLimits { per_second: 0, ..PullLimits::default() };
        let access = AccessRecords::open(dir.path(), VerificationPolicy::default(), Metrics::new()).expect("opened");
        let ctx = ActContext::new(ActServices {
            runtime: client.clone(),
            images: Images::new(client, limits).with_access(access),
            volumes: Volumes::new(&dir.path().join("root")),
            cgroups,
            settings: settings(dir.path()),
            files: NodeFiles {
                resolv_conf: Some(dir.path().join("resolv.conf")),
                log_links: Some(dir.path().join("links")),
                ..NodeFiles::default()
            },
            network: ready,
            recorder,
            clock: Clock::derived(SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000)),
            pacing: Pacing::new(PacingPolicy::default(), 2),
        });
        Self { dir, runtime, network, events, ctx }
    }

    fn has_image(&self, name: &str, id: &str) {
        self.runtime.state().images.insert(name.into(), image(id));
    }

    fn path(&self, relative: &str) -> std::path::PathBuf {
        self.dir.path().join(relative)
    }
}

/// A pass over this pod as of this snapshot.
fn pass(pod: &Pod, snapshot: &PodSnapshot) -> PassContext {
    PassContext::new(pod_ref(pod), Arc::new(pod.clone()), Arc::new(snapshot.clone()), TerminationOptions::default())
}

async fn execute(ctx: &ActContext, pod: &Pod, actions: &PodActions, snapshot: &PodSnapshot) -> SyncOutcome {
    super::execute(ctx, &pass(pod, snapshot), actions).await
}

fn settings(dir: &Path) -> NodeSettings {
    let resources = ResourceSettings { memory_capacity: 1 << 30, single_process_oom_kill: true, ..Default::default() };
    NodeSettings { pod_logs_dir: dir.join("logs"), resources, ..NodeSettings::default() }
}

fn image(id: &str) -> cri::Image {
    cri::Image { id: id.into(), size: 7, ..Default::default() }
}

/// A pod as the API would default it; `spec` replaces fields.
fn pod(spec: Value) -> Pod {
    let mut full = json!({
        "enableServiceLinks": true, "restartPolicy": "Always", "terminationGracePeriodSeconds": 30, "dnsPolicy": "Default",
        "containers": [container("c")],
    });
    full.as_object_mut().expect("an object").extend(spec.as_object().expect("an object").clone());
    serde_json::from_value(json!({"metadata": {"name": "pod", "namespace": "ns", "uid": "uid"}, "spec": full}))
        .expect("a pod")
}

fn container(name: &str) -> Value {
    json!({"name": name, "image": "app:1", "imagePullPolicy": "IfNotPresent",
        "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File"})
}

fn actions(sandbox: SandboxPlan, start: Vec<StartContainer>) -> PodActions {
    PodActions {
        kill_pod: false,
        sandbox,
        kill: Vec::new(),
        remove: Vec::new(),
        prune: Vec::new(),
        resize: None,
        start,
        await_confirmation: false,
    }
}

/// Container `c` is killed for a restart of all containers.
fn kill_for_restart_all() -> KillContainer {
    KillContainer {
        id: "c-0".into(),
        name: "c".into(),
        reason: KillReason::RestartAll,
        message: "killing".into(),
        grace_override: Some(0),
    }
}

fn keep() -> SandboxPlan {
    SandboxPlan::Keep("sandbox-0".into())
}

fn create() -> SandboxPlan {
    SandboxPlan::Create { attempt: 0, replaces: None }
}

fn start(class: ContainerClass, index: usize, name: &str, restarts: Option<u32>) -> StartContainer {
    StartContainer {
        class,
        index,
        name: name.into(),
        restart_count: restarts,
        last_finished_at: None,
        replaces: vec![],
        blocked: None,
    }
}

fn regular(index: usize, name: &str) -> StartContainer {
    start(ContainerClass::Regular, index, name, None)
}

fn empty() -> PodSnapshot {
    let pod = PodRef { uid: "uid".into(), namespace: "ns".into(), name: "pod".into() };
    PodSnapshot::empty(pod, Instant::now())
}

fn status(name: &str, attempt: u32, state: ContainerState) -> ContainerStatus {
    ContainerStatus {
        created_at: testing::at(i64::from(attempt)),
        started_at: testing::at(i64::from(attempt)),
        finished_at: 0,
        exit_code: None,
        reason: String::new(),
        image: "app:1".into(),
        image_ref: "sha256:1".into(),
        hash: 0,
        ..testing::status(name, attempt, state)
    }
}

fn running(names: &[&str]) -> PodSnapshot {
    testing::snapshot(names.iter().map(|name| status(name, 0, ContainerState::Running)).collect())
}

fn tokens(outcome: &SyncOutcome) -> Vec<(&str, &str)> {
    let token = |start: &'_ StartOutcome| -> &'static str {
        match &start.result {
            Ok(_) => "started",
            Err(failure) => Box::leak(failure.token.clone().into_boxed_str()),
        }
    };
    outcome.starts.iter().map(|start| (start.name.as_str(), token(start))).collect()
}

/// The texts of errors.
fn texts(errors: &[PodError]) -> Vec<String> {
    errors.iter().map(ToString::to_string).collect()
}
