//! Health checks, with responses that equal those of k8s.io/apiserver's healthz handlers.

use axum::http::StatusCode;

/// One check and its outcome.
pub(super) struct Check {
    pub(super) name: &'static str,
    pub(super) outcome: Result<(), String>,
}

/// The parameters of a health request.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct HealthQuery {
    pub(super) verbose: bool,
    pub(super) exclude: Vec<String>,
}

impl HealthQuery {
    /// From the query; unknown parameters are ignored.
    pub(super) fn new(query: &[(String, String)]) -> Self {
        Self {
            verbose: query.iter().any(|(name, _)| name == "verbose"),
            exclude: query.iter().filter(|(name, _)| name == "exclude").map(|(_, value)| value.clone()).collect(),
        }
    }

    /// Whether this check is not made.
    pub(super) fn excludes(&self, check: &Check) -> bool {
        self.exclude.iter().any(|excluded| excluded == check.name)
    }
}

/// The response to `/healthz`. `more` are informational lines that do not change the status.
pub(super) fn overall(checks: &[Check], wanted: &HealthQuery, more: &[String]) -> (StatusCode, String) {
    let mut body = String::new();
    let mut failed = false;
    for check in checks {
        let name = check.name;
        let line = if wanted.excludes(check) {
            format!("[+]{name} excluded: ok\n")
        } else if let Err(reason) = &check.outcome {
            failed = true;
            tracing::info!(check = name, reason, "health check failed");
            // Reasons are only shown by `/healthz/<name>` and the log.
            format!("[-]{name} failed: reason withheld\n")
        } else {
            format!("[+]{name} ok\n")
        };
        body.push_str(&line);
    }
    for line in more {
        body.push_str(line);
        body.push('\n');
    }
    if let Some(warning) = unmatched(checks, wanted) {
        body.push_str(&warning);
    }
    match (failed, wanted.verbose) {
        (true, _) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{body}healthz check failed\n")),
        (false, true) => (StatusCode::OK, format!("{body}healthz check passed\n")),
        (false, false) => (StatusCode::OK, "ok".to_owned()),
    }
}

fn unmatched(checks: &[Check], wanted: &HealthQuery) -> Option<String> {
    let mut names: Vec<String> = wanted
        .exclude
        .iter()
        .filter(|excluded| checks.iter().all(|check| check.name != excluded.as_str()))
        .map(|excluded| format!("{excluded:?}"))
        .collect();
    names.sort();
    let names = Some(names.join(",")).filter(|names| !names.is_empty())?;
    Some(format!("warn: some health checks cannot be excluded: no matches for {names}\n"))
}

/// The response to `/healthz/<name>`.
pub(super) fn single(check: &Check) -> (StatusCode, String) {
    match &check.outcome {
        Ok(()) => (StatusCode::OK, "ok".to_owned()),
        Err(reason) => (StatusCode::INTERNAL_SERVER_ERROR, format!("internal server error: {reason}\n")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checks() -> [Check; 2] {
        [
            Check { name: "ping", outcome: Ok(()) },
            Check { name: "syncloop", outcome: Err("sync Loop took longer than expected".to_owned()) },
        ]
    }

    fn wanted(query: &[(&str, &str)]) -> HealthQuery {
        HealthQuery::new(&query.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect::<Vec<_>>())
    }

    #[test]
    fn failure_is_always_verbose() {
        let (status, body) = overall(&checks(), &wanted(&[]), &[]);
        assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(body, "[+]ping ok\n[-]syncloop failed: reason withheld\nhealthz check failed\n");
    }

    #[test]
    fn exclusion() {
        let (status, body) = overall(&checks(), &wanted(&[("exclude", "syncloop")]), &[]);
        assert_eq!((status, body.as_str()), (StatusCode::OK, "ok"));
        let query = [("verbose", ""), ("exclude", "syncloop"), ("exclude", "z"), ("exclude", "a")];
        let (_, body) = overall(&checks(), &wanted(&query), &["excluded".to_owned()]);
        assert_eq!(
            body,
            "[+]ping ok\n[+]syncloop excluded: ok\nexcluded\n\
             warn: some health checks cannot be excluded: no matches for \"a\",\"z\"\nhealthz check passed\n"
        );
    }

    #[test]
    fn a_single_check_shows_its_reason() {
        let [ping, sync_loop] = checks();
        assert_eq!(single(&ping), (StatusCode::OK, "ok".to_owned()));
        let expected = "internal server error: sync Loop took longer than expected\n".to_owned();
        assert_eq!(single(&sync_loop), (StatusCode::INTERNAL_SERVER_ERROR, expected));
    }
}
