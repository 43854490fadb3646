//! Inspections: with exits, the only way for state to enter the cache.
//!
//! One inspection is two filtered lists and then a status call for each instance that changed: one that was exited, or was
//! and is running, is reused, unless the worker has just acted on it. The sample time is taken before the lists.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::sync::Arc;

use futures_util::future::try_join_all;
use keblet_proto::cri::v1;
use tokio::time::Instant;

use super::convert;
use super::exit_code;
use super::termination::MessageReader;
use super::termination::MessageSource;
use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::PodRef;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::SandboxId;
use crate::model::SandboxStatus;
use crate::model::runtime_keys;
use crate::runtime::ContainerInspection;
use crate::runtime::Runtime;
use crate::runtime::RuntimeError;

/// Sandboxes of a pod that are listed each by a call of its own.
const MAX_UNLABELLED: usize = 16;

/// Listed objects of one pod.
#[derive(Clone, Debug, Default)]
pub(super) struct Listing {
    pub sandboxes: Vec<v1::PodSandbox>,
    pub containers: Vec<v1::Container>,
}

/// Lists all pods of the runtime, by UID. Objects without a pod UID are ignored; so are, as in the status of a pod upstream,
/// sandboxes without it as a label if the pod has others: it would be restarted because it has several.
pub(super) async fn list_all(runtime: &Runtime) -> Result<(Instant, HashMap<PodUid, Listing>), RuntimeError> {
    let sampled_at = Instant::now();
    let (sandboxes, containers) = futures_util::try_join!(
        runtime.list_pod_sandboxes(v1::PodSandboxFilter::default()),
        runtime.list_containers(v1::ContainerFilter::default())
    )?;
    let mut pods: HashMap<PodUid, Listing> = HashMap::new();
    for sandbox in sandboxes {
        let uid = sandbox.metadata.as_ref().map(|m| m.uid.as_str()).filter(|uid| !uid.is_empty());
        if let Some(uid) = uid {
            pods.entry(PodUid::from(uid)).or_default().sandboxes.push(sandbox);
        }
    }
    for (uid, listing) in &mut pods {
        if listing.sandboxes.iter().any(|sandbox| is_labelled(uid, sandbox)) {
            listing.sandboxes.retain(|sandbox| is_labelled(uid, sandbox));
        }
    }
    for container in containers {
        let uid = container.labels.get(runtime_keys::POD_UID).filter(|uid| !uid.is_empty());
        if let Some(uid) = uid {
            pods.entry(PodUid::from(uid.as_str())).or_default().containers.push(container);
        }
    }
    Ok((sampled_at, pods))
}

/// Lists one pod. `unlabelled`: its sandboxes if a list by label has none.
pub(super) async fn list_one(
    runtime: &Runtime,
    uid: &PodUid,
    unlabelled: &[String],
) -> Result<(Instant, Listing), RuntimeError> {
    let sampled_at = Instant::now();
    let labels = BTreeMap::from([(runtime_keys::POD_UID.to_owned(), uid.as_str().to_owned())]);
    let of_sandboxes = v1::PodSandboxFilter { label_selector: labels.clone(), ..Default::default() };
    let of_containers = v1::ContainerFilter { label_selector: labels, ..Default::default() };
    let with_id = |id: &String| v1::PodSandboxFilter { id: id.clone(), ..Default::default() };
    let by_ids = try_join_all(unlabelled.iter().map(|id| runtime.list_pod_sandboxes(with_id(id))));
    let (mut sandboxes, containers, others) = futures_util::try_join!(
        runtime.list_pod_sandboxes(of_sandboxes),
        runtime.list_containers(of_containers),
        by_ids
    )?;
    if sandboxes.is_empty() {
        sandboxes.extend(others.into_iter().flatten().filter(|other| unlabelled.contains(&other.id)));
    }
    Ok((sampled_at, Listing { sandboxes, containers }))
}

/// Sandboxes in a list of all pods that have the pod's UID in their metadata alone and not as a label, as those that an
/// operator makes with `crictl runp`. What is beyond a number is found once these are removed.
pub(super) fn unlabelled(uid: &PodUid, listing: &Listing) -> Vec<String> {
    let unlabelled = listing.sandboxes.iter().filter(|sandbox| !is_labelled(uid, sandbox));
    unlabelled.take(MAX_UNLABELLED).map(|sandbox| sandbox.id.clone()).collect()
}

