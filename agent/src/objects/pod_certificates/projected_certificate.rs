//! What is held for one source of one volume: the present certificate, and the request for the next. Pure: time and jitter
//! are arguments.

use std::time::Duration;
use std::time::SystemTime;

use secrecy::SecretString;

use super::PodCertificate;
use super::tracker::Issued;
use super::tracker::Refusal;
use crate::model::Backoff;
use crate::objects::ObjectError;

/// Spreads the replacement of certificates that were issued together.
pub(super) const MAX_JITTER_SECONDS: u64 = 5 * 60;
/// How long after the signer's moment a certificate that was not replaced is reported.
const OVERDUE: Duration = Duration::from_secs(10 * 60);
/// Pauses after a request for a successor could not be made.
const FIRST_RETRY: Duration = Duration::from_secs(30);
const LAST_RETRY: Duration = Duration::from_secs(5 * 60);

/// A request that was not answered yet.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) namespace: String,
    pub(super) name: String,
    /// The key that it is for.
    pub(super) key: SecretString,
}

/// A certificate that was issued.
#[derive(Debug)]
pub(super) struct Current {
    key: SecretString,
    chain: String,
    /// When a successor is requested.
    renew_at: Option<SystemTime>,
    /// When a request that failed is made again.
    retry_at: Option<SystemTime>,
    /// When it should have been replaced.
    overdue_at: Option<SystemTime>,
    expires_at: Option<SystemTime>,
    /// Up to when these moments were reported.
    reported: SystemTime,
}

impl Current {
    /// When a successor is requested. A pause that is longer than [`LAST_RETRY`] comes from a clock that was set back, and
    /// does not count.
    fn due_at(&self, now: SystemTime) -> Option<SystemTime> {
        self.retry_at.filter(|at| *at <= now + LAST_RETRY).or(self.renew_at)
    }
}

/// What metrics show of the certificate of one source of one volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Standing {
    /// None was issued yet.
    #[default]
    NotIssued,
    /// The signer will not issue one, or no successor: upstream's `state`.
    Refused(&'static str),
    /// The moments at which the certificate should have been replaced, and expires.
    Issued { overdue_at: Option<SystemTime>, expires_at: Option<SystemTime> },
}

impl Standing {
    /// Upstream's `state`.
    pub(super) fn state(self, now: SystemTime) -> &'static str {
        let is_over = |end: Option<SystemTime>| end.is_some_and(|end| end <= now);
        match self {
            Self::NotIssued => "not_yet_issued",
            Self::Refused(state) => state,
            Self::Issued { expires_at, .. } if is_over(expires_at) => "expired",
            Self::Issued { overdue_at, .. } if is_over(overdue_at) => "overdue_for_refresh",
            Self::Issued { .. } => "fresh",
        }
    }
}

/// The certificate of one source of one volume.
#[derive(Debug)]
pub(super) struct ProjectedCertificate {
    pub(super) current: Option<Current>,
    pub(super) pending: Option<Pending>,
    refusal: Option<Refusal>,
    backoff: Backoff,
}

impl Default for ProjectedCertificate {
    fn default() -> Self {
        Self { current: None, pending: None, refusal: None, backoff: Backoff::new(FIRST_RETRY, LAST_RETRY) }
    }
}

impl ProjectedCertificate {
    /// True if a certificate is to be requested now.
    pub(super) fn is_due(&self, now: SystemTime) -> bool {
        let wanted = self.current.as_ref().is_none_or(|current| current.due_at(now).is_some_and(|at| at <= now));
        wanted && self.pending.is_none() && self.refusal.is_none()
    }

    pub(super) fn requested(&mut self, pending: Pending) {
        self.pending = Some(pending);
        self.backoff.succeeded();
    }

    /// A successor could not be requested.
    pub(super) fn request_failed(&mut self, now: SystemTime) {
        let pause = self.backoff.failed(0.0);
        if let Some(current) = &mut self.current {
            current.retry_at = Some(now + pause);
        }
    }

