//! Command lines of the control plane's programs. Pure.

use std::path::Path;

use keblet_peers::Part;

use crate::layout::Layout;

/// Range of service addresses. It is not routed and must not contain addresses of the machine.
const SERVICES: &str = "10.43.0.0/16";
/// Its first address: the `kubernetes` service.
pub(crate) const API_SERVICE: &str = "10.43.0.1";
/// The nodes' `spec.podCIDR`.
const PODS: &str = "10.42.0.0/16";

/// The command line of a component, without the program's name.
pub(crate) fn of(part: Part, layout: &Layout) -> Vec<String> {
    match part {
        Part::Etcd => etcd(layout),
        Part::ApiServer => api_server(layout),
        Part::ControllerManager => controller_manager(layout),
        Part::Scheduler => scheduler(layout),
        Part::MetricsServer => metrics_server(layout),
    }
}

fn etcd(layout: &Layout) -> Vec<String> {
    let client = format!("http://{}:{}", layout.address, layout.ports.etcd);
    let peer = format!("http://{}:{}", layout.address, layout.ports.etcd_peer);
    vec![
        "--name=etcd".to_owned(),
        flag("data-dir", &layout.path("etcd")),
        // The data need not survive a crash of the machine.
        "--unsafe-no-fsync".to_owned(),
        format!("--listen-client-urls={client}"),
        format!("--advertise-client-urls={client}"),
        format!("--listen-peer-urls={peer}"),
        format!("--initial-advertise-peer-urls={peer}"),
        format!("--initial-cluster=etcd={peer}"),
        "--watch-progress-notify-interval=5s".to_owned(),
        "--log-level=warn".to_owned(),
    ]
}

fn api_server(layout: &Layout) -> Vec<String> {
    let mut arguments = vec![
        format!("--etcd-servers=http://{}:{}", layout.address, layout.ports.etcd),
        format!("--advertise-address={}", layout.address),
        // A loopback address cannot be an endpoint of the `kubernetes` service.
        "--endpoint-reconciler-type=none".to_owned(),
        flag("client-ca-file", &layout.certificate("ca")),
        "--authorization-mode=Node,RBAC".to_owned(),
        "--enable-admission-plugins=NodeRestriction".to_owned(),
        "--enable-bootstrap-token-auth".to_owned(),
        "--allow-privileged".to_owned(),
        // Trust anchors and certificates in volumes of pods: off by default in 1.36.
        "--feature-gates=ClusterTrustBundle=true,ClusterTrustBundleProjection=true,PodCertificateRequest=true"
            .to_owned(),
        "--runtime-config=certificates.k8s.io/v1beta1=true".to_owned(),
        flag("kubelet-certificate-authority", &layout.certificate("ca")),
        flag("kubelet-client-certificate", &layout.certificate("kubelet-client")),
        flag("kubelet-client-key", &layout.key("kubelet-client")),
        "--kubelet-preferred-address-types=InternalIP".to_owned(),
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local".to_owned(),
        flag("service-account-key-file", &layout.path("certificates/tokens.pub")),
        flag("service-account-signing-key-file", &layout.key("tokens")),
        format!("--service-cluster-ip-range={SERVICES}"),
        flag("requestheader-client-ca-file", &layout.certificate("front-proxy-ca")),
        "--requestheader-allowed-names=front-proxy".to_owned(),
        "--requestheader-extra-headers-prefix=X-Remote-Extra-".to_owned(),
        "--requestheader-group-headers=X-Remote-Group".to_owned(),
        "--requestheader-username-headers=X-Remote-User".to_owned(),
        flag("proxy-client-cert-file", &layout.certificate("front-proxy")),
        flag("proxy-client-key-file", &layout.key("front-proxy")),
        "--profiling=false".to_owned(),
    ];
    arguments.extend(serving(layout, layout.ports.api_server));
    arguments
}

