//! Container statuses: computed from the newest two instances, from the previous status where the runtime no longer has
//! the container, and from the last start failure.

use std::borrow::Cow;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::ContainerState as ApiState;
use k8s_openapi::api::core::v1::ContainerStateTerminated;
use k8s_openapi::api::core::v1::ContainerStatus as ApiStatus;
use k8s_openapi::api::core::v1::ContainerUser as ApiUser;
use k8s_openapi::api::core::v1::LinuxContainerUser;
use k8s_openapi::api::core::v1::VolumeMount;
use k8s_openapi::api::core::v1::VolumeMountStatus;

use super::StatusInput;
use super::resources::container_resources;
use super::state;
use crate::model::ContainerClass;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::ContainerUser;
use crate::model::PodSnapshot;
use crate::model::recursive_read_only;
use crate::model::restart;
use crate::model::restart::RestartDecision;
use crate::model::spec;
use crate::model::spec::SpecContainer;

/// Reason of a container that is removed for a restart of all (KEP-5532).
pub(super) const RESTARTING_ALL: &str = "RestartingAllContainers";
/// All termination messages of a pod together, in bytes.
const MESSAGES_LIMIT: usize = 12 * 1024;
/// The message of a waiting container, in bytes: longer than one of a hook with all that it keeps of a command's output. It
/// may quote what only the size of the pod limits, such as the path of a hook, and the API server refuses a pod that is too
/// large.
const WAITING_LIMIT: usize = 32 * 1024;
/// All messages of waiting containers of a pod together, in bytes.
const ALL_WAITING_LIMIT: usize = 256 * 1024;

/// `status.initContainerStatuses`, in spec order.
pub(super) fn init(input: &StatusInput<'_>) -> Option<Vec<ApiStatus>> {
    let old = input.old.init_container_statuses.as_deref();
    statuses(input, spec::classified_init(input.pod).map(Definition::of).collect(), old)
}

/// `status.containerStatuses`, by name.
pub(super) fn regular(input: &StatusInput<'_>) -> Option<Vec<ApiStatus>> {
    let old = input.old.container_statuses.as_deref();
    by_name(statuses(input, spec::classified_regular(input.pod).map(Definition::of).collect(), old))
}

/// `status.ephemeralContainerStatuses`, by name.
pub(super) fn ephemeral(input: &StatusInput<'_>) -> Option<Vec<ApiStatus>> {
    let definitions = spec::ephemeral_containers(input.pod).iter().map(|container| Definition {
        class: ContainerClass::Ephemeral,
        mounts: container.volume_mounts.as_deref().unwrap_or_default(),
        spec: Cow::Owned(Container {
            name: container.name.clone(),
            image: container.image.clone(),
            ..Container::default()
        }),
    });
    by_name(statuses(input, definitions.collect(), input.old.ephemeral_container_statuses.as_deref()))
}

fn by_name(statuses: Option<Vec<ApiStatus>>) -> Option<Vec<ApiStatus>> {
    statuses.map(|mut statuses| {
        statuses.sort_by(|a, b| a.name.cmp(&b.name));
        statuses
    })
}

fn statuses(
    input: &StatusInput<'_>,
    definitions: Vec<Definition<'_>>,
    old: Option<&[ApiStatus]>,
) -> Option<Vec<ApiStatus>> {
    if definitions.is_empty() {
        return None;
    }
    let (view, old) = (PodView::of(input), statuses_by_name(old.unwrap_or_default()));
    let each = definitions.iter().map(|definition| view.status(definition, old.get(definition.name()).copied()));
    Some(each.collect())
}

/// Statuses by the name of their container; of several with one name the first.
pub(super) fn statuses_by_name(statuses: &[ApiStatus]) -> HashMap<&str, &ApiStatus> {
    statuses.iter().rev().map(|status| (status.name.as_str(), status)).collect()
}

/// A container of the spec (init, regular or ephemeral).
struct Definition<'a> {
    class: ContainerClass,
    mounts: &'a [VolumeMount],
    spec: Cow<'a, Container>,
}

impl<'a> Definition<'a> {
    fn of(container: SpecContainer<'a>) -> Self {
        Self {
            class: container.class,
            mounts: container.spec.volume_mounts.as_deref().unwrap_or_default(),
            spec: Cow::Borrowed(container.spec),
        }
    }

    fn name(&self) -> &str {
        &self.spec.name
    }
}

/// The newest instance of a container, and the one before.
type Instances<'a> = (&'a ContainerStatus, Option<&'a ContainerStatus>);

