//! Exposition of metrics: text or delimited protobuf, compressed if the client accepts it.

use std::io;
use std::io::Write;

use axum::extract::Request;
use axum::http::HeaderMap;
use axum::http::HeaderName;
use axum::http::StatusCode;
use axum::http::header;
use axum::response::IntoResponse;
use axum::response::Response;
use flate2::Compression;
use flate2::write::GzEncoder;
use prometheus::proto::MetricFamily;

use super::health::text;
use crate::metrics::Metrics;
use crate::metrics::PROTOBUF_FORMAT;
use crate::metrics::TEXT_FORMAT;
use crate::metrics::append_text;
use crate::metrics::encode_protobuf;

const PROCESS_START: HeaderName = HeaderName::from_static("process-start-time-unix");

/// What the client of a request accepts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Accepted {
    protobuf: bool,
    gzip: bool,
}

impl Accepted {
    /// As the headers of the request say.
    pub(super) fn by(request: &Request) -> Self {
        let headers = request.headers();
        Self { protobuf: wants_protobuf(headers), gzip: reads_gzip(headers) }
    }
}

/// The families, or 500 if they cannot be encoded. Each is encoded and dropped before the next one is taken.
pub(super) fn strict(
    metrics: &Metrics,
    accepted: Accepted,
    families: impl IntoIterator<Item = MetricFamily>,
) -> Response {
    strict_encoded(metrics, accepted, |protobuf, page| encode(protobuf, families, page))
}

/// As [`strict`], with a page that is written by the caller: as protobuf, or else as text.
pub(super) fn strict_encoded(
    metrics: &Metrics,
    Accepted { protobuf, gzip }: Accepted,
    write: impl FnOnce(bool, &mut Page) -> Result<(), prometheus::Error>,
) -> Response {
    let mut page = Page::new(gzip);
    let body = match write(protobuf, &mut page).and_then(|()| page.finish().map_err(prometheus::Error::from)) {
        Ok(body) => body,
        Err(error) => {
            let body = format!("An error has occurred while serving metrics:\n\n{error}\n");
            return text((StatusCode::INTERNAL_SERVER_ERROR, body));
        }
    };
    let kind = if protobuf { PROTOBUF_FORMAT } else { TEXT_FORMAT };
    let head = [(header::CONTENT_TYPE, kind.to_owned()), (PROCESS_START, whole_seconds(metrics.process_start))];
    if gzip { (head, [(header::CONTENT_ENCODING, "gzip")], body).into_response() } else { (head, body).into_response() }
}

/// As upstream writes a time in a header.
fn whole_seconds(time: f64) -> String {
    time.floor().to_string()
}

/// Writes all families in one format. Each is encoded and dropped before the next one is taken.
///
/// # Errors
/// A family cannot be encoded.
pub(super) fn encode(
    protobuf: bool,
    families: impl IntoIterator<Item = MetricFamily>,
    page: &mut Page,
) -> Result<(), prometheus::Error> {
    let mut text = Vec::new();
    for family in families {
        if protobuf {
            page.write_all(&encode_protobuf(&[family]))?;
        } else {
            append_text(&mut text, &[family])?;
            page.write_all(&text)?;
            text.clear();
        }
    }
    Ok(())
}

/// The body of a response, compressed while it is written: that of a full node is megabytes of text.
#[derive(Debug)]
pub(super) enum Page {
    Plain(Vec<u8>),
    Compressed(GzEncoder<Vec<u8>>),
}

impl Page {
    fn new(gzip: bool) -> Self {
        if gzip { Self::Compressed(GzEncoder::new(Vec::new(), Compression::fast())) } else { Self::Plain(Vec::new()) }
    }

    fn finish(self) -> io::Result<Vec<u8>> {
        match self {
            Self::Plain(page) => Ok(page),
            Self::Compressed(page) => page.finish(),
        }
    }
}

impl Write for Page {
    fn write(&mut self, part: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(page) => page.write(part),
            Self::Compressed(page) => page.write(part),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(page) => page.flush(),
            Self::Compressed(page) => page.flush(),
        }
    }
}

/// The members of a list header, with their parameters.
fn members(headers: &HeaderMap, name: HeaderName) -> Vec<(String, Vec<(String, String)>)> {
    let values = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    let parameter = |text: &str| {
        let (name, value) = text.split_once('=')?;
        Some((name.trim().to_ascii_lowercase(), value.trim().trim_matches('"').to_owned()))
    };
    values
        .flat_map(|value| value.split(','))
        .map(|member| {
            let mut parts = member.split(';');
            let name = parts.next().unwrap_or_default().trim().to_ascii_lowercase();
            (name, parts.filter_map(parameter).collect())
        })
        .collect()
}

fn parameter<'a>(parameters: &'a [(String, String)], name: &str) -> Option<&'a str> {
    parameters.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
}

fn quality(parameters: &[(String, String)]) -> f64 {
    parameter(parameters, "q").map_or(1.0, |q| q.parse().unwrap_or(0.0))
}

