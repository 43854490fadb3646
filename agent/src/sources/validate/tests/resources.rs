//! Resources of containers: amounts, claims and what a resize demands.

use serde_json::Value;
use serde_json::json;

use super::base;
use super::check;
use super::errors_of;

#[test]
fn resize_policies() {
    let policy = |resource: &str, restart: &str| json!({"resourceName": resource, "restartPolicy": restart});
    let at = "/spec/containers/0/resizePolicy";
    let path = "spec.containers[0].resizePolicy";
    check(&[
        (at, json!([policy("cpu", "NotRequired"), policy("memory", "RestartContainer")]), ""),
        (at, json!([policy("disk", "NotRequired")]), &format!("{path}[0].resourceName: Unsupported value: \"disk\"")),
        (at, json!([policy("cpu", "Maybe")]), &format!("{path}[0].restartPolicy: Unsupported value: \"Maybe\"")),
        (at, json!([policy("", "NotRequired")]), &format!("{path}[0].resourceName: Required value")),
        (at, json!([policy("cpu", "")]), &format!("{path}[0].restartPolicy: Required value")),
        (
            at,
            json!([policy("cpu", "NotRequired"), policy("cpu", "NotRequired")]),
            &format!("{path}[1]: Duplicate value: \"cpu\""),
        ),
        (
            "/spec/initContainers/0/resizePolicy",
            json!([policy("cpu", "RestartContainer")]),
            "spec.initContainers[0].resizePolicy[0].restartPolicy: Invalid value: \"RestartContainer\": must not be set",
        ),
    ]);
    let mut pod = base();
    pod["spec"]["restartPolicy"] = json!("Never");
    pod["spec"]["containers"][0]["resizePolicy"] = json!([policy("cpu", "RestartContainer")]);
    let message = "must be 'NotRequired' when pod `restartPolicy` is 'Never'";
    assert_eq!(errors_of(pod), [format!("{path}[0].restartPolicy: Invalid value: \"RestartContainer\": {message}")]);
}

#[test]
fn claims_are_those_of_the_pod() {
    let errors = |claims: Value| {
        let mut pod = base();
        pod["spec"]["resourceClaims"] = json!([{"name": "gpu", "resourceClaimName": "gpu"}]);
        pod["spec"]["containers"][0]["resources"] = json!({"claims": claims});
        errors_of(pod)
    };
    let at = "spec.containers[0].resources.claims";
    assert_eq!(errors(json!([{"name": "gpu", "request": "a"}, {"name": "gpu", "request": "b"}])), Vec::<String>::new());
    assert_eq!(errors(json!([{"name": "nic"}])), [format!("{at}[0]: Not found: \"nic\"")]);
    let twice = json!([{"name": "gpu", "request": "a"}, {"name": "gpu"}]);
    assert_eq!(errors(twice), [format!("{at}[1]: Duplicate value: \"gpu\"")]);
    assert!(
        errors(json!([{"name": "gpu", "request": "A"}]))[0].starts_with(&format!("{at}[0].request: Invalid value"))
    );
}

#[test]
fn resource_amounts() {
    let at = "/spec/containers/0/resources";
    check(&[
        (at, json!({"limits": {"cpu": "1.5", "memory": "1Gi"}, "requests": {"cpu": "100m"}}), ""),
        (
            at,
            json!({"limits": {"cpu": "lots"}}),
            "spec.containers[0].resources.limits[cpu]: Invalid value: \"lots\": quantities must match the regular expression",
        ),
        (
            at,
            json!({"limits": {"cpu": "-1"}}),
            "spec.containers[0].resources.limits[cpu]: Invalid value: \"-1\": must be greater than or equal to 0",
        ),
        (
            at,
            json!({"limits": {"cpu": "1"}, "requests": {"cpu": "1001m"}}),
            "spec.containers[0].resources.requests: Invalid value: \"1001m\": must be less than or equal to cpu limit of 1",
        ),
        (
            at,
            json!({"limits": {"gold": "1"}}),
            "spec.containers[0].resources.limits[gold]: Invalid value: \"gold\": must be a standard resource type or fully qualified",
        ),
        (
            at,
            json!({"requests": {"example.com/gpu": "1"}}),
            "spec.containers[0].resources.limits: Required value: Limit must be set for non overcommitable resources",
        ),
        (
            at,
            json!({"limits": {"example.com/gpu": "1500m"}}),
            "spec.containers[0].resources.limits[example.com/gpu]: Invalid value: \"1500m\": must be an integer",
        ),
        (
            at,
            json!({"limits": {"hugepages-2Mi": "2Mi"}}),
            "spec.containers[0].resources: Forbidden: HugePages require cpu or memory",
        ),
        (
            "/spec/resources",
            json!({"limits": {"ephemeral-storage": "1Gi"}}),
            "spec.resources.limits[ephemeral-storage]: Unsupported value",
        ),
        ("/spec/resources", json!({"limits": {"cpu": "1"}}), ""),
        (at, json!({"limits": {"cpu": "1", "hugepages-2Mi": "4Mi"}}), ""),
        (
            at,
            json!({"limits": {"cpu": "1", "hugepages-2Mi": "3Mi"}}),
            "spec.containers[0].resources.limits[hugepages-2Mi]: Invalid value: \"3Mi\": 3Mi is not positive integer multiple of hugepages-2Mi",
        ),
        (
            at,
            json!({"limits": {"cpu": "1", "hugepages-many": "2Mi"}}),
            "spec.containers[0].resources.limits[hugepages-many]: Invalid value: \"2Mi\": 2Mi is not positive integer",
        ),
    ]);
}

#[test]
fn what_containers_need_fits_into_the_pod() {
    let errors = |of_pod: Value, of_container: Value| {
        let mut pod = base();
        pod["spec"]["resources"] = of_pod;
        pod["spec"]["containers"][0]["resources"] = of_container;
        let sidecar =
            json!({"name": "s", "image": "a:1", "restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}}});
        pod["spec"]["initContainers"] = json!([sidecar]);
        errors_of(pod)
    };
    let none = Vec::<String>::new();
    let memory = |amount: &str| json!({"limits": {"memory": amount}});
    assert_eq!(errors(json!({"requests": {"cpu": "1500m"}}), json!({"requests": {"cpu": "500m"}})), none);
    assert_eq!(
        errors(json!({"requests": {"cpu": "1"}}), json!({"requests": {"cpu": "500m"}})),
        ["spec.resources.requests[cpu]: Invalid value: \"1\": must be greater than or equal to aggregate container \
             requests of 1500m"]
    );
    assert_eq!(errors(memory("2Gi"), memory("2Gi")), none);
    let above = json!({"limits": {"memory": "2Gi"}, "requests": {"memory": "1Gi"}});
    assert_eq!(
        errors(memory("1Gi"), above),
        ["spec.containers[0].resources.limits[memory]: Invalid value: \"2Gi\": must be less than or equal to pod \
             limits of 1Gi"]
    );
    let pages = |amount: &str| json!({"limits": {"cpu": "1", "hugepages-2Mi": amount}, "requests": {"cpu": "0"}});
    let found = errors(json!({"limits": {"cpu": "1", "hugepages-2Mi": "2Mi"}}), pages("4Mi"));
    let expected = "spec.resources.limits[hugepages-2Mi]: Invalid value: \"2Mi\": must be greater than or equal to \
        aggregate container limits of 4Mi";
    assert!(found.iter().any(|error| error == expected), "{found:?}");
}
