//! One-shot reports: tables for people. Pure.

use super::record::OomRecord;
use super::record::PodName;
use super::record::PressureRecord;
use super::record::Resource;
use super::record::StallCause;
use super::record::StallRecord;
use super::record::Timestamp;
use super::state::ObservedNode;
use super::text;

/// Sources of evidence that are not complete, a line each; empty if all are.
pub fn lacks(node: &ObservedNode) -> String {
    node.lacks().map(|sensor| format!("! {}\n", lack(sensor))).collect()
}

/// A source of evidence that is not complete, in one line.
pub fn lack(sensor: &super::record::SensorRecord) -> String {
    let reason = sensor.reason.as_deref().map(|reason| format!(": {reason}")).unwrap_or_default();
    let cost = sensor.cost.as_deref().unwrap_or_default();
    format!("{} {}{reason} → {cost}", sensor.sensor, sensor.state)
}

/// Headings of the table of OOM kills.
pub const OOM_HEADINGS: [&str; 9] =
    ["TIME", "POD", "CONTAINER", "VICTIM", "PROCESS", "LIMIT OF", "LIMIT", "HELD", "EVIDENCE"];

/// A row of the table of OOM kills.
fn oom_row(node: &ObservedNode, time: Timestamp, oom: &OomRecord) -> [String; 9] {
    let process = oom.process.as_ref().map(|process| format!("{}({})", or_unknown(&process.name), process.pid));
    let several = if oom.kills > 1 { format!("{}x ", oom.kills) } else { String::new() };
    [
        if oom.earlier { "before".to_owned() } else { format!("{} ago", text::age(node.now.since(time))) },
        oom.pod.as_ref().map_or_else(|| "-".to_owned(), pod),
        oom.container.clone().unwrap_or_else(|| "-".to_owned()),
        format!("{several}{}", oom.victim.as_str()),
        process.unwrap_or_else(|| "-".to_owned()),
        oom.scope.as_str().to_owned(),
        oom.limit_bytes.map_or_else(|| "-".to_owned(), text::bytes),
        oom.memory.map_or_else(|| "-".to_owned(), |memory| text::bytes(memory.total())),
        oom.confidence.as_str().to_owned(),
    ]
}

/// The OOM kills, newest first, with headings.
pub fn oom_table(node: &ObservedNode) -> Vec<[String; 9]> {
    let rows = node.oom_kills.iter().rev().map(|(time, oom)| oom_row(node, *time, oom));
    std::iter::once(OOM_HEADINGS.map(str::to_owned)).chain(rows).collect()
}

/// The pressure of the node and of pods that wait or use memory, those that wait longest first, with headings.
pub fn pressure_table(node: &ObservedNode) -> Vec<[String; 7]> {
    let headings = ["", "CPU some", "MEMORY some", "IO some", "RECLAIM", "CPUS", "MEMORY"].map(str::to_owned);
    let mut pods: Vec<(&PodName, &PressureRecord)> =
        node.pods.values().filter_map(|pod| Some((&pod.pod.pod, pod.pressure.as_ref()?))).collect();
    let worst = |record: &PressureRecord| {
        let percents = Resource::ALL.map(|resource| record.waiting(resource).map_or(0.0, |one| one.some.avg10));
        percents.into_iter().fold(0.0, f64::max)
    };
    pods.sort_by(|(a_name, a), (b_name, b)| worst(b).total_cmp(&worst(a)).then_with(|| a_name.cmp(b_name)));
    let of_node = node.pressure.as_ref().map(|record| pressure_row("node".to_owned(), record));
    let of_pods = pods.into_iter().map(|(name, record)| pressure_row(pod(name), record));
    std::iter::once(headings).chain(of_node).chain(of_pods).collect()
}

fn pressure_row(name: String, record: &PressureRecord) -> [String; 7] {
    let percent = |resource| {
        let waiting = record.waiting(resource);
        waiting.map_or_else(|| "-".to_owned(), |one| format!("{:.1} {:.1} %", one.some.avg10, one.some.avg60))
    };
    let reclaim = |reclaim: super::record::Reclaim| format!("{} ({:.1}s)", reclaim.stalls, reclaim.total_seconds);
    [
        name,
        percent(Resource::Cpu),
        percent(Resource::Memory),
        percent(Resource::Io),
        record.reclaim.map_or_else(|| "-".to_owned(), reclaim),
        record.cpus.map_or_else(|| "-".to_owned(), |cpus| format!("{cpus:.2}")),
        memory(record),
    ]
}

/// Memory in use, and its limit.
pub fn memory(record: &PressureRecord) -> String {
    let limit = record.memory_limit_bytes.map(|limit| format!("/{}", text::bytes(limit))).unwrap_or_default();
    record.memory_bytes.map_or_else(|| "-".to_owned(), |bytes| format!("{}{limit}", text::bytes(bytes)))
}

/// Waiting pods and the causes, a line each.
pub fn stalls(node: &ObservedNode) -> Vec<String> {
    node.current_stalls().into_iter().map(stall).collect()
}

/// Waiting pods and the causes.
pub fn stall(stall: &StallRecord) -> String {
    let cause = match (&stall.cause, &stall.by) {
        (StallCause::OtherPod, Some(by)) => format!("{} {}", pod(by), stall.evidence),
        (StallCause::Unknown, _) => stall.evidence.clone(),
        _ => format!("it {}", stall.evidence),
    };
    format!("{} waits for {} {:.0} % of the time: {cause}", pod(&stall.pod), stall.resource.as_str(), stall.percent)
}

/// A pod's name, or its UID as long as that is all that is known.
pub fn pod(pod: &PodName) -> String {
    if pod.name.is_empty() { format!("pod {}", pod.uid) } else { pod.to_string() }
}

fn or_unknown(name: &str) -> &str {
    if name.is_empty() { "?" } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::record::samples;

    #[test]
    fn kills_are_listed_newest_first() {
        let table = oom_table(&samples::node());
        let row = table[1].join(" ");
        assert_eq!(row, "2s ago shop/cart-7d9f cart child python3(4711) container 64Mi 63Mi kernel", "{table:?}");
        assert_eq!(table.last().unwrap()[0], "before");
    }

    #[test]
    fn pods_that_wait_come_first() {
        let table = pressure_table(&samples::node());
        assert_eq!(table[1][0], "node");
        assert_eq!(table[2][0], "shop/cart-7d9f");
        let stalls = stalls(&samples::node());
        assert_eq!(stalls.len(), 3);
        let first = "shop/cart-7d9f waits for memory 31 % of the time: batch/report-28 grew by 210Mi in 10 s";
        assert_eq!(stalls[0], first);
    }

    #[test]
    fn missing_features_are_reported_with_their_cost() {
        assert_eq!(
            lacks(&samples::node()),
            "! runtime-events down: containerd 1.7.24 gives each event to one reader, which is the kubelet; 2.0 to all \
             → changes are noticed by kernel records, pidfds and lists of all pods\n"
        );
    }
}
