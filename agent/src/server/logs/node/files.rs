//! The node's log directory, with the responses of Go's file server: listings, files, ranges.

use std::fmt::Write as _;
use std::io;
use std::path::Component;
use std::path::Path;
use std::path::PathBuf;
use std::time::SystemTime;

use axum::body::Body;
use axum::http::HeaderMap;
use axum::http::HeaderName;
use axum::http::HeaderValue;
use axum::http::StatusCode;
use axum::http::header;
use axum::response::IntoResponse as _;
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream;
use k8s_openapi::jiff::Timestamp;
use k8s_openapi::jiff::civil::DateTime;
use tokio::fs::File;
use tokio::io::AsyncReadExt as _;
use tokio::io::AsyncSeekExt as _;

use super::ranges;
use super::ranges::Piece;
use super::ranges::RangeError;
use super::ranges::Selection;
use crate::filesystem;

/// Bytes per read.
const PIECE: usize = 16 * 1024;
/// The forms of dates in requests (RFC 9110, 5.6.7); the first one is that of responses.
const DATE_FORMATS: [&str; 3] = ["%a, %d %b %Y %H:%M:%S GMT", "%A, %d-%b-%y %H:%M:%S GMT", "%a %b %e %H:%M:%S %Y"];

/// The file in `root` that `path` names; `None` if the path contains `..`.
pub(super) fn below(root: &Path, path: &str) -> Option<PathBuf> {
    let path = Path::new(path.trim_start_matches('/'));
    let inside = path.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    (inside && !path.as_os_str().as_encoded_bytes().contains(&0)).then(|| root.join(path))
}

/// Opens a regular file. A container that mounts the directory can put a pipe in its place, which would be waited for.
///
/// # Errors
/// It cannot be opened, or is no regular file.
async fn open_regular(path: &Path) -> io::Result<File> {
    let path = path.to_owned();
    filesystem::blocking(move || filesystem::open_regular(&path)).await.map(File::from_std)
}

/// Opens a regular file below `root`; `None` if it is a directory. A container that mounts `root` can put a link to any file
/// of the node there: links that lead out of it are not followed.
///
/// # Errors
/// It cannot be opened, is neither a regular file nor a directory, or lies outside.
pub(super) async fn open_below(root: &Path, name: &str) -> io::Result<Option<File>> {
    let (root, name) = (root.to_owned(), PathBuf::from(name));
    let opened = filesystem::blocking(move || {
        let named = filesystem::open_below(&root, &name)?;
        let is_directory = std::fs::File::from(named.try_clone()?).metadata()?.is_dir();
        if is_directory { Ok(None) } else { filesystem::reopen_regular(named).map(Some) }
    });
    Ok(opened.await?.map(File::from_std))
}

/// Finds a file or directory below `root`, as [`open_below`] does.
///
/// # Errors
/// There is none, or it lies outside.
pub(super) async fn find_below(root: &Path, name: &str) -> io::Result<()> {
    let (root, name) = (root.to_owned(), PathBuf::from(name));
    filesystem::blocking(move || filesystem::open_below(&root, &name).map(drop)).await
}

/// Responds with the file or directory that `path` names below `root`, or, as Go's file server does, with a redirect: the
/// path of a directory ends in a slash, so that the links of its listing lead into it, and that of a file does not.
pub(super) async fn serve(root: &Path, path: &str, query: Option<&str>, headers: &HeaderMap) -> Response {
    let trimmed = path.trim_end_matches('/');
    let Some(place) = below(root, trimmed) else { return missing() };
    let is_directory = tokio::fs::metadata(&place).await.map(|meta| meta.is_dir());
    let name = encoded(trimmed.rsplit('/').next().unwrap_or_default());
    let to = match (is_directory, path.ends_with('/')) {
        (Ok(true), false) if !trimmed.is_empty() => format!("{name}/"),
        (Ok(false), true) => format!("../{name}"),
        _ => return show(Some(place), headers).await,
    };
    let location = match query {
        Some(query) => format!("{to}?{query}"),
        None => to,
    };
    (StatusCode::MOVED_PERMANENTLY, [(header::LOCATION, location)]).into_response()
}

/// Responds with the file or directory at `place`.
pub(super) async fn show(place: Option<PathBuf>, headers: &HeaderMap) -> Response {
    let Some(place) = place else { return missing() };
    let shown = match tokio::fs::metadata(&place).await {
        Ok(meta) if meta.is_dir() => match open_regular(&place.join("index.html")).await {
            Ok(index) => file(index, Path::new("index.html"), headers).await,
            Err(_) => listing(&place).await,
        },
        Ok(meta) if meta.is_file() => match open_regular(&place).await {
            Ok(opened) => file(opened, &place, headers).await,
            Err(error) => Err(error),
        },
        // Reading a device or pipe might never end.
        Ok(_) => return forbidden(),
        Err(error) => Err(error),
    };
    shown.unwrap_or_else(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => missing(),
        io::ErrorKind::PermissionDenied => forbidden(),
        _ => (StatusCode::INTERNAL_SERVER_ERROR, "500 Internal Server Error\n").into_response(),
    })
}

