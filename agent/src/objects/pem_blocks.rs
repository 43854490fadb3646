//! PEM texts of certificates: parsed, and written without what others put between and into the blocks. Pure.

use std::collections::BTreeMap;

use pem::EncodeConfig;
use pem::LineEnding;
use pem::Pem;
use sha2::Digest as _;
use sha2::Sha256;

const CERTIFICATE: &str = "CERTIFICATE";

/// The certificates of a PEM text, DER, in their order. Blocks of other kinds are left out.
///
/// # Errors
/// A block that is not PEM.
pub(super) fn certificates(text: &str) -> Result<Vec<Vec<u8>>, pem::PemError> {
    let blocks = pem::parse_many(text)?;
    Ok(blocks.into_iter().filter(|block| block.tag() == CERTIFICATE).map(Pem::into_contents).collect())
}

/// One PEM text of these certificates, in their order.
pub(super) fn chain(certificates: Vec<Vec<u8>>) -> String {
    certificates.into_iter().map(|der| block(CERTIFICATE, der)).collect()
}

/// One PEM text of trust anchors, each once. Their order is that of their hashes: it stays from read to read,
/// and has no meaning.
pub(super) fn anchors(certificates: impl IntoIterator<Item = Vec<u8>>) -> String {
    let by_hash = certificates.into_iter().map(|der| (<[u8; 32]>::from(Sha256::digest(&der)), der));
    chain(by_hash.collect::<BTreeMap<_, _>>().into_values().collect())
}

/// One PEM block.
pub(super) fn block(tag: &str, der: Vec<u8>) -> String {
    pem::encode_config(&Pem::new(tag, der), EncodeConfig::new().set_line_ending(LineEnding::LF))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anchors_are_unique_and_in_a_stable_order() {
        let (one, two) = (block(CERTIFICATE, vec![1; 60]), block(CERTIFICATE, vec![2; 60]));
        assert_eq!(one.lines().map(str::len).collect::<Vec<_>>(), [27, 64, 16, 25]);
        let text = format!("of one\n{one}between\n{}{two}{one}", block("PUBLIC KEY", vec![3]));
        let found = certificates(&text).expect("PEM");
        assert_eq!(found, [vec![1; 60], vec![2; 60], vec![1; 60]]);
        let all = anchors(found.clone());
        assert!(all == format!("{one}{two}") || all == format!("{two}{one}"), "{all}");
        assert_eq!(anchors(found.into_iter().rev()), all);
        assert_eq!(anchors([]), "");
        assert_eq!(chain(certificates(&format!("{two}{one}")).expect("PEM")), format!("{two}{one}"));
    }

    #[test]
    fn what_others_add_is_dropped() {
        let bare = block(CERTIFICATE, vec![1; 3]);
        let headed = bare.replace("-----\nAQEB", "-----\nA: b\n\nAQEB");
        assert_eq!(chain(certificates(&headed).expect("PEM")), bare);
        assert!(certificates("-----BEGIN CERTIFICATE-----\n?\n-----END CERTIFICATE-----\n").is_err());
    }
}
