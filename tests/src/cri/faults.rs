//! Fault injection: rules for calls, and probabilities for events.
//!
//! Only selects faults; `engine` applies them. Every draw comes from the simulation's seeded generator.

use std::time::Duration;

use tonic::Code;

use super::method::Method;

/// How a call fails.
#[derive(Clone, Debug, PartialEq)]
pub enum FaultKind {
    /// The work starts after this delay.
    Slow(Duration),
    /// The work is done in time, but the response is delayed by this time and then outdated.
    LateAnswer(Duration),
    /// Neither takes effect nor responds.
    Hang,
    /// Takes effect, never responds.
    HangAfter,
    /// Fails without effect.
    Fail(Code, String),
    /// Takes effect and fails.
    FailAfter(Code, String),
}

/// One rule: the calls it applies to, and how they fail.
#[derive(Clone, Debug)]
pub struct CallFault {
    method: Option<Method>,
    object: String,
    probability: f64,
    times: Option<u32>,
    kind: FaultKind,
}

impl CallFault {
    /// Every call of `method` fails this way.
    pub fn on(method: Method, kind: FaultKind) -> Self {
        Self { method: Some(method), object: String::new(), probability: 1.0, times: None, kind }
    }

    /// Every call of any method fails this way.
    pub fn on_all(kind: FaultKind) -> Self {
        Self { method: None, object: String::new(), probability: 1.0, times: None, kind }
    }

    /// Restricts the rule to calls on objects whose name contains this text: a container is
    /// `NAME_POD_NAMESPACE_UID_ATTEMPT`, a sandbox `POD_NAMESPACE_UID_ATTEMPT`, a list the pod UID in its filter.
    pub fn about(self, object: &str) -> Self {
        Self { object: object.to_owned(), ..self }
    }

    /// Restricts the rule to this share of the calls.
    pub fn with_probability(self, probability: f64) -> Self {
        Self { probability, ..self }
    }

    /// Restricts the rule to the next `times` calls.
    pub fn times(self, times: u32) -> Self {
        Self { times: Some(times), ..self }
    }

    fn applies(&self, method: Method, object: &str, rng: &mut fastrand::Rng) -> bool {
        self.times != Some(0)
            && self.method.is_none_or(|only| only == method)
            && object.contains(&self.object)
            && (self.probability >= 1.0 || rng.f64() < self.probability)
    }
}

/// Probabilities of event faults between the runtime and its reader.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EventFaults {
    /// Never delivered.
    pub lost: f64,
    /// Delivered up to `late_by` later, so after other events.
    pub late: f64,
    /// Longest delay of a late event.
    pub late_by: Duration,
    /// Delivered twice.
    pub doubled: f64,
    /// Delivered after its successor.
    pub swapped: f64,
    /// Without container statuses.
    pub bare: f64,
    /// Without sandbox status.
    pub anonymous: f64,
    /// The snapshot was taken, another event overtook it, and only then it was stamped.
    pub stale: f64,
    /// Delay between snapshot and timestamp of a stale event.
    pub stale_by: Duration,
    /// Timestamp in a wrong unit: seconds or microseconds instead of nanoseconds, or nanoseconds taken for seconds.
    pub misdated: f64,
}

/// Faults applied to one event.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct EventOutcome {
    /// Never delivered.
    pub lost: bool,
    /// Delivered this much later than it was stamped.
    pub late: Duration,
    /// Delivered twice.
    pub doubled: bool,
    /// Delivered after its successor.
    pub swapped: bool,
    /// Without container statuses.
    pub bare: bool,
    /// Without sandbox status.
    pub anonymous: bool,
    /// Stamped (and sent) this much later than its snapshot was taken.
    pub stale: Duration,
    /// Unit of the timestamp, as a power of a thousand relative to nanoseconds.
    pub unit: i8,
}

impl EventOutcome {
    /// The event's timestamp with the fault applied.
    pub(super) fn stamp(&self, nanos: i64) -> i64 {
        let factor = 1000_i64.pow(u32::from(self.unit.unsigned_abs()));
        if self.unit < 0 { nanos / factor } else { nanos.saturating_mul(factor) }
    }
}

/// All active rules.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    calls: Vec<CallFault>,
    /// Faults of events.
    pub events: EventFaults,
}

impl Faults {
    /// Adds a rule; the newest matching one applies.
    pub fn add(&mut self, fault: CallFault) {
        self.calls.push(fault);
    }

    /// Removes all faults. Calls that hang keep hanging.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    pub(super) fn draw_call(&mut self, method: Method, object: &str, rng: &mut fastrand::Rng) -> Option<FaultKind> {
        let rule = self.calls.iter_mut().rev().find(|rule| rule.applies(method, object, rng))?;
        if let Some(times) = &mut rule.times {
            *times -= 1;
        }
        Some(rule.kind.clone())
    }

    pub(super) fn draw_event(&self, rng: &mut fastrand::Rng) -> EventOutcome {
        let faults = &self.events;
        if *faults == EventFaults::default() {
            return EventOutcome::default();
        }
        let happens = |rng: &mut fastrand::Rng, probability: f64| probability > 0.0 && rng.f64() < probability;
        let (lost, late, doubled) =
            (happens(rng, faults.lost), happens(rng, faults.late), happens(rng, faults.doubled));
        let (swapped, bare, anonymous) =
            (happens(rng, faults.swapped), happens(rng, faults.bare), happens(rng, faults.anonymous));
        let stale = if happens(rng, faults.stale) { faults.stale_by } else { Duration::ZERO };
        let late = if late { faults.late_by.mul_f64(rng.f64()) } else { Duration::ZERO };
        let unit = if happens(rng, faults.misdated) { [-3, -1, 3][rng.usize(..3)] } else { 0 };
        EventOutcome { lost, late, doubled, swapped, bare, anonymous, stale, unit }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_match_by_method_object_and_count() {
        let mut rng = fastrand::Rng::with_seed(1);
        let mut faults = Faults::default();
        faults.add(CallFault::on(Method::StartContainer, FaultKind::Hang).about("main_web_").times(1));
        assert_eq!(faults.draw_call(Method::StartContainer, "side_web_default_u_0", &mut rng), None);
        assert_eq!(faults.draw_call(Method::StopContainer, "main_web_default_u_0", &mut rng), None);
        assert_eq!(faults.draw_call(Method::StartContainer, "main_web_default_u_0", &mut rng), Some(FaultKind::Hang));
        assert_eq!(faults.draw_call(Method::StartContainer, "main_web_default_u_0", &mut rng), None);
    }

    #[test]
    fn fault_probabilities_follow_the_seed() {
        let share = |seed| {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut faults = Faults::default();
            faults.add(CallFault::on_all(FaultKind::Hang).with_probability(0.25));
            (0..1000).filter(|_| faults.draw_call(Method::Version, "", &mut rng).is_some()).count()
        };
        assert!((200..300).contains(&share(7)), "{}", share(7));
        assert_eq!(share(7), share(7));
    }

    #[test]
    fn events_are_unchanged_without_faults() {
        let mut rng = fastrand::Rng::with_seed(1);
        assert_eq!(Faults::default().draw_event(&mut rng), EventOutcome::default());
    }
}
