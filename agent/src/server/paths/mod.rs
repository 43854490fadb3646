//! The paths of both ports, with their handlers, methods and types. Pure.
//!
//! Built once from the configuration. As upstream there are two layers: an outer mux of exact paths and prefixes (those
//! that end in `/`), behind which requests are authorized, and the routes of each of its entries.

mod clean;
mod label;
mod route;
mod subresource;

pub(super) use label::labels;
pub(super) use route::RouteError;
pub(super) use route::choose;
pub(super) use subresource::subresources;
pub(super) use subresource::verb;

use clean::Cleaned;

/// A port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Port {
    /// HTTPS, authenticated.
    Main,
    /// HTTP, without authorization.
    ReadOnly,
}

/// The handlers that are enabled on the main port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EnabledHandlers {
    /// `enableDebuggingHandlers`: logs, streams, commands and debugging.
    pub debugging: bool,
    /// `enableProfilingHandler`.
    pub profiling: bool,
    /// `enableDebugFlagsHandler`.
    pub debug_flags: bool,
    /// `enableSystemLogHandler`.
    pub system_logs: bool,
    /// Feature gate `ContainerCheckpoint`.
    pub checkpoint: bool,
    /// Feature gate `ComponentFlagz`.
    pub flagz: bool,
    /// Feature gate `ComponentStatusz`.
    pub statusz: bool,
}

/// What responds to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Endpoint {
    Healthz,
    /// One check by its name.
    Check(&'static str),
    Pods,
    RunningPods,
    Metrics,
    ProbeMetrics,
    SliMetrics,
    Configz,
    Flagz,
    Statusz,
    DebugFlags,
    Profile,
    /// A mounted router, main port only.
    Debug,
    /// A mounted router, both ports.
    Stats,
}

/// The handler of an entry of the outer mux.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Handler {
    /// Every method, every type.
    Any(Endpoint),
    /// The first matching route.
    Routes(&'static [Route]),
    /// Disabled; the text of the response.
    Refused(&'static str),
}

/// A path with parameters: `{}` is one segment, `{*}` all that follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Route {
    path: &'static str,
    methods: &'static [&'static str],
    /// Types of its response; none: unknown, so that clients must accept any type.
    types: &'static [&'static str],
    answer: Endpoint,
}

const GET: &[&str] = &["GET"];
const POST: &[&str] = &["POST"];
const GET_POST: &[&str] = &["GET", "POST"];
const JSON: &[&str] = &["application/json"];

const fn route(
    path: &'static str,
    methods: &'static [&'static str],
    types: &'static [&'static str],
    answer: Endpoint,
) -> Route {
    Route { path, methods, types, answer }
}

const PODS: &[Route] = &[route("/pods", GET, JSON, Endpoint::Pods)];
const STATS: &[Route] = &[route("/stats/summary", GET_POST, JSON, Endpoint::Stats)];
const RUNNING_PODS: &[Route] = &[route("/runningpods", GET, JSON, Endpoint::RunningPods)];
const CONTAINER_LOGS: &[Route] = &[route("/containerLogs/{}/{}/{}", GET, &[], Endpoint::Debug)];
const CHECKPOINT: &[Route] = &[route("/checkpoint/{}/{}/{}", POST, JSON, Endpoint::Debug)];
const LOGS: &[Route] = &[route("/logs", GET, &[], Endpoint::Debug), route("/logs/{*}", GET, &[], Endpoint::Debug)];
const PROFILES: &[Route] = &[route("/debug/pprof/{*}", GET, &[], Endpoint::Profile)];
const RUN: &[Route] =
    &[route("/run/{}/{}/{}", POST, &[], Endpoint::Debug), route("/run/{}/{}/{}/{}", POST, &[], Endpoint::Debug)];
const EXEC: &[Route] = &[
    route("/exec/{}/{}/{}", GET_POST, &[], Endpoint::Debug),
    route("/exec/{}/{}/{}/{}", GET_POST, &[], Endpoint::Debug),
];
const ATTACH: &[Route] = &[
    route("/attach/{}/{}/{}", GET_POST, &[], Endpoint::Debug),
    route("/attach/{}/{}/{}/{}", GET_POST, &[], Endpoint::Debug),
];
const PORT_FORWARD: &[Route] = &[
    route("/portForward/{}/{}", GET_POST, &[], Endpoint::Debug),
    route("/portForward/{}/{}/{}", GET_POST, &[], Endpoint::Debug),
];

/// The entries of both ports.
const BOTH: [(&str, Handler); 13] = [
    ("/healthz", Handler::Any(Endpoint::Healthz)),
    ("/healthz/ping", Handler::Any(Endpoint::Check("ping"))),
    ("/healthz/log", Handler::Any(Endpoint::Check("log"))),
    ("/healthz/syncloop", Handler::Any(Endpoint::Check("syncloop"))),
    ("/healthz/device-plugin", Handler::Any(Endpoint::Check("device-plugin"))),
    ("/pods", Handler::Routes(PODS)),
    ("/pods/", Handler::Routes(PODS)),
    ("/stats/", Handler::Routes(STATS)),
    ("/metrics", Handler::Any(Endpoint::Metrics)),
    ("/metrics/cadvisor", Handler::Any(Endpoint::Stats)),
    ("/metrics/probes", Handler::Any(Endpoint::ProbeMetrics)),
    ("/metrics/resource", Handler::Any(Endpoint::Stats)),
    ("/metrics/slis", Handler::Any(Endpoint::SliMetrics)),
];

