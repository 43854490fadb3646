//! Feature gates as a plain value: computed once from flags and documents and passed to the code that depends on them.

use std::collections::BTreeMap;
use std::fmt;

pub use super::feature_table::Feature;
pub use super::feature_table::FeatureSpec;
use super::feature_table::GATES;

/// Stage of a feature, as upstream defines it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Disabled by default, and might have bugs; support may be dropped at any time without notice.
    Alpha,
    /// Usually enabled by default, and well tested; support will not be dropped, though details may change.
    Beta,
    /// Generally available, also called stable: the gate is no longer needed and will be removed.
    GA,
    /// Will be removed in a future release.
    Deprecated,
}

/// How far the value of a gate counts here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Code looks the value up.
    Read,
    /// No code looks it up: the feature is always on, although the default is off.
    AlwaysOn,
    /// No code looks it up: the agent does what the default says, or lacks the feature.
    DefaultOnly,
    /// Nor does any kubelet of 1.36 on Linux: it is another component's.
    Never,
}

impl Stage {
    /// The stage as metrics label it; that of [`Self::GA`] is empty.
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

/// Gates that stand for all of a stage.
const STAGES: [(&str, Stage); 2] = [("AllAlpha", Stage::Alpha), ("AllBeta", Stage::Beta)];

/// Which features are on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeatureGates {
    on: Vec<bool>,
    named: BTreeMap<Feature, bool>,
    /// The values of [`STAGES`].
    stages: [bool; STAGES.len()],
}

impl Default for FeatureGates {
    fn default() -> Self {
        Self {
            on: GATES.iter().map(|(_, spec)| spec.default).collect(),
            named: BTreeMap::new(),
            stages: Default::default(),
        }
    }
}

impl Feature {
    /// The definition of this gate in 1.36.
    pub fn spec(self) -> &'static FeatureSpec {
        &GATES[self as usize].1
    }

    /// The gate of that exact name.
    pub fn by_name(name: &str) -> Option<Self> {
        GATES.iter().find(|(_, spec)| spec.name == name).map(|(gate, _)| *gate)
    }

    /// The agent does what this value of the gate asks for.
    pub fn honours(self, value: bool) -> bool {
        match self.spec().effect {
            Effect::Read => true,
            Effect::AlwaysOn => value,
            Effect::DefaultOnly | Effect::Never => value == self.spec().default,
        }
    }

    /// No kubelet of this version looks its value up on Linux.
    pub fn is_foreign(self) -> bool {
        self.spec().effect == Effect::Never
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
                None if STAGES.iter().any(|(all, _)| all == name) => {}
                None => errors.push(FeatureGateError::Unknown(name.clone())),
                Some(gate) if gate.spec().locked && value != gate.spec().default => {
                    errors.push(FeatureGateError::Locked { gate, asked: value });
                }
                Some(gate) => {
                    gates.named.insert(gate, value);
                }
            }
        }
        for (index, (all, stage)) in STAGES.into_iter().enumerate() {
            if let Some(&value) = asked.get(all) {
                gates.set_stage(stage, value);
                gates.stages[index] = value;
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

    /// `AllAlpha` and `AllBeta`, with their stages and values.
    pub fn stages(&self) -> impl Iterator<Item = (&'static str, Stage, bool)> {
        STAGES.into_iter().zip(self.stages).map(|((name, stage), value)| (name, stage, value))
    }

    /// The gates that were named, with the value they were given.
    pub fn named(&self) -> impl Iterator<Item = (Feature, bool)> {
        self.named.iter().map(|(gate, value)| (*gate, *value))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;
    use std::path::PathBuf;

    use proptest::prelude::*;

    use super::*;

    /// Files that name gates without depending on their values.
    const TABLES: [&str; 2] = ["config/feature_gates.rs", "config/feature_table.rs"];

    /// Source files below `dir`, without those of tests.
    fn sources(dir: &Path) -> Vec<PathBuf> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(dir).expect("a folder of sources") {
            let path = entry.expect("an entry").path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
            if path.is_dir() && name != "tests" {
                found.extend(sources(&path));
            } else if name.ends_with(".rs") && name != "tests.rs" && !name.ends_with("_tests.rs") {
                found.push(path);
            }
        }
        found
    }

    /// Gates that a source file names outside of its tests.
    fn named_in(text: &str) -> impl Iterator<Item = Feature> {
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        code.split("Feature::").skip(1).filter_map(|rest| {
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(rest.len());
            Feature::by_name(&rest[..end])
        })
    }

    #[test]
    fn gates_marked_as_read_are_those_that_the_code_names() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let mut named = BTreeSet::new();
        for file in sources(&root).iter().filter(|file| !TABLES.iter().any(|table| file.ends_with(table))) {
            named.extend(named_in(&std::fs::read_to_string(file).expect("a source file")));
        }
        let marked: BTreeSet<_> = Feature::all().filter(|gate| gate.spec().effect == Effect::Read).collect();
        assert_eq!(named, marked);
    }

    fn asked(gates: &[(&str, bool)]) -> BTreeMap<String, bool> {
        gates.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
    }

    #[test]
    fn table_is_sound() {
        for (index, (gate, spec)) in GATES.iter().enumerate() {
            assert_eq!(*gate as usize, index, "{gate}");
            assert_eq!(Feature::by_name(spec.name), Some(*gate));
            assert!(spec.stage != Stage::Alpha || !spec.default, "alpha gate {gate} is on by default");
            assert!(spec.effect != Effect::AlwaysOn || !spec.default, "{gate} is on by default anyway");
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
    fn a_gate_of_1_37_that_is_followed_by_default_can_be_named() {
        for value in [true, false] {
            assert!(FeatureGates::new(&asked(&[("HugepageAwareEviction", value)])).is_ok(), "{value}");
            assert_eq!(Feature::HugepageAwareEviction.honours(value), value);
        }
        assert!(FeatureGates::default().enabled(Feature::HugepageAwareEviction));
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
        assert!(gates.enabled(Feature::NodeSwap), "neither stands for gates that are GA");
        let gates = FeatureGates::new(&asked(&[("AllBeta", true)])).expect("valid");
        let stages: Vec<_> = gates.stages().collect();
        assert_eq!(stages, [("AllAlpha", Stage::Alpha, false), ("AllBeta", Stage::Beta, true)]);
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
