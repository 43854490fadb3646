//! Start and end of the last graceful shutdown, in the file `graceful_node_shutdown_state`, for metrics.

use std::path::PathBuf;
use std::time::SystemTime;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::Deserialize;
use serde::Serialize;
use tokio::fs;

use crate::filesystem;
use crate::node::time;

const NAME: &str = "graceful_node_shutdown_state";
const PARTIAL: &str = "graceful_node_shutdown_state.partial";

/// The file.
#[derive(Debug)]
pub(super) struct StateFile {
    path: PathBuf,
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
    pub(super) fn new(root_dir: PathBuf) -> Self {
        Self { path: root_dir.join(NAME) }
    }

    /// The stored times; none if the file is missing or invalid.
    pub(super) async fn read(&self) -> Times {
        let text = fs::read(&self.path).await.unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// Replaces the file, and waits until it is on the disk, since the machine is shutting down.
    pub(super) async fn write(&self, times: &Times) {
        let (path, content) = (self.path.clone(), serde_json::to_vec(times));
        let written = filesystem::blocking(move || filesystem::replace(&path, PARTIAL, &content?, 0o644));
        if let Err(error) = written.await {
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
