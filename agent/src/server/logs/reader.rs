//! Reads one log in chunks of bounded size. Blocks; called by `follow`.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::time::Instant;

use super::filter::Filter;
use super::filter::UnknownFormat;
use super::shared::End;
use super::shared::OpenLogs;
use super::shared::SharedLog;
use super::successor::Lines;
use super::successor::successor;
use super::tail;
use crate::model::quote::go_quoted;

/// Bytes per read. Small, because several are buffered for a slow client.
const READ_SIZE: usize = 8 * 1024;
/// The start of a line that is held back until the line is complete, in bytes; of a longer line it is sent at once, and the
/// rest as it is read. Runtimes split lines at 16 KiB.
const MAX_START: usize = 64 * 1024;
/// Longest line in bytes of a format that is parsed as a whole; longer ones are skipped.
const MAX_LINE: usize = 1 << 20;

/// Why a log cannot be read, with upstream's messages.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadError {
    #[error("failed to try resolving symlinks in path {}: {source}", go_quoted(&.path.to_string_lossy()))]
    Resolve { path: PathBuf, source: io::Error },
    #[error("failed to open log file {}: {source}", go_quoted(&.path.to_string_lossy()))]
    Open { path: PathBuf, source: io::Error },
    #[error("failed to read log file {}: {source}", go_quoted(&.path.to_string_lossy()))]
    Read { path: PathBuf, source: io::Error },
    #[error("failed to get parse function: unsupported log format: {}", go_quoted(&String::from_utf8_lossy(.0)))]
    Format(Vec<u8>),
}

impl From<UnknownFormat> for ReadError {
    fn from(UnknownFormat(line): UnknownFormat) -> Self {
        Self::Format(line)
    }
}

/// The outcome of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadOutcome {
    /// There may be more to read.
    More,
    /// The end of the file was reached.
    End,
    /// A limit was reached: nothing more is sent.
    Done,
}

/// A log being read.
#[derive(Debug)]
pub(super) struct Reader {
    path: PathBuf,
    log: Arc<SharedLog>,
    logs: OpenLogs,
    position: u64,
    /// The beginning of an incomplete line.
    line: Vec<u8>,
    /// Inside a line that is too long to be parsed.
    skipping: bool,
    filter: Filter,
}

