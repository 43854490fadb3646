//! The termination message of an exited container: the end of the file mounted for it, or else the end of its log
//! (`terminationMessagePolicy: FallbackToLogsOnError`). Both are read up to a limit: the container writes them. A container
//! of the pod may also have put anything in place of the file, on a volume that does not answer.

use std::collections::HashMap;
use std::hash::Hash;
use std::io;
use std::io::Read as _;
use std::io::Seek as _;
use std::io::SeekFrom;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::Weak;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::Semaphore;

use super::exit_code::is_placeholder;
use crate::filesystem;
use crate::log_format::Format;
use crate::model::ContainerId;
use crate::model::ContainerStatus;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::quote::Excerpt;

/// Longest message taken from the file, in bytes (API: 4096).
const FILE_LIMIT: usize = 4096;
/// Longest message taken from the log, in bytes and lines.
const LOG_LIMIT: usize = 2048;
const LOG_LINES: usize = 80;
/// Bytes of the log file read to find those lines, which carry a time stamp, a stream and a tag.
const LOG_WINDOW: u64 = 64 * 1024;

/// How long a log must not have grown, and how often it is read again at most.
const LOG_PAUSE: Duration = Duration::from_millis(10);
const LOG_READS: u32 = 10;

/// How long a read is waited for. Exits and restarts wait for it.
const READ_LIMIT: Duration = Duration::from_secs(10);
/// Reads at the same time, one of each file. One that does not end keeps its thread; threads for all other work with files
/// are left.
const READERS: usize = 64;
/// Reads of one pod at the same time: a pod may have any number of files that do not answer, and they may not keep the
/// threads from the exits of other pods.
const POD_READERS: usize = 4;

/// The sources of a termination message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MessageSource {
    /// The mounted file only, which is read at once.
    File,
    /// The file, or else the log if the policy says so. A log is waited for up to 100 ms.
    FileOrLog,
}

/// Termination messages of exits that the runtime has not reported yet: each is read once.
#[derive(Debug)]
pub struct TerminationMessages {
    reader: MessageReader,
    read: HashMap<ContainerId, ReadMessage>,
}

/// A message, and what it was read for: the code of an exit may become known, or be corrected, later.
#[derive(Debug)]
struct ReadMessage {
    source: MessageSource,
    exit_code: Option<i32>,
    text: String,
}

impl TerminationMessages {
    /// Nothing was read yet.
    pub(super) fn new(reader: MessageReader) -> Self {
        Self { reader, read: HashMap::new() }
    }

    /// The snapshot with the messages of containers whose exit is proven by the kernel only. One that was read from the
    /// file is read again if `source` allows more, and each if the exit has another code by now.
    pub async fn complete(&mut self, snapshot: Arc<PodSnapshot>, source: MessageSource) -> Arc<PodSnapshot> {
        let is_unreported = |container: &ContainerStatus| container.proven.is_some();
        if !self.read.is_empty() {
            let known = snapshot.containers_by_id();
            self.read.retain(|id, _| known.get(id).copied().is_some_and(is_unreported));
        }
        if !snapshot.containers.iter().any(is_unreported) {
            return snapshot;
        }
        let mut snapshot = Arc::unwrap_or_clone(snapshot);
        let unreported = || snapshot.containers.iter().filter(|container| is_unreported(container));
        let is_read = |container: &&ContainerStatus| {
            let read = self.read.get(&container.id);
            read.is_some_and(|read| read.source >= source && read.exit_code == container.exit_code)
        };
        let missing = unreported().filter(|container| !is_read(container)).cloned();
        let (reader, pod) = (&self.reader, &snapshot.pod.uid);
        let read = join_all(missing.map(|mut container| async move {
            reader.append(pod, &mut container, source).await;
            (container.id, ReadMessage { source, exit_code: container.exit_code, text: container.message })
        }));
        let read = read.await;
        self.read.extend(read);
        for container in snapshot.containers.iter_mut().filter(|container| is_unreported(container)) {
            if let Some(read) = self.read.get(&container.id) {
                container.message.clone_from(&read.text);
            }
        }
        Arc::new(snapshot)
    }
}

