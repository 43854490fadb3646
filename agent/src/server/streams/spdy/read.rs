//! Parses incoming frames from a buffer. Pure.

use bytes::Buf as _;
use bytes::Bytes;
use bytes::BytesMut;

use super::FIN;
use super::GOAWAY;
use super::HEADERS;
use super::PING;
use super::RST_STREAM;
use super::SYN_REPLY;
use super::SYN_STREAM;
use super::VERSION;

const HEAD: usize = 8;
/// The numbers at the beginning of a control frame's payload, of all that are read.
const NUMBERS: usize = 8;

/// An incoming frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    /// Data or a part of it; `last` if it ends the stream.
    Data { stream: u32, bytes: Bytes, last: bool },
    /// SYN_REPLY or HEADERS of a stream; `last` if it ends the stream.
    Reply { stream: u32, last: bool },
    /// The peer opened a stream.
    Open { stream: u32 },
    /// The peer reset a stream.
    Reset { stream: u32 },
    /// A ping, or the answer to one.
    Ping { id: u32 },
    /// The peer accepts no more streams.
    GoAway,
}

/// The input is not SPDY.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum FrameError {
    #[error("a frame of version {0} instead of 3")]
    Version(u16),
    #[error("a frame of kind {kind} with {length} bytes, which are too few")]
    Short { kind: u16, length: usize },
}

/// Parses frames from a buffer.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    payload: Payload,
}

/// The rest of the present frame.
#[derive(Debug, Default)]
enum Payload {
    #[default]
    None,
    /// Ignored payload.
    Skip(usize),
    Data {
        stream: u32,
        left: usize,
        last: bool,
    },
}

impl Frames {
    /// The next frame, or a part of a data frame; `None` if more input is needed. Leaves less than a header in the
    /// buffer then.
    ///
    /// # Errors
    /// The input is not SPDY; parsing cannot continue.
    pub(crate) fn next(&mut self, buffer: &mut BytesMut) -> Result<Option<Frame>, FrameError> {
        loop {
            match self.payload {
                Payload::None => match self.begin(buffer)? {
                    Begun::Frame(frame) => return Ok(Some(frame)),
                    Begun::Nothing => {}
                    Begun::Incomplete => return Ok(None),
                },
                Payload::Skip(left) => {
                    let here = left.min(buffer.len());
                    buffer.advance(here);
                    self.payload = if here == left { Payload::None } else { Payload::Skip(left - here) };
                    if here < left {
                        return Ok(None);
                    }
                }
                Payload::Data { stream, left, last } => {
                    if buffer.is_empty() && left > 0 {
                        return Ok(None);
                    }
                    let bytes = buffer.split_to(left.min(buffer.len())).freeze();
                    let left = left - bytes.len();
                    self.payload = if left == 0 { Payload::None } else { Payload::Data { stream, left, last } };
                    return Ok(Some(Frame::Data { stream, bytes, last: last && left == 0 }));
                }
            }
        }
    }

    fn begin(&mut self, buffer: &mut BytesMut) -> Result<Begun, FrameError> {
        let Some(head) = buffer.first_chunk::<HEAD>() else { return Ok(Begun::Incomplete) };
        let [a, b, c, d, flags, e, f, g] = *head;
        let (flags, length) = (flags & FIN, u32::from_be_bytes([0, e, f, g]) as usize);
        if a & 0x80 == 0 {
            let stream = u32::from_be_bytes([a, b, c, d]);
            buffer.advance(HEAD);
            self.payload = Payload::Data { stream, left: length, last: flags == FIN };
            return Ok(Begun::Nothing);
        }
        let (version, kind) = (u16::from_be_bytes([a & 0x7f, b]), u16::from_be_bytes([c, d]));
        if version != VERSION {
            return Err(FrameError::Version(version));
        }
        let wanted = match kind {
            SYN_STREAM | SYN_REPLY | HEADERS | PING => 4,
            RST_STREAM | GOAWAY => NUMBERS,
            _ => 0,
        };
        if length < wanted {
            return Err(FrameError::Short { kind, length });
        }
        if buffer.len() < HEAD + wanted {
            return Ok(Begun::Incomplete);
        }
        buffer.advance(HEAD);
        let mut numbers = buffer.split_to(wanted);
        self.payload = Payload::Skip(length - wanted);
        Ok(match kind {
            SYN_STREAM => Begun::Frame(Frame::Open { stream: stream_of(&mut numbers) }),
            SYN_REPLY | HEADERS => Begun::Frame(Frame::Reply { stream: stream_of(&mut numbers), last: flags == FIN }),
            RST_STREAM => Begun::Frame(Frame::Reset { stream: stream_of(&mut numbers) }),
            PING => Begun::Frame(Frame::Ping { id: numbers.get_u32() }),
            GOAWAY => Begun::Frame(Frame::GoAway),
            // Settings and windows, and what later versions may add.
            _ => Begun::Nothing,
        })
    }
}

enum Begun {
    Frame(Frame),
    Nothing,
    Incomplete,
}

