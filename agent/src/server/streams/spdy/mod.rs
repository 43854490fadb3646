//! The framing of SPDY/3.1, as far as a client of a runtime's streaming server needs it.
//!
//! Buffers no payload: data is returned in the pieces in which it arrives, and header blocks of the peer are skipped.
//! So neither the peer's lengths nor its compression cost memory.
//!
//! Flow control is left to TCP, as by the peers in use: they send no window updates, so a client that respects windows
//! would stall after 64 KiB.

mod headers;
mod read;
mod write;

pub(super) use self::headers::Headers;
pub(super) use self::read::Frame;
pub(super) use self::read::Frames;
pub(super) use self::write::Writer;

/// The version in control frames; 3.1 differs in flow control alone.
const VERSION: u16 = 3;
/// The last frame of the stream.
const FIN: u8 = 1;

const SYN_STREAM: u16 = 1;
const SYN_REPLY: u16 = 2;
const RST_STREAM: u16 = 3;
const PING: u16 = 6;
const GOAWAY: u16 = 7;
const HEADERS: u16 = 8;

/// Status of RST_STREAM for a stream that the peer must not open.
pub(super) const REFUSED_STREAM: u32 = 3;
