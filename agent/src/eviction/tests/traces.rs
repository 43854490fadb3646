//! Recorded traces: series of readings and usage, replayed to the same decisions.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use tokio::time::Instant;

use super::super::decision::Reclaim;
use super::super::decision::victim;
use super::super::history::History;
use super::super::local_limits::excess;
use super::super::readings::DiskLayout;
use super::super::readings::for_layout;
use super::*;

const TRACES: &str = include_str!("../testdata/traces.json");

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Trace {
    name: String,
    config: Value,
    transition_seconds: u64,
    layout: String,
    /// Specs by name.
    pods: BTreeMap<String, Value>,
    steps: Vec<Moment>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Moment {
    second: u64,
    /// Available and capacity by signal.
    signals: BTreeMap<String, (String, String)>,
    /// By pod; a pod that is absent has no statistics.
    #[serde(default)]
    usage: BTreeMap<String, Measured>,
    /// Conditions, in order.
    conditions: Vec<String>,
    #[serde(default)]
    reclaim: Vec<String>,
    /// The pod that is evicted, which does not come back.
    evict: Option<String>,
    grace: Option<i64>,
    message: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
#[derive(Default)]
struct Measured {
    memory: Option<String>,
    processes: Option<u64>,
    /// Writable layer, logs and volume `data`.
    disk: Option<(String, String, String)>,
}

impl Measured {
    fn usage(&self) -> PodUsage {
        let (rootfs, logs, data) = self.disk.clone().unwrap_or(("0".into(), "0".into(), "0".into()));
        let mut usage = disks(&rootfs, &logs, &data);
        usage.memory = self.memory.as_deref().map(bytes);
        usage.processes = self.processes;
        usage.containers.values_mut().for_each(|container| container.memory = usage.memory);
        usage
    }
}

/// What is decided at one moment.
#[derive(Debug, PartialEq, Default)]
struct Decided {
    conditions: Vec<String>,
    reclaim: Vec<String>,
    evict: Option<String>,
    grace: Option<i64>,
    message: Option<String>,
}

#[tokio::test]
async fn recorded_traces_replay_to_the_same_decisions() {
    let traces: Vec<Trace> = serde_json::from_str(TRACES).expect("traces");
    assert!(traces.len() >= 5);
    for trace in &traces {
        replay(trace);
    }
}

fn replay(trace: &Trace) {
    let layout = match trace.layout.as_str() {
        "shared" => DiskLayout::Shared,
        "dedicated" => DiskLayout::Dedicated,
        _ => DiskLayout::Split,
    };
    let thresholds = for_layout(&configured(trace.config.clone()), layout);
    let max_grace = trace.config["evictionMaxPodGracePeriod"].as_i64().unwrap_or(0);
    let mut pods: Vec<Pod> = trace.pods.iter().map(|(name, spec)| pod(name, spec.clone())).collect();
    let (mut history, start) = (History::default(), Instant::now());
    for moment in &trace.steps {
        let now = start + Duration::from_secs(moment.second);
        let readings = readings_of(moment, layout, now);
        let step = history.step(&thresholds, &readings, Duration::from_secs(trace.transition_seconds), now);
        let usage: HashMap<PodUid, PodUsage> =
            moment.usage.iter().map(|(name, m)| (format!("{name}-uid").as_str().into(), m.usage())).collect();
        let mut decided = Decided {
            conditions: step.pressures.conditions().into_iter().map(str::to_owned).collect(),
            ..Decided::default()
        };
        let over_limit = pods.iter().find_map(|pod| Some((pod.clone(), excess(pod, usage_of(&usage, pod)?, layout)?)));
        if let Some((pod, excess)) = over_limit {
            decided.evict = Some(pod_ref(&pod).name.to_string());
            (decided.grace, decided.message) = (Some(1), Some(excess.message));
        } else if let Some(first) = step.due.first() {
            let Reclaim { containers, images } = Reclaim::of(first.signal, layout);
            let reclaim = [(containers, "containers"), (images, "images")];
            decided.reclaim = reclaim.into_iter().filter(|(is, _)| *is).map(|(_, what)| what.to_owned()).collect();
            if let (Some(victim), _) = victim(&step.due, &readings, pods.clone(), &usage, max_grace) {
                decided.evict = Some(pod_ref(&victim.pod).name.to_string());
                (decided.grace, decided.message) = (Some(victim.grace), Some(victim.notice.message));
            }
        }
        let expected = Decided {
            conditions: moment.conditions.clone(),
            reclaim: moment.reclaim.clone(),
            evict: moment.evict.clone(),
            grace: moment.grace,
            message: moment.message.clone(),
        };
        assert_eq!(decided, expected, "{}, second {}", trace.name, moment.second);
        pods.retain(|pod| Some(&*pod_ref(pod).name) != decided.evict.as_deref());
    }
}

fn usage_of<'a>(usage: &'a HashMap<PodUid, PodUsage>, pod: &Pod) -> Option<&'a PodUsage> {
    usage.get(&pod_ref(pod).uid)
}

fn readings_of(moment: &Moment, layout: DiskLayout, at: Instant) -> Readings {
    let number = |text: &str| text.parse::<Amount>().expect("a quantity").value();
    let reading = |(name, (available, capacity)): (&String, &(String, String))| {
        let signal = Signal::named(name).expect("a signal");
        (signal, Reading { available: number(available), capacity: number(capacity), at })
    };
    Readings { signals: moment.signals.iter().map(reading).collect(), disks: Some(layout) }
}
