//! Every path of both ports: who answers it, with which methods, in which types.
//!
//! Pure: made once from the configuration's switches, asked for each request. Paths work as with upstream's two layers:
//! an outer one of exact paths and of prefixes (those that end in `/`), behind which clients must be allowed, and the
//! routes behind each of its entries.

mod clean;
mod label;
mod route;
mod subresource;

pub(super) use label::labels;
pub(super) use route::{Refusal, choose};
pub(super) use subresource::{subresources, verb};

use clean::Cleaned;

/// Which port a request came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Port {
    /// HTTPS, authenticated.
    Main,
    /// HTTP, for everybody.
    ReadOnly,
}

/// What of the main port is switched on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switches {
    /// `enableDebuggingHandlers`: everything that shows or touches what runs in containers.
    pub debugging: bool,
    /// `enableProfilingHandler`.
    pub profiling: bool,
    /// `enableDebugFlagsHandler`.
    pub debug_flags: bool,
    /// `enableSystemLogHandler`.
    pub system_logs: bool,
    /// Gate `ContainerCheckpoint`.
    pub checkpoint: bool,
    /// Gate `ComponentFlagz`.
    pub flagz: bool,
    /// Gate `ComponentStatusz`.
    pub statusz: bool,
}

/// Who makes the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Healthz,
    /// One check, by its name.
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
    /// A router of another room, main port only.
    Debug,
    /// A router of another room, both ports.
    Stats,
}

/// What stands behind an entry of the outer layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Serves {
    /// Every method, every type.
    Any(Answer),
    /// The first route that fits.
    Routes(&'static [Route]),
    /// Switched off; the text says so.
    Refused(&'static str),
}

/// A path with parameters: `{}` is one segment, `{*}` all that follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Route {
    path: &'static str,
    methods: &'static [&'static str],
    /// Types it can answer in; none means that it does not say, so that clients must accept anything.
    types: &'static [&'static str],
    answer: Answer,
}

const GET: &[&str] = &["GET"];
const POST: &[&str] = &["POST"];
const GET_POST: &[&str] = &["GET", "POST"];
const JSON: &[&str] = &["application/json"];

const fn route(
    path: &'static str,
    methods: &'static [&'static str],
    types: &'static [&'static str],
    answer: Answer,
) -> Route {
    Route { path, methods, types, answer }
}

const PODS: &[Route] = &[route("/pods", GET, JSON, Answer::Pods)];
const STATS: &[Route] = &[route("/stats/summary", GET_POST, JSON, Answer::Stats)];
const RUNNING_PODS: &[Route] = &[route("/runningpods", GET, JSON, Answer::RunningPods)];
const CONTAINER_LOGS: &[Route] = &[route("/containerLogs/{}/{}/{}", GET, &[], Answer::Debug)];
const CHECKPOINT: &[Route] = &[route("/checkpoint/{}/{}/{}", POST, JSON, Answer::Debug)];
const LOGS: &[Route] = &[route("/logs", GET, &[], Answer::Debug), route("/logs/{*}", GET, &[], Answer::Debug)];
const PROFILES: &[Route] = &[route("/debug/pprof/{*}", GET, &[], Answer::Profile)];
const RUN: &[Route] =
    &[route("/run/{}/{}/{}", POST, &[], Answer::Debug), route("/run/{}/{}/{}/{}", POST, &[], Answer::Debug)];
const EXEC: &[Route] =
    &[route("/exec/{}/{}/{}", GET_POST, &[], Answer::Debug), route("/exec/{}/{}/{}/{}", GET_POST, &[], Answer::Debug)];
const ATTACH: &[Route] = &[
    route("/attach/{}/{}/{}", GET_POST, &[], Answer::Debug),
    route("/attach/{}/{}/{}/{}", GET_POST, &[], Answer::Debug),
];
const PORT_FORWARD: &[Route] = &[
    route("/portForward/{}/{}", GET_POST, &[], Answer::Debug),
    route("/portForward/{}/{}/{}", GET_POST, &[], Answer::Debug),
];

/// What both ports have.
const BOTH: [(&str, Serves); 13] = [
    ("/healthz", Serves::Any(Answer::Healthz)),
    ("/healthz/ping", Serves::Any(Answer::Check("ping"))),
    ("/healthz/log", Serves::Any(Answer::Check("log"))),
    ("/healthz/syncloop", Serves::Any(Answer::Check("syncloop"))),
    ("/healthz/device-plugin", Serves::Any(Answer::Check("device-plugin"))),
    ("/pods", Serves::Routes(PODS)),
    ("/pods/", Serves::Routes(PODS)),
    ("/stats/", Serves::Routes(STATS)),
    ("/metrics", Serves::Any(Answer::Metrics)),
    ("/metrics/cadvisor", Serves::Any(Answer::Stats)),
    ("/metrics/probes", Serves::Any(Answer::ProbeMetrics)),
    ("/metrics/resource", Serves::Any(Answer::Stats)),
    ("/metrics/slis", Serves::Any(Answer::SliMetrics)),
];

/// Prefixes that are refused as a whole where debugging is off.
const DEBUG_PREFIXES: [&str; 8] =
    ["/run/", "/exec/", "/attach/", "/portForward/", "/containerLogs/", "/runningpods/", "/debug/pprof/", "/logs/"];

