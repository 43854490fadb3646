//! Which pods wait, and the pod or limit that causes it, from two measurements. Pure.
//!
//! A pod that waits has reached its own limit, or it competes with others. Of the others the one that takes most of the
//! resource is named, with the figure that shows it: for memory growth, for processors CPU time, for input and output
//! bytes. This is evidence, not proof: the kernel does not record which task waits for which other one.

use crate::observe::record::PodName;
use crate::observe::record::Resource;
use crate::observe::record::StallCause;
use crate::observe::record::StallRecord;
use crate::observe::text;

/// A pod that waits less than this is not reported, in percent of the time.
const LEAST_PERCENT: f64 = 5.0;
/// Pods reported for each resource.
const MOST: usize = 5;
/// Growth, in bytes, and CPUs below which a pod is no cause.
const LEAST_GROWTH: u64 = 1 << 20;
const LEAST_CPUS: f64 = 0.05;

/// A pod between two measurements.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct PodWindow {
    /// The pod.
    pub(super) pod: PodName,
    /// Percent of the time in which it waited; absent if not measured.
    pub(super) cpu_wait: Option<f64>,
    /// Likewise.
    pub(super) memory_wait: Option<f64>,
    /// Likewise.
    pub(super) io_wait: Option<f64>,
    /// CPU time used, in CPUs.
    pub(super) cpus: f64,
    /// Percent of the time in which its CPU quota was used up.
    pub(super) throttled: f64,
    /// Memory that it has taken, in bytes.
    pub(super) growth: u64,
    /// How often it has reached its memory limit.
    pub(super) limit_hits: u64,
    /// How often it has exceeded `memory.high`.
    pub(super) high_hits: u64,
    /// Bytes read and written.
    pub(super) io_bytes: u64,
}

impl PodWindow {
    fn wait(&self, resource: Resource) -> f64 {
        let wait = match resource {
            Resource::Cpu => self.cpu_wait,
            Resource::Memory => self.memory_wait,
            Resource::Io => self.io_wait,
        };
        wait.unwrap_or(0.0)
    }

    /// What it takes of a resource, if that is worth mentioning.
    fn takes(&self, resource: Resource) -> Option<f64> {
        match resource {
            Resource::Cpu => (self.cpus >= LEAST_CPUS).then_some(self.cpus),
            Resource::Memory => (self.growth >= LEAST_GROWTH).then_some(self.growth as f64),
            Resource::Io => (self.io_bytes >= LEAST_GROWTH).then_some(self.io_bytes as f64),
        }
    }

    fn evidence(&self, resource: Resource, seconds: f64) -> String {
        match resource {
            Resource::Cpu => format!("used {:.1} CPUs", self.cpus),
            Resource::Memory => format!("grew by {} in {seconds:.0} s", text::bytes(self.growth)),
            Resource::Io => format!("moved {} in {seconds:.0} s", text::bytes(self.io_bytes)),
        }
    }

    /// The limit of its own that explains the wait.
    fn own_limit(&self, resource: Resource, seconds: f64) -> Option<String> {
        match resource {
            Resource::Memory if self.limit_hits > 0 => {
                Some(format!("reached its memory limit {} times in {seconds:.0} s", self.limit_hits))
            }
            Resource::Memory if self.high_hits > 0 => {
                Some(format!("exceeded memory.high {} times in {seconds:.0} s", self.high_hits))
            }
            Resource::Cpu if self.throttled >= self.wait(resource) / 2.0 && self.throttled > 0.0 => {
                Some(format!("used up its CPU quota {:.0} % of the time", self.throttled))
            }
            _ => None,
        }
    }
}

/// The pods that wait, those that wait longest first, for each resource.
pub(super) fn attribute(pods: &[PodWindow], seconds: f64) -> Vec<StallRecord> {
    Resource::ALL.iter().flat_map(|resource| attribute_one(pods, *resource, seconds)).collect()
}

fn attribute_one(pods: &[PodWindow], resource: Resource, seconds: f64) -> Vec<StallRecord> {
    let mut waiting: Vec<&PodWindow> = pods.iter().filter(|pod| pod.wait(resource) >= LEAST_PERCENT).collect();
    waiting.sort_by(|a, b| b.wait(resource).total_cmp(&a.wait(resource)).then_with(|| a.pod.cmp(&b.pod)));
    let taking = pods.iter().filter_map(|pod| Some((pod, pod.takes(resource)?)));
    let most = taking.max_by(|(_, a), (_, b)| a.total_cmp(b)).map(|(pod, _)| pod);
    waiting.truncate(MOST);
    waiting.into_iter().map(|pod| stall(pod, most, resource, seconds)).collect()
}

