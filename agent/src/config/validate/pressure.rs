//! Triggers and policies of pressure.

use std::collections::BTreeSet;

use super::Problems;
use crate::config::duration::GoDuration;
use crate::config::pressure::LONGEST;
use crate::config::pressure::MAX_POLICIES;
use crate::config::pressure::MAX_TRIGGERS;
use crate::config::pressure::PolicyMode;
use crate::config::pressure::PolicySettings;
use crate::config::pressure::PressureResource;
use crate::config::pressure::PressureScope;
use crate::config::pressure::PressureSettings;
use crate::config::pressure::StallKind;
use crate::config::pressure::TriggerSettings;
use crate::config::pressure::WINDOWS;

const TRIGGERS: &str = "pressure.triggers";
const POLICIES: &str = "pressure.policies";

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
            fields(json!({"policies": [policy]}))
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
