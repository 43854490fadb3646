//! Reads recorded lines.

use std::io::BufRead;

use super::record::Line;
use super::record::Record;
use super::state::ObservedNode;

/// Longest line, in bytes: a pod with hundreds of containers.
const LINE: u64 = 1 << 20;

/// Recorded lines that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The input is not readable.
    #[error("cannot read line {number}: {source}")]
    Read {
        /// Its number, from one.
        number: usize,
        /// The cause.
        source: std::io::Error,
    },
    /// A line is not a record of this version of the schema.
    #[error("line {number} is no record: {source}")]
    Record {
        /// Its number, from one.
        number: usize,
        /// The cause.
        source: serde_json::Error,
    },
    /// A line is too long.
    #[error("line {number} is longer than {LINE} bytes")]
    TooLong {
        /// Its number, from one.
        number: usize,
    },
    /// There is no record.
    #[error("there is no record in it")]
    Empty,
}

/// The node after all recorded lines. Skipped are lines of kinds that this version does not know, those of the log, which a
/// collector may have mixed in, and an incomplete last one: the recorder may still write it, or was killed.
///
/// # Errors
/// See [`ReplayError`].
pub fn read(mut input: impl BufRead) -> Result<ObservedNode, ReplayError> {
    let (mut node, mut bytes, mut records) = (ObservedNode::default(), Vec::new(), 0);
    for number in 1.. {
        bytes.clear();
        let mut limited = std::io::Read::take(&mut input, LINE);
        let read = limited.read_until(b'\n', &mut bytes);
        let length = read.map_err(|source| ReplayError::Read { number, source })?;
        if length == 0 {
            break;
        }
        if bytes.last() != Some(&b'\n') && length as u64 == LINE {
            return Err(ReplayError::TooLong { number });
        }
        if bytes.trim_ascii().is_empty() || is_unknown(&bytes) || is_logged(&bytes) {
            continue;
        }
        match serde_json::from_slice::<Line>(&bytes) {
            Ok(line) => node.apply(&line),
            Err(error) if error.is_eof() && records > 0 && !bytes.ends_with(b"\n") => break,
            Err(source) => return Err(ReplayError::Record { number, source }),
        }
        records += 1;
    }
    if records == 0 { Err(ReplayError::Empty) } else { Ok(node) }
}

/// A record of this schema of a kind that was added later.
fn is_unknown(bytes: &[u8]) -> bool {
    #[derive(serde::Deserialize)]
    struct Head {
        #[serde(rename = "schema")]
        _schema: super::record::Schema,
        kind: String,
    }
    serde_json::from_slice::<Head>(bytes).is_ok_and(|head| !Record::KINDS.contains(&head.kind.as_str()))
}

/// A line of the program's own log, recognised by the fields that it has and by those that it lacks.
fn is_logged(bytes: &[u8]) -> bool {
    #[derive(serde::Deserialize)]
    struct Logged {
        #[serde(rename = "level")]
        _level: String,
        #[serde(rename = "msg")]
        _message: String,
        schema: Option<serde::de::IgnoredAny>,
    }
    serde_json::from_slice::<Logged>(bytes).is_ok_and(|line| line.schema.is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: &str = r#"{"schema":"keblet.dev/observe/v1","time":"2026-01-01T00:00:00Z","kind":"start","node":"n","version":"0","kernel":"6.1","cgroups":"v2","sensors":[],"later":1}"#;

    #[test]
    fn additions_to_the_schema_are_ignored() {
        let unknown = START.replace("\"start\"", "\"added-later\"");
        let node = read(format!("{START}\n\n{unknown}\n").as_bytes()).unwrap();
        assert_eq!(node.start.node, "n");
    }

    /// As `kubectl logs` has them.
    #[test]
    fn lines_of_the_log_between_records_are_skipped() {
        let logged = r#"{"ts":1767225600000.5,"level":"WARN","v":0,"target":"keblet","msg":"no runtime"}"#;
        let node = read(format!("{logged}\n{START}\n{logged}\n").as_bytes()).unwrap();
        assert_eq!(node.start.node, "n");
        assert!(matches!(read(logged.as_bytes()), Err(ReplayError::Empty)));
    }

    #[test]
    fn an_incomplete_last_line_is_skipped() {
        let cut = |text: &str| read(format!("{START}\n{text}").as_bytes()).map(|node| node.start.node);
        for end in [1, 30, START.len() - 1] {
            assert_eq!(cut(&START[..end]).unwrap(), "n", "{end}");
        }
        assert!(cut(&format!("{}\n", &START[..30])).is_err(), "it is not the last one");
        assert!(read(&START.as_bytes()[..30]).is_err(), "it is the only one");
    }

    #[test]
    fn what_is_no_record_is_refused_with_its_line() {
        let error = |text: String| read(text.as_bytes()).unwrap_err().to_string();
        assert!(error(format!("{START}\n{{}}\n")).starts_with("line 2 is no record: "));
        assert!(error(START.replace("/v1", "/v2")).contains("keblet.dev/observe/v2"));
        assert!(error(START.replace("2026-01-01T00:00:00Z", "now")).starts_with("line 1 is no record"));
        assert_eq!(error("x".repeat(2 << 20)), "line 1 is longer than 1048576 bytes");
        assert_eq!(error(String::new()), "there is no record in it");
    }
}
