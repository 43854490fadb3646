//! Exec probes: a command in the container, by the runtime. Its output is bounded by the size of a message of the runtime,
//! and cut before it is used.

use k8s_openapi::api::core::v1::ExecAction;
use keblet_proto::cri::v1::ExecSyncResponse;

use super::MAX_OUTPUT;
use super::Outcome;
use super::Runner;
use super::Subject;
use crate::model::go_duration;

pub(super) async fn run(runner: &Runner, subject: &Subject<'_>, action: &ExecAction) -> Outcome {
    let env = subject.target.container.env.as_deref().unwrap_or_default();
    let command = match (runner.expand)(action.command.as_deref().unwrap_or_default(), env) {
        Ok(command) => command,
        Err(length) => return Outcome::error(format!("an argument of the command has {length} bytes")),
    };
    let called = runner.runtime.exec_sync(subject.container.as_str(), command.clone(), subject.timeout).await;
    match called {
        Ok(done) if done.exit_code == 0 => Outcome::Success,
        Ok(done) => Outcome::Failure(output(&done)),
        Err(error) if error.is_deadline() => {
            let limit = go_duration(subject.timeout);
            Outcome::Failure(format!("command timed out: {:?} timed out after {limit}", command.join(" ")))
        }
        Err(error) => Outcome::error(error.rpc_text()),
    }
}

/// Standard output, then standard error.
fn output(done: &ExecSyncResponse) -> String {
    let bytes: Vec<u8> = done.stdout.iter().chain(&done.stderr).copied().take(MAX_OUTPUT).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_cut() {
        let done = |stdout: usize, stderr: &str| ExecSyncResponse {
            stdout: vec![b'o'; stdout].into(),
            stderr: stderr.to_owned().into(),
            exit_code: 1,
        };
        assert_eq!(output(&done(2, "err")), "ooerr");
        assert_eq!(output(&done(MAX_OUTPUT + 9, "err")).len(), MAX_OUTPUT);
        assert_eq!(output(&done(MAX_OUTPUT - 1, "err")).chars().last(), Some('e'));
    }
}
