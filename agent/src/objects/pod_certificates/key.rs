//! The keys of pods' certificates, and the stub requests that prove their possession: PKCS#10 with nothing but the key.

use rcgen::CertificateParams;
use rcgen::DistinguishedName;
use rcgen::KeyPair;
use rcgen::RsaKeySize;
use secrecy::SecretString;

use crate::objects::ObjectError;
use crate::objects::pem_blocks;

/// What precedes the 32 bytes of an Ed25519 key in PKCS#8 (RFC 8410).
const ED25519_PREFIX: [u8; 16] = [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
/// Where these bytes are in the longer form, which also has the public key and which older libraries cannot read.
const ED25519_KEY: std::ops::Range<usize> = 16..48;

/// A key and the request for its certificate.
#[derive(Debug)]
pub(super) struct Generated {
    /// PKCS#8, PEM.
    pub(super) key: SecretString,
    /// PKCS#10, DER.
    pub(super) request: Vec<u8>,
}

/// Generates a key, which takes seconds for RSA, beside the async tasks.
///
/// # Errors
/// An unknown type of key; the key cannot be generated.
pub(super) async fn generate(key_type: String) -> Result<Generated, ObjectError> {
    let made = tokio::task::spawn_blocking(move || generate_now(&key_type)).await;
    made.unwrap_or_else(|error| Err(ObjectError::NoCertificate(error.to_string())))
}

fn generate_now(key_type: &str) -> Result<Generated, ObjectError> {
    let pair = match key_type {
        "RSA3072" => KeyPair::generate_rsa_for(&rcgen::PKCS_RSA_SHA256, RsaKeySize::_3072),
        "RSA4096" => KeyPair::generate_rsa_for(&rcgen::PKCS_RSA_SHA256, RsaKeySize::_4096),
        "ECDSAP256" => KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256),
        "ECDSAP384" => KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384),
        "ECDSAP521" => KeyPair::generate_for(&rcgen::PKCS_ECDSA_P521_SHA512),
        "ED25519" => KeyPair::generate_for(&rcgen::PKCS_ED25519),
        other => return Err(ObjectError::NoCertificate(format!("unsupported key type {other:?}"))),
    };
    let failed =
        |error: rcgen::Error| ObjectError::NoCertificate(format!("cannot make a key of type {key_type}: {error}"));
    let pair = pair.map_err(failed)?;
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    let request = params.serialize_request(&pair).map_err(failed)?.der().to_vec();
    let der = match (key_type, pair.serialized_der().get(ED25519_KEY)) {
        ("ED25519", Some(bytes)) => [&ED25519_PREFIX[..], bytes].concat(),
        _ => pair.serialize_der(),
    };
    Ok(Generated { key: pem_blocks::block("PRIVATE KEY", der).into(), request })
}

#[cfg(test)]
mod tests {
    use secrecy::ExposeSecret as _;
    use x509_parser::certification_request::X509CertificationRequest;
    use x509_parser::prelude::FromDer as _;

    use super::*;

    #[test]
    fn every_type_of_key_signs_its_own_empty_request() {
        for key_type in ["RSA3072", "RSA4096", "ECDSAP256", "ECDSAP384", "ECDSAP521", "ED25519"] {
            let made = generate_now(key_type).expect(key_type);
            let (rest, request) = X509CertificationRequest::from_der(&made.request).expect("PKCS#10");
            let info = &request.certification_request_info;
            assert!(rest.is_empty() && info.subject.iter().next().is_none(), "{key_type}");
            assert_eq!(info.attributes().len(), 0, "{key_type}");
            // The key that was written is the one of the request.
            let pair = KeyPair::from_pem(made.key.expose_secret()).expect(key_type);
            assert_eq!(
                rcgen::PublicKeyData::der_bytes(&pair),
                &*info.subject_pki.subject_public_key.data,
                "{key_type}"
            );
        }
        let error = generate_now("DSA").expect_err("unknown").to_string();
        assert_eq!(error, "cannot request a certificate: unsupported key type \"DSA\"");
    }
}
