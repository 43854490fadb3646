//! What operators install for `keblet observe`: manifest, chart, dashboard, alert rules. Each is of the right type, asks
//! for no more privileges than documented, and queries only series that exist.
#![expect(clippy::unwrap_used, reason = "a failed assumption is what a test is for")]

mod series;

use std::ffi::OsString;
use std::fs;

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::serde::Serialize;
use k8s_openapi::serde::de::DeserializeOwned;
use keblet_tests::deploy::helm::Chart;
use keblet_tests::deploy::manifest;
use keblet_tests::deploy::of_kind;
use keblet_tests::deploy::path;
use serde_json::Value;
use serde_json::json;

fn read(name: &str) -> String {
    fs::read_to_string(path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The namespace of the chart's release.
const NAMESPACE: &str = "monitoring";

fn chart() -> Chart {
    Chart::read(&path("deploy/helm/keblet-observe")).unwrap()
}

/// A document as an API object that has all its fields: what the type does not know would be lost.
fn typed<T: Serialize + DeserializeOwned>(document: &Value) -> T {
    let object: T = serde_json::from_value(document.clone()).unwrap_or_else(|error| panic!("{error}: {document:#}"));
    assert_eq!(serde_json::to_value(&object).unwrap(), *document, "fields that the API does not have");
    object
}

/// Least privileges, and arguments that keblet accepts.
fn check_daemon_set(document: &Value) {
    let set: DaemonSet = typed(document);
    let spec = set.spec.unwrap();
    let labels = spec.template.metadata.unwrap().labels.unwrap();
    assert!(spec.selector.match_labels.unwrap().iter().all(|(name, value)| labels.get(name) == Some(value)));
    let pod = spec.template.spec.unwrap();
    assert_eq!((pod.host_pid, pod.host_network, pod.host_ipc), (Some(true), Some(false), None));
    assert_eq!(pod.automount_service_account_token, Some(false));
    let [container] = &pod.containers[..] else { panic!("more than one container") };
    let security = container.security_context.clone().unwrap();
    assert_eq!((security.privileged, security.allow_privilege_escalation), (Some(false), Some(false)));
    assert_eq!(security.read_only_root_filesystem, Some(true));
    assert_eq!(security.seccomp_profile.unwrap().type_, "RuntimeDefault");
    let capabilities = security.capabilities.unwrap();
    assert_eq!(capabilities.drop, Some(vec!["ALL".to_owned()]));
    assert_eq!(capabilities.add, Some(vec!["BPF".to_owned(), "PERFMON".to_owned()]));
    let mounts = container.volume_mounts.as_ref().unwrap();
    assert!(mounts.iter().all(|mount| mount.read_only == Some(true)), "{mounts:?}");
    assert!(mounts.iter().all(|mount| mount.recursive_read_only.as_deref() == Some("IfPossible")), "{mounts:?}");
    let paths: Vec<String> =
        pod.volumes.unwrap().into_iter().map(|volume| volume.host_path.expect("a host path").path).collect();
    assert_eq!(paths.len(), 2);
    assert!(paths.contains(&"/sys/fs/cgroup".to_owned()) && !paths.contains(&"/".to_owned()), "{paths:?}");
    let arguments = container.args.iter().flatten().map(OsString::from);
    keblet::cli::parse(std::iter::once("keblet".into()).chain(arguments)).unwrap();
    let port = container.ports.as_ref().unwrap()[0].container_port;
    let address = format!("--metrics-address=0.0.0.0:{port}");
    assert!(container.args.iter().flatten().any(|argument| *argument == address), "{:?}", container.args);
}

#[test]
fn the_daemon_set_has_the_least_privileges() {
    let documents = manifest("deploy/observe/daemonset.yaml").unwrap();
    assert_eq!(documents.len(), 3);
    let namespace: Namespace = typed(of_kind(&documents, "Namespace").unwrap());
    let labels = namespace.metadata.labels.unwrap();
    assert_eq!(labels["pod-security.kubernetes.io/enforce"], "privileged", "hostPID and hostPath need it");
    let account: ServiceAccount = typed(of_kind(&documents, "ServiceAccount").unwrap());
    assert_eq!(account.automount_service_account_token, Some(false));
    check_daemon_set(of_kind(&documents, "DaemonSet").unwrap());
}

#[test]
fn the_chart_renders_to_the_same() {
    let chart = chart();
    let documents = chart.render(NAMESPACE, &json!({})).unwrap();
    assert_eq!(documents.len(), 2, "nothing optional by default");
    let _: ServiceAccount = typed(of_kind(&documents, "ServiceAccount").unwrap());
    let set = of_kind(&documents, "DaemonSet").unwrap();
    check_daemon_set(set);
    let written = manifest("deploy/observe/daemonset.yaml").unwrap();
    let pod = |set: &Value| set["spec"]["template"]["spec"].clone();
    let (rendered, written) = (pod(set), pod(of_kind(&written, "DaemonSet").unwrap()));
    for field in ["volumes", "tolerations", "nodeSelector", "priorityClassName", "terminationGracePeriodSeconds"] {
        assert_eq!(rendered[field], written[field], "{field}");
    }
    for field in ["image", "env", "securityContext", "volumeMounts", "resources", "livenessProbe", "ports"] {
        assert_eq!(rendered["containers"][0][field], written["containers"][0][field], "{field}");
    }
    let notes = chart.text("NOTES.txt", NAMESPACE, &json!({})).unwrap();
    assert!(notes.contains("exec -it ds/observe -- /usr/bin/keblet observe"), "{notes}");
}

/// Brackets of an IPv6 address reach the program.
#[test]
fn the_chart_serves_at_the_address_that_is_set() {
    let documents = chart().render(NAMESPACE, &json!({ "metrics": { "address": "[::]" } })).unwrap();
    let container = &of_kind(&documents, "DaemonSet").unwrap()["spec"]["template"]["spec"]["containers"][0];
    let arguments: Vec<&str> = container["args"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert!(arguments.contains(&"--metrics-address=[::]:9469"), "{arguments:?}");
    keblet::cli::parse(std::iter::once("keblet").chain(arguments).map(OsString::from)).unwrap();
}

#[test]
fn options_of_the_chart() {
    let chart = chart();
    let on = json!({ "enabled": true, "labels": { "release": "stack" } });
    let values = json!({
        "image": { "tag": "9" },
        "imagePullSecrets": [{ "name": "secret" }],
        "runtime": { "directory": "/run/crio", "socket": "crio.sock" },
        "jsonLines": false,
        "extraArgs": ["--interval=5s"],
        "metrics": { "port": 9000 },
        "seLinuxOptions": { "type": "spc_t" },
        "podLabels": { "team": "node" },
        "podAnnotations": { "a": "b" },
        "podMonitor": on,
        "prometheusRule": on,
        "dashboard": { "enabled": true },
        "serviceAccount": { "create": false },
    });
    let documents = chart.render(NAMESPACE, &values).unwrap();
    let mut kinds: Vec<&str> = documents.iter().map(|one| one["kind"].as_str().unwrap()).collect();
    kinds.sort_unstable();
    assert_eq!(kinds, ["ConfigMap", "DaemonSet", "PodMonitor", "PrometheusRule"]);
    let set = of_kind(&documents, "DaemonSet").unwrap();
    check_daemon_set(set);
    let container = &set["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(container["image"], "keblet.dev/keblet:9");
    assert_eq!(container["securityContext"]["seLinuxOptions"], json!({ "type": "spc_t" }));
    let arguments = container["args"].to_string();
    assert!(arguments.contains("unix:///run/crio/crio.sock") && !arguments.contains("--json"), "{arguments}");
    let monitor = of_kind(&documents, "PodMonitor").unwrap();
    assert_eq!(monitor["metadata"]["labels"]["release"], "stack");
    assert_eq!(monitor["spec"]["podMetricsEndpoints"][0]["honorLabels"], true);
    let rule = of_kind(&documents, "PrometheusRule").unwrap();
    assert_eq!(rule["spec"], manifest("deploy/prometheus/keblet-rules.yaml").unwrap()[0]);
    let map: ConfigMap = typed(of_kind(&documents, "ConfigMap").unwrap());
    let dashboard: Value = serde_json::from_str(&map.data.unwrap()["keblet-observe.json"]).unwrap();
    assert_eq!(dashboard["uid"], "keblet-observe");
}

/// Every value has a schema and the other way round, since the schema rejects what it does not know.
#[test]
fn the_schema_of_the_chart_knows_its_values() {
    fn compare(values: &Value, schema: &Value, path: &str) {
        let (Some(values), Some(properties)) = (values.as_object(), schema["properties"].as_object()) else { return };
        assert_eq!(schema["additionalProperties"], false, "{path}");
        for (name, value) in values {
            let schema = properties.get(name).unwrap_or_else(|| panic!("{path}.{name} has no schema"));
            compare(value, schema, &format!("{path}.{name}"));
        }
        let unknown = properties.keys().find(|name| !values.contains_key(*name) && *name != "global");
        assert_eq!(unknown, None, "{path}: a schema without a value");
    }
    let chart = chart();
    let schema: Value = serde_json::from_str(&read("deploy/helm/keblet-observe/values.schema.json")).unwrap();
    compare(chart.values(), &schema, "values");
}

#[test]
fn files_of_the_chart_are_those_of_the_folders_beside_it() {
    for (copy, original) in [
        ("files/rules.yaml", "deploy/prometheus/keblet-rules.yaml"),
        ("files/dashboard.json", "deploy/grafana/keblet-observe.json"),
    ] {
        assert_eq!(
            read(&format!("deploy/helm/keblet-observe/{copy}")),
            read(original),
            "{copy} differs from {original}"
        );
    }
}

#[test]
fn alert_rules_query_series_that_exist() {
    let rules = manifest("deploy/prometheus/keblet-rules.yaml").unwrap().remove(0);
    let series = series::of_observe();
    let groups = rules["groups"].as_array().unwrap().iter();
    let rules: Vec<&Value> = groups.flat_map(|group| group["rules"].as_array().unwrap()).collect();
    assert!(rules.len() >= 8);
    for rule in rules {
        let known = ["alert", "expr", "for", "labels", "annotations"];
        assert!(rule.as_object().unwrap().keys().all(|key| known.contains(&key.as_str())), "{rule}");
        assert!(rule["labels"]["severity"].is_string() && rule["annotations"]["summary"].is_string(), "{rule}");
        series::check(rule["expr"].as_str().unwrap(), &series);
    }
}

#[test]
fn the_dashboard_queries_series_that_exist() {
    let dashboard: Value = serde_json::from_str(&read("deploy/grafana/keblet-observe.json")).unwrap();
    let series = series::of_observe();
    let panels = dashboard["panels"].as_array().unwrap();
    let mut places = Vec::new();
    for panel in panels {
        assert!(panel["title"].is_string() && panel["description"].is_string(), "{panel}");
        let place = |name: &str| panel["gridPos"][name].as_u64().unwrap();
        assert!(place("x") + place("w") <= 24, "{panel}");
        places.push((place("x"), place("y")));
        for target in panel["targets"].as_array().unwrap() {
            series::check(target["expr"].as_str().unwrap(), &series);
        }
    }
    places.sort_unstable();
    places.dedup();
    assert_eq!(places.len(), panels.len(), "panels on the same place");
    let used = read("deploy/grafana/keblet-observe.json") + &read("deploy/prometheus/keblet-rules.yaml");
    let own = series.keys().filter(|name| name.starts_with("keblet_") && !OPEN.contains(&name.as_str()));
    let unused: Vec<&String> = own.filter(|name| !used.contains(name.as_str())).collect();
    assert_eq!(unused, Vec::<&String>::new(), "neither on a panel nor in a rule");
}

/// An increase is not seen of a series that begins with its first event: such a series counts as soon as it is there.
#[test]
fn first_kills_and_exits_are_seen() {
    let rules = manifest("deploy/prometheus/keblet-rules.yaml").unwrap().remove(0);
    let groups = rules["groups"].as_array().unwrap().iter();
    let rules = groups.flat_map(|group| group["rules"].as_array().unwrap());
    let dashboard: Value = serde_json::from_str(&read("deploy/grafana/keblet-observe.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().unwrap());
    let (series, mut seen) = (series::of_beginning(), 0);
    for query in rules.chain(targets).map(|one| one["expr"].as_str().unwrap()) {
        for name in series::increased(query) {
            let begins = series.contains_key(name) || query.contains(&format!(" unless {name}"));
            assert!(begins, "the first value of {name} is not seen: {query}");
            seen += 1;
        }
    }
    assert!(seen >= 8, "{seen}");
}

/// Every service is started again however often it has failed: pods on the node need the agent.
#[test]
fn services_are_restarted_without_limit() {
    for name in ["keblet.service", "kubelet.service"] {
        let unit = read(&format!("deploy/{name}"));
        let (head, service) = unit.split_once("\n[Service]\n").unwrap();
        assert!(head.contains("\n[Unit]\n") && head.lines().any(|line| line == "StartLimitIntervalSec=0"), "{unit}");
        assert!(service.lines().any(|line| line == "Restart=always"), "{unit}");
    }
}

/// Series that are there for queries of one's own.
const OPEN: [&str; 2] = ["keblet_observe_containers", "keblet_observe_info"];
