//! Frames as they are sent. Pure: into a buffer.

use super::FIN;
use super::Headers;
use super::PING;
use super::RST_STREAM;
use super::SYN_STREAM;
use super::VERSION;

/// Bytes of data in one frame, at most; the protocol allows 16 MiB.
const DATA: usize = 64 * 1024;

/// Writes the frames of one connection.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    headers: Headers,
}

impl Writer {
    /// Opens a stream. Those of a client have odd numbers, each higher than the one before.
    pub(crate) fn open(&mut self, out: &mut Vec<u8>, stream: u32, pairs: &[(&str, &str)]) {
        let block = self.headers.block(pairs);
        // Stream id, no associated stream, priority and slot.
        let head = [&stream.to_be_bytes()[..], &[0; 6], &block].concat();
        control(out, SYN_STREAM, 0, &head);
    }

    /// Sends data, which may be empty to mark the end of the stream.
    pub(crate) fn data(&self, out: &mut Vec<u8>, stream: u32, bytes: &[u8], last: bool) {
        let mut parts = bytes.chunks(DATA).peekable();
        loop {
            let part = parts.next().unwrap_or_default();
            let ends = parts.peek().is_none();
            if !part.is_empty() || last {
                out.extend_from_slice(&stream.to_be_bytes());
                out.extend_from_slice(&flags_and_length(if ends && last { FIN } else { 0 }, part.len()));
                out.extend_from_slice(part);
            }
            if ends {
                return;
            }
        }
    }

    /// Breaks a stream off.
    pub(crate) fn reset(&self, out: &mut Vec<u8>, stream: u32, status: u32) {
        control(out, RST_STREAM, 0, &[stream.to_be_bytes(), status.to_be_bytes()].concat());
    }

    /// Sends a ping, or the answer to one.
    pub(crate) fn ping(&self, out: &mut Vec<u8>, id: u32) {
        control(out, PING, 0, &id.to_be_bytes());
    }
}

fn control(out: &mut Vec<u8>, kind: u16, flags: u8, payload: &[u8]) {
    out.extend_from_slice(&(VERSION | 0x8000).to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&flags_and_length(flags, payload.len()));
    out.extend_from_slice(payload);
}

fn flags_and_length(flags: u8, length: usize) -> [u8; 4] {
    // What is sent here is far below 2^24 bytes.
    let length = u32::try_from(length).unwrap_or(u32::MAX) & 0x00ff_ffff;
    ((u32::from(flags) << 24) | length).to_be_bytes()
}
