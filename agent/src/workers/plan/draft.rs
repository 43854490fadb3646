//! A plan that is being built.

use std::collections::HashMap;
use std::collections::HashSet;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::ContainerStatus as ApiStatus;

use super::PlanInput;
use crate::model::Blocked;
use crate::model::ContainerClass;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::KillContainer;
use crate::model::KillReason;
use crate::model::PodActions;
use crate::model::RemoveContainer;
use crate::model::SandboxId;
use crate::model::SandboxPlan;
use crate::model::StartContainer;
use crate::model::spec;
use crate::model::spec::SpecContainer;
use crate::workers::backoff;

/// The plan so far. Starts are kept per class, because they are found in another order than they are executed in. Instances are
/// indexed: a plan is made without an await, and a pod may have thousands of containers.
pub(super) struct Draft<'a> {
    pub(super) input: &'a PlanInput<'a>,
    pub(super) actions: PodActions,
    /// The instances of each container by its name, newest first.
    instances: HashMap<&'a str, Vec<&'a ContainerStatus>>,
    /// The newest instance of each container in the current sandbox.
    active: HashMap<&'a str, &'a ContainerStatus>,
    ephemeral: Vec<StartContainer>,
    init: Vec<StartContainer>,
    regular: Vec<StartContainer>,
}

impl<'a> Draft<'a> {
    pub(super) fn new(input: &'a PlanInput<'a>) -> Self {
        let actions = PodActions {
            kill_pod: false,
            sandbox: SandboxPlan::None,
            kill: Vec::new(),
            remove: Vec::new(),
            prune: Vec::new(),
            resize: None,
            start: Vec::new(),
            await_confirmation: false,
        };
        let mut instances: HashMap<&str, Vec<&ContainerStatus>> = HashMap::new();
        for instance in &input.snapshot.containers {
            instances.entry(&instance.name).or_default().push(instance);
        }
        let mut active: HashMap<&str, &ContainerStatus> = HashMap::new();
        for instance in input.snapshot.active() {
            active.entry(&instance.name).or_insert(instance);
        }
        Self { input, actions, instances, active, ephemeral: Vec::new(), init: Vec::new(), regular: Vec::new() }
    }

    pub(super) fn into_actions(mut self) -> PodActions {
        if self.actions.remove.is_empty() && self.actions.prune.is_empty() {
            self.prune_old_init();
        }
        self.init.sort_by_key(|start| start.index);
        self.actions.start = [self.ephemeral, self.init, self.regular].concat();
        self.actions
    }

