//! The mapping of a client's channels to the runtime's streams. Pure.

use bytes::Bytes;
use tokio_tungstenite::tungstenite::Message;

use super::super::params::Streams;
use super::Protocol;

pub(super) const STDIN: u8 = 0;
pub(super) const STDOUT: u8 = 1;
pub(super) const STDERR: u8 = 2;
pub(super) const ERROR: u8 = 3;
pub(super) const RESIZE: u8 = 4;
/// Closes the channel whose number follows.
pub(super) const CLOSE: u8 = 255;

/// A channel: its number in messages and the name of its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Channel {
    pub(super) number: u8,
    pub(super) name: &'static str,
}

/// The channels of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Channels(Vec<Channel>);

impl Channels {
    /// The channels that the runtime expects. It starts when it has all of them, and accepts no others.
    pub(super) fn new(streams: Streams, protocol: Protocol) -> Self {
        let all = [
            (true, ERROR, "error"),
            (streams.stdin, STDIN, "stdin"),
            (streams.stdout, STDOUT, "stdout"),
            (streams.stderr, STDERR, "stderr"),
            (streams.tty && protocol.has_sizes(), RESIZE, "resize"),
        ];
        Self(all.into_iter().filter(|(wanted, ..)| *wanted).map(|(_, number, name)| Channel { number, name }).collect())
    }

    /// Stream ids in the order in which streams are opened; those of a SPDY client are odd.
    pub(super) fn streams(&self) -> impl Iterator<Item = (u32, Channel)> {
        (1..).step_by(2).zip(self.0.iter().copied())
    }

    pub(super) fn stream(&self, number: u8) -> Option<u32> {
        self.streams().find(|(_, channel)| channel.number == number).map(|(stream, _)| stream)
    }

    pub(super) fn number(&self, stream: u32) -> Option<u8> {
        self.streams().find(|(number, _)| *number == stream).map(|(_, channel)| channel.number)
    }
}

/// The channel whose empty first message signals the start of the session: the lowest one that the client does not
/// write.
pub(super) fn ready_channel(streams: Streams) -> u8 {
    match streams {
        Streams { stdout: true, .. } => STDOUT,
        Streams { stderr: true, .. } => STDERR,
        _ => ERROR,
    }
}

/// A message to the client.
pub(super) fn message(channel: u8, bytes: &[u8]) -> Message {
    Message::Binary([&[channel], bytes].concat().into())
}

/// Input of a client on one of its channels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ClientInput {
    Data { stream: u32, bytes: Bytes },
    End { stream: u32 },
}

/// The channels that the client can write: those that it has not closed.
#[derive(Debug)]
pub(super) struct ClientChannels(Vec<(u8, u32)>);

impl ClientChannels {
    pub(super) fn new(channels: &Channels) -> Self {
        let stream = |number| channels.stream(number).map(|stream| (number, stream));
        Self([STDIN, RESIZE].into_iter().filter_map(stream).collect())
    }

    /// Parses a message. Messages of channels that are unknown, not requested, closed or not writable by the client are
    /// ignored, as are empty messages.
    pub(super) fn input(&mut self, mut message: Bytes) -> Option<ClientInput> {
        match *message.as_ref() {
            [CLOSE, number, ..] => {
                let place = self.0.iter().position(|(writable, _)| *writable == number)?;
                Some(ClientInput::End { stream: self.0.swap_remove(place).1 })
            }
            [number, _, ..] => {
                let stream = self.0.iter().find(|(writable, _)| *writable == number)?.1;
                Some(ClientInput::Data { stream, bytes: message.split_off(1) })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Streams = Streams { stdin: true, stdout: true, stderr: true, tty: true };

    #[test]
    fn the_requested_streams_are_opened() {
        let names = |streams: Streams, protocol| -> Vec<&str> {
            Channels::new(streams, protocol).streams().map(|(_, channel)| channel.name).collect()
        };
        assert_eq!(names(ALL, Protocol::V4), ["error", "stdin", "stdout", "stderr", "resize"]);
        assert_eq!(names(ALL, Protocol::V2), ["error", "stdin", "stdout", "stderr"], "no sizes before the third");
        let out = Streams { stdout: true, ..Streams::default() };
        assert_eq!(names(out, Protocol::V4), ["error", "stdout"]);
        let channels = Channels::new(out, Protocol::V4);
        assert_eq!((channels.stream(STDOUT), channels.number(3)), (Some(3), Some(STDOUT)));
        assert_eq!((channels.stream(STDIN), channels.number(2)), (None, None));
        let err = Streams { stderr: true, ..Streams::default() };
        let only = Streams { stdin: true, ..Streams::default() };
        assert_eq!([ALL, err, only].map(ready_channel), [STDOUT, STDERR, ERROR]);
    }

    #[test]
    fn input_of_clients() {
        let mut writable = ClientChannels::new(&Channels::new(ALL, Protocol::V4));
        let mut parse = |message: &'static [u8]| writable.input(Bytes::from_static(message));
        assert_eq!(parse(b"\x00in"), Some(ClientInput::Data { stream: 3, bytes: "in".into() }));
        assert_eq!(parse(b"\x04{}"), Some(ClientInput::Data { stream: 9, bytes: "{}".into() }));
        for passed_over in
            [&b""[..], b"\x00", b"\x01out", b"\x02err", b"\x03{}", b"\x05x", b"\xff", b"\xff\x01", b"\xff\xff"]
        {
            assert_eq!(parse(passed_over), None, "{passed_over:?}");
        }
        assert_eq!(parse(b"\xff\x00"), Some(ClientInput::End { stream: 3 }));
        assert_eq!((parse(b"\xff\x00"), parse(b"\x00more")), (None, None), "a closed stream stays closed");
        assert_eq!(parse(b"\xff\x04"), Some(ClientInput::End { stream: 9 }));
    }
}
