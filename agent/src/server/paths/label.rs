//! Labels of a request's metrics.

use super::Port;
use super::Table;
use crate::metrics;

const METHODS: [&str; 8] = ["OPTIONS", "GET", "HEAD", "POST", "PUT", "DELETE", "TRACE", "CONNECT"];

/// Path labels on both ports.
const BOTH: [&str; 6] = ["healthz", "pods", "stats", "metrics", "metrics/cadvisor", "metrics/probes"];
/// The same; not in upstream's first list.
const RESOURCE: &str = "metrics/resource";
/// With debugging handlers.
const DEBUGGING: [&str; 13] = [
    "run",
    "exec",
    "attach",
    "portForward",
    "containerLogs",
    "configz",
    "runningpods",
    "checkpoint",
    "logs",
    "debug",
    "flagz",
    "statusz",
    RESOURCE,
];
/// Without debugging handlers. `pprof` is not the first segment of any path, but upstream lists it.
const NO_DEBUGGING: [&str; 9] =
    ["run", "exec", "attach", "portForward", "containerLogs", "runningpods", "pprof", "logs", RESOURCE];

/// The labels of a request; values that clients could invent become `other`.
pub(in crate::server) fn labels(table: &Table, method: &str, path: &str) -> metrics::Request {
    let mut segments = path.strip_prefix('/').unwrap_or(path).splitn(3, '/');
    let first = segments.next().unwrap_or_default();
    let wanted = match (first, segments.next()) {
        ("metrics", Some(second)) => format!("metrics/{second}"),
        _ => first.to_owned(),
    };
    let more: &[&'static str] = if table.debugging { &DEBUGGING } else { &NO_DEBUGGING };
    let path = BOTH.iter().chain(more).find(|known| **known == wanted).copied().unwrap_or("other");
    metrics::Request {
        method: METHODS.into_iter().find(|known| *known == method).unwrap_or("other"),
        path,
        server: match table.port {
            Port::Main => "readwrite",
            Port::ReadOnly => "readonly",
        },
        long_running: matches!(path, "exec" | "attach" | "debug"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::testing::ALL_ON;

    #[test]
    fn labels_of_requests() {
        for (method, path, main, read_only) in [
            ("GET", "/pods", ("GET", "pods", false), "pods"),
            ("GET", "/pods/x", ("GET", "pods", false), "pods"),
            ("GET", "/metrics/cadvisor", ("GET", "metrics/cadvisor", false), "metrics/cadvisor"),
            ("GET", "/metrics/slis", ("GET", "other", false), "other"),
            ("GET", "/metrics/resource", ("GET", "metrics/resource", false), "metrics/resource"),
            ("GET", "/metrics/cadvisor/", ("GET", "metrics/cadvisor", false), "metrics/cadvisor"),
            ("GET", "/metrics/probes/x/y", ("GET", "metrics/probes", false), "metrics/probes"),
            ("GET", "//pods", ("GET", "other", false), "other"),
            ("POST", "/exec/ns/pod/c", ("POST", "exec", true), "exec"),
            ("POST", "/portForward/ns/pod", ("POST", "portForward", false), "portForward"),
            ("GET", "/debug/pprof/heap", ("GET", "debug", true), "other"),
            ("GET", "/configz", ("GET", "configz", false), "other"),
            ("PATCH", "/", ("other", "other", false), "other"),
            ("get", "/nope", ("other", "other", false), "other"),
        ] {
            let found = labels(&Table::main(&ALL_ON), method, path);
            assert_eq!((found.method, found.path, found.long_running), main, "{method} {path}");
            assert_eq!(found.server, "readwrite");
            let found = labels(&Table::read_only(), method, path);
            assert_eq!((found.path, found.server), (read_only, "readonly"), "{method} {path}");
        }
    }
}
