//! Copies the output of the command while it runs.

use std::io::BufRead as _;
use std::io::BufReader;
use std::io::Read;
use std::io::Write;
use std::os::unix::net::UnixStream;

use anyhow::Context as _;
use anyhow::Result;

use super::machine::Output;

const CHUNK: usize = 64 << 10;

/// Where one stream goes.
pub(super) enum Relay<'a> {
    Stdout,
    Stderr,
    Lines(&'a mut (dyn FnMut(&str) + Send)),
}

impl<'a> Relay<'a> {
    /// The destination of the standard output.
    pub(super) fn of(output: Output<'a>) -> Self {
        match output {
            Output::Inherit => Self::Stdout,
            Output::Lines(function) => Self::Lines(function),
        }
    }

    /// Copies until the machine ends.
    pub(super) fn copy(self, port: UnixStream) -> Result<()> {
        match self {
            Self::Stdout => copy(port, std::io::stdout()),
            Self::Stderr => copy(port, std::io::stderr()),
            Self::Lines(function) => {
                for line in BufReader::new(port).split(b'\n').map_while(Result::ok) {
                    function(&String::from_utf8_lossy(&line));
                }
                Ok(())
            }
        }
    }
}

/// Flushes after every read, so that output appears at once.
fn copy(mut port: impl Read, mut to: impl Write) -> Result<()> {
    let mut buffer = vec![0; CHUNK];
    loop {
        // A reset connection is the end of a killed machine.
        let length = port.read(&mut buffer).unwrap_or(0);
        if length == 0 {
            return Ok(());
        }
        to.write_all(&buffer[..length]).and_then(|()| to.flush()).context("cannot write the output of the command")?;
    }
}
