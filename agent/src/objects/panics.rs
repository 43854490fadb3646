//! Panics of watches. Watches are started as pods need them; the supervisor of the agent's tasks receives their panics here.

use std::panic::AssertUnwindSafe;
use std::panic::resume_unwind;

use futures_util::FutureExt as _;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use crate::model::named;

/// The message of the last panic.
#[derive(Clone, Debug, Default)]
pub(super) struct Panics(watch::Sender<Option<String>>);

impl Panics {
    /// Starts the watch of this name, which ends with the returned handle.
    pub(super) fn spawn(
        &self,
        name: &'static str,
        watching: impl Future<Output = ()> + Send + 'static,
    ) -> AbortOnDropHandle<()> {
        let panics = self.0.clone();
        AbortOnDropHandle::new(tokio::spawn(async move {
            if let Err(panic) = AssertUnwindSafe(named(name, watching)).catch_unwind().await {
                let message = panic.downcast::<String>().map_or_else(|_| name.to_owned(), |message| *message);
                panics.send_replace(Some(message));
            }
        }))
    }

    /// Panics as soon as a watch has, with the same message. Ends with the last watch and the last clone of `self`.
    pub(super) fn raise(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut panics = self.0.subscribe();
        async move {
            let message = match panics.wait_for(Option::is_some).await {
                Ok(message) => message.clone(),
                Err(_) => None,
            };
            if let Some(message) = message {
                resume_unwind(Box::new(message));
            }
        }
    }
}
