mod layers;
mod mirrored;
mod shown;

use proptest::prelude::*;

use super::*;
use crate::config::HostFacts;
use crate::config::KubeletConfiguration;
use crate::config::duration::GoDuration;
use crate::config::feature_gates::Feature;

const HEAD: &str = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";

/// A folder with configuration files and the flags that name them.
struct Case {
    folder: tempfile::TempDir,
    flags: FlagValues,
}

impl Case {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("a temporary folder"), flags: FlagValues::default() }
    }

    fn file(self, name: &str, text: &str) -> Self {
        let path = self.folder.path().join(name);
        fs::create_dir_all(path.parent().expect("below the folder")).expect("create folder");
        fs::write(path, text).expect("write file");
        self
    }

    fn main(self, fields: &str) -> Self {
        self.file("main.yaml", &format!("{HEAD}{fields}")).path_flag("config", "main.yaml")
    }

    fn drop_in(self, name: &str, fields: &str) -> Self {
        let case = self.file(&format!("conf.d/{name}"), &format!("{HEAD}{fields}"));
        if case.flags.texts().any(|(flag, _)| flag == "config-dir") {
            case
        } else {
            case.path_flag("config-dir", "conf.d")
        }
    }

    fn path_flag(self, flag: &str, name: &str) -> Self {
        let path = self.folder.path().join(name).to_string_lossy().into_owned();
        self.flag(flag, &path)
    }

    fn flag(mut self, name: &str, text: &str) -> Self {
        self.flags.push(super::super::flags::find(name).expect("a known flag"), text);
        self
    }

    fn load(&self) -> Settings {
        load(&self.flags).unwrap_or_else(|error| panic!("must load: {error}"))
    }

    /// The error, with the folder's name left out.
    fn error(&self) -> String {
        let error = load(&self.flags).expect_err("must be refused").to_string();
        error.replace(&format!("{}/", self.folder.path().display()), "")
    }
}

#[test]
fn nothing_given_means_upstreams_legacy_defaults() {
    let settings = Case::new().load();
    let config = &settings.kubelet;
    assert!(config.authentication.anonymous.enabled);
    assert!(!config.authentication.webhook.enabled);
    assert_eq!(config.authorization.mode, "AlwaysAllow");
    assert_eq!(config.read_only_port, 10255);
    assert!(config.eviction_hard.is_empty());
    assert_eq!(config.crash_loop_back_off.max_container_restart_period, Some(GoDuration::secs(300)));
    assert_eq!(settings.origin("readOnlyPort"), Origin::LegacyDefault);
    assert_eq!(settings.origin("port"), Origin::Default);
    assert_eq!(settings.notices(), [] as [String; 0]);
}

#[test]
fn a_file_brings_the_secure_defaults() {
    let config = Case::new().main("").load().kubelet;
    let expected = KubeletConfiguration::default();
    assert_eq!(config.authentication, expected.authentication);
    assert_eq!(config.authorization.mode, "Webhook");
    assert_eq!(config.read_only_port, 0);
    assert_eq!(config.eviction_hard["memory.available"], "100Mi");
    assert_eq!(config.eviction_hard.len(), 5);
}

#[test]
fn zero_means_absent_for_plain_fields_and_zero_for_optional_ones() {
    let text = "port: 0\nmaxPods: 0\nruntimeRequestTimeout: 0s\ncgroupDriver: ''\nhealthzPort: 0\nkubeAPIQPS: 0\noomScoreAdj: 0\n";
    let settings = Case::new().main(text).load();
    let config = &settings.kubelet;
    assert_eq!((config.port, config.max_pods, config.runtime_request_timeout), (10250, 110, GoDuration::mins(2)));
    assert_eq!(config.cgroup_driver, "cgroupfs");
    assert_eq!((config.healthz_port, config.kube_api_qps, config.oom_score_adj), (0, 0, 0));
    assert_eq!(settings.origin("port"), Origin::Default, "a value that does not count was not set");
}

