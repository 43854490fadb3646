//! Collects records of a node: reads only, beside any kubelet.
//!
//! ```text
//!  probes ─▶ events::kernel ─hints─▶ pleg ─┬▶ pods (what changed) ───────────┐
//!                                          └▶ verdicts ─▶ oom ──────────────┼─▶ Line ─▶ view · JSON · metrics
//!  cgroup files ─▶ sample ─▶ kills (counters without the probe) · stalls ───┘
//! ```
//!
//! The agent's own PLEG inspects the runtime; no pod worker exists, so nothing is changed. The runtime's event stream is
//! read only if that takes no event from the kubelet (`subscription`).

mod costs;
mod kills;
mod oom;
mod paths;
mod pods;
mod relists;
mod repeat;
mod sample;
mod stalls;
mod subscription;
mod task;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::record::Line;
use crate::cgroups::CgroupError;
use crate::cgroups::Hierarchies;
use crate::events;
use crate::events::HINT_CAPACITY;
use crate::events::Hint;
use crate::events::cri;
use crate::events::kernel::KernelOptions;
use crate::events::oom_fallback;
use crate::events::oom_fallback::FallbackOptions;
use crate::events::pidfd::PidfdWatch;
use crate::events::process::NoProcessWatch;
use crate::events::process::ProcessWatch;
use crate::events::sensors::RelistPeriods;
use crate::events::sensors::Sensor;
use crate::events::sensors::SensorState;
use crate::events::sensors::SensorStates;
use crate::kernel::bpf::Probes;
use crate::kernel::btf;
use crate::kernel::kmsg::KMSG;
use crate::kernel::kmsg::KernelLog;
use crate::kernel::open_files;
use crate::metrics::Metrics;
use crate::model::Clock;
use crate::oom::OomReporter;
use crate::pleg;
use crate::pleg::PlegConfig;
use crate::recorder::Recorder;
use crate::runtime::Runtime;
use crate::runtime::RuntimeEndpoint;
use crate::runtime::RuntimeOptions;

/// Time between lists of all pods, by what else announces changes.
const WITH_EVENTS: Duration = Duration::from_secs(60);
const WITH_PROBES: Duration = Duration::from_secs(10);
const ALONE: Duration = Duration::from_secs(2);
/// Single pods that are inspected at once, and how long each may take. Fewer than the agent's: no pod waits for the result.
const INSPECTIONS: usize = 4;
const INSPECTION_LIMIT: Duration = Duration::from_secs(30);
/// Messages that are queued. When the queue is full, collecting waits.
const QUEUE: usize = 1024;

/// What to observe, and how often.
#[derive(Clone, Debug)]
pub struct CollectOptions {
    /// The container runtime.
    pub endpoint: RuntimeEndpoint,
    /// The cgroup below which pods are looked for.
    pub cgroup_root: String,
    /// Time between measurements of pressure.
    pub interval: Duration,
    /// The node's name.
    pub node: String,
    /// Version of keblet.
    pub version: &'static str,
}

/// A message of the collector.
#[derive(Debug)]
pub enum Message {
    /// A record.
    Line(Box<Line>),
    /// All records of a measurement that was asked for were sent before this.
    Measured(oneshot::Sender<()>),
}

/// Asks the collector for a measurement. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Measure(mpsc::Sender<oneshot::Sender<()>>);

impl Measure {
    /// Measures, unless the last measurement is younger than a second; returns when the records have been received from the
    /// collector. At most `limit` is waited.
    pub async fn now(&self, limit: Duration) {
        let (done, measured) = oneshot::channel();
        let asked = async {
            if self.0.send(done).await.is_ok() {
                // Fails if the collector has stopped.
                let _ = measured.await;
            }
        };
        // After the limit the last measurement is used.
        let _ = tokio::time::timeout(limit, asked).await;
    }
}

