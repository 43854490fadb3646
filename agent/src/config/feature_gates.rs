//! Feature gates as a plain value: computed once from flags and documents and passed to the code that depends on them.

use std::collections::BTreeMap;
use std::fmt;

pub use super::feature_table::Feature;
pub use super::feature_table::FeatureSpec;
use super::feature_table::GATES;

/// How settled a gate is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Off unless asked for; may change or go.
    Alpha,
    /// Mostly on; may change in detail.
    Beta,
    /// Settled; the gate itself will go.
    GA,
    /// On its way out.
    Deprecated,
}

impl Stage {
    /// The stage as metrics label it; settled gates have an empty label.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Alpha => "ALPHA",
            Self::Beta => "BETA",
            Self::GA => "",
            Self::Deprecated => "DEPRECATED",
        }
    }
}

/// Why a set of gates is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FeatureGateError {
    /// No gate of that name in 1.36.
    #[error("unrecognized feature gate: {0}")]
    Unknown(String),
    /// The gate is locked to its default.
    #[error("cannot set feature gate {gate} to {asked}, feature is locked to {}", !asked)]
    Locked {
        /// Which gate.
        gate: Feature,
        /// The value that was asked for.
        asked: bool,
    },
    /// A gate is on without one it builds upon.
    #[error("feature gate {gate} is on, but it needs {needs}, which is off")]
    Dependency {
        /// The gate that is on.
        gate: Feature,
        /// The gate it needs.
        needs: Feature,
    },
}

impl FeatureGateError {
    /// The name of the gate at fault.
    pub fn name(&self) -> &str {
        match self {
            Self::Unknown(name) => name,
            Self::Locked { gate, .. } | Self::Dependency { gate, .. } => gate.spec().name,
        }
    }
}

/// Which features are on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeatureGates {
    on: Vec<bool>,
    named: BTreeMap<Feature, bool>,
}

impl Default for FeatureGates {
    fn default() -> Self {
        Self { on: GATES.iter().map(|(_, spec)| spec.default).collect(), named: BTreeMap::new() }
    }
}

impl Feature {
    /// What 1.36 says of this gate.
    pub fn spec(self) -> &'static FeatureSpec {
        &GATES[self as usize].1
    }

    /// The gate of that exact name.
    pub fn by_name(name: &str) -> Option<Self> {
        GATES.iter().find(|(_, spec)| spec.name == name).map(|(gate, _)| *gate)
    }

    /// Every gate, by name.
    pub fn all() -> impl Iterator<Item = Self> {
        GATES.iter().map(|(gate, _)| *gate)
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.spec().name)
    }
}

impl FeatureGates {
    /// The defaults with `asked` on top. `AllAlpha` and `AllBeta` stand for the gates of their stage that are not named.
    ///
    /// # Errors
    /// All unknown and locked gates, and gates that need one that is off.
    pub fn new(asked: &BTreeMap<String, bool>) -> Result<Self, Vec<FeatureGateError>> {
        let mut gates = Self::default();
        let mut errors = Vec::new();
        for (name, &value) in asked {
            match Feature::by_name(name) {
                None if matches!(name.as_str(), "AllAlpha" | "AllBeta") => {}
                None => errors.push(FeatureGateError::Unknown(name.clone())),
                Some(gate) if gate.spec().locked && value != gate.spec().default => {
                    errors.push(FeatureGateError::Locked { gate, asked: value });
                }
                Some(gate) => {
                    gates.named.insert(gate, value);
                }
            }
        }
        for (all, stage) in [("AllAlpha", Stage::Alpha), ("AllBeta", Stage::Beta)] {
            if let Some(&value) = asked.get(all) {
                gates.set_stage(stage, value);
            }
        }
        for (&gate, &value) in &gates.named {
            gates.on[gate as usize] = value;
        }
        errors.extend(gates.unmet_dependencies());
        if errors.is_empty() { Ok(gates) } else { Err(errors) }
    }