#[test]
fn a_text_of_zero_is_a_value_unless_it_is_a_duration() {
    let text = "reservedSystemCPUs: '0'\ncontainerLogMaxSize: '0'\nproviderID: 0s\nsyncFrequency: '0'\n";
    let main = Case::new().main(text);
    let drop_in = Case::new().main("").drop_in("a.conf", text).drop_in("b.conf", "maxPods: 5\n");
    for (case, file) in [(main, "main.yaml:3"), (drop_in, "a.conf:3")] {
        let settings = case.load();
        let config = &settings.kubelet;
        assert_eq!((config.reserved_system_cpus.as_str(), config.container_log_max_size.as_str()), ("0", "0"));
        assert_eq!((config.provider_id.as_str(), config.sync_frequency), ("0s", GoDuration::mins(1)));
        assert!(settings.origin("reservedSystemCPUs").to_string().ends_with(file), "{file}");
        assert_eq!(settings.origin("syncFrequency"), Origin::Default);
    }
}

#[test]
fn a_zero_of_another_type_is_an_error() {
    for (text, field) in [
        ("serverTLSBootstrap: 0\n", "serverTLSBootstrap"),
        ("clusterDNS: 0\n", "clusterDNS"),
        ("maxPods: ''\n", "maxPods"),
        ("topologyManagerScope: 0\n", "topologyManagerScope"),
        ("syncFrequency: ''\n", "syncFrequency"),
        ("memorySwap: {swapBehavior: 0}\n", "memorySwap.swapBehavior"),
    ] {
        let error = Case::new().main(text).error();
        assert!(error.contains(&format!("main.yaml:3: {field}: ")), "{text:?}: {error}");
    }
}

#[test]
fn zero_on_the_command_line_is_zero() {
    assert_eq!(Case::new().main("").flag("max-pods", "0").load().kubelet.max_pods, 0);
    let error = Case::new().flag("port", "0").error();
    assert_eq!(error, "invalid configuration: --port: port: 0 is out of range; expected 1 to 65535");
}

#[test]
fn dependent_defaults() {
    let config = |text: &str| Case::new().main(text).load().kubelet;
    assert!(config("").serialize_image_pulls);
    assert!(config("maxParallelImagePulls: 1\n").serialize_image_pulls);
    assert!(!config("maxParallelImagePulls: 2\n").serialize_image_pulls);
    assert_eq!(config("nodeStatusUpdateFrequency: 7s\n").node_status_report_frequency, GoDuration::secs(7));
    assert_eq!(config("").node_status_report_frequency, GoDuration::mins(5));
    let off = config("featureGates: {KubeletCrashLoopBackOffMax: false, KubeletEnsureSecretPulledImages: false}\n");
    assert_eq!(off.crash_loop_back_off.max_container_restart_period, None);
    assert_eq!(off.image_pull_credentials_verification_policy, "");
    let by_flag = Case::new().main("").flag("feature-gates", "KubeletCrashLoopBackOffMax=false").load().kubelet;
    assert_eq!(by_flag.crash_loop_back_off.max_container_restart_period, None);
    let of_both = Case::new().main("featureGates: {KubeletCrashLoopBackOffMax: true}\n");
    let of_both = of_both.flag("feature-gates", "KubeletCrashLoopBackOffMax=false").load().kubelet;
    assert_eq!(of_both.crash_loop_back_off.max_container_restart_period, None, "the flag's gate counts");
    let legacy = Case::new().flag("feature-gates", "KubeletEnsureSecretPulledImages=false").load().kubelet;
    assert_eq!(legacy.image_pull_credentials_verification_policy, "");
}

#[test]
fn hard_thresholds_replace_or_merge() {
    let hard = |text: &str| Case::new().main(text).load().kubelet.eviction_hard;
    assert_eq!(hard("evictionHard: {memory.available: 5%}\n").len(), 1);
    assert_eq!(hard("evictionHard: {}\n").len(), 0);
    let merged = hard("evictionHard: {memory.available: 5%}\nmergeDefaultEvictionSettings: true\n");
    assert_eq!((merged.len(), merged["memory.available"].as_str()), (5, "5%"));
    // A drop-in meets thresholds that are already defaulted, so its keys join them.
    let joined = Case::new().main("").drop_in("10.conf", "evictionHard: {memory.available: 5%}\n").load();
    assert_eq!(joined.kubelet.eviction_hard.len(), 5);
    assert_eq!(joined.kubelet.eviction_hard["memory.available"], "5%");
}

