//! Waits on watches of the API server. A failed wait prints the last state of the object.

use std::fmt::Debug;
use std::pin::pin;

use anyhow::Result;
use anyhow::bail;
use futures_util::StreamExt as _;
use k8s_openapi::serde::Serialize;
use k8s_openapi::serde::de::DeserializeOwned;
use kube::Api;
use kube::Resource;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher;
use kube::runtime::watcher::Config;
use kube::runtime::watcher::watch_object;
use tokio::time::Instant;
use tokio::time::timeout_at;

use super::TIMEOUT;

/// Waits until `pick` returns a value for the object, which is `None` while it does not exist.
///
/// Watches are resumed after a restart of the API server, so this may be used while it is killed.
///
/// # Errors
/// `pick` returns no value in time; the error has the last state of the object.
pub async fn until<K, T>(
    api: &Api<K>,
    name: &str,
    what: &str,
    mut pick: impl FnMut(Option<&K>) -> Option<T>,
) -> Result<T>
where
    K: Resource + Clone + DeserializeOwned + Serialize + Debug + Send + 'static,
{
    let deadline = Instant::now() + TIMEOUT;
    let mut states = pin!(watch_object(api.clone(), name).default_backoff());
    let mut last = None;
    let mut last_error = String::new();
    loop {
        match timeout_at(deadline, states.next()).await {
            Ok(Some(Ok(state))) => {
                if let Some(found) = pick(state.as_ref()) {
                    return Ok(found);
                }
                last = state;
            }
            Ok(Some(Err(error))) => last_error = format!("\nlast error of the watch: {error}"),
            Ok(None) | Err(_) => {
                bail!("{name}: timed out waiting for: {what}; last state:\n{}{last_error}", shown(last.as_ref())?);
            }
        }
    }
}

/// Waits until the object does not exist.
///
/// # Errors
/// It exists at the deadline.
pub async fn until_gone<K>(api: &Api<K>, name: &str) -> Result<()>
where
    K: Resource + Clone + DeserializeOwned + Serialize + Debug + Send + 'static,
{
    until(api, name, "removal", |state| state.is_none().then_some(())).await
}

/// Waits until `pick` returns a value for any object of the watch.
///
/// # Errors
/// It returns none in time.
pub async fn until_some<K, T>(
    api: Api<K>,
    config: Config,
    what: &str,
    mut pick: impl FnMut(&K) -> Option<T>,
) -> Result<T>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let deadline = Instant::now() + TIMEOUT;
    let mut objects = pin!(watcher(api, config).default_backoff().applied_objects());
    let mut last_error = String::new();
    loop {
        match timeout_at(deadline, objects.next()).await {
            Ok(Some(Ok(object))) => {
                if let Some(found) = pick(&object) {
                    return Ok(found);
                }
            }
            Ok(Some(Err(error))) => last_error = format!("; last error of the watch: {error}"),
            Ok(None) | Err(_) => bail!("timed out waiting for: {what}{last_error}"),
        }
    }
}

/// The object without managed fields, for messages.
fn shown<K: Serialize>(state: Option<&K>) -> Result<String> {
    let Some(state) = state else { return Ok("it does not exist".to_owned()) };
    let mut value = serde_json::to_value(state)?;
    if let Some(metadata) = value["metadata"].as_object_mut() {
        metadata.remove("managedFields");
    }
    Ok(format!("{value:#}"))
}
