//! Which values are acceptable: the rules of 1.36, those it applies while starting included.
//!
//! Pure functions from a document to all its problems. Checks that depend on the machine are in [`super::Settings`].

mod cluster;
mod limits;
mod pressure;
mod resources;
mod server;

use std::fmt::Display;
use std::ops::RangeInclusive;

use super::document::Problem;
use super::feature_gates::Feature;
use super::feature_gates::FeatureGates;
use super::flags::FlagSettings;
use super::keblet::KebletConfiguration;
use super::kubelet::KubeletConfiguration;

pub use resources::parse_cpus;
pub use server::CIPHER_SUITES;

/// Collects what is wrong.
#[derive(Debug, Default)]
struct Problems(Vec<Problem>);

impl Problems {
    fn add(&mut self, field: impl Into<String>, message: impl Into<String>) {
        self.0.push(Problem { field: field.into(), message: message.into() });
    }

    fn require(&mut self, holds: bool, field: &str, message: impl FnOnce() -> String) {
        if !holds {
            self.add(field, message());
        }
    }

    fn range<T: PartialOrd + Display>(&mut self, field: &str, value: T, range: RangeInclusive<T>) {
        self.require(range.contains(&value), field, || {
            format!("{value} is out of range; expected {} to {}", range.start(), range.end())
        });
    }

    fn at_least<T: PartialOrd + Display>(&mut self, field: &str, value: T, least: T) {
        self.require(value >= least, field, || format!("{value} is too small; expected at least {least}"));
    }

    fn one_of(&mut self, field: &str, value: &str, allowed: &[&str]) {
        self.require(allowed.contains(&value), field, || {
            let allowed: Vec<_> = allowed.iter().map(|word| if word.is_empty() { "\"\"" } else { word }).collect();
            format!("{value:?} is not one of {}", allowed.join(", "))
        });
    }

    /// A setting that only counts while its gate is on.
    fn gated(&mut self, used: bool, field: &str, gates: &FeatureGates, gate: Feature) {
        self.require(!used || gates.enabled(gate), field, || format!("needs the feature gate {gate}, which is off"));
    }
}

/// Everything that is wrong with the standard document.
pub(super) fn kubelet(config: &KubeletConfiguration, gates: &FeatureGates) -> Vec<Problem> {
    let mut problems = Problems::default();
    server::check(config, gates, &mut problems);
    cluster::check(config, gates, &mut problems);
    resources::check(config, gates, &mut problems);
    limits::check(config, gates, &mut problems);
    problems.0
}

/// Everything that is wrong with keblet's own document.
pub(super) fn keblet(config: &KebletConfiguration) -> Vec<Problem> {
    let mut problems = Problems::default();
    let periods = [
        ("relist.period", Some(config.relist.period)),
        ("relist.degradedPeriod", Some(config.relist.degraded_period)),
        ("relist.fixedPeriod", config.relist.fixed_period),
    ];
    let shortest = super::duration::GoDuration::millis(100);
    for (field, period) in periods {
        if let Some(period) = period {
            problems.at_least(field, period, shortest);
        }
    }
    let relist = &config.relist;
    problems.require(relist.degraded_period <= relist.period, "relist.degradedPeriod", || {
        format!("{} is longer than relist.period ({})", relist.degraded_period, relist.period)
    });
    pressure::check(&config.pressure, &mut problems);
    problems.0
}

/// Everything that is wrong with flag-only settings.
pub(super) fn flags(flags: &FlagSettings) -> Vec<Problem> {
    let mut problems = Problems::default();
    cluster::check_flags(flags, &mut problems);
    problems.0
}

#[cfg(test)]
mod tests;