#[test]
fn drop_ins_bring_no_default_thresholds() {
    let hard = |case: Case| case.load().kubelet.eviction_hard;
    let off = || Case::new().main("evictionHard: {}\n");
    assert_eq!(hard(off().drop_in("a.conf", "maxPods: 5\n").drop_in("b.conf", "maxPods: 6\n")).len(), 0);
    assert_eq!(hard(Case::new().main("").drop_in("a.conf", "evictionHard: null\n")).len(), 0);
    let one = "evictionHard: {memory.available: 5%}\n";
    for case in [off().drop_in("a.conf", one), Case::new().drop_in("a.conf", one)] {
        assert_eq!(hard(case), [("memory.available".to_owned(), "5%".to_owned())].into());
    }
}

#[test]
fn drop_ins_merge_in_order_of_their_names() {
    let settings = Case::new()
        .main("maxPods: 10\nclusterDNS: [10.0.0.1, 10.0.0.2]\nsystemReserved: {cpu: 100m, memory: 1Gi}\nport: 10333\n")
        .drop_in("20-b.conf", "maxPods: 30\nclusterDNS: [10.0.0.3]\n")
        .drop_in("10-a.conf", "maxPods: 20\nsystemReserved: {memory: 2Gi}\nport: null\n")
        .drop_in("15-sub/x.conf", "podsPerCore: 4\n")
        .file("conf.d/99-other.yaml", "not: read\n")
        .load();
    let config = &settings.kubelet;
    assert_eq!((config.max_pods, config.pods_per_core, config.port), (30, 4, 10250));
    assert_eq!(config.cluster_dns, ["10.0.0.3"]);
    assert_eq!(config.system_reserved, [("cpu", "100m"), ("memory", "2Gi")].map(|(k, v)| (k.into(), v.into())).into());
    assert!(settings.origin("maxPods").to_string().ends_with("conf.d/20-b.conf:3"));
    assert!(settings.origin("systemReserved.cpu").to_string().ends_with("main.yaml:5"));
    assert!(settings.origin("systemReserved.memory").to_string().ends_with("10-a.conf:4"));
    assert_eq!(settings.origin("port"), Origin::Default);
}

#[test]
fn a_file_in_the_place_of_the_directory_and_one_without_a_stem_are_drop_ins() {
    let text = format!("{HEAD}maxPods: 5\n");
    let loaded = |name: &str, flag: &str| Case::new().file(name, &text).path_flag("config-dir", flag).load();
    for (name, flag, pods) in
        [("a.conf", "a.conf", 5), ("conf.d/.conf", "conf.d", 5), ("a.yaml", "a.yaml", 110), ("d/conf", "d", 110)]
    {
        assert_eq!(loaded(name, flag).kubelet.max_pods, pods, "{name}");
    }
}

#[test]
fn drop_ins_without_a_main_file_keep_the_legacy_defaults() {
    let settings = Case::new().drop_in("a.conf", "maxPods: 5\n").load();
    assert_eq!((settings.kubelet.max_pods, settings.kubelet.read_only_port), (5, 10255));
    assert_eq!(settings.kubelet.authorization.mode, "AlwaysAllow");
    assert!(settings.kubelet.eviction_hard.is_empty(), "only the main file brings the hard eviction defaults");
    assert_eq!(settings.origin("evictionHard"), Origin::LegacyDefault);
}

#[test]
fn flags_win_over_every_file() {
    let settings = Case::new()
        .main("maxPods: 10\nfeatureGates: {EventedPLEG: true, MemoryQoS: true}\nevictionHard: {memory.available: 5%}\n")
        .drop_in("a.conf", "maxPods: 20\n")
        .flag("max-pods", "30")
        .flag("feature-gates", "EventedPLEG=false")
        .flag("eviction-hard", "nodefs.available<7%")
        .flag("eviction-hard", "imagefs.available<8%")
        .load();
    assert_eq!(settings.kubelet.max_pods, 30);
    assert_eq!(settings.origin("maxPods"), Origin::Flag("max-pods"));
    assert!(!settings.gates.enabled(Feature::EventedPLEG), "gates merge name by name");
    assert!(settings.gates.enabled(Feature::MemoryQoS));
    let expected = [("imagefs.available", "8%"), ("nodefs.available", "7%")].map(|(k, v)| (k.into(), v.into()));
    assert_eq!(settings.kubelet.eviction_hard, expected.into(), "other maps are replaced");
}

