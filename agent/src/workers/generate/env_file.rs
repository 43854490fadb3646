//! Files of environment variables (KEP-3721): `KEY='value'` in lines. Pure.
//!
//! A value is in single quotes, may span lines and is taken as it is, except that a line ending of two characters becomes a
//! line feed, as with upstream. Blank lines and comments (`#`) are skipped.

use std::collections::BTreeMap;
use std::collections::BTreeSet;

use bytes::Bytes;

use super::GenerateError;

/// Characters that may stand before a name and after a value.
const BLANKS: [char; 3] = [' ', '\t', '\r'];

/// Values of one file by key; `None`: no line has the key.
pub type FileValues = BTreeMap<String, Result<Option<Bytes>, GenerateError>>;

/// A value in the text of its file; `None`: no line has the key.
type Value<'a> = Result<Option<&'a str>, EnvFileError>;

/// A file that is not in this form; `line` is where, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
struct EnvFileError {
    line: usize,
    problem: &'static str,
}

/// The values of `keys` in a file with this content, which is walked once for all of them.
pub fn file_values(content: &[u8], keys: BTreeSet<String>) -> FileValues {
    // A character for each byte: the file may have any encoding, and what is looked for in it is ASCII.
    let text: String = content.iter().copied().map(char::from).collect();
    let bytes = |value: &str| -> Bytes {
        value.replace("\r\n", "\n").chars().filter_map(|byte| u8::try_from(byte).ok()).collect()
    };
    let owned = |value: Value<'_>| match value {
        Ok(value) => Ok(value.map(bytes)),
        Err(_) => Err(GenerateError::EnvFile),
    };
    values_of(Assignments::new(&text), keys).into_iter().map(|(key, value)| (key, owned(value))).collect()
}

/// The value of each key in the first assignment to it. What follows the last of these is not parsed. Keys without an
/// assignment before a malformed line have its error.
fn values_of<'a>(
    assignments: impl Iterator<Item = Result<(&'a str, &'a str), EnvFileError>>,
    mut keys: BTreeSet<String>,
) -> BTreeMap<String, Value<'a>> {
    let mut values: BTreeMap<String, Value<'a>> = BTreeMap::new();
    let mut others: Value<'a> = Ok(None);
    for assignment in assignments {
        match assignment {
            Ok((name, value)) => values.extend(keys.take(name).map(|key| (key, Ok(Some(value))))),
            Err(error) => others = Err(error),
        }
        if keys.is_empty() {
            break;
        }
    }
    values.extend(keys.into_iter().map(|key| (key, others)));
    values
}

/// Names and values of a file in their order. The first malformed line is the last item.
struct Assignments<'a> {
    rest: &'a str,
    line: usize,
}

impl<'a> Assignments<'a> {
    fn new(content: &'a str) -> Self {
        Self { rest: content, line: 1 }
    }
}

impl<'a> Iterator for Assignments<'a> {
    type Item = Result<(&'a str, &'a str), EnvFileError>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.rest.is_empty() {
            let here = self.rest.trim_start_matches(BLANKS);
            let (text, after) = here.split_once('\n').unwrap_or((here, ""));
            if text.is_empty() || text.starts_with('#') {
                (self.rest, self.line) = (after, self.line + 1);
                continue;
            }
            return Some(match assignment(here, text) {
                Ok((name, value, after)) => {
                    (self.rest, self.line) = (after, self.line + 1 + value.matches('\n').count());
                    Ok((name, value))
                }
                Err(problem) => {
                    self.rest = "";
                    Err(EnvFileError { line: self.line, problem })
                }
            });
        }
        None
    }
}

