//! The query of `/logs/`. Pure.

use regex_syntax::ast::parse::Parser;

use crate::log_format::Stamp;
use crate::model::aggregate;

/// Services per query, and the length of their names, at most.
const MAX_SERVICES: usize = 4;
const MAX_NAME: usize = 256;
const MAX_LINES: i64 = 100_000;

/// The requested logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NodeLogQuery {
    /// A file, by its name below the log folder.
    File(String),
    /// Logs of services.
    Services(Vec<String>, Options),
}

/// Which lines.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Options {
    /// In journalctl's format.
    pub(super) since: Option<String>,
    pub(super) until: Option<String>,
    pub(super) lines: Option<i64>,
    pub(super) pattern: Option<String>,
    pub(super) boot: Option<i64>,
}

/// An invalid query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum BadQuery {
    /// A value cannot be parsed (400).
    Undecodable(String),
    /// The query is invalid (406).
    Invalid(String),
}

/// Whether this is a query, not a request for a file by its path.
pub(super) fn is_query(parameters: &[(String, String)]) -> bool {
    let options = ["sinceTime", "untilTime", "tailLines", "pattern", "boot"];
    parameters.iter().any(|(name, value)| name == "query" || (options.contains(&name.as_str()) && !value.is_empty()))
}

/// Parses and validates a query. `path` is what follows `/logs/`.
///
/// # Errors
/// The query is invalid.
pub(super) fn parse(parameters: &[(String, String)], path: &str) -> Result<NodeLogQuery, BadQuery> {
    let first = |name: &str| {
        let found = parameters.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
        found.filter(|value| !value.is_empty())
    };
    let time = |name: &str| moment(name, first(name));
    let (since, until) = (time("sinceTime")?, time("untilTime")?);
    let (lines, boot) = (number("tailLines", first("tailLines"))?, number("boot", first("boot"))?);
    let pattern = first("pattern").map(str::to_owned);
    let asked: Vec<&str> =
        parameters.iter().filter(|(name, _)| name == "query").map(|(_, value)| value.as_str()).collect();
    let names: Vec<&str> = asked.iter().copied().filter(|name| !name.trim().is_empty()).collect();
    if names.is_empty() && !asked.is_empty() {
        return Err(BadQuery::Undecodable("query: Invalid value: \"\": may not be empty".to_owned()));
    }
    let has_options = since.is_some() || until.is_some() || lines.is_some() || boot.is_some() || pattern.is_some();
    if !path.is_empty() {
        return Err(BadQuery::Invalid("path not allowed in query mode".to_owned()));
    }
    let mut problems = Vec::new();
    if let (Some(since), Some(until)) = (&since, &until)
        && until.nanos < since.nanos
    {
        problems.push("untilTime: Invalid value: must be after `sinceTime`".to_owned());
    }
    if boot.is_some_and(|boot| boot > 0) {
        problems.push("boot: Invalid value: must be less than 1".to_owned());
    }
    if lines.is_some_and(|lines| !(0..=MAX_LINES).contains(&lines)) {
        problems.push(format!("tailLines: Invalid value: must be between 0 and {MAX_LINES}, inclusive"));
    }
    if let Some(pattern) = &pattern
        && let Err(error) = Parser::new().parse(&with_literal_braces(pattern))
    {
        problems.push(format!("pattern: Invalid value: {}", error.kind()));
    }
    let file = names_problems(&names, has_options, &mut problems);
    match (problems.is_empty(), file) {
        (false, _) => Err(BadQuery::Invalid(aggregate(problems))),
        (true, Some(file)) => Ok(NodeLogQuery::File(file)),
        (true, None) => Ok(NodeLogQuery::Services(
            names.into_iter().map(str::to_owned).collect(),
            Options { since: since.map(|at| at.text), until: until.map(|at| at.text), lines, pattern, boot },
        )),
    }
}