/// What the statuses of all containers of a pod depend on. All pods wait while a status is computed, and a pod may have
/// thousands of containers: nothing is looked for among all of them for each.
struct PodView<'a> {
    input: &'a StatusInput<'a>,
    /// By container.
    instances: HashMap<&'a str, Instances<'a>>,
    has_init: bool,
    restart_all: bool,
    /// A regular container was created, and the runtime reports its state.
    has_regular_instance: bool,
    /// The longest termination message of a container, in bytes.
    message_limit: usize,
    /// The longest message of a waiting container, in bytes.
    waiting_limit: usize,
}

impl<'a> PodView<'a> {
    fn of(input: &'a StatusInput<'a>) -> Self {
        let (pod, announced) = (input.pod, input.announced_restart_all());
        let instances = newest_two(input.snapshot);
        let is_created = |container: SpecContainer<'_>| {
            let newest = instances.get(container.name());
            newest.is_some_and(|(newest, _)| newest.state != ContainerState::Unknown)
        };
        let containers = spec::lasting_containers(pod).count() + spec::ephemeral_containers(pod).len();
        Self {
            input,
            has_init: !spec::init_containers(pod).is_empty(),
            restart_all: restart::restart_all_due(pod, input.snapshot, announced, input.gates),
            has_regular_instance: spec::classified_regular(pod).any(is_created),
            message_limit: MESSAGES_LIMIT / containers.max(1),
            waiting_limit: WAITING_LIMIT.min(ALL_WAITING_LIMIT / containers.max(1)),
            instances,
        }
    }

    fn status(&self, definition: &Definition<'_>, old: Option<&ApiStatus>) -> ApiStatus {
        let instances = self.instances.get(definition.name()).copied();
        let newest = instances.map(|(newest, _)| newest);
        let mut status = match instances {
            None => self.without_instance(definition, old),
            Some((newest, second)) => self.converted(definition, newest, second, old),
        };
        if let Some(ended) = old.filter(|old| self.keeps_unknown_end(old, &status)) {
            status.clone_from(ended);
        } else if !self.assume_completed(definition, newest, &mut status) {
            self.apply_start_failure(definition, newest, &mut status);
        }
        self.truncate_messages(&mut status);
        status
    }

    /// True if the container's end is the one that the final status assumes, and the runtime has reported no end since. A
    /// status published after the final one must not make it a container that waits for its start again.
    fn keeps_unknown_end(&self, old: &ApiStatus, new: &ApiStatus) -> bool {
        let is_unknown = |end: &ContainerStateTerminated| end.reason.as_deref() == Some(state::UNKNOWN);
        let of_instance = |end: &ContainerStateTerminated| end.container_id.is_some();
        let reported = new.state.as_ref().filter(|state| state::terminated(Some(*state)).is_some_and(of_instance));
        // The end before a start that failed: reported already, as the last state.
        let is_last = |reported: &ApiState| old.last_state.as_ref().is_some_and(|last| is_same(last, reported));
        self.input.is_terminal
            && state::terminated(old.state.as_ref()).is_some_and(is_unknown)
            && reported.is_none_or(is_last)
    }

    /// Status of a container that the runtime does not have (any more).
    fn without_instance(&self, definition: &Definition<'_>, old: Option<&ApiStatus>) -> ApiStatus {
        let reason = if self.has_init { "PodInitializing" } else { "ContainerCreating" };
        let mut status = ApiStatus {
            name: definition.name().to_owned(),
            image: definition.spec.image.clone().unwrap_or_default(),
            state: Some(state::waiting(reason, "")),
            volume_mounts: self.mounts(definition.mounts),
            ..ApiStatus::default()
        };
        let Some(old) = old else {
            return status;
        };
        let has_ended = state::terminated(old.state.as_ref()).is_some();
        if has_ended {
            // With what was reported of its last instance, such as the id.
            status.clone_from(old);
        } else {
            status.restart_count = old.restart_count;
            status.last_state.clone_from(&old.last_state);
        }
        if self.restart_all && !is_waiting(old) {
            let message = "The container is removed because RestartAllContainers in place";
            status.state = Some(state::waiting(RESTARTING_ALL, message));
            status.last_state = Some(state::lost(RESTARTING_ALL, message));
            status.restart_count = old.restart_count.saturating_add(1);
        } else if is_running(old) && state::terminated(old.last_state.as_ref()).is_none() {
            let message = "The container could not be located when the pod was deleted.  \
                           The container used to be Running";
            status.last_state = Some(state::lost(state::UNKNOWN, message));
            let restarts = i32::from(!spec::deletion_requested(self.input.pod));
            status.restart_count = old.restart_count.saturating_add(restarts);
        }
        status
    }

    fn converted(
        &self,
        definition: &Definition<'_>,
        newest: &ContainerStatus,
        second: Option<&ContainerStatus>,
        old: Option<&ApiStatus>,
    ) -> ApiStatus {
        let id = state::id(newest, self.input.runtime_type);
        let state = self.state_of(newest, old);
        let actuated = self.input.resize.actuated.and_then(|actuated| actuated.containers.get(definition.name()));
        let resources = container_resources(definition.spec.resources.as_ref(), actuated, newest, &id, old);
        let started = old.and_then(|old| old.started).filter(|_| state.running.is_some());
        ApiStatus {
            name: definition.name().to_owned(),
            restart_count: self.restart_count(newest, &id, old),
            image: newest.image.clone(),
            image_id: newest.image_ref.clone(),
            last_state: self.last_state(second, &id, old),
            container_id: Some(id),
            state: Some(state),
            started,
            allocated_resources: definition.spec.resources.as_ref().and_then(|resources| resources.requests.clone()),
            resources: Some(resources),
            user: newest.user.as_ref().and_then(user),
            stop_signal: newest.stop_signal.filter(|_| self.input.stop_signals).map(stop_signal),
            // Kept from the first status of the container; a status without predecessor takes the spec.
            volume_mounts: old.map_or_else(|| self.mounts(definition.mounts), |old| old.volume_mounts.clone()),
            ..ApiStatus::default()
        }
    }

    fn state_of(&self, newest: &ContainerStatus, old: Option<&ApiStatus>) -> ApiState {
        if newest.state == ContainerState::Unknown && old.is_some_and(is_running) {
            let reason = if self.restart_all { RESTARTING_ALL } else { state::UNKNOWN };
            return state::lost(reason, "The container could not be located when the pod was terminated");
        }
        let former = old.and_then(|old| old.state.as_ref());
        let Some(state) = state::of_instance(newest, self.input.runtime_type) else {
            // Without exit code a dead container cannot be reported as terminated yet, unless an earlier process of the
            // agent has done so.
            let id = state::id(newest, self.input.runtime_type);
            let is_reported = |former: &&ApiState| {
                state::terminated(Some(*former)).is_some_and(|end| end.container_id.as_ref() == Some(&id))
            };
            return former.filter(is_reported).cloned().unwrap_or_else(|| state::running(newest));
        };
        state::with_former_reason(state, newest, former)
    }

    /// `lastState`: the state of the second newest instance, else the last end of the previous status.
    fn last_state(&self, second: Option<&ContainerStatus>, id: &str, old: Option<&ApiStatus>) -> Option<ApiState> {
        let reported = second.and_then(|second| {
            let state = state::of_instance(second, self.input.runtime_type)?;
            let former =
                old.and_then(|old| [&old.state, &old.last_state].into_iter().flatten().find(|of| is_same(of, &state)));
            Some(state::with_former_reason(state, second, former))
        });
        reported.or_else(|| {
            let old = old?;
            let replaced = state::terminated(old.state.as_ref()).is_some() && old.container_id.as_deref() != Some(id);
            let kept = if replaced { &old.state } else { &old.last_state };
            // An empty state is what the API server returns for none: without it the status would differ.
            kept.clone().filter(|kept| kept.waiting.is_none() && kept.running.is_none())
        })
    }

    fn restart_count(&self, newest: &ContainerStatus, id: &str, old: Option<&ApiStatus>) -> i32 {
        let annotated = i32::try_from(newest.restart_count).unwrap_or(i32::MAX);
        let Some(old) = old else {
            return annotated;
        };
        let lost = newest.state == ContainerState::Unknown && is_running(old);
        // Another instance after a reported termination is a restart, even if the annotated count started over.
        let uncounted = newest.state == ContainerState::Running
            && state::terminated(old.state.as_ref()).is_some()
            && old.container_id.as_deref() != Some(id)
            && old.restart_count >= annotated;
        if lost || uncounted {
            old.restart_count.saturating_add(1)
        } else if self.input.gates.all_containers {
            annotated.max(old.restart_count)
        } else {
            annotated
        }
    }

    /// An init container that the runtime no longer has while regular containers exist counts as completed.
    fn assume_completed(
        &self,
        definition: &Definition<'_>,
        newest: Option<&ContainerStatus>,
        status: &mut ApiStatus,
    ) -> bool {
        let applies = definition.class == ContainerClass::Init
            && newest.is_none()
            && is_waiting(status)
            && self.has_regular_instance;
        if applies {
            let message = "Unable to get init container status from container runtime and pod has been initialized, \
                           treat it as exited normally";
            let terminated = ContainerStateTerminated {
                reason: Some("Completed".to_owned()),
                message: Some(message.to_owned()),
                ..ContainerStateTerminated::default()
            };
            status.state = Some(ApiState { terminated: Some(terminated), ..ApiState::default() });
        }
        applies
    }

    /// A container whose start failed is waiting, with the failure as reason.
    fn apply_start_failure(
        &self,
        definition: &Definition<'_>,
        newest: Option<&ContainerStatus>,
        status: &mut ApiStatus,
    ) {
        let Some(failure) = self.input.reasons.get(definition.name()) else {
            return;
        };
        let in_init_list = matches!(definition.class, ContainerClass::Init | ContainerClass::Sidecar);
        let succeeded = newest.is_some_and(|n| n.state == ContainerState::Exited && n.exit_code == Some(0));
        let decision = restart::should_start(self.input.pod, &definition.spec, newest, self.input.gates);
        if (in_init_list && succeeded) || decision != RestartDecision::Start {
            return;
        }
        if state::terminated(status.state.as_ref()).is_some() {
            status.last_state = status.state.take();
        }
        status.state = Some(state::waiting(&failure.token, &failure.message));
    }

    /// `recursiveReadOnly` is only reported for read-only mounts: what the mount mode resolves to (KEP-3857).
    fn mounts(&self, mounts: &[VolumeMount]) -> Option<Vec<VolumeMountStatus>> {
        let each = mounts.iter().map(|mount| {
            let read_only = mount.read_only == Some(true);
            let is_recursive = recursive_read_only(mount, self.input.recursive_read_only).unwrap_or(false);
            let mode = if is_recursive { "Enabled" } else { "Disabled" };
            VolumeMountStatus {
                name: mount.name.clone(),
                mount_path: mount.mount_path.clone(),
                read_only: read_only.then_some(true),
                recursive_read_only: read_only.then(|| mode.to_owned()),
                ..VolumeMountStatus::default()
            }
        });
        (!mounts.is_empty()).then(|| each.collect())
    }

    fn truncate_messages(&self, status: &mut ApiStatus) {
        for state in [&mut status.state, &mut status.last_state].into_iter().flatten() {
            let of_end = state.terminated.as_mut().and_then(|terminated| terminated.message.as_mut());
            let of_wait = state.waiting.as_mut().and_then(|waiting| waiting.message.as_mut());
            for (message, limit) in [(of_end, self.message_limit), (of_wait, self.waiting_limit)] {
                if let Some(message) = message {
                    message.truncate(message.floor_char_boundary(limit));
                }
            }
        }
    }
}

