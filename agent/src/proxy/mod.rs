//! The HTTP proxy of a request, as variables of the environment name it, by the rules of Go's `net/http`, which a kubelet
//! follows. Those of curl, which client libraries follow, send requests to loopback addresses through the proxy, ignore
//! ports and wildcards of `NO_PROXY`, and know `ALL_PROXY`.
//!
//! `NO_PROXY` is a list with commas: `*` (all), addresses and names, each also with a port, and networks. A name stands
//! for its subdomains, too; with a leading `.` or `*.` for these alone.

use std::net::IpAddr;

/// The proxies, and what does not go through them. Their URLs may hold passwords: no `Debug`.
#[derive(Clone, Default)]
pub struct Proxies {
    http: Option<String>,
    https: Option<String>,
    exceptions: Vec<Exception>,
}

impl Proxies {
    /// By the variables of this process.
    pub fn from_env() -> Self {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    /// By these variables.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Self {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let either = |upper: &str| set(upper).or_else(|| set(&upper.to_ascii_lowercase()));
        let no_proxy = either("NO_PROXY").unwrap_or_default();
        Self {
            // A server that runs the process as a CGI script sets HTTP_PROXY to a header of the client's request.
            http: either("HTTP_PROXY").filter(|_| set("REQUEST_METHOD").is_none()),
            https: either("HTTPS_PROXY"),
            exceptions: no_proxy.split(',').filter_map(Exception::parse).collect(),
        }
    }

    /// The proxy of a request to this server, as the variable has it: a URL, or host and port. IPv6 addresses may be in
    /// brackets; `port` may be left out if it is the usual one of the scheme.
    pub fn proxy_of(&self, scheme: &str, host: &str, port: Option<u16>) -> Option<&str> {
        let (proxy, usual_port) = match scheme {
            "http" => (self.http.as_deref()?, 80),
            "https" => (self.https.as_deref()?, 443),
            _ => return None,
        };
        let host = host.trim_matches(['[', ']']).to_ascii_lowercase();
        let port = port.unwrap_or(usual_port).to_string();
        let address = host.parse::<IpAddr>().ok().map(|address| address.to_canonical());
        let is_loopback = host == "localhost" || address.is_some_and(|address| address.is_loopback());
        let is_direct = is_loopback || self.exceptions.iter().any(|exception| exception.covers(&host, address, &port));
        (!is_direct).then_some(proxy)
    }
}

/// An entry of `NO_PROXY`. An empty port stands for all.
#[derive(Clone)]
enum Exception {
    All,
    Network { address: IpAddr, prefix: u32 },
    Address { address: IpAddr, port: String },
    Name { name: String, subdomains_only: bool, port: String },
}

impl Exception {
    /// `None` for an entry without a host.
    fn parse(entry: &str) -> Option<Self> {
        let entry = entry.trim().to_ascii_lowercase();
        if entry == "*" {
            return Some(Self::All);
        }
        if let Some((address, prefix)) = network(&entry) {
            return Some(Self::Network { address, prefix });
        }
        let (host, port) = host_and_port(&entry);
        if host.is_empty() {
            return None;
        }
        let port = port.to_owned();
        if let Ok(address) = host.parse::<IpAddr>() {
            return Some(Self::Address { address: address.to_canonical(), port });
        }
        let parent = host.strip_prefix("*.").or_else(|| host.strip_prefix('.'));
        Some(Self::Name { name: parent.unwrap_or(host).to_owned(), subdomains_only: parent.is_some(), port })
    }

    fn covers(&self, host: &str, host_address: Option<IpAddr>, host_port: &str) -> bool {
        let is_port = |port: &String| port.is_empty() || port == host_port;
        match (self, host_address) {
            (Self::All, _) => true,
            (Self::Network { address, prefix }, Some(host)) => same_network(*address, host, *prefix),
            (Self::Address { address, port }, Some(host)) => *address == host && is_port(port),
            (Self::Name { name, subdomains_only, port }, None) => {
                let labels = host.strip_suffix(name.as_str());
                labels.is_some_and(|labels| labels.ends_with('.') || (labels.is_empty() && !subdomains_only))
                    && is_port(port)
            }
            _ => false,
        }
    }
}

fn network(entry: &str) -> Option<(IpAddr, u32)> {
    let (address, prefix) = entry.split_once('/')?;
    let (address, prefix) = (address.parse::<IpAddr>().ok()?, prefix.parse::<u32>().ok()?);
    let bits = if address.is_ipv4() { 32 } else { 128 };
    (prefix <= bits).then_some((address, prefix))
}

fn same_network(a: IpAddr, b: IpAddr, prefix: u32) -> bool {
    match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros() >= prefix,
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros() >= prefix,
        _ => false,
    }
}