fn missing() -> Response {
    (StatusCode::NOT_FOUND, "404 page not found\n").into_response()
}

fn forbidden() -> Response {
    (StatusCode::FORBIDDEN, "403 Forbidden\n").into_response()
}

async fn listing(folder: &Path) -> io::Result<Response> {
    let mut names = Vec::new();
    let mut entries = tokio::fs::read_dir(folder).await?;
    while let Some(entry) = entries.next_entry().await? {
        let mut name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type().await.is_ok_and(|kind| kind.is_dir()) {
            name.push('/');
        }
        names.push(name);
    }
    names.sort();
    let mut page = "<!doctype html>\n<meta name=\"viewport\" content=\"width=device-width\">\n<pre>\n".to_owned();
    for name in names {
        // Writing to a string cannot fail.
        let _ = writeln!(page, "<a href=\"{}\">{}</a>", in_link(&name), in_text(&name));
    }
    page.push_str("</pre>\n");
    Ok(([(header::CONTENT_TYPE, "text/html; charset=utf-8")], page).into_response())
}

/// A name as a relative reference. Colons are encoded too, so that no name is parsed as a URL scheme.
fn encoded(name: &str) -> String {
    let mut out = String::new();
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~/$&+=@".contains(&byte) {
            out.push(char::from(byte));
        } else {
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

/// A name as the target of a relative link.
fn in_link(name: &str) -> String {
    in_text(&encoded(name))
}

fn in_text(name: &str) -> String {
    let mut out = String::new();
    for c in name.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

async fn file(file: File, path: &Path, headers: &HeaderMap) -> io::Result<Response> {
    let meta = file.metadata().await?;
    let (text, size) = (http_date(meta.modified()?), meta.len());
    let modified = parse_date(&text);
    let last_modified = [(header::LAST_MODIFIED, text)];
    if date_in(headers, header::IF_MODIFIED_SINCE).is_some_and(|since| modified.is_some_and(|at| at <= since)) {
        return Ok((StatusCode::NOT_MODIFIED, last_modified).into_response());
    }
    // A part of the file as it is now does not complete what the client has of an earlier one.
    let is_same = !headers.contains_key(header::IF_RANGE) || date_in(headers, header::IF_RANGE) == modified;
    let range = headers.get(header::RANGE).filter(|_| is_same);
    let ranges = range.map_or(Ok(Vec::new()), |range| ranges::parse(&String::from_utf8_lossy(range.as_bytes()), size));
    let ranges = match ranges {
        // As upstream: some clients ask for a part of every file to limit its size.
        Err(RangeError::NoOverlap) if size == 0 => Vec::new(),
        Err(error) => return Ok(unsatisfiable(error, size)),
        Ok(ranges) => ranges,
    };
    let boundary = format!("{:032x}", fastrand::u128(..));
    let selection = Selection::of(ranges, kind(path), size, &boundary);
    let mut response = (selection.status, last_modified).into_response();
    let out = response.headers_mut();
    let mut set = |name, value: &str| HeaderValue::from_str(value).ok().and_then(|value| out.insert(name, value));
    set(header::CONTENT_TYPE, &selection.content_type);
    set(header::CONTENT_LENGTH, &selection.length().to_string());
    set(header::ACCEPT_RANGES, "bytes");
    if let Some(content_range) = &selection.content_range {
        set(header::CONTENT_RANGE, content_range);
    }
    *response.body_mut() = body(file, selection);
    Ok(response)
}

fn unsatisfiable(error: RangeError, size: u64) -> Response {
    let mut response = (StatusCode::RANGE_NOT_SATISFIABLE, format!("{error}\n")).into_response();
    if error == RangeError::NoOverlap
        && let Ok(range) = HeaderValue::from_str(&format!("bytes */{size}"))
    {
        response.headers_mut().insert(header::CONTENT_RANGE, range);
    }
    response
}

/// The pieces one after the other; those of the file are read as the client receives them.
fn body(file: File, selection: Selection) -> Body {
    let begin = (file, selection, 0_usize, 0_u64);
    Body::from_stream(stream::try_unfold(begin, |(mut file, selection, mut number, mut left)| async move {
        while left == 0 {
            let piece = selection.piece(number);
            number += 1;
            match piece {
                None => return Ok::<_, io::Error>(None),
                Some(Piece::Text(text)) => return Ok(Some((Bytes::from(text), (file, selection, number, 0)))),
                Some(Piece::File(range)) => {
                    file.seek(io::SeekFrom::Start(range.start)).await?;
                    left = range.length;
                }
            }
        }
        let mut chunk = vec![0; usize::try_from(left).map_or(PIECE, |left| left.min(PIECE))];
        let read = file.read(&mut chunk).await?;
        chunk.truncate(read);
        // A file that was truncated meanwhile ends the response.
        Ok((read > 0).then(|| (Bytes::from(chunk), (file, selection, number, left - read as u64))))
    }))
}

fn kind(path: &Path) -> &'static str {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("html" | "htm") => "text/html; charset=utf-8",
        Some("json") => "application/json",
        Some("gz") => "application/gzip",
        Some("xz" | "journal" | "zst") => "application/octet-stream",
        _ => "text/plain; charset=utf-8",
    }
}

