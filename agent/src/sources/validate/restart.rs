//! Restart policies and restart rules of containers (KEP-5307).

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::ContainerRestartRule;

use super::super::field::Findings;
use super::super::field::Path;
use super::text;

const MAX_RULES: usize = 20;
const MAX_EXIT_CODES: usize = 255;

pub(super) fn check(container: &Container, path: &Path, findings: &mut Findings) {
    let policy = text(&container.restart_policy);
    if let Some(policy) = &container.restart_policy {
        findings.one_of(&path.child("restartPolicy"), policy, &["Always", "Never", "OnFailure"]);
    }
    let rules = container.restart_policy_rules.as_deref().unwrap_or_default();
    if rules.is_empty() {
        return;
    }
    if policy.is_empty() {
        findings.required(&path.child("restartPolicy"), "must specify restartPolicy when restart rules are used");
    }
    let path = path.child("restartPolicyRules");
    if rules.len() > MAX_RULES {
        findings.too_many(&path, rules.len(), MAX_RULES);
    }
    for (i, rule) in rules.iter().enumerate() {
        check_rule(rule, &path.index(i), findings);
    }
}

fn check_rule(rule: &ContainerRestartRule, path: &Path, findings: &mut Findings) {
    if rule.action.is_empty() {
        findings.required(&path.child("action"), "");
    } else {
        findings.one_of(&path.child("action"), &rule.action, &["Restart", "RestartAllContainers"]);
    }
    let path = path.child("exitCodes");
    let Some(codes) = &rule.exit_codes else {
        findings.required(&path, "must be specified");
        return;
    };
    if codes.operator.is_empty() {
        findings.required(&path.child("operator"), "");
    } else {
        findings.one_of(&path.child("operator"), &codes.operator, &["In", "NotIn"]);
    }
    let values = codes.values.as_deref().unwrap_or_default();
    if values.len() > MAX_EXIT_CODES {
        findings.too_many(&path.child("values"), values.len(), MAX_EXIT_CODES);
    }
}