    fn set_stage(&mut self, stage: Stage, value: bool) {
        for (gate, spec) in GATES {
            if spec.stage == stage && !spec.locked {
                self.on[*gate as usize] = value;
            }
        }
    }

    fn unmet_dependencies(&self) -> Vec<FeatureGateError> {
        Feature::all()
            .filter(|gate| self.enabled(*gate))
            .flat_map(|gate| gate.spec().needs.iter().map(move |needs| (gate, *needs)))
            .filter(|(_, needs)| !self.enabled(*needs))
            .map(|(gate, needs)| FeatureGateError::Dependency { gate, needs })
            .collect()
    }

    /// Is this feature on?
    pub fn enabled(&self, gate: Feature) -> bool {
        self.on[gate as usize]
    }

    /// The gates that were named, with the value they were given.
    pub fn named(&self) -> impl Iterator<Item = (Feature, bool)> {
        self.named.iter().map(|(gate, value)| (*gate, *value))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn asked(gates: &[(&str, bool)]) -> BTreeMap<String, bool> {
        gates.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
    }

    #[test]
    fn table_is_sound() {
        for (index, (gate, spec)) in GATES.iter().enumerate() {
            assert_eq!(*gate as usize, index, "{gate}");
            assert_eq!(Feature::by_name(spec.name), Some(*gate));
            assert!(spec.stage != Stage::Alpha || !spec.default, "alpha gate {gate} is on by default");
        }
        assert_eq!(FeatureGates::default().unmet_dependencies(), [], "the defaults contradict themselves");
    }

    #[test]
    fn defaults_of_1_36() {
        let gates = FeatureGates::default();
        for on in [
            Feature::PLEGOnDemandRelist,
            Feature::KubeletCrashLoopBackOffMax,
            Feature::SidecarContainers,
            Feature::NodeSwap,
        ] {
            assert!(gates.enabled(on), "{on}");
        }
        for off in [Feature::EventedPLEG, Feature::QOSReserved, Feature::SELinuxMount, Feature::GitRepoVolumeDriver] {
            assert!(!gates.enabled(off), "{off}");
        }
    }

    #[test]
    fn refusals() {
        for (gates, message) in [
            (asked(&[("NoSuchGate", true)]), "unrecognized feature gate: NoSuchGate"),
            (asked(&[("NodeSwap", false)]), "cannot set feature gate NodeSwap to false, feature is locked to true"),
            (
                asked(&[("ResourceHealthStatus", false)]),
                "feature gate ResourceHealthStatusMessage is on, but it needs ResourceHealthStatus, which is off",
            ),
        ] {
            let errors = FeatureGates::new(&gates).expect_err(message);
            assert_eq!(errors.iter().map(ToString::to_string).collect::<Vec<_>>(), [message]);
        }
        assert!(FeatureGates::new(&asked(&[("NodeSwap", true)])).is_ok(), "a locked gate may be set to its default");
    }

    #[test]
    fn stages_as_a_whole_yield_to_named_gates() {
        let gates = FeatureGates::new(&asked(&[("AllAlpha", true), ("EventedPLEG", false)])).expect("valid");
        assert!(gates.enabled(Feature::CRIListStreaming));
        assert!(!gates.enabled(Feature::EventedPLEG));
        let gates = FeatureGates::new(&asked(&[("AllBeta", false), ("EnvFiles", true)])).expect("valid");
        assert!(gates.enabled(Feature::EnvFiles));
        assert!(!gates.enabled(Feature::ContainerRestartRules));
        assert!(gates.enabled(Feature::NodeSwap), "settled gates are no part of a stage");
    }

    proptest! {
        #[test]
        fn a_named_gate_has_the_value_it_was_given(index in 0..GATES.len(), value: bool, alpha: bool, beta: bool) {
            let spec = &GATES[index].1;
            let gates = FeatureGates::new(&asked(&[(spec.name, value), ("AllAlpha", alpha), ("AllBeta", beta)]));
            if let Ok(gates) = gates {
                prop_assert_eq!(gates.enabled(GATES[index].0), value);
            }
        }
    }
}
