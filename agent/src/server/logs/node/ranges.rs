//! Parts of a file that a client requests, as Go's file server parses and sends them (RFC 9110, 14.2). Pure.

use axum::http::StatusCode;

/// A part of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ByteRange {
    pub(super) start: u64,
    pub(super) length: u64,
}

impl ByteRange {
    /// The value of `Content-Range`. As upstream, that of an empty part ends before it begins.
    fn content_range(self, size: u64) -> String {
        let last = i128::from(self.start) + i128::from(self.length) - 1;
        format!("bytes {}-{last}/{size}", self.start)
    }
}

/// Why no part is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum RangeError {
    /// The header is malformed.
    #[error("invalid range")]
    Invalid,
    /// All parts are behind the end of the file.
    #[error("invalid range: failed to overlap")]
    NoOverlap,
}

/// Parses the value of `Range` for a file of `size` bytes. The list is empty if the whole file is to be sent, as for parts
/// that are larger than the file in all.
///
/// # Errors
/// The value is malformed, or no part overlaps with the file.
pub(super) fn parse(value: &str, size: u64) -> Result<Vec<ByteRange>, RangeError> {
    let list = value.strip_prefix("bytes=").ok_or(RangeError::Invalid)?;
    let (mut ranges, mut is_any_behind) = (Vec::new(), false);
    for part in list.split(',').map(trimmed).filter(|part| !part.is_empty()) {
        match one(part, size)? {
            Some(range) => ranges.push(range),
            None => is_any_behind = true,
        }
    }
    if ranges.is_empty() && is_any_behind {
        return Err(RangeError::NoOverlap);
    }
    let total: u128 = ranges.iter().map(|range| u128::from(range.length)).sum();
    Ok(if total > u128::from(size) { Vec::new() } else { ranges })
}

/// One part of the list; `None` if it is behind the end of the file.
fn one(part: &str, size: u64) -> Result<Option<ByteRange>, RangeError> {
    let (start, end) = part.split_once('-').ok_or(RangeError::Invalid)?;
    let (start, end) = (trimmed(start), trimmed(end));
    if start.is_empty() {
        // The last bytes. A second sign is no number here, but below.
        let last = Some(end).filter(|end| !end.starts_with('-')).and_then(number).ok_or(RangeError::Invalid)?;
        let length = last.min(size);
        return Ok(Some(ByteRange { start: size - length, length }));
    }
    let start = number(start).ok_or(RangeError::Invalid)?;
    if start >= size {
        return Ok(None);
    }
    let last = match end {
        "" => size - 1,
        end => number(end).filter(|end| *end >= start).ok_or(RangeError::Invalid)?.min(size - 1),
    };
    Ok(Some(ByteRange { start, length: last - start + 1 }))
}

fn number(text: &str) -> Option<u64> {
    text.parse::<i64>().ok().and_then(|number| u64::try_from(number).ok())
}

fn trimmed(text: &str) -> &str {
    text.trim_matches([' ', '\t', '\n', '\r'])
}

/// A piece of a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// What is between parts of the file.
    Text(String),
    /// A part of the file.
    File(ByteRange),
}

impl Piece {
    fn length(&self) -> u64 {
        match self {
            Self::Text(text) => text.len() as u64,
            Self::File(range) => range.length,
        }
    }
}

/// A response with a file or parts of it. Its pieces are made one by one: a request may have tens of thousands of parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Selection {
    pub(super) status: StatusCode,
    pub(super) content_type: String,
    pub(super) content_range: Option<String>,
    /// The whole file or one part without a frame, several parts with one.
    ranges: Vec<ByteRange>,
    frame: Option<Frame>,
}

impl Selection {
    /// Of a file of `size` bytes. `boundary` separates several parts.
    pub(super) fn of(ranges: Vec<ByteRange>, content_type: &str, size: u64, boundary: &str) -> Self {
        let (whole, content_type) = (ByteRange { start: 0, length: size }, content_type.to_owned());
        let (status, content_range) = match ranges[..] {
            [] => (StatusCode::OK, None),
            [range] => (StatusCode::PARTIAL_CONTENT, Some(range.content_range(size))),
            _ => {
                let status = StatusCode::PARTIAL_CONTENT;
                let frame = Some(Frame { boundary: boundary.to_owned(), content_type, size });
                let content_type = format!("multipart/byteranges; boundary={boundary}");
                return Self { status, content_type, content_range: None, ranges, frame };
            }
        };
        let ranges = vec![ranges.first().copied().unwrap_or(whole)];
        Self { status, content_type, content_range, ranges, frame: None }
    }