#[test]
fn relative_paths_of_the_main_file_start_at_its_folder() {
    let case = Case::new().main(
        "staticPodPath: pods/\nresolvConf: ''\npodLogsDir: ./logs/../pod-logs\n\
         authentication: {x509: {clientCAFile: ../ca.crt}}\ntlsCertFile: tls.crt\ntlsPrivateKeyFile: tls.key\n\
         volumePluginDir: flex\n",
    );
    let config = case.load().kubelet;
    assert_eq!(Path::new(&config.static_pod_path), case.folder.path().join("pods"));
    assert_eq!(config.pod_logs_dir, case.folder.path().join("pod-logs").to_string_lossy());
    assert_eq!(Path::new(&config.authentication.x509.client_ca_file), case.folder.path().with_file_name("ca.crt"));
    assert_eq!(config.resolv_conf, "");
    for (path, name) in [
        (config.tls_cert_file, "tls.crt"),
        (config.tls_private_key_file, "tls.key"),
        (config.volume_plugin_dir, "flex"),
    ] {
        assert_eq!(Path::new(&path), case.folder.path().join(name));
    }
    let case = Case::new().main("resolvConf: resolv.conf\nstaticPodPath: /etc/pods\n");
    let config = case.load().kubelet;
    assert_eq!(Path::new(&config.resolv_conf), case.folder.path().join("resolv.conf"));
    assert_eq!(config.static_pod_path, "/etc/pods");
    let config = Case::new().main("").drop_in("a.conf", "staticPodPath: pods\n").load().kubelet;
    assert_eq!(config.static_pod_path, "pods", "those of drop-ins are taken as they are");
}

#[test]
fn keblets_own_document() {
    let own = "---\napiVersion: keblet.dev/v1alpha1\nkind: KebletConfiguration\nsensors: {bpf: false}\nrelist: {period: 10m}\n";
    let same_file = Case::new().main(&format!("maxPods: 3\n{own}")).load();
    assert!(!same_file.keblet.sensors.bpf && same_file.keblet.sensors.pidfd);
    assert_eq!(same_file.keblet.relist.period, GoDuration::mins(10));
    assert_eq!(same_file.kubelet.max_pods, 3);
    let own_file = Case::new().file("own.yaml", own).path_flag("keblet-config", "own.yaml").load();
    assert_eq!(own_file.keblet, same_file.keblet);
    let both = Case::new().main(own).file("own.yaml", own).path_flag("keblet-config", "own.yaml").error();
    assert_eq!(both, "own.yaml:2: a second KebletConfiguration; the first is at main.yaml:4");
    let bad = own.replace("10m", "1ms");
    let error = Case::new().file("own.yaml", &bad).path_flag("keblet-config", "own.yaml").error();
    assert!(error.contains("own.yaml:5: relist.period: 1ms is too small; expected at least 100ms"), "{error}");
}

#[test]
fn bad_input_names_file_line_and_field() {
    for (fields, message) in [
        ("maxPod: 3\n", "main.yaml:3: maxPod: unknown field; did you mean maxPods?"),
        (
            "authentication:\n  anonymous:\n    enable: true\n",
            "main.yaml:5: authentication.anonymous.enable: unknown field; did you mean enabled?",
        ),
        ("xyzzy: 1\n", "main.yaml:3: xyzzy: unknown field"),
        ("port: 1\nmaxPods: 2\nport: 3\n", "main.yaml:5: port: written twice; the first time in line 3"),
        ("maxPods: many\n", "main.yaml:3: maxPods: invalid type: string \"many\", expected i32"),
        ("maxPods: 1.5\n", "main.yaml:3: maxPods: invalid type: floating point `1.5`, expected i32"),
        ("failSwapOn: 1\n", "main.yaml:3: failSwapOn: invalid type: integer `1`, expected a boolean"),
        ("clusterDNS:\n- 10.0.0.1\n- 7\n", "main.yaml:5: clusterDNS[1]: invalid type: integer `7`, expected a string"),
        (
            "syncFrequency: 10\n",
            "main.yaml:3: syncFrequency: invalid type: integer `10`, expected a string that is a duration, such as \"10s\"",
        ),
        (
            "syncFrequency: 1 minute\n",
            "main.yaml:3: syncFrequency: \"1 minute\" is not a duration; write a number with a unit, such as \"10s\", \"1m30s\" or \"250ms\"",
        ),
        ("maxPods: -1\n", "invalid configuration: main.yaml:3: maxPods: -1 is too small; expected at least 0"),
        (
            "featureGates:\n  NoSuch: true\n",
            "invalid feature gates: main.yaml:4: featureGates.NoSuch: unrecognized feature gate: NoSuch",
        ),
        (
            "evictionHard:\n  memory.availble: 5%\n",
            "invalid configuration: main.yaml:4: evictionHard.memory.availble: unsupported eviction signal memory.availble",
        ),
        (
            "evictionHard:\n  memory.available: 1Gi\nevictionSoft:\n  memory.available: 500Mi\nevictionSoftGracePeriod: \
             {memory.available: 1m}\n",
            "invalid configuration: main.yaml:6: evictionSoft.memory.available: 500Mi is below evictionHard.memory.available \
             (1Gi), which evicts before any grace period begins",
        ),
        (
            "---\nkind: Pod\napiVersion: v1\n",
            "main.yaml:4: kind: \"Pod\" is not supported; expected KubeletConfiguration or KebletConfiguration",
        ),
    ] {
        assert_eq!(Case::new().main(fields).error(), message);
    }
}

