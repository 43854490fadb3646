//! The URL of a request. Pure.
//!
//! Not a `url::Url`: that one normalizes paths, and a server is to get the path of the action as it is.

use std::fmt;
use std::fmt::Write as _;
use std::net::Ipv6Addr;

use url::Url;

/// `http` or `https`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Scheme {
    Http,
    Https,
}

impl Scheme {
    pub(super) fn parse(text: &str) -> Option<Self> {
        match text.to_ascii_lowercase().as_str() {
            "" | "http" => Some(Self::Http),
            "https" => Some(Self::Https),
            _ => None,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Https => "https",
        }
    }

    fn default_port(self) -> u16 {
        match self {
            Self::Http => 80,
            Self::Https => 443,
        }
    }
}

/// Where a request goes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Target {
    pub(super) scheme: Scheme,
    /// A name or an address, without brackets; an address of IPv6 may have a zone. Empty: this node.
    pub(super) host: String,
    /// `None`: the scheme's.
    port: Option<u16>,
    /// Path and query in the form in which they are sent; begins with a slash or a question mark.
    path: String,
}

impl Target {
    pub(super) fn new(scheme: Scheme, host: &str, port: u16, path: String) -> Self {
        Self { scheme, host: host.to_owned(), port: Some(port), path }
    }

    /// The target of a redirect.
    pub(super) fn of_url(url: &Url) -> Option<Self> {
        let scheme = Scheme::parse(url.scheme())?;
        let host = url.host_str()?.trim_start_matches('[').trim_end_matches(']').to_owned();
        let query = url.query().map(|query| format!("?{query}")).unwrap_or_default();
        Some(Self { scheme, host, port: url.port(), path: format!("{}{query}", url.path()) })
    }

    pub(super) fn port(&self) -> u16 {
        self.port.unwrap_or(self.scheme.default_port())
    }

    /// `host:port`, or `host` if the URL has no port, as a server gets it: a zone means nothing to it.
    pub(super) fn authority(&self) -> String {
        self.with_port(self.host_without_zone())
    }

    /// The name, or the address as such.
    pub(super) fn host_without_zone(&self) -> &str {
        self.host.split_once('%').map_or(self.host.as_str(), |(address, _)| address)
    }

    fn with_port(&self, host: &str) -> String {
        match self.port {
            Some(port) => join_host_port(host, port),
            None => bracketed(host),
        }
    }

    /// The path and query of the request line.
    pub(super) fn path_and_query(&self) -> String {
        if self.path.starts_with('/') { self.path.clone() } else { format!("/{}", self.path) }
    }

    pub(super) fn with_host(&self, host: &str) -> Self {
        Self { host: host.to_owned(), ..self.clone() }
    }

    pub(super) fn with_scheme(&self, scheme: Scheme) -> Self {
        Self { scheme, port: Some(self.port()), ..self.clone() }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = self.host.replace('%', "%25");
        write!(f, "{}://{}{}", self.scheme.name(), self.with_port(&host), self.path)
    }
}

/// `host:port`, with IPv6 addresses in brackets.
pub(crate) fn join_host_port(host: &str, port: u16) -> String {
    format!("{}:{port}", bracketed(host))
}

/// A host as URLs have it: IPv6 addresses in brackets.
fn bracketed(host: &str) -> String {
    if host.contains(':') { format!("[{host}]") } else { host.to_owned() }
}

/// Why no URL can have this host; `None` if one can. What has a colon is an address of IPv6: `127.0.0.1:8080` is no host.
pub(super) fn host_problem(host: &str) -> Option<String> {
    let is_address = || match host.split_once('%') {
        Some((address, zone)) => address.parse::<Ipv6Addr>().is_ok() && !zone.is_empty(),
        None => host.parse::<Ipv6Addr>().is_ok(),
    };
    if host.contains(':') && !is_address() {
        return Some(format!("invalid host: {host:?} is no IPv6 address"));
    }
    if host.contains('[') {
        return Some("invalid IP-literal".to_owned());
    }
    let is_allowed =
        |byte: u8| !byte.is_ascii() || byte.is_ascii_alphanumeric() || b"-_.~!$&'()*+,;=:]<>\"%".contains(&byte);
    let other = host.bytes().find(|byte| !is_allowed(*byte));
    other.map(|byte| format!("invalid URL escape \"%{byte:02X}\""))
}

