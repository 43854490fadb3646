//! As much of SPDY/3.1 as one who opens streams at a runtime's streaming server needs: frames, and nothing that acts.
//!
//! Owns the shape of frames. Refuses to hold what passes: data comes out in the pieces in which it came in, whatever its
//! frame promises, and header blocks of the other side, which say nothing that is of use here, are skipped unread. So
//! nobody's lengths and nobody's compression cost memory.
//!
//! Flow control is left to the connection below, as the other ends in use do: they send no window updates and would
//! wait for none, so one who kept to windows would stop for good after 64 KiB.

mod headers;
mod read;
mod write;

pub(super) use self::headers::Headers;
pub(super) use self::read::Frame;
pub(super) use self::read::Frames;
pub(super) use self::write::Writer;

/// The version in control frames; 3.1 differs in flow control alone.
const VERSION: u16 = 3;
/// No more is to come on the stream.
const FIN: u8 = 1;

const SYN_STREAM: u16 = 1;
const SYN_REPLY: u16 = 2;
const RST_STREAM: u16 = 3;
const PING: u16 = 6;
const GOAWAY: u16 = 7;
const HEADERS: u16 = 8;

/// A stream the other side opened, which it must not.
pub(super) const REFUSED_STREAM: u32 = 3;
