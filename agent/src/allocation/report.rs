//! Texts of the events on a pod's resizes. Pure.

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::ResourceRequirements;
use serde::Serialize;

use crate::model::resources::Quantities;
use crate::model::spec;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Report<'a> {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    init_containers: Vec<OfContainer<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    containers: Vec<OfContainer<'a>>,
    generation: i64,
    #[serde(skip_serializing_if = "str::is_empty")]
    error: &'a str,
}

#[derive(Serialize)]
struct OfContainer<'a> {
    name: &'a str,
    resources: Resources<'a>,
}

/// In the kubelet's order of fields.
#[derive(Serialize)]
struct Resources<'a> {
    #[serde(skip_serializing_if = "is_empty")]
    limits: Option<&'a Quantities>,
    #[serde(skip_serializing_if = "is_empty")]
    requests: Option<&'a Quantities>,
}

fn is_empty(list: &Option<&Quantities>) -> bool {
    list.is_none_or(Quantities::is_empty)
}

/// JSON of a pod's resources, its generation and what went wrong.
pub fn report(pod: &Pod, generation: Option<i64>, error: &str) -> String {
    let of = |container: &'_ Container| -> (String, ResourceRequirements) {
        (container.name.clone(), container.resources.clone().unwrap_or_default())
    };
    let init: Vec<_> = spec::init_containers(pod).iter().map(of).collect();
    let regular: Vec<_> = spec::regular_containers(pod).iter().map(of).collect();
    let report = Report {
        init_containers: init.iter().map(entry).collect(),
        containers: regular.iter().map(entry).collect(),
        generation: generation.unwrap_or_default(),
        error,
    };
    // Plain maps and strings can always be written.
    let json = serde_json::to_string(&report).unwrap_or_default();
    // As the kubelet's encoder escapes it.
    [('<', "\\u003c"), ('>', "\\u003e"), ('&', "\\u0026")]
        .into_iter()
        .fold(json, |json, (char, escape)| json.replace(char, escape))
}

fn entry((name, resources): &(String, ResourceRequirements)) -> OfContainer<'_> {
    let resources = Resources { limits: resources.limits.as_ref(), requests: resources.requests.as_ref() };
    OfContainer { name, resources }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn reports_are_the_kubelets() {
        let pod = |init: serde_json::Value| -> Pod {
            let main = json!({ "name": "c", "resources": { "requests": { "cpu": "1" }, "limits": { "cpu": "2" } } });
            serde_json::from_value(json!({ "spec": { "initContainers": init, "containers": [main] } })).expect("a pod")
        };
        let main = r#""containers":[{"name":"c","resources":{"limits":{"cpu":"2"},"requests":{"cpu":"1"}}}]"#;
        assert_eq!(report(&pod(json!(null)), Some(2), ""), format!("{{{main},\"generation\":2}}"));
        let expected = format!(
            r#"{{"initContainers":[{{"name":"i","resources":{{}}}}],{main},"generation":3,"error":"a \u003c \"b\""}}"#
        );
        assert_eq!(report(&pod(json!([{ "name": "i" }])), Some(3), "a < \"b\""), expected);
    }
}
