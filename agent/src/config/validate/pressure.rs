//! Triggers and policies of pressure.

use std::collections::BTreeSet;

use super::Problems;
use crate::config::duration::GoDuration;
use crate::config::pressure::LONGEST;
use crate::config::pressure::MAX_POLICIES;
use crate::config::pressure::MAX_TRIGGERS;
use crate::config::pressure::PolicyMode;
use crate::config::pressure::PolicySettings;
use crate::config::pressure::PressurePolicy;
use crate::config::pressure::PressureResource;
use crate::config::pressure::PressureScope;
use crate::config::pressure::PressureSettings;
use crate::config::pressure::StallKind;
use crate::config::pressure::Trigger;
use crate::config::pressure::TriggerSettings;
use crate::config::pressure::WINDOWS;

const TRIGGERS: &str = "pressure.triggers";
const POLICIES: &str = "pressure.policies";
/// The eviction manager reads pressure at least this often, whatever fires.
const READ: GoDuration = GoDuration::secs(10);

pub(super) fn check(settings: &PressureSettings, problems: &mut Problems) {
    problems.require(settings.triggers.len() <= MAX_TRIGGERS, TRIGGERS, || {
        format!("{} are too many; at most {MAX_TRIGGERS}", settings.triggers.len())
    });
    problems.require(settings.policies.len() <= MAX_POLICIES, POLICIES, || {
        format!("{} are too many; at most {MAX_POLICIES}", settings.policies.len())
    });
    let mut levels = BTreeSet::new();
    for (index, trigger) in settings.triggers.iter().enumerate() {
        let at = format!("{TRIGGERS}[{index}]");
        self::trigger(&at, trigger, problems);
        let is_new = levels.insert((&trigger.resource, &trigger.kind, &trigger.scope));
        problems.require(is_new, &at, || {
            format!("a second trigger on {} {} of {}", trigger.resource, trigger.kind, trigger.scope)
        });
    }
    let mut names = BTreeSet::new();
    for (index, policy) in settings.policies.iter().enumerate() {
        let at = format!("{POLICIES}[{index}]");
        self::policy(&at, policy, problems);
        wakes(&at, policy, &settings.triggers, problems);
        problems.require(names.insert(&policy.name), &format!("{at}.name"), || {
            format!("{:?} is the name of another policy", policy.name)
        });
    }
}

fn trigger(at: &str, trigger: &TriggerSettings, problems: &mut Problems) {
    let field = |name: &str| format!("{at}.{name}");
    problems.one_of(&field("resource"), &trigger.resource, &PressureResource::ALL.map(PressureResource::as_str));
    problems.one_of(&field("kind"), &trigger.kind, &StallKind::ALL.map(StallKind::as_str));
    problems.one_of(&field("scope"), &trigger.scope, &PressureScope::ALL.map(PressureScope::as_str));
    problems.range(&field("window"), trigger.window, WINDOWS.0..=WINDOWS.1);
    problems.range(&field("leaveAfter"), trigger.leave_after, GoDuration::default()..=LONGEST);
    let nothing = GoDuration::default();
    problems.require(trigger.stall > nothing && trigger.stall < trigger.window, &field("stall"), || {
        format!("{} must be positive and below {} ({})", trigger.stall, field("window"), trigger.window)
    });
    if let Some(leave) = trigger.leave_stall {
        problems.require(leave > nothing && leave <= trigger.stall, &field("leaveStall"), || {
            format!("{leave} must be positive and not above {} ({})", field("stall"), trigger.stall)
        });
    }
    let is_always_zero = trigger.resource == "cpu" && trigger.kind == "full" && trigger.scope == "node";
    problems.require(!is_always_zero, &field("kind"), || {
        format!("full is always zero for the resource cpu of the node; use some, or another {}", field("scope"))
    });
}

