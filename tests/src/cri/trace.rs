//! Record of all container instances and of all calls that the runtime received.
//!
//! Written when a process really starts or exits, not when the runtime reports it; tests compare an agent's actions
//! with it. It never affects the runtime's responses.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::collections::VecDeque;
use std::fmt;

use tokio::time::Instant;

use super::method::Method;
use super::program::Exit;

/// Number of calls that are kept, to be printed with a failing seed.
const CALLS_KEPT: usize = 2000;

/// One container instance and its lifecycle times.
#[derive(Clone, Debug)]
pub struct Instance {
    /// Container id.
    pub id: String,
    /// UID of its pod.
    pub pod_uid: String,
    /// `namespace/name` of its pod.
    pub pod: String,
    /// Container name.
    pub container: String,
    /// Attempt number given by the client.
    pub attempt: u32,
    /// CreateContainer finished.
    pub created: Instant,
    /// Its process started.
    pub started: Option<Instant>,
    /// Host process id, once started.
    pub pid: Option<u32>,
    /// Its init process exited.
    pub exited: Option<(Instant, Exit)>,
    /// All its processes have exited and their files are closed.
    pub gone: Option<Instant>,
    /// The runtime reported the exit.
    pub reported: Option<Instant>,
    /// RemoveContainer removed it.
    pub removed: Option<Instant>,
}

impl Instance {
    fn is(&self, pod: &str, container: &str) -> bool {
        self.pod.rsplit('/').next() == Some(pod) && self.container == container
    }

    /// Whether a process of it may still be running.
    pub fn is_live(&self) -> bool {
        self.started.is_some() && self.gone.is_none()
    }
}

/// Two running instances of one container name in one pod, which must never happen.
#[derive(Clone, Debug)]
pub struct Duplicate {
    /// UID of the pod.
    pub pod_uid: String,
    /// Container name.
    pub container: String,
    /// The instance that was running.
    pub first: String,
    /// The instance that was started in addition.
    pub second: String,
    /// When the second one started.
    pub at: Instant,
}

/// One received call.
#[derive(Clone, Debug)]
pub struct Call {
    /// When it arrived.
    pub at: Instant,
    /// Its method.
    pub method: Method,
    /// Its object: a reserved name, an id, an image, a pod UID.
    pub object: String,
}

/// All instances and calls.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    instances: Vec<Instance>,
    by_id: HashMap<String, usize>,
    live: HashMap<(String, String), Vec<usize>>,
    duplicates: Vec<Duplicate>,
    counts: BTreeMap<Method, u64>,
    calls: VecDeque<Call>,
}

impl Trace {
    /// All instances, oldest first.
    pub fn instances(&self) -> &[Instance] {
        &self.instances
    }

    /// The instance with this container id.
    pub fn instance(&self, id: &str) -> Option<&Instance> {
        self.by_id.get(id).map(|at| &self.instances[*at])
    }

    /// Instances of one container name, by pod name (any namespace and UID), oldest first.
    pub fn history(&self, pod: &str, container: &str) -> impl Iterator<Item = &Instance> {
        self.instances.iter().filter(move |i| i.is(pod, container))
    }

    /// The running instance of one container name, if there is one.
    pub fn live(&self, pod: &str, container: &str) -> Option<&Instance> {
        self.instances.iter().find(|i| i.is_live() && i.is(pod, container))
    }

    /// Number of running instances.
    pub fn live_count(&self) -> usize {
        self.live.values().map(Vec::len).sum()
    }

    /// All cases of two running instances of one name in one pod.
    pub fn duplicates(&self) -> &[Duplicate] {
        &self.duplicates
    }

    /// Instances whose attempt number is not greater than that of every earlier instance of the same name and pod.
    pub fn fallen_attempts(&self) -> Vec<&Instance> {
        let mut started: Vec<&Instance> = self.instances.iter().filter(|i| i.started.is_some()).collect();
        started.sort_by_key(|i| i.started);
        let mut highest: HashMap<(&str, &str), u32> = HashMap::new();
        let mut fallen = Vec::new();
        for instance in started {
            let key = (instance.pod_uid.as_str(), instance.container.as_str());
            match highest.get(&key) {
                Some(before) if instance.attempt <= *before => fallen.push(instance),
                _ => _ = highest.insert(key, instance.attempt),
            }
        }
        fallen
    }

