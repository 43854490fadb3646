//! Metrics, events and subscribers.

use super::*;
use crate::model::KernelMoment;
use crate::model::OomConfidence;
use crate::model::OomContainer;
use crate::model::OomGroup;
use crate::model::OomRecord;
use crate::model::OomTime;
use crate::model::OomVictim;
use crate::model::testing;
use crate::model::testing::Buffer;
use crate::oom::verdict::decide;
use crate::recorder::testing::listening;

fn verdict() -> OomVerdict {
    let record = OomRecord {
        pid: Some(7),
        comm: "hungry".to_owned(),
        ..OomRecord::new(OomConfidence::Kernel, KernelMoment(Instant::now()))
    };
    OomVerdict {
        pod: Some(PodRef { uid: "uid".into(), namespace: "ns".into(), name: "pod".into() }),
        container: Some(OomContainer { id: "id".into(), name: "c".to_owned() }),
        victim: OomVictim::Main,
        scope: OomScope::Container,
        limit_bytes: Some(1 << 20),
        missing: Vec::new(),
        ..decide(&record, None, false, OomTime(0))
    }
}

const TEXT: &str = "Process hungry (pid 7), the main process of container c, was killed: the container reached its memory limit of 1Mi";

#[tokio::test]
async fn a_kill_is_an_event_on_the_container() {
    let (metrics, (recorder, mut events)) = (Metrics::new(), listening());
    let reporter =
        OomReporter::new(metrics.clone(), recorder, Arc::new(|_| Some(testing::pod("Always", &["i"], &["c"]).into())));
    let mut verdicts = reporter.subscribe();
    reporter.report(verdict());
    assert_eq!(events.take(), [format!("pod spec.containers{{c}} W OOMKilled: {TEXT}")]);
    assert_eq!(verdicts.recv().await.unwrap().pid, Some(7));
    let text = metrics.render().unwrap();
    assert!(
        text.contains("keblet_oom_kills_total{confidence=\"kernel\",scope=\"container\",victim=\"main\"} 1\n"),
        "{text}"
    );

    let of_init = OomVerdict { container: Some(OomContainer { id: "id".into(), name: "i".to_owned() }), ..verdict() };
    reporter.report(of_init);
    assert!(events.take()[0].starts_with("pod spec.initContainers{i} W OOMKilled: "));
}

#[test]
fn the_log_line_has_the_time_of_the_kernel() {
    let reporter = OomReporter::new(Metrics::new(), Recorder::default(), Arc::new(|_| None));
    // Registers the line, which no subscriber of this thread would see if another thread wrote it first.
    reporter.report(verdict());
    let buffer = Buffer::default();
    let writer = buffer.clone();
    let lines = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    tracing::subscriber::with_default(lines, || {
        reporter.report(OomVerdict { time: OomTime(1_700_000_000_123_456_789), ..verdict() });
    });
    let text = String::from_utf8(buffer.0.lock().unwrap().clone()).unwrap();
    let [line] = text.lines().filter(|line| line.contains("OOM kill")).collect::<Vec<_>>()[..] else {
        panic!("{text}")
    };
    assert!(line.contains(" time=2023-11-14T22:13:20.123456Z pid=7 "), "{line}");
}

#[test]
fn without_the_spec_the_event_is_on_the_pod() {
    let (recorder, mut events) = listening();
    let reporter = OomReporter::new(Metrics::new(), recorder, Arc::new(|_| None));
    reporter.report(verdict());
    assert_eq!(events.take(), [format!("pod W OOMKilled: {TEXT}")]);
    let nameless = PodRef { uid: "uid".into(), namespace: "".into(), name: "".into() };
    reporter.report(OomVerdict { pod: Some(nameless), ..verdict() });
    assert_eq!(events.take(), [""; 0], "no object to record it on");
}

#[test]
fn victims_of_one_event_are_one_event() {
    let (metrics, (recorder, mut events)) = (Metrics::new(), listening());
    let reporter = OomReporter::new(metrics.clone(), recorder, Arc::new(|_| None));
    reporter.report(OomVerdict { group: OomGroup::Chosen, ..verdict() });
    reporter.report(OomVerdict { group: OomGroup::Member, ..verdict() });
    assert_eq!(events.take().len(), 1);
    assert!(metrics.render().unwrap().contains("victim=\"main\"} 2\n"));
    assert_eq!(reporter.counts().all()[0].events, 1);
    reporter.pod_removed(&"uid".into());
    assert!(reporter.counts().all().is_empty());
}

#[test]
fn a_node_out_of_memory_is_upstreams_event() {
    let (recorder, mut events) = listening();
    let reporter = OomReporter::new(Metrics::new(), recorder, Arc::new(|_| None));
    reporter.report(OomVerdict {
        pod: None,
        container: None,
        victim: OomVictim::Other,
        scope: OomScope::Node,
        ..verdict()
    });
    assert_eq!(events.take(), ["node W SystemOOM: System OOM encountered, victim process: hungry, pid: 7"]);
}

#[test]
fn corrections_are_counted() {
    let metrics = Metrics::new();
    let reporter = OomReporter::new(metrics.clone(), Recorder::default(), Arc::new(|_| None));
    let pod = PodRef { uid: "uid".into(), namespace: "ns".into(), name: "pod".into() };
    reporter.corrected(&pod, "c", "OOMKilled", "Completed");
    let line = "keblet_oom_reasons_corrected_total{from=\"OOMKilled\",to=\"Completed\"} 1\n";
    assert!(metrics.render().unwrap().contains(line));
}
