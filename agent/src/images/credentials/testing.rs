//! Pull secrets for tests.

use std::sync::Arc;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;

/// A secret `ns/name` with docker's configuration.
pub(crate) fn secret(name: &str, config: &serde_json::Value) -> Arc<Secret> {
    let mut secret = Secret { type_: Some("kubernetes.io/dockerconfigjson".to_owned()), ..Secret::default() };
    secret.metadata.namespace = Some("ns".to_owned());
    secret.metadata.name = Some(name.to_owned());
    secret.metadata.uid = Some(format!("uid-{name}"));
    let content = ByteString(config.to_string().into_bytes());
    secret.data = Some([(".dockerconfigjson".to_owned(), content)].into());
    Arc::new(secret)
}
