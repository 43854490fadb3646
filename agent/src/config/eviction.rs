//! The grammar of eviction thresholds: `evictionHard`, `evictionSoft`, `evictionSoftGracePeriod` and
//! `evictionMinimumReclaim`. Pure.

use std::fmt;
use std::time::Duration;

use super::duration::GoDuration;
use super::kubelet::KubeletConfiguration;
use super::kubelet::StringMap;
use crate::model::Amount;

/// What is measured of the node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub enum Signal {
    /// Memory that the machine has left.
    MemoryAvailable,
    /// Memory that pods have left below the limit of their cgroup.
    AllocatableMemoryAvailable,
    /// Bytes left on the file system of the agent's root directory.
    NodeFsAvailable,
    /// Inodes left there.
    NodeFsInodesFree,
    /// Bytes left on the file system of the images.
    ImageFsAvailable,
    /// Inodes left there.
    ImageFsInodesFree,
    /// Bytes left on the file system of writable layers.
    ContainerFsAvailable,
    /// Inodes left there.
    ContainerFsInodesFree,
    /// Process ids left.
    PidAvailable,
}

impl Signal {
    /// All signals, memory first.
    pub const ALL: [Self; 9] = [
        Self::MemoryAvailable,
        Self::AllocatableMemoryAvailable,
        Self::NodeFsAvailable,
        Self::NodeFsInodesFree,
        Self::ImageFsAvailable,
        Self::ImageFsInodesFree,
        Self::ContainerFsAvailable,
        Self::ContainerFsInodesFree,
        Self::PidAvailable,
    ];

    /// Its name in the configuration and in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::MemoryAvailable => "memory.available",
            Self::AllocatableMemoryAvailable => "allocatableMemory.available",
            Self::NodeFsAvailable => "nodefs.available",
            Self::NodeFsInodesFree => "nodefs.inodesFree",
            Self::ImageFsAvailable => "imagefs.available",
            Self::ImageFsInodesFree => "imagefs.inodesFree",
            Self::ContainerFsAvailable => "containerfs.available",
            Self::ContainerFsInodesFree => "containerfs.inodesFree",
            Self::PidAvailable => "pid.available",
        }
    }

    /// The signal of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|signal| signal.as_str() == name)
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// An amount, or a share of the capacity.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum ThresholdValue {
    /// An absolute amount.
    Amount(Amount),
    /// A share of the capacity, 0.1 for 10 %.
    Share(f32),
}

impl ThresholdValue {
    /// The amount for something of this capacity.
    pub fn of(self, capacity: Amount) -> Amount {
        match self {
            Self::Amount(amount) => amount,
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_precision_loss,
                reason = "cut to whole bytes, as upstream cuts it"
            )]
            Self::Share(share) => Amount::bytes((capacity.value() as f64 * f64::from(share)) as i64),
        }
    }

    /// True if both are of one kind and this one is less; amounts and shares cannot be compared without the capacity.
    fn is_below(self, other: Self) -> bool {
        match (self, other) {
            (Self::Amount(own), Self::Amount(other)) => own < other,
            (Self::Share(own), Self::Share(other)) => own < other,
            _ => false,
        }
    }
}

/// A text that is no threshold.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ThresholdError {
    /// Neither a quantity nor a percentage.
    #[error("{0}")]
    Malformed(String),
    /// An amount of zero or less.
    #[error("eviction threshold {signal} must be positive: {text}")]
    NotPositive {
        /// The signal.
        signal: String,
        /// The value.
        text: String,
    },
    /// A percentage out of range.
    #[error("eviction percentage threshold {signal} must be {bound}: {text}")]
    OutOfRange {
        /// The signal.
        signal: String,
        /// The bound.
        bound: &'static str,
        /// The value.
        text: String,
    },
    /// A minimum reclaim of less than nothing.
    #[error("negative eviction minimum reclaim specified for {signal}")]
    NegativeReclaim {
        /// The signal.
        signal: String,
    },
    /// A minimum reclaim of no percent or less.
    #[error("eviction percentage minimum reclaim {signal} must be positive: {text}")]
    ReclaimNotPositive {
        /// The signal.
        signal: String,
        /// The value.
        text: String,
    },
}

/// `15%` as 15; `None` for a quantity.
fn percent(text: &str) -> Option<Result<f32, ThresholdError>> {
    let number = text.strip_suffix('%')?;
    let percent = number.parse().ok().filter(|percent: &f32| percent.is_finite());
    Some(percent.ok_or_else(|| ThresholdError::Malformed(format!("{text:?} is not a percentage"))))
}

fn amount(text: &str) -> Result<Amount, ThresholdError> {
    text.parse().map_err(|error: crate::model::QuantityError| ThresholdError::Malformed(error.to_string()))
}

