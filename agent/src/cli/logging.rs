//! Where log lines go and which are written.
//!
//! The standard verbosity decides: 0 logs the agent itself and errors, 2 changes of pods, 4 the reasons, 6 and more
//! every call. Lines go to stderr, one per event: `lines` keeps them so.

use std::fmt;
use std::io::IsTerminal;
use std::sync::Arc;

use anyhow::anyhow;
use tracing::Level;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::Filter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::reload;
use tracing_subscriber::util::SubscriberInitExt as _;

use super::json_lines::JsonLine;
use super::lines::LIMIT;
use super::lines::Lines;
use crate::config::kubelet_sections::Logging;
use crate::telemetry::SpanLayer;

/// The filter of a verbosity. Libraries log warnings and errors only, below the highest verbosity.
fn written(verbosity: u32) -> Targets {
    let (own, others) = match verbosity {
        0..=3 => (LevelFilter::INFO, LevelFilter::WARN),
        4 | 5 => (LevelFilter::DEBUG, LevelFilter::WARN),
        6..=8 => (LevelFilter::TRACE, LevelFilter::INFO),
        _ => (LevelFilter::TRACE, LevelFilter::TRACE),
    };
    let targets = Targets::new().with_default(others).with_target("keblet", own);
    // Its warnings quote whole answers that cannot be decoded, Secrets included.
    let targets = targets.with_target("kube_client::client", LevelFilter::ERROR);
    if verbosity < 2 { targets.with_target("keblet::recorder", LevelFilter::WARN) } else { targets }
}

/// Changes how much is logged while the process runs. Cheap to clone.
#[derive(Clone)]
pub struct Verbosity(Arc<dyn Fn(u32) -> Result<(), String> + Send + Sync>);

impl Verbosity {
    /// From now on, `level` decides.
    ///
    /// # Errors
    /// Why it stays as it is.
    pub fn set(&self, level: u32) -> Result<(), String> {
        (self.0)(level)
    }

    /// One that no level changes.
    #[cfg(test)]
    pub(crate) fn unchanging() -> Self {
        Self(Arc::new(|_| Ok(())))
    }
}

impl fmt::Debug for Verbosity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Verbosity")
    }
}

/// The layer that writes lines, and what changes its verbosity. Filters lines only: spans have a filter of their own.
fn lines<S, W>(logging: &Logging, writer: W, colour: bool) -> (Box<dyn Layer<S> + Send + Sync>, Verbosity)
where
    S: tracing::Subscriber + for<'a> LookupSpan<'a> + Send + Sync,
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let (filter, handle) = reload::Layer::new(written(logging.verbosity));
    let set = move |level| handle.reload(written(level)).map_err(|error| error.to_string());
    (formatted(logging.format == "json", writer, colour, filter), Verbosity(Arc::new(set)))
}

fn formatted<S, W, F>(json: bool, writer: W, colour: bool, filter: F) -> Box<dyn Layer<S> + Send + Sync>
where
    S: tracing::Subscriber + for<'a> LookupSpan<'a> + Send + Sync,
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
    F: Filter<S> + Send + Sync + 'static,
{
    // A line of JSON is bounded by its values: one that is cut would be no JSON.
    let limit = if json { usize::MAX } else { LIMIT };
    let lines = tracing_subscriber::fmt::layer().with_writer(Lines { writer, colour, limit }).with_ansi(colour);
    // Errors about a line that cannot be written would be written to stderr, which fails too and panics.
    let lines = lines.log_internal_errors(false);
    if json {
        return lines.event_format(JsonLine).with_filter(filter).boxed();
    }
    lines.with_filter(filter).boxed()
}

/// Starts logging as configured, and the span layer if there is one. To be called once.
///
/// # Errors
/// Invalid logging options; a second call.
pub fn init(logging: &Logging, spans: Option<SpanLayer>) -> anyhow::Result<Verbosity> {
    let colour = std::io::stderr().is_terminal();
    let registry = tracing_subscriber::registry();
    let (started, verbosity) = match spans {
        None => {
            let (lines, verbosity) = lines(logging, std::io::stderr, colour);
            (registry.with(lines).try_init(), verbosity)
        }
        Some(spans) => {
            let (lines, verbosity) = lines(logging, std::io::stderr, colour);
            (registry.with(spans).with(lines).try_init(), verbosity)
        }
    };
    started.map_err(|error| anyhow!("cannot start logging: {error}"))?;
    Ok(verbosity)
}

/// The output of a command that logs warnings only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Output {
    /// Text for people, or one answer for a program.
    Other,
    /// Records as JSON lines, which a collector may mix with those of the log: these are JSON too, and do not repeat what a
    /// record says.
    Records,
}

