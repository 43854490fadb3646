//! OOM kills and what follows from them. Kills are counted from zero on for every combination of labels: a query for an
//! increase does not see the first value of a series.

use prometheus::IntCounterVec;

use super::register::Register;
use crate::model::OomConfidence;
use crate::model::OomScope;
use crate::model::OomVictim;

/// Reasons of exits that are replaced, and by which: those of ordinary exits and of OOM kills.
const CORRECTIONS: &[(&str, &str)] = &[
    ("OOMKilled", "Completed"),
    ("OOMKilled", "Error"),
    ("", "OOMKilled"),
    ("Completed", "OOMKilled"),
    ("Error", "OOMKilled"),
];

/// OOM kills.
#[derive(Debug)]
pub struct Oom {
    kills: IntCounterVec,
    corrected: IntCounterVec,
}

impl Oom {
    pub(super) fn new(register: &Register<'_>) -> Self {
        let oom = Self {
            kills: register.counters(
                "keblet_oom_kills_total",
                "Processes killed by the OOM killer, by whose memory was exhausted, what the process was to its container, \
                 and the evidence.",
                &["scope", "victim", "confidence"],
            ),
            corrected: register.counters(
                "keblet_oom_reasons_corrected_total",
                "Reasons of container exits that the runtime reported wrongly and that were corrected by OOM verdicts.",
                &["from", "to"],
            ),
        };
        for scope in OomScope::ALL {
            for victim in OomVictim::ALL {
                OomConfidence::ALL.iter().for_each(|confidence| oom.add(*scope, *victim, *confidence, 0));
            }
        }
        for (from, to) in CORRECTIONS {
            oom.corrected.with_label_values(&[*from, *to]).inc_by(0);
        }
        oom
    }

    /// A process was killed.
    pub fn kill(&self, scope: OomScope, victim: OomVictim, confidence: OomConfidence) {
        self.add(scope, victim, confidence, 1);
    }

    fn add(&self, scope: OomScope, victim: OomVictim, confidence: OomConfidence, kills: u64) {
        self.kills.with_label_values(&[scope.as_str(), victim.as_str(), confidence.as_str()]).inc_by(kills);
    }

    /// The runtime's reason of an exit was replaced. Only the reasons of ordinary exits and of OOM kills occur.
    pub fn corrected(&self, from: &str, to: &str) {
        self.corrected.with_label_values(&[from, to]).inc();
    }
}
