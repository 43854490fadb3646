//! What a file means by itself: defaults, zeros, and which documents and drop-ins are read.

use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::Value;

use super::Case;
use super::HEAD;
use crate::config::FlagValues;
use crate::config::document;
use crate::config::load;

#[test]
fn the_defaults_are_those_of_a_kubelet() {
    let text = include_str!("../../testdata/defaults.yaml");
    let mut documents = document::parse(Path::new("defaults.yaml"), text).expect("YAML");
    let expected = Value::Object(documents.remove(0).fields);
    assert_eq!(Case::new().main("").load().configz()["kubeletconfig"], expected);
}

/// Every field of the API that is no pointer and whose default is not zero.
const ZEROS: &str = "podLogsDir: ''\nsyncFrequency: 0s\nfileCheckFrequency: 0s\nhttpCheckFrequency: 0s\naddress: ''\n\
    port: 0\nvolumePluginDir: ''\nregistryBurst: 0\nimagePullCredentialsVerificationPolicy: ''\neventBurst: 0\n\
    healthzBindAddress: ''\nstreamingConnectionIdleTimeout: 0s\nnodeStatusUpdateFrequency: 0s\n\
    nodeStatusReportFrequency: 0s\nnodeLeaseDurationSeconds: 0\nimageMinimumGCAge: 0s\nvolumeStatsAggPeriod: 0s\n\
    cgroupDriver: ''\ncpuManagerPolicy: ''\ncpuManagerReconcilePeriod: 0s\nmemoryManagerPolicy: ''\n\
    topologyManagerPolicy: ''\ntopologyManagerScope: ''\nruntimeRequestTimeout: 0s\nhairpinMode: ''\nmaxPods: 0\n\
    maxOpenFiles: 0\ncontentType: ''\nkubeAPIBurst: 0\nevictionPressureTransitionPeriod: 0s\n\
    containerLogMaxSize: ''\nconfigMapAndSecretChangeDetectionStrategy: ''\nmemoryReservationPolicy: ''\n\
    containerRuntimeEndpoint: ''\nauthentication: {webhook: {cacheTTL: 0s}}\n\
    authorization: {mode: '', webhook: {cacheAuthorizedTTL: 0s, cacheUnauthorizedTTL: 0s}}\n";

#[test]
fn a_zero_of_a_plain_field_is_its_default() {
    let expected = Case::new().main("").load().kubelet;
    assert_eq!(Case::new().main(ZEROS).load().kubelet, expected);
    assert_eq!(Case::new().main("").drop_in("a.conf", ZEROS).load().kubelet, expected);
}

#[test]
fn a_zero_of_an_optional_field_is_a_value_also_below_a_drop_in() {
    let zeros = "registryPullQPS: 0\neventRecordQPS: 0\nkubeAPIQPS: 0\nhealthzPort: 0\nimageGCLowThresholdPercent: 0\n\
                 podPidsLimit: 0\nnodeStatusMaxImages: 0\noomScoreAdj: 0\nresolvConf: ''\n";
    let main = || Case::new().main(zeros);
    for case in [main(), main().drop_in("a.conf", "podsPerCore: 5\n"), Case::new().main("").drop_in("a.conf", zeros)] {
        let config = case.load().kubelet;
        assert_eq!((config.registry_pull_qps, config.event_record_qps, config.kube_api_qps), (0, 0, 0));
        assert_eq!((config.healthz_port, config.image_gc_low_threshold_percent, config.pod_pids_limit), (0, 0, 0));
        assert_eq!((config.node_status_max_images, config.oom_score_adj, config.resolv_conf.as_str()), (0, 0, ""));
    }
}

#[test]
fn each_file_has_the_documents_that_belong_there() {
    let own = "apiVersion: keblet.dev/v1alpha1\nkind: KebletConfiguration\n";
    let (twice, mixed) = (format!("{HEAD}---\n{HEAD}"), format!("{HEAD}---\n{own}"));
    let (twice, mixed) = (twice.as_str(), mixed.as_str());
    for (flag, text, message) in [
        ("config", twice, "a.conf:4: a second KubeletConfiguration; the first begins in line 1"),
        ("config", "apiVersion: kubelet.config.k8s.io/v1beta1\n", "a.conf:1: kind: required, and a string"),
        ("config-dir", twice, "a.conf:4: a drop-in holds one KubeletConfiguration and nothing else"),
        ("config-dir", mixed, "a.conf:4: a drop-in holds one KubeletConfiguration and nothing else"),
        ("config-dir", own, "a.conf:1: a drop-in holds one KubeletConfiguration and nothing else"),
        (
            "keblet-config",
            HEAD,
            "a.conf:1: expected KebletConfiguration; KubeletConfiguration belongs into the file of --config",
        ),
        (
            "keblet-config",
            "apiVersion: keblet.dev/v1\nkind: KebletConfiguration\n",
            "a.conf:1: apiVersion: \"keblet.dev/v1\" of KebletConfiguration is not supported; expected \
             keblet.dev/v1alpha1",
        ),
    ] {
        assert_eq!(Case::new().file("a.conf", text).path_flag(flag, "a.conf").error(), message, "--{flag}");
    }
}

/// As a ConfigMap is mounted.
#[test]
fn links_to_drop_ins_are_read_and_links_to_directories_are_not_entered() {
    let case = Case::new()
        .file("elsewhere/a.txt", &format!("{HEAD}maxPods: 5\n"))
        .file("elsewhere/b.conf", &format!("{HEAD}podsPerCore: 3\n"))
        .file("conf.d/sub.conf/c.conf", &format!("{HEAD}port: 10333\n"));
    let folder = case.folder.path();
    for (target, link) in [("elsewhere/a.txt", "conf.d/a.conf"), ("elsewhere", "conf.d/linked"), ("conf.d", "linked.d")]
    {
        symlink(folder.join(target), folder.join(link)).expect("a link");
    }
    let loaded = |name: &str| {
        let path = folder.join(name);
        let flags: FlagValues = [("config-dir", path.to_str().expect("a path"))].into_iter().collect();
        load(&flags).map(|settings| (settings.kubelet.max_pods, settings.kubelet.pods_per_core, settings.kubelet.port))
    };
    assert_eq!(loaded("conf.d").expect("acceptable"), (5, 0, 10333));
    assert_eq!(loaded("linked.d").expect("acceptable"), (110, 0, 10250));
    let missing = loaded("none").expect_err("there is no directory").to_string();
    assert!(missing.starts_with("cannot read ") && missing.contains("/none: "), "{missing}");
}