/// Reads termination messages, a few at a time and each no longer than [`READ_LIMIT`]. Clones share the limits.
#[derive(Clone, Debug)]
pub(super) struct MessageReader {
    threads: Arc<Semaphore>,
    files: Arc<Places<PathBuf>>,
    pods: Arc<Places<PodUid>>,
}

impl Default for MessageReader {
    fn default() -> Self {
        Self {
            threads: Arc::new(Semaphore::new(READERS)),
            files: Arc::new(Places::of_each(1)),
            pods: Arc::new(Places::of_each(POD_READERS)),
        }
    }
}

/// Places for reads, the same number for each key. Only keys that are in use are known.
#[derive(Debug)]
struct Places<K> {
    number: usize,
    used: Mutex<HashMap<K, Weak<Semaphore>>>,
}

impl<K: Eq + Hash> Places<K> {
    fn of_each(number: usize) -> Self {
        Self { number, used: Mutex::default() }
    }

    fn of(&self, key: K) -> Arc<Semaphore> {
        // Changed one entry at a time: a panic elsewhere leaves it usable.
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        used.retain(|_, places| places.strong_count() > 0);
        used.get(&key).and_then(Weak::upgrade).unwrap_or_else(|| {
            let places = Arc::new(Semaphore::new(self.number));
            used.insert(key, Arc::downgrade(&places));
            places
        })
    }
}