/// Validates the names; returns the file, if they name one.
fn names_problems(names: &[&str], has_options: bool, problems: &mut Vec<String>) -> Option<String> {
    let (files, services): (Vec<&str>, Vec<&str>) = names.iter().partition(|name| name.contains(['/', '\\']));
    if names.is_empty() {
        problems.push("query: Required value: cannot be empty with options".to_owned());
    }
    if !files.is_empty() && !services.is_empty() {
        problems.push(format!("query: Invalid value: {names:?}: cannot specify a file and service"));
    }
    if files.len() > 1 {
        problems.push(format!("query: Invalid value: {files:?}: cannot specify more than one file"));
    }
    if !files.is_empty() && has_options {
        problems.push(format!("query: Invalid value: {files:?}: cannot specify file with options"));
    }
    if services.len() > MAX_SERVICES {
        problems.push(format!("query: Invalid value: {services:?}: length cannot exceed {MAX_SERVICES}"));
    }
    let is_fine = |c: char| c.is_ascii_alphanumeric() || "-_.:@".contains(c);
    for service in services.iter().filter(|name| name.len() > MAX_NAME || !name.chars().all(is_fine)) {
        problems.push(format!(
            "query: Invalid value: {service:?}: must only contain a-zA-Z-_.:0-9@ and at most {MAX_NAME} of them"
        ));
    }
    let file = files.first()?;
    if file.starts_with('/') || file.contains('\\') || file.split('/').any(|part| part == "..") {
        problems.push(format!("query: Invalid value: {file:?}: path escapes from parent"));
    }
    Some((*file).to_owned())
}

/// The pattern with a backslash before each brace that begins no repetition. Go and journalctl(1) take such a brace as
/// it is, as in a pattern for lines of JSON, and the parser refuses it.
fn with_literal_braces(pattern: &str) -> String {
    let mut out = String::with_capacity(pattern.len());
    let mut chars = pattern.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        if c == '{' && !is_repetition(&pattern[at + 1..]) {
            out.push('\\');
        }
        out.push(c);
        if c == '\\'
            && let Some((_, escaped)) = chars.next()
        {
            out.push(escaped);
            // The braces of `\p{Greek}` and `\x{7F}` belong to the escape.
            if matches!(escaped, 'p' | 'P' | 'x') {
                out.extend(chars.next_if(|(_, next)| *next == '{').map(|(_, next)| next));
            }
        }
    }
    out
}

/// Whether what follows a brace makes it a repetition: `2}`, `2,}` or `2,3}`.
fn is_repetition(rest: &str) -> bool {
    let Some((range, _)) = rest.split_once('}') else { return false };
    let (least, most) = range.split_once(',').unwrap_or((range, ""));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    is_number(least) && (most.is_empty() || is_number(most))
}

/// A time, and its text for journalctl.
struct Moment {
    nanos: i64,
    text: String,
}

fn moment(name: &str, value: Option<&str>) -> Result<Option<Moment>, BadQuery> {
    let Some(value) = value else { return Ok(None) };
    let bad = || BadQuery::Undecodable(format!("{name}: Invalid value: {value:?}: must be a time of RFC 3339"));
    let stamp = Stamp::parse(value.as_bytes()).ok_or_else(bad)?;
    let digits = |from: usize, to: usize| value.get(from..to).unwrap_or_default();
    let bare = |from: usize, to: usize| digits(from, to).strip_prefix('0').unwrap_or(digits(from, to)).to_owned();
    let date = format!("{}-{}-{}", digits(0, 4), bare(5, 7), bare(8, 10));
    let text = format!("{date} {}:{}:{}", digits(11, 13), bare(14, 16), bare(17, 19));
    Ok(Some(Moment { nanos: stamp.nanos, text }))
}

fn number(name: &str, value: Option<&str>) -> Result<Option<i64>, BadQuery> {
    let bad = |value| BadQuery::Undecodable(format!("{name}: Invalid value: {value:?}: must be an integer"));
    value.map(|value| value.parse().map_err(|_| bad(value))).transpose()
}

