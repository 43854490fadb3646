//! Annotations of AppArmor and seccomp, alone and beside fields.

use serde_json::Value;
use serde_json::json;

use super::base;
use super::check;
use super::errors_of;

const APP_ARMOR: &str = "container.apparmor.security.beta.kubernetes.io/c";
const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";
const SECCOMP: &str = "container.seccomp.security.alpha.kubernetes.io/c";
const SECCOMP_POD: &str = "seccomp.security.alpha.kubernetes.io/pod";

#[test]
fn annotations_are_well_formed() {
    let at = "/metadata/annotations";
    check(&[
        (at, json!({APP_ARMOR: "runtime/default", SECCOMP: "docker/default", SECCOMP_POD: "localhost/a/b.json"}), ""),
        (at, json!({APP_ARMOR: "localhost/web", SECCOMP: "unconfined", SECCOMP_POD: "runtime/default"}), ""),
        (at, json!({DELETION_COST: "-10"}), ""),
        (at, json!({DELETION_COST: "0"}), ""),
        (
            at,
            json!({DELETION_COST: "010"}),
            &format!("metadata.annotations[{DELETION_COST}]: Invalid value: \"010\": must be a 32bit integer"),
        ),
        (at, json!({DELETION_COST: "+1"}), &format!("metadata.annotations[{DELETION_COST}]: Invalid value")),
        (at, json!({DELETION_COST: "2147483648"}), &format!("metadata.annotations[{DELETION_COST}]: Invalid value")),
        (at, json!({APP_ARMOR: "web"}), &format!("metadata.annotations[{APP_ARMOR}]: Invalid value: \"web\"")),
        (
            at,
            json!({"container.apparmor.security.beta.kubernetes.io/x": "unconfined"}),
            "metadata.annotations[container.apparmor.security.beta.kubernetes.io/x]: Invalid value: \"x\": container not found",
        ),
        (
            at,
            json!({SECCOMP: "strict"}),
            &format!("metadata.annotations[{SECCOMP}]: Invalid value: \"strict\": must be a valid seccomp profile"),
        ),
        (
            at,
            json!({SECCOMP_POD: "localhost/../a"}),
            &format!("metadata.annotations[{SECCOMP_POD}]: Invalid value: \"../a\": must not contain '..'"),
        ),
    ]);
}

#[test]
fn annotations_and_fields_state_the_same() {
    let local = |name: &str| json!({"type": "Localhost", "localhostProfile": name});
    let table: [(&str, &str, &str, Value, &str); 9] = [
        (APP_ARMOR, "localhost/a", "appArmorProfile", local("a"), ""),
        (APP_ARMOR, "localhost/a", "appArmorProfile", local("b"), ".localhostProfile: Forbidden: apparmor profile"),
        (APP_ARMOR, "unconfined", "appArmorProfile", local("a"), ".type: Forbidden: apparmor type in annotation"),
        (APP_ARMOR, "unconfined", "appArmorProfile", json!({"type": "RuntimeDefault"}), ".type: Forbidden: apparmor"),
        (SECCOMP, "docker/default", "seccompProfile", json!({"type": "RuntimeDefault"}), ""),
        (SECCOMP, "unconfined", "seccompProfile", json!({"type": "RuntimeDefault"}), ".type: Forbidden: seccomp type"),
        (SECCOMP, "localhost/a", "seccompProfile", json!({"type": "Unconfined"}), ".type: Forbidden: seccomp type"),
        (SECCOMP, "localhost/a", "seccompProfile", local("b"), ".localhostProfile: Forbidden: seccomp profile"),
        // The annotation of the pod does not apply to a container with a profile of its own.
        (SECCOMP_POD, "unconfined", "seccompProfile", local("b"), ""),
    ];
    for (annotation, annotated, field, profile, expected) in table {
        let mut pod = base();
        pod["metadata"]["annotations"] = json!({annotation: annotated});
        pod["spec"]["containers"][0]["securityContext"] = json!({field: profile});
        let errors = errors_of(pod);
        if expected.is_empty() {
            assert_eq!(errors, Vec::<String>::new(), "{annotation}: {annotated}");
        } else {
            let expected = format!("spec.containers[0].securityContext.{field}{expected}");
            assert!(errors.iter().any(|error| error.starts_with(&expected)), "{expected} not in {errors:?}");
        }
    }
}

#[test]
fn profiles_of_the_pod_agree_with_annotations() {
    let mut pod = base();
    pod["metadata"]["annotations"] = json!({APP_ARMOR: "unconfined", SECCOMP_POD: "unconfined"});
    let profile = json!({"type": "RuntimeDefault"});
    pod["spec"]["securityContext"] = json!({"appArmorProfile": profile, "seccompProfile": profile});
    let expected = [
        "spec.securityContext.seccompProfile.type: Forbidden: seccomp type in annotation and field must match",
        "spec.containers[0].securityContext.appArmorProfile.type: Forbidden: apparmor type in annotation and field must match",
    ];
    assert_eq!(errors_of(pod), expected);
}
