//! Short ways to make pods and snapshots, and to read what is logged, in tests.

use std::io;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::ContainerRestartRule;
use k8s_openapi::api::core::v1::ContainerRestartRuleOnExitCodes;
use k8s_openapi::api::core::v1::EphemeralContainer;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use tokio::time::Instant;
use tracing::Event;
use tracing::Level;
use tracing::Subscriber;
use tracing::subscriber::DefaultGuard;
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::layer::SubscriberExt as _;

use super::*;

/// The test's origin in the runtime's nanoseconds since the Unix epoch.
pub const T0: i64 = 1_000_000_000_000_000_000;

/// Nanoseconds `seconds` after [`T0`].
pub fn at(seconds: i64) -> i64 {
    T0 + seconds * 1_000_000_000
}

/// The API's time `after` the test's origin.
pub fn time(after: Duration) -> Time {
    let nanos = i128::from(T0) + i128::try_from(after.as_nanos()).unwrap_or(0);
    Time(Timestamp::from_nanosecond(nanos).unwrap_or(Timestamp::UNIX_EPOCH))
}

/// A container of this name with image `image`.
pub fn container(name: &str) -> Container {
    Container { name: name.into(), image: Some("image".into()), ..Container::default() }
}

/// An init container that is a sidecar.
pub fn sidecar(name: &str) -> Container {
    Container { restart_policy: Some("Always".into()), ..container(name) }
}

/// A pod with this restart policy. Init containers whose name starts with `side` are sidecars.
pub fn pod(restart_policy: &str, init: &[&str], regular: &[&str]) -> Pod {
    let init = init.iter().map(|name| if name.starts_with("side") { sidecar(name) } else { container(name) });
    Pod {
        metadata: ObjectMeta {
            name: Some("pod".into()),
            namespace: Some("ns".into()),
            uid: Some("uid".into()),
            ..ObjectMeta::default()
        },
        spec: Some(PodSpec {
            restart_policy: Some(restart_policy.into()),
            init_containers: Some(init.collect()),
            containers: regular.iter().map(|name| container(name)).collect(),
            ..PodSpec::default()
        }),
        ..Pod::default()
    }
}

/// A ready sandbox `sandbox-ATTEMPT` with an IP.
pub fn sandbox(attempt: u32) -> SandboxStatus {
    SandboxStatus {
        id: format!("sandbox-{attempt}").into(),
        attempt,
        ready: true,
        created_at: at(i64::from(attempt)),
        ips: vec!["10.0.0.1".into()],
        reports_network: true,
        host_network: false,
        shares_pid_namespace: false,
        runtime_handler: String::new(),
        is_static: false,
    }
}

/// A snapshot with `sandbox-0` and these containers, newest first.
pub fn snapshot(containers: Vec<ContainerStatus>) -> PodSnapshot {
    let pod = PodRef { uid: "uid".into(), namespace: "ns".into(), name: "pod".into() };
    PodSnapshot {
        sandboxes: vec![sandbox(0)],
        ips: vec!["10.0.0.1".into()],
        containers,
        ..PodSnapshot::empty(pod, Instant::now())
    }
}

/// Instance `NAME-ATTEMPT` in `sandbox-0`, with the hash of [`container`]. Exited ones have code 0 and ended 10 s
/// after they started.
pub fn status(name: &str, attempt: u32, state: ContainerState) -> ContainerStatus {
    let started = state != ContainerState::Created;
    let exited = state == ContainerState::Exited;
    let begin = at(i64::from(attempt) * 100);
    ContainerStatus {
        id: format!("{name}-{attempt}").into(),
        sandbox_id: "sandbox-0".into(),
        name: name.into(),
        attempt,
        state,
        created_at: begin,
        started_at: if started { begin } else { 0 },
        finished_at: if exited { begin + 10_000_000_000 } else { 0 },
        exit_code: exited.then_some(0),
        reason: if exited { "Completed".into() } else { String::new() },
        message: String::new(),
        image: "image".into(),
        image_ref: "image@sha256:1".into(),
        hash: hash::container_hash(name, "image"),
        restart_count: attempt,
        user: None,
        stop_signal: None,
        resources: ContainerResources::default(),
        log_path: String::new(),
        termination: TerminationFile::default(),
        pid: None,
        proven: None,
        exit_observed: false,
    }
}

