//! Answers without the content of `metadata.managedFields`.
//!
//! The agent uses none of it, and it is half the size of many objects. Any client that may update an object may write it,
//! also values that the agent's types cannot represent: a time after 9999-12-30T22:00:00Z, or deeper nesting than the
//! decoder allows. Without the content no call fails because of it.

use std::pin::Pin;
use std::task::Context;
use std::task::Poll;

use bytes::Bytes;
use hyper::body::Body;
use hyper::body::Frame;
use hyper::body::SizeHint;

/// How the list begins in the JSON of API servers, which has no blanks. In a string the quotes would be escaped.
const BEGIN: &[u8] = b"\"managedFields\":[";

/// A body in which every `managedFields` is an empty list. Blanks keep its length.
pub(super) struct WithoutManagedFields<B> {
    inner: B,
    scanner: Scanner,
}

impl<B> WithoutManagedFields<B> {
    pub(super) fn new(inner: B) -> Self {
        Self { inner, scanner: Scanner::default() }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for WithoutManagedFields<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let Self { inner, scanner } = self.get_mut();
        let frame = std::task::ready!(Pin::new(inner).poll_frame(cx));
        Poll::Ready(frame.map(|frame| frame.map(|frame| frame.map_data(|data| scanner.blank(data)))))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// Finds the content of the lists, byte by byte: frames of a body may begin anywhere.
#[derive(Default)]
struct Scanner {
    /// Outside of a list: how much of its beginning was seen.
    matched: usize,
    /// Open lists and objects, the list itself included; 0 outside.
    depth: u32,
    is_string: bool,
    is_escaped: bool,
}

impl Scanner {
    /// The next frame of the body.
    fn blank(&mut self, data: Bytes) -> Bytes {
        let mut blanked: Option<Vec<u8>> = None;
        for (index, byte) in data.iter().enumerate() {
            if self.is_content(*byte) {
                blanked.get_or_insert_with(|| data.to_vec())[index] = b' ';
            }
        }
        blanked.map_or(data, Bytes::from)
    }

    /// True if the next byte is between the brackets of a list.
    fn is_content(&mut self, byte: u8) -> bool {
        if self.depth == 0 {
            self.matched = if byte == BEGIN[self.matched] { self.matched + 1 } else { usize::from(byte == BEGIN[0]) };
            if self.matched == BEGIN.len() {
                *self = Self { depth: 1, ..Self::default() };
            }
            return false;
        }
        match byte {
            _ if self.is_escaped => self.is_escaped = false,
            b'\\' => self.is_escaped = true,
            b'"' => self.is_string = !self.is_string,
            b'[' | b'{' if !self.is_string => self.depth += 1,
            b']' | b'}' if !self.is_string => self.depth -= 1,
            _ => {}
        }
        self.depth > 0
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use serde_json::json;

    use super::*;

    /// The text in two frames.
    fn blanked(text: &str, first: usize) -> String {
        let (mut scanner, mut out) = (Scanner::default(), Vec::new());
        let (first, second) = text.as_bytes().split_at(first);
        for frame in [first, second] {
            out.extend_from_slice(&scanner.blank(Bytes::copy_from_slice(frame)));
        }
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn only_managed_fields_are_left_out_wherever_a_frame_begins() {
        let fields = json!([
            {"manager": "a\\\"]", "time": "9999-12-31T23:59:59Z", "fieldsV1": {"f:x": {"k:{\"]}\":[1]}": [{}]}}},
            {"manager": "\u{e9}"},
        ]);
        let object = |fields: &Value| json!({"metadata": {"managedFields": fields, "name": "a"}, "spec": {"x": [1]}});
        let table = [
            (object(&fields), object(&json!([]))),
            (json!([object(&fields), object(&fields)]), json!([object(&json!([])), object(&json!([]))])),
        ];
        let untouched = [
            object(&json!([])),
            object(&json!(null)),
            object(&json!("[1]")),
            json!({"data": fields, "managedFieldsToo": [1], "text": "\"managedFields\":[1]"}),
            json!(["managedFields", "\\\"managedFields\":[1]", "\"managedFields\\\":[1]"]),
        ];
        let untouched = untouched.into_iter().map(|value| (value.clone(), value));
        for (given, expected) in table.into_iter().chain(untouched) {
            let text = given.to_string();
            for first in 0..=text.len() {
                let out = blanked(&text, first);
                assert_eq!(out.len(), text.len(), "{text}");
                let out: Value = serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}"));
                assert_eq!(out, expected, "{text}, first frame of {first} bytes");
            }
        }
    }
}