/// Starts collecting; it ends when `shutdown` is cancelled or the receiver is dropped.
///
/// # Errors
/// The node has no cgroups, or they cannot be read.
pub async fn start(
    options: CollectOptions,
    shutdown: CancellationToken,
) -> Result<(mpsc::Receiver<Message>, Measure), CgroupError> {
    // Each container takes a pidfd: as many files as the hard limit allows. A failure shows in the state of the sensor.
    let _ = open_files::limit(u64::MAX);
    let hierarchies = in_own_namespace(Hierarchies::detect()?);
    let sensor_states = SensorStates::default();
    let (hints, hinted) = mpsc::channel(HINT_CAPACITY);
    let metrics = Metrics::new();
    let ooms = OomReporter::new(metrics.clone(), Recorder::default(), Arc::new(|_| None));
    let sensing = Sensing {
        hierarchies: &hierarchies,
        root: &options.cgroup_root,
        sensor_states: &sensor_states,
        metrics: &metrics,
    };
    let (early, hinted_early) = mpsc::channel(HINT_CAPACITY);
    tokio::spawn(shutdown.clone().run_until_cancelled_owned(repeat::forward(hinted_early, hints.clone())));
    let (probes, log_is_followed) = sensing.start(&early, &shutdown).await;
    pressure_state(&sensor_states, &hierarchies);
    let watch: Arc<dyn ProcessWatch> = match hierarchies.containers.clone() {
        Some(hierarchy) => Arc::new(PidfdWatch::new(hierarchy, sensor_states.clone())),
        None => Arc::new(NoProcessWatch),
    };
    let runtime = Runtime::new(&options.endpoint, None, RuntimeOptions::default());
    let config = PlegConfig {
        periods: periods(&sensor_states),
        parallel_inspections: INSPECTIONS,
        inspection_timeout: INSPECTION_LIMIT,
        watch,
        observer: Arc::new(relists::UnmapAfterRelist),
        clock: Clock::System,
        sensor_states: sensor_states.clone(),
        ooms: ooms.clone(),
    };
    let verdicts = ooms.subscribe();
    let (pleg, _) = pleg::start(runtime.clone(), hinted, config, shutdown.clone());
    let (sender, receiver) = mpsc::channel(QUEUE);
    let (measure, measures) = mpsc::channel(1);
    let (runtime, states) = (runtime.clone(), sensor_states.clone());
    let subscriber = Subscriber { runtime, hints, sensor_states: states, metrics, shutdown: shutdown.clone() };
    let sampler = sample::Sampler::new(hierarchies.clone(), options.cgroup_root.clone(), probes);
    let v2 = hierarchies.layout.is_v2();
    let parts = task::Parts { options, v2, log_is_followed, pleg, sensor_states, sampler, out: sender };
    let inputs = task::Inputs { verdicts, measures, versions: subscriber.start() };
    tokio::spawn(shutdown.run_until_cancelled_owned(task::Task::new(parts).run(inputs)));
    Ok((receiver, Measure(measure)))
}

/// Starts the kernel's sensors.
struct Sensing<'a> {
    hierarchies: &'a Hierarchies,
    root: &'a str,
    sensor_states: &'a SensorStates,
    metrics: &'a Arc<Metrics>,
}

impl Sensing<'_> {
    /// Loads the probes. If they do not report OOM kills, the kernel log does, where it may be read; else the counters of
    /// pods are compared (`kills`). Returns the probes, and whether the log is followed.
    async fn start(&self, hints: &mpsc::Sender<Hint>, shutdown: &CancellationToken) -> (Option<Probes>, bool) {
        let Some(hierarchy) = self.hierarchies.containers.clone() else {
            for sensor in [Sensor::Exits, Sensor::Oom, Sensor::Cgroups, Sensor::Reclaim, Sensor::Pidfd] {
                self.sensor_states
                    .set(sensor, SensorState::Down("no cgroup hierarchy identifies containers".to_owned()));
            }
            return (None, false);
        };
        let options = KernelOptions {
            cgroup_root: self.root.to_owned(),
            btf: btf::VMLINUX.into(),
            log: KMSG.into(),
            exits_ring: None,
            announce_containers: true,
            metrics: self.metrics.clone(),
        };
        let (hints, sensor_states, shutdown) = (hints.clone(), self.sensor_states.clone(), shutdown.clone());
        let loaded =
            events::kernel::start(options, hierarchy.clone(), hints.clone(), sensor_states, shutdown.clone()).await;
        let probes = loaded.map(|(probes, forwarding)| {
            tokio::spawn(forwarding);
            probes
        });
        if self.sensor_states.get(Sensor::Oom) == Some(SensorState::Up) {
            return (probes, false);
        }
        match KernelLog::open(Path::new(KMSG)) {
            // After a shortage its follower opens it later.
            Err(error) if !open_files::is_shortage(&error) => {
                self.sensor_states.set(Sensor::KernelLog, SensorState::Down(format!("{KMSG}: {error}")));
                (probes, false)
            }
            _ => {
                let options = FallbackOptions { cgroup_root: self.root.to_owned(), log: KMSG.into() };
                tokio::spawn(oom_fallback::start(options, hierarchy, hints, self.sensor_states, shutdown));
                (probes, true)
            }
        }
    }
}

