//! Where log lines go and which are written.
//!
//! The standard verbosity decides: 0 tells of the agent itself and of trouble, 2 of what happens to pods, 4 why, 6 and
//! more every call. Lines go to stderr, one per event: `lines` keeps them so.

use std::fmt;
use std::io::IsTerminal;
use std::sync::Arc;

use anyhow::anyhow;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::reload;
use tracing_subscriber::util::SubscriberInitExt as _;

use super::lines::Lines;
use crate::config::kubelet_sections::Logging;
use crate::telemetry::SpanLayer;

/// The directives of a verbosity. Libraries only tell of trouble, until everything is asked for.
fn directives(verbosity: u32) -> &'static str {
    match verbosity {
        0 | 1 => "warn,keblet=info,keblet::recorder=warn",
        2 | 3 => "warn,keblet=info",
        4 | 5 => "warn,keblet=debug",
        6..=8 => "info,keblet=trace",
        _ => "trace",
    }
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
}

impl fmt::Debug for Verbosity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Verbosity")
    }
}

type Subscriber = Box<dyn tracing::Subscriber + Send + Sync>;

fn subscriber<W>(logging: &Logging, writer: W, colour: bool) -> (Subscriber, Verbosity)
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let filter = EnvFilter::new(directives(logging.verbosity));
    let builder =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(Lines { writer, colour }).with_ansi(colour);
    // Complaints about a line that cannot be written would go to stderr, which cannot be written either: a panic.
    let builder = builder.log_internal_errors(false);
    match logging.format.as_str() {
        "json" => {
            let builder = builder.json().flatten_event(true).with_span_list(false).with_filter_reloading();
            let filter = builder.reload_handle();
            let set = move |level| filter.reload(directives(level)).map_err(|error| error.to_string());
            (Box::new(builder.finish()), Verbosity(Arc::new(set)))
        }
        _ => {
            let builder = builder.with_filter_reloading();
            let filter = builder.reload_handle();
            let set = move |level| filter.reload(directives(level)).map_err(|error| error.to_string());
            (Box::new(builder.finish()), Verbosity(Arc::new(set)))
        }
    }
}

/// The same lines beside another layer.
fn lines<S>(logging: &Logging, colour: bool) -> (Box<dyn Layer<S> + Send + Sync>, Verbosity)
where
    S: tracing::Subscriber + for<'a> LookupSpan<'a> + Send + Sync,
{
    let (filter, handle) = reload::Layer::new(EnvFilter::new(directives(logging.verbosity)));
    let set = move |level| handle.reload(EnvFilter::new(directives(level))).map_err(|error| error.to_string());
    let lines = tracing_subscriber::fmt::layer().with_writer(Lines { writer: std::io::stderr, colour });
    let lines = lines.with_ansi(colour);
    let lines = lines.log_internal_errors(false);
    let lines = match logging.format.as_str() {
        "json" => lines.json().flatten_event(true).with_span_list(false).with_filter(filter).boxed(),
        _ => lines.with_filter(filter).boxed(),
    };
    (lines, Verbosity(Arc::new(set)))
}

/// Starts logging as configured, and the making of spans if there is somebody to take them. To be called once.
pub fn init(logging: &Logging, spans: Option<SpanLayer>) -> anyhow::Result<Verbosity> {
    let colour = std::io::stderr().is_terminal();
    let (started, verbosity) = match spans {
        None => {
            let (subscriber, verbosity) = subscriber(logging, std::io::stderr, colour);
            (subscriber.try_init(), verbosity)
        }
        Some(spans) => {
            let (lines, verbosity) = lines(logging, colour);
            (tracing_subscriber::registry().with(spans).with(lines).try_init(), verbosity)
        }
    };
    started.map_err(|error| anyhow!("cannot start logging: {error}"))?;
    Ok(verbosity)
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Buffer(Arc<Mutex<Vec<u8>>>);

    impl Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn lines(format: &str, verbosity: u32) -> Vec<String> {
        let buffer = Buffer::default();
        let writer = buffer.clone();
        let logging = Logging { format: format.to_owned(), verbosity, ..Logging::default() };
        let (subscriber, _) = subscriber(&logging, move || writer.clone(), false);
        tracing::subscriber::with_default(subscriber, || {
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
            assert_eq!(lines("text", verbosity).len(), count, "-v={verbosity}");
        }
    }

    #[test]
    fn what_others_say_adds_no_line() {
        for format in ["text", "json"] {
            let lines = lines(format, 0);
            let last = lines.last().unwrap();
            assert!(last.contains("said:\\nforged") && last.contains("done\\nforged"), "{last}");
            assert!(!last.contains(char::is_control), "{last:?}");
        }
    }

    #[test]
    fn json_lines_are_json() {
        let lines = lines("json", 0);
        let line: serde_json::Value = serde_json::from_str(&lines[0]).unwrap();
        assert_eq!((line["pod"].as_str(), line["message"].as_str()), (Some("a/b"), Some("seen")));
        assert_eq!(line["level"], "INFO");
    }

    #[test]
    fn verbosity_changes_while_running() {
        let buffer = Buffer::default();
        let writer = buffer.clone();
        let (subscriber, verbosity) = subscriber(&Logging::default(), move || writer.clone(), false);
        tracing::subscriber::with_default(subscriber, || {
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
