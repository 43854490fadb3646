//! Outgoing header blocks. Pure.
//!
//! The protocol requires zlib with a dictionary. Blocks here are a few bytes for each of at most five streams: they are
//! stored without compression in a stream that names the dictionary, which is valid and needs neither dictionary nor
//! compressor.

/// The beginning of a zlib stream: deflate with a window of 32 KiB, a dictionary, and which one it is.
const BEGIN: [u8; 6] = [0x78, 0x20, 0xe3, 0xc6, 0xa7, 0xc2];
/// A stored block without content, which flushes the data before it.
const FLUSH: [u8; 5] = [0, 0, 0, 0xff, 0xff];
/// Bytes of a stored block, at most.
const BLOCK: usize = 0xffff;

/// The header blocks of one connection, which are one compressed stream.
#[derive(Debug, Default)]
pub(crate) struct Headers {
    began: bool,
}

impl Headers {
    /// The block of these names, in lower case, and values.
    pub(crate) fn block(&mut self, pairs: &[(&str, &str)]) -> Vec<u8> {
        let mut plain = Vec::new();
        plain.extend_from_slice(&length(pairs.len()));
        for text in pairs.iter().flat_map(|(name, value)| [name, value]) {
            plain.extend_from_slice(&length(text.len()));
            plain.extend_from_slice(text.as_bytes());
        }
        let mut block = if std::mem::replace(&mut self.began, true) { Vec::new() } else { BEGIN.to_vec() };
        for part in plain.chunks(BLOCK) {
            let length = u16::try_from(part.len()).unwrap_or(u16::MAX);
            block.push(0);
            block.extend_from_slice(&length.to_le_bytes());
            block.extend_from_slice(&(!length).to_le_bytes());
            block.extend_from_slice(part);
        }
        block.extend_from_slice(&FLUSH);
        block
    }
}

fn length(length: usize) -> [u8; 4] {
    u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes()
}

#[cfg(test)]
pub(crate) mod tests {
    use flate2::Decompress;
    use flate2::FlushDecompress;

    use super::*;

    /// Reads blocks as a peer does: one inflater for the connection.
    pub(crate) struct Reader {
        began: bool,
        inflate: Decompress,
    }

    impl Default for Reader {
        fn default() -> Self {
            Self { began: false, inflate: Decompress::new(false) }
        }
    }

    impl Reader {
        pub(crate) fn pairs(&mut self, block: &[u8]) -> Vec<(String, String)> {
            let deflated = if std::mem::replace(&mut self.began, true) {
                block
            } else {
                let begin = u16::from_be_bytes([block[0], block[1]]);
                assert_eq!((begin % 31, block[0] & 0xf, block[1] & 0x20), (0, 8, 0x20), "deflate with a dictionary");
                &block[6..]
            };
            let mut plain = Vec::with_capacity(1 << 20);
            let begin = self.inflate.total_in();
            loop {
                let before = (self.inflate.total_in(), self.inflate.total_out());
                let taken = usize::try_from(before.0 - begin).unwrap();
                self.inflate.decompress_vec(&deflated[taken..], &mut plain, FlushDecompress::Sync).unwrap();
                if before == (self.inflate.total_in(), self.inflate.total_out()) {
                    break;
                }
            }
            let mut rest = plain.as_slice();
            let number = |rest: &mut &[u8]| {
                let (number, after) = rest.split_first_chunk::<4>().unwrap();
                *rest = after;
                u32::from_be_bytes(*number) as usize
            };
            let count = number(&mut rest);
            let text = |rest: &mut &[u8]| {
                let length = number(rest);
                let (text, after) = rest.split_at(length);
                *rest = after;
                String::from_utf8(text.to_vec()).unwrap()
            };
            let pairs = (0..count).map(|_| (text(&mut rest), text(&mut rest))).collect();
            assert!(rest.is_empty());
            pairs
        }
    }

    #[test]
    fn blocks_are_one_valid_stream() {
        let (mut headers, mut reader) = (Headers::default(), Reader::default());
        let long = "x".repeat(100_000);
        for pairs in [&[("streamtype", "error")][..], &[("a", ""), ("b", &long)], &[]] {
            let read = reader.pairs(&headers.block(pairs));
            let read: Vec<(&str, &str)> = read.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
            assert_eq!(read, pairs);
        }
    }
}