/// Relists are rare as long as something announces new containers.
fn periods(sensor_states: &SensorStates) -> RelistPeriods {
    let announced = matches!(sensor_states.get(Sensor::Cgroups), Some(SensorState::Up));
    RelistPeriods { event_driven: WITH_EVENTS, polling: if announced { WITH_PROBES } else { ALONE }, fixed: None }
}

fn pressure_state(sensor_states: &SensorStates, hierarchies: &Hierarchies) {
    let state = match std::fs::read("/proc/pressure/memory") {
        Err(error) => SensorState::Down(format!("/proc/pressure/memory: {error}")),
        Ok(_) if !hierarchies.layout.is_v2() => {
            SensorState::Degraded("cgroup v1 measures the pressure of the node only".to_owned())
        }
        Ok(_) => SensorState::Up,
    };
    sensor_states.set(Sensor::Pressure, state);
}

/// In a container with a cgroup namespace of its own, the mount of the whole hierarchy is shown as lying above the
/// container's cgroup (`/../..`). It is the root all the same.
fn in_own_namespace(mut hierarchies: Hierarchies) -> Hierarchies {
    if let Some(hierarchy) = &mut hierarchies.containers
        && hierarchy.root.split('/').skip(1).all(|part| part == "..")
    {
        hierarchy.root = "/".to_owned();
    }
    hierarchies
}

/// Waits for the runtime, and reads its events if that takes none from the kubelet.
struct Subscriber {
    runtime: Runtime,
    hints: mpsc::Sender<Hint>,
    sensor_states: SensorStates,
    metrics: Arc<Metrics>,
    shutdown: CancellationToken,
}

impl Subscriber {
    /// Returns the runtime's name and version when it has answered.
    fn start(self) -> oneshot::Receiver<(String, String)> {
        let (sender, receiver) = oneshot::channel();
        self.sensor_states.set(Sensor::RuntimeEvents, SensorState::Down("the runtime has not answered yet".to_owned()));
        let shutdown = self.shutdown.clone();
        tokio::spawn(shutdown.run_until_cancelled_owned(async move {
            let version = self.runtime.until_ready().await;
            let refused = subscription::refused(&version.runtime_name, &version.runtime_version);
            // Fails if the collector has stopped.
            let _ = sender.send((version.runtime_name, version.runtime_version));
            match refused {
                Some(reason) => self.sensor_states.set(Sensor::RuntimeEvents, SensorState::Down(reason)),
                None => {
                    let Self { runtime, hints, sensor_states, metrics, shutdown } = self;
                    cri::follow(runtime, hints, sensor_states, Clock::System, metrics, shutdown).await;
                }
            }
        }));
        receiver
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroups::Hierarchy;
    use crate::cgroups::HierarchyKind;
    use crate::cgroups::Layout;

    #[tokio::test(start_paused = true)]
    async fn a_measurement_is_waited_for_no_longer_than_the_limit() {
        let (sender, asked) = mpsc::channel(1);
        let (measure, limit) = (Measure(sender), Duration::from_secs(2));
        let waited = async || {
            let began = tokio::time::Instant::now();
            measure.now(limit).await;
            began.elapsed().as_secs()
        };
        assert_eq!(waited().await, 2, "the collector does not answer");
        assert_eq!(waited().await, 2, "nor takes the request");
        drop(asked);
        assert_eq!(waited().await, 0, "it has ended");
    }

    #[test]
    fn pods_are_listed_rarely_while_new_containers_are_announced() {
        let seconds = |cgroups: Option<SensorState>| {
            let sensor_states = SensorStates::default();
            cgroups.into_iter().for_each(|state| sensor_states.set(Sensor::Cgroups, state));
            let periods = periods(&sensor_states);
            (periods.event_driven.as_secs(), periods.polling.as_secs(), periods.fixed)
        };
        assert_eq!(seconds(Some(SensorState::Up)), (60, 10, None));
        for state in [None, Some(SensorState::Off), Some(SensorState::Degraded("full".to_owned()))] {
            assert_eq!(seconds(state.clone()), (60, 2, None), "{state:?}");
        }
    }

    #[test]
    fn the_hierarchy_is_found_from_inside_a_container() {
        let root = |root: &str| {
            let (mount, kind) = ("/sys/fs/cgroup".into(), HierarchyKind::Unified);
            let containers = Some(Hierarchy { kind, number: 0, mount, root: root.to_owned() });
            let layout = Layout::V2 { mount: "/sys/fs/cgroup".into() };
            in_own_namespace(Hierarchies { layout, containers, limits_swap: false }).containers.unwrap().root
        };
        assert_eq!(root("/../../.."), "/");
        assert_eq!(root("/"), "/");
        assert_eq!(root("/part"), "/part");
    }
}