/// A running instance.
pub fn running(name: &str, attempt: u32) -> ContainerStatus {
    status(name, attempt, ContainerState::Running)
}

/// An instance that exited with this code.
pub fn exited(name: &str, attempt: u32, code: i32) -> ContainerStatus {
    let reason = if code == 0 { "Completed" } else { "Error" };
    ContainerStatus { exit_code: Some(code), reason: reason.into(), ..status(name, attempt, ContainerState::Exited) }
}

/// An instance whose start containerd cancelled, because the agent was killed meanwhile.
pub fn cancelled(name: &str, attempt: u32) -> ContainerStatus {
    ContainerStatus {
        started_at: 0,
        reason: "StartError".into(),
        message: format!("failed to start containerd task \"{name}\": context canceled: unknown"),
        ..exited(name, attempt, 128)
    }
}

/// An instance whose exit the kernel has proven and the runtime has not confirmed, with or without its code.
pub fn proven(name: &str, attempt: u32, code: Option<i32>) -> ContainerStatus {
    ContainerStatus {
        exit_code: code,
        reason: String::new(),
        proven: Some(ProvenExit { seen_at: Instant::now(), kernel_age: None, exit_code: code, oom_killed: false }),
        ..status(name, attempt, ContainerState::Exited)
    }
}

/// The pod with an ephemeral container.
pub fn with_ephemeral(mut pod: Pod, name: &str) -> Pod {
    let debug = EphemeralContainer { name: name.into(), ..EphemeralContainer::default() };
    pod.spec.get_or_insert_default().ephemeral_containers.get_or_insert_default().push(debug);
    pod
}

/// The pod as a static one.
pub fn into_static(mut pod: Pod) -> Pod {
    let annotations = pod.metadata.annotations.get_or_insert_default();
    annotations.insert("kubernetes.io/config.source".into(), "file".into());
    pod
}

/// Gives a container a policy and one rule of its own: this action on exit code 42.
pub fn set_rule(container: &mut Container, policy: &str, action: &str) {
    let codes = ContainerRestartRuleOnExitCodes { operator: "In".into(), values: Some(vec![42]) };
    container.restart_policy = Some(policy.into());
    container.restart_policy_rules =
        Some(vec![ContainerRestartRule { action: action.into(), exit_codes: Some(codes) }]);
}

/// Collects what is logged.
#[derive(Clone, Debug, Default)]
pub struct Buffer(pub Arc<Mutex<Vec<u8>>>);

impl io::Write for Buffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Counts log lines of the test's thread until it is dropped.
pub struct LogCount {
    lines: Arc<AtomicUsize>,
    _logging: DefaultGuard,
}

impl LogCount {
    /// Counts the lines of this target, of this level and of more severe ones.
    pub fn start(target: &'static str, level: Level) -> Self {
        let lines = Arc::new(AtomicUsize::new(0));
        let counter = LineCounter { target, level, lines: lines.clone() };
        let logging = tracing::subscriber::set_default(tracing_subscriber::registry().with(counter));
        Self { lines, _logging: logging }
    }

    /// The lines so far.
    pub fn lines(&self) -> usize {
        self.lines.load(SeqCst)
    }
}

struct LineCounter {
    target: &'static str,
    level: Level,
    lines: Arc<AtomicUsize>,
}

impl<S: Subscriber> Layer<S> for LineCounter {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        if metadata.target() == self.target && *metadata.level() <= self.level {
            self.lines.fetch_add(1, SeqCst);
        }
    }
}
