//! Which images need a verification of access, and whether a record proves it. Pure.

use super::record::Access;
use super::record::CredentialSource;

/// From this number of secrets in one entry on, a secret is recognised by its content only.
const MAX_SECRETS: usize = 100;

/// `imagePullCredentialsVerificationPolicy`.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum VerificationPolicy {
    /// Images that this agent has not pulled may be used by every pod.
    #[default]
    NeverVerifyPreloadedImages,
    /// Every image may be used by every pod.
    NeverVerify,
    /// All images but these: exact names, or prefixes that end in `/*`.
    NeverVerifyAllowlistedImages(Vec<String>),
    /// All images.
    AlwaysVerify,
}

impl VerificationPolicy {
    /// True if pods must prove their access to an image. `name`: without tag and digest; `pulled`: by this agent.
    pub(super) fn verifies(&self, name: &str, pulled: bool) -> bool {
        match self {
            Self::NeverVerifyPreloadedImages => pulled,
            Self::NeverVerify => false,
            Self::NeverVerifyAllowlistedImages(allowed) => !allowed.iter().any(|pattern| is_listed(pattern, name)),
            Self::AlwaysVerify => true,
        }
    }
}

fn is_listed(pattern: &str, name: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(prefix) => name.starts_with(prefix),
        None => pattern == name,
    }
}

/// True if the entry says that all pods may use the image.
pub(super) fn is_open(access: &Access) -> bool {
    access.node_pods_accessible
}

/// True if nothing is recorded that could prove access.
pub(super) fn is_empty(access: &Access) -> bool {
    *access == Access::default()
}

/// The first of the pod's credentials that proves its access: its content is known, or it is a recorded secret or service
/// account.
pub(super) fn proof<'a>(access: &Access, presented: &'a [CredentialSource]) -> Option<&'a CredentialSource> {
    let known = &access.kubernetes_secrets;
    let proves = |source: &&CredentialSource| match source {
        CredentialSource::Secret(used) => known.iter().any(|known| {
            let same_content = !used.credential_hash.is_empty() && known.credential_hash == used.credential_hash;
            same_content || (access.kubernetes_secrets.len() < MAX_SECRETS && known.is_same_object(used))
        }),
        _ => false,
    };
    let account = || presented.iter().find(|source| matches!(source, CredentialSource::ServiceAccount(_)));
    let is_known = |source: &&CredentialSource| match source {
        CredentialSource::ServiceAccount(used) => access.kubernetes_service_accounts.contains(used),
        _ => false,
    };
    presented.iter().find(proves).or_else(|| account().filter(is_known))
}

/// True if a credential that has proven access is still added to the entry.
pub(super) fn is_recorded(access: &Access) -> bool {
    access.kubernetes_secrets.len() < MAX_SECRETS
}

#[cfg(test)]
mod tests {
    use super::super::record::AccountUse;
    use super::super::record::SecretUse;
    use super::*;

    #[test]
    fn policies() {
        let listed = |patterns: &[&str]| {
            VerificationPolicy::NeverVerifyAllowlistedImages(patterns.iter().map(|text| (*text).to_owned()).collect())
        };
        for (policy, preloaded, pulled) in [
            (VerificationPolicy::default(), false, true),
            (VerificationPolicy::NeverVerify, false, false),
            (VerificationPolicy::AlwaysVerify, true, true),
            (listed(&["r.io/a/b"]), false, false),
            (listed(&["r.io/*"]), false, false),
            (listed(&["r.io/a/*"]), false, false),
            (listed(&["r.io/a/b/*", "r.io/a"]), true, true),
        ] {
            let verifies = [false, true].map(|pulled| policy.verifies("r.io/a/b", pulled));
            assert_eq!(verifies, [preloaded, pulled], "{policy:?}");
        }
    }

    fn secret(uid: &str, namespace: &str, name: &str, hash: &str) -> CredentialSource {
        CredentialSource::Secret(used(uid, namespace, name, hash))
    }

    fn used(uid: &str, namespace: &str, name: &str, hash: &str) -> SecretUse {
        let [uid, namespace, name, credential_hash] = [uid, namespace, name, hash].map(str::to_owned);
        SecretUse { uid, namespace, name, credential_hash }
    }

    #[test]
    fn access_is_proven_by_content_or_object() {
        let one = Access { kubernetes_secrets: vec![used("u1", "ns", "s", "A")], ..Access::default() };
        for (presented, expected) in [
            (vec![secret("u1", "ns", "s", "B")], true),
            (vec![secret("u2", "ns2", "s2", "A")], true),
            (vec![secret("u2", "ns", "s", "C")], false),
            (vec![secret("u2", "ns", "s", "")], false),
            (vec![CredentialSource::Node], false),
            (vec![], false),
            (vec![CredentialSource::Node, secret("u2", "ns", "s", "C"), secret("u3", "x", "y", "A")], true),
        ] {
            assert_eq!(proof(&one, &presented).is_some(), expected, "{presented:?}");
        }
        let unhashed = Access { kubernetes_secrets: vec![used("u1", "ns", "s", "")], ..Access::default() };
        assert!(proof(&unhashed, &[secret("u2", "ns", "other", "")]).is_none(), "no content is known of either");
        assert!(proof(&unhashed, &[secret("u1", "ns", "s", "")]).is_some());
        let many: Vec<_> = (0..100).map(|n| used(&format!("u{n}"), "ns", "s", &format!("h{n}"))).collect();
        let full = Access { kubernetes_secrets: many, ..Access::default() };
        assert!(proof(&full, &[secret("u1", "ns", "s", "new")]).is_none());
        assert!(proof(&full, &[secret("u1", "ns", "s", "h7")]).is_some() && !is_recorded(&full));
    }

    #[test]
    fn the_first_service_account_counts() {
        let account = |uid: &str| AccountUse { uid: uid.to_owned(), ..AccountUse::default() };
        let access = Access { kubernetes_service_accounts: vec![account("known")], ..Access::default() };
        let presented = |uids: &[&str]| -> Vec<_> {
            uids.iter().map(|uid| CredentialSource::ServiceAccount(account(uid))).collect()
        };
        assert!(proof(&access, &presented(&["known", "other"])).is_some());
        assert!(proof(&access, &presented(&["recreated", "known"])).is_none());
    }
}
