//! Recorded traces: counters of node and pods, replayed to the same decisions.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use serde_json::json;
use tokio::time::Instant;

use super::*;
use crate::cgroups::memory_high::High;
use crate::cgroups::usage::Pressure;
use crate::cgroups::usage::PressureLine;
use crate::config::pressure::PolicySettings;
use crate::config::pressure::PressureSettings;
use crate::model::Amount;

const TRACES: &str = include_str!("testdata/traces.json");

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Trace {
    name: String,
    policies: Vec<PolicySettings>,
    pods: BTreeMap<String, Described>,
    segments: Vec<Segment>,
    /// Each change of what is to be done: millisecond, policy, action, pod.
    decisions: Vec<(u64, String, String, String)>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
#[derive(Default)]
struct Described {
    requested: Option<String>,
    priority: i32,
    critical: bool,
}

/// Readings at equal distances. Counters grow by the same amount with each.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Segment {
    readings: u64,
    every_ms: u64,
    /// Milliseconds waited by some and by all tasks; absent without PSI.
    some_ms: Option<i64>,
    full_ms: Option<i64>,
    #[serde(default)]
    scanned: u64,
    #[serde(default)]
    limit_hits: u64,
    available: Option<String>,
    /// Pods that exist.
    #[serde(default)]
    pods: BTreeMap<String, Growth>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
#[derive(Default, Clone)]
struct Growth {
    /// At the end of the segment.
    working_set: Option<String>,
    refaulted: Option<String>,
    waited_ms: Option<u64>,
    reclaimed_ms: Option<u64>,
    high_hits: u64,
    max_hits: u64,
    high: Option<String>,
}

fn bytes(text: Option<&String>) -> u64 {
    text.map_or(0, |text| text.parse::<Amount>().expect("a quantity").value().unsigned_abs())
}

#[tokio::test]
async fn recorded_traces_replay_to_the_same_decisions() {
    let traces: Vec<Trace> = serde_json::from_str(TRACES).expect("traces");
    assert!(traces.len() >= 6);
    for trace in &traces {
        let expected: Vec<String> =
            trace.decisions.iter().map(|(ms, policy, action, pod)| format!("{ms} {policy} {action} {pod}")).collect();
        assert_eq!(replay(trace), expected, "{}", trace.name);
    }
}

/// Changes of the decisions. An action that is carried out starts the windows anew.
fn replay(trace: &Trace) -> Vec<String> {
    let settings = PressureSettings { policies: trace.policies.clone(), ..PressureSettings::default() };
    let mut tracker = Tracker::new(settings.policies());
    let start = Instant::now() + Duration::from_secs(3600);
    let (mut millis, mut node, mut pods) = (0, Counters::default(), BTreeMap::new());
    let (mut last, mut changes) = (BTreeMap::new(), Vec::new());
    for segment in &trace.segments {
        for _ in 0..segment.readings {
            millis += segment.every_ms;
            let at = start + Duration::from_millis(millis);
            tracker.add(node.grow(segment, at));
            let samples: Vec<PodSample> =
                segment.pods.iter().map(|(name, growth)| grow(&mut pods, name, growth, &trace.pods[name])).collect();
            if tracker.wants_pods(at) {
                tracker.add_pods(at, samples);
            }
            tracker.rested().iter().for_each(|policy| drop(last.remove(policy)));
            let findings = tracker.findings();
            for finding in &findings {
                let pod = match &finding.decision {
                    PolicyDecision::Evict(evict) => evict.name.clone(),
                    PolicyDecision::Relax(relax) => relax.name.clone(),
                    PolicyDecision::OwnLimit(pods) => pods.join(","),
                    _ => String::new(),
                };
                let policy = finding.policy.name.clone();
                let decision = format!("{policy} {} {pod}", finding.decision.as_str());
                if last.insert(policy, decision.clone()).as_ref() != Some(&decision) {
                    changes.push(format!("{millis} {decision}"));
                }
            }
            let acts =
                |finding: &Finding| matches!(finding.decision, PolicyDecision::Evict(_) | PolicyDecision::Relax(_));
            if findings.iter().any(|finding| acts(finding) && finding.policy.mode.as_str() == "Enforce") {
                tracker.reset();
                last.clear();
            }
        }
    }
    changes
}

#[derive(Default)]
struct Counters {
    some: u64,
    full: u64,
    scanned: u64,
    limit_hits: u64,
}

impl Counters {
    fn grow(&mut self, segment: &Segment, at: Instant) -> NodeSample {
        let add = |total: u64, ms: Option<i64>| total.saturating_add_signed(ms.unwrap_or(0) * 1000);
        (self.some, self.full) = (add(self.some, segment.some_ms), add(self.full, segment.full_ms));
        self.scanned += segment.scanned;
        self.limit_hits += segment.limit_hits;
        let line = |total| PressureLine { total, ..PressureLine::default() };
        let pressure = Pressure { some: line(self.some), full: line(self.full) };
        let node = (segment.some_ms.is_some() || segment.full_ms.is_some()).then_some(pressure);
        let (scanned, limit_hits) = (self.scanned, Some(self.limit_hits));
        let available = segment.available.as_ref().map(|text| bytes(Some(text)));
        NodeSample { at, node, kubepods: node, scanned, refaulted: 0, limit_hits, available }
    }
}

fn grow(pods: &mut BTreeMap<String, PodSample>, name: &str, growth: &Growth, described: &Described) -> PodSample {
    let pod = pods.entry(name.to_owned()).or_insert_with(|| PodSample {
        uid: name.into(),
        name: name.to_owned(),
        requested: bytes(described.requested.as_ref()),
        priority: described.priority,
        critical: described.critical,
        ..PodSample::default()
    });
    let add = |total: &mut Option<Duration>, ms: Option<u64>| {
        if let Some(ms) = ms {
            *total = Some(total.unwrap_or_default() + Duration::from_millis(ms));
        }
    };
    pod.working_set = bytes(growth.working_set.as_ref());
    pod.refaulted += bytes(growth.refaulted.as_ref());
    add(&mut pod.waited, growth.waited_ms);
    add(&mut pod.reclaimed, growth.reclaimed_ms);
    pod.high_hits += growth.high_hits;
    pod.max_hits += growth.max_hits;
    let high = |text: &String| High { cgroup: "/main".into(), bytes: bytes(Some(text)), max: None };
    pod.highs = growth.high.iter().map(high).collect();
    pod.clone()
}

/// Whatever the counters do, a policy acts at most once in the time of its long window, and never for a critical pod.
#[tokio::test]
async fn a_policy_never_acts_twice_within_its_long_window() {
    let policy: PolicySettings =
        serde_json::from_value(json!({"name": "a", "mode": "Enforce", "threshold": 5})).expect("a policy");
    for seed in 0..200 {
        let mut random = fastrand::Rng::with_seed(seed);
        let segment = |random: &mut fastrand::Rng| Segment {
            readings: random.u64(1..30),
            every_ms: random.u64(1..1500),
            some_ms: random.bool().then(|| random.i64(-2000..1500)),
            full_ms: random.bool().then(|| random.i64(-2000..1500)),
            scanned: random.u64(0..2),
            limit_hits: 0,
            available: Some("1Gi".to_owned()),
            pods: ["critical", "other"]
                .map(|name| (name.to_owned(), Growth { working_set: Some("1Mi".to_owned()), ..Growth::default() }))
                .into(),
        };
        let trace = Trace {
            name: format!("seed {seed}"),
            policies: vec![policy.clone()],
            pods: [("critical", true), ("other", false)]
                .map(|(name, critical)| (name.to_owned(), Described { critical, ..Described::default() }))
                .into(),
            segments: (0..20).map(|_| segment(&mut random)).collect(),
            decisions: Vec::new(),
        };
        let mut last: Option<u64> = None;
        for change in replay(&trace).iter().filter(|change| change.contains(" evict ")) {
            let at: u64 = change.split(' ').next().and_then(|ms| ms.parse().ok()).expect("a number");
            assert!(last.is_none_or(|last| at >= last + 5000), "seed {seed}: {change} after {last:?}");
            assert!(change.ends_with(" other"), "seed {seed}: {change}");
            last = Some(at);
        }
    }
}