    /// The piece of this number; `None` behind the last one.
    pub(super) fn piece(&self, number: usize) -> Option<Piece> {
        let Some(frame) = &self.frame else { return self.ranges.get(number).copied().map(Piece::File) };
        match (self.ranges.get(number / 2), number % 2) {
            (Some(range), 0) => Some(Piece::Text(frame.before(*range, number == 0))),
            (Some(range), _) => Some(Piece::File(*range)),
            (None, _) => (number == 2 * self.ranges.len()).then(|| Piece::Text(frame.end())),
        }
    }

    /// Bytes of the body.
    pub(super) fn length(&self) -> u64 {
        (0..).map_while(|number| self.piece(number)).map(|piece| piece.length()).sum()
    }
}

/// What surrounds several parts: `multipart/byteranges` (RFC 9110, 14.6).
#[derive(Clone, Debug, PartialEq, Eq)]
struct Frame {
    boundary: String,
    /// Of each part.
    content_type: String,
    /// Of the file, in bytes.
    size: u64,
}

impl Frame {
    fn before(&self, range: ByteRange, is_first: bool) -> String {
        let Self { boundary, content_type, size } = self;
        let (end, content_range) = (if is_first { "" } else { "\r\n" }, range.content_range(*size));
        let headers = format!("Content-Range: {content_range}\r\nContent-Type: {content_type}\r\n\r\n");
        format!("{end}--{boundary}\r\n{headers}")
    }

    fn end(&self) -> String {
        format!("\r\n--{}--\r\n", self.boundary)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_parsed_as_by_go() {
        let range = |start, length| ByteRange { start, length };
        for (value, expected) in [
            ("bytes=0-4", Ok(vec![range(0, 5)])),
            ("bytes=5-", Ok(vec![range(5, 5)])),
            ("bytes=-3", Ok(vec![range(7, 3)])),
            ("bytes=8-99", Ok(vec![range(8, 2)])),
            ("bytes=-99", Ok(vec![range(0, 10)])),
            ("bytes=-0", Ok(vec![range(10, 0)])),
            ("bytes= 0 - 1 ,, 3-4", Ok(vec![range(0, 2), range(3, 2)])),
            ("bytes=20-30,8-", Ok(vec![range(8, 2)])),
            ("bytes=0-8,2-4", Ok(vec![])),
            ("bytes=", Ok(vec![])),
            ("bytes=10-", Err(RangeError::NoOverlap)),
            ("bytes=10-12,20-", Err(RangeError::NoOverlap)),
            ("bytes=3-1", Err(RangeError::Invalid)),
            ("bytes=x-y", Err(RangeError::Invalid)),
            ("bytes=1-x", Err(RangeError::Invalid)),
            ("bytes=--1", Err(RangeError::Invalid)),
            ("bytes=-", Err(RangeError::Invalid)),
            ("bytes=4", Err(RangeError::Invalid)),
            ("bytes=0-1,4", Err(RangeError::Invalid)),
            ("bytes=0-9223372036854775808", Err(RangeError::Invalid)),
            ("lines=1-2", Err(RangeError::Invalid)),
        ] {
            assert_eq!(parse(value, 10), expected, "{value}");
        }
        assert_eq!(parse("bytes=0-", 0), Err(RangeError::NoOverlap));
        assert_eq!(parse("bytes=-5", 0), Ok(vec![range(0, 0)]));
        assert_eq!(range(0, 0).content_range(0), "bytes 0--1/0");
    }

    #[test]
    fn pieces_of_many_ranges_are_made_one_by_one() {
        let pieces = |selection: &Selection| (0..).map_while(|number| selection.piece(number)).collect::<Vec<_>>();
        // As many as the head of a request has room for. Empty ones are never larger than the file.
        let value = format!("bytes={}", "-0,".repeat(80_000));
        let many = Selection::of(parse(&value, 10).unwrap(), "text/plain", 10, "b");
        assert_eq!((many.ranges.len(), many.piece(160_001)), (80_000, None));
        assert_eq!(many.piece(160_000), Some(Piece::Text("\r\n--b--\r\n".to_owned())));
        assert_eq!(many.length(), pieces(&many).iter().map(Piece::length).sum::<u64>());
        let empty = Selection::of(Vec::new(), "text/plain", 0, "b");
        assert_eq!((pieces(&empty), empty.length()), (vec![Piece::File(ByteRange { start: 0, length: 0 })], 0));
        let one = Selection::of(vec![ByteRange { start: 7, length: 3 }], "text/plain", 10, "b");
        assert_eq!((pieces(&one).len(), one.length(), one.content_range.as_deref()), (1, 3, Some("bytes 7-9/10")));
    }
}