fn newest_two(snapshot: &PodSnapshot) -> HashMap<&str, Instances<'_>> {
    let mut found: HashMap<&str, Instances<'_>> = HashMap::new();
    for instance in &snapshot.containers {
        match found.entry(instance.name.as_str()) {
            Entry::Vacant(place) => {
                place.insert((instance, None));
            }
            Entry::Occupied(mut known) => {
                if !instance.start_was_cancelled() {
                    known.get_mut().1.get_or_insert(instance);
                }
            }
        }
    }
    found
}

/// Both are terminations of the same instance.
fn is_same(old: &ApiState, new: &ApiState) -> bool {
    let id = |state| state::terminated(Some(state)).and_then(|terminated| terminated.container_id.as_ref());
    id(old).is_some() && id(old) == id(new)
}

fn is_running(status: &ApiStatus) -> bool {
    status.state.as_ref().is_some_and(|state| state.running.is_some())
}

fn is_waiting(status: &ApiStatus) -> bool {
    status.state.as_ref().is_some_and(|state| state.waiting.is_some())
}

/// The API's name of a signal of the CRI.
fn stop_signal(name: &str) -> String {
    name.replace("PLUS", "+").replace("MINUS", "-")
}

/// `None` for a user that the API server does not accept, of an image for example: it would refuse the whole status.
fn user(user: &ContainerUser) -> Option<ApiUser> {
    let groups = &user.supplemental_groups;
    let mut ids = groups.iter().chain([&user.uid, &user.gid]);
    if !ids.all(|id| (0..=i64::from(i32::MAX)).contains(id)) {
        return None;
    }
    let supplemental_groups = (!groups.is_empty()).then(|| groups.clone());
    Some(ApiUser { linux: Some(LinuxContainerUser { uid: user.uid, gid: user.gid, supplemental_groups }) })
}
