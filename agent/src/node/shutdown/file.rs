//! Start and end of the last graceful shutdown, in the file `graceful_node_shutdown_state`, for metrics.

use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::Deserialize;
use serde::Serialize;
use tokio::fs;
use tokio::sync::Mutex;

use crate::filesystem;
use crate::node::time;

const NAME: &str = "graceful_node_shutdown_state";
const PARTIAL: &str = "graceful_node_shutdown_state.partial";

/// How long a read or a write is waited for. One that takes longer goes on.
const LIMIT: Duration = Duration::from_secs(2);

/// The file.
#[derive(Debug)]
pub struct StateFile {
    path: PathBuf,
    /// Held by the thread that writes it.
    writing: Arc<Mutex<()>>,
}

/// Start and end, if they have happened.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Times {
    start_time: Option<Time>,
    end_time: Option<Time>,
}

impl Times {
    pub(super) fn began(now: SystemTime) -> Self {
        Self { start_time: Some(time::seconds(now)), end_time: None }
    }

    pub(super) fn ended(self, now: SystemTime) -> Self {
        Self { end_time: Some(time::seconds(now)), ..self }
    }

    /// As Unix time, 0 if not happened. A kubelet writes the year 1 for what has not.
    pub(super) fn unix(&self) -> (f64, f64) {
        #[expect(clippy::cast_precision_loss, reason = "seconds of our age fit")]
        let unix = |time: &Option<Time>| time.as_ref().map_or(0.0, |time| time.0.as_second().max(0) as f64);
        (unix(&self.start_time), unix(&self.end_time))
    }
}

impl StateFile {
    /// The file below the agent's root directory.
    pub fn new(root_dir: &Path) -> Self {
        Self { path: root_dir.join(NAME), writing: Arc::default() }
    }

    /// The stored times; none if the file is missing or invalid, or its disk hangs.
    pub(super) async fn read(&self) -> Times {
        let text = tokio::time::timeout(LIMIT, fs::read(&self.path)).await;
        let text = text.ok().and_then(Result::ok).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// Replaces the file, and waits until it is on the disk, since the machine is shutting down; for a moment only: a disk
    /// that hangs must not keep it from that.
    pub(super) async fn write(&self, times: &Times) {
        let (path, content) = (self.path.clone(), serde_json::to_vec(times));
        let written = async {
            let turn = self.writing.clone().lock_owned().await;
            let write = move || {
                let _turn = turn;
                filesystem::replace(&path, PARTIAL, &content?, 0o644)
            };
            filesystem::blocking(write).await
        };
        let late = || Err(io::Error::new(io::ErrorKind::TimedOut, format!("not written within {LIMIT:?}")));
        if let Err(error) = tokio::time::timeout(LIMIT, written).await.unwrap_or_else(|_| late()) {
            tracing::warn!(file = %self.path.display(), %error, "cannot store the times of the shutdown");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_zero_time_of_a_kubelet_has_not_happened() {
        let unix = |text: &str| serde_json::from_str::<Times>(text).expect("times").unix();
        let (start, never) = ("2023-11-14T22:13:20.5Z", "0001-01-01T00:00:00Z");
        assert_eq!(unix(&format!(r#"{{"startTime":"{start}","endTime":"{never}"}}"#)), (1_700_000_000.0, 0.0));
        assert_eq!(unix(&format!(r#"{{"startTime":"{never}","endTime":"{never}"}}"#)), (0.0, 0.0));
        assert_eq!(unix("{}"), (0.0, 0.0));
    }
}