/// All paths of one port.
#[derive(Clone, Debug)]
pub(super) struct Table {
    entries: Vec<(&'static str, Serves)>,
    port: Port,
    debugging: bool,
}

/// What the outer layer makes of a path.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Not even a path.
    Malformed,
    /// Nobody answers here.
    Unknown,
    /// The same path, properly written, without its query.
    Elsewhere(String),
    /// The entry, and the path without percent signs.
    Here(Serves, String),
}

impl Table {
    /// The main port's.
    pub(super) fn main(switches: &Switches) -> Self {
        let mut entries = BOTH.to_vec();
        if switches.debugging {
            entries.extend(debugging(switches));
        } else {
            entries.extend(refused());
        }
        Self { entries, port: Port::Main, debugging: switches.debugging }
    }

    /// The read-only port's.
    pub(super) fn read_only() -> Self {
        let entries = BOTH.into_iter().chain(refused()).collect();
        Self { entries, port: Port::ReadOnly, debugging: false }
    }

    /// Looks a path up, as the client wrote it.
    pub(super) fn find(&self, written: &str) -> Found {
        let Some(cleaned) = Cleaned::of(written) else { return Found::Malformed };
        let entry = self.entry(&cleaned.segments);
        if entry.is_none() && self.is_prefix(&cleaned.segments) {
            return Found::Elsewhere(format!("{}/", cleaned.text));
        }
        match entry {
            _ if cleaned.text != written => Found::Elsewhere(cleaned.text),
            Some(serves) => Found::Here(serves, cleaned.decoded()),
            None => Found::Unknown,
        }
    }

    /// The longest entry that covers the path.
    fn entry(&self, segments: &[String]) -> Option<Serves> {
        let covers = |path: &str| match path.strip_suffix('/') {
            Some(prefix) => {
                let wanted = split(prefix);
                segments.len() > wanted.len() && segments[..wanted.len()] == wanted[..]
            }
            None => segments == split(path),
        };
        let covering = self.entries.iter().filter(|(path, _)| covers(path));
        covering.max_by_key(|(path, _)| path.len()).map(|(_, serves)| *serves)
    }

    /// Whether only the slash at the end is missing.
    fn is_prefix(&self, segments: &[String]) -> bool {
        self.entries.iter().any(|(path, _)| path.strip_suffix('/').is_some_and(|prefix| segments == split(prefix)))
    }

    /// The first segments of what is registered by itself, for people who look around.
    pub(super) fn own_paths(&self) -> Vec<String> {
        let own = self.entries.iter().filter(|(_, serves)| matches!(serves, Serves::Any(_)));
        let mut paths: Vec<String> = own.map(|(path, _)| format!("/{}", split(path)[0])).collect();
        paths.sort();
        paths.dedup();
        paths
    }
}

fn split(path: &str) -> Vec<&str> {
    path.trim_start_matches('/').split('/').collect()
}

fn refused() -> impl Iterator<Item = (&'static str, Serves)> {
    DEBUG_PREFIXES.into_iter().map(|prefix| (prefix, Serves::Refused("Debug endpoints are disabled.")))
}

/// What the main port has on top while debugging is on.
fn debugging(switches: &Switches) -> Vec<(&'static str, Serves)> {
    let mut entries = vec![
        ("/run", Serves::Routes(RUN)),
        ("/run/", Serves::Routes(RUN)),
        ("/exec", Serves::Routes(EXEC)),
        ("/exec/", Serves::Routes(EXEC)),
        ("/attach", Serves::Routes(ATTACH)),
        ("/attach/", Serves::Routes(ATTACH)),
        ("/portForward", Serves::Routes(PORT_FORWARD)),
        ("/portForward/", Serves::Routes(PORT_FORWARD)),
        ("/containerLogs", Serves::Routes(CONTAINER_LOGS)),
        ("/containerLogs/", Serves::Routes(CONTAINER_LOGS)),
        ("/runningpods/", Serves::Routes(RUNNING_PODS)),
        ("/configz", Serves::Any(Answer::Configz)),
        ("/logs/", or_refused(switches.system_logs, Serves::Routes(LOGS), "logs endpoint is disabled.")),
        ("/debug/pprof/", or_refused(switches.profiling, Serves::Routes(PROFILES), "profiling endpoint is disabled.")),
        (
            "/debug/flags/v",
            or_refused(switches.debug_flags, Serves::Any(Answer::DebugFlags), "flags endpoint is disabled."),
        ),
    ];
    let gated = [
        (switches.checkpoint, ("/checkpoint/", Serves::Routes(CHECKPOINT))),
        (switches.flagz, ("/flagz", Serves::Any(Answer::Flagz))),
        (switches.statusz, ("/statusz", Serves::Any(Answer::Statusz))),
    ];
    entries.extend(gated.into_iter().filter(|(on, _)| *on).map(|(_, entry)| entry));
    entries
}

fn or_refused(on: bool, serves: Serves, text: &'static str) -> Serves {
    if on { serves } else { Serves::Refused(text) }
}

#[cfg(test)]
mod tests;
