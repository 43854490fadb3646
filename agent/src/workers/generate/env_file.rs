//! Files of environment variables (KEP-3721): `KEY='value'` in lines. Pure.
//!
//! A value is in single quotes, may span lines and is taken as it is. Blank lines and comments (`#`) are skipped.

/// Characters that may stand before a name and after a value.
const BLANKS: [char; 3] = [' ', '\t', '\r'];

/// A file that is not in this form; `line` is where, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub(super) struct EnvFileError {
    line: usize,
    problem: &'static str,
}

/// The value of `key`; `None` if no line has it. What follows the first such line is not looked at.
///
/// # Errors
/// A line before it is malformed.
pub(super) fn value<'a>(content: &'a str, key: &str) -> Result<Option<&'a str>, EnvFileError> {
    let (mut rest, mut line) = (content, 1);
    while !rest.is_empty() {
        let here = rest.trim_start_matches(BLANKS);
        let (text, after) = here.split_once('\n').unwrap_or((here, ""));
        if text.is_empty() || text.starts_with('#') {
            (rest, line) = (after, line + 1);
            continue;
        }
        let (name, after) = match text.split_once('=') {
            Some((name, _)) if !name.is_empty() && !name.ends_with(BLANKS) => (name, &here[name.len() + 1..]),
            Some(_) => return Err(EnvFileError { line, problem: "no name directly before '='" }),
            None => return Err(EnvFileError { line, problem: "no '='" }),
        };
        let (found, after) = assigned(after).map_err(|problem| EnvFileError { line, problem })?;
        if name == key {
            return Ok(Some(found));
        }
        line += 1 + found.matches('\n').count();
        rest = after;
    }
    Ok(None)
}

/// What stands behind `=`: the value, and the text behind its last line. Nothing, or a blank, is an empty value.
fn assigned(text: &str) -> Result<(&str, &str), &'static str> {
    if text.is_empty() || text.starts_with(BLANKS) || text.starts_with('\n') {
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

    #[test]
    fn values() {
        let file = "# a comment\n\n  A='1'\n\tB='two words' # why\r\nC='x\ny=\\n$A \"z\"'\nE= 'e'\nF=\nA='again'\nG=''\nlast='9'";
        for (key, expected) in [
            ("A", Some("1")),
            ("B", Some("two words")),
            ("C", Some("x\ny=\\n$A \"z\"")),
            ("E", Some("")),
            ("F", Some("")),
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
    fn malformed_lines() {
        for (file, line, problem) in [
            ("A", 1, "no '='"),
            ("A='1'\n\nexport", 3, "no '='"),
            ("A ='1'", 1, "no name directly before '='"),
            ("='1'", 1, "no name directly before '='"),
            ("A=1", 1, "a value without single quotes"),
            ("A=\"1\"", 1, "a value without single quotes"),
            ("A='1\n2'\nB='", 3, "a quote without end"),
            ("A='1'2", 1, "text behind the closing quote"),
        ] {
            assert_eq!(value(file, "X"), Err(EnvFileError { line, problem }), "{file:?}");
        }
        assert_eq!(value("X='1'\nbroken", "X"), Ok(Some("1")), "what follows is not looked at");
    }
}