    /// The newest instance of a container, over all sandboxes.
    pub(super) fn newest(&self, container: &SpecContainer<'_>) -> Option<&'a ContainerStatus> {
        self.instances_of(container.name()).first().copied()
    }

    /// The newest instance of a container in the current sandbox.
    pub(super) fn active(&self, container: &SpecContainer<'_>) -> Option<&'a ContainerStatus> {
        self.active.get(container.name()).copied()
    }

    /// All instances of the container called `name`, newest first.
    pub(super) fn instances_of(&self, name: &str) -> &[&'a ContainerStatus] {
        self.instances.get(name).map(Vec::as_slice).unwrap_or_default()
    }

    /// The container has exited and the next action depends on its exit code.
    pub(super) fn await_exit_code(&mut self) {
        self.actions.await_confirmation = true;
    }

    pub(super) fn start(&mut self, container: &SpecContainer<'_>) {
        let start = StartContainer {
            class: container.class,
            index: container.index,
            ..self.start_of(container.name(), Some(container.spec))
        };
        match container.class {
            ContainerClass::Regular => self.regular.push(start),
            _ => self.init.push(start),
        }
    }

    /// Ephemeral containers run once: any instance, whatever its state, is enough, and so is an end that the API server has.
    /// The runtime may have lost that instance, with a restart of the machine for example. One whose start was cancelled is
    /// none: its status would wait for ever.
    pub(super) fn start_new_ephemeral(&mut self) {
        let statuses = self.input.pod.status.as_ref().and_then(|status| status.ephemeral_container_statuses.as_ref());
        let has_ended = |status: &&ApiStatus| status.state.as_ref().is_some_and(|state| state.terminated.is_some());
        let ended: HashSet<&str> =
            statuses.into_iter().flatten().filter(has_ended).map(|status| status.name.as_str()).collect();
        for (index, container) in spec::ephemeral_containers(self.input.pod).iter().enumerate() {
            let never_ran = self.instances_of(&container.name).iter().all(|instance| instance.start_was_cancelled());
            if never_ran && !ended.contains(container.name.as_str()) {
                self.ephemeral.push(StartContainer { index, ..self.start_of(&container.name, None) });
            }
        }
    }

    /// Names of the init and regular containers that are to be started so far.
    pub(super) fn planned_starts(&self) -> impl Iterator<Item = &str> {
        self.init.iter().chain(&self.regular).map(|start| start.name.as_str())
    }

    pub(super) fn has_regular_starts(&self) -> bool {
        !self.regular.is_empty()
    }

    /// The pod has terminated: nothing is started, also no ephemeral container; what still runs is stopped with its sandbox.
    pub(super) fn kill_pod(&mut self) {
        self.actions.kill_pod = true;
        self.actions.sandbox = SandboxPlan::None;
        self.actions.kill.clear();
        self.actions.resize = None;
        self.ephemeral.clear();
        self.init.clear();
        self.regular.clear();
    }

    /// Another sandbox: the pod is killed and instances of its init containers are removed, so that they run again.
    pub(super) fn replace_sandbox(&mut self, attempt: u32, replaces: Option<SandboxId>) {
        self.actions.kill_pod = true;
        self.actions.sandbox = SandboxPlan::Create { attempt, replaces };
        let init: HashSet<&str> = spec::init_containers(self.input.pod).iter().map(|init| init.name.as_str()).collect();
        let instances = self.input.snapshot.containers.iter().filter(|instance| init.contains(instance.name.as_str()));
        self.actions.prune.extend(instances.map(|instance| remove(instance, false)));
    }

    pub(super) fn kill(&mut self, instance: &ContainerStatus, reason: KillReason, message: String) {
        let (id, name) = (instance.id.clone(), instance.name.clone());
        self.actions.kill.push(KillContainer { id, name, reason, message, grace_override: None });
    }

    /// Removes all but the newest exited instance of each init container and sidecar, with their logs.
    fn prune_old_init(&mut self) {
        for container in spec::init_containers(self.input.pod) {
            let instances = self.instances.get(container.name.as_str()).into_iter().flatten();
            let exited =
                instances.filter(|instance| matches!(instance.state, ContainerState::Exited | ContainerState::Unknown));
            self.actions.prune.extend(exited.skip(1).map(|instance| remove(instance, false)));
        }
    }

    fn start_of(&self, name: &str, container: Option<&Container>) -> StartContainer {
        let instances = self.instances_of(name);
        let exited = instances.iter().find(|instance| instance.state == ContainerState::Exited);
        let last_finished_at = exited.map(|instance| instance.finished_at);
        let unstarted = instances.iter().filter(|instance| instance.state == ContainerState::Created);
        StartContainer {
            class: ContainerClass::Ephemeral,
            index: 0,
            name: name.to_owned(),
            restart_count: instances.first().map(|instance| instance.restart_count.saturating_add(1)),
            last_finished_at,
            replaces: unstarted.map(|instance| instance.id.clone()).collect(),
            blocked: container.zip(last_finished_at).and_then(|(container, at)| self.crash_loop(container, at)),
        }
    }

    fn crash_loop(&self, container: &Container, finished_at: i64) -> Option<Blocked> {
        let PlanInput { pod, history, now, .. } = self.input;
        history.blocked_since(&backoff::crash_loop_key(pod, container), backoff::wall_time(finished_at), *now)
    }
}

pub(super) fn remove(instance: &ContainerStatus, keep_logs: bool) -> RemoveContainer {
    RemoveContainer { id: instance.id.clone(), name: instance.name.clone(), keep_logs }
}
