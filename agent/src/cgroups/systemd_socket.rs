//! systemd's own socket, which only root can connect to: the way to systemd on a node without a bus.
//!
//! ```text
//!  systemd ── sender org.freedesktop.systemd1 ── Reader ── sender :rg.freedesktop.systemd1 ── zbus
//! ```
//!
//! On this socket systemd signs its messages with its well-known name. zbus takes only unique names as senders, as a bus
//! gives them, and fails all calls of a connection after the first other one: [`Reader`] makes the name a unique one.

use std::io;
use std::os::fd::BorrowedFd;
use std::os::fd::OwnedFd;
use std::path::Path;

use tokio::io::AsyncReadExt as _;
use tokio::io::AsyncWriteExt as _;
use tokio::net::UnixStream;
use tokio::net::unix::OwnedReadHalf;
use tokio::net::unix::OwnedWriteHalf;
use zbus::Connection;
use zbus::connection::Builder;
use zbus::connection::socket::ReadHalf;
use zbus::connection::socket::Socket;
use zbus::connection::socket::Split;
use zbus::connection::socket::WriteHalf;
use zbus::export::async_trait::async_trait;

/// What the header field of the sender begins with: its code, its signature, the length of the name, the name's first
/// character.
const SENDER: [u8; 9] = {
    let [a, b, c, d] = u32::to_ne_bytes(b"org.freedesktop.systemd1".len() as u32);
    [7, 1, b's', 0, a, b, c, d, b'o']
};

/// Connects to systemd's socket.
///
/// # Errors
/// There is no such socket, or the peer refuses the connection.
pub(super) async fn connect(path: &Path) -> zbus::Result<Connection> {
    let stream = UnixStream::connect(path).await?;
    Builder::socket(SystemdSocket(stream)).p2p().build().await
}

#[derive(Debug)]
struct SystemdSocket(UnixStream);

#[derive(Debug)]
struct Reader {
    socket: OwnedReadHalf,
    matched: usize,
}

#[derive(Debug)]
struct Writer(OwnedWriteHalf);

impl Socket for SystemdSocket {
    type ReadHalf = Reader;
    type WriteHalf = Writer;

    fn split(self) -> Split<Reader, Writer> {
        let (socket, write) = self.0.into_split();
        Split::new(Reader { socket, matched: 0 }, Writer(write))
    }
}

#[async_trait]
impl ReadHalf for Reader {
    async fn recvmsg(&mut self, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        let length = self.socket.read(buffer).await?;
        make_unique(&mut self.matched, buffer.get_mut(..length).unwrap_or_default());
        Ok((length, Vec::new()))
    }
}

#[async_trait]
impl WriteHalf for Writer {
    async fn sendmsg(&mut self, buffer: &[u8], _: &[BorrowedFd<'_>]) -> io::Result<usize> {
        self.0.write(buffer).await
    }

    async fn close(&mut self) -> io::Result<()> {
        self.0.shutdown().await
    }
}

/// Replaces the first character of systemd's name as a sender by that of a unique name. A message can arrive in pieces:
/// `matched` counts the bytes of [`SENDER`] at the end of the last one.
fn make_unique(matched: &mut usize, bytes: &mut [u8]) {
    for byte in bytes {
        if SENDER.get(*matched) == Some(byte) {
            *matched += 1;
        } else {
            // No byte of it equals the first one.
            *matched = usize::from(*byte == SENDER[0]);
        }
        if *matched == SENDER.len() {
            *byte = b':';
            *matched = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sender_is_unique_wherever_its_message_is_divided() {
        let name = b"org.freedesktop.systemd1\0";
        let message = [b"\x07\x07\x01".as_slice(), &SENDER[..8], name, b"\0\0s\0\x18\0\0\0", name].concat();
        let expected =
            [b"\x07\x07\x01".as_slice(), &SENDER[..8], b":", &name[1..], b"\0\0s\0\x18\0\0\0", name].concat();
        for at in 0..=message.len() {
            let (mut bytes, mut matched) = (message.clone(), 0);
            let (first, second) = bytes.split_at_mut(at);
            make_unique(&mut matched, first);
            make_unique(&mut matched, second);
            assert_eq!(bytes, expected, "divided at {at}");
        }
    }
}