fn is_labelled(uid: &PodUid, sandbox: &v1::PodSandbox) -> bool {
    sandbox.labels.get(runtime_keys::POD_UID).is_some_and(|label| label == uid.as_str())
}

/// True if `listing` contains nothing new compared to `known`.
pub(super) fn agrees(listing: &Listing, known: &PodSnapshot) -> bool {
    let containers = by_id(known);
    listing.sandboxes.len() == known.sandboxes.len()
        && listing.containers.len() == known.containers.len()
        && listing.sandboxes.iter().all(|s| reusable_sandbox(s, known).is_some())
        && listing.containers.iter().all(|c| reusable_container(c, &containers).is_some())
}

/// Containers of an older snapshot, by id.
type KnownContainers<'a> = HashMap<&'a str, &'a ContainerStatus>;

/// Statuses requested beside the lists, by container id.
pub(super) type PrefetchedStatuses = HashMap<String, ContainerInspection>;

/// Requests the statuses of containers that the lists will contain as new. Failed requests are repeated later.
pub(super) async fn prefetch_statuses(runtime: &Runtime, ids: Vec<ContainerId>) -> PrefetchedStatuses {
    let asked = ids.iter().map(|id| async { (id.to_string(), runtime.container_status(id.as_str(), true).await.ok()) });
    let answers = futures_util::future::join_all(asked).await;
    answers.into_iter().filter_map(|(id, answer)| Some((id, answer?))).collect()
}

/// Completes a listing to a snapshot. `previous` (an older snapshot) and `early` (statuses requested after the listing began)
/// save calls.
pub(super) async fn complete(
    runtime: &Runtime,
    messages: &MessageReader,
    uid: &PodUid,
    (sampled_at, listing): (Instant, Listing),
    previous: Option<Arc<PodSnapshot>>,
    early: &PrefetchedStatuses,
) -> Result<PodSnapshot, RuntimeError> {
    let previous = previous.as_deref();
    let pod = pod_ref(uid, &listing, previous);
    let sandboxes = try_join_all(listing.sandboxes.iter().map(|s| sandbox_status(runtime, s, previous)));
    let known = &previous.map(by_id).unwrap_or_default();
    let containers = listing.containers.iter().map(|c| container_status(runtime, messages, uid, c, known, early));
    let (sandboxes, containers) = futures_util::try_join!(sandboxes, try_join_all(containers))?;
    let mut sandboxes: Vec<SandboxStatus> = sandboxes.into_iter().flatten().collect();
    let mut containers: Vec<ContainerStatus> = containers.into_iter().flatten().collect();
    sandboxes.sort_by(|a, b| (b.attempt, b.created_at, &b.id).cmp(&(a.attempt, a.created_at, &a.id)));
    sort_newest_first(&mut containers);
    let ips = ips(&sandboxes, previous);
    Ok(PodSnapshot { pod, sandboxes, containers, ips, sampled_at })
}

/// By attempt, which grows from one instance of a container to the next also if the clock is set back in between, then by
/// creation time.
fn sort_newest_first(containers: &mut [ContainerStatus]) {
    containers.sort_by(|a, b| (b.attempt, b.created_at, &b.id).cmp(&(a.attempt, a.created_at, &a.id)));
}

fn ips(sandboxes: &[SandboxStatus], previous: Option<&PodSnapshot>) -> Vec<String> {
    match sandboxes.first() {
        Some(newest) if newest.ready => newest.ips.clone(),
        _ if sandboxes.iter().any(|s| s.ready) => Vec::new(),
        _ => previous.map(|p| p.ips.clone()).unwrap_or_default(),
    }
}