    /// Calls received per method.
    pub fn counts(&self) -> &BTreeMap<Method, u64> {
        &self.counts
    }

    /// Calls received of one method.
    pub fn count(&self, method: Method) -> u64 {
        self.counts.get(&method).copied().unwrap_or(0)
    }

    /// All calls received.
    pub fn total(&self) -> u64 {
        self.counts.values().sum()
    }

    /// The last calls, oldest first.
    pub fn calls(&self) -> impl Iterator<Item = &Call> {
        self.calls.iter()
    }

    pub(super) fn record_call(&mut self, method: Method, object: &str) {
        *self.counts.entry(method).or_default() += 1;
        if self.calls.len() == CALLS_KEPT {
            self.calls.pop_front();
        }
        self.calls.push_back(Call { at: Instant::now(), method, object: object.to_owned() });
    }

    pub(super) fn record_created(&mut self, instance: Instance) {
        self.by_id.insert(instance.id.clone(), self.instances.len());
        self.instances.push(instance);
    }

    pub(super) fn record_started(&mut self, id: &str, pid: u32) {
        let Some(&at) = self.by_id.get(id) else { return };
        let now = Instant::now();
        let instance = &mut self.instances[at];
        (instance.started, instance.pid) = (Some(now), Some(pid));
        let key = (instance.pod_uid.clone(), instance.container.clone());
        let live = self.live.entry(key.clone()).or_default();
        for &other in live.iter() {
            self.duplicates.push(Duplicate {
                pod_uid: key.0.clone(),
                container: key.1.clone(),
                first: self.instances[other].id.clone(),
                second: id.to_owned(),
                at: now,
            });
        }
        live.push(at);
    }

    pub(super) fn record_exited(&mut self, id: &str, exit: Exit) {
        let Some(&at) = self.by_id.get(id) else { return };
        self.instances[at].exited.get_or_insert((Instant::now(), exit));
    }

    pub(super) fn record_gone(&mut self, id: &str) {
        let Some(&at) = self.by_id.get(id) else { return };
        let instance = &mut self.instances[at];
        instance.gone.get_or_insert_with(Instant::now);
        let key = (instance.pod_uid.clone(), instance.container.clone());
        if let Some(live) = self.live.get_mut(&key) {
            live.retain(|other| *other != at);
        }
    }

    pub(super) fn record_reported(&mut self, id: &str) {
        if let Some(&at) = self.by_id.get(id) {
            self.instances[at].reported.get_or_insert_with(Instant::now);
        }
    }

    pub(super) fn record_removed(&mut self, id: &str) {
        if let Some(&at) = self.by_id.get(id) {
            self.instances[at].removed.get_or_insert_with(Instant::now);
        }
    }
}

/// The history, printed when a test fails.
impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(first) = self.calls.front().map(|c| c.at).or(self.instances.first().map(|i| i.created)) else {
            return writeln!(f, "(nothing happened)");
        };
        let ms = |at: Instant| at.saturating_duration_since(first).as_secs_f64() * 1000.0;
        let mut lines: Vec<(Instant, String)> =
            self.calls.iter().map(|c| (c.at, format!("call {:?} {}", c.method, c.object))).collect();
        for i in &self.instances {
            let name = format!("{}/{} attempt {} ({:.8})", i.pod, i.container, i.attempt, i.id);
            lines.push((i.created, format!("created  {name}")));
            lines.extend(i.started.map(|at| (at, format!("started  {name} pid {}", i.pid.unwrap_or(0)))));
            lines.extend(i.exited.map(|(at, exit)| (at, format!("exited   {name} {exit:?}"))));
            lines.extend(i.reported.map(|at| (at, format!("reported {name}"))));
            lines.extend(i.removed.map(|at| (at, format!("removed  {name}"))));
        }
        lines.sort_by_key(|(at, _)| *at);
        lines.iter().try_for_each(|(at, line)| writeln!(f, "{:>12.3} ms  {line}", ms(*at)))
    }
}
