//! The pod's service account, for plugins that get a token of it.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use secrecy::SecretString;

use super::config::TokenAttributes;
use crate::images::access::AccountUse;
use crate::objects::Objects;
use crate::objects::TokenKey;

/// What a plugin receives of the pod.
#[derive(Clone, Debug, Default)]
pub(super) struct Account {
    /// The service account; `None` without a token.
    pub(super) account: Option<AccountUse>,
    pub(super) token: Option<SecretString>,
    /// Those of the service account's annotations that the plugin asks for.
    pub(super) annotations: BTreeMap<String, String>,
}

/// Account and token for a plugin; `None` if it is not to be run for this pod. The service account is read each time, since
/// its UID and annotations decide whose credentials are used.
///
/// # Errors
/// The account cannot be read, or no token was issued.
pub(super) async fn find(
    attributes: &TokenAttributes,
    pod: &Pod,
    objects: &Objects,
) -> Result<Option<Account>, String> {
    let part = |text: &Option<String>| text.clone().unwrap_or_default();
    let name = pod.spec.as_ref().and_then(|spec| spec.service_account_name.clone()).unwrap_or_default();
    if name.is_empty() {
        let required = attributes.require_service_account == Some(true);
        return Ok((!required).then(Account::default));
    }
    let namespace = part(&pod.metadata.namespace);
    let found = objects.service_account(&namespace, &name).await.map_err(|error| error.to_string())?;
    let all = found.metadata.annotations.unwrap_or_default();
    if attributes.required_annotations.iter().any(|key| !all.contains_key(key)) {
        return Ok(None);
    }
    let keys = attributes.required_annotations.iter().chain(&attributes.optional_annotations);
    let annotations = keys.filter_map(|key| Some((key.clone(), all.get(key)?.clone()))).collect();
    let uid = part(&found.metadata.uid);
    let key = TokenKey {
        namespace: namespace.clone(),
        service_account: name.clone(),
        audiences: vec![attributes.audience.clone()],
        expiration_seconds: None,
        pod: (part(&pod.metadata.name), part(&pod.metadata.uid).into()),
    };
    let token = objects.token_of_account(&key, &uid).await.map_err(|error| error.to_string())?.text;
    Ok(Some(Account { account: Some(AccountUse { uid, namespace, name }), token: Some(token), annotations }))
}