impl Options {
    /// No option is set.
    pub(super) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The arguments of journalctl.
    pub(super) fn arguments(&self, services: &[&str]) -> Vec<String> {
        let mut all: Vec<String> = ["--utc", "--no-pager", "--output=short-precise"].map(str::to_owned).into();
        all.extend(self.since.iter().map(|since| format!("--since={since}")));
        all.extend(self.until.iter().map(|until| format!("--until={until}")));
        if let Some(lines) = self.lines {
            all.extend(["--pager-end".to_owned(), format!("--lines={lines}")]);
        }
        all.extend(services.iter().map(|service| format!("--unit={service}")));
        all.extend(self.pattern.iter().map(|pattern| format!("--grep={pattern}")));
        if let Some(boot) = self.boot {
            all.extend(["--boot".to_owned(), boot.to_string()]);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(text: &str, path: &str) -> Result<NodeLogQuery, BadQuery> {
        let parameters = crate::server::answer::query_of(&format!("http://x/?{text}").parse().unwrap());
        assert!(is_query(&parameters), "{text}");
        parse(&parameters, path)
    }

    #[test]
    fn files_and_services() {
        assert_eq!(query("query=./syslog", ""), Ok(NodeLogQuery::File("./syslog".to_owned())));
        let Ok(NodeLogQuery::Services(names, options)) = query("query=kubelet&query=+&query=crio", "") else {
            panic!("services")
        };
        assert_eq!((names, options.is_empty()), (vec!["kubelet".to_owned(), "crio".to_owned()], true));
        assert!(!is_query(&[("tailLines".to_owned(), String::new())]));
    }

    #[test]
    fn arguments_of_journalctl() {
        let asked = "query=a&sinceTime=2026-01-02T03:04:05Z&untilTime=2026-11-12T13:14:15%2B01:00&tailLines=7&boot=-1&pattern=a.*b";
        let Ok(NodeLogQuery::Services(_, options)) = query(asked, "") else { panic!("services") };
        let expected = [
            "--utc",
            "--no-pager",
            "--output=short-precise",
            "--since=2026-1-2 03:4:5",
            "--until=2026-11-12 13:14:15",
            "--pager-end",
            "--lines=7",
            "--unit=a",
            "--grep=a.*b",
            "--boot",
            "-1",
        ];
        assert_eq!(options.arguments(&["a"]), expected);
    }

    #[test]
    fn braces_that_repeat_nothing_are_literal() {
        let find = |pattern: &str| {
            let parameters = [("query", "kubelet"), ("pattern", pattern)];
            parse(&parameters.map(|(name, value)| (name.to_owned(), value.to_owned())), "")
        };
        for good in [
            r#"{"level":"error""#,
            r#""code":\d+}"#,
            "{",
            "a{",
            "a{x}",
            "a{,2}",
            "a{2",
            "a{2}b{2,}c{2,3}",
            "[{}]",
            r"\{",
            r"\\{x",
            r"\b{x}",
            r"\p{Greek}\x{7F}\d{2}",
        ] {
            let Ok(NodeLogQuery::Services(_, options)) = find(good) else { panic!("{good} is refused") };
            assert_eq!(options.pattern.as_deref(), Some(good), "journalctl gets it as it is");
        }
        for bad in ["{2}", "a{3,2}", "(", "[", r"\x{zz}"] {
            assert!(matches!(find(bad), Err(BadQuery::Invalid(_))), "{bad}");
        }
    }

    #[test]
    fn invalid_requests_are_refused() {
        for bad in ["query=a&tailLines=x", "query=a&sinceTime=now", "query=a&boot=1.5", "query=&query=+"] {
            assert!(matches!(query(bad, ""), Err(BadQuery::Undecodable(_))), "{bad}");
        }
        let long = format!("query={}", "a".repeat(257));
        for bad in [
            "tailLines=5",
            "query=a&query=./b",
            "query=./a&query=./b",
            "query=./a&boot=0",
            "query=/x.log",
            "query=../../etc/shadow",
            "query=a\\b",
            "query=a&query=b&query=c&query=d&query=e",
            "query=a%20b",
            "query=%20a",
            &long,
            "query=a&sinceTime=2026-01-02T00:00:00Z&untilTime=2026-01-01T00:00:00Z",
            "query=a&boot=1",
            "query=a&tailLines=100001",
            "query=a&tailLines=-1",
            "query=a&pattern=(",
        ] {
            assert!(matches!(query(bad, ""), Err(BadQuery::Invalid(_))), "{bad}");
        }
        let long = format!("query={}", "a".repeat(256));
        for good in [
            "query=a&query=b&query=c&query=d",
            &long,
            "query=a&sinceTime=2026-01-01T00:00:00Z&untilTime=2026-01-01T00:00:00Z",
            "query=a&boot=0",
            "query=a&tailLines=100000",
            "query=a&tailLines=0",
        ] {
            assert!(matches!(query(good, ""), Ok(NodeLogQuery::Services(..))), "{good}");
        }
        let below = query("query=a&boot=1", "syslog");
        assert_eq!(below, Err(BadQuery::Invalid("path not allowed in query mode".to_owned())));
    }
}
