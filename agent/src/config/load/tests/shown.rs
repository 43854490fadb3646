//! What is shown of loaded settings: the whole configuration, and notices of what has no effect.

use std::collections::BTreeSet;

use serde_json::Value;
use serde_json::json;

use super::Case;
use crate::config::KubeletConfiguration;
use crate::config::Settings;
use crate::config::schema;
use crate::config::schema::Described;
use crate::config::settings::to_json;

fn every_field() -> Settings {
    let case =
        Case::new().file("all.yaml", include_str!("../../testdata/every-field.yaml")).path_flag("config", "all.yaml");
    case.load()
}

#[test]
fn every_field_is_known_described_and_set() {
    let settings = every_field();
    let written = to_json(&settings.kubelet);
    let defaults = to_json(&KubeletConfiguration::default());
    let mut described = BTreeSet::new();
    schema::walk(KubeletConfiguration::FIELDS, &mut |path, _| {
        described.insert(path.split('.').next().expect("never empty").to_owned());
        // These must stay at their default to be accepted beside the others, or at all.
        let fixed = [
            "runOnce",
            "cgroupsPerQOS",
            "reservedSystemCPUs",
            "shutdownGracePeriod",
            "shutdownGracePeriodCriticalPods",
            "logging.format",
            "enableSystemLogHandler",
        ];
        let at = |map: &serde_json::Map<String, Value>| {
            path.split('.').try_fold(Value::Object(map.clone()), |value, name| value.get(name).cloned())
        };
        assert!(fixed.contains(&path) || at(&written) != at(&defaults), "{path} is not set in every-field.yaml");
    });
    let names: BTreeSet<String> = written.keys().cloned().collect();
    assert_eq!(names, described);
}

#[test]
fn rendering_and_reading_again_changes_nothing() {
    let settings = every_field();
    let document = settings.configz()["kubeletconfig"].clone();
    let text = serde_json::to_string(&document).expect("JSON");
    let again = Case::new().file("c.json", &text).path_flag("config", "c.json").load();
    assert_eq!(again.kubelet, settings.kubelet);
}

#[test]
fn configz_shows_what_the_api_would() {
    let case = Case::new().main("maxPods: 7\nhealthzPort: 0\nfailSwapOn: false\n");
    let shown = case.load().configz();
    let shown = &shown["kubeletconfig"];
    assert_eq!(shown["kind"], json!("KubeletConfiguration"));
    assert_eq!(shown["apiVersion"], json!("kubelet.config.k8s.io/v1beta1"));
    assert_eq!((&shown["maxPods"], &shown["healthzPort"], &shown["failSwapOn"]), (&json!(7), &json!(0), &json!(false)));
    assert_eq!(shown["shutdownGracePeriod"], json!("0s"));
    assert_eq!(shown["streamingConnectionIdleTimeout"], json!("4h0m0s"));
    for absent in ["readOnlyPort", "runOnce", "systemReserved", "providerID", "maxParallelImagePulls"] {
        assert_eq!(shown.get(absent), None, "{absent}");
    }
}

#[test]
fn the_log_shows_both_documents_without_secrets() {
    let main =
        "maxPods: 7\nstaticPodURL: https://me:secret@pods.test/all\nstaticPodURLHeader: {Token: [secret, other]}\n";
    let logged = Case::new().main(main).load().logged();
    let documents: Vec<Value> = serde_saphyr::from_multiple(&logged).expect("documents");
    let [standard, own] = documents.as_slice() else { panic!("two: {logged}") };
    assert_eq!((&standard["kind"], &own["kind"]), (&json!("KubeletConfiguration"), &json!("KebletConfiguration")));
    assert_eq!((&standard["maxPods"], &own["sensors"]["bpf"]), (&json!(7), &json!(true)));
    assert_eq!(standard["staticPodURLHeader"], json!({ "Token": ["<masked>"] }));
    assert_eq!(standard["staticPodURL"], json!("https://me:masked@pods.test/all"));
    for line in ["kind: KubeletConfiguration", "maxPods: 7"] {
        assert!(logged.lines().any(|found| found == line), "{line} is missing in:\n{logged}");
    }
}

#[test]
fn notices_name_what_has_no_effect() {
    let settings = Case::new()
        .main("maxPods: 7\nenableContentionProfiling: true\nhairpinMode: none\nfeatureGates: {NativeHistograms: true, NodeSwap: true}\n")
        .flag("experimental-mounter-path", "/srv")
        .flag("file-check-frequency", "2m")
        .flag("log-cadvisor-usage", "true")
        .load();
    let notices = settings.notices().join("\n");
    for expected in [
        "flag --file-check-frequency is deprecated; set fileCheckFrequency in the file of --config instead",
        "flag --log-cadvisor-usage is deprecated and has no effect",
        "feature gate NodeSwap=true will be removed in a future release",
        "feature gate NativeHistograms=true is accepted but not honoured yet",
        "--experimental-mounter-path is accepted but not honoured yet",
    ] {
        assert!(notices.contains(expected), "{expected:?} is missing in:\n{notices}");
    }
    assert!(notices.lines().any(|line| line.starts_with("enableContentionProfiling (")
        && line.ends_with("main.yaml:4) is accepted but not honoured yet")));
    assert!(notices.lines().any(|line| line.starts_with("hairpinMode (")
        && line.ends_with("main.yaml:5) is accepted and has no effect, as in a kubelet")));
    assert!(!notices.contains("fileCheckFrequency ("), "a field that is honoured has no notice");
}

#[test]
fn notices_name_servers_that_are_no_addresses() {
    let notices = |servers: &str| Case::new().flag("cluster-dns", servers).load().notices().join("\n");
    let ignored = "clusterDNS[1] (--cluster-dns) is ignored: \"10.96.0.l0\" is not an IP address";
    assert!(notices("10.96.0.10,10.96.0.l0").contains(ignored));
    assert!(!notices("10.96.0.10,fd00::a").contains("is ignored"));
}

#[test]
fn notices_name_gates_whose_value_is_not_honoured() {
    let notices = |gates: &str| Case::new().main(&format!("featureGates: {{{gates}}}\n")).load().notices().join("\n");
    for honoured in [
        "ContainerStopSignals: true",
        "EnvFiles: false",
        "RotateKubeletServerCertificate: false",
        "ClusterTrustBundle: true, ClusterTrustBundleProjection: true",
        "HostnameOverride: false",
        "WindowsGracefulNodeShutdown: true",
    ] {
        let shown = notices(honoured);
        assert!(!shown.contains("feature gate"), "{honoured}: {shown}");
    }
    for ignored in ["PodReadyToStartContainersCondition=false", "NativeHistograms=true"] {
        let shown = notices(&ignored.replace('=', ": "));
        assert!(shown.contains(&format!("feature gate {ignored} is accepted but not honoured yet")), "{shown}");
    }
    for foreign in ["WindowsGracefulNodeShutdown=false", "HPAScaleToZero=true"] {
        let shown = notices(&foreign.replace('=', ": "));
        assert!(shown.contains(&format!("feature gate {foreign} has no effect, as in a kubelet")), "{shown}");
    }
}
