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
use tokio::sync::Mutex;

use crate::filesystem;
use crate::node::time;

const NAME: &str = "graceful_node_shutdown_state";
const PARTIAL: &str = "graceful_node_shutdown_state.partial";
/// Longest file that is read, bytes; it has two times.
const MAX_FILE: usize = 1 << 16;

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

    /// The stored times; none if the file is missing or, which is logged, invalid, or if its disk hangs.
    pub(super) async fn read(&self) -> Times {
        let path = self.path.clone();
        let reading = filesystem::blocking(move || read(&path));
        let times = tokio::time::timeout(LIMIT, reading).await.unwrap_or_else(|_| Err(late("read")));
        times.unwrap_or_else(|error| {
            tracing::warn!(file = %self.path.display(), %error, "cannot read the times of the last shutdown");
            Times::default()
        })
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
        let written = tokio::time::timeout(LIMIT, written).await.unwrap_or_else(|_| Err(late("written")));
        if let Err(error) = written {
            tracing::warn!(file = %self.path.display(), %error, "cannot store the times of the shutdown");
        }
    }
}

/// The stored times; none if the file is missing. Blocks.
fn read(path: &Path) -> io::Result<Times> {
    match filesystem::read_bounded(path, MAX_FILE) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Times::default()),
        text => Ok(serde_json::from_slice(&text?)?),
    }
}

fn late(done: &str) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, format!("not {done} within {LIMIT:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::filesystem::testing::InPlace;
    use crate::filesystem::testing::in_time;

    #[test]
    fn the_zero_time_of_a_kubelet_has_not_happened() {
        let unix = |text: &str| serde_json::from_str::<Times>(text).expect("times").unix();
        let (start, never) = ("2023-11-14T22:13:20.5Z", "0001-01-01T00:00:00Z");
        assert_eq!(unix(&format!(r#"{{"startTime":"{start}","endTime":"{never}"}}"#)), (1_700_000_000.0, 0.0));
        assert_eq!(unix(&format!(r#"{{"startTime":"{never}","endTime":"{never}"}}"#)), (0.0, 0.0));
        assert_eq!(unix("{}"), (0.0, 0.0));
    }

    /// A kubelet takes `null` for the zero time.
    #[tokio::test]
    async fn times_are_written_in_the_kubelets_form_and_read_again() {
        let root = tempfile::tempdir().expect("a folder");
        let file = StateFile::new(root.path());
        assert_eq!(file.read().await, Times::default(), "missing");
        let began = Times::began(SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000));
        file.write(&began).await;
        let text = std::fs::read_to_string(root.path().join(NAME)).expect("text");
        assert_eq!(text, r#"{"startTime":"2023-11-14T22:13:20Z","endTime":null}"#);
        assert_eq!(file.read().await, began);
        for length in 0..text.len() {
            std::fs::write(root.path().join(NAME), &text[..length]).expect("written");
            assert_eq!(file.read().await, Times::default(), "a part of it");
        }
    }

    #[test]
    fn what_lies_in_place_of_the_file_is_an_error_and_stays() {
        for found in InPlace::ALL {
            let root = tempfile::tempdir().expect("a folder");
            let path = root.path().join(NAME);
            found.put(&path).expect("made");
            let of_thread = path.clone();
            let times = in_time(move || read(&of_thread)).expect("no other process is waited for");
            times.expect_err("no times");
            assert!(found.is_at(&path), "{found:?}");
        }
    }
}
