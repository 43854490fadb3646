//! Pressure of the node and of QoS classes as events: the kernel's triggers, and levels with hysteresis that follow from them.
//! Levels of memory wake the eviction manager, so that it need not poll. Nothing acts on the others.

mod open;

use std::io;
use std::panic::resume_unwind;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinError;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::open::Opened;
use self::open::open;
use super::sensors::Sensor;
use super::sensors::SensorState;
use super::sensors::SensorStates;
use crate::cgroups::usage::Pressure;
use crate::config::pressure::PressureResource;
use crate::config::pressure::StallKind;
use crate::config::pressure::Trigger;
use crate::kernel::open_files::is_shortage;
use crate::kernel::psi::PsiTrigger;
use crate::metrics::Metrics;
use crate::model::named;
use crate::model::until;
use crate::pressure::Crossing;
use crate::pressure::Level;
use crate::pressure::own_limit::Throttled;
use crate::pressure::own_limit::explained_by;

/// While a level is entered, it is read no more often than this.
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);

/// How often triggers are tried again that could not be registered for lack of memory or file descriptors.
const OPEN_AGAIN: Duration = Duration::from_secs(60);

/// Registers a trigger on its pressure file.
type Open = fn(&Path, &Trigger) -> io::Result<Opened>;

/// Reads for how long CPU quotas have throttled pods. May block.
pub type ReadThrottled = Arc<dyn Fn() -> Throttled + Send + Sync>;

/// What the sensor needs.
#[derive(Clone)]
pub struct Parts {
    /// Its state.
    pub sensor_states: SensorStates,
    /// Counts crossings.
    pub metrics: Arc<Metrics>,
    /// Recognises CPU pressure that comes from limits.
    pub throttled: ReadThrottled,
    /// Ends the sensor.
    pub shutdown: CancellationToken,
}

/// Registers the triggers, each on its file, and follows them in `tasks`. Those that the kernel refuses, and those without a
/// file, are named in its state. `wake` gets the time whenever tasks wait for memory; if no trigger of memory is followed, it
/// is closed.
pub fn start(
    triggers: Vec<(Trigger, Option<PathBuf>)>,
    parts: &Parts,
    wake: mpsc::Sender<Instant>,
    tasks: &mut JoinSet<()>,
) {
    if triggers.is_empty() {
        return parts.sensor_states.set(Sensor::Pressure, SensorState::Off);
    }
    let (count, mut opening) = (triggers.len(), Opening::default());
    for (trigger, file) in triggers {
        let Trigger { resource, kind, scope, .. } = trigger;
        parts.metrics.pressure.follows(resource.as_str(), kind.as_str(), scope.as_str());
        match file {
            Some(file) => opening.waiting.push((trigger, file)),
            None => opening.lacks.push(format!("{trigger}: only cgroup v2 has it")),
        }
    }
    opening.open_by(open, parts, Some(&wake), tasks);
    tracing::debug!(followed = opening.followed, count, "registered triggers of pressure");
    if !opening.waiting.is_empty() {
        let opening = opening.open_later_by(open, parts.clone(), wake.downgrade(), JoinSet::new());
        tasks.spawn(named("opening triggers of pressure", until(parts.shutdown.clone(), opening)));
    }
}

/// Triggers while they are registered.
#[derive(Default)]
struct Opening {
    /// Those that are not registered yet, with their files.
    waiting: Vec<(Trigger, PathBuf)>,
    /// What is not as it was configured, and will not be.
    lacks: Vec<String>,
    followed: usize,
}

