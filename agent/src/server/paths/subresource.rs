//! The verb and subresources of a request for its SubjectAccessReview.

/// The verb of a method; empty for other methods.
pub(in crate::server) fn verb(method: &str) -> &'static str {
    match method {
        "POST" => "create",
        "GET" => "get",
        "PUT" => "update",
        "PATCH" => "patch",
        "DELETE" => "delete",
        _ => "",
    }
}

/// The subresources of `nodes` of which one must be allowed, in the order of their reviews (KEP-2862). `decoded` is the
/// path that is routed.
pub(in crate::server) fn subresources(decoded: &str) -> &'static [&'static str] {
    let below = |path: &str| decoded.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    if below("/stats") {
        &["stats"]
    } else if below("/metrics") {
        &["metrics"]
    } else if below("/logs") {
        &["log"]
    } else if below("/checkpoint") {
        &["checkpoint"]
    } else if below("/statusz") {
        &["statusz"]
    } else if below("/pods") || below("/runningpods") {
        &["pods", "proxy"]
    } else if below("/healthz") {
        &["healthz", "proxy"]
    } else if below("/configz") {
        &["configz", "proxy"]
    } else if below("/flagz") {
        &["configz"]
    } else {
        &["proxy"]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verbs() {
        let table = [("POST", "create"), ("GET", "get"), ("PUT", "update"), ("PATCH", "patch"), ("DELETE", "delete")];
        for (method, expected) in table {
            assert_eq!(verb(method), expected);
        }
        for other in ["HEAD", "OPTIONS", "TRACE", "CONNECT", "BREW", "get"] {
            assert_eq!(verb(other), "", "{other}");
        }
    }

    #[test]
    fn paths() {
        for (path, expected) in [
            ("/stats/summary", &["stats"][..]),
            ("/metrics", &["metrics"]),
            ("/metrics/cadvisor", &["metrics"]),
            ("/metricsx", &["proxy"]),
            ("/logs/", &["log"]),
            ("/checkpoint/a/b/c", &["checkpoint"]),
            ("/statusz", &["statusz"]),
            ("/pods", &["pods", "proxy"]),
            ("/pods/", &["pods", "proxy"]),
            ("/Pods", &["proxy"]),
            ("/runningpods/", &["pods", "proxy"]),
            ("/healthz/log", &["healthz", "proxy"]),
            ("/configz", &["configz", "proxy"]),
            ("/flagz", &["configz"]),
            ("/exec/../pods", &["proxy"]),
            ("/containerLogs/a/b/c", &["proxy"]),
            ("/debug/pprof/heap", &["proxy"]),
        ] {
            assert_eq!(subresources(path), expected, "{path}");
        }
    }
}
