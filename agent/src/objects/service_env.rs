//! The environment variables of services (`enableServiceLinks`). Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Service;

/// The parts of a service that become variables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Link {
    address: String,
    ports: Vec<Port>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Port {
    name: String,
    number: i32,
    protocol: String,
}

/// Links by namespace and name.
pub(super) type Links = BTreeMap<(String, String), Link>;

/// The API server's service, whose variables every container gets.
const API_SERVER: (&str, &str) = ("default", "kubernetes");

/// Identity and link of a service; the link is `None` for one without an address of its own (headless, external name)
/// or without ports.
pub(super) fn link(service: &Service) -> Option<((String, String), Option<Link>)> {
    let key = (service.metadata.namespace.clone()?, service.metadata.name.clone()?);
    let spec = service.spec.as_ref();
    let address = spec.and_then(|spec| spec.cluster_ip.clone()).filter(|ip| !ip.is_empty() && ip != "None");
    let port = |port: &k8s_openapi::api::core::v1::ServicePort| Port {
        name: port.name.clone().unwrap_or_default(),
        number: port.port,
        protocol: port.protocol.clone().filter(|protocol| !protocol.is_empty()).unwrap_or_else(|| "TCP".to_owned()),
    };
    let ports: Vec<Port> = spec.iter().flat_map(|spec| spec.ports.iter().flatten()).map(port).collect();
    Some((key, address.filter(|_| !ports.is_empty()).map(|address| Link { address, ports })))
}

/// The variables for containers in `namespace`: of the API server's service, and with `links` of the namespace's own,
/// which take precedence where they bear the same name.
pub(super) fn variables(links: &Links, namespace: &str, all: bool) -> BTreeMap<String, String> {
    let mut named: BTreeMap<&str, &Link> = BTreeMap::new();
    if let Some(link) = links.get(&(API_SERVER.0.to_owned(), API_SERVER.1.to_owned())) {
        named.insert(API_SERVER.1, link);
    }
    if all {
        let first = (namespace.to_owned(), String::new());
        let own = links.range(first..).take_while(|((of, _), _)| of == namespace);
        named.extend(own.map(|((_, name), link)| (name.as_str(), link)));
    }
    let mut out = BTreeMap::new();
    for (name, link) in named {
        describe(&mut out, &variable_name(name), link);
    }
    out
}

fn describe(out: &mut BTreeMap<String, String>, name: &str, link: &Link) {
    let address = &link.address;
    let host = if address.contains(':') { format!("[{address}]") } else { address.clone() };
    out.insert(format!("{name}_SERVICE_HOST"), address.clone());
    for (index, port) in link.ports.iter().enumerate() {
        let number = port.number.to_string();
        let lower = port.protocol.to_lowercase();
        let url = format!("{lower}://{host}:{number}");
        if index == 0 {
            out.insert(format!("{name}_SERVICE_PORT"), number.clone());
            out.insert(format!("{name}_PORT"), url.clone());
        }
        if !port.name.is_empty() {
            out.insert(format!("{name}_SERVICE_PORT_{}", variable_name(&port.name)), number.clone());
        }
        let prefix = format!("{name}_PORT_{number}_{}", port.protocol.to_uppercase());
        out.insert(format!("{prefix}_PROTO"), lower);
        out.insert(format!("{prefix}_PORT"), number);
        out.insert(format!("{prefix}_ADDR"), address.clone());
        out.insert(prefix, url);
    }
}

fn variable_name(text: &str) -> String {
    text.to_uppercase().replace('-', "_")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn links(services: serde_json::Value) -> Links {
        let services: Vec<Service> = serde_json::from_value(services).expect("services");
        services.iter().filter_map(link).filter_map(|(key, link)| Some((key, link?))).collect()
    }

    fn api_server(namespace: &str, ip: &str) -> serde_json::Value {
        json!({"metadata": {"namespace": namespace, "name": "kubernetes"},
            "spec": {"clusterIP": ip, "ports": [{"name": "https", "port": 443, "protocol": "TCP"}]}})
    }

    #[test]
    fn variables_of_a_service() {
        let links = links(
            json!([{"metadata": {"namespace": "ns", "name": "my-web"}, "spec": {"clusterIP": "fd00::1", "ports": [
            {"name": "http-a", "port": 80}, {"port": 53, "protocol": "UDP"}]}}]),
        );
        let pairs: Vec<String> =
            variables(&links, "ns", true).into_iter().map(|(name, value)| format!("{name}={value}")).collect();
        assert_eq!(
            pairs,
            [
                "MY_WEB_PORT=tcp://[fd00::1]:80",
                "MY_WEB_PORT_53_UDP=udp://[fd00::1]:53",
                "MY_WEB_PORT_53_UDP_ADDR=fd00::1",
                "MY_WEB_PORT_53_UDP_PORT=53",
                "MY_WEB_PORT_53_UDP_PROTO=udp",
                "MY_WEB_PORT_80_TCP=tcp://[fd00::1]:80",
                "MY_WEB_PORT_80_TCP_ADDR=fd00::1",
                "MY_WEB_PORT_80_TCP_PORT=80",
                "MY_WEB_PORT_80_TCP_PROTO=tcp",
                "MY_WEB_SERVICE_HOST=fd00::1",
                "MY_WEB_SERVICE_PORT=80",
                "MY_WEB_SERVICE_PORT_HTTP_A=80",
            ]
        );
    }

    #[test]
    fn which_services_a_namespace_gets() {
        let web = |namespace: &str, ip: &str| json!({"metadata": {"namespace": namespace, "name": "web"}, "spec": {"clusterIP": ip, "ports": [{"port": 1}]}});
        let all = links(json!([
            api_server("default", "10.0.0.1"), web("a", "10.0.0.2"), web("b", "10.0.0.3"), api_server("a", "10.0.0.4"),
            {"metadata": {"namespace": "a", "name": "headless"}, "spec": {"clusterIP": "None", "ports": [{"port": 1}]}},
            {"metadata": {"namespace": "a", "name": "external"}, "spec": {"externalName": "x"}},
            {"metadata": {"namespace": "a", "name": "portless"}, "spec": {"clusterIP": "10.0.0.9"}},
        ]));
        let hosts = |namespace: &str, links: bool| -> Vec<String> {
            let pairs = variables(&all, namespace, links).into_iter();
            pairs.filter(|(name, _)| name.ends_with("_HOST")).map(|(name, value)| format!("{name}={value}")).collect()
        };
        assert_eq!(hosts("a", true), ["KUBERNETES_SERVICE_HOST=10.0.0.4", "WEB_SERVICE_HOST=10.0.0.2"]);
        assert_eq!(hosts("a", false), ["KUBERNETES_SERVICE_HOST=10.0.0.1"]);
        assert_eq!(hosts("b", true), ["KUBERNETES_SERVICE_HOST=10.0.0.1", "WEB_SERVICE_HOST=10.0.0.3"]);
        assert_eq!(hosts("", true), ["KUBERNETES_SERVICE_HOST=10.0.0.1"]);
    }
}
