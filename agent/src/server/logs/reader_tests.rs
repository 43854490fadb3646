//! Reads of logs that grow, are rotated or truncated, and have long lines.

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
    // The disk was full.
    file.write_all(b"2026-01-01T00:00:02Z stdout F cut o").unwrap();
    fs::write(&path, line(3, "stdout", "F", "three")).unwrap();
    let mut late = Vec::new();
    assert!(!reader.follow_rotation(&mut late).unwrap(), "the old file was written just now");
    file.set_modified(SystemTime::now() - Duration::from_secs(1)).unwrap();
    assert!(reader.follow_rotation(&mut late).unwrap());
    assert_eq!(late, b"two\ncut o", "the end of the old file comes first, and is not continued by the new one");
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

/// What was held of a line, or sent of a long one, is not continued by what is written next.
#[test]
fn a_log_that_is_truncated_within_a_line_is_read_from_its_beginning() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("0.log");
    let docker =
        |text: &str| format!("{{\"log\":\"{text}\\n\",\"stream\":\"stdout\",\"time\":\"2026-01-01T00:00:00Z\"}}\n");
    let long = "x".repeat(2 * MAX_LINE);
    for (held, next) in [
        (line(1, "stdout", "F", &"x".repeat(100)), line(2, "stdout", "F", "two")),
        (line(1, "stdout", "F", &long), line(2, "stdout", "F", "two")),
        (docker("one") + &docker(&long), docker("two")),
    ] {
        fs::write(&path, &held[..held.len() - 10]).unwrap();
        let mut reader = opened(&path, None);
        read(&mut reader);
        fs::write(&path, &next).unwrap();
        assert!(reader.follow_rotation(&mut Vec::new()).unwrap());
        assert_eq!(read(&mut reader), "two\n", "after {} bytes", held.len());
    }
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
    let missing =
        Reader::open(&OpenLogs::default(), Path::new("/no/such.log"), None, Filter::new(ALL)).unwrap_err().to_string();
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