fn pod_ref(uid: &PodUid, listing: &Listing, previous: Option<&PodSnapshot>) -> PodRef {
    if let Some(meta) = listing.sandboxes.iter().find_map(|s| s.metadata.as_ref()) {
        return PodRef { uid: uid.clone(), namespace: meta.namespace.as_str().into(), name: meta.name.as_str().into() };
    }
    if let Some(container) = listing.containers.first() {
        let label = |name: &str| container.labels.get(name).map(String::as_str).unwrap_or_default();
        return PodRef {
            uid: uid.clone(),
            namespace: label(runtime_keys::POD_NAMESPACE).into(),
            name: label(runtime_keys::POD_NAME).into(),
        };
    }
    let unknown = || PodRef { uid: uid.clone(), namespace: "".into(), name: "".into() };
    previous.map_or_else(unknown, |p| p.pod.clone())
}

fn reusable_sandbox<'a>(listed: &v1::PodSandbox, known: &'a PodSnapshot) -> Option<&'a SandboxStatus> {
    let ready = listed.state == v1::PodSandboxState::SandboxReady as i32;
    known.sandboxes.iter().find(|s| {
        let settled = !s.ready || s.host_network || !s.ips.is_empty();
        s.id.as_str() == listed.id && s.ready == ready && settled
    })
}

fn by_id(known: &PodSnapshot) -> KnownContainers<'_> {
    known.containers.iter().map(|container| (container.id.as_str(), container)).collect()
}

fn reusable_container<'a>(listed: &v1::Container, known: &KnownContainers<'a>) -> Option<&'a ContainerStatus> {
    let state = convert::state(listed.state);
    let settled = matches!(state, ContainerState::Running | ContainerState::Exited);
    let known = known.get(listed.id.as_str()).copied();
    let is_complete = |known: &ContainerStatus| known.proven.is_none() && !exit_code::is_held_back(known);
    known.filter(|known| settled && known.state == state && is_complete(known))
}