#[test]
fn pressure_settings_are_rejected_with_file_and_line() {
    let own = "apiVersion: keblet.dev/v1alpha1\nkind: KebletConfiguration\npressure:\n  policies:\n  - name: a\n    shortWindow: 10s\n";
    let error = Case::new().main("").file("own.yaml", own).path_flag("keblet-config", "own.yaml").error();
    assert_eq!(
        error,
        "invalid configuration: own.yaml:6: pressure.policies[0].shortWindow: 10s must be shorter than \
         pressure.policies[0].longWindow (5s)"
    );
}

#[test]
fn several_violations_are_reported_together() {
    let error = Case::new().main("maxPods: -1\nport: 70000\n").flag("oom-score-adj", "-2000").error();
    assert_eq!(
        error,
        "invalid configuration: \n  main.yaml:4: port: 70000 is out of range; expected 1 to 65535\n  \
         main.yaml:3: maxPods: -1 is too small; expected at least 0\n  \
         --oom-score-adj: oomScoreAdj: -2000 is out of range; expected -1000 to 1000"
    );
}

#[test]
fn wrong_files() {
    let config = |text: &str| Case::new().file("main.yaml", text).path_flag("config", "main.yaml").error();
    assert_eq!(config(""), "main.yaml: the file is empty");
    assert_eq!(config("# nothing\n"), "main.yaml: the file is empty");
    assert_eq!(config("- a\n"), "main.yaml:1: expected a mapping of field names to values");
    assert_eq!(config("kind: KubeletConfiguration\n"), "main.yaml:1: apiVersion: required, and a string");
    assert_eq!(
        config("apiVersion: kubelet.config.k8s.io/v1\nkind: KubeletConfiguration\n"),
        "main.yaml:1: apiVersion: \"kubelet.config.k8s.io/v1\" of KubeletConfiguration is not supported; expected kubelet.config.k8s.io/v1beta1"
    );
    assert_eq!(
        config("apiVersion: keblet.dev/v1alpha1\nkind: KebletConfiguration\n"),
        "main.yaml: holds no KubeletConfiguration; for a KebletConfiguration alone use --keblet-config"
    );
    assert!(config(&format!("{HEAD}a: [1\n")).starts_with("main.yaml:"), "syntax errors have a place");
    let missing = Case::new().path_flag("config", "none.yaml").error();
    assert!(missing.starts_with("cannot read none.yaml: "), "{missing}");
    let empty = Case::new().main("").file("conf.d/a.conf", "").path_flag("config-dir", "conf.d").error();
    assert_eq!(empty, "conf.d/a.conf: the file is empty");
    let unknown = Case::new().main("").drop_in("a.conf", "maxPodz: 1\n").error();
    assert_eq!(unknown, "conf.d/a.conf:3: maxPodz: unknown field; did you mean maxPods?");
}

#[test]
fn an_empty_path_names_no_document() {
    let settings = Case::new().flag("config", "").flag("config-dir", "").flag("keblet-config", "").load();
    assert_eq!((settings.kubelet.read_only_port, &settings.flags.config), (10255, &None));
}

#[test]
fn json_is_as_good_as_yaml() {
    let text = r#"{"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration", "maxPods": 7}"#;
    assert_eq!(Case::new().file("c.json", text).path_flag("config", "c.json").load().kubelet.max_pods, 7);
}

