//! Parameters of streams. Pure.

use std::num::ParseIntError;

use axum::http::HeaderMap;
use axum::http::header;

/// The requested streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Streams {
    pub(super) stdin: bool,
    pub(super) stdout: bool,
    pub(super) stderr: bool,
    pub(super) tty: bool,
}

/// The error of a request without streams.
const NO_STREAM: &str = "you must specify at least 1 of stdin, stdout, stderr";

impl Streams {
    /// From query and form.
    ///
    /// # Errors
    /// The text for the client: no stream is asked for.
    pub(super) fn parse(parameters: &[(String, String)]) -> Result<Self, String> {
        let first = |name: &str| parameters.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
        let set = |name: &str| first(name) == Some("1");
        let tty = set("tty");
        // A terminal has one output.
        let stderr = set("error") && !tty;
        let streams = Self { stdin: set("input"), stdout: set("output"), stderr, tty };
        if streams.stdin || streams.stdout || streams.stderr { Ok(streams) } else { Err(NO_STREAM.to_owned()) }
    }
}

/// The command to run, argument by argument.
pub(super) fn command(query: &[(String, String)]) -> Vec<String> {
    query.iter().filter(|(key, _)| key == "command").map(|(_, value)| value.clone()).collect()
}

/// The ports of a port-forward over WebSocket.
///
/// # Errors
/// The text for the client.
pub(super) fn ports(query: &[(String, String)]) -> Result<Vec<i32>, String> {
    let values: Vec<&str> = query.iter().filter(|(key, _)| key == "port").map(|(_, value)| value.as_str()).collect();
    if values.is_empty() {
        return Err("query parameter \"port\" is required".to_owned());
    }
    let mut ports = Vec::new();
    for value in values {
        if value.is_empty() {
            return Err("query parameter \"port\" cannot be empty".to_owned());
        }
        for one in value.split(',') {
            let unreadable = |why: &str| format!("unable to parse \"{value}\" as a port: {why}");
            // As upstream.
            if one.starts_with('+') {
                return Err(unreadable("a port has no sign"));
            }
            let port: u16 = one.parse().map_err(|error: ParseIntError| unreadable(&error.to_string()))?;
            if port == 0 {
                return Err(format!("port \"{value}\" must be > 0"));
            }
            ports.push(i32::from(port));
        }
    }
    Ok(ports)
}

/// Whether the client requests an upgrade.
pub(super) fn asks_for_upgrade(headers: &HeaderMap) -> bool {
    has_word(headers, &header::CONNECTION, "upgrade")
}

/// Whether the client requests a WebSocket.
pub(super) fn asks_for_websocket(headers: &HeaderMap) -> bool {
    asks_for_upgrade(headers) && has_word(headers, &header::UPGRADE, "websocket")
}

/// Whether the peer accepts SPDY/3.1.
pub(super) fn names_spdy(headers: &HeaderMap) -> bool {
    has_word(headers, &header::UPGRADE, "spdy/3.1")
}

fn has_word(headers: &HeaderMap, name: &header::HeaderName, word: &str) -> bool {
    headers
        .get_all(name)
        .iter()
        .any(|value| value.to_str().is_ok_and(|value| value.to_ascii_lowercase().contains(word)))
}

#[cfg(test)]
mod tests {
    use super::super::super::answer::query_of;
    use super::*;

    fn query(text: &str) -> Vec<(String, String)> {
        query_of(&format!("http://x/?{text}").parse().unwrap())
    }

    #[test]
    fn streams() {
        let parse = |text: &str| Streams::parse(&query(text));
        let all = Streams { stdin: true, stdout: true, stderr: true, tty: false };
        assert_eq!(parse("input=1&output=1&error=1"), Ok(all));
        assert_eq!(parse("input=1&output=1&error=1&tty=1"), Ok(Streams { stderr: false, tty: true, ..all }));
        for none in ["", "input=true", "stdout=1", "tty=1", "tty=1&error=1", "output=0&output=1"] {
            assert_eq!(parse(none), Err(NO_STREAM.to_owned()), "{none}");
        }
    }

    #[test]
    fn commands_keep_their_arguments() {
        assert_eq!(command(&query("command=sh&command=-c&command=a+b&command=")), ["sh", "-c", "a b", ""]);
    }

    #[test]
    fn ports_of_websockets() {
        assert_eq!(ports(&query("port=80,443&port=1")), Ok(vec![80, 443, 1]));
        for (text, expected) in [
            ("", "query parameter \"port\" is required"),
            ("port=", "query parameter \"port\" cannot be empty"),
            ("port=1,0", "port \"1,0\" must be > 0"),
        ] {
            assert_eq!(ports(&query(text)), Err(expected.to_owned()));
        }
        for bad in ["port=a", "port=65536", "port=1,", "port=-1", "port=%2B1"] {
            assert!(ports(&query(bad)).unwrap_err().starts_with("unable to parse \""), "{bad}");
        }
    }
}
