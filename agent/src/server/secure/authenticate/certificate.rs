//! The user of a verified client certificate. Pure.

use std::fmt::Write as _;
use std::time::Duration;
use std::time::SystemTime;

use sha2::Digest as _;
use sha2::Sha256;
use x509_parser::prelude::FromDer as _;
use x509_parser::prelude::X509Certificate;

use super::super::User;

/// Subject attribute that holds a user's UID.
const UID: &[u64] = &[1, 3, 6, 1, 4, 1, 57683, 2];
const CREDENTIAL_ID: &str = "authentication.kubernetes.io/credential-id";

/// The user of a certificate: its common name, with its organizations as groups. `None` without a common name.
///
/// # Errors
/// The certificate cannot be parsed, or its UID attribute is invalid.
pub(in crate::server::secure) fn user_of(der: &[u8], with_uid: bool) -> Result<Option<User>, String> {
    let (_, certificate) =
        X509Certificate::from_der(der).map_err(|error| format!("the client certificate cannot be read: {error}"))?;
    let subject = certificate.subject();
    let text = |value: &x509_parser::x509::AttributeTypeAndValue<'_>| value.as_str().ok().map(str::to_owned);
    // Of several common names the last one is used.
    let name = subject.iter_common_name().last().and_then(text).unwrap_or_default();
    if name.is_empty() {
        return Ok(None);
    }
    let mut uids = Vec::new();
    for attribute in subject.iter_attributes().filter(|_| with_uid) {
        if attribute.attr_type().iter().is_some_and(|id| id.eq(UID.iter().copied())) {
            uids.push(text(attribute).filter(|uid| !uid.is_empty()).ok_or("the client certificate's UID is no text")?);
        }
    }
    if uids.len() > 1 {
        return Err("the client certificate has several UIDs".to_owned());
    }
    let groups = subject.iter_organization().filter_map(text).collect();
    let extra = [(CREDENTIAL_ID.to_owned(), vec![format!("X509SHA256={}", hex(&Sha256::digest(der)))])];
    Ok(Some(User { name, uid: uids.pop().unwrap_or_default(), groups, extra: extra.into() }))
}

/// The remaining validity in seconds; negative if it has expired, `None` if it cannot be parsed.
pub(super) fn seconds_left(der: &[u8], now: SystemTime) -> Option<f64> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let end = u64::try_from(certificate.validity().not_after.timestamp()).unwrap_or_default();
    let end = SystemTime::UNIX_EPOCH + Duration::from_secs(end);
    Some(match end.duration_since(now) {
        Ok(left) => left.as_secs_f64(),
        Err(over) => -over.duration().as_secs_f64(),
    })
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use rcgen::CertificateParams;
    use rcgen::DistinguishedName;
    use rcgen::DnType;
    use rcgen::KeyPair;

    use super::*;

    fn certificate(attributes: &[(DnType, &str)]) -> Vec<u8> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        for (kind, value) in attributes {
            params.distinguished_name.push(kind.clone(), *value);
        }
        params.self_signed(&KeyPair::generate().expect("a key")).expect("a certificate").der().to_vec()
    }

    #[test]
    fn name_groups_and_credential() {
        let uid = DnType::CustomDnType(UID.to_vec());
        let der = certificate(&[
            (DnType::OrganizationName, "system:nodes"),
            (DnType::CommonName, "system:node:n1"),
            (uid, "1234"),
        ]);
        let user = user_of(&der, true).expect("readable").expect("a user");
        assert_eq!((user.name.as_str(), user.uid.as_str()), ("system:node:n1", "1234"));
        assert_eq!(user.groups, ["system:nodes"]);
        let id = format!("X509SHA256={}", hex(&Sha256::digest(&der)));
        assert_eq!(user.extra[CREDENTIAL_ID], [id]);
        assert_eq!(user_of(&der, false).expect("readable").expect("a user").uid, "");
    }

    #[test]
    fn no_user_without_a_common_name() {
        assert_eq!(user_of(&certificate(&[(DnType::OrganizationName, "system:masters")]), true), Ok(None));
        assert_eq!(user_of(&certificate(&[(DnType::CommonName, "")]), true), Ok(None));
    }

    #[test]
    fn nonsense() {
        assert!(user_of(b"no certificate", true).is_err());
        let empty_uid = [(DnType::CommonName, "a"), (DnType::CustomDnType(UID.to_vec()), "")];
        assert!(user_of(&certificate(&empty_uid), true).is_err());
    }
}
