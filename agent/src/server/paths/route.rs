//! Chooses the route within an entry of the outer mux.

use super::Endpoint;
use super::Route;
use super::clean::encode;

/// Why no route matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::server) enum RouteError {
    /// No route has this path.
    NotFound,
    /// Routes with this path have other methods.
    Method {
        /// The value of the `Allow` header.
        allow: String,
    },
    /// The client accepts none of the types.
    Type {
        /// The available types.
        types: String,
    },
}

/// The endpoint of the matching route, and the encoded path for mounted routers.
///
/// # Errors
/// No route matches.
pub(in crate::server) fn choose(
    routes: &'static [Route],
    decoded: &str,
    method: &str,
    accept: Option<&str>,
) -> Result<(Endpoint, String), RouteError> {
    let fitting: Vec<&Route> = routes.iter().filter(|route| fits(route.path, decoded)).collect();
    if fitting.is_empty() {
        return Err(RouteError::NotFound);
    }
    let Some(route) = fitting.iter().find(|route| route.methods.contains(&method)) else {
        let methods: Vec<&str> = fitting.iter().flat_map(|route| route.methods).copied().collect();
        return Err(RouteError::Method { allow: methods.join(", ") });
    };
    if !accepts(accept.unwrap_or_default(), route.types) {
        return Err(RouteError::Type { types: route.types.join(", ") });
    }
    let mut path = encode(decoded);
    // The handler of all paths below distinguishes directories from files by it.
    if route.path.ends_with("{*}") && decoded.ends_with('/') {
        path.push('/');
    }
    Ok((route.answer, path))
}

/// Leading and trailing slashes are ignored; a parameter is never empty.
fn fits(pattern: &str, decoded: &str) -> bool {
    let mut segments = decoded.trim_matches('/').split('/');
    for part in pattern.trim_matches('/').split('/') {
        match (part, segments.next()) {
            ("{*}", rest) => return rest.is_some_and(|first| !first.is_empty()),
            ("{}", Some(segment)) if !segment.is_empty() => {}
            (literal, Some(segment)) if literal == segment => {}
            _ => return false,
        }
    }
    segments.next().is_none()
}

/// Types are compared literally and quality is ignored, as by upstream's router.
fn accepts(accept: &str, types: &[&str]) -> bool {
    let mut accepted = accept.split(',').map(|one| one.split(';').next().unwrap_or_default().trim());
    accept.is_empty() || accepted.any(|one| one == "*/*" || types.contains(&one))
}

#[cfg(test)]
mod tests {
    use super::super::EXEC;
    use super::super::LOGS;
    use super::super::PODS;
    use super::super::PROFILES;
    use super::*;

    #[test]
    fn patterns() {
        for (pattern, path, expected) in [
            ("/pods", "/pods/", true),
            ("/pods", "/pods/x", false),
            ("/exec/{}/{}/{}", "/exec/ns/pod/c", true),
            ("/exec/{}/{}/{}", "/exec/ns/pod/c/", true),
            ("/exec/{}/{}/{}", "/exec/ns//c", false),
            ("/exec/{}/{}/{}", "/exec/ns/pod", false),
            ("/exec/{}/{}/{}", "/exec/ns/pod/uid/c", false),
            ("/logs/{*}", "/logs/", false),
            ("/logs/{*}", "/logs/pods/a/b", true),
            ("/debug/pprof/{*}", "/debug/pprof", false),
        ] {
            assert_eq!(fits(pattern, path), expected, "{pattern} {path}");
        }
    }

    #[test]
    fn refusals() {
        assert_eq!(choose(PODS, "/pods/x", "GET", None), Err(RouteError::NotFound));
        assert_eq!(choose(PODS, "/pods", "HEAD", None), Err(RouteError::Method { allow: "GET".to_owned() }));
        let both = RouteError::Method { allow: "GET, POST".to_owned() };
        assert_eq!(choose(EXEC, "/exec/a/b/c", "PATCH", Some("nonsense")), Err(both));
        let json = RouteError::Type { types: "application/json".to_owned() };
        assert_eq!(choose(PODS, "/pods", "GET", Some("text/html")), Err(json));
        let none = RouteError::Type { types: String::new() };
        assert_eq!(choose(LOGS, "/logs/", "GET", Some("application/json")), Err(none));
        assert_eq!(choose(PROFILES, "/debug/pprof/", "GET", None), Err(RouteError::NotFound));
    }

    #[test]
    fn choices() {
        assert_eq!(choose(PODS, "/pods/", "GET", None), Ok((Endpoint::Pods, "/pods".to_owned())));
        let exec = Ok((Endpoint::Debug, "/exec/a/b%20/u/c".to_owned()));
        assert_eq!(choose(EXEC, "/exec/a/b /u/c", "POST", Some("*/*")), exec);
        assert_eq!(choose(EXEC, "/exec/a/b /u/c/", "POST", Some("*/*")), exec);
        for path in ["/logs/sub/", "/logs/sub", "/logs/a/b%20/"] {
            let decoded = path.replace("%20", " ");
            assert_eq!(choose(LOGS, &decoded, "GET", None), Ok((Endpoint::Debug, path.to_owned())));
        }
    }

    #[test]
    fn acceptable_types() {
        let json = &["application/json"];
        for good in ["", "*/*", "application/json", "text/html, application/json;q=0.9"] {
            assert!(accepts(good, json), "{good}");
        }
        for bad in ["application/*", "text/html"] {
            assert!(!accepts(bad, json), "{bad}");
        }
    }
}
