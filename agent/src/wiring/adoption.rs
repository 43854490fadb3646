//! The static pods that the runtime has when the agent starts.

use std::collections::BTreeMap;

use anyhow::Context as _;
use keblet_proto::cri::v1 as cri;

use crate::config::Settings;
use crate::model::ConfigSource;
use crate::model::runtime_keys;
use crate::retry::Operation;
use crate::retry::RetryTracker;
use crate::runtime::Runtime;
use crate::runtime::RuntimeError;
use crate::sources::adoption::Adoptions;
use crate::sources::adoption::StaticSandbox;
use crate::sources::static_pod::CONFIG_SOURCE;
use crate::workers::generate::names;

/// The target of failed lists.
const TARGET: &str = "this node";

/// Reads them from the runtime. Without them the static pods of another kubelet would be replaced, so that this waits
/// until the runtime responds; cancelled by dropping it.
///
/// # Errors
/// The task that reads the record panicked.
pub(super) async fn find(settings: &Settings, runtime: &Runtime, retries: &RetryTracker) -> anyhow::Result<Adoptions> {
    let sandboxes = list_until_answered(runtime, retries).await;
    let root = settings.flags.root_dir.clone();
    let read = tokio::task::spawn_blocking(move || Adoptions::new(sandboxes, &root));
    read.await.context("reading the record of adopted static pods")
}

async fn list_until_answered(runtime: &Runtime, retries: &RetryTracker) -> Vec<StaticSandbox> {
    loop {
        match list(runtime).await {
            Ok(sandboxes) => {
                retries.succeeded(Operation::AdoptStaticPods, TARGET);
                return sandboxes;
            }
            Err(error) => {
                let due = retries.failed(Operation::AdoptStaticPods, TARGET, &error.to_string());
                tokio::time::sleep_until(due).await;
            }
        }
    }
}

async fn list(runtime: &Runtime) -> Result<Vec<StaticSandbox>, RuntimeError> {
    let sandboxes = runtime.list_pod_sandboxes(cri::PodSandboxFilter::default()).await?;
    if !sandboxes.iter().any(is_from_file) {
        return Ok(Vec::new());
    }
    let containers = runtime.list_containers(cri::ContainerFilter::default()).await?;
    Ok(sandboxes.into_iter().filter(is_from_file).map(|sandbox| convert(sandbox, &containers)).collect())
}

fn is_from_file(sandbox: &cri::PodSandbox) -> bool {
    sandbox.annotations.get(CONFIG_SOURCE).is_some_and(|source| source == ConfigSource::File.as_str())
}

fn convert(sandbox: cri::PodSandbox, containers: &[cri::Container]) -> StaticSandbox {
    let label_of = |name: &str| sandbox.labels.get(name).cloned().unwrap_or_default();
    // The last instance of each, since its image may have been changed in place.
    let mut newest: BTreeMap<&str, &cri::Container> = BTreeMap::new();
    for container in containers.iter().filter(|container| container.pod_sandbox_id == sandbox.id) {
        let name = container.metadata.as_ref().map(|metadata| metadata.name.as_str()).unwrap_or_default();
        let known = newest.entry(name).or_insert(container);
        if container.created_at > known.created_at {
            *known = container;
        }
    }
    let hash = |container: &cri::Container| {
        container.annotations.get(runtime_keys::HASH).and_then(|text| u64::from_str_radix(text, 16).ok()).unwrap_or(0)
    };
    StaticSandbox {
        uid: label_of(runtime_keys::POD_UID),
        namespace: label_of(runtime_keys::POD_NAMESPACE),
        name: label_of(runtime_keys::POD_NAME),
        ready: sandbox.state == cri::PodSandboxState::SandboxReady as i32,
        created_at: sandbox.created_at,
        marked: names::static_uid_of_mark(&sandbox.annotations).map(str::to_owned),
        containers: newest.into_iter().map(|(name, container)| (name.to_owned(), hash(container))).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::SeqCst;
    use std::time::Duration;

    use tonic::Status;
    use tracing::Level;

    use super::*;
    use crate::model::testing::LogCount;
    use crate::recorder::testing::listening;
    use crate::runtime::RuntimeOptions;
    use crate::runtime::tests::server::Socket;
    use crate::runtime::tests::server::say;
    use crate::runtime::tests::server::script;

    #[tokio::test(start_paused = true)]
    async fn a_runtime_that_refuses_the_list_for_minutes_is_reported_and_waited_for() {
        let warned = LogCount::start("keblet::retry", Level::WARN);
        let (socket, (recorder, mut events), calls) = (Socket::default(), listening(), Arc::new(AtomicUsize::new(0)));
        let counted = calls.clone();
        socket.serve(script(move |_, _| {
            counted.fetch_add(1, SeqCst);
            Err(Status::unknown("refused for ever"))
        }));
        let connected = socket.clone();
        let connect = move || connected.clone().connect();
        let runtime = Runtime::with_connector("unix:///run/fake.sock", connect, RuntimeOptions::default());
        let retries = RetryTracker::new(recorder, None);
        let listing = list_until_answered(&runtime, &retries);
        assert!(tokio::time::timeout(Duration::from_secs(300), listing).await.is_err(), "nothing was listed");
        // One in 3 to 4.5 s.
        let refused = calls.load(SeqCst);
        assert!((65..=110).contains(&refused), "{refused} calls in five minutes");
        assert_eq!(warned.lines(), 1);
        let sent = events.take();
        let expected = "node W OperationStuck: adopt_static_pods of this node has failed for 3 minutes: ";
        assert!(sent.len() == 1 && sent[0].starts_with(expected), "{sent:?}");
        socket.vanish();
        socket.serve(script(|_, _| say(&cri::ListPodSandboxResponse::default())));
        assert_eq!(list_until_answered(&runtime, &retries).await.len(), 0);
        assert!(!retries.is_failing(Operation::AdoptStaticPods, TARGET));
    }
}