/// The name and value at the beginning of `text`, whose first line is `line`, and the text behind their last line.
fn assignment<'a>(text: &'a str, line: &str) -> Result<(&'a str, &'a str, &'a str), &'static str> {
    let length = line.find('=').ok_or("no '='")?;
    let name = &text[..length];
    if name.is_empty() || name.ends_with(BLANKS) {
        return Err("no name directly before '='");
    }
    let (value, after) = assigned(&text[length + 1..])?;
    Ok((name, value, after))
}

/// The value behind `=`, and the text behind its last line. A blank directly behind `=` makes the value empty.
fn assigned(text: &str) -> Result<(&str, &str), &'static str> {
    if text.starts_with([' ', '\t']) {
        return Ok(("", text.split_once('\n').map_or("", |(_, after)| after)));
    }
    let quoted = text.strip_prefix('\'').ok_or("a value without single quotes")?;
    let (value, behind) = quoted.split_once('\'').ok_or("a quote without end")?;
    let (comment, after) = behind.split_once('\n').unwrap_or((behind, ""));
    let comment = comment.trim_matches(BLANKS);
    if comment.is_empty() || comment.starts_with('#') {
        Ok((value, after))
    } else {
        Err("text behind the closing quote")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value<'a>(content: &'a str, key: &str) -> Value<'a> {
        values_of(Assignments::new(content), BTreeSet::from([key.to_owned()]))[key]
    }

    #[test]
    fn values() {
        let file =
            "# a comment\n\n  A='1'\n\tB='two words' # why\r\nC='x\ny=\\n$A \"z\"'\nE= 'e'\nA='again'\nG=''\nlast='9'";
        for (key, expected) in [
            ("A", Some("1")),
            ("B", Some("two words")),
            ("C", Some("x\ny=\\n$A \"z\"")),
            ("E", Some("")),
            ("G", Some("")),
            ("last", Some("9")),
            ("a", None),
            ("y", None),
            ("# a comment", None),
        ] {
            assert_eq!(value(file, key), Ok(expected), "{key}");
        }
        assert_eq!(value("", "A"), Ok(None));
    }

    #[test]
    fn lines_of_a_value_end_with_a_line_feed() {
        let values = file_values(b"A='1\r\n2\r3\r\n'\r\nB='\r'\r\n", BTreeSet::from(["A".to_owned(), "B".to_owned()]));
        assert_eq!(values["A"].as_ref().expect("valid").as_deref(), Some(&b"1\n2\r3\n"[..]));
        assert_eq!(values["B"].as_ref().expect("valid").as_deref(), Some(&b"\r"[..]));
    }

    #[test]
    fn any_encoding_is_kept() {
        let file = [&b"# gr\xf6\xdfer\nA='\xe4'\nB='"[..], "\u{e4}\u{20ac}".as_bytes(), &b"'\n"[..]].concat();
        let values = file_values(&file, BTreeSet::from(["A".to_owned(), "B".to_owned()]));
        assert_eq!(values["A"].as_ref().expect("valid").as_deref(), Some(&b"\xe4"[..]));
        assert_eq!(values["B"].as_ref().expect("valid").as_deref(), Some("\u{e4}\u{20ac}".as_bytes()));
    }

    #[test]
    fn malformed_lines() {
        for (file, line, problem) in [
            ("A", 1, "no '='"),
            ("A='1'\n\nexport", 3, "no '='"),
            ("A ='1'", 1, "no name directly before '='"),
            ("='1'", 1, "no name directly before '='"),
            ("A=1", 1, "a value without single quotes"),
            ("A=", 1, "a value without single quotes"),
            ("A='1'\nB=\r\nC='3'", 2, "a value without single quotes"),
            ("A=\"1\"", 1, "a value without single quotes"),
            ("A='1\n2'\nB='", 3, "a quote without end"),
            ("A='1'2", 1, "text behind the closing quote"),
        ] {
            assert_eq!(value(file, "X"), Err(EnvFileError { line, problem }), "{file:?}");
        }
        assert_eq!(value("X='1'\nbroken", "X"), Ok(Some("1")), "what follows is not looked at");
    }

    #[test]
    fn a_file_is_walked_once_for_all_keys_and_not_beyond_the_last() {
        let keys = || (0..1000).map(|n| format!("K{n}")).collect::<BTreeSet<_>>();
        let file: String = (0..2000).flat_map(|n| [format!("K{n}='{n}'\n"), "K0='again'\n".to_owned()]).collect();
        let walk = |file: &str, keys| {
            let mut walked = 0;
            let found = values_of(Assignments::new(file).inspect(|_| walked += 1), keys);
            let found = found.into_iter().map(|(key, value)| (key, value.map(|value| value.map(str::to_owned))));
            (walked, found.collect::<BTreeMap<_, _>>())
        };
        let (walked, found) = walk(&file, keys());
        assert_eq!((walked, found.len()), (1999, 1000));
        assert!((0..1000).all(|n| found[&format!("K{n}")] == Ok(Some(n.to_string()))), "the first of each: {found:?}");
        let (walked, found) = walk("K0='0'\nK1=''\nK2\nK3='3'\n", keys());
        let error = EnvFileError { line: 3, problem: "no '='" };
        assert_eq!((walked, found.len()), (3, 1000), "every key has a result");
        assert_eq!(found["K0"], Ok(Some("0".to_owned())));
        assert_eq!(found["K1"], Ok(Some(String::new())));
        assert!((2..1000).all(|n| found[&format!("K{n}")] == Err(error)), "all behind the malformed line");
    }
}