/// The parts of an action's path.
#[derive(PartialEq, Eq, Debug, Default)]
pub(super) struct PathParts {
    /// Path and query in the form in which they are sent.
    pub(super) path: String,
    /// User and password of the authority, if it has any: `user:password`, not escaped.
    pub(super) user_info: Option<Vec<u8>>,
    /// What follows the scheme of a URL without authority: `b` of `a:b`. Upstream sends nothing to it, as it has no host.
    pub(super) opaque: Option<String>,
}

/// Reads the path of an action as a URL reference: the query is kept, the fragment dropped, scheme and authority are
/// replaced by the action's. A path that is no URL reference is escaped as a whole.
pub(super) fn parse_path(path: &str) -> PathParts {
    reference(path).unwrap_or_else(|| PathParts { path: rooted(escaped(path.as_bytes())), ..PathParts::default() })
}

fn reference(text: &str) -> Option<PathParts> {
    if text.bytes().any(|byte| byte < b' ' || byte == 0x7f) {
        return None;
    }
    let text = text.split_once('#').map_or(text, |(before, _)| before);
    let (scheme, rest) = split_scheme(text)?;
    if scheme.is_some() && !rest.starts_with(['/', '?']) && !rest.is_empty() {
        return Some(PathParts { opaque: Some(rest.to_owned()), ..PathParts::default() });
    }
    let (rest, query) = rest.split_once('?').map_or((rest, None), |(path, query)| (path, Some(query)));
    let is_relative = scheme.is_none() && !rest.starts_with('/');
    if is_relative && rest.split('/').next().is_some_and(|segment| segment.contains(':')) {
        return None;
    }
    let (authority, path) = match rest.strip_prefix("//") {
        Some(rest) if scheme.is_some() || !rest.starts_with('/') => rest.split_at(rest.find('/').unwrap_or(rest.len())),
        _ => ("", rest),
    };
    let user_info = match authority.rsplit_once('@') {
        Some((user, _)) => Some(unescaped(user)?),
        None => None,
    };
    let path = if is_sendable(path) { unescaped(path).map(|_| path.to_owned())? } else { escaped(&unescaped(path)?) };
    let query = query.map(|query| format!("?{}", sendable_query(query))).unwrap_or_default();
    let path = if path.is_empty() { path } else { rooted(path) };
    Some(PathParts { path: path + &query, user_info, opaque: None })
}

/// The scheme of a URL reference, if it has one, and what follows it. `None`: no URL reference.
fn split_scheme(text: &str) -> Option<(Option<&str>, &str)> {
    let Some((scheme, rest)) = text.split_once(':') else { return Some((None, text)) };
    let mut characters = scheme.chars();
    match characters.next() {
        None => None,
        Some(first) if !first.is_ascii_alphabetic() => Some((None, text)),
        Some(_) if characters.all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c)) => Some((Some(scheme), rest)),
        Some(_) => Some((None, text)),
    }
}

fn rooted(path: String) -> String {
    if path.starts_with('/') { path } else { format!("/{path}") }
}

/// All characters may stand in a path as they are.
fn is_sendable(path: &str) -> bool {
    path.bytes().all(|byte| is_kept(byte) || b"!'()*[]%".contains(&byte))
}

/// Bytes that are not escaped in a path.
fn is_kept(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-_.~$&+,/:;=@".contains(&byte)
}

fn escaped(path: &[u8]) -> String {
    path.iter().fold(String::new(), |mut text, byte| {
        push(&mut text, *byte, is_kept(*byte));
        text
    })
}

/// The query as it is, without bytes that cannot stand in a request line.
fn sendable_query(query: &str) -> String {
    query.bytes().fold(String::new(), |mut text, byte| {
        push(&mut text, byte, byte.is_ascii_graphic() && !b"\"<>".contains(&byte));
        text
    })
}

fn push(text: &mut String, byte: u8, as_is: bool) {
    if as_is {
        text.push(char::from(byte));
    } else {
        // Writing to a String does not fail.
        _ = write!(text, "%{byte:02X}");
    }
}

/// Without percent-encoding; `None` if that is broken.
fn unescaped(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let [high, low, after @ ..] = rest else { return None };
        let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        bytes.push(digit(*high)? << 4 | digit(*low)?);
        rest = after;
    }
    Some(bytes)
}