async fn sandbox_status(
    runtime: &Runtime,
    listed: &v1::PodSandbox,
    previous: Option<&PodSnapshot>,
) -> Result<Option<SandboxStatus>, RuntimeError> {
    if let Some(known) = previous.and_then(|p| reusable_sandbox(listed, p)) {
        return Ok(Some(known.clone()));
    }
    match runtime.pod_sandbox_status(&listed.id).await {
        Ok(status) => Ok(Some(convert::sandbox(status, &listed.runtime_handler))),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Verbose, since only then the runtime returns the pid of the init process; once per running instance. One that was
/// listed as created may be running by now.
async fn container_status(
    runtime: &Runtime,
    messages: &MessageReader,
    uid: &PodUid,
    listed: &v1::Container,
    known: &KnownContainers<'_>,
    early: &PrefetchedStatuses,
) -> Result<Option<ContainerStatus>, RuntimeError> {
    // One that was requested beside the lists may have changed although its state is the same (resources).
    let known = reusable_container(listed, known).filter(|_| !early.contains_key(&listed.id));
    if let Some(known) = known {
        return Ok(Some(known.clone()));
    }
    let may_run = convert::state(listed.state) != ContainerState::Exited;
    let reply = match early.get(&listed.id) {
        Some(reply) => reply.clone(),
        None => match runtime.container_status(&listed.id, may_run).await {
            Ok(reply) => reply,
            Err(error) if error.is_not_found() => return Ok(None),
            Err(error) => return Err(error),
        },
    };
    let sandbox = SandboxId::from(listed.pod_sandbox_id.as_str());
    let pid = reply.pid();
    let mut container = convert::container(reply.status, pid, sandbox);
    if container.state == ContainerState::Exited {
        messages.append(uid, &mut container, MessageSource::FileOrLog).await;
    }
    Ok(Some(container))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::pleg::testing;
    use crate::runtime::RuntimeOptions;
    use crate::runtime::tests::server::Socket;
    use crate::runtime::tests::server::say;
    use crate::runtime::tests::server::script;

    /// A runtime whose container is running, and which returns its pid in verbose statuses.
    fn running() -> Runtime {
        let socket = Socket::default();
        socket.serve(script(|method, message| {
            assert_eq!(method, "ContainerStatus");
            let request: v1::ContainerStatusRequest = prost::Message::decode(message).expect("a request");
            let status = v1::ContainerStatus {
                id: request.container_id,
                metadata: Some(v1::ContainerMetadata { name: "web".into(), attempt: 0 }),
                state: v1::ContainerState::ContainerRunning.into(),
                ..Default::default()
            };
            let info = request.verbose.then(|| ("info".to_owned(), r#"{"pid": 4711}"#.to_owned()));
            say(&v1::ContainerStatusResponse { status: Some(status), info: info.into_iter().collect() })
        }));
        Runtime::with_connector("unix:///run/fake.sock", move || socket.clone().connect(), RuntimeOptions::default())
    }

    #[tokio::test]
    async fn a_container_started_after_the_list_has_a_pid() {
        let listed = v1::Container {
            id: "a".to_owned(),
            state: v1::ContainerState::ContainerCreated.into(),
            ..Default::default()
        };
        let (runtime, messages, uid) = (running(), MessageReader::default(), PodUid::from("p"));
        let (known, early) = (KnownContainers::new(), PrefetchedStatuses::new());
        let found = container_status(&runtime, &messages, &uid, &listed, &known, &early).await;
        let found = found.expect("an answer").expect("it exists");
        assert_eq!((found.state, found.pid), (ContainerState::Running, Some(4711)));
    }

    /// Looking for each among all others would take a minute, for which the relist of all pods would wait.
    #[test]
    fn a_pod_may_have_any_number_of_containers() {
        let ids: Vec<String> = (0..50_000).map(|index| format!("{index:064}")).collect();
        let known = ids.iter().map(|id| testing::container(id, "web", ContainerState::Exited)).collect();
        let known = testing::snapshot(Instant::now(), known);
        let state: i32 = v1::ContainerState::ContainerExited.into();
        let listed = ids.into_iter().map(|id| v1::Container { id, state, ..Default::default() }).collect();
        let mut listing = Listing { sandboxes: Vec::new(), containers: listed };
        let began = std::time::Instant::now();
        assert!(agrees(&listing, &known));
        listing.containers[49_999].state = v1::ContainerState::ContainerRunning.into();
        assert!(!agrees(&listing, &known), "one has another state");
        listing.containers[49_999] = v1::Container { id: "another".to_owned(), state, ..Default::default() };
        assert!(!agrees(&listing, &known), "one is new");
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    }

    #[test]
    fn a_pod_has_the_addresses_of_its_newest_sandbox_and_keeps_them_once_no_sandbox_is_ready() {
        let sandbox = |ready, ip: &str| {
            let status = convert::sandbox(v1::PodSandboxStatus::default(), "");
            SandboxStatus { ready, ips: vec![ip.to_owned()], ..status }
        };
        let before = testing::snapshot(Instant::now(), Vec::new());
        let before = PodSnapshot { ips: vec!["10.0.0.9".to_owned()], ..before };
        for (sandboxes, previous, expected) in [
            (vec![sandbox(true, "10.0.0.2"), sandbox(false, "10.0.0.1")], Some(&before), &["10.0.0.2"][..]),
            (vec![sandbox(false, "10.0.0.2"), sandbox(true, "10.0.0.1")], Some(&before), &[]),
            (vec![sandbox(false, "10.0.0.2")], Some(&before), &["10.0.0.9"]),
            (Vec::new(), Some(&before), &["10.0.0.9"]),
            (vec![sandbox(false, "10.0.0.2")], None, &[]),
        ] {
            assert_eq!(ips(&sandboxes, previous), expected, "{sandboxes:?}");
        }
    }

    #[test]
    fn a_later_instance_is_newer_also_if_the_clock_was_set_back() {
        let instance = |id: &str, attempt, created_at| {
            let exited = testing::container(id, "web", ContainerState::Exited);
            ContainerStatus { attempt, created_at, ..exited }
        };
        let mut containers = vec![instance("first", 0, 9), instance("third", 2, 5), instance("second", 1, 4)];
        sort_newest_first(&mut containers);
        let ids: Vec<&str> = containers.iter().map(|container| container.id.as_str()).collect();
        assert_eq!(ids, ["third", "second", "first"]);
        let mut equal = vec![instance("earlier", 0, 1), instance("later", 0, 2)];
        sort_newest_first(&mut equal);
        assert_eq!(equal[0].id.as_str(), "later");
    }
}
