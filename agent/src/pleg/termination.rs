//! The termination message of an exited container: the end of the file mounted for it, or else the end of its log
//! (`terminationMessagePolicy: FallbackToLogsOnError`). Both are read up to a limit: the container writes them.

use std::collections::HashMap;
use std::io::SeekFrom;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::fs::File;
use tokio::io::AsyncReadExt;
use tokio::io::AsyncSeekExt;

use crate::model::ContainerId;
use crate::model::ContainerStatus;
use crate::model::PodSnapshot;

/// Longest message taken from the file, in bytes (API: 4096).
const FILE_LIMIT: usize = 4096;
/// Longest message taken from the log, in bytes and lines.
const LOG_LIMIT: usize = 2048;
const LOG_LINES: usize = 80;
/// Bytes of the log file read to find those lines, which carry a time stamp, a stream and a tag.
const LOG_WINDOW: u64 = 64 * 1024;

/// How long a log must not have grown, and how often it is read again at most.
const LOG_PAUSE: Duration = Duration::from_millis(10);
const LOG_LOOKS: u32 = 10;

/// The sources of a termination message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MessageSource {
    /// The mounted file only, which is read at once.
    File,
    /// The file, or else the log if the policy says so. A log is waited for up to 100 ms.
    FileOrLog,
}

/// Termination messages of exits that the runtime has not reported yet: each is read once.
#[derive(Debug, Default)]
pub struct TerminationMessages(HashMap<ContainerId, (MessageSource, String)>);

impl TerminationMessages {
    /// The snapshot with the messages of containers whose exit is proven by the kernel only. One that was read from the
    /// file is read again if `source` allows more.
    pub async fn complete(&mut self, snapshot: Arc<PodSnapshot>, source: MessageSource) -> Arc<PodSnapshot> {
        let is_unreported = |container: &ContainerStatus| container.proven.is_some();
        self.0.retain(|id, _| snapshot.by_id(id).is_some_and(is_unreported));
        if !snapshot.containers.iter().any(is_unreported) {
            return snapshot;
        }
        let mut snapshot = Arc::unwrap_or_clone(snapshot);
        let unreported = || snapshot.containers.iter().filter(|container| is_unreported(container));
        let is_read = |id: &ContainerId| self.0.get(id).is_some_and(|(read, _)| *read >= source);
        let missing = unreported().filter(|container| !is_read(&container.id)).cloned();
        let read = join_all(missing.map(|mut container| async move {
            append_message(&mut container, source).await;
            (container.id, (source, container.message))
        }));
        self.0.extend(read.await);
        for container in snapshot.containers.iter_mut().filter(|container| is_unreported(container)) {
            if let Some((_, message)) = self.0.get(&container.id) {
                container.message.clone_from(message);
            }
        }
        Arc::new(snapshot)
    }
}

/// Appends the termination message, if there is one, to the runtime's own message.
pub(super) async fn append_message(container: &mut ContainerStatus, source: MessageSource) {
    let message = match from_file(container).await {
        Some(message) => message,
        None if source == MessageSource::FileOrLog && wants_log(container) => from_log(container).await,
        None => return,
    };
    if message.is_empty() {
        return;
    }
    if !container.message.is_empty() {
        container.message.push_str(": ");
    }
    container.message.push_str(&message);
}

fn wants_log(container: &ContainerStatus) -> bool {
    container.termination.fallback_to_logs
        && container.exit_code.is_some_and(|code| code != 0)
        && container.reason != "ContainerCannotRun"
        && !container.log_path.is_empty()
}

/// `None` if there is no file, or nothing in it.
async fn from_file(container: &ContainerStatus) -> Option<String> {
    let path = container.termination.host_path.as_deref()?;
    match tail(path, FILE_LIMIT as u64).await {
        Ok(bytes) if bytes.is_empty() => None,
        // Replacing invalid UTF-8 makes the text longer.
        Ok(bytes) => Some(end_of(&String::from_utf8_lossy(&bytes), FILE_LIMIT).to_owned()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => Some(format!("Error on reading termination log {path}: {error}")),
    }
}

async fn from_log(container: &ContainerStatus) -> String {
    match end_of_log(&container.log_path).await {
        Ok(bytes) => last_lines(&String::from_utf8_lossy(&bytes)),
        Err(error) => format!("Error on reading termination message from logs: {error}"),
    }
}

/// The end of a log, once it no longer grows: a runtime may report an exit before it has written all output.
async fn end_of_log(path: &str) -> std::io::Result<Vec<u8>> {
    let mut bytes = tail(path, LOG_WINDOW).await?;
    for _ in 0..LOG_LOOKS {
        tokio::time::sleep(LOG_PAUSE).await;
        let before = std::mem::replace(&mut bytes, tail(path, LOG_WINDOW).await?);
        if before == bytes && !bytes.is_empty() {
            break;
        }
    }
    Ok(bytes)
}

async fn tail(path: &str, limit: u64) -> std::io::Result<Vec<u8>> {
    let mut file = File::open(path).await?;
    let length = file.metadata().await?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(limit))).await?;
    let mut bytes = Vec::new();
    file.take(limit).read_to_end(&mut bytes).await?;
    Ok(bytes)
}