fn http_date(time: SystemTime) -> String {
    let time = Timestamp::try_from(time).unwrap_or(Timestamp::UNIX_EPOCH);
    time.strftime(DATE_FORMATS[0]).to_string()
}

/// A date of a request, in UTC; `None` if it has none that can be parsed.
fn date_in(headers: &HeaderMap, name: HeaderName) -> Option<DateTime> {
    parse_date(headers.get(name)?.to_str().ok()?)
}

fn parse_date(text: &str) -> Option<DateTime> {
    DATE_FORMATS.iter().find_map(|format| DateTime::strptime(format, text).ok())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http_body_util::BodyExt as _;

    use super::*;

    #[test]
    fn paths_cannot_leave_the_directory() {
        let root = Path::new("/var/log");
        for (path, expected) in [
            ("syslog", Some("/var/log/syslog")),
            ("", Some("/var/log/")),
            ("/pods/x", Some("/var/log/pods/x")),
            ("./a", Some("/var/log/a")),
            ("../shadow", None),
            ("a/../../shadow", None),
            ("a\0b", None),
        ] {
            assert_eq!(below(root, path), expected.map(PathBuf::from), "{path:?}");
        }
    }

    #[test]
    fn names_are_escaped() {
        assert_eq!(in_link("a b\"<:%/"), "a%20b%22%3C%3A%25/");
        assert_eq!(in_text("a&b<script>\"'"), "a&amp;b&lt;script&gt;&#34;&#39;");
        assert_eq!(http_date(SystemTime::UNIX_EPOCH), "Thu, 01 Jan 1970 00:00:00 GMT");
    }

    async fn get(place: PathBuf, range: Option<&str>) -> (u16, String) {
        let headers = range.map(|range| (header::RANGE, range.parse().unwrap())).into_iter().collect();
        let response = show(Some(place), &headers).await;
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8_lossy(&body).into_owned())
    }

    #[tokio::test]
    async fn folders_and_files() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("b.log"), "0123456789").unwrap();
        std::fs::create_dir(dir.path().join("a")).unwrap();
        let (status, page) = get(dir.path().to_owned(), None).await;
        let begin = "<!doctype html>\n<meta name=\"viewport\" content=\"width=device-width\">\n<pre>\n";
        let expected = format!("{begin}<a href=\"a/\">a/</a>\n<a href=\"b.log\">b.log</a>\n</pre>\n");
        assert_eq!((status, page), (200, expected));
        let log = dir.path().join("b.log");
        assert_eq!(get(log.clone(), None).await, (200, "0123456789".to_owned()));
        assert_eq!(get(log.clone(), Some("bytes=2-4")).await, (206, "234".to_owned()));
        let outside = (416, "invalid range: failed to overlap\n".to_owned());
        assert_eq!(get(log.clone(), Some("bytes=20-")).await, outside);
        assert_eq!(get(log, Some("lines=1-2")).await, (416, "invalid range\n".to_owned()));
        assert_eq!(get(dir.path().join("none"), None).await, (404, "404 page not found\n".to_owned()));
        assert_eq!(get("/dev/zero".into(), None).await, (403, "403 Forbidden\n".to_owned()), "it has no end");
        std::fs::write(dir.path().join("a/index.html"), "page").unwrap();
        assert_eq!(get(dir.path().join("a"), None).await, (200, "page".to_owned()));
        std::fs::write(dir.path().join("empty.log"), "").unwrap();
        assert_eq!(get(dir.path().join("empty.log"), Some("bytes=0-99")).await, (200, String::new()));
    }

    #[tokio::test]
    async fn headers_describe_what_is_sent() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("b.log");
        std::fs::write(&log, "0123456789").unwrap();
        let written = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        std::fs::File::options().write(true).open(&log).unwrap().set_modified(written).unwrap();
        let (then, other) = ("Fri, 15 Jan 2027 08:00:00 GMT", "Fri, 15 Jan 2027 07:59:59 GMT");
        let (later, old_form) = ("Fri, 15 Jan 2100 08:00:00 GMT", "Friday, 15-Jan-27 08:00:00 GMT");
        let (range, since, same) = (header::RANGE, header::IF_MODIFIED_SINCE, header::IF_RANGE);
        for (asked, status, length, content_range) in [
            (vec![], 200, Some("10"), None),
            (vec![(&since, other)], 200, Some("10"), None),
            (vec![(&since, then)], 304, None, None),
            (vec![(&since, later)], 304, None, None),
            (vec![(&since, old_form)], 304, None, None),
            (vec![(&since, "Fri Jan 15 08:00:00 2027")], 304, None, None),
            (vec![(&since, "yesterday")], 200, Some("10"), None),
            (vec![(&range, "bytes=2-4")], 206, Some("3"), Some("bytes 2-4/10")),
            (vec![(&range, "bytes=5-"), (&same, then)], 206, Some("5"), Some("bytes 5-9/10")),
            (vec![(&range, "bytes=5-"), (&same, old_form)], 206, Some("5"), Some("bytes 5-9/10")),
            (vec![(&range, "bytes=5-"), (&same, other)], 200, Some("10"), None),
            (vec![(&range, "bytes=5-"), (&same, "\"tag\"")], 200, Some("10"), None),
            (vec![(&range, "bytes=10-")], 416, None, Some("bytes */10")),
            (vec![(&range, "bytes=x")], 416, None, None),
        ] {
            let headers = asked.iter().map(|(name, value)| ((*name).clone(), value.parse().unwrap())).collect();
            let response = show(Some(log.clone()), &headers).await;
            let sent = |name: header::HeaderName| response.headers().get(name).map(|value| value.to_str().unwrap());
            assert_eq!(response.status().as_u16(), status, "{asked:?}");
            let is_file = length.is_some();
            let sent_length = sent(header::CONTENT_LENGTH).filter(|_| is_file);
            assert_eq!((sent_length, sent(header::CONTENT_RANGE)), (length, content_range), "{asked:?}");
            assert_eq!(sent(header::LAST_MODIFIED), Some(then).filter(|_| status != 416), "{asked:?}");
            assert_eq!(sent(header::ACCEPT_RANGES), Some("bytes").filter(|_| is_file), "{asked:?}");
        }
    }

    #[tokio::test]
    async fn several_ranges_are_sent_in_parts() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("b.log");
        std::fs::write(&log, "0123456789").unwrap();
        let headers = [(header::RANGE, HeaderValue::from_static("bytes=0-1,-3"))].into_iter().collect();
        let response = show(Some(log), &headers).await;
        let content_range = response.headers().get(header::CONTENT_RANGE);
        assert_eq!((response.status(), content_range), (StatusCode::PARTIAL_CONTENT, None));
        let kind = response.headers()[header::CONTENT_TYPE].to_str().unwrap().to_owned();
        let boundary = kind.strip_prefix("multipart/byteranges; boundary=").unwrap();
        let length = response.headers()[header::CONTENT_LENGTH].to_str().unwrap().to_owned();
        let text = response.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(text.len().to_string(), length);
        let part = |range: &str, content: &str| {
            let kind = "text/plain; charset=utf-8";
            format!("--{boundary}\r\nContent-Range: bytes {range}/10\r\nContent-Type: {kind}\r\n\r\n{content}\r\n")
        };
        assert_eq!(text, format!("{}{}--{boundary}--\r\n", part("0-1", "01"), part("7-9", "789")));
    }

    #[tokio::test]
    async fn a_file_that_changes_meanwhile_is_sent_up_to_the_length_of_the_header() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("b.log");
        for (later, sent) in [("0123456789and more", "0123456789"), ("0123", "0123")] {
            std::fs::write(&log, "0123456789").unwrap();
            let response = show(Some(log.clone()), &HeaderMap::new()).await;
            assert_eq!(response.headers()[header::CONTENT_LENGTH], "10");
            std::fs::write(&log, later).unwrap();
            assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), sent);
        }
    }

    #[tokio::test]
    async fn a_pipe_in_place_of_an_index_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        nix::unistd::mkfifo(&dir.path().join("index.html"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let shown = tokio::time::timeout(Duration::from_secs(30), get(dir.path().to_owned(), None));
        let (status, page) = shown.await.expect("no wait for a writer");
        assert!(status == 200 && page.contains("index.html"), "{status} {page}");
    }
}