fn controller_manager(layout: &Layout) -> Vec<String> {
    let mut arguments = vec![
        flag("cluster-signing-cert-file", &layout.certificate("ca")),
        flag("cluster-signing-key-file", &layout.key("ca")),
        flag("root-ca-file", &layout.certificate("ca")),
        flag("service-account-private-key-file", &layout.key("tokens")),
        "--use-service-account-credentials".to_owned(),
        "--controllers=*,bootstrapsigner,tokencleaner".to_owned(),
        "--allocate-node-cidrs".to_owned(),
        format!("--cluster-cidr={PODS}"),
        format!("--service-cluster-ip-range={SERVICES}"),
    ];
    arguments.extend(client(layout, "controller-manager"));
    arguments.extend(serving(layout, layout.ports.controller_manager));
    arguments
}

fn scheduler(layout: &Layout) -> Vec<String> {
    let mut arguments = client(layout, "scheduler");
    arguments.extend(serving(layout, layout.ports.scheduler));
    arguments
}

fn metrics_server(layout: &Layout) -> Vec<String> {
    let kubeconfig = layout.kubeconfig("metrics-server");
    let mut arguments: Vec<String> = ["kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig"]
        .map(|name| flag(name, &kubeconfig))
        .into();
    arguments.extend([
        flag("kubelet-certificate-authority", &layout.certificate("ca")),
        "--kubelet-preferred-address-types=InternalIP".to_owned(),
        // The shortest that it accepts.
        "--metric-resolution=10s".to_owned(),
        // Must be shorter than the resolution.
        "--kubelet-request-timeout=5s".to_owned(),
    ]);
    arguments.extend(serving(layout, layout.ports.metrics_server));
    arguments
}

/// Flags of a controller for its API server and its own endpoints.
fn client(layout: &Layout, name: &str) -> Vec<String> {
    let kubeconfig = layout.kubeconfig(name);
    let mut arguments: Vec<String> = ["kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig"]
        .map(|name| flag(name, &kubeconfig))
        .into();
    arguments.extend([
        // Only one instance runs, and a restarted one need not wait for the lease of the previous one.
        "--leader-elect=false".to_owned(),
        // Shorter than the default, to make tests faster.
        "--kube-api-qps=200".to_owned(),
        "--kube-api-burst=400".to_owned(),
        "--profiling=false".to_owned(),
    ]);
    arguments
}

fn serving(layout: &Layout, port: u16) -> [String; 4] {
    [
        format!("--bind-address={}", layout.address),
        format!("--secure-port={port}"),
        flag("tls-cert-file", &layout.certificate("serving")),
        flag("tls-private-key-file", &layout.key("serving")),
    ]
}

fn flag(name: &str, path: &Path) -> String {
    format!("--{name}={}", path.display())
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::layout::Ports;

    #[test]
    fn control_plane_arguments_stay_inside_folder_and_address() {
        let ports = Ports {
            etcd: 1001,
            etcd_peer: 1002,
            api_server: 1003,
            controller_manager: 1004,
            scheduler: 1005,
            metrics_server: 1006,
        };
        let layout = Layout {
            programs: "/programs".into(),
            dir: "/nowhere/plane".into(),
            address: Ipv4Addr::new(127, 64, 0, 1),
            ports,
        };
        for part in Part::ALL {
            let arguments = of(part, &layout);
            for argument in &arguments {
                let value = argument.split_once('=').map_or("", |(_, value)| value);
                assert!(!value.starts_with('/') || value.starts_with("/nowhere/plane/"), "{argument}");
                assert!(!value.starts_with("http://") || value.starts_with("http://127.64.0.1:100"), "{argument}");
            }
            let bound = arguments.iter().any(|argument| {
                argument == "--bind-address=127.64.0.1" || argument == "--listen-client-urls=http://127.64.0.1:1001"
            });
            assert!(bound, "{part:?} listens on all addresses");
        }
    }
}