/// Whether the client prefers delimited protobuf to text.
fn wants_protobuf(headers: &HeaderMap) -> bool {
    // A type that is not named has quality 0.
    let (mut text, mut protobuf) = (0.0_f64, 0.0_f64);
    for (name, parameters) in members(headers, header::ACCEPT) {
        let (q, is) = (quality(&parameters), |key: &str, wanted: &str| parameter(&parameters, key) == Some(wanted));
        match name.as_str() {
            "application/vnd.google.protobuf"
                if is("proto", "io.prometheus.client.MetricFamily") && is("encoding", "delimited") =>
            {
                protobuf = protobuf.max(q);
            }
            "text/plain" if matches!(parameter(&parameters, "version"), None | Some("0.0.4")) => text = text.max(q),
            _ => {}
        }
    }
    protobuf > 0.0 && protobuf >= text
}

/// Whether the client accepts gzip.
fn reads_gzip(headers: &HeaderMap) -> bool {
    let reads = |(name, parameters): &(String, Vec<(String, String)>)| name == "gzip" && quality(parameters) > 0.0;
    members(headers, header::ACCEPT_ENCODING).iter().any(reads)
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use flate2::read::GzDecoder;

    use super::*;
    use crate::metrics::encode_text;

    fn headers(name: HeaderName, value: &str) -> HeaderMap {
        [(name, value.parse().expect("a header"))].into_iter().collect()
    }

    #[test]
    fn formats() {
        let protobuf = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited";
        let wants = |accept: &str| wants_protobuf(&headers(header::ACCEPT, accept));
        assert!(wants(protobuf));
        assert!(wants(&format!("{protobuf};q=0.7,text/plain;version=0.0.4;q=0.3")));
        assert!(!wants(&format!("{protobuf};q=0.2,text/plain;version=0.0.4;q=0.3")));
        assert!(!wants("application/vnd.google.protobuf;proto=other;encoding=delimited"));
        assert!(!wants("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"));
        assert!(!wants_protobuf(&HeaderMap::new()));
    }

    #[test]
    fn the_start_of_the_process_is_a_whole_number() {
        assert_eq!(whole_seconds(1_767_225_600.87), "1767225600");
    }

    #[test]
    fn compression() {
        for (accept, expected) in [("gzip", true), ("deflate, gzip;q=0.5", true), ("gzip;q=0", false), ("br", false)] {
            assert_eq!(reads_gzip(&headers(header::ACCEPT_ENCODING, accept)), expected, "{accept}");
        }
    }

    async fn body(response: Response) -> Vec<u8> {
        axum::body::to_bytes(response.into_body(), usize::MAX).await.expect("a body in memory").to_vec()
    }

    #[tokio::test]
    async fn each_format_is_that_of_all_families_at_once() {
        let metrics = Metrics::new();
        let families = metrics.gather();
        let (text, protobuf) = (encode_text(&families).expect("text"), encode_protobuf(&families));
        for (is_protobuf, expected) in [(false, text), (true, protobuf)] {
            for gzip in [false, true] {
                let response = strict(&metrics, Accepted { protobuf: is_protobuf, gzip }, families.clone());
                let encoding = response.headers().get(header::CONTENT_ENCODING).cloned();
                assert_eq!(encoding.as_ref().map(|name| name.as_bytes()), gzip.then_some(b"gzip".as_slice()));
                let (mut page, mut unpacked) = (body(response).await, Vec::new());
                if gzip {
                    GzDecoder::new(&page[..]).read_to_end(&mut unpacked).expect("gzip");
                    page = unpacked;
                }
                assert!(page == expected, "protobuf: {is_protobuf}, gzip: {gzip}");
            }
        }
    }

    #[tokio::test]
    async fn an_error_after_a_part_of_the_page_is_the_whole_response() {
        let metrics = Metrics::new();
        for gzip in [false, true] {
            // The encoder rejects a family without a value.
            let families = metrics.gather().into_iter().chain([MetricFamily::default()]);
            let response = strict(&metrics, Accepted { protobuf: false, gzip }, families);
            assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
            assert_eq!(response.headers().get(header::CONTENT_ENCODING), None, "gzip: {gzip}");
            assert!(body(response).await.starts_with(b"An error has occurred while serving metrics:\n\n"));
        }
    }

    #[test]
    fn a_page_is_the_same_in_parts_and_compressed() {
        let part = "# HELP a a\n".repeat(1000);
        let body = |gzip: bool| {
            let mut page = Page::new(gzip);
            (0..100).for_each(|_| page.write_all(part.as_bytes()).expect("in memory"));
            page.finish().expect("in memory")
        };
        let (plain, compressed, mut text) = (body(false), body(true), String::new());
        assert!(compressed.len() < plain.len() / 20, "{} bytes", compressed.len());
        GzDecoder::new(&compressed[..]).read_to_string(&mut text).expect("gzip");
        assert!(text == part.repeat(100) && plain == text.as_bytes());
    }
}