impl MessageReader {
    /// Appends the termination message, if there is one, to the runtime's own message.
    pub(super) async fn append(&self, pod: &PodUid, container: &mut ContainerStatus, source: MessageSource) {
        container.termination.before_log = None;
        let message = match self.file_message(pod, container).await {
            Some(message) => message,
            None if source == MessageSource::FileOrLog && wants_log(container) => {
                let is_provisional = container.exit_code.is_some_and(is_placeholder);
                container.termination.before_log = is_provisional.then(|| container.message.clone());
                self.log_message(pod, container).await
            }
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

    /// `None` if there is no file, or nothing in it.
    async fn file_message(&self, pod: &PodUid, container: &ContainerStatus) -> Option<String> {
        let path = container.termination.host_path.as_deref()?;
        match self.tail(pod, path, FILE_LIMIT as u64).await {
            Ok(end) if end.bytes.is_empty() => None,
            // Replacing invalid UTF-8 makes the text longer.
            Ok(end) => Some(end_of(&String::from_utf8_lossy(&end.bytes), FILE_LIMIT).to_owned()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => Some(format!("Error on reading termination log {path}: {error}")),
        }
    }

    async fn log_message(&self, pod: &PodUid, container: &ContainerStatus) -> String {
        let output = self.end_of_log(pod, &container.log_path).await.and_then(|log| last_output(&log));
        output.unwrap_or_else(|error| format!("Error on reading termination message from logs: {error}"))
    }

    /// The end of a log, once it no longer grows: a runtime may report an exit before it has written all output.
    async fn end_of_log(&self, pod: &PodUid, path: &str) -> io::Result<FileEnd> {
        let mut end = self.tail(pod, path, LOG_WINDOW).await?;
        for _ in 0..LOG_READS {
            tokio::time::sleep(LOG_PAUSE).await;
            let before = std::mem::replace(&mut end, self.tail(pod, path, LOG_WINDOW).await?);
            if before == end && !end.bytes.is_empty() {
                break;
            }
        }
        Ok(end)
    }

    async fn tail(&self, pod: &PodUid, path: &str, limit: u64) -> io::Result<FileEnd> {
        let path = PathBuf::from(path);
        self.in_time(pod, path.clone(), move || tail(&path, limit)).await
    }

    /// What `read` returns, unless it takes too long. It goes on then and keeps its places: the file's, one of the
    /// pod's and one among all readers. They are taken in this order: a read that waits for its pod keeps no thread.
    async fn in_time<T: Send + 'static>(
        &self,
        pod: &PodUid,
        file: PathBuf,
        read: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let (file, pod, threads) = (self.files.of(file), self.pods.of(pod.clone()), self.threads.clone());
        let reading = async move {
            let place = file.acquire_owned().await.map_err(io::Error::other)?;
            let of_pod = pod.acquire_owned().await.map_err(io::Error::other)?;
            let thread = threads.acquire_owned().await.map_err(io::Error::other)?;
            let in_place = move || {
                let _places = (place, of_pod, thread);
                read()
            };
            filesystem::blocking(in_place).await
        };
        let late = || io::Error::new(io::ErrorKind::TimedOut, format!("it was not read within {READ_LIMIT:?}"));
        tokio::time::timeout(READ_LIMIT, reading).await.unwrap_or_else(|_| Err(late()))
    }
}

fn wants_log(container: &ContainerStatus) -> bool {
    container.termination.fallback_to_logs
        && container.exit_code.is_some_and(|code| code != 0)
        && container.reason != "ContainerCannotRun"
        && !container.log_path.is_empty()
}

/// The end of a file.
#[derive(Debug, PartialEq, Eq)]
struct FileEnd {
    bytes: Vec<u8>,
    /// The file has more before it, so that its first line may lack its start.
    is_cut: bool,
}

/// Blocking.
fn tail(path: &Path, limit: u64) -> io::Result<FileEnd> {
    let mut file = filesystem::open_regular(path)?;
    let start = file.metadata()?.len().saturating_sub(limit);
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.take(limit).read_to_end(&mut bytes)?;
    Ok(FileEnd { bytes, is_cut: start > 0 })
}

/// What the container wrote last, as a client gets its log, within the limits.
///
/// # Errors
/// The log has an unknown format.
fn last_output(log: &FileEnd) -> io::Result<String> {
    let mut lines: Vec<&[u8]> = log.bytes.split_inclusive(|byte| *byte == b'\n').collect();
    if log.is_cut && lines.len() > 1 {
        // Its stream and tags are not known, and what follows is newer.
        lines.remove(0);
    }
    // As upstream, a line without its end does not count.
    let complete = lines.iter().filter(|line| line.ends_with(b"\n")).count();
    lines.drain(..complete.saturating_sub(LOG_LINES));
    let Some(first) = lines.first() else { return Ok(String::new()) };
    let text: Vec<u8> = match Format::detect(first) {
        Some(format) => {
            let parsed = lines.iter().filter_map(|line| format.parse(line)).take(LOG_LINES);
            parsed.flat_map(|line| line.text.into_owned()).collect()
        }
        // One line that is longer than what is read: all of it is the container's output.
        None if log.is_cut && lines.len() == 1 => first.to_vec(),
        None => {
            let line = String::from_utf8_lossy(first);
            let text = format!("failed to get parse function: unsupported log format: \"{}\"", Excerpt(&line));
            return Err(io::Error::other(text));
        }
    };
    Ok(end_of(&String::from_utf8_lossy(&text), LOG_LIMIT).to_owned())
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

    async fn append_message(container: &mut ContainerStatus) {
        MessageReader::default().append(&PodUid::from("p"), container, MessageSource::FileOrLog).await;
    }

    /// Reads a file of a pod in this way.
    async fn read(
        reader: &MessageReader,
        (pod, path): (&str, &str),
        read: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> io::Result<()> {
        reader.in_time(&PodUid::from(pod), PathBuf::from(path), read).await
    }

    #[tokio::test]
    async fn appends_the_end_of_the_file_to_the_message_of_the_runtime() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), format!("{}end", "x".repeat(5000))).unwrap();
        let mut c = container("a", "web", ContainerState::Exited);
        c.message = "runtime says".into();
        c.termination.host_path = Some(file.path().to_str().unwrap().into());
        append_message(&mut c).await;
        assert!(c.message.starts_with("runtime says: xxx") && c.message.ends_with("end"));
        assert_eq!(c.message.len(), "runtime says: ".len() + 4096);
    }

