//! The action of a hook's handler, and the messages of its failures. Pure.

use std::time::Duration;

use k8s_openapi::api::core::v1::HTTPGetAction;
use k8s_openapi::api::core::v1::LifecycleHandler;
use keblet_proto::cri::v1 as cri;

use crate::http_get::HttpGetError;
use crate::model::quote::go_quoted;
use crate::runtime::RuntimeError;

/// How many bytes of a command's output a message holds, as for probes: the message becomes part of the pod's status.
const OUTPUT_LIMIT: usize = 10 * 1024;

/// What a hook does.
#[derive(Debug, PartialEq)]
pub(super) enum Action<'a> {
    /// Runs a command in the container, taken literally.
    Exec(&'a [String]),
    /// Sends a GET request.
    HttpGet(&'a HTTPGetAction),
    /// Waits.
    Sleep(Duration),
}

impl<'a> Action<'a> {
    /// The action of a handler; of several the first in upstream's order.
    ///
    /// # Errors
    /// The handler has no action that a hook can have. `tcpSocket` is not one (deprecated in the API, refused upstream).
    pub(super) fn of(handler: &'a LifecycleHandler) -> Result<Self, HookError> {
        if let Some(exec) = &handler.exec {
            return Ok(Self::Exec(exec.command.as_deref().unwrap_or_default()));
        }
        if let Some(http_get) = &handler.http_get {
            return Ok(Self::HttpGet(http_get));
        }
        if let Some(sleep) = &handler.sleep {
            return Ok(Self::Sleep(Duration::from_secs(u64::try_from(sleep.seconds).unwrap_or(0))));
        }
        let found = if handler.tcp_socket.is_some() { "tcpSocket" } else { "no action" };
        Err(HookError::InvalidHandler { found })
    }

    /// The action as messages name it.
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Exec(command) => format!("Exec lifecycle hook ([{}])", command.join(" ")),
            Self::HttpGet(http_get) => {
                format!("HTTP lifecycle hook ({})", http_get.path.as_deref().unwrap_or_default())
            }
            Self::Sleep(time) => format!("Sleep lifecycle hook ({})", time.as_secs()),
        }
    }
}

/// Why a hook failed. The text of a failed postStart is the message of the waiting container.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    /// The handler has no action that is possible here.
    #[error("Cannot run handler: invalid handler: {found}")]
    InvalidHandler {
        /// What it has instead.
        found: &'static str,
    },
    /// The action failed.
    #[error(
        "{action} for Container {} in Pod {} failed - error: {source}{}",
        go_quoted(container),
        go_quoted(pod),
        output.as_ref().map(|output| format!(", message: {}", go_quoted(output))).unwrap_or_default()
    )]
    Failed {
        /// The action, as [`Action::describe`] names it.
        action: String,
        /// The container's name.
        container: String,
        /// The pod: `name_namespace(uid)`.
        pod: String,
        /// What a command wrote, stdout first.
        output: Option<String>,
        /// The cause.
        source: Box<HookFailure>,
    },
}

/// The cause of a failed action.
#[derive(Debug, thiserror::Error)]
pub enum HookFailure {
    /// The runtime did not run the command to its end.
    #[error("{}", .0.rpc_text())]
    Runtime(#[from] RuntimeError),
    /// The request has no host, and the pod is on the host's network.
    #[error("failed to find networking container: the pod has no address of its own")]
    NoAddress,
    /// There is no response.
    #[error(transparent)]
    HttpGet(#[from] HttpGetError),
    /// The command failed.
    #[error("command '{command}' exited with {code}: {stderr}")]
    Exit {
        /// The command, joined by blanks.
        command: String,
        /// Its exit code.
        code: i32,
        /// What it wrote to stderr, cut to 10 KiB.
        stderr: String,
    },
}

/// The result of a command in a container.
///
/// # Errors
/// The runtime did not run it to its end, or it exited with a code other than 0. With what it wrote.
pub(super) fn exec_result(
    command: &[String],
    answer: Result<cri::ExecSyncResponse, RuntimeError>,
) -> Result<(), (HookFailure, String)> {
    let answer = answer.map_err(|error| (error.into(), String::new()))?;
    if answer.exit_code == 0 {
        return Ok(());
    }
    let failure =
        HookFailure::Exit { command: command.join(" "), code: answer.exit_code, stderr: beginning([&answer.stderr]) };
    Err((failure, beginning([&answer.stdout, &answer.stderr])))
}

/// The first [`OUTPUT_LIMIT`] bytes of several outputs together, as text.
fn beginning<const N: usize>(outputs: [&[u8]; N]) -> String {
    let bytes: Vec<u8> = outputs.into_iter().flatten().copied().take(OUTPUT_LIMIT).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use serde_json::json;

    use super::*;

    fn handler(fields: Value) -> LifecycleHandler {
        serde_json::from_value(fields).expect("a handler")
    }

    #[test]
    fn the_first_action_of_a_handler_counts() {
        let exec = json!({"command": ["a", "b"]});
        let (http, sleep, tcp) = (json!({"path": "/x", "port": 1}), json!({"seconds": 7}), json!({"port": 1}));
        let table = [
            (json!({"exec": exec, "httpGet": http, "sleep": sleep}), "Exec lifecycle hook ([a b])"),
            (json!({"httpGet": http, "sleep": sleep, "tcpSocket": tcp}), "HTTP lifecycle hook (/x)"),
            (json!({"sleep": sleep, "tcpSocket": tcp}), "Sleep lifecycle hook (7)"),
            (json!({"sleep": {"seconds": -1}}), "Sleep lifecycle hook (0)"),
        ];
        for (fields, expected) in table {
            assert_eq!(Action::of(&handler(fields)).expect("an action").describe(), expected);
        }
    }

    #[test]
    fn a_handler_without_an_action_for_hooks_is_invalid() {
        for (fields, found) in [(json!({}), "no action"), (json!({"tcpSocket": {"port": 1}}), "tcpSocket")] {
            let error = Action::of(&handler(fields)).expect_err("no action").to_string();
            assert_eq!(error, format!("Cannot run handler: invalid handler: {found}"));
        }
    }

    #[test]
    fn messages_of_failed_commands() {
        let command = ["sh".to_owned(), "-c".to_owned(), "exit 3".to_owned()];
        let response = |exit_code| cri::ExecSyncResponse { stdout: "out\n".into(), stderr: "err".into(), exit_code };
        assert!(exec_result(&command, Ok(response(0))).is_ok());
        let (source, output) = exec_result(&command, Ok(response(3))).expect_err("it failed");
        let [action, container, pod] = [Action::Exec(&command).describe(), "c".into(), "p_ns(uid)".into()];
        let error =
            HookError::Failed { action, container, pod, output: Some(output), source: Box::new(source) }.to_string();
        let expected = r#"Exec lifecycle hook ([sh -c exit 3]) for Container "c" in Pod "p_ns(uid)" failed - error: command 'sh -c exit 3' exited with 3: err, message: "out\nerr""#;
        assert_eq!(error, expected);
    }

    #[test]
    fn a_message_holds_the_first_ten_kibibytes_of_the_output() {
        let output = vec![b'x'; OUTPUT_LIMIT];
        assert_eq!(beginning([&output, b"y"]).len(), OUTPUT_LIMIT);
        assert_eq!(beginning([&output[1..], b"yz"]).matches('y').count(), 1);
        assert_eq!(beginning([b"\xff", b"!"]), "\u{fffd}!");
    }
}
