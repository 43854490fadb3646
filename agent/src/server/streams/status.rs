//! Translates the result of a command from SPDY to WebSocket. Pure.

use serde_json::Value;
use serde_json::json;

use super::translate::Protocol;

/// The status of a success.
fn success() -> Value {
    json!({"metadata": {}, "status": "Success"})
}

/// The status of a failed stream.
pub(super) fn failure(why: &str) -> Value {
    json!({
        "metadata": {},
        "status": "Failure",
        "message": format!("Internal error occurred: {why}"),
        "reason": "InternalError",
        "details": {"causes": [{"message": why}]},
        "code": 500,
    })
}

/// The status for the contents of the runtime's error stream. From version 4 of the protocol on these are a Status;
/// before, a text, which is empty for success.
pub(super) fn translate(result: &[u8], protocol: Protocol) -> Value {
    if !protocol.has_statuses() {
        let text = String::from_utf8_lossy(result);
        return if result.is_empty() { success() } else { failure(&format!("error executing remote command: {text}")) };
    }
    let status: Value = match serde_json::from_slice(result) {
        Ok(status) => status,
        Err(_) if result.is_empty() => return failure("the runtime ended the stream without a result"),
        Err(error) => return failure(&format!("the runtime's result cannot be read: {error}")),
    };
    if status["status"] == "Success" {
        return success();
    }
    match exit_code(&status) {
        Some(code) => json!({
            "metadata": {},
            "status": "Failure",
            "message":
                format!("command terminated with non-zero exit code: command terminated with exit code {code}"),
            "reason": "NonZeroExitCode",
            "details": {"causes": [{"reason": "ExitCode", "message": code.to_string()}]},
        }),
        None => failure(status["message"].as_str().unwrap_or("the runtime gave no reason")),
    }
}

fn exit_code(status: &Value) -> Option<u32> {
    if status["reason"] != "NonZeroExitCode" {
        return None;
    }
    let causes = status["details"]["causes"].as_array()?;
    let cause = causes.iter().find(|cause| cause["reason"] == "ExitCode")?;
    cause["message"].as_str()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const V4: Protocol = Protocol::V4;

    #[test]
    fn results_of_runtimes() {
        assert_eq!(translate(br#"{"status":"Success"}"#, V4), success());
        let ended = br#"{"metadata":{},"status":"Failure","message":"command terminated with non-zero exit code",
            "reason":"NonZeroExitCode","details":{"causes":[{"reason":"ExitCode","message":"42"}]}}"#;
        let status = translate(ended, V4);
        assert_eq!(
            status["message"],
            "command terminated with non-zero exit code: command terminated with exit code 42"
        );
        assert_eq!(status["details"]["causes"][0], json!({"reason": "ExitCode", "message": "42"}));
        assert_eq!((&status["reason"], &status["code"]), (&json!("NonZeroExitCode"), &Value::Null));
        let failed = br#"{"status":"Failure","message":"no such container","reason":"InternalError","code":500}"#;
        assert_eq!(translate(failed, V4), failure("no such container"));
        assert_eq!(failure("x")["message"], "Internal error occurred: x");
    }

    #[test]
    fn missing_results_are_failures() {
        for result in
            [&b""[..], b"{", b"[]", br#"{"status":"Failure"}"#, br#"{"status":"Failure","reason":"NonZeroExitCode"}"#]
        {
            let status = translate(result, V4);
            assert_eq!((&status["status"], &status["code"]), (&json!("Failure"), &json!(500)), "{status}");
        }
    }

    #[test]
    fn older_protocols_have_text_results() {
        assert_eq!(translate(b"", Protocol::V2), success());
        let failed = translate(b"exit status 1", Protocol::V1);
        assert_eq!(failed["message"], "Internal error occurred: error executing remote command: exit status 1");
    }
}
