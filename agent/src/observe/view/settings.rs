//! What the user has chosen: order, filter, selection. Pure.

use crate::observe::record::Resource;
use crate::observe::state::ObservedNode;
use crate::observe::state::ObservedPod;

/// Order of the pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sort {
    /// Those that wait longest first.
    #[default]
    Pressure,
    /// By namespace and name.
    Name,
    /// Most restarts first.
    Restarts,
    /// The latest exit first.
    LastExit,
    /// Most OOM kills first.
    OomKills,
    /// Most memory first.
    Memory,
    /// Most CPU time first.
    Cpu,
}

impl Sort {
    /// All, in the order in which the key goes through them.
    pub const ALL: [Self; 7] =
        [Self::Pressure, Self::Name, Self::Restarts, Self::LastExit, Self::OomKills, Self::Memory, Self::Cpu];

    /// The name in the footer.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pressure => "pressure",
            Self::Name => "name",
            Self::Restarts => "restarts",
            Self::LastExit => "last exit",
            Self::OomKills => "OOM kills",
            Self::Memory => "memory",
            Self::Cpu => "CPU",
        }
    }

    /// The next one.
    pub fn next(self) -> Self {
        let position = Self::ALL.iter().position(|sort| *sort == self).unwrap_or_default();
        Self::ALL[(position + 1) % Self::ALL.len()]
    }
}

/// The user's settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Order of the pods.
    pub sort: Sort,
    /// The other way round.
    pub reverse: bool,
    /// Only pods whose namespace, name and UID contain all words of this.
    pub filter: String,
    /// The filter is being typed.
    pub typing: bool,
    /// UID of the selected pod; the first one if it is not shown.
    pub selected: Option<String>,
    /// UID of the pod that is shown alone.
    pub opened: Option<String>,
    /// What is shown does not change.
    pub frozen: bool,
    /// The keys are explained.
    pub help: bool,
}

impl Settings {
    /// The pods to be shown, in order.
    pub fn pods<'a>(&self, node: &'a ObservedNode) -> Vec<&'a ObservedPod> {
        let mut pods: Vec<&ObservedPod> = node.pods.values().filter(|pod| self.shows(pod)).collect();
        pods.sort_by(|a, b| {
            let order = match self.sort {
                Sort::Name => std::cmp::Ordering::Equal,
                Sort::Pressure => worst(b).total_cmp(&worst(a)),
                Sort::Restarts => b.restarts().cmp(&a.restarts()),
                Sort::LastExit => {
                    let at = |pod: &ObservedPod| pod.last_exit().and_then(|exit| exit.finished_at);
                    at(b).cmp(&at(a))
                }
                Sort::OomKills => b.oom_kills.cmp(&a.oom_kills),
                Sort::Memory => memory(b).cmp(&memory(a)),
                Sort::Cpu => cpus(b).total_cmp(&cpus(a)),
            };
            let order = order.then_with(|| a.pod.pod.cmp(&b.pod.pod));
            if self.reverse { order.reverse() } else { order }
        });
        pods
    }

    fn shows(&self, pod: &ObservedPod) -> bool {
        let name = &pod.pod.pod;
        let text = format!("{}/{} {}", name.namespace, name.name, name.uid).to_lowercase();
        self.filter.split_whitespace().all(|word| text.contains(&word.to_lowercase()))
    }

    /// Position of the selected pod among those shown.
    pub fn position(&self, pods: &[&ObservedPod]) -> usize {
        let selected = self.selected.as_deref();
        pods.iter().position(|pod| Some(pod.pod.pod.uid.as_str()) == selected).unwrap_or(0)
    }
}

fn worst(pod: &ObservedPod) -> f64 {
    Resource::ALL.iter().filter_map(|resource| pod.percent(*resource)).fold(0.0, f64::max)
}

fn memory(pod: &ObservedPod) -> u64 {
    pod.pressure.as_ref().and_then(|pressure| pressure.memory_bytes).unwrap_or(0)
}

fn cpus(pod: &ObservedPod) -> f64 {
    pod.pressure.as_ref().and_then(|pressure| pressure.cpus).unwrap_or(0.0)
}