fn policy(at: &str, policy: &PolicySettings, problems: &mut Problems) {
    let field = |name: &str| format!("{at}.{name}");
    let is_name = |text: &str| {
        let part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        (1..=63).contains(&text.len()) && text.chars().all(part)
    };
    problems.require(is_name(&policy.name), &field("name"), || {
        format!("{:?} is not a name of 1 to 63 lower-case letters, digits and dashes", policy.name)
    });
    problems.one_of(&field("mode"), &policy.mode, &PolicyMode::ALL.map(PolicyMode::as_str));
    problems.one_of(&field("kind"), &policy.kind, &StallKind::ALL.map(StallKind::as_str));
    problems.one_of(&field("scope"), &policy.scope, &["node", "kubepods"]);
    problems.range(&field("threshold"), policy.threshold, 1..=99);
    if let Some(leave) = policy.leave_threshold {
        problems.require((1..=policy.threshold).contains(&leave), &field("leaveThreshold"), || {
            format!("{leave} must be at least 1 and not above {} ({})", field("threshold"), policy.threshold)
        });
    }
    problems.range(&field("shortWindow"), policy.short_window, WINDOWS.0..=LONGEST);
    problems.range(&field("longWindow"), policy.long_window, WINDOWS.0..=LONGEST);
    problems.require(policy.short_window < policy.long_window, &field("shortWindow"), || {
        format!("{} must be shorter than {} ({})", policy.short_window, field("longWindow"), policy.long_window)
    });
}

/// A policy is decided on when a trigger of memory fires, or every second if there is none. If all triggers need more
/// waiting than the policy, only the readings of [`READ`] are left, which are enough for long windows that cover one.
fn wakes(at: &str, settings: &PolicySettings, triggers: &[TriggerSettings], problems: &mut Problems) {
    let Some(policy) = settings.policy() else { return };
    let is_of_scope = matches!(policy.scope, PressureScope::Node | PressureScope::Kubepods);
    let is_checked = is_of_scope && settings.long_window < READ;
    let of_memory = triggers.iter().map(TriggerSettings::trigger).enumerate();
    let of_memory = of_memory.filter_map(|(index, trigger)| Some((index, trigger?)));
    let of_memory = of_memory.filter(|(_, trigger)| trigger.resource == PressureResource::Memory);
    let of_memory: Vec<(usize, Trigger)> = of_memory.collect();
    if !is_checked || settings.threshold < 1 || of_memory.is_empty() {
        return;
    }
    let noticing = of_memory.iter().filter(|(_, trigger)| notices(trigger, &policy));
    let lowest = noticing.min_by_key(|(_, trigger)| permille(trigger));
    let Some((index, trigger)) = lowest else {
        let (kind, scope) = (policy.kind.as_str(), policy.scope.as_str());
        return problems.add(
            format!("{at}.scope"),
            format!("no trigger of memory in {TRIGGERS} notices the waiting of {scope} ({kind}); add one"),
        );
    };
    let wanted = u128::from(settings.threshold.unsigned_abs()) * 10;
    problems.require(permille(trigger) <= wanted, &format!("{at}.threshold"), || {
        let lowest = format!("{TRIGGERS}[{index}]");
        let (stall, window) = (triggers[*index].stall, triggers[*index].window);
        format!("{} percent wake no trigger; lower {lowest}.stall ({stall} of {window})", settings.threshold)
    });
}

/// The part of its window after which a trigger fires, rounded down.
fn permille(trigger: &Trigger) -> u128 {
    trigger.stall.as_nanos() * 1000 / trigger.window.as_nanos().max(1)
}