/// `host:port` and `[address]:port`. Anything else is a host: an IPv6 address without brackets has colons, too.
fn host_and_port(entry: &str) -> (&str, &str) {
    let split = match entry.strip_prefix('[') {
        Some(rest) => rest.split_once("]:"),
        None => entry.split_once(':'),
    };
    split.filter(|(_, port)| !port.contains([':', '[', ']'])).unwrap_or((entry, ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proxies(variables: &[(&str, &str)]) -> Proxies {
        let find =
            |name: &str| variables.iter().find(|(found, _)| *found == name).map(|(_, value)| (*value).to_owned());
        Proxies::from_variables(find)
    }

    #[test]
    fn no_proxy_is_read_as_go_does() {
        for (no_proxy, host, port, is_direct) in [
            ("", "example.com", None, false),
            ("", "10.0.0.1", None, false),
            // Never through a proxy, whatever NO_PROXY says.
            ("", "localhost", Some(6443), true),
            ("", "127.0.0.1", None, true),
            ("", "127.8.9.10", Some(8080), true),
            ("", "[::1]", Some(6443), true),
            ("", "[::ffff:127.0.0.1]", None, true),
            ("", "localhost.example.com", None, false),
            ("*", "example.com", None, true),
            ("*", "10.0.0.1", None, true),
            ("*", "[fd00::1]", None, true),
            ("a.example, * ,b.example", "10.0.0.1", None, true),
            ("*.corp.example", "a.corp.example", None, true),
            ("*.corp.example", "a.b.corp.example", None, true),
            ("*.corp.example", "corp.example", None, false),
            (".corp.example", "a.corp.example", None, true),
            (".corp.example", "corp.example", None, false),
            ("corp.example", "corp.example", None, true),
            ("corp.example", "a.corp.example", None, true),
            ("corp.example", "mycorp.example", None, false),
            ("Corp.Example", "A.CORP.example", None, true),
            ("corp.*", "corp.example", None, false),
            ("10.0.0.1", "10.0.0.1", Some(6443), true),
            ("10.0.0.1", "10.0.0.10", None, false),
            ("10.0.0.1:6443", "10.0.0.1", Some(6443), true),
            ("10.0.0.1:6443", "10.0.0.1", Some(6444), false),
            ("10.0.0.1:443", "10.0.0.1", None, true),
            ("api.example:6443", "api.example", Some(6443), true),
            ("api.example:6443", "api.example", None, false),
            (".example:6443", "api.example", Some(6443), true),
            ("10.0.0.0/8", "10.255.0.1", None, true),
            ("10.0.0.0/8", "11.0.0.1", None, false),
            ("10.1.2.3/32", "10.1.2.3", None, true),
            ("0.0.0.0/0", "192.0.2.1", None, true),
            ("0.0.0.0/0", "example.com", None, false),
            ("10.0.0.0/33", "10.0.0.0", None, false),
            ("fd00::/8", "[fd12::1]", None, true),
            ("fd00::/8", "10.0.0.1", None, false),
            ("fd00::1", "[fd00::1]", Some(6443), true),
            ("[fd00::1]:6443", "[fd00::1]", Some(6443), true),
            ("[fd00::1]:6443", "[fd00::1]", None, false),
            (" 10.0.0.1 ,, :443 ,.a.example", "b.a.example", None, true),
            ("0.1", "10.0.0.1", None, false),
        ] {
            let proxies = proxies(&[("HTTPS_PROXY", "http://proxy:3128"), ("NO_PROXY", no_proxy)]);
            let proxy = proxies.proxy_of("https", host, port);
            assert_eq!(proxy.is_none(), is_direct, "{host} {port:?} with NO_PROXY={no_proxy:?}");
        }
    }

    #[test]
    fn the_scheme_chooses_the_variable_and_capitals_come_first() {
        let of = |variables: &[(&str, &str)], scheme| {
            proxies(variables).proxy_of(scheme, "example.com", None).map(str::to_owned)
        };
        let both = [("HTTP_PROXY", "plain:1"), ("HTTPS_PROXY", "http://tls:2")];
        assert_eq!(of(&both, "http").as_deref(), Some("plain:1"));
        assert_eq!(of(&both, "https").as_deref(), Some("http://tls:2"));
        assert_eq!(of(&both, "ftp"), None);
        assert_eq!(of(&[("ALL_PROXY", "a:1"), ("all_proxy", "a:1")], "https"), None);
        assert_eq!(of(&[("https_proxy", "low:1")], "https").as_deref(), Some("low:1"));
        assert_eq!(of(&[("https_proxy", "low:1"), ("HTTPS_PROXY", "up:1")], "https").as_deref(), Some("up:1"));
        assert_eq!(of(&[("https_proxy", "low:1"), ("HTTPS_PROXY", "")], "https").as_deref(), Some("low:1"));
        assert_eq!(of(&[("HTTPS_PROXY", "p:1"), ("no_proxy", "example.com")], "https"), None);
        let cgi = [both[0], both[1], ("REQUEST_METHOD", "GET")];
        assert_eq!(of(&cgi, "http"), None);
        assert_eq!(of(&cgi, "https").as_deref(), Some("http://tls:2"));
    }
}
