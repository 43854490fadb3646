//! A certificate chain with its key, as PEM text and parsed.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use rustls::sign::CertifiedKey;
use secrecy::ExposeSecret as _;
use secrecy::SecretString;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer as _;
use x509_parser::prelude::X509Certificate;

use crate::apiserver::CertificateError;
use crate::apiserver::kubeconfig::Pem;
use crate::apiserver::tls;
use crate::apiserver::tls::PairError;

/// A pair that belongs together.
#[derive(Clone)]
pub struct Pair {
    /// The chain, PEM, own certificate first.
    pub chain: String,
    /// The key, PEM.
    pub key: SecretString,
    /// Ready for handshakes.
    pub certified: Arc<CertifiedKey>,
    /// The parsed first certificate.
    pub leaf: Leaf,
}

impl std::fmt::Debug for Pair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.leaf.fmt(f)
    }
}

/// A parsed certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// Valid from.
    pub not_before: SystemTime,
    /// Valid until.
    pub not_after: SystemTime,
    /// CN of the subject.
    pub common_name: String,
    /// Every O of the subject.
    pub organizations: BTreeSet<String>,
    /// Alternative names.
    pub dns_names: BTreeSet<String>,
    /// Alternative addresses.
    pub ips: BTreeSet<IpAddr>,
}

impl Leaf {
    /// Whether it has expired; one that is not yet valid counts as valid, since clocks differ.
    pub fn expired(&self, now: SystemTime) -> bool {
        self.not_after <= now
    }
}

impl Pair {
    /// From PEM texts; both may be the same text.
    ///
    /// # Errors
    /// Either cannot be parsed, or they do not match.
    pub fn parse(chain: &str, key: &str) -> Result<Self, PairError> {
        let certified = tls::certified_key(chain, key)?;
        let first = certified.cert.first().ok_or(PairError::Empty)?;
        let leaf = leaf(first).ok_or(PairError::Empty)?;
        let sections =
            |wanted: fn(&str) -> bool, text: &str| -> String { sections(text).filter(|s| wanted(s)).collect() };
        let chain = sections(|section| section.starts_with("-----BEGIN CERTIFICATE-----"), chain);
        let key = sections(|section| section.contains("PRIVATE KEY-----"), key);
        Ok(Self { chain, key: key.into(), certified: Arc::new(certified), leaf })
    }

    /// From the places that a kubeconfig names. Blocks.
    ///
    /// # Errors
    /// One cannot be read, or they do not match.
    pub fn read(chain: &Pem, key: &Pem) -> Result<Self, CertificateError> {
        let (chain, key) = (chain.read()?, key.read()?);
        Ok(Self::parse(chain.expose_secret(), key.expose_secret())?)
    }

    /// Whether any certificate of the chain has expired.
    pub fn any_expired(&self, now: SystemTime) -> bool {
        self.certified.cert.iter().filter_map(|certificate| leaf(certificate)).any(|leaf| leaf.expired(now))
    }

    /// Chain and key in one text.
    pub fn text(&self) -> SecretString {
        format!("{}{}", self.chain, self.key.expose_secret()).into()
    }
}

/// The blocks of a PEM text, each ending in a new line.
fn sections(text: &str) -> impl Iterator<Item = String> {
    text.split_inclusive("-----END ").enumerate().scan(String::new(), |open, (index, part)| {
        // `part` begins with what follows the last "-----END ": the rest of that line.
        let (tail, next) = if index == 0 { ("", part) } else { part.split_once('\n').unwrap_or((part, "")) };
        let done = if index == 0 { String::new() } else { format!("{open}{tail}\n") };
        let begin = next.find("-----BEGIN ").unwrap_or(0);
        *open = next[begin..].to_owned();
        Some(done)
    })
}

fn leaf(certificate: &[u8]) -> Option<Leaf> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    let seconds = |seconds: i64| match u64::try_from(seconds) {
        Ok(after) => SystemTime::UNIX_EPOCH + Duration::from_secs(after),
        Err(_) => SystemTime::UNIX_EPOCH,
    };
    let mut leaf = Leaf {
        not_before: seconds(parsed.validity().not_before.timestamp()),
        not_after: seconds(parsed.validity().not_after.timestamp()),
        common_name: parsed
            .subject()
            .iter_common_name()
            .find_map(|name| name.as_str().ok())
            .unwrap_or_default()
            .to_owned(),
        organizations: parsed
            .subject()
            .iter_organization()
            .filter_map(|o| o.as_str().ok())
            .map(str::to_owned)
            .collect(),
        dns_names: BTreeSet::new(),
        ips: BTreeSet::new(),
    };
    let names = parsed.subject_alternative_name().ok().flatten();
    for name in names.iter().flat_map(|extension| &extension.value.general_names) {
        match name {
            GeneralName::DNSName(name) => drop(leaf.dns_names.insert((*name).to_owned())),
            GeneralName::IPAddress(bytes) => leaf.ips.extend(address(bytes)),
            _ => {}
        }
    }
    Some(leaf)
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from),
        16 => <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::pair;
    use super::*;

    #[test]
    fn chain_and_key_survive_being_one_text() {
        let made = pair("system:node:n", 0, 100);
        assert_eq!(made.leaf.common_name, "system:node:n");
        assert_eq!(made.leaf.not_after, SystemTime::UNIX_EPOCH + Duration::from_secs(100));
        let text = made.text();
        let again = Pair::parse(text.expose_secret(), text.expose_secret()).expect("a pair");
        assert_eq!((&again.chain, again.key.expose_secret()), (&made.chain, made.key.expose_secret()));
        assert!(made.chain.starts_with("-----BEGIN CERT") && made.chain.ends_with("-----END CERTIFICATE-----\n"));
        assert_eq!(again.leaf, made.leaf);
        let other = pair("system:node:m", 0, 100);
        assert!(Pair::parse(&made.chain, other.key.expose_secret()).is_err(), "a key of another certificate");
        assert!(Pair::parse("", made.key.expose_secret()).is_err());
    }

    #[test]
    fn a_chain_has_expired_with_any_of_its_certificates() {
        let (own, authority) = (pair("system:node:n", 0, 100), pair("authority", 0, 50));
        let chain = format!("{}{}", own.chain, authority.chain);
        let both = Pair::parse(&chain, own.key.expose_secret()).expect("a pair");
        let at = |second| SystemTime::UNIX_EPOCH + Duration::from_secs(second);
        assert!(!both.any_expired(at(49)) && both.any_expired(at(50)) && !both.leaf.expired(at(50)));
        assert_eq!((both.leaf, both.chain), (own.leaf, chain), "the whole chain is kept");
    }

    #[test]
    fn expiry_is_the_end_of_validity() {
        let leaf = pair("n", 50, 100).leaf;
        let at = |second| SystemTime::UNIX_EPOCH + Duration::from_secs(second);
        assert!(!leaf.expired(at(10)) && !leaf.expired(at(99)) && leaf.expired(at(100)));
    }
}