/// Whatever makes the policy hold also counts for the trigger: that all tasks wait includes that some do, and that some
/// tasks of pods wait that some of the node do. That all tasks of pods wait implies nothing about all those of the node.
fn notices(trigger: &Trigger, policy: &PressurePolicy) -> bool {
    let is_of_same = trigger.scope == policy.scope && (trigger.kind == policy.kind || trigger.kind == StallKind::Some);
    is_of_same || (trigger.scope == PressureScope::Node && trigger.kind == StallKind::Some)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use serde_json::json;

    use super::*;

    fn problems(section: Value) -> Vec<String> {
        let settings = serde_json::from_value(section).expect("a section");
        let mut problems = Problems::default();
        check(&settings, &mut problems);
        problems.0.into_iter().map(|problem| format!("{}: {}", problem.field, problem.message)).collect()
    }

    #[test]
    fn the_defaults_are_acceptable() {
        assert_eq!(problems(json!({})), [] as [String; 0]);
        assert_eq!(problems(json!({"triggers": [{}], "policies": [{"name": "a"}]})), [] as [String; 0]);
    }

    #[test]
    fn contradictory_values_name_both_fields() {
        let at = "pressure.triggers[0]";
        for (trigger, expected) in [
            (
                json!({"stall": "2s", "window": "1s"}),
                format!("{at}.stall: 2s must be positive and below {at}.window (1s)"),
            ),
            (
                json!({"stall": "1s", "leaveStall": "1100ms"}),
                format!("{at}.leaveStall: 1.1s must be positive and not above {at}.stall (1s)"),
            ),
            (json!({"window": "400ms"}), format!("{at}.window: 400ms is out of range; expected 500ms to 10s")),
            (json!({"resource": "disk"}), format!("{at}.resource: \"disk\" is not one of memory, io, cpu")),
            (
                json!({"resource": "cpu", "kind": "full"}),
                format!(
                    "{at}.kind: full is always zero for the resource cpu of the node; use some, or another {at}.scope"
                ),
            ),
        ] {
            assert_eq!(problems(json!({"triggers": [trigger]})), [expected]);
        }
        let twice = problems(json!({"triggers": [{}, {"stall": "1s"}]}));
        assert_eq!(twice, ["pressure.triggers[1]: a second trigger on memory some of node"]);
        let at = "pressure.policies[0]";
        for (policy, expected) in [
            (
                json!({"name": "a", "shortWindow": "9s"}),
                format!("{at}.shortWindow: 9s must be shorter than {at}.longWindow (5s)"),
            ),
            (
                json!({"name": "a", "leaveThreshold": 30}),
                format!("{at}.leaveThreshold: 30 must be at least 1 and not above {at}.threshold (20)"),
            ),
            (json!({"name": "a", "mode": "Warn"}), format!("{at}.mode: \"Warn\" is not one of DryRun, Enforce")),
            (
                json!({"name": "A b"}),
                format!("{at}.name: \"A b\" is not a name of 1 to 63 lower-case letters, digits and dashes"),
            ),
            (
                json!({"name": "a", "scope": "burstable"}),
                format!("{at}.scope: \"burstable\" is not one of node, kubepods"),
            ),
        ] {
            assert_eq!(problems(json!({"policies": [policy]})), [expected]);
        }
        let twice = problems(json!({"policies": [{"name": "a"}, {"name": "a"}]}));
        assert_eq!(twice, ["pressure.policies[1].name: \"a\" is the name of another policy"]);
    }

    #[test]
    fn a_policy_that_no_trigger_wakes_names_both_fields() {
        let of = |triggers: Value, policy: Value| problems(json!({"triggers": triggers, "policies": [policy]}));
        let at = "pressure.policies[0]";
        // The triggers of the default fire at 10 %.
        let by_default = problems(json!({"policies": [{"name": "a", "threshold": 9}]}));
        let lower = "lower pressure.triggers[0].stall (50ms of 500ms)";
        assert_eq!(by_default, [format!("{at}.threshold: 9 percent wake no trigger; {lower}")]);
        assert_eq!(problems(json!({"policies": [{"name": "a", "threshold": 10}]})), [] as [String; 0]);
        let sensitive = json!([{"stall": "20ms"}, {"kind": "full", "stall": "1s"}]);
        for kind in ["some", "full"] {
            let policy = json!({"name": "a", "threshold": 1, "kind": kind});
            assert_eq!(of(sensitive.clone(), policy), [] as [String; 0], "{kind}");
        }
        // That all tasks wait wakes no policy of some.
        let full = json!([{"kind": "full", "stall": "20ms"}]);
        assert_eq!(of(full.clone(), json!({"name": "a"})), [] as [String; 0]);
        assert_eq!(
            of(full.clone(), json!({"name": "a", "kind": "some"})),
            [format!(
                "{at}.scope: no trigger of memory in pressure.triggers notices the waiting of node (some); add one"
            )]
        );
        let of_pods = |triggers: Value| of(triggers, json!({"name": "a", "scope": "kubepods"})).len();
        let of_classes = json!([{"scope": "burstable"}, {"scope": "besteffort"}]);
        let all_of_pods = json!([{"kind": "full", "scope": "kubepods"}]);
        assert_eq!([of_pods(sensitive), of_pods(full), of_pods(of_classes), of_pods(all_of_pods)], [0, 1, 1, 0]);
        // Readings every ten seconds notice what lasts as long.
        for (window, count) in [("10s", 0), ("9s", 1)] {
            let slow = |threshold: u32| json!({"name": "a", "threshold": threshold, "longWindow": window});
            assert_eq!(problems(json!({"policies": [slow(5)]})).len(), count, "{window}");
            assert_eq!(of(json!([{"scope": "burstable"}]), slow(20)).len(), count, "{window}");
        }
        // Without a trigger of memory pressure is read every second.
        for triggers in [json!([]), json!([{"resource": "io"}])] {
            assert_eq!(of(triggers, json!({"name": "a", "threshold": 1})), [] as [String; 0]);
        }
    }

    #[test]
    fn bounds_of_windows_thresholds_and_numbers() {
        let fields = |section: Value| -> Vec<String> {
            let field = |problem: String| problem.split_once(": ").map(|(field, _)| field.to_owned());
            problems(section).into_iter().filter_map(field).collect()
        };
        let of_trigger = |trigger: Value| fields(json!({"triggers": [trigger]}));
        for (field, trigger) in [
            ("window", json!({"window": "10001ms"})),
            ("leaveAfter", json!({"leaveAfter": "60001ms"})),
            ("leaveAfter", json!({"leaveAfter": "-1ns"})),
            ("stall", json!({"stall": "0s"})),
            ("stall", json!({"stall": "2s", "window": "2s"})),
            ("leaveStall", json!({"leaveStall": "0s"})),
        ] {
            assert_eq!(of_trigger(trigger), [format!("pressure.triggers[0].{field}")]);
        }
        for trigger in [
            json!({"window": "500ms", "leaveAfter": "0s"}),
            json!({"window": "10s", "leaveAfter": "60s"}),
            json!({"stall": "1999ms", "leaveStall": "1999ms", "window": "2s"}),
            json!({"resource": "cpu", "kind": "full", "scope": "kubepods"}),
        ] {
            assert_eq!(of_trigger(trigger.clone()), [] as [String; 0], "{trigger}");
        }
        let of_policy = |mut policy: Value| {
            let name = policy.get("name").cloned().unwrap_or_else(|| "a".into());
            policy["name"] = name;
            // Fires at 1 %.
            fields(json!({"triggers": [{"stall": "20ms"}], "policies": [policy]}))
        };
        for (field, policy) in [
            ("threshold", json!({"threshold": 0})),
            ("threshold", json!({"threshold": 100})),
            ("leaveThreshold", json!({"leaveThreshold": 0})),
            ("shortWindow", json!({"shortWindow": "499ms"})),
            ("shortWindow", json!({"shortWindow": "5s", "longWindow": "5s"})),
            ("longWindow", json!({"longWindow": "60001ms"})),
            ("name", json!({"name": ""})),
            ("name", json!({"name": "a".repeat(64)})),
        ] {
            assert_eq!(of_policy(policy), [format!("pressure.policies[0].{field}")]);
        }
        for policy in [
            json!({"threshold": 1, "leaveThreshold": 1}),
            json!({"threshold": 99, "shortWindow": "500ms", "longWindow": "60s"}),
            json!({"name": "a".repeat(63)}),
        ] {
            assert_eq!(of_policy(policy.clone()), [] as [String; 0], "{policy}");
        }

        let [resources, kinds, scopes] =
            [&["memory", "io", "cpu"][..], &["some", "full"], &["node", "kubepods", "burstable", "besteffort"]];
        let mut triggers = Vec::new();
        for resource in resources {
            for kind in kinds {
                triggers.extend(scopes.iter().map(|scope| json!({"resource": resource, "kind": kind, "scope": scope})));
            }
        }
        let policies = |count: usize| (0..count).map(|n| json!({"name": n.to_string()})).collect::<Vec<_>>();
        assert_eq!(fields(json!({"triggers": triggers[..16], "policies": policies(8)})), [] as [String; 0]);
        assert_eq!(
            fields(json!({"triggers": triggers[..17], "policies": policies(9)})),
            ["pressure.triggers", "pressure.policies"]
        );
    }
}