impl Reader {
    /// Opens the log at `path`, which may be a symbolic link, at its beginning or at its last `lines`.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub(super) fn open(logs: &OpenLogs, path: &Path, lines: Option<u64>, filter: Filter) -> Result<Self, ReadError> {
        let resolved = fs::canonicalize(path).map_err(|source| ReadError::Resolve { path: path.to_owned(), source })?;
        let log = logs.open(&resolved).map_err(|source| ReadError::Open { path: resolved.clone(), source })?;
        let position = match lines {
            Some(lines) => {
                tail::start(&log.file, lines).map_err(|source| ReadError::Read { path: resolved.clone(), source })?
            }
            None => 0,
        };
        Ok(Self { path: resolved, log, logs: logs.clone(), position, line: Vec::new(), skipping: false, filter })
    }

    /// The directory of the log, and of its successor after a rotation.
    pub(super) fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("/"))
    }

    /// Reads a chunk and appends the bytes for the client to `out`.
    ///
    /// # Errors
    /// The file cannot be read, or has an unknown format. The reader cannot be used any more then.
    pub(super) fn step(&mut self, out: &mut Vec<u8>) -> Result<ReadOutcome, ReadError> {
        if self.filter.is_done() {
            return Ok(ReadOutcome::Done);
        }
        let mut buffer = [0; READ_SIZE];
        let read = self.read(&mut buffer)?;
        if read == 0 {
            return Ok(ReadOutcome::End);
        }
        self.take_all(&buffer[..read], out)
    }

    fn read(&self, buffer: &mut [u8]) -> Result<usize, ReadError> {
        let read = self.log.read(buffer, self.position);
        read.map_err(|source| ReadError::Read { path: self.path.clone(), source })
    }

    /// As [`Self::step`] for a follower: shares the result with the other followers. `changes` is the number of changes
    /// of the directory before the read.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub(super) fn step_for_all(&mut self, changes: Option<u64>, out: &mut Vec<u8>) -> Result<ReadOutcome, ReadError> {
        if self.filter.is_done() {
            return Ok(ReadOutcome::Done);
        }
        let (since, at, mut buffer) = (self.log.generation(), Instant::now(), [0; READ_SIZE]);
        let read = self.read(&mut buffer)?;
        if read > 0 {
            self.log.keep(since, self.position, &buffer[..read]);
            return self.take_all(&buffer[..read], out);
        }
        if self.follow_rotation(out)? {
            return Ok(ReadOutcome::More);
        }
        if let Some(changes) = changes {
            self.log.ended(since, End { position: self.position, changes, at });
        }
        Ok(ReadOutcome::End)
    }

    /// A read from the results of other followers; `None` if there are none, and the file must be read. Does not block.
    /// A result is used if it is from after these `changes` of the directory, and not from before `after`.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub(super) fn read_shared(
        &mut self,
        changes: Option<u64>,
        after: Instant,
        out: &mut Vec<u8>,
    ) -> Result<Option<ReadOutcome>, ReadError> {
        if self.filter.is_done() {
            return Ok(Some(ReadOutcome::Done));
        }
        if let Some(kept) = self.log.kept(self.position) {
            return self.take_all(&kept, out).map(Some);
        }
        let known = changes.is_some_and(|changes| self.log.is_end(self.position, changes, after));
        Ok(known.then_some(ReadOutcome::End))
    }

    fn take_all(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<ReadOutcome, ReadError> {
        self.position += bytes.len() as u64;
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.take(part, out)?;
        }
        Ok(if self.filter.is_done() { ReadOutcome::Done } else { ReadOutcome::More })
    }

    /// After the end was reached: continues in the new file if the log was rotated, or at the beginning if it was
    /// truncated. Returns whether it was.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub(super) fn follow_rotation(&mut self, out: &mut Vec<u8>) -> Result<bool, ReadError> {
        if let Ok(there) = fs::metadata(&self.path)
            && (there.dev(), there.ino()) == self.log.id
        {
            let emptied = there.len() < self.position;
            if emptied {
                self.line.clear();
                self.skipping = false;
                self.filter.end_log();
                self.position = 0;
                self.log.forget();
            }
            return Ok(emptied);
        }
        self.continue_in_successor(Lines::MayFollow, out)
    }

    /// After the end was reached: continues in the next file if the log was rotated and is complete. Returns whether it was.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub(super) fn continue_in_successor(&mut self, lines: Lines, out: &mut Vec<u8>) -> Result<bool, ReadError> {
        let Some(next) = successor(&self.logs, &self.path, &self.log, lines) else { return Ok(false) };
        // Data written between the last read and the rotation.
        while self.step(out)? == ReadOutcome::More {}
        self.flush_last_line(out)?;
        (self.log, self.position) = (next, 0);
        Ok(true)
    }

    /// Processes the last line, which has no newline.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub(super) fn flush_last_line(&mut self, out: &mut Vec<u8>) -> Result<(), ReadError> {
        let line = std::mem::take(&mut self.line);
        self.skipping = false;
        if !line.is_empty() {
            self.filter.take(&line, out)?;
        }
        self.filter.end_log();
        Ok(())
    }

    /// Processes a line or a part of one.
    fn take(&mut self, part: &[u8], out: &mut Vec<u8>) -> Result<(), ReadError> {
        let ends = part.ends_with(b"\n");
        if self.skipping {
            self.skipping = !ends;
        } else if self.filter.is_inside_line() {
            self.filter.take_rest(part, out);
        } else if !ends {
            self.line.extend_from_slice(part);
            self.bound_line(out);
        } else if self.line.is_empty() {
            self.filter.take(part, out)?;
        } else {
            self.line.extend_from_slice(part);
            let line = std::mem::take(&mut self.line);
            self.filter.take(&line, out)?;
        }
        Ok(())
    }

    /// Keeps the start of an incomplete line no longer than memory allows.
    fn bound_line(&mut self, out: &mut Vec<u8>) {
        if self.line.len() > MAX_START && self.filter.take_start(&self.line, out) {
            self.line = Vec::new();
        } else if self.line.len() > MAX_LINE {
            tracing::warn!(log = %self.path.display(), "skipping a log line of more than {MAX_LINE} bytes");
            self.line = Vec::new();
            self.skipping = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write as _;
    use std::time::Duration;
    use std::time::SystemTime;

    use proptest::prelude::*;

    use super::super::filter::LineRules;
    use super::super::query::LogStreams;
    use super::*;

    const ALL: LineRules =
        LineRules { since: i64::MIN, timestamps: false, limit: None, lines: None, stream: LogStreams::All };

    fn line(second: usize, stream: &str, tag: &str, text: &str) -> String {
        format!("2026-01-01T00:{:02}:{:02}Z {stream} {tag} {text}\n", second / 60, second % 60)
    }

    fn read(reader: &mut Reader) -> String {
        let mut out = Vec::new();
        while reader.step(&mut out).unwrap() == ReadOutcome::More {}
        String::from_utf8(out).unwrap()
    }

    fn opened(path: &Path, lines: Option<u64>) -> Reader {
        Reader::open(&OpenLogs::default(), path, lines, Filter::new(LineRules { lines, ..ALL })).unwrap()
    }

    #[test]
    fn a_rotation_loses_and_repeats_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        let mut file = File::create(&path).unwrap();
        file.write_all(line(1, "stdout", "F", "one").as_bytes()).unwrap();
        let mut reader = opened(&path, None);
        assert_eq!(read(&mut reader), "one\n");
        fs::rename(&path, dir.path().join("0.log.20260101-000000")).unwrap();
        assert!(!reader.follow_rotation(&mut Vec::new()).unwrap(), "there is no new file yet");
        file.write_all(line(2, "stdout", "F", "two").as_bytes()).unwrap();
        fs::write(&path, line(3, "stdout", "F", "three")).unwrap();
        let mut late = Vec::new();
        assert!(!reader.follow_rotation(&mut late).unwrap(), "the old file was written just now");
        file.set_modified(SystemTime::now() - Duration::from_secs(1)).unwrap();
        assert!(reader.follow_rotation(&mut late).unwrap());
        assert_eq!(late, b"two\n", "the end of the old file comes first");
        assert_eq!(read(&mut reader), "three\n");
        assert!(!reader.follow_rotation(&mut Vec::new()).unwrap());
    }

    #[test]
    fn a_truncated_log_is_read_from_its_beginning() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        fs::write(&path, line(1, "stdout", "F", "one, and long")).unwrap();
        let mut reader = opened(&path, None);
        read(&mut reader);
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(0).unwrap();
        (&file).write_all(line(2, "stdout", "F", "two").as_bytes()).unwrap();
        assert!(reader.follow_rotation(&mut Vec::new()).unwrap());
        assert_eq!(read(&mut reader), "two\n");
    }

    #[test]
    fn followers_share_what_one_of_them_has_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        fs::write(&path, line(1, "stdout", "F", "one")).unwrap();
        let logs = OpenLogs::default();
        let open = || Reader::open(&logs, &path, None, Filter::new(ALL)).unwrap();
        let (mut first, mut second, now) = (open(), open(), Instant::now());
        assert_eq!(second.read_shared(Some(0), now, &mut Vec::new()).unwrap(), None, "no reader has read it");
        let (mut here, mut there) = (Vec::new(), Vec::new());
        assert_eq!(first.step_for_all(Some(0), &mut here).unwrap(), ReadOutcome::More);
        assert_eq!(second.read_shared(Some(0), now, &mut there).unwrap(), Some(ReadOutcome::More));
        assert_eq!((here.as_slice(), there.as_slice()), (&b"one\n"[..], &b"one\n"[..]));
        assert_eq!(second.read_shared(Some(0), now, &mut there).unwrap(), None, "no reader has checked for more");
        assert_eq!(first.step_for_all(Some(0), &mut here).unwrap(), ReadOutcome::End);
        assert_eq!(second.read_shared(Some(0), now, &mut there).unwrap(), Some(ReadOutcome::End));
        assert_eq!(second.read_shared(Some(1), now, &mut there).unwrap(), None, "the folder has changed since");
        assert_eq!(second.read_shared(None, now, &mut there).unwrap(), None, "without a watch, reads are not shared");
        // Copied away and truncated: new lines are at offsets of old ones.
        fs::write(&path, "").unwrap();
        assert_eq!(first.step_for_all(Some(1), &mut here).unwrap(), ReadOutcome::More);
        fs::write(&path, line(2, "stdout", "F", "two, longer")).unwrap();
        assert_eq!(first.read_shared(Some(1), now, &mut here).unwrap(), None, "it was emptied");
        assert_eq!(first.step_for_all(Some(1), &mut here).unwrap(), ReadOutcome::More);
        assert_eq!(here, b"one\ntwo, longer\n");
    }

    #[test]
    fn an_incomplete_line_is_held_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        let whole = line(1, "stdout", "F", "text");
        let (begin, end) = whole.split_at(30);
        fs::write(&path, begin).unwrap();
        let mut reader = opened(&path, None);
        assert_eq!(read(&mut reader), "");
        File::options().append(true).open(&path).unwrap().write_all(end.as_bytes()).unwrap();
        assert_eq!(read(&mut reader), "text\n");
        File::options().append(true).open(&path).unwrap().write_all(whole.trim_end().as_bytes()).unwrap();
        let (_, mut out) = (read(&mut reader), Vec::new());
        reader.flush_last_line(&mut out).unwrap();
        assert_eq!(out, b"text", "the read is not cancelled any more");
    }

    /// What the client gets of a log with a long line between two short ones, and the memory that the start of a line took.
    fn with_long_line(long: &str, rules: LineRules, tail: Option<u64>) -> (String, usize) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        let (before, after) = (line(1, "stdout", "F", "one"), line(3, "stdout", "F", "three"));
        fs::write(&path, before + long + &after).unwrap();
        let mut reader = Reader::open(&OpenLogs::default(), &path, tail, Filter::new(rules)).unwrap();
        let (mut out, mut held) = (Vec::new(), 0);
        while reader.step(&mut out).unwrap() == ReadOutcome::More {
            held = held.max(reader.line.capacity());
        }
        reader.flush_last_line(&mut out).unwrap();
        (String::from_utf8(out).unwrap(), held)
    }

    #[test]
    fn long_lines_are_passed_on_in_parts() {
        let text: String = (0..3 << 20).map(|n| char::from(b'a' + (n % 23) as u8)).collect();
        let long = line(2, "stderr", "F", &text);
        let stamp = |second: u8| format!("2026-01-01T00:00:0{second}.000000000Z ");
        let since = |second: i64| (1_767_225_600 + second) * 1_000_000_000;
        let tail = LineRules { lines: Some(2), ..ALL };
        for (rules, tail, expected) in [
            (ALL, None, format!("one\n{text}\nthree\n")),
            (
                LineRules { timestamps: true, ..ALL },
                None,
                format!("{}one\n{}{text}\n{}three\n", stamp(1), stamp(2), stamp(3)),
            ),
            (LineRules { limit: Some(4 + (1 << 20)), ..ALL }, None, format!("one\n{}", &text[..1 << 20])),
            (tail, Some(2), format!("{text}\nthree\n")),
            (tail, None, format!("one\n{text}\n")),
            (LineRules { stream: LogStreams::Stderr, ..ALL }, None, format!("{text}\n")),
            (LineRules { stream: LogStreams::Stdout, ..ALL }, None, "one\nthree\n".to_owned()),
            (LineRules { since: since(2), ..ALL }, None, format!("{text}\nthree\n")),
            (LineRules { since: since(3), ..ALL }, None, "three\n".to_owned()),
        ] {
            let (out, held) = with_long_line(&long, rules, tail);
            assert!(out == expected, "{} bytes instead of {} with {rules:?}", out.len(), expected.len());
            assert!(held < 2 * MAX_LINE, "{held} bytes");
        }
        let (out, _) = with_long_line(&line(2, "stdout", "P", &text), LineRules { timestamps: true, ..ALL }, None);
        assert!(out == format!("{}one\n{}{text}three\n", stamp(1), stamp(2)), "a partial line has no newline");
    }

    #[test]
    fn a_long_line_without_its_end_is_continued_or_ended_by_the_log() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        let text = "x".repeat(MAX_START);
        let whole = line(1, "stdout", "F", &text);
        fs::write(&path, &whole[..whole.len() - 10]).unwrap();
        let mut reader = opened(&path, None);
        let began = read(&mut reader);
        assert!(!began.is_empty() && text.starts_with(&began));
        fs::write(&path, &whole).unwrap();
        assert!(began + &read(&mut reader) == text.clone() + "\n", "the rest follows");
        fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        let mut reader = opened(&path, None);
        let mut out = read(&mut reader).into_bytes();
        reader.flush_last_line(&mut out).unwrap();
        assert!(out == text.as_bytes(), "the log ends within the line");
    }

    #[test]
    fn long_lines_of_a_format_that_is_parsed_as_a_whole_are_skipped() {
        let docker =
            |text: &str| format!("{{\"log\":\"{text}\\n\",\"stream\":\"stdout\",\"time\":\"2026-01-01T00:00:00Z\"}}\n");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        fs::write(&path, [docker("one"), docker(&"x".repeat(3 << 20)), docker("three")].concat()).unwrap();
        let mut reader = opened(&path, None);
        assert_eq!(read(&mut reader), "one\nthree\n");
        assert!(reader.line.capacity() < 2 * MAX_LINE);
    }

    #[test]
    fn errors_have_upstreams_messages() {
        let missing = Reader::open(&OpenLogs::default(), Path::new("/no/such.log"), None, Filter::new(ALL))
            .unwrap_err()
            .to_string();
        assert!(missing.starts_with("failed to try resolving symlinks in path \"/no/such.log\": "), "{missing}");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        fs::write(&path, "\u{1b}[31mfree text\n").unwrap();
        let error = opened(&path, None).step(&mut Vec::new()).unwrap_err().to_string();
        let expected = "failed to get parse function: unsupported log format: \"\\x1b[31mfree text\\n\"";
        assert_eq!(error, expected);
    }

    /// What the client should get, by looking at the whole log at once.
    fn naive(log: &[(usize, bool, bool, String)], rules: LineRules, tail: Option<u64>) -> String {
        let skip = tail.map_or(0, |tail| log.len().saturating_sub(usize::try_from(tail).unwrap()));
        let mut out = String::new();
        let mut start = true;
        for (second, is_stderr, is_partial, text) in &log[skip..] {
            let nanos = (1_767_225_600 + *second as i64) * 1_000_000_000;
            let stream_fits = match rules.stream {
                LogStreams::All => true,
                LogStreams::Stdout => !is_stderr,
                LogStreams::Stderr => *is_stderr,
            };
            if nanos >= rules.since && stream_fits {
                if rules.timestamps && start {
                    out.push_str(&format!("2026-01-01T00:{:02}:{:02}.000000000Z ", second / 60, second % 60));
                }
                out.push_str(text);
                out.push_str(if *is_partial { "" } else { "\n" });
            }
            start = !is_partial || text.is_empty();
        }
        out.truncate(rules.limit.map_or(out.len(), |limit| out.len().min(usize::try_from(limit).unwrap())));
        out
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        #[test]
        fn as_a_naive_reader_sees_it(
            mut log in proptest::collection::vec((0..3000_usize, any::<bool>(), any::<bool>(), "[ -~]{0,60}"), 0..300),
            since in proptest::option::of(0..3000_i64), tail in proptest::option::of(0..320_u64),
            limit in proptest::option::of(1..9000_u64), timestamps: bool, stream in 0..3_usize,
        ) {
            log.sort_by_key(|(second, ..)| *second);
            let text: String = log.iter().map(|(second, is_stderr, is_partial, text)| {
                let stream = if *is_stderr { "stderr" } else { "stdout" };
                line(*second, stream, if *is_partial { "P" } else { "F" }, text)
            }).collect();
            let stream = [LogStreams::All, LogStreams::Stdout, LogStreams::Stderr][stream];
            let since = since.map_or(i64::MIN, |second| (1_767_225_600 + second) * 1_000_000_000);
            let rules = LineRules { since, timestamps, limit, lines: tail, stream };
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("0.log");
            fs::write(&path, text).unwrap();
            let mut reader = Reader::open(&OpenLogs::default(), &path, tail, Filter::new(rules)).unwrap();
            prop_assert_eq!(read(&mut reader), naive(&log, rules, tail));
        }
    }
}
