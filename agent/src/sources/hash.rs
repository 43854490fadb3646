//! 128-bit FNV-1a, the hash of static pod UIDs. Must never change. Not collision resistant, so not for anything that an
//! attacker may forge.

use std::fmt;
use std::io;

const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
const PRIME: u128 = (1 << 88) + 0x13b;

/// A running hash; shows as 32 hex digits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fnv128(u128);

impl Default for Fnv128 {
    fn default() -> Self {
        Self(OFFSET)
    }
}

impl Fnv128 {
    /// Takes in more bytes.
    pub(super) fn update(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u128::from(byte)).wrapping_mul(PRIME);
        }
    }
}

impl io::Write for Fnv128 {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Display for Fnv128 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_vectors() {
        for (text, digest) in [
            ("", "6c62272e07bb014262b821756295c58d"),
            ("a", "d228cb696f1a8caf78912b704e4a8964"),
            ("foobar", "343e1662793c64bf6f0d3597ba446f18"),
        ] {
            let mut hash = Fnv128::default();
            hash.update(text.as_bytes());
            assert_eq!(hash.to_string(), digest, "{text:?}");
        }
    }
}
