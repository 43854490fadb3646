//! `/flagz` and `/statusz` (KEP-4828, KEP-4827): as text, and as objects for clients that request an exact version.

use std::collections::BTreeMap;
use std::time::Duration;
use std::time::SystemTime;

use axum::http::HeaderMap;
use axum::http::HeaderName;
use axum::http::HeaderValue;
use axum::http::StatusCode;
use axum::http::header;
use axum::response::IntoResponse;
use axum::response::Response;
use serde_json::Value;
use serde_json::json;

use super::health::text;
use crate::metrics::Metrics;

const COMPONENT: &str = "kubelet";
const GROUP: &str = "config.k8s.io";
const CAUTION: &str = "Warning: for human readers only; the format may change at any time and must not be parsed.";

/// The form of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Text,
    /// An object of this version; YAML is served as JSON, which is valid YAML.
    Object {
        version: &'static str,
        yaml: bool,
    },
}

pub(super) fn flagz(flags: &BTreeMap<String, String>, headers: &HeaderMap) -> Response {
    let Some(form) = form(headers, "Flagz") else { return not_acceptable("Flagz") };
    match form {
        Form::Text => {
            let lines: String = flags.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
            text((StatusCode::OK, format!("\n{COMPONENT} flagz\n{CAUTION}\n\n{lines}")))
        }
        Form::Object { version, yaml } => {
            object("Flagz", version, yaml, json!({ "metadata": { "name": COMPONENT }, "flags": flags }))
        }
    }
}

/// In place of Go's version.
const LANGUAGE: &str = "rust";

/// `version` is the Kubernetes version that the agent implements.
pub(super) fn statusz(metrics: &Metrics, version: &str, paths: &[String], headers: &HeaderMap) -> Response {
    let Some(form) = form(headers, "Statusz") else { return not_acceptable("Statusz") };
    let start = SystemTime::UNIX_EPOCH + Duration::try_from_secs_f64(metrics.process_start).unwrap_or_default();
    let up = SystemTime::now().duration_since(start).unwrap_or_default().as_secs();
    let started = humantime::format_rfc3339_seconds(start).to_string();
    let version = version.trim_start_matches('v');
    let emulated = version.rsplit_once('.').map_or(version, |(minor, _)| minor);
    match form {
        Form::Text => {
            let (hours, minutes, seconds) = (up / 3600, up / 60 % 60, up % 60);
            let paths = paths.join(" ");
            let body = format!(
                "\n{COMPONENT} statusz\n{CAUTION}\n\nStarted: {started}\nUp: {hours} hr {minutes:02} min {seconds:02} sec\n\
                 Go version: {LANGUAGE}\nBinary version: {version}\nEmulation version: {emulated}\nPaths: {paths}\n"
            );
            text((StatusCode::OK, body))
        }
        Form::Object { version: api, yaml } => object(
            "Statusz",
            api,
            yaml,
            json!({
                "metadata": { "name": COMPONENT },
                "startTime": started,
                "uptimeSeconds": up,
                "goVersion": LANGUAGE,
                "binaryVersion": version,
                "emulationVersion": emulated,
                "paths": paths,
            }),
        ),
    }
}

fn object(kind: &str, version: &str, yaml: bool, mut body: Value) -> Response {
    body["kind"] = kind.into();
    body["apiVersion"] = format!("{GROUP}/{version}").into();
    let media = if yaml { "application/yaml" } else { "application/json" };
    let mut response = ([(header::CONTENT_TYPE, media)], format!("{body}\n")).into_response();
    if version == "v1alpha1" {
        let page = kind.to_lowercase();
        let warning =
            format!("299 - \"This version of the {page} endpoint is deprecated. Please use a newer version.\"");
        if let Ok(warning) = HeaderValue::from_str(&warning) {
            response.headers_mut().insert(HeaderName::from_static("warning"), warning);
        }
    }
    response
}

fn not_acceptable(kind: &str) -> Response {
    let wanted = format!("application/json;v=v1beta1;g={GROUP};as={kind}");
    text((StatusCode::NOT_ACCEPTABLE, format!("only the following media types are accepted: text/plain, {wanted}\n")))
}

