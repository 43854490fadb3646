//! Parses the agent's event lines.

use serde_json::Value;

/// The log target of pod lifecycle events.
const TARGET: &str = "keblet::events";

/// One pod lifecycle event, as the agent logged it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Event {
    /// `namespace/name`.
    pub pod: String,
    /// The container's name; empty for the pod's sandbox.
    pub container: String,
    /// `ContainerStarted`, `ContainerDied`, `OomKilled`, …
    pub kind: String,
    /// Source of the event: `runtime`, `kernel`, `relist` or `worker`.
    pub source: String,
    /// Milliseconds since the kernel's timestamp, if there is one.
    pub latency_ms: Option<f64>,
    /// Exit code of an exited container, if known.
    pub exit_code: Option<i64>,
    /// Name and PID of the process that the OOM killer killed.
    pub victim: Option<String>,
}

impl Event {
    /// Parses a line of the JSON log; `None` if it is not an event.
    pub(super) fn parse(line: &str) -> Option<Self> {
        let record: Value = serde_json::from_str(line).ok()?;
        if record["target"] != TARGET {
            return None;
        }
        // Depending on the formatter, fields are in an object of their own or beside the target.
        let fields = if record["fields"].is_object() { &record["fields"] } else { &record };
        let text = |name: &str| fields[name].as_str().unwrap_or_default().to_owned();
        Some(Self {
            pod: text("pod"),
            container: text("container"),
            kind: text("event"),
            source: text("source"),
            latency_ms: number(&fields["latency_ms"]),
            exit_code: fields["exit_code"].as_i64(),
            victim: victim(fields),
        })
    }

    /// The pod's name without its namespace and without the node's name, which is a suffix of every static pod.
    pub(super) fn pod_name(&self) -> &str {
        let name = self.pod.split_once('/').map_or(self.pod.as_str(), |(_, name)| name);
        name.strip_suffix(&format!("-{}", super::pods::NODE)).unwrap_or(name)
    }
}

fn number(value: &Value) -> Option<f64> {
    value.as_f64().or_else(|| value.as_str()?.parse().ok())
}

/// `name[pid]`; `None` if the victim has no name.
fn victim(fields: &Value) -> Option<String> {
    let name = fields["comm"].as_str().filter(|name| !name.is_empty())?;
    Some(fields["pid"].as_i64().map_or_else(|| name.to_owned(), |pid| format!("{name}[{pid}]")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_log_formats_are_parsed() {
        let expected = Event {
            pod: "default/crash-demo".to_owned(),
            container: "main".to_owned(),
            kind: "ContainerDied".to_owned(),
            source: "kernel".to_owned(),
            latency_ms: Some(0.7),
            exit_code: Some(3),
            victim: None,
        };
        let fields = r#""pod":"default/crash-demo","container":"main","event":"ContainerDied","source":"kernel","latency_ms":0.7,"exit_code":3"#;
        let nested = format!(r#"{{"level":"INFO","target":"keblet::events","fields":{{"message":"x",{fields}}}}}"#);
        let flat = format!(r#"{{"level":"INFO","target":"keblet::events","msg":"x",{fields}}}"#);
        assert_eq!(Event::parse(&nested), Some(expected.clone()));
        assert_eq!(Event::parse(&flat), Some(expected.clone()));
        assert_eq!(expected.pod_name(), "crash");
    }

    #[test]
    fn other_lines_are_not_events() {
        assert_eq!(Event::parse("panicked at"), None);
        assert_eq!(Event::parse(r#"{"target":"keblet::sync","fields":{"pod":"a/b"}}"#), None);
    }

    #[test]
    fn a_victim_has_a_name_and_a_number() {
        let victim = |fields: &str| {
            let line = format!(r#"{{"target":"keblet::events","event":"OomKilled",{fields}}}"#);
            Event::parse(&line).and_then(|event| event.victim)
        };
        assert_eq!(victim(r#""comm":"probe","pid":77"#).as_deref(), Some("probe[77]"));
        assert_eq!(victim(r#""comm":"","pid":77"#), None);
        assert_eq!(victim(r#""comm":null"#), None);
    }
}