/// Prefixes that are refused where debugging handlers are disabled.
const DEBUG_PREFIXES: [&str; 8] =
    ["/run/", "/exec/", "/attach/", "/portForward/", "/containerLogs/", "/runningpods/", "/debug/pprof/", "/logs/"];

/// The outer mux of one port.
#[derive(Clone, Debug)]
pub(super) struct Table {
    entries: Vec<(&'static str, Handler)>,
    port: Port,
    debugging: bool,
}

/// The outcome of looking up a path.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Not a path (400).
    Malformed,
    /// No entry (404).
    Unknown,
    /// The canonical path, encoded and without its query (307).
    Redirect(String),
    /// The handler, and the decoded path.
    Handled(Handler, String),
}

impl Table {
    /// Of the main port.
    pub(super) fn main(enabled: &EnabledHandlers) -> Self {
        let mut entries = BOTH.to_vec();
        if enabled.debugging {
            entries.extend(debugging(enabled));
        } else {
            entries.extend(refused());
        }
        Self { entries, port: Port::Main, debugging: enabled.debugging }
    }

    /// Of the read-only port.
    pub(super) fn read_only() -> Self {
        let entries = BOTH.into_iter().chain(refused()).collect();
        Self { entries, port: Port::ReadOnly, debugging: false }
    }

    /// Looks up a path as the client sent it.
    pub(super) fn find(&self, written: &str) -> Found {
        let Some(cleaned) = Cleaned::of(written) else { return Found::Malformed };
        let entry = self.entry(&cleaned.segments);
        if entry.is_none() && self.is_prefix(&cleaned.segments) {
            return Found::Redirect(format!("{}/", cleaned.location()));
        }
        match entry {
            _ if cleaned.text != written => Found::Redirect(cleaned.location()),
            Some(handler) => Found::Handled(handler, cleaned.decoded()),
            None => Found::Unknown,
        }
    }

    /// The handler of the longest entry that covers the path.
    fn entry(&self, segments: &[String]) -> Option<Handler> {
        let covers = |path: &str| match path.strip_suffix('/') {
            Some(prefix) => {
                let wanted = split(prefix);
                segments.len() > wanted.len() && segments[..wanted.len()] == wanted[..]
            }
            None => segments == split(path),
        };
        let covering = self.entries.iter().filter(|(path, _)| covers(path));
        covering.max_by_key(|(path, _)| path.len()).map(|(_, handler)| *handler)
    }

    /// Whether only the trailing slash is missing.
    fn is_prefix(&self, segments: &[String]) -> bool {
        self.entries.iter().any(|(path, _)| path.strip_suffix('/').is_some_and(|prefix| segments == split(prefix)))
    }

    /// The first segments of directly registered handlers, for `/statusz`, which upstream registers after it has listed
    /// them.
    pub(super) fn own_paths(&self) -> Vec<String> {
        let is_listed = |handler: &Handler| !matches!(handler, Handler::Routes(_) | Handler::Any(Endpoint::Statusz));
        let own = self.entries.iter().filter(|(_, handler)| is_listed(handler));
        let mut paths: Vec<String> = own.map(|(path, _)| format!("/{}", split(path)[0])).collect();
        paths.sort();
        paths.dedup();
        paths
    }
}

fn split(path: &str) -> Vec<&str> {
    path.trim_start_matches('/').split('/').collect()
}

fn refused() -> impl Iterator<Item = (&'static str, Handler)> {
    DEBUG_PREFIXES.into_iter().map(|prefix| (prefix, Handler::Refused("Debug endpoints are disabled.")))
}

/// The additional entries of the main port with debugging handlers.
fn debugging(enabled: &EnabledHandlers) -> Vec<(&'static str, Handler)> {
    let mut entries = vec![
        ("/run", Handler::Routes(RUN)),
        ("/run/", Handler::Routes(RUN)),
        ("/exec", Handler::Routes(EXEC)),
        ("/exec/", Handler::Routes(EXEC)),
        ("/attach", Handler::Routes(ATTACH)),
        ("/attach/", Handler::Routes(ATTACH)),
        ("/portForward", Handler::Routes(PORT_FORWARD)),
        ("/portForward/", Handler::Routes(PORT_FORWARD)),
        ("/containerLogs", Handler::Routes(CONTAINER_LOGS)),
        ("/containerLogs/", Handler::Routes(CONTAINER_LOGS)),
        ("/runningpods/", Handler::Routes(RUNNING_PODS)),
        ("/configz", Handler::Any(Endpoint::Configz)),
        ("/logs/", or_refused(enabled.system_logs, Handler::Routes(LOGS), "logs endpoint is disabled.")),
        ("/debug/pprof/", or_refused(enabled.profiling, Handler::Routes(PROFILES), "profiling endpoint is disabled.")),
        (
            "/debug/flags/v",
            or_refused(enabled.debug_flags, Handler::Any(Endpoint::DebugFlags), "flags endpoint is disabled."),
        ),
    ];
    let gated = [
        (enabled.checkpoint, ("/checkpoint/", Handler::Routes(CHECKPOINT))),
        (enabled.flagz, ("/flagz", Handler::Any(Endpoint::Flagz))),
        (enabled.statusz, ("/statusz", Handler::Any(Endpoint::Statusz))),
    ];
    entries.extend(gated.into_iter().filter(|(on, _)| *on).map(|(_, entry)| entry));
    entries
}

fn or_refused(on: bool, handler: Handler, text: &'static str) -> Handler {
    if on { handler } else { Handler::Refused(text) }
}

#[cfg(test)]
mod tests;
