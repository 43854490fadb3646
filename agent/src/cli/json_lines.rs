//! Lines of the log as JSON objects with the keys of a kubelet's log: `ts`, `v`, `msg` and `err`
//! (<https://kubernetes.io/docs/concepts/cluster-administration/system-logs/#json-log-format>). Beside them are `level` and
//! `target`, and the fields of the event.

use std::fmt;
use std::fmt::Write as _;

use serde::ser::SerializeMap as _;
use serde::ser::Serializer as _;
use serde_json::Value;
use tracing::Event;
use tracing::Level;
use tracing::Metadata;
use tracing::Subscriber;
use tracing::field::Field;
use tracing::field::Visit;
use tracing_subscriber::fmt::FmtContext;
use tracing_subscriber::fmt::FormatEvent;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::registry::LookupSpan;

use super::lines::LIMIT;
use crate::model::Clock;
use crate::model::quote::shortened;

/// Formats an event as one line.
pub(super) struct JsonLine;

impl<S, N> FormatEvent<S, N> for JsonLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let line = line(Clock::System.wall_nanos(), event.metadata(), &fields).map_err(|_| fmt::Error)?;
        writeln!(writer, "{line}")
    }
}

/// The fields of an event, in its order.
#[derive(Default)]
struct Fields {
    message: String,
    others: Vec<(&'static str, Value)>,
}

impl Fields {
    fn add(&mut self, field: &Field, value: Value) {
        self.others.push((key(field.name()), value));
    }
}

impl Visit for Fields {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        let value = shortened(value, LIMIT);
        if field.name() == "message" {
            self.message = value.into_owned();
        } else {
            self.add(field, value.into());
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let mut text = String::new();
        // Unlike `format!` no panic if a value cannot be formatted, which would end the task that logs it.
        let _ = write!(text, "{value:?}");
        self.record_str(field, &text);
    }
}

/// The key of a field. Some fields have the name of a key that every line has, and parsers keep one value of a key.
fn key(field: &'static str) -> &'static str {
    match field {
        "error" => "err",
        "level" => "fields.level",
        "target" => "fields.target",
        other => other,
    }
}

/// `at`: nanoseconds since the Unix epoch.
fn line(at: i64, metadata: &Metadata<'_>, fields: &Fields) -> serde_json::Result<String> {
    let mut line = Vec::new();
    let mut serializer = serde_json::Serializer::new(&mut line);
    let mut map = serializer.serialize_map(None)?;
    map.serialize_entry("ts", &milliseconds(at))?;
    map.serialize_entry("level", metadata.level().as_str())?;
    if let Some(verbosity) = verbosity(*metadata.level()) {
        map.serialize_entry("v", &verbosity)?;
    }
    map.serialize_entry("target", metadata.target())?;
    map.serialize_entry("msg", &fields.message)?;
    for (name, value) in &fields.others {
        map.serialize_entry(name, value)?;
    }
    map.end()?;
    Ok(String::from_utf8_lossy(&line).into_owned())
}

/// The lowest `--v` with lines of this level; none for errors, as in a kubelet's log.
fn verbosity(level: Level) -> Option<u8> {
    match level {
        Level::ERROR => None,
        Level::WARN | Level::INFO => Some(0),
        Level::DEBUG => Some(4),
        Level::TRACE => Some(6),
    }
}

#[expect(clippy::cast_precision_loss, reason = "a fraction of a microsecond is lost")]
fn milliseconds(nanos: i64) -> f64 {
    nanos as f64 / 1e6
}