impl Opening {
    /// Registers those that wait, follows them in `tasks`, and sets the state of the sensor.
    fn open_by(&mut self, open: Open, parts: &Parts, wake: Option<&mpsc::Sender<Instant>>, tasks: &mut JoinSet<()>) {
        let mut passing = Vec::new();
        for (trigger, file) in std::mem::take(&mut self.waiting) {
            match open(&file, &trigger) {
                Ok(opened) => {
                    self.followed += 1;
                    self.lacks.extend(opened.lack);
                    let wake = wake.filter(|_| trigger.resource == PressureResource::Memory).cloned();
                    let follower = Follower { wake, ..Follower::new(file, opened.trigger) };
                    let following = follower.follow(opened.psi, parts.clone());
                    tasks.spawn(named("trigger of pressure", until(parts.shutdown.clone(), following)));
                }
                Err(error) if is_shortage(&error) => {
                    passing.push(format!("{}: {error}", file.display()));
                    self.waiting.push((trigger, file));
                }
                Err(error) => self.lacks.push(format!("{}: {error}", file.display())),
            }
        }
        let reasons = [&self.lacks[..], &passing[..]].concat().join("; ");
        let state = match (reasons.is_empty(), self.followed) {
            (true, _) => SensorState::Up,
            (false, 0) => SensorState::Down(reasons),
            (false, _) => SensorState::Degraded(reasons),
        };
        parts.sensor_states.set(Sensor::Pressure, state);
    }

    /// Tries again until none waits, and ends with those in `following`, to which it adds. If no trigger of memory has been
    /// followed until then, `wake` is closed and stays so: what it wakes reads at intervals instead.
    async fn open_later_by(
        mut self,
        open: Open,
        parts: Parts,
        wake: mpsc::WeakSender<Instant>,
        mut following: JoinSet<()>,
    ) {
        let mut due = Instant::now() + OPEN_AGAIN;
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(due), if !self.waiting.is_empty() => {
                    self.open_by(open, &parts, wake.upgrade().as_ref(), &mut following);
                    due = Instant::now() + OPEN_AGAIN;
                }
                Some(ended) = following.join_next() => rethrow(ended),
                else => return,
            }
        }
    }
}

/// The panic of a follower, which ends the agent like that of one that was started at once.
fn rethrow(ended: Result<(), JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        resume_unwind(error.into_panic());
    }
}

/// Follows one trigger.
struct Follower {
    file: PathBuf,
    trigger: Trigger,
    /// For triggers of memory.
    wake: Option<mpsc::Sender<Instant>>,
    level: Level,
    /// Since the level of CPU pressure was entered: microseconds waited until then, and the throttling.
    before: Option<(u64, Throttled)>,
}

impl Follower {
    fn new(file: PathBuf, trigger: Trigger) -> Self {
        Self { file, trigger, wake: None, level: Level::default(), before: None }
    }

    async fn follow(mut self, psi: PsiTrigger, parts: Parts) {
        let mut due = Instant::now();
        loop {
            let fired = tokio::select! {
                fired = psi.exceeded() => Some(fired),
                () = tokio::time::sleep_until(due), if self.level.is_entered() => None,
            };
            match fired {
                Some(Ok(())) => {
                    // A full channel holds a notification that was not taken yet.
                    let _ = self.wake.as_ref().map(|wake| wake.try_send(Instant::now()));
                    if !self.fired(&parts).await {
                        continue;
                    }
                }
                Some(Err(error)) => {
                    let reason = format!("{}: {error}", self.file.display());
                    return parts.sensor_states.set(Sensor::Pressure, SensorState::Degraded(reason));
                }
                None => self.sample(&parts).await,
            }
            due = Instant::now() + self.trigger.window.max(SHORTEST_PAUSE);
        }
    }

    /// The trigger has fired. Returns true if the level is entered by that.
    async fn fired(&mut self, parts: &Parts) -> bool {
        if self.level.is_entered() {
            // No reading is needed to keep it.
            self.level.fired(Instant::now(), 0);
            return false;
        }
        let Some(total) = self.total().await else { return false };
        if self.level.fired(Instant::now(), total) == Some(Crossing::Entered) {
            self.report(parts, Crossing::Entered);
        }
        if self.trigger.resource == PressureResource::Cpu {
            self.before = Some((total, read_throttled(&parts.throttled).await));
        }
        true
    }

