//! What a driver prints: a JSON object with its status (upstream: `DriverStatus`). Pure.

use serde::Deserialize;
use serde_json::Value;

use super::FlexError;
use crate::host_program::Call;
use crate::host_program::Ended;

const SUCCESS: &str = "Success";
pub(super) const NOT_SUPPORTED: &str = "Not supported";
/// Characters of a message that are kept: it ends in an event.
const MAX_MESSAGE: usize = 1024;

/// How a driver has answered a call.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Answer {
    Done(Reply),
    /// It leaves the call to the agent.
    NotSupported,
}

/// The object that a driver prints. Its keys are read in any case, as upstream.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Reply {
    status: String,
    message: String,
    /// Path of the device, of calls that attach one.
    pub(super) device: String,
    pub(super) capabilities: Capabilities,
}

/// What a driver can do, or leaves to the agent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(default)]
pub(super) struct Capabilities {
    /// Its volumes are attached, and mounted for the node first.
    pub(super) attach: bool,
    /// The runtime may relabel its files.
    #[serde(rename = "selinuxrelabel")]
    pub(super) selinux_relabel: bool,
    /// The size of its file systems is measured.
    #[serde(rename = "supportsmetrics")]
    pub(super) supports_metrics: bool,
    /// The agent gives its files to the pod's `fsGroup`.
    #[serde(rename = "fsgroup")]
    pub(super) fs_group: bool,
    /// Its file systems are expanded on the node.
    #[serde(rename = "requiresfsresize")]
    pub(super) requires_fs_resize: bool,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self { attach: true, selinux_relabel: true, supports_metrics: false, fs_group: true, requires_fs_resize: true }
    }
}

/// What the driver has answered, whose call has ended.
///
/// # Errors
/// It reports a failure, or has printed no status.
pub(super) fn answer(command: &'static str, call: &Call, ended: &Ended) -> Result<Answer, FlexError> {
    let printed = if ended.output.trim().is_empty() { &ended.errors } else { &ended.output };
    let wrong = |what: &str| FlexError::Reply { command, problem: format!("{what}: {}", ended.describe(call)).into() };
    let reply = parsed(printed).ok_or_else(|| wrong("the driver printed no JSON object with a status"))?;
    match reply.status.as_str() {
        NOT_SUPPORTED => Ok(Answer::NotSupported),
        SUCCESS if ended.is_success() => Ok(Answer::Done(reply)),
        SUCCESS => Err(wrong("the driver reports success and ends with a failure")),
        _ => Err(FlexError::Failed { command, status: cut(&reply.status), reason: cut(&reply.message) }),
    }
}

fn cut(text: &str) -> Box<str> {
    text.chars().take(MAX_MESSAGE).collect::<String>().into()
}

fn parsed(text: &str) -> Option<Reply> {
    let value: Value = serde_json::from_str(text).ok().filter(Value::is_object)?;
    serde_json::from_value(in_lower_case(value)).ok()
}

/// The value with all keys in lower case, and without what is null: Go reads keys in any case, and null as absent.
fn in_lower_case(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let given = fields.into_iter().filter(|(_, value)| !value.is_null());
            Value::Object(given.map(|(key, value)| (key.to_ascii_lowercase(), in_lower_case(value))).collect())
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answered(code: i32, output: &str) -> Result<Answer, String> {
        let ended = Ended {
            code: Some(code),
            status: format!("exit status: {code}"),
            output: output.to_owned(),
            errors: String::new(),
        };
        answer("mount", &Call::new("driver", ["mount"]), &ended).map_err(|error| error.to_string())
    }

    fn done(output: &str) -> Reply {
        let Ok(Answer::Done(reply)) = answered(0, output) else { panic!("{output}") };
        reply
    }

    #[test]
    fn a_driver_can_do_what_it_does_not_deny() {
        assert_eq!(done(r#"{"status": "Success"}"#).capabilities, Capabilities::default());
        for (output, expected) in [
            (
                r#"{"status": "Success", "capabilities": {"attach": false}}"#,
                Capabilities { attach: false, ..Capabilities::default() },
            ),
            (
                r#"{"Status": "Success", "Capabilities": {"Attach": false, "selinuxRelabel": false, "fsGroup": false,
                "supportsMetrics": true, "requiresFSResize": false, "other": 1}}"#,
                Capabilities {
                    attach: false,
                    selinux_relabel: false,
                    supports_metrics: true,
                    fs_group: false,
                    requires_fs_resize: false,
                },
            ),
            (r#"{"status": "Success", "capabilities": null, "device": null}"#, Capabilities::default()),
        ] {
            assert_eq!(done(output).capabilities, expected, "{output}");
        }
        assert_eq!(done(r#"{"status": "Success", "device": "/dev/x"}"#).device, "/dev/x");
    }

    #[test]
    fn the_status_counts_and_then_the_exit_code() {
        let failure = r#"{"status": "Failure", "message": "no route"}"#;
        let reason = "mount command failed, status: Failure, reason: no route";
        for code in [0, 1] {
            assert_eq!(answered(code, failure), Err(reason.to_owned()), "{code}");
            assert_eq!(answered(code, r#"{"status": "Not supported"}"#), Ok(Answer::NotSupported), "{code}");
        }
        let error = answered(1, r#"{"status": "Success"}"#).expect_err("it failed");
        let expected = "mount command failed: the driver reports success and ends with a failure: exit status: 1: ";
        assert!(error.starts_with(expected), "{error}");
    }

    #[test]
    fn what_is_no_status_is_a_failure() {
        for output in ["", "mounted!", "[]", "{\"status\": 1}", "{\"status\": \"Success\"} trailing", "\"Success\""] {
            let error = answered(0, output).expect_err(output);
            let expected = "mount command failed: the driver printed no JSON object with a status: exit status: 0";
            assert!(error.starts_with(expected), "{error}");
        }
        assert_eq!(answered(0, "{}"), Err("mount command failed, status: , reason: ".to_owned()));
        let long = answered(0, &format!("{{\"status\": \"Failure\", \"message\": \"{}\"}}", "x".repeat(9000)));
        assert!(long.expect_err("a failure").len() < 2 * MAX_MESSAGE);
    }

    /// A driver may repeat its arguments.
    #[test]
    fn the_output_of_a_call_with_secrets_is_not_shown() {
        let call = Call::new("driver", ["mount"]).with_secret("hunter2".into());
        let (status, output) = ("exit status: 1".to_owned(), "hunter2".to_owned());
        let ended = Ended { code: Some(1), status, output, errors: String::new() };
        let error = answer("mount", &call, &ended).expect_err("no status").to_string();
        assert!(!error.contains("hunter2") && error.ends_with("exit status: 1"), "{error}");
    }
}