    /// The pending request was answered with a certificate.
    pub(super) fn issued(&mut self, issued: &Issued, jitter: Duration) {
        let Some(pending) = self.pending.take() else { return };
        self.current = Some(Current {
            key: pending.key,
            chain: issued.chain.clone(),
            renew_at: issued.begin_refresh_at.map(|at| at + jitter),
            retry_at: None,
            overdue_at: issued.begin_refresh_at.map(|at| at + OVERDUE),
            expires_at: issued.not_after,
            reported: SystemTime::UNIX_EPOCH,
        });
    }

    /// The signer will not issue a certificate.
    pub(super) fn refused(&mut self, refusal: Refusal) {
        self.pending = None;
        self.refusal = Some(refusal);
    }

    /// What is to be reported now, once: reason and message.
    pub(super) fn notices(&mut self, now: SystemTime) -> Vec<(&'static str, &'static str)> {
        let Some(current) = &mut self.current else { return Vec::new() };
        let passed = |at: Option<SystemTime>| at.filter(|at| (current.reported < *at) && (*at <= now));
        let (overdue, expired) = (passed(current.overdue_at), passed(current.expires_at));
        current.reported = current.reported.max(now);
        let overdue = overdue.map(|_| ("CertificateOverdueForRefresh", "PodCertificate refresh overdue"));
        overdue.into_iter().chain(expired.map(|_| ("CertificateExpired", "PodCertificate expired"))).collect()
    }

    pub(super) fn standing(&self) -> Standing {
        match (&self.refusal, &self.current) {
            (Some(refusal), _) => Standing::Refused(refusal.state()),
            (None, Some(Current { overdue_at, expires_at, .. })) => {
                Standing::Issued { overdue_at: *overdue_at, expires_at: *expires_at }
            }
            (None, None) => Standing::NotIssued,
        }
    }

    /// The present certificate.
    ///
    /// # Errors
    /// There is none, or not yet.
    pub(super) fn answer(&self, now: SystemTime) -> Result<PodCertificate, ObjectError> {
        let Some(current) = &self.current else {
            return Err(match &self.refusal {
                Some(refusal) => refusal.clone().into(),
                None => ObjectError::NotIssued,
            });
        };
        // The answer to a pending request wakes the pod by itself.
        let due_at = current.due_at(now).filter(|_| self.pending.is_none() && self.refusal.is_none());
        let reports = [current.overdue_at, current.expires_at].into_iter().flatten();
        let to_come = reports.filter(|at| *at > current.reported);
        let refresh_at = to_come.chain(due_at).min().map(|at| at.max(now));
        Ok(PodCertificate { key: current.key.clone(), chain: current.chain.clone(), refresh_at })
    }
}

#[cfg(test)]
mod tests {
    use secrecy::ExposeSecret as _;

    use super::*;

    fn at(minutes: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(minutes * 60)
    }

    fn pending(name: &str) -> Pending {
        Pending { namespace: "ns".to_owned(), name: name.to_owned(), key: format!("key of {name}").into() }
    }

    fn issued(begin: u64, end: u64) -> Issued {
        Issued { chain: "chain".to_owned(), begin_refresh_at: Some(at(begin)), not_after: Some(at(end)) }
    }

    fn shown(held: &ProjectedCertificate, minute: u64) -> Result<(String, Option<SystemTime>), ObjectError> {
        held.answer(at(minute)).map(|found| (found.key.expose_secret().to_owned(), found.refresh_at))
    }