/// Targets of what is a record of its own: OOM kills, states of sensors.
const RECORDED: [&str; 3] = ["keblet::events", "keblet::events::sensors", "keblet::recorder"];

/// The layer that writes warnings and errors.
fn warning_lines<S, W>(beside: Output, writer: W, colour: bool) -> Box<dyn Layer<S> + Send + Sync>
where
    S: tracing::Subscriber + for<'a> LookupSpan<'a> + Send + Sync,
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    match beside {
        Output::Other => formatted(false, writer, colour, LevelFilter::WARN),
        Output::Records => {
            let filter = filter_fn(|line| *line.level() <= Level::WARN && !RECORDED.contains(&line.target()));
            formatted(true, writer, colour, filter.with_max_level_hint(Level::WARN))
        }
    }
}

/// Logs warnings and errors only, for commands whose output is something else. To be called once.
///
/// # Errors
/// A second call.
pub fn warnings(beside: Output) -> anyhow::Result<()> {
    let lines = warning_lines(beside, std::io::stderr, std::io::stderr().is_terminal());
    let started = tracing_subscriber::registry().with(lines).try_init();
    started.map_err(|error| anyhow!("cannot start logging: {error}"))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::time::Duration;

    use k8s_openapi::api::core::v1::Secret;
    use kube::client::Body;

    use super::*;
    use crate::model::Clock;
    use crate::model::testing::Buffer;

    fn written(format: &str, verbosity: u32) -> Vec<String> {
        let buffer = Buffer::default();
        let writer = buffer.clone();
        let logging = Logging { format: format.to_owned(), verbosity, ..Logging::default() };
        let (lines, _) = lines(&logging, move || writer.clone(), false);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(lines), || {
            tracing::info!(target: "keblet::pleg", pod = "a/b", "seen");
            tracing::info!(target: "keblet::recorder", "Started");
            tracing::debug!(target: "keblet::pleg", "why");
            tracing::info!(target: "h2", "chatter");
            let error = std::io::Error::other("said:\nforged \u{1b}[31m\r\n");
            tracing::warn!(target: "keblet::pleg", %error, "not {}", "done\nforged");
        });
        let bytes = buffer.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn verbosity_decides_what_is_written() {
        for (verbosity, count) in [(0, 2), (2, 3), (4, 4), (6, 5), (10, 5)] {
            assert_eq!(written("text", verbosity).len(), count, "-v={verbosity}");
        }
    }

    #[tokio::test]
    async fn an_answer_that_cannot_be_decoded_is_not_written() {
        let secret = r#"{"metadata": {"name": 1}, "stringData": {"password": "sesame"}}"#;
        for verbosity in [0, 2, 4, 6, 10] {
            let buffer = Buffer::default();
            let writer = buffer.clone();
            let logging = Logging { verbosity, ..Logging::default() };
            let (lines, _) = lines(&logging, move || writer.clone(), false);
            let _logging = tracing::subscriber::set_default(tracing_subscriber::registry().with(lines));
            let answer = tower::service_fn(move |_: http::Request<Body>| async move {
                Ok::<_, Infallible>(http::Response::new(Body::from(secret.as_bytes().to_vec())))
            });
            let secrets = kube::Api::<Secret>::namespaced(kube::Client::new(answer, "default"), "default");
            secrets.get("a").await.expect_err("the name is no text");
            tracing::warn!(target: "keblet::objects", "asked");
            let text = String::from_utf8(buffer.0.lock().unwrap().clone()).unwrap();
            assert!(text.contains("asked") && !text.contains("sesame"), "-v={verbosity}: {text}");
        }
    }

    #[test]
    fn line_breaks_in_logged_values_are_escaped() {
        for format in ["text", "json"] {
            let lines = written(format, 0);
            let last = lines.last().unwrap();
            assert!(last.contains("said:\\nforged") && last.contains("done\\nforged"), "{last}");
            assert!(!last.contains(char::is_control), "{last:?}");
        }
    }

    /// As of a hook with a path of a megabyte, or of what a runtime says about it.
    #[test]
    fn large_values_are_cut() {
        let path = "é".repeat(1 << 20);
        let write = |format: &str, colour: bool| {
            let buffer = Buffer::default();
            let writer = buffer.clone();
            let logging = Logging { format: format.to_owned(), ..Logging::default() };
            let (lines, _) = lines(&logging, move || writer.clone(), colour);
            tracing::subscriber::with_default(tracing_subscriber::registry().with(lines), || {
                tracing::warn!(target: "keblet::workers", error = %path, reason = path.as_str(), "failed: {path}");
            });
            String::from_utf8(buffer.0.lock().unwrap().clone()).unwrap()
        };
        let text = write("text", false);
        assert!(text.len() <= LIMIT + 1 && text.ends_with("é...\n"), "{}", text.len());
        assert!(write("text", true).ends_with("...\u{1b}[0m\n"), "colours end with the line");
        let line: serde_json::Value = serde_json::from_str(&write("json", false)).unwrap();
        for key in ["msg", "err", "reason"] {
            let value = line[key].as_str().unwrap();
            assert!(value.len() <= LIMIT && value.ends_with("é..."), "{key}: {}", value.len());
        }
    }

    #[test]
    fn json_lines_are_json() {
        let lines = written("json", 0);
        let line: serde_json::Value = serde_json::from_str(&lines[0]).unwrap();
        assert_eq!((line["pod"].as_str(), line["msg"].as_str()), (Some("a/b"), Some("seen")));
        assert_eq!((line["level"].as_str(), line["v"].as_u64()), (Some("INFO"), Some(0)));
        assert_eq!(line["target"], "keblet::pleg");
        let age = Duration::from_nanos(Clock::System.wall_nanos().unsigned_abs()).as_secs_f64()
            - line["ts"].as_f64().unwrap() / 1e3;
        assert!(age.abs() < 60.0, "{line}");
        let warning: serde_json::Value = serde_json::from_str(&lines[1]).unwrap();
        assert!(warning["err"].as_str().is_some_and(|error| error.starts_with("said:\n")), "{warning}");
    }

    #[test]
    fn a_value_that_cannot_be_formatted_is_no_panic() {
        struct Broken;
        impl std::fmt::Display for Broken {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("half")?;
                Err(std::fmt::Error)
            }
        }
        let buffer = Buffer::default();
        let writer = buffer.clone();
        let logging = Logging { format: "json".to_owned(), ..Logging::default() };
        let (lines, _) = lines(&logging, move || writer.clone(), false);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(lines), || {
            tracing::warn!(target: "keblet::pleg", pod = %Broken, "seen");
        });
        let line: serde_json::Value = serde_json::from_slice(&buffer.0.lock().unwrap()).unwrap();
        assert_eq!((line["pod"].as_str(), line["msg"].as_str()), (Some("half"), Some("seen")));
    }

    #[test]
    fn each_key_of_a_json_line_occurs_once() {
        let buffer = Buffer::default();
        let writer = buffer.clone();
        let logging = Logging { format: "json".to_owned(), ..Logging::default() };
        let (lines, _) = lines(&logging, move || writer.clone(), false);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(lines), || {
            tracing::warn!(target: "keblet::retry", level = "high", target = "a/b", "operation failed");
        });
        let text = String::from_utf8(buffer.0.lock().unwrap().clone()).unwrap();
        assert_eq!((text.matches("\"level\":").count(), text.matches("\"target\":").count()), (1, 1), "{text}");
        let line: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((line["target"].as_str(), line["fields.target"].as_str()), (Some("keblet::retry"), Some("a/b")));
    }

    #[test]
    fn warnings_beside_records_are_json_and_repeat_none() {
        let warned = |beside| {
            let buffer = Buffer::default();
            let writer = buffer.clone();
            let lines = warning_lines(beside, move || writer.clone(), false);
            tracing::subscriber::with_default(tracing_subscriber::registry().with(lines), || {
                tracing::info!(target: "keblet::pleg", "seen");
                tracing::warn!(target: "keblet::events::sensors", sensor = "oom", "sensor changed");
                tracing::warn!(target: "keblet::events", victim = "child", "OOM kill");
                tracing::warn!(target: "keblet::recorder", reason = "OOMKilled", "event of the kill");
                tracing::warn!(target: "keblet::events::kernel", "kernel records lost");
            });
            let bytes = buffer.0.lock().unwrap().clone();
            String::from_utf8(bytes).unwrap().lines().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(warned(Output::Other).len(), 4);
        let lines = warned(Output::Records);
        let [line] = &lines[..] else { panic!("{lines:?}") };
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!((line["level"].as_str(), line["msg"].as_str()), (Some("WARN"), Some("kernel records lost")));
    }

    #[test]
    fn verbosity_changes_while_running() {
        let buffer = Buffer::default();
        let writer = buffer.clone();
        let (lines, verbosity) = lines(&Logging::default(), move || writer.clone(), false);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(lines), || {
            tracing::debug!(target: "keblet::pleg", "unheard");
            verbosity.set(4).unwrap();
            tracing::debug!(target: "keblet::pleg", "heard");
            verbosity.set(0).unwrap();
            tracing::debug!(target: "keblet::pleg", "unheard");
        });
        let text = String::from_utf8(buffer.0.lock().unwrap().clone()).unwrap();
        assert_eq!((text.matches(" heard").count(), text.matches("unheard").count()), (1, 0), "{text}");
    }
}