fn stall(pod: &PodWindow, most: Option<&PodWindow>, resource: Resource, seconds: f64) -> StallRecord {
    let (cause, by, evidence) = match (pod.own_limit(resource, seconds), most) {
        (Some(evidence), _) => (StallCause::OwnLimit, None, evidence),
        (None, Some(most)) if most.pod == pod.pod => (StallCause::Itself, None, most.evidence(resource, seconds)),
        (None, Some(most)) => (StallCause::OtherPod, Some(most.pod.clone()), most.evidence(resource, seconds)),
        (None, None) => (StallCause::Unknown, None, "no pod stands out".to_owned()),
    };
    let percent = (pod.wait(resource) * 10.0).round() / 10.0;
    StallRecord { pod: pod.pod.clone(), resource, percent, cause, by, evidence }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str) -> PodWindow {
        let name = PodName { namespace: "ns".into(), name: name.into(), uid: name.into() };
        PodWindow { pod: name, ..PodWindow::default() }
    }

    fn causes(pods: &[PodWindow]) -> Vec<(String, StallCause, Option<String>)> {
        let record = |stall: StallRecord| (stall.pod.name, stall.cause, stall.by.map(|by| by.name));
        attribute(pods, 10.0).into_iter().map(record).collect()
    }

    #[test]
    fn the_pod_that_grows_stalls_the_one_that_waits() {
        let victim = PodWindow { memory_wait: Some(30.0), ..pod("web") };
        let hog = PodWindow { growth: 200 << 20, memory_wait: Some(8.0), ..pod("hog") };
        let stalls = attribute(&[victim, hog], 10.0);
        assert_eq!(stalls[0].cause, StallCause::OtherPod);
        assert_eq!(stalls[0].by.as_ref().unwrap().name, "hog");
        assert_eq!(stalls[0].evidence, "grew by 200Mi in 10 s");
        assert_eq!((stalls[1].pod.name.as_str(), stalls[1].cause), ("hog", StallCause::Itself));
    }

    #[test]
    fn a_pod_at_its_own_limit_stalls_no_other() {
        let limited = PodWindow { memory_wait: Some(60.0), limit_hits: 90, ..pod("web") };
        let throttled = PodWindow { cpu_wait: Some(40.0), throttled: 35.0, ..pod("api") };
        let hog = PodWindow { growth: 1 << 30, cpus: 2.0, ..pod("hog") };
        let found = causes(&[limited, throttled, hog]);
        assert_eq!(
            found,
            [("api".to_owned(), StallCause::OwnLimit, None), ("web".to_owned(), StallCause::OwnLimit, None)]
        );
    }

    #[test]
    fn memory_high_is_distinguished_from_the_limit() {
        let evidence = |limit_hits, high_hits| {
            let throttled = PodWindow { memory_wait: Some(60.0), limit_hits, high_hits, ..pod("web") };
            let hog = PodWindow { growth: 1 << 30, ..pod("hog") };
            attribute(&[throttled, hog], 10.0).remove(0)
        };
        let throttled = evidence(0, 90);
        assert_eq!(throttled.cause, StallCause::OwnLimit);
        assert_eq!(throttled.evidence, "exceeded memory.high 90 times in 10 s");
        assert_eq!(evidence(2, 90).evidence, "reached its memory limit 2 times in 10 s");
    }

    #[test]
    fn the_pod_that_takes_most_is_named_unless_that_is_little() {
        let (cpu_wait, memory_wait, io_wait) = (Some(30.0), Some(LEAST_PERCENT), Some(30.0));
        // Throttled for less than half of the wait.
        let victim = PodWindow { cpu_wait, memory_wait, io_wait, throttled: 14.0, ..pod("web") };
        let taking =
            |name: &str, bytes: u64, cpus: f64| PodWindow { growth: bytes, io_bytes: bytes, cpus, ..pod(name) };
        let named = |others: [PodWindow; 2]| causes(&[&[victim.clone()][..], &others[..]].concat());
        let expected = |cause, by: Option<&str>| vec![("web".to_owned(), cause, by.map(str::to_owned)); 3];
        let little = || taking("little", (1 << 20) - 1, 0.049);
        let (less, most) = (|| taking("less", 1 << 20, 0.05), || taking("most", 3 << 20, 0.3));
        assert_eq!(named([little(), pod("idle")]), expected(StallCause::Unknown, None));
        assert_eq!(named([less(), little()]), expected(StallCause::OtherPod, Some("less")));
        for others in [[less(), most()], [most(), less()]] {
            assert_eq!(named(others), expected(StallCause::OtherPod, Some("most")));
        }
    }

    #[test]
    fn without_evidence_no_pod_is_named() {
        let waiting = PodWindow { io_wait: Some(12.0), ..pod("web") };
        assert_eq!(causes(&[waiting, pod("other")]), [("web".to_owned(), StallCause::Unknown, None)]);
        let slight = PodWindow { io_wait: Some(4.9), ..pod("web") };
        assert_eq!(causes(&[slight]), []);
    }

    #[test]
    fn a_busy_node_yields_few_records() {
        let pods: Vec<PodWindow> =
            (0..100).map(|n| PodWindow { cpu_wait: Some(10.0 + f64::from(n)), ..pod(&n.to_string()) }).collect();
        let stalls = attribute(&pods, 10.0);
        assert_eq!(stalls.len(), MOST);
        assert_eq!(stalls[0].pod.name, "99");
    }
}