    async fn sample(&mut self, parts: &Parts) {
        // Without a reading tasks count as not waiting: the cgroup is gone.
        let total = self.total().await.unwrap_or(0);
        if let Some((before, throttled)) = self.before.take() {
            let waited = Duration::from_micros(total.saturating_sub(before));
            let pods = explained_by(waited, &throttled, &read_throttled(&parts.throttled).await);
            if !pods.is_empty() {
                parts.metrics.pressure.explained_by_limits(self.trigger.resource.as_str(), self.trigger.scope.as_str());
                tracing::info!(level = %self.trigger, pods = pods.join(" "), "CPU limits of pods explain the pressure");
            }
        }
        if let Some(crossing) = self.level.sampled(&self.trigger, Instant::now(), total) {
            self.report(parts, crossing);
        }
    }

    async fn total(&self) -> Option<u64> {
        let (file, kind) = (self.file.clone(), self.trigger.kind);
        let read = tokio::task::spawn_blocking(move || Pressure::try_read(&file)).await.ok()?.ok()?;
        Some(if kind == StallKind::Some { read.some.total } else { read.full.total })
    }

    fn report(&self, parts: &Parts, crossing: Crossing) {
        let Trigger { resource, kind, scope, .. } = self.trigger;
        let entered = crossing == Crossing::Entered;
        parts.metrics.pressure.crossed(resource.as_str(), kind.as_str(), scope.as_str(), entered);
        match crossing {
            Crossing::Entered => tracing::info!(level = %self.trigger, "pressure"),
            Crossing::Left(lasted) => tracing::info!(level = %self.trigger, ?lasted, "pressure has ended"),
        }
    }
}