/// The content of the last lines of a CRI log (`<time> <stream> <tag> <content>`), within the limits.
fn last_lines(log: &str) -> String {
    let lines: Vec<&str> = log.lines().filter_map(|line| line.splitn(4, ' ').nth(3)).collect();
    end_of(&lines[lines.len().saturating_sub(LOG_LINES)..].join("\n"), LOG_LIMIT).to_owned()
}

/// The last bytes of a text, cut between characters.
fn end_of(text: &str, limit: usize) -> &str {
    &text[text.ceil_char_boundary(text.len().saturating_sub(limit))..]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ContainerState;
    use crate::pleg::testing::container;

    #[tokio::test]
    async fn appends_the_end_of_the_file_to_the_message_of_the_runtime() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), format!("{}end", "x".repeat(5000))).unwrap();
        let mut c = container("a", "web", ContainerState::Exited);
        c.message = "runtime says".into();
        c.termination.host_path = Some(file.path().to_str().unwrap().into());
        append_message(&mut c, MessageSource::FileOrLog).await;
        assert!(c.message.starts_with("runtime says: xxx") && c.message.ends_with("end"));
        assert_eq!(c.message.len(), "runtime says: ".len() + 4096);
    }

    #[tokio::test]
    async fn invalid_utf8_keeps_the_end_of_the_message() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [vec![0xff; 5000], b"end".to_vec()].concat()).unwrap();
        let mut c = container("a", "web", ContainerState::Exited);
        c.termination.host_path = Some(file.path().to_str().unwrap().into());
        append_message(&mut c, MessageSource::FileOrLog).await;
        assert!(c.message.ends_with("\u{fffd}end") && c.message.len() <= 4096, "{} bytes", c.message.len());
    }

    #[tokio::test]
    async fn falls_back_to_the_log_only_on_error_and_only_if_asked() {
        let log = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(log.path(), "2026-01-01T00:00:00Z stdout F one\n2026-01-01T00:00:01Z stderr F two words\n")
            .unwrap();
        let mut c = container("a", "web", ContainerState::Exited);
        c.log_path = log.path().to_str().unwrap().into();
        c.exit_code = Some(1);
        append_message(&mut c, MessageSource::FileOrLog).await;
        assert_eq!(c.message, "");
        c.termination.fallback_to_logs = true;
        append_message(&mut c, MessageSource::FileOrLog).await;
        assert_eq!(c.message, "one\ntwo words");
        c.message.clear();
        c.exit_code = Some(0);
        append_message(&mut c, MessageSource::FileOrLog).await;
        assert_eq!(c.message, "");
    }

    #[tokio::test(start_paused = true)]
    async fn waits_until_the_runtime_has_written_the_log() {
        let log = tempfile::NamedTempFile::new().unwrap();
        let path = log.path().to_owned();
        let mut c = container("a", "web", ContainerState::Exited);
        c.log_path = path.to_str().unwrap().into();
        c.exit_code = Some(1);
        c.termination.fallback_to_logs = true;
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(25)).await;
            std::fs::write(&path, "t stderr F one\n").unwrap();
            tokio::time::sleep(Duration::from_millis(7)).await;
            std::fs::write(&path, "t stderr F one\nt stderr P two").unwrap();
        });
        append_message(&mut c, MessageSource::FileOrLog).await;
        assert_eq!(c.message, "one\ntwo");
        let silent = tempfile::NamedTempFile::new().unwrap();
        c.log_path = silent.path().to_str().unwrap().into();
        c.message.clear();
        let began = tokio::time::Instant::now();
        append_message(&mut c, MessageSource::FileOrLog).await;
        assert_eq!((c.message.as_str(), began.elapsed().as_millis()), ("", 100));
    }

    #[test]
    fn the_log_tail_is_bounded_and_cut_between_characters() {
        let line = format!("t stdout F {}\n", "ä".repeat(100));
        let text = last_lines(&line.repeat(200));
        assert!(text.len() <= LOG_LIMIT && text.len() > LOG_LIMIT - 4);
    }
}
