//! Pulls that begin ahead of a container's turn, while the pod's init containers run. What is observed stays the same: the
//! events of such a pull are sent when its container's turn comes, and one that failed is tried again then, as if it had not
//! been. Only images that are not on the node, with `imagePullPolicy: IfNotPresent`; within the limits of all pulls.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::Secret;
use keblet_proto::cri::v1 as cri;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::sync::DropGuard;

use super::Images;

/// A pull ahead of its container's turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Progress {
    /// The image is being looked up on the node.
    Looking,
    /// It is being pulled.
    Pulling,
    /// It was pulled; how long that took, without and with waiting for a permit.
    Pulled { took: Duration, total: Duration },
    /// It was there already, or could not be pulled.
    Nothing,
}

/// Pulls that were begun ahead, by pod and image.
#[derive(Debug, Default)]
pub(super) struct Prefetches(Mutex<HashMap<(String, String), PrefetchedPull>>);

impl Prefetches {
    fn all(&self) -> MutexGuard<'_, HashMap<(String, String), PrefetchedPull>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn forget_pod(&self, uid: &str) {
        self.all().retain(|(of, _), _| of != uid);
    }
}

/// An image that is to be pulled ahead for a pod.
#[derive(Clone, Debug)]
pub struct PrefetchRequest {
    /// The pod.
    pub pod: Arc<Pod>,
    /// As the spec names the image.
    pub image: String,
    /// With its tag.
    pub name: String,
    /// The pod's sandbox.
    pub sandbox: cri::PodSandboxConfig,
    /// The pod's pull secrets.
    pub secrets: Vec<Arc<Secret>>,
}

/// A pull that was begun ahead. It is cancelled when this is dropped, as one at its turn is when its pod is terminated: a
/// registry that does not answer must not keep the permit from the pulls of other pods for longer.
#[derive(Debug)]
pub struct PrefetchedPull {
    progress: watch::Receiver<Progress>,
    _pull: DropGuard,
}

impl PrefetchedPull {
    /// Waits until it is known whether the image is pulled: false if it is on the node already, or if the pull failed.
    /// Cancel-safe.
    pub async fn is_pull(&mut self) -> bool {
        let known = self.progress.wait_for(|progress| *progress != Progress::Looking).await;
        known.is_ok_and(|progress| *progress != Progress::Nothing)
    }

    /// Waits for the end of the pull: its duration without and with the wait for a permit; `None` if it failed. Cancel-safe.
    pub async fn ended(&mut self) -> Option<(Duration, Duration)> {
        let ended = self.progress.wait_for(|progress| !matches!(progress, Progress::Looking | Progress::Pulling)).await;
        match *ended.ok()? {
            Progress::Pulled { took, total } => Some((took, total)),
            _ => None,
        }
    }
}

impl Images {
    /// True if images are pulled ahead.
    pub fn prefetches(&self) -> bool {
        self.prefetches.is_some()
    }

    /// Begins to pull an image ahead, unless it was begun for this pod before.
    pub fn prefetch(self: &Arc<Self>, request: PrefetchRequest) {
        let Some(prefetches) = &self.prefetches else { return };
        let uid = request.pod.metadata.uid.clone().unwrap_or_default();
        let (sender, receiver) = watch::channel(Progress::Looking);
        let mut all = prefetches.all();
        let key = (uid, request.name.clone());
        if all.contains_key(&key) {
            return;
        }
        let cancelled = CancellationToken::new();
        all.insert(key, PrefetchedPull { progress: receiver, _pull: cancelled.clone().drop_guard() });
        let images = self.clone();
        // Not dropped with its pod: a pull that the runtime completes nevertheless would have no record.
        tokio::spawn(async move {
            let ended = images.pull_ahead(&request, &sender, &cancelled).await;
            sender.send_replace(ended);
        });
    }

    /// The pull that was begun ahead for this pod; once.
    pub fn take_prefetched(&self, uid: &str, name: &str) -> Option<PrefetchedPull> {
        self.prefetches.as_ref()?.all().remove(&(uid.to_owned(), name.to_owned()))
    }

    async fn pull_ahead(
        &self,
        request: &PrefetchRequest,
        progress: &watch::Sender<Progress>,
        cancelled: &CancellationToken,
    ) -> Progress {
        let PrefetchRequest { pod, image, name, sandbox, secrets } = request;
        let Ok(None) = self.inspect(name, pod.metadata.annotations.as_ref()).await else { return Progress::Nothing };
        let Ok(credentials) = self.credentials().matching(image, pod, secrets).await else { return Progress::Nothing };
        if let Some(access) = self.access()
            && access.begin(image).await.is_err()
        {
            return Progress::Nothing;
        }
        progress.send_replace(Progress::Pulling);
        let since = Instant::now();
        let pulled = self.pull_unless(cancelled, name, sandbox, &credentials).await;
        let now = Instant::now();
        self.record_pull(image, pulled.as_ref()).await;
        match pulled {
            Ok(pulled) => Progress::Pulled { took: now - pulled.began, total: now - since },
            Err(error) => {
                tracing::debug!(pod = %crate::model::pod_ref(pod), image, %error, "cannot pull an image ahead");
                Progress::Nothing
            }
        }
    }
}
