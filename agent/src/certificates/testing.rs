//! Pairs for tests.

use std::time::Duration;
use std::time::SystemTime;

use rcgen::CertificateParams;
use rcgen::DistinguishedName;
use rcgen::DnType;
use rcgen::KeyPair;

use super::pair::Pair;

/// A self-signed pair of group system:nodes, valid between two Unix times in seconds.
pub(super) fn pair(common_name: &str, from: u64, until: u64) -> Pair {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::OrganizationName, "system:nodes");
    params.distinguished_name.push(DnType::CommonName, common_name);
    params.not_before = (SystemTime::UNIX_EPOCH + Duration::from_secs(from)).into();
    params.not_after = (SystemTime::UNIX_EPOCH + Duration::from_secs(until)).into();
    let key = KeyPair::generate().expect("a key");
    let certificate = params.self_signed(&key).expect("a certificate");
    Pair::parse(&certificate.pem(), &key.serialize_pem()).expect("a pair")
}
