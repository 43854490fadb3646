//! The request of an `HTTPGetAction`. Pure.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use http::HeaderMap;
use http::HeaderName;
use http::HeaderValue;
use http::header;
use k8s_openapi::api::core::v1::ContainerPort;
use k8s_openapi::api::core::v1::HTTPGetAction;

use super::HttpGetError;
use super::port::resolve_port;
use super::target::PathParts;
use super::target::Scheme;
use super::target::Target;
use super::target::host_problem;
use super::target::parse_path;

/// Headers that describe a body; a request without one ignores them.
const OF_BODIES: [HeaderName; 3] = [header::CONTENT_LENGTH, header::TRANSFER_ENCODING, header::TRAILER];
/// Headers that an action lists at most. A `HeaderMap` has room for 24,576 names and panics when it gets more, and the API
/// server bounds only the size of the pod.
const MAX_LISTED: usize = 16 * 1024;

/// The sender of a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Caller {
    user_agent: String,
    is_probe: bool,
}

impl Caller {
    /// A probe of an agent of this Kubernetes version (`v1.36.3`): `kube-probe/1.36`.
    pub fn probe(version: &str) -> Self {
        Self { user_agent: format!("kube-probe/{}", minor(version)), is_probe: true }
    }

    /// A lifecycle hook: `kube-lifecycle/1.36`, compressed answers are allowed, HTTP/2 is not offered.
    pub fn hook(version: &str) -> Self {
        Self { user_agent: format!("kube-lifecycle/{}", minor(version)), is_probe: false }
    }

    /// Its default `User-Agent`.
    pub fn user_agent(&self) -> &str {
        &self.user_agent
    }
}

/// Major and minor version of `v1.36.3`.
fn minor(version: &str) -> &str {
    let version = version.trim_start_matches('v');
    let mut dots = version.match_indices('.').map(|(at, _)| at);
    dots.nth(1).map_or(version, |second| &version[..second])
}

/// A request that can be sent.
#[derive(Clone, Debug)]
pub struct HttpGet {
    pub(super) target: Target,
    /// All headers but `Host`.
    pub(super) headers: HeaderMap,
    /// `Host`, if the action sets it.
    pub(super) host: Option<HeaderValue>,
    /// HTTP/2 is offered to `https` servers.
    pub(super) http2: bool,
}

impl HttpGet {
    /// The request of an action of a container with these ports in a pod with this address. An empty address stands for
    /// this node.
    ///
    /// # Errors
    /// The port cannot be resolved, the path, host, scheme or a header cannot be sent, or there are too many headers.
    pub fn new(
        action: &HTTPGetAction,
        ports: &[ContainerPort],
        pod_ip: &str,
        caller: &Caller,
    ) -> Result<Self, HttpGetError> {
        let port = resolve_port(&action.port, ports)?;
        let host = action.host.as_deref().filter(|host| !host.is_empty()).unwrap_or(pod_ip);
        let PathParts { path, user_info, opaque } = parse_path(action.path.as_deref().unwrap_or_default());
        let scheme = action.scheme.as_deref().unwrap_or_default();
        let target = Target::new(Scheme::parse(scheme).unwrap_or(Scheme::Http), host, port, path);
        if let Some(opaque) = opaque {
            let url = format!("{}:{opaque}", target.scheme.name());
            return Err(HttpGetError::Invalid { url, reason: "http: no Host in request URL".to_owned() });
        }
        if let Some(reason) = host_problem(host) {
            return Err(HttpGetError::Host { url: target.to_string(), reason });
        }
        let invalid = |reason| HttpGetError::Invalid { url: target.to_string(), reason };
        if Scheme::parse(scheme).is_none() {
            return Err(invalid(format!("unsupported protocol scheme \"{}\"", scheme.to_lowercase())));
        }
        let (mut headers, host) = listed(action).map_err(invalid)?;
        complete(&mut headers, caller, user_info).map_err(invalid)?;
        Ok(Self { target, headers, host, http2: caller.is_probe })
    }

    /// The URL, without user information.
    pub fn url(&self) -> String {
        self.target.to_string()
    }

    /// The same request to the same host and port without TLS and without `Authorization`: the second attempt of a hook
    /// whose server does not speak TLS.
    #[must_use]
    pub fn without_tls(&self) -> Self {
        let mut request = Self { target: self.target.with_scheme(Scheme::Http), ..self.clone() };
        request.headers.remove(header::AUTHORIZATION);
        request
    }
}

/// The headers that the action lists, and its `Host`.
fn listed(action: &HTTPGetAction) -> Result<(HeaderMap, Option<HeaderValue>), String> {
    let (mut headers, mut host) = (HeaderMap::new(), None);
    for listed in action.http_headers.iter().flatten() {
        let name = HeaderName::from_bytes(listed.name.as_bytes());
        let name = name.map_err(|_| format!("net/http: invalid header field name {:?}", listed.name))?;
        let value = HeaderValue::from_str(&listed.value).or_else(|_| HeaderValue::from_bytes(listed.value.as_bytes()));
        let value = value.map_err(|_| format!("net/http: invalid header field value for {:?}", listed.name))?;
        if name == header::HOST {
            host.get_or_insert(value);
        } else if !OF_BODIES.contains(&name) {
            if headers.len() >= MAX_LISTED {
                return Err(format!("more than {MAX_LISTED} headers"));
            }
            headers.append(name, value);
        }
    }
    Ok((headers, host.filter(|host| !host.is_empty())))
}

/// Adds what the action does not list.
fn complete(headers: &mut HeaderMap, caller: &Caller, user_info: Option<Vec<u8>>) -> Result<(), String> {
    let agent = HeaderValue::from_str(&caller.user_agent).map_err(|error| format!("User-Agent: {error}"))?;
    default(headers, header::USER_AGENT, agent);
    default(headers, header::ACCEPT, HeaderValue::from_static("*/*"));
    match caller.is_probe {
        true => {
            headers.entry(header::CONNECTION).or_insert(HeaderValue::from_static("close"));
        }
        false if !headers.contains_key(header::ACCEPT_ENCODING) && !headers.contains_key(header::RANGE) => {
            headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("gzip"));
        }
        false => {}
    }
    if let Some(user_info) = user_info.filter(|_| !headers.contains_key(header::AUTHORIZATION)) {
        let separator = if user_info.contains(&b':') { "" } else { ":" };
        let credentials = BASE64_STANDARD.encode([&user_info, separator.as_bytes()].concat());
        let value = HeaderValue::from_str(&format!("Basic {credentials}"));
        headers.insert(header::AUTHORIZATION, value.map_err(|error| format!("Authorization: {error}"))?);
    }
    Ok(())
}

/// A header that is sent unless it is listed; listed with an empty value, it is not sent at all.
fn default(headers: &mut HeaderMap, name: HeaderName, value: HeaderValue) {
    match headers.get(&name) {
        None => _ = headers.insert(name, value),
        Some(listed) if listed.is_empty() => _ = headers.remove(name),
        Some(_) => {}
    }
}
