//! What kubeadm 1.36 writes, taken as the drop-in of the systemd unit hands it over.

use std::ffi::OsString;
use std::path::Path;

use super::Command;
use super::parse;
use crate::config::Settings;
use crate::config::load;

const DROP_IN: &str = include_str!("../../../deploy/10-kubeadm.conf");

/// The command line that systemd makes of the drop-in and an environment file.
fn command_line(environment_file: &str) -> Vec<String> {
    let assignments =
        DROP_IN.lines().filter_map(|line| line.strip_prefix("Environment=")).chain(environment_file.lines());
    let variables: Vec<(String, String)> = assignments
        .map(|assignment| {
            let (name, value) = assignment.split_once('=').expect("an assignment");
            (name.trim_matches('"').to_owned(), value.trim_matches('"').to_owned())
        })
        .collect();
    let line = DROP_IN.lines().filter_map(|line| line.strip_prefix("ExecStart=")).next_back().expect("a command");
    let value = |name: &str| {
        let found = variables.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str()).unwrap_or_default()
    };
    let expand = |word: &str| match word.strip_prefix('$') {
        Some(name) => value(name).split_whitespace().map(str::to_owned).collect(),
        None => vec![word.to_owned()],
    };
    line.split_whitespace().flat_map(expand).collect()
}

fn settings(environment_file: &str) -> Settings {
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cli/testdata/kubeadm/config.yaml");
    let line = command_line(environment_file).into_iter().map(|word| match word.as_str() {
        "--config=/var/lib/kubelet/config.yaml" => OsString::from(format!("--config={}", config.display())),
        _ => OsString::from(word),
    });
    let cli = parse(line).unwrap_or_else(|error| panic!("{error}"));
    let Command::Run(args) = cli.command else { panic!("kubelet runs") };
    load(&args.flags).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn nothing_in_it_is_unknown() {
    let files = [
        include_str!("testdata/kubeadm/flags.env"),
        include_str!("testdata/kubeadm/flags-with-socket.env"),
        include_str!("testdata/kubeadm/flags-of-old.env"),
    ];
    for file in files {
        let settings = settings(file);
        for notice in settings.notices() {
            assert!(notice.starts_with("flag --"), "only old flags are worth a notice: {notice}");
        }
        assert_eq!(settings.flags.hostname_override, "node-1");
        assert_eq!(settings.kubelet.container_runtime_endpoint, "unix:///run/containerd/containerd.sock");
        assert_eq!(settings.kubelet.cgroup_driver, "systemd");
    }
}

#[test]
fn it_means_what_kubeadm_means() {
    let settings = settings(include_str!("testdata/kubeadm/flags-with-socket.env"));
    let (flags, kubelet) = (&settings.flags, &settings.kubelet);
    assert_eq!(flags.kubeconfig, "/etc/kubernetes/kubelet.conf");
    assert_eq!(flags.bootstrap_kubeconfig, "/etc/kubernetes/bootstrap-kubelet.conf");
    assert_eq!(flags.node_ip, "192.0.2.10");
    assert_eq!(kubelet.cluster_dns, ["10.96.0.10"]);
    assert_eq!(kubelet.cluster_domain, "cluster.local");
    assert_eq!(kubelet.static_pod_path, "/etc/kubernetes/manifests");
    assert_eq!(kubelet.authentication.x509.client_ca_file, "/etc/kubernetes/pki/ca.crt");
    assert_eq!((kubelet.healthz_bind_address.as_str(), kubelet.healthz_port), ("127.0.0.1", 10_248));
    assert!(kubelet.rotate_certificates && !kubelet.authentication.anonymous.enabled);
    assert_eq!(kubelet.authorization.mode, "Webhook");
    // kubeadm writes zero for values that are not set.
    assert_eq!(kubelet.sync_frequency.std().as_secs(), 60);
    assert_eq!(kubelet.volume_stats_agg_period.std().as_secs(), 60);
}