#[test]
fn hosts_are_refused_with_the_setting_that_allows_them() {
    let v1 = HostFacts { cgroup_v1: true, ..HostFacts::default() };
    let error = Case::new().load().check_host(&v1).expect_err("cgroup v1").to_string();
    assert!(error.contains("kubelet is configured to not run on a host using cgroup v1"), "{error}");
    assert!(error.contains("set failCgroupV1: false (or --fail-cgroupv1=false)"), "{error}");
    assert!(Case::new().flag("fail-cgroupv1", "false").load().check_host(&v1).is_ok());
    assert!(Case::new().load().check_host(&HostFacts::default()).is_ok());
    let swap = HostFacts { swap_active: true, ..HostFacts::default() };
    assert!(Case::new().load().check_host(&swap).is_err());
    let limited = Case::new().main("failCgroupV1: false\nmemorySwap: {swapBehavior: LimitedSwap}\n").load();
    let error = limited.check_host(&v1).expect_err("cgroup v1 cannot limit swap alone").to_string();
    assert!(error.contains("LimitedSwap but it is only supported with cgroupv2"), "{error}");
    assert!(limited.check_host(&HostFacts::default()).is_ok());
    for (field, value) in [("singleProcessOOMKill", "false"), ("memoryReservationPolicy", "TieredReservation")] {
        let settings = Case::new().main(&format!("failCgroupV1: false\n{field}: {value}\n")).load();
        let error = settings.check_host(&v1).expect_err(field).to_string();
        assert!(error.contains(&format!("main.yaml:4: {field}: ")), "{error}");
        assert!(settings.check_host(&HostFacts::default()).is_ok(), "{field}");
    }
    assert!(Case::new().flag("fail-swap-on", "false").load().check_host(&swap).is_ok());
}

#[test]
fn reserved_cpus_are_online() {
    let reserved = Case::new().flag("reserved-cpus", "0,2-3").load();
    let host = |online: &str| HostFacts { online_cpus: online.to_owned(), ..HostFacts::default() };
    let error = reserved.check_host(&host("0-2,4")).expect_err("CPU 3 is offline").to_string();
    assert!(error.contains("reserved-cpus: 0,2-3 is not a subset of online-cpus: 0-2,4"), "{error}");
    assert!(reserved.check_host(&host("")).is_err(), "it is not known which are online");
    assert!(reserved.check_host(&host("0-3")).is_ok());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever a file holds, loading ends in settings or in an error that names the file.
    #[test]
    fn any_text_is_settings_or_an_error(text in "(maxPods|port|logging|[a-z]{1,5})?: ?(\\{|\\[|&a |\\*a|!!int |[-0-9.]{0,4}|'|\"|\\|\n  )?[ -~\n\t]{0,30}") {
        let case = Case::new().main(&text);
        if let Err(error) = load(&case.flags) {
            prop_assert!(error.to_string().contains("main.yaml"), "{error}");
        }
    }

    /// The last layer that names a field decides, whichever layers there are.
    #[test]
    fn precedence(file in proptest::option::of(1..50i32), first in proptest::option::of(50..100i32),
                  second in proptest::option::of(100..150i32), flag in proptest::option::of(0..200i32)) {
        let line = |value: Option<i32>| value.map(|value| format!("maxPods: {value}\n")).unwrap_or_default();
        let mut case = Case::new().main(&line(file)).drop_in("1.conf", &line(first)).drop_in("2.conf", &line(second));
        if let Some(value) = flag {
            case = case.flag("max-pods", &value.to_string());
        }
        let settings = case.load();
        prop_assert_eq!(settings.kubelet.max_pods, flag.or(second).or(first).or(file).unwrap_or(110));
        let origin = settings.origin("maxPods");
        let place = case.folder.path().join(if second.is_some() { "conf.d/2.conf" } else { "conf.d/1.conf" });
        let expected = match (flag, second.or(first), file) {
            (Some(_), _, _) => Origin::Flag("max-pods"),
            (None, Some(_), _) => Origin::DropIn(Place { file: place, line: 3 }),
            (None, None, Some(_)) => Origin::File(Place { file: case.folder.path().join("main.yaml"), line: 3 }),
            (None, None, None) => Origin::Default,
        };
        prop_assert_eq!(origin, expected);
    }
}