    #[test]
    fn a_certificate_is_served_until_its_successor_is_issued() {
        let mut held = ProjectedCertificate::default();
        assert!(held.is_due(at(0)));
        held.requested(pending("one"));
        assert!(!held.is_due(at(0)), "one request at a time");
        assert_eq!(shown(&held, 0), Err(ObjectError::NotIssued));
        held.issued(&issued(30, 60), Duration::from_secs(60));
        assert_eq!(shown(&held, 0), Ok(("key of one".to_owned(), Some(at(31)))));
        assert!(!held.is_due(at(30)) && held.is_due(at(31)));

        held.request_failed(at(31));
        assert!(!held.is_due(at(31)) && held.is_due(at(32)), "later");
        held.requested(pending("two"));
        assert_eq!(shown(&held, 32), Ok(("key of one".to_owned(), Some(at(40)))), "until it is overdue");
        held.issued(&issued(70, 90), Duration::ZERO);
        assert_eq!(shown(&held, 33), Ok(("key of two".to_owned(), Some(at(70)))));
    }

    #[test]
    fn a_clock_that_is_set_back_does_not_put_off_a_request() {
        let mut held = ProjectedCertificate::default();
        held.requested(pending("one"));
        held.issued(&issued(30, 60), Duration::ZERO);
        held.request_failed(at(150));
        assert!(!held.is_due(at(29)) && held.is_due(at(30)));
        assert_eq!(shown(&held, 29), Ok(("key of one".to_owned(), Some(at(30)))));
    }

    #[test]
    fn what_is_late_is_reported_once() {
        let mut held = ProjectedCertificate::default();
        held.requested(pending("one"));
        held.issued(&issued(30, 60), Duration::ZERO);
        held.requested(pending("two"));
        assert_eq!(held.notices(at(39)), []);
        assert_eq!(held.notices(at(40)), [("CertificateOverdueForRefresh", "PodCertificate refresh overdue")]);
        assert_eq!(shown(&held, 40), Ok(("key of one".to_owned(), Some(at(60)))));
        assert_eq!(held.notices(at(60)), [("CertificateExpired", "PodCertificate expired")]);
        assert_eq!(held.notices(at(61)), []);
        assert_eq!(shown(&held, 61), Ok(("key of one".to_owned(), None)), "there is no better one");
    }

    #[test]
    fn metrics_show_what_has_become_of_it() {
        let state = |held: &ProjectedCertificate, minute: u64| held.standing().state(at(minute));
        let mut held = ProjectedCertificate::default();
        assert_eq!(state(&held, 0), "not_yet_issued");
        held.requested(pending("one"));
        assert_eq!(state(&held, 99), "not_yet_issued");
        held.issued(&issued(30, 60), Duration::ZERO);
        held.notices(at(70));
        let states = [0, 39, 40, 59, 60, 99].map(|minute| state(&held, minute));
        assert_eq!(states, ["fresh", "fresh", "overdue_for_refresh", "overdue_for_refresh", "expired", "expired"]);
        held.requested(pending("two"));
        assert_eq!(state(&held, 40), "overdue_for_refresh", "until it is replaced");
        held.issued(&issued(70, 90), Duration::ZERO);
        assert_eq!(state(&held, 40), "fresh");
        for (verdict, shown) in [("Denied", "denied"), ("Failed", "failed")] {
            held.requested(pending("three"));
            held.refused(Refusal { verdict, reason: String::new(), message: String::new() });
            assert_eq!(state(&held, 40), shown, "as upstream, also while a certificate is valid");
        }
    }

    #[test]
    fn a_refusal_is_final() {
        let refusal = || Refusal { verdict: "Denied", reason: "No".to_owned(), message: "never".to_owned() };
        let mut held = ProjectedCertificate::default();
        held.requested(pending("one"));
        held.refused(refusal());
        assert!(!held.is_due(at(99)));
        let error = shown(&held, 0).expect_err("refused").to_string();
        assert_eq!(error, "PodCertificateRequest was permanently denied: reason=\"No\" message=\"never\"");

        let mut held = ProjectedCertificate::default();
        held.requested(pending("one"));
        held.issued(&issued(30, 60), Duration::ZERO);
        held.requested(pending("two"));
        held.refused(refusal());
        assert!(!held.is_due(at(59)));
        assert_eq!(shown(&held, 31), Ok(("key of one".to_owned(), Some(at(40)))), "a valid one is not taken away");
    }
}