    #[tokio::test]
    async fn invalid_utf8_keeps_the_end_of_the_message() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [vec![0xff; 5000], b"end".to_vec()].concat()).unwrap();
        let mut c = container("a", "web", ContainerState::Exited);
        c.termination.host_path = Some(file.path().to_str().unwrap().into());
        append_message(&mut c).await;
        assert!(c.message.ends_with("\u{fffd}end") && c.message.len() <= 4096, "{} bytes", c.message.len());
    }

    #[tokio::test]
    async fn falls_back_to_the_log_only_on_error_and_only_if_configured() {
        let log = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(log.path(), "2026-01-01T00:00:00Z stdout F one\n2026-01-01T00:00:01Z stderr F two words\n")
            .unwrap();
        let mut c = container("a", "web", ContainerState::Exited);
        c.log_path = log.path().to_str().unwrap().into();
        c.exit_code = Some(1);
        append_message(&mut c).await;
        assert_eq!(c.message, "");
        c.termination.fallback_to_logs = true;
        append_message(&mut c).await;
        assert_eq!(c.message, "one\ntwo words\n");
        c.message.clear();
        c.exit_code = Some(0);
        append_message(&mut c).await;
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
            let one = "2026-01-01T00:00:00Z stderr F one\n";
            std::fs::write(&path, one).unwrap();
            tokio::time::sleep(Duration::from_millis(7)).await;
            std::fs::write(&path, format!("{one}2026-01-01T00:00:00Z stderr P two")).unwrap();
        });
        append_message(&mut c).await;
        assert_eq!(c.message, "one\ntwo");
        let silent = tempfile::NamedTempFile::new().unwrap();
        c.log_path = silent.path().to_str().unwrap().into();
        c.message.clear();
        let began = tokio::time::Instant::now();
        append_message(&mut c).await;
        assert_eq!((c.message.as_str(), began.elapsed().as_millis()), ("", 100));
    }

    /// A container can put anything in place of its message: the file may be in a volume that it mounts elsewhere, too.
    #[tokio::test]
    async fn only_regular_files_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        for path in ["/dev/zero", pipe.to_str().unwrap()] {
            let mut c = container("a", "web", ContainerState::Exited);
            c.termination.host_path = Some(path.into());
            append_message(&mut c).await;
            assert_eq!(c.message, format!("Error on reading termination log {path}: not a regular file"));
            let mut c = container("a", "web", ContainerState::Exited);
            (c.exit_code, c.log_path, c.termination.fallback_to_logs) = (Some(1), path.into(), true);
            append_message(&mut c).await;
            assert_eq!(c.message, "Error on reading termination message from logs: not a regular file", "{path}");
        }
    }

    /// As one of a file on a volume whose server does not answer.
    #[tokio::test(start_paused = true)]
    async fn a_read_that_hangs_is_not_waited_for_and_keeps_its_thread() {
        let reader = MessageReader { threads: Arc::new(Semaphore::new(2)), ..MessageReader::default() };
        let (answer, answers) = std::sync::mpsc::channel::<()>();
        let hangs = move || answers.recv().map_err(io::Error::other);
        let (first, ()) = tokio::join!(read(&reader, ("p", "/dead"), hangs), tokio::time::advance(READ_LIMIT * 2));
        let error = first.unwrap_err();
        assert_eq!((error.kind(), error.to_string().as_str()), (io::ErrorKind::TimedOut, "it was not read within 10s"));
        let again = read(&reader, ("p", "/dead"), || Ok(()));
        let (second, ()) = tokio::join!(again, tokio::time::advance(READ_LIMIT * 2));
        assert_eq!(second.unwrap_err().kind(), io::ErrorKind::TimedOut, "without a second thread");
        assert!(read(&reader, ("p", "/other"), || Ok(())).await.is_ok(), "which other files have");
        answer.send(()).unwrap();
        assert!(read(&reader, ("p", "/dead"), || Ok(())).await.is_ok(), "the place is free again");
    }

    #[tokio::test(start_paused = true)]
    async fn files_of_one_pod_that_hang_delay_no_other_pod() {
        let reader = MessageReader::default();
        let paths: Vec<String> = (0..READERS).map(|index| format!("/dead/{index}")).collect();
        let (answers, hangs): (Vec<_>, Vec<_>) = paths.iter().map(|_| std::sync::mpsc::channel::<()>()).unzip();
        let hanging = paths.iter().zip(hangs).map(|(path, answers)| {
            read(&reader, ("dead", path.as_str()), move || answers.recv().map_err(io::Error::other))
        });
        let (late, ()) = tokio::join!(join_all(hanging), tokio::time::advance(READ_LIMIT * 2));
        let is_late = |read: &io::Result<()>| read.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::TimedOut);
        assert!(late.iter().all(is_late), "{late:?}");
        assert_eq!(reader.threads.available_permits(), READERS - POD_READERS);
        assert!(read(&reader, ("other", "/other"), || Ok(())).await.is_ok(), "at once");
        drop(answers);
        assert!(read(&reader, ("dead", "/dead/other"), || Ok(())).await.is_ok(), "the places are free again");
        assert_eq!(reader.pods.used.lock().unwrap().len(), 1, "of which only those in use are known");
    }

    fn line(tag: &str, text: &str) -> String {
        format!("2026-01-01T00:00:00Z stdout {tag} {text}\n")
    }

    fn output(log: &str, is_cut: bool) -> String {
        last_output(&FileEnd { bytes: log.as_bytes().to_vec(), is_cut }).unwrap()
    }

    #[test]
    fn the_log_is_read_as_for_its_clients() {
        let parts = [line("F", "before"), line("P", "a line "), line("P", "in three "), line("F", "parts")].concat();
        assert_eq!(output(&parts, false), "before\na line in three parts\n");
        assert_eq!(
            output(&(parts.clone() + &line("P", "no newline")), false),
            "before\na line in three parts\nno newline"
        );
        let docker = |log: &str| format!(r#"{{"log":"{log}","stream":"stderr","time":"2026-01-01T00:00:00Z"}}"#) + "\n";
        assert_eq!(output(&[docker(r"one\n"), docker("tw"), docker(r"o\n")].concat(), false), "one\ntwo\n");
        assert_eq!(output(&parts[10..], true), "a line in three parts\n", "the first line lacks its start");
        assert_eq!(output(&format!("{parts}garbage\n"), false), "before\na line in three parts\n");
        assert_eq!(output("", false), "");
        let many: String = (0..100).map(|n| line("F", &n.to_string())).collect();
        assert!(output(&many, false).starts_with("20\n21\n"), "of the last lines");
        let endless = "x".repeat(5000);
        assert_eq!(output(&endless, true), endless[..LOG_LIMIT], "a line longer than the window");
        let unknown = last_output(&FileEnd { bytes: b"free text\n".to_vec(), is_cut: false }).unwrap_err();
        assert_eq!(unknown.to_string(), r#"failed to get parse function: unsupported log format: "free text\n""#);
    }

    #[test]
    fn a_window_begins_at_a_line() {
        let log = tempfile::NamedTempFile::new().unwrap();
        let long = line("F", &"y".repeat(16 * 1024));
        std::fs::write(log.path(), long.repeat(8) + &line("P", "th") + &line("F", "e end")).unwrap();
        let end = tail(log.path(), LOG_WINDOW).unwrap();
        assert!(end.is_cut && end.bytes.len() as u64 == LOG_WINDOW);
        let text = last_output(&end).unwrap();
        assert!(text.ends_with("y\nthe end\n") && text.len() == LOG_LIMIT && !text.contains("stdout"), "{text}");
    }

    #[test]
    fn the_log_tail_is_bounded_and_cut_between_characters() {
        let text = output(&line("F", &"ä".repeat(100)).repeat(200), false);
        assert!(text.len() <= LOG_LIMIT && text.len() > LOG_LIMIT - 4);
    }
}
