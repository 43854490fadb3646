//! Credentials in pull secrets. Pure.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Secret;

use super::Credential;
use super::CredentialError;
use super::CredentialSource;
use super::docker_config::Entries;
use super::docker_config::Login;
use super::docker_config::parse_config_json;
use super::docker_config::parse_dockercfg;
use super::keyring::Keyring;
use super::keyring::may_serve;
use crate::images::access::SecretUse;

/// What the pull secrets hold for a repository, in the order in which it is tried: all secrets are one keyring. Secrets of
/// other types, or without data, are left out.
///
/// # Errors
/// A secret is no docker configuration; the others are not used either.
pub(super) fn matching(secrets: &[Arc<Secret>], repository: &str) -> Result<Vec<Credential>, CredentialError> {
    let mut keyring = Keyring::default();
    for secret in secrets {
        // A secret may have a hundred thousand entries: only those that can be used are kept and hashed.
        let usable = entries(secret)?.into_iter().filter(|(registry, _)| may_serve(registry, repository));
        usable.for_each(|(registry, login)| keyring.add(&registry, (secret, login)));
    }
    Ok(keyring.matching(repository).into_iter().map(|(secret, login)| credential(secret, login)).collect())
}

fn credential(secret: &Secret, login: &Login) -> Credential {
    let source = CredentialSource::Secret(use_of(secret, login.hash()));
    Credential { login: login.clone(), source }
}

fn entries(secret: &Secret) -> Result<Entries, CredentialError> {
    let data = |key: &str| secret.data.as_ref()?.get(key).map(|data| data.0.as_slice()).filter(|data| !data.is_empty());
    let parsed = match secret.type_.as_deref().unwrap_or_default() {
        "kubernetes.io/dockerconfigjson" => data(".dockerconfigjson").map(parse_config_json),
        "kubernetes.io/dockercfg" => data(".dockercfg").map(parse_dockercfg),
        _ => None,
    };
    parsed.unwrap_or_else(|| Ok(Entries::new())).map_err(|problem| {
        let [namespace, name] = [&secret.metadata.namespace, &secret.metadata.name].map(Option::clone);
        CredentialError::Secret { namespace: namespace.unwrap_or_default(), name: name.unwrap_or_default(), problem }
    })
}

fn use_of(secret: &Secret, hash: String) -> SecretUse {
    let part = |text: &Option<String>| text.clone().unwrap_or_default();
    let metadata = &secret.metadata;
    SecretUse {
        uid: part(&metadata.uid),
        namespace: part(&metadata.namespace),
        name: part(&metadata.name),
        credential_hash: hash,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::secret;
    use super::*;

    fn users(secrets: &[Arc<Secret>], repository: &str) -> Vec<String> {
        let found = matching(secrets, repository).expect("valid");
        found.into_iter().map(|credential| credential.login.username).collect()
    }

    #[test]
    fn all_secrets_are_one_keyring() {
        let first = secret("s1", &json!({"auths": {"quay.io": {"username": "s1"}}}));
        let second =
            json!({"auths": {"quay.io/coreos": {"username": "path"}, "https://quay.io/v1/": {"username": "s2"}}});
        let secrets = [first, secret("s2", &second)];
        assert_eq!(users(&secrets, "quay.io/coreos/etcd"), ["path", "s1", "s2"]);
        assert_eq!(users(&secrets, "r.io/a"), Vec::<String>::new());
        let found = matching(&secrets, "quay.io/a").expect("valid");
        let CredentialSource::Secret(used) = &found[0].source else { panic!("{found:?}") };
        assert_eq!((used.uid.as_str(), used.namespace.as_str(), used.name.as_str()), ("uid-s1", "ns", "s1"));
        assert_eq!(used.credential_hash, found[0].login.hash());
    }

    #[test]
    fn docker_hub_is_served_by_its_old_name_if_by_no_other() {
        let old = json!({"quay.io": {"username": "quay"}, "https://index.docker.io/v1/": {"username": "hub"}});
        let mut secrets = vec![secret("s1", &json!({"auths": old}))];
        assert_eq!(users(&secrets, "docker.io/library/busybox"), ["hub"]);
        secrets.push(secret("s2", &json!({"auths": {"docker.io": {"username": "exact"}}})));
        assert_eq!(users(&secrets, "docker.io/library/busybox"), ["exact"]);
    }

    #[test]
    fn other_types_are_left_out_and_broken_content_fails() {
        let with_type = |kind: &str, key: &str, content: &str| {
            let mut secret = Secret { type_: Some(kind.to_owned()), ..Secret::default() };
            secret.metadata.namespace = Some("ns".to_owned());
            secret.metadata.name = Some("s".to_owned());
            let content = k8s_openapi::ByteString(content.as_bytes().to_vec());
            secret.data = Some([(key.to_owned(), content)].into());
            Arc::new(secret)
        };
        let old = r#"{"r.io": {"username": "old"}}"#;
        assert_eq!(users(&[with_type("kubernetes.io/dockercfg", ".dockercfg", old)], "r.io/a"), ["old"]);
        for (kind, key, content) in [
            ("Opaque", ".dockercfg", old),
            ("kubernetes.io/dockerconfigjson", ".dockercfg", old),
            ("kubernetes.io/dockerconfigjson", ".dockerconfigjson", ""),
        ] {
            assert!(users(&[with_type(kind, key, content)], "r.io/a").is_empty(), "{kind} {key}");
        }
        let broken = with_type("kubernetes.io/dockerconfigjson", ".dockerconfigjson", r#"{"auths": "hunter2"}"#);
        let error = matching(&[broken], "r.io/a").expect_err("broken").to_string();
        assert_eq!(error, "pull secret ns/s: invalid docker configuration at line 1, column 19");
    }
}
