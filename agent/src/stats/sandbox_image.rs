//! The image that the runtime makes sandboxes from. cAdvisor names it with the network of a pod, and dashboards select that by
//! `image!=""`.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OnceCell;

use super::sample::Sample;
use crate::runtime::Runtime;

/// How long a scrape waits for the runtime.
const TIMEOUT: Duration = Duration::from_secs(1);

/// The image of one sandbox, which stands for all: the runtime is queried once, not for each sandbox. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct SandboxImage(Arc<OnceCell<String>>);

impl SandboxImage {
    /// The image; empty if the runtime does not report it. A runtime that fails, or is slow, is queried again the next time.
    pub(super) async fn get(&self, runtime: &Runtime, sample: &Sample) -> &str {
        let mut with_network = sample.pods.iter().filter(|pod| pod.network_of.is_some());
        let Some(sandbox) = with_network.find_map(|pod| pod.sandbox.as_ref()) else { return "" };
        let ask = || async {
            match tokio::time::timeout(TIMEOUT, runtime.sandbox_image(sandbox.as_str())).await {
                Ok(Ok(image)) => Ok(image.unwrap_or_default()),
                Ok(Err(error)) => Err(error.rpc_text()),
                Err(_) => Err("it did not answer in time".to_owned()),
            }
        };
        match self.0.get_or_try_init(ask).await {
            Ok(image) => image.as_str(),
            Err(error) => {
                tracing::debug!(%sandbox, error, "the runtime does not report the image of a sandbox");
                ""
            }
        }
    }
}