/// The form that exists and is accepted with the highest quality; of those with the same, an exact type before a wildcard,
/// and the first one. Objects must be requested with group, version and kind.
fn form(headers: &HeaderMap, kind: &str) -> Option<Form> {
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    if accept.trim().is_empty() {
        return Some(Form::Text);
    }
    let ranges = accept.split(',').map(|one| {
        let mut parts = one.split(';').map(str::trim);
        let media = parts.next().unwrap_or_default();
        let parameters: BTreeMap<&str, &str> = parts.filter_map(|part| part.split_once('=')).collect();
        let quality: f64 = parameters.get("q").map_or(1.0, |quality| quality.parse().unwrap_or(0.0));
        (quality, media, parameters)
    });
    let mut ranges: Vec<_> = ranges.collect();
    ranges.sort_by(|(one, first, _), (other, second, _)| {
        other.total_cmp(one).then_with(|| first.ends_with("/*").cmp(&second.ends_with("/*")))
    });
    ranges.into_iter().find_map(|(_, media, parameters)| {
        let is = |name: &str, wanted: &str| parameters.get(name) == Some(&wanted);
        let yaml = match media {
            "text/plain" | "text/*" | "*/*" => return Some(Form::Text),
            "application/json" => false,
            "application/yaml" => true,
            _ => return None,
        };
        let version = ["v1beta1", "v1alpha1"].into_iter().find(|version| is("v", version))?;
        (is("g", GROUP) && is("as", kind)).then_some(Form::Object { version, yaml })
    })
}

#[cfg(test)]
mod tests {
    use axum::body::to_bytes;

    use super::*;

    fn accept(value: &str) -> HeaderMap {
        [(header::ACCEPT, value.parse().expect("a header"))].into_iter().collect()
    }

    async fn body(response: Response) -> String {
        String::from_utf8(to_bytes(response.into_body(), 100_000).await.expect("a body").to_vec()).expect("text")
    }

    fn flags() -> BTreeMap<String, String> {
        [("v", "2"), ("config", "/c.yaml")].map(|(name, value)| (name.to_owned(), value.to_owned())).into()
    }

    #[tokio::test]
    async fn flags_as_text_and_object() {
        let page = body(flagz(&flags(), &HeaderMap::new())).await;
        assert!(page.ends_with("\n\nconfig=/c.yaml\nv=2\n"), "{page}");
        let response = flagz(&flags(), &accept("application/json;v=v1beta1;g=config.k8s.io;as=Flagz"));
        assert_eq!(response.headers()[header::CONTENT_TYPE], "application/json");
        assert!(!response.headers().contains_key("warning"));
        let object: Value = serde_json::from_str(&body(response).await).expect("JSON");
        assert_eq!(
            object,
            json!({"kind": "Flagz", "apiVersion": "config.k8s.io/v1beta1", "metadata": {"name": "kubelet"},
                   "flags": {"v": "2", "config": "/c.yaml"}})
        );
    }

    #[test]
    fn forms() {
        let form = |accepted: &str| super::form(&accept(accepted), "Statusz");
        let object = |version, yaml| Some(Form::Object { version, yaml });
        assert_eq!(form("*/*"), Some(Form::Text));
        assert_eq!(form("image/png, text/*"), Some(Form::Text));
        assert_eq!(form("text/html, text/plain;q=0.1"), Some(Form::Text));
        assert_eq!(form("application/yaml;v=v1beta1;g=config.k8s.io;as=Statusz"), object("v1beta1", true));
        let json = "application/json;v=v1alpha1;g=config.k8s.io;as=Statusz";
        assert_eq!(form(json), object("v1alpha1", false));
        assert_eq!(form(&format!("text/plain;q=0.5, {json}")), object("v1alpha1", false));
        assert_eq!(form(&format!("*/*, {json}")), object("v1alpha1", false));
        assert_eq!(form(&format!("text/plain, {json}")), Some(Form::Text));
        assert_eq!(form(&format!("{json};q=0.5, */*")), Some(Form::Text));
        for none in ["application/json", "text/html", "application/json;v=v1beta1;g=config.k8s.io;as=Flagz"] {
            assert_eq!(form(none), None, "{none}");
        }
        assert_eq!(
            statusz(&Metrics::new(), "v1.36.3", &[], &accept("application/json")).status(),
            StatusCode::NOT_ACCEPTABLE
        );
    }

    #[tokio::test]
    async fn state_of_the_process() {
        let paths = ["/configz".to_owned(), "/healthz".to_owned()];
        let page = body(statusz(&Metrics::new(), "v1.36.3", &paths, &HeaderMap::new())).await;
        assert!(
            page.contains("\nEmulation version: 1.36\n") && page.ends_with("\nPaths: /configz /healthz\n"),
            "{page}"
        );
        let response = statusz(
            &Metrics::new(),
            "v1.36.3",
            &paths,
            &accept("application/json;v=v1alpha1;g=config.k8s.io;as=Statusz"),
        );
        assert!(response.headers()["warning"].to_str().expect("text").contains("statusz endpoint is deprecated"));
        let object: Value = serde_json::from_str(&body(response).await).expect("JSON");
        assert_eq!((&object["binaryVersion"], &object["paths"][0]), (&"1.36.3".into(), &"/configz".into()));
        assert!(object["uptimeSeconds"].as_u64().is_some_and(|up| up < 3600), "{object}");
    }
}
