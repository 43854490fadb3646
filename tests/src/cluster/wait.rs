//! Waiting for an object to be as it should. Owns the watch and the deadline; a failed wait shows the object as it was.

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

/// Waits until `pick` gives something for the object, which it sees as `None` while there is none.
///
/// Watches survive a dead API server, so this may be used while one is being killed.
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
            Ok(Some(Err(error))) => last_error = format!("\nlast last_error of the watch: {error}"),
            Ok(None) | Err(_) => {
                bail!("{name}: never came: {what}; at last:\n{}{last_error}", shown(last.as_ref())?);
            }
        }
    }
}

/// Waits until there is no such object.
pub async fn until_gone<K>(api: &Api<K>, name: &str) -> Result<()>
where
    K: Resource + Clone + DeserializeOwned + Serialize + Debug + Send + 'static,
{
    until(api, name, "gone", |state| state.is_none().then_some(())).await
}

/// Waits until `pick` gives something for any of the objects that the watch tells of.
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
            Ok(Some(Err(error))) => last_error = format!("; last last_error of the watch: {error}"),
            Ok(None) | Err(_) => bail!("never came: {what}{last_error}"),
        }
    }
}

/// The object for people, without the API server's book-keeping.
fn shown<K: Serialize>(state: Option<&K>) -> Result<String> {
    let Some(state) = state else { return Ok("it does not exist".to_owned()) };
    let mut value = serde_json::to_value(state)?;
    if let Some(metadata) = value["metadata"].as_object_mut() {
        metadata.remove("managedFields");
    }
    Ok(format!("{value:#}"))
}