async fn read_throttled(read: &ReadThrottled) -> Throttled {
    let read = read.clone();
    tokio::task::spawn_blocking(move || read()).await.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::pressure::PressureScope;
    use crate::config::pressure::PressureSettings;

    fn parts() -> Parts {
        let (throttled, shutdown): (ReadThrottled, _) = (Arc::new(Throttled::default), CancellationToken::new());
        Parts { sensor_states: SensorStates::default(), metrics: Metrics::new(), throttled, shutdown }
    }

    fn down(sensor_states: &SensorStates) -> String {
        match sensor_states.get(Sensor::Pressure) {
            Some(SensorState::Down(reason)) => reason,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn a_kernel_without_notifications_is_reported() {
        let (parts, (wake, mut woken)) = (parts(), mpsc::channel(1));
        let triggers = PressureSettings::default().triggers();
        let triggers = triggers.into_iter().map(|trigger| (trigger, Some("/no/such/file".into()))).collect();
        start(triggers, &parts, wake, &mut JoinSet::new());
        let reason = down(&parts.sensor_states);
        assert!(reason.starts_with("/no/such/file: "), "{reason}");
        assert_eq!(woken.recv().await, None, "nothing is followed");
    }

    #[tokio::test]
    async fn version_1_has_no_levels_of_classes() {
        let parts = parts();
        let trigger = Trigger { scope: PressureScope::Burstable, ..PressureSettings::default().triggers()[0] };
        start(vec![(trigger, None)], &parts, mpsc::channel(1).0, &mut JoinSet::new());
        assert_eq!(down(&parts.sensor_states), "memory some of burstable: only cgroup v2 has it");
        start(Vec::new(), &parts, mpsc::channel(1).0, &mut JoinSet::new());
        assert_eq!(parts.sensor_states.get(Sensor::Pressure), Some(SensorState::Off));
    }

    #[tokio::test(start_paused = true)]
    async fn a_trigger_that_could_not_be_registered_for_a_shortage_is_tried_again() {
        let (dir, parts) = (tempfile::tempdir().expect("a folder"), parts());
        let file = dir.path().join("memory");
        let open: Open = |file, trigger| match file.exists() {
            true => open(file, trigger),
            false => Err(nix::errno::Errno::EMFILE.into()),
        };
        let mut opening = Opening::default();
        opening.waiting.push((PressureSettings::default().triggers()[0], file.clone()));
        let (wake, mut woken) = mpsc::channel(1);
        opening.open_by(open, &parts, Some(&wake), &mut JoinSet::new());
        assert!(down(&parts.sensor_states).contains("(os error 24)"), "{}", down(&parts.sensor_states));
        let again = opening.open_later_by(open, parts.clone(), wake.downgrade(), JoinSet::new());
        drop(wake);
        assert_eq!(woken.recv().await, None, "nothing is followed");
        assert!(tokio::time::timeout(3 * OPEN_AGAIN, again).await.is_err(), "it waits as long as there is none");
        let mut opening = Opening::default();
        opening.waiting.push((PressureSettings::default().triggers()[0], file.clone()));
        let again = opening.open_later_by(open, parts.clone(), mpsc::channel(1).0.downgrade(), JoinSet::new());
        // A regular file cannot be waited for, which no later attempt changes.
        std::fs::write(&file, "").expect("written");
        tokio::time::timeout(2 * OPEN_AGAIN, again).await.expect("it was tried again");
        assert!(!down(&parts.sensor_states).contains("(os error 24)"), "{}", down(&parts.sensor_states));
    }

    /// The agent watches the task that registers triggers, and ends with its panic.
    #[tokio::test(start_paused = true)]
    #[should_panic(expected = "trigger of pressure: no level")]
    async fn a_panic_of_a_trigger_that_was_registered_later_is_not_swallowed() {
        let open: Open = |_, _| Err(nix::errno::Errno::EMFILE.into());
        let mut opening = Opening::default();
        opening.waiting.push((PressureSettings::default().triggers()[0], "/no/such/file".into()));
        let mut following = JoinSet::new();
        following.spawn(named("trigger of pressure", async { panic!("no level") }));
        opening.open_later_by(open, parts(), mpsc::channel(1).0.downgrade(), following).await;
    }

    fn total(file: &std::path::Path, total: u64) {
        std::fs::write(file, format!("some avg10=0.00 avg60=0.00 avg300=0.00 total={total}\n")).expect("written");
    }

    #[tokio::test(start_paused = true)]
    async fn cpu_pressure_that_comes_from_a_limit_is_recognised_and_not_reported() {
        let dir = tempfile::tempdir().expect("a folder");
        let file = dir.path().join("cpu");
        let (mut parts, (wake, mut woken)) = (parts(), mpsc::channel(1));
        let calls = Arc::new(std::sync::atomic::AtomicU64::new(0));
        parts.throttled = Arc::new(move || {
            let call = calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            [("ns/limited".to_owned(), Duration::from_secs(call * 2))].into()
        });
        let trigger = PressureSettings::default().triggers()[3];
        start(vec![(trigger, Some(file.clone()))], &parts, wake, &mut JoinSet::new());
        let text = parts.metrics.render().expect("metrics");
        for line in [
            "keblet_pressure_own_limit_total{resource=\"cpu\",scope=\"node\"} 0",
            "keblet_pressure_crossings_total{direction=\"entered\",kind=\"some\",resource=\"cpu\",scope=\"node\"} 0",
            "keblet_pressure_crossings_total{direction=\"left\",kind=\"some\",resource=\"cpu\",scope=\"node\"} 0",
        ] {
            assert!(text.lines().any(|found| found == line), "an increase sees the first crossing: {line}\n{text}");
        }
        let mut follower = Follower::new(file.clone(), trigger);
        total(&file, 5_000_000);
        assert!(follower.fired(&parts).await);
        assert!(!follower.fired(&parts).await, "it is entered already");
        tokio::time::advance(Duration::from_secs(2)).await;
        total(&file, 6_900_000);
        follower.sample(&parts).await;
        for _ in 0..10 {
            tokio::time::advance(Duration::from_secs(2)).await;
            follower.sample(&parts).await;
        }
        let text = parts.metrics.render().expect("metrics");
        for line in [
            "keblet_pressure_own_limit_total{resource=\"cpu\",scope=\"node\"} 1",
            "keblet_pressure_crossings_total{direction=\"entered\",kind=\"some\",resource=\"cpu\",scope=\"node\"} 1",
            "keblet_pressure_crossings_total{direction=\"left\",kind=\"some\",resource=\"cpu\",scope=\"node\"} 1",
            "keblet_pressure_level{kind=\"some\",resource=\"cpu\",scope=\"node\"} 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        assert_eq!(woken.recv().await, None, "levels of CPU have no sender");
    }
}