/// The value of an entry of `evictionHard` or `evictionSoft`; `None` for `0%` and `100%`, which disable the entry.
///
/// # Errors
/// The text is neither a positive quantity nor a percentage from 0 to 100.
pub fn threshold_value(signal: &str, text: &str) -> Result<Option<ThresholdValue>, ThresholdError> {
    let out_of_range =
        |bound| Err(ThresholdError::OutOfRange { signal: signal.to_owned(), bound, text: text.to_owned() });
    match percent(text).transpose()? {
        Some(percent) if percent < 0.0 => out_of_range(">= 0%"),
        Some(percent) if percent > 100.0 => out_of_range("<= 100%"),
        Some(percent) if percent == 0.0 || percent == 100.0 => Ok(None),
        Some(percent) => Ok(Some(ThresholdValue::Share(percent / 100.0))),
        None => match amount(text)? {
            amount if amount.is_positive() => Ok(Some(ThresholdValue::Amount(amount))),
            _ => Err(ThresholdError::NotPositive { signal: signal.to_owned(), text: text.to_owned() }),
        },
    }
}

/// The value of an entry of `evictionMinimumReclaim`.
///
/// # Errors
/// The text is neither a quantity of at least zero nor a percentage above zero.
pub fn minimum_reclaim(signal: &str, text: &str) -> Result<ThresholdValue, ThresholdError> {
    match percent(text).transpose()? {
        Some(percent) if percent > 0.0 => Ok(ThresholdValue::Share(percent / 100.0)),
        Some(_) => Err(ThresholdError::ReclaimNotPositive { signal: signal.to_owned(), text: text.to_owned() }),
        None => match amount(text)? {
            amount if amount.is_negative() => Err(ThresholdError::NegativeReclaim { signal: signal.to_owned() }),
            amount => Ok(ThresholdValue::Amount(amount)),
        },
    }
}

/// When pods are evicted for a signal.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Threshold {
    /// What is measured.
    pub signal: Signal,
    /// The threshold is met below this.
    pub value: ThresholdValue,
    /// How long it must be met; zero for a hard threshold.
    pub grace: Duration,
    /// How much above the threshold the signal must rise, once pods are evicted for it.
    pub min_reclaim: Option<ThresholdValue>,
}

impl Threshold {
    /// Acts at once, and pods get no time to end.
    pub fn is_hard(&self) -> bool {
        self.grace.is_zero()
    }
}

/// All thresholds of a valid configuration, by signal, hard ones first. With `pods` among `enforceNodeAllocatable` hard
/// thresholds of the machine's memory hold for the pods' memory too, unless `ignore_allocatable`.
pub fn thresholds(kubelet: &KubeletConfiguration, ignore_allocatable: bool) -> Vec<Threshold> {
    let all = [(&kubelet.eviction_hard, true), (&kubelet.eviction_soft, false)];
    let mut found: Vec<Threshold> = all.into_iter().flat_map(|(map, hard)| of_map(kubelet, map, hard)).collect();
    let enforces_pods = kubelet.enforce_node_allocatable.iter().any(|class| class == "pods");
    if enforces_pods && !ignore_allocatable {
        let of_machine = found.iter().filter(|threshold| threshold.signal == Signal::MemoryAvailable);
        let of_pods: Vec<Threshold> = of_machine
            .filter(|threshold| threshold.is_hard())
            .map(|threshold| Threshold { signal: Signal::AllocatableMemoryAvailable, ..*threshold })
            .collect();
        found.extend(of_pods);
    }
    found.sort_by_key(|threshold| (threshold.signal, threshold.grace));
    found
}

fn of_map<'a>(
    kubelet: &'a KubeletConfiguration,
    map: &'a StringMap,
    hard: bool,
) -> impl Iterator<Item = Threshold> + 'a {
    map.iter().filter_map(move |(name, text)| {
        let grace = kubelet.eviction_soft_grace_period.get(name).filter(|_| !hard);
        let reclaim = kubelet.eviction_minimum_reclaim.get(name);
        Some(Threshold {
            signal: Signal::named(name)?,
            value: threshold_value(name, text).ok()??,
            grace: grace.and_then(|text| text.parse::<GoDuration>().ok()).map_or(Duration::ZERO, GoDuration::std),
            min_reclaim: reclaim.and_then(|text| minimum_reclaim(name, text).ok()),
        })
    })
}