fn stream_of(numbers: &mut BytesMut) -> u32 {
    numbers.get_u32() & 0x7fff_ffff
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::Writer;
    use super::*;

    fn all(input: &[u8], pieces: &[usize]) -> Result<Vec<Frame>, FrameError> {
        let (mut frames, mut buffer, mut rest, mut found) = (Frames::default(), BytesMut::new(), input, Vec::new());
        let mut sizes = pieces.iter().copied().chain(std::iter::repeat(usize::MAX));
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(sizes.next().unwrap().clamp(1, rest.len()));
            buffer.extend_from_slice(piece);
            rest = after;
            while let Some(frame) = frames.next(&mut buffer)? {
                found.push(frame);
            }
            assert!(buffer.len() < HEAD + NUMBERS, "consumed frames are dropped");
        }
        Ok(found)
    }

    /// Data of one stream joined, and ends kept separate.
    fn joined(frames: Vec<Frame>) -> Vec<Frame> {
        let mut out: Vec<Frame> = Vec::new();
        for frame in frames {
            match (out.last_mut(), frame) {
                (
                    Some(Frame::Data { stream: before, bytes: all, last: ended @ false }),
                    Frame::Data { stream, bytes, last },
                ) if *before == stream => {
                    *all = [all.as_ref(), &bytes].concat().into();
                    *ended = last;
                }
                (_, frame) => out.push(frame),
            }
        }
        out
    }

    #[test]
    fn frames_of_a_server() {
        let reply = [0x80, 3, 0, 2, 1, 0, 0, 14, 0, 0, 0, 1, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9];
        let settings = [0x80, 3, 0, 4, 0, 0, 0, 12, 0, 0, 0, 1, 0, 0, 0, 4, 0, 0, 0, 9];
        let reset = [0x80, 3, 0, 3, 0, 0, 0, 8, 0, 0, 0, 5, 0, 0, 0, 2];
        let data = [0, 0, 0, 3, 1, 0, 0, 2, b'h', b'i'];
        let away = [0x80, 3, 0, 7, 0, 0, 0, 8, 0, 0, 0, 5, 0, 0, 0, 0];
        let input = [&reply[..], &settings, &reset, &data, &away].concat();
        let expected = [
            Frame::Reply { stream: 1, last: true },
            Frame::Reset { stream: 5 },
            Frame::Data { stream: 3, bytes: "hi".into(), last: true },
            Frame::GoAway,
        ];
        assert_eq!(all(&input, &[]).unwrap(), expected);
        assert_eq!(joined(all(&input, &[1; 100]).unwrap()), expected, "byte by byte");
    }

    #[test]
    fn malformed_frames() {
        assert_eq!(all(&[0x80, 2, 0, 1, 0, 0, 0, 0], &[]), Err(FrameError::Version(2)));
        assert_eq!(all(&[0x80, 3, 0, 6, 0, 0, 0, 3, 0, 0, 0], &[]), Err(FrameError::Short { kind: 6, length: 3 }));
    }

    proptest! {
        #[test]
        fn written_frames_are_read(
            sent in proptest::collection::vec((1..9_u32, proptest::collection::vec(any::<u8>(), 0..300), any::<bool>()), 0..20),
            pings in proptest::collection::vec(any::<u32>(), 0..5),
            pieces in proptest::collection::vec(1..40_usize, 0..200),
        ) {
            let (mut writer, mut out, mut expected) = (Writer::default(), Vec::new(), Vec::new());
            for (stream, bytes, last) in &sent {
                writer.open(&mut out, *stream, &[("streamtype", "stdin")]);
                expected.push(Frame::Open { stream: *stream });
                writer.data(&mut out, *stream, bytes, *last);
                if !bytes.is_empty() || *last {
                    expected.push(Frame::Data { stream: *stream, bytes: bytes.clone().into(), last: *last });
                }
            }
            for id in pings {
                writer.ping(&mut out, id);
                writer.reset(&mut out, 3, 1);
                expected.extend([Frame::Ping { id }, Frame::Reset { stream: 3 }]);
            }
            prop_assert_eq!(joined(all(&out, &pieces).unwrap()), expected);
        }

        #[test]
        fn arbitrary_input_is_read_without_panic(
            input in proptest::collection::vec(any::<u8>(), 0..2000),
            pieces in proptest::collection::vec(1..100_usize, 0..50),
        ) {
            let whole = all(&input, &[]).map(joined);
            let parts = all(&input, &pieces).map(joined);
            prop_assert_eq!(whole, parts);
        }

        #[test]
        fn much_data_is_cut_into_frames(length in 0..300_000_usize, last: bool) {
            let mut out = Vec::new();
            Writer::default().data(&mut out, 7, &vec![1; length], last);
            let frames = joined(all(&out, &[]).unwrap());
            let reported: usize = frames.iter().map(|frame| match frame {
                Frame::Data { stream: 7, bytes, .. } => bytes.len(),
                other => panic!("{other:?}"),
            }).sum();
            prop_assert_eq!(reported, length);
            let ended = matches!(frames.last(), Some(Frame::Data { last: true, .. }));
            prop_assert_eq!(ended, last);
        }
    }
}
