//! How initiator and target authenticate each other (CHAP), from a Secret.

use k8s_openapi::api::core::v1::Secret;
use secrecy::SecretString;

use super::disk::IscsiSource;
use crate::objects::Objects;
use crate::volumes::VolumeError;

/// Keys of a Secret of type `kubernetes.io/iscsi-chap`, which are settings of iscsiadm(8). A key that is absent is not set:
/// `_in` is how the target authenticates itself.
const DISCOVERY: [&str; 4] = [
    "discovery.sendtargets.auth.username",
    "discovery.sendtargets.auth.password",
    "discovery.sendtargets.auth.username_in",
    "discovery.sendtargets.auth.password_in",
];
const SESSION: [&str; 4] = [
    "node.session.auth.username",
    "node.session.auth.password",
    "node.session.auth.username_in",
    "node.session.auth.password_in",
];

/// Where CHAP is used.
#[derive(Clone, Debug, Default)]
pub(in crate::volumes) struct Chap {
    /// While targets are discovered.
    pub(super) discovery: Option<Login>,
    /// In sessions.
    pub(super) session: Option<Login>,
}

/// Names and passwords, by setting.
#[derive(Clone, Debug, Default)]
pub(super) struct Login {
    pub(super) values: Vec<(&'static str, SecretString)>,
}

impl Chap {
    /// Reads the Secret that a volume names, if it asks for CHAP. `namespace`: the pod's.
    ///
    /// # Errors
    /// No secret is named, it cannot be read, or a value cannot be used.
    pub(in crate::volumes) async fn read(
        objects: &Objects,
        source: &IscsiSource,
        namespace: &str,
    ) -> Result<Self, VolumeError> {
        if !source.chap_discovery && !source.chap_session {
            return Ok(Self::default());
        }
        let (name, stated) = (&source.secret.0, source.secret.1.as_str());
        let namespace = if stated.is_empty() { namespace } else { stated };
        if name.is_empty() || namespace.is_empty() {
            return Err(VolumeError::NoChapSecret);
        }
        let secret = objects.secret_now(namespace, name).await?;
        let login = |wanted: bool, keys: &[&'static str]| {
            wanted.then(|| login(&secret, keys).map_err(|key| bad(key, namespace, name))).transpose()
        };
        Ok(Self {
            discovery: login(source.chap_discovery, &DISCOVERY)?,
            session: login(source.chap_session, &SESSION)?,
        })
    }
}

fn bad(key: &'static str, namespace: &str, name: &str) -> VolumeError {
    VolumeError::ChapValue { key, namespace: namespace.to_owned(), name: name.to_owned() }
}

/// The values of these keys.
///
/// # Errors
/// The key of one that iscsiadm(8) would not store as one value: it keeps settings as lines.
fn login(secret: &Secret, keys: &[&'static str]) -> Result<Login, &'static str> {
    let mut values = Vec::new();
    for key in keys {
        let value = secret.data.as_ref().and_then(|data| data.get(*key));
        let Some(value) = value.filter(|value| !value.0.is_empty()) else { continue };
        let text = String::from_utf8(value.0.clone()).map_err(|_| *key)?;
        if text.contains(char::is_control) {
            return Err(key);
        }
        values.push((*key, text.into()));
    }
    Ok(Login { values })
}

#[cfg(test)]
mod tests {
    use secrecy::ExposeSecret as _;
    use serde_json::json;

    use super::*;
    use crate::volumes::testing::Replies;
    use crate::volumes::testing::objects;

    /// That of a persistent volume is the administrator's, wherever the claim is used.
    #[tokio::test]
    async fn a_secret_is_that_of_the_pod_unless_the_volume_names_another_namespace() {
        let replies = Replies::default();
        for (namespace, user) in [("ns", "cG9k"), ("storage", "YWRtaW4=")] {
            let secret = json!({"data": {"node.session.auth.username": user}});
            let path = format!("/api/v1/namespaces/{namespace}/secrets/chap");
            replies.lock().expect("unpoisoned").insert(path, secret);
        }
        let (objects, _node) = objects(&replies);
        for (stated, expected) in [("", "pod"), ("storage", "admin")] {
            let secret = ("chap".to_owned(), stated.to_owned());
            let source = IscsiSource { chap_session: true, secret, ..IscsiSource::default() };
            let chap = Chap::read(&objects, &source, "ns").await.expect("read");
            assert!(chap.discovery.is_none(), "it is not asked for");
            let values = chap.session.expect("a login").values;
            let shown: Vec<_> = values.iter().map(|(key, value)| (*key, value.expose_secret())).collect();
            assert_eq!(shown, [("node.session.auth.username", expected)], "{stated:?}");
        }
    }

    #[test]
    fn values_of_the_keys() {
        use base64::Engine as _;
        let encoded = |text: &[u8]| base64::engine::general_purpose::STANDARD.encode(text);
        let secret = |value: &[u8]| -> Secret {
            let data = json!({"node.session.auth.username": encoded(b"me"), "node.session.auth.password": encoded(value),
                "node.session.auth.username_in": "", "other": encoded(b"x")});
            serde_json::from_value(json!({"data": data})).expect("a secret")
        };
        let found = login(&secret(b"-o hunter2"), &SESSION).expect("usable");
        let shown: Vec<_> = found.values.iter().map(|(key, value)| (*key, value.expose_secret())).collect();
        assert_eq!(shown, [("node.session.auth.username", "me"), ("node.session.auth.password", "-o hunter2")]);
        assert!(login(&secret(b"x"), &DISCOVERY).expect("usable").values.is_empty());
        for value in [&b"a\nnode.startup = automatic"[..], b"a\0b", b"\xff"] {
            assert_eq!(login(&secret(value), &SESSION).err(), Some("node.session.auth.password"));
        }
        assert!(login(&Secret::default(), &SESSION).expect("usable").values.is_empty());
    }

    #[tokio::test]
    async fn chap_needs_a_secret() {
        let objects = Objects::standalone();
        let mut source = IscsiSource::default();
        let none = Chap::read(&objects, &source, "ns").await.expect("not asked for");
        assert!(none.discovery.is_none() && none.session.is_none());
        source.chap_session = true;
        let error = Chap::read(&objects, &source, "ns").await.expect_err("no name").to_string();
        assert_eq!(error, "iscsi: CHAP needs a secretRef with a name");
        source.secret.0 = "s".to_owned();
        Chap::read(&objects, &source, "ns").await.expect_err("no API server");
    }
}