/// Signals whose soft threshold is below the hard one, which evicts before any grace period could begin.
pub(super) fn contradictions(kubelet: &KubeletConfiguration) -> Vec<&str> {
    let value = |map: &StringMap, name: &str| threshold_value(name, map.get(name)?).ok().flatten();
    let is_below = |name: &&String| {
        let (soft, hard) = (value(&kubelet.eviction_soft, name), value(&kubelet.eviction_hard, name));
        soft.zip(hard).is_some_and(|(soft, hard)| soft.is_below(hard))
    };
    kubelet.eviction_soft.keys().filter(is_below).map(String::as_str).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn config(fields: serde_json::Value) -> KubeletConfiguration {
        serde_json::from_value(fields).expect("a configuration")
    }

    #[test]
    fn values_are_quantities_or_percentages() {
        let amount = |text: &str| Ok(Some(ThresholdValue::Amount(text.parse().expect("a quantity"))));
        for (text, expected) in [
            ("100Mi", amount("100Mi")),
            ("1.5Gi", amount("1536Mi")),
            ("1e3", amount("1000")),
            ("10%", Ok(Some(ThresholdValue::Share(0.1)))),
            ("0.5%", Ok(Some(ThresholdValue::Share(0.005)))),
            ("0%", Ok(None)),
            ("100%", Ok(None)),
        ] {
            assert_eq!(threshold_value("memory.available", text), expected, "{text}");
        }
        for (text, message) in [
            ("", "\"\" is not a quantity"),
            ("%", "\"%\" is not a percentage"),
            ("nan%", "\"nan%\" is not a percentage"),
            ("10 %", "\"10 %\" is not a percentage"),
            ("1e99%", "\"1e99%\" is not a percentage"),
            ("<5%", "\"<5%\" is not a percentage"),
            ("0", "eviction threshold memory.available must be positive: 0"),
            ("-1Gi", "eviction threshold memory.available must be positive: -1Gi"),
            ("-1%", "eviction percentage threshold memory.available must be >= 0%: -1%"),
            ("100.5%", "eviction percentage threshold memory.available must be <= 100%: 100.5%"),
            ("1GB", "\"1GB\" is not a quantity"),
        ] {
            let error = threshold_value("memory.available", text).expect_err(text).to_string();
            assert!(error.starts_with(message), "{text}: {error}");
        }
    }

    #[test]
    fn minimum_reclaims() {
        let accepted = ["0", "500Mi", "150%"].map(|text| minimum_reclaim("nodefs.available", text).is_ok());
        assert_eq!(accepted, [true; 3]);
        for (text, message) in [
            ("-1", "negative eviction minimum reclaim specified for nodefs.available"),
            ("0%", "eviction percentage minimum reclaim nodefs.available must be positive: 0%"),
            ("x%", "\"x%\" is not a percentage"),
            ("x", "\"x\" is not a quantity"),
        ] {
            let error = minimum_reclaim("nodefs.available", text).expect_err(text).to_string();
            assert!(error.starts_with(message), "{text}: {error}");
        }
    }

    #[test]
    fn shares_are_cut_to_whole_units() {
        let share = |text| threshold_value("s", text).expect("valid").expect("enabled");
        assert_eq!(share("10%").of(Amount::bytes(1001)).value(), 100);
        assert_eq!(share("100Mi").of(Amount::bytes(1)).to_string(), "100Mi");
    }

    #[test]
    fn thresholds_of_a_configuration() {
        let kubelet = config(json!({
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "0%", "pid.available": "10%"},
            "evictionSoft": {"memory.available": "300Mi", "imagefs.available": "20%"},
            "evictionSoftGracePeriod": {"memory.available": "1m30s", "imagefs.available": "0s"},
            "evictionMinimumReclaim": {"memory.available": "50Mi"},
        }));
        // In MiB of 1000.
        let amount = |value: ThresholdValue| value.of(Amount::bytes(1000 << 20)).value() >> 20;
        let shown = |ignore| -> Vec<(&'static str, i64, u64, Option<i64>)> {
            let all = thresholds(&kubelet, ignore);
            let row =
                |t: &Threshold| (t.signal.as_str(), amount(t.value), t.grace.as_secs(), t.min_reclaim.map(amount));
            all.iter().map(row).collect()
        };
        let expected = [
            ("memory.available", 100, 0, Some(50)),
            ("memory.available", 300, 90, Some(50)),
            ("allocatableMemory.available", 100, 0, Some(50)),
            ("imagefs.available", 200, 0, None),
            ("pid.available", 100, 0, None),
        ];
        assert_eq!(shown(false), expected);
        assert_eq!(shown(true), expected.into_iter().filter(|row| !row.0.starts_with("alloc")).collect::<Vec<_>>());
        let not_enforced = KubeletConfiguration { enforce_node_allocatable: vec!["none".to_owned()], ..kubelet };
        assert_eq!(thresholds(&not_enforced, false).len(), 4);
    }

    #[test]
    fn a_soft_threshold_below_the_hard_one_is_a_contradiction() {
        let found = |hard: &str, soft: &str| {
            let kubelet = config(json!({
                "evictionHard": {"memory.available": hard}, "evictionSoft": {"memory.available": soft},
            }));
            !contradictions(&kubelet).is_empty()
        };
        assert!(found("100Mi", "50Mi") && found("10%", "5%"));
        assert!(!found("100Mi", "100Mi") && !found("100Mi", "200Mi") && !found("10%", "50Mi") && !found("0%", "5%"));
    }
}
