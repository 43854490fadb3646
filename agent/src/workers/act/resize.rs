//! Applies allocated resources to a pod that runs (KEP-1287). Memory, then CPU; of each the pod's own cgroup first where it
//! gets more, then the containers, then the pod's cgroup where it gets less. The first error ends it: what was applied
//! until then is recorded, and the next plan has the rest.

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::ResourceRequirements;
use keblet_proto::cri::v1 as cri;

use super::ActContext;
use super::PassContext;
use super::PodError;
use crate::cgroups::CgroupError;
use crate::cgroups::CgroupValues;
use crate::cgroups::Cgroups;
use crate::cgroups::Change;
use crate::cgroups::PodChanges;
use crate::cgroups::UNLIMITED;
use crate::cgroups::arithmetic;
use crate::model::Amount;
use crate::model::QosClass;
use crate::model::ResizeContainer;
use crate::model::ResizePod;
use crate::model::SandboxStatus;
use crate::model::aggregate;
use crate::model::qos;
use crate::model::resources as amounts;
use crate::model::resources::Resizable;
use crate::model::spec;
use crate::runtime::RuntimeError;
use crate::workers::generate::GenerateError;
use crate::workers::generate::names;
use crate::workers::generate::resources;

/// What kept resources from being applied.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    /// The pod's cgroup cannot be read.
    #[error("unable to get pod cgroup memory config for pod {pod:?}: {source}")]
    ReadCgroup {
        /// The pod.
        pod: String,
        /// The cause.
        source: CgroupError,
    },
    /// Memory that is to be taken away is in use, or may be.
    #[error("cannot decrease memory limits: {}", aggregate(.0.iter().cloned()))]
    MemoryInUse(Vec<String>),
    /// The runtime rejects the change of a pod.
    #[error(
        "failed to notify runtime for UpdatePodSandboxResources (resource={resource}); resize rejected: \
         updatePodSandboxResources failed for sanboxID {sandbox:?}: {}",
        source.rpc_text()
    )]
    Sandbox {
        /// `cpu` or `memory`.
        resource: &'static str,
        /// The sandbox.
        sandbox: String,
        /// The cause.
        source: RuntimeError,
    },
    /// The pod's cgroup does not accept a value.
    #[error("failed to set the {resource} of pod {pod:?}: {source}")]
    WriteCgroup {
        /// `cpu` or `memory`.
        resource: &'static str,
        /// The pod.
        pod: String,
        /// The cause.
        source: CgroupError,
    },
    /// The runtime does not change a container.
    #[error("failed to update the {resource} of container {container:?}: {}", source.rpc_text())]
    Container {
        /// `cpu` or `memory`.
        resource: &'static str,
        /// Its name.
        container: String,
        /// The cause.
        source: RuntimeError,
    },
    /// A quantity of the spec cannot be read.
    #[error(transparent)]
    Spec(#[from] GenerateError),
}

/// Applies the plan. `sandbox`: the pod's, if it is ready.
///
/// # Errors
/// What ended it.
pub(super) async fn resize(
    ctx: &ActContext,
    pass: &PassContext,
    plan: &ResizePod,
    sandbox: Option<&SandboxStatus>,
) -> Result<(), PodError> {
    let began = ctx.clock.now();
    let class = pass.cgroup_class()?;
    let result = Resize { ctx, pass, plan, sandbox }.apply(class).await;
    let took = ctx.clock.now().saturating_duration_since(began);
    ctx.count(|metrics| metrics.resizes.actuated(took, result.is_ok()));
    result.map_err(|source| PodError::Resize { source: Box::new(source) })
}

struct Resize<'a> {
    ctx: &'a ActContext,
    pass: &'a PassContext,
    plan: &'a ResizePod,
    sandbox: Option<&'a SandboxStatus>,
}

impl Resize<'_> {
    async fn apply(&self, class: QosClass) -> Result<(), ResizeError> {
        let Self { ctx, pass, plan, sandbox } = *self;
        let wanted = resources::pod_cgroup_values(&pass.pod, &ctx.settings.resources)?;
        let pod_cgroup = match &ctx.cgroups {
            Some(cgroups) => Some(PodCgroup::read(ctx, pass, sandbox, cgroups, class, wanted).await?),
            None => None,
        };
        if plan.checks_memory {
            self.check_memory(class, pod_cgroup.as_ref()).await?;
        }
        let mut pod_cgroup = pod_cgroup;
        for resource in [Resizable::Memory, Resizable::Cpu] {
            if let Some(pod_cgroup) = &mut pod_cgroup {
                pod_cgroup.write(resource, Change::Increase).await?;
            }
            for container in if resource == Resizable::Memory { &plan.memory } else { &plan.cpu } {
                self.update(container, resource).await?;
            }
            if let Some(pod_cgroup) = &mut pod_cgroup {
                pod_cgroup.write(resource, Change::Decrease).await?;
            }
            if plan.pod_level {
                self.record_pod(resource);
            }
        }
        Ok(())
    }

    /// Changes one container. What is not changed yet is sent as it is.
    async fn update(&self, planned: &ResizeContainer, resource: Resizable) -> Result<(), ResizeError> {
        let Self { ctx, pass, .. } = *self;
        let pod = &pass.pod;
        let Some(allocated) = spec::lasting_containers(pod).find(|container| container.name() == planned.name) else {
            return Ok(());
        };
        let mut container = allocated.spec.clone();
        if resource == Resizable::Memory {
            set_cpu(container.resources.get_or_insert_default(), planned);
        }
        let linux = resources::container_resources(pod, &container, &ctx.settings.resources)?;
        let updated = ctx.runtime.update_container_resources(planned.id.as_str(), linux).await;
        updated.map_err(|source| ResizeError::Container {
            resource: resource.name(),
            container: planned.name.clone(),
            source,
        })?;
        let applied = amounts::effective(pod, &container);
        ctx.allocations.container_actuated(&pass.pod_ref.uid, &planned.name, applied);
        Ok(())
    }

    /// Records that a resource of `spec.resources` is applied.
    fn record_pod(&self, resource: Resizable) {
        let (ctx, uid) = (self.ctx, &self.pass.pod_ref.uid);
        let wanted = self.pass.pod.spec.as_ref().and_then(|spec| spec.resources.clone()).unwrap_or_default();
        let mut applied = ctx.allocations.actuated(uid).and_then(|actuated| actuated.pod).unwrap_or_default();
        let name = resource.name();
        for (to, from) in [(&mut applied.requests, &wanted.requests), (&mut applied.limits, &wanted.limits)] {
            match from.as_ref().and_then(|from| from.get(name)) {
                Some(quantity) => _ = to.get_or_insert_default().insert(name.to_owned(), quantity.clone()),
                None => _ = to.as_mut().and_then(|to| to.remove(name)),
            }
        }
        ctx.allocations.pod_actuated(uid, Some(applied));
    }

    /// Memory that is taken away is not in use.
    async fn check_memory(&self, class: QosClass, pod_cgroup: Option<&PodCgroup<'_>>) -> Result<(), ResizeError> {
        let mut problems = Vec::new();
        if let Some(pod_cgroup) = pod_cgroup.filter(|cgroup| cgroup.changes.memory == Some(Change::Decrease)) {
            let limit = pod_cgroup.wanted.memory_max.unwrap_or(UNLIMITED);
            match pod_cgroup.cgroups.pod_memory_in_use(class, self.pass.uid()).await {
                None => problems.push("missing pod memory usage".to_owned()),
                Some(usage) if usage >= limit => {
                    problems.push(format!("attempting to set pod memory limit ({limit}) below current usage ({usage})"))
                }
                Some(_) => {}
            }
        }
        for container in &self.plan.memory {
            let (old, new) = (container.from.memory_limit, container.to.memory_limit);
            if new == 0 || (old != 0 && new >= old) {
                continue;
            }
            let usage = self.memory_of(class, container, pod_cgroup).await;
            if let Some(usage) = usage.filter(|usage| i64::try_from(*usage).is_ok_and(|usage| usage >= new)) {
                let name = &container.name;
                problems.push(format!(
                    "attempting to set container {name:?} memory limit ({new}) below current usage ({usage})"
                ));
            }
        }
        if problems.is_empty() { Ok(()) } else { Err(ResizeError::MemoryInUse(problems)) }
    }

    /// What a container uses; `None` if that is not known.
    async fn memory_of(
        &self,
        class: QosClass,
        container: &ResizeContainer,
        pod_cgroup: Option<&PodCgroup<'_>>,
    ) -> Option<u64> {
        let pid = self.pass.snapshot.by_id(&container.id)?.pid?;
        pod_cgroup?.cgroups.container_memory_in_use(class, self.pass.uid(), container.id.as_str(), pid).await
    }
}

/// Puts the CPU amounts that are in force into a container's resources.
fn set_cpu(resources: &mut ResourceRequirements, planned: &ResizeContainer) {
    let (request, limit) = planned.from.get(Resizable::Cpu);
    for (list, milli) in [(&mut resources.requests, request), (&mut resources.limits, limit)] {
        if milli > 0 {
            list.get_or_insert_default().insert("cpu".to_owned(), Amount::millis(milli).to_quantity());
        } else if let Some(list) = list {
            list.remove("cpu");
        }
    }
}

/// The cgroup of the pod, with the resources of it that the runtime receives.
struct PodCgroup<'a> {
    ctx: &'a ActContext,
    pass: &'a PassContext,
    cgroups: &'a Cgroups,
    class: QosClass,
    wanted: CgroupValues,
    changes: PodChanges,
    /// What the runtime was sent last; `None` if it does not implement the call.
    sandbox_values: Option<SandboxValues>,
}

/// Values of a pod's sandbox, without overhead.
struct SandboxValues {
    sandbox: String,
    overhead: cri::LinuxContainerResources,
    resources: cri::LinuxContainerResources,
    /// The values to come.
    next: cri::LinuxContainerResources,
}

impl<'a> PodCgroup<'a> {
    async fn read(
        ctx: &'a ActContext,
        pass: &'a PassContext,
        sandbox: Option<&SandboxStatus>,
        cgroups: &'a Cgroups,
        class: QosClass,
        wanted: CgroupValues,
    ) -> Result<Self, ResizeError> {
        let changes = cgroups.pod_changes(class, pass.uid(), &wanted).await;
        let changes = changes.map_err(|source| ResizeError::ReadCgroup { pod: pass.describe(), source })?;
        let sandbox_values = match sandbox {
            Some(sandbox) => Some(SandboxValues::new(ctx, &pass.pod, sandbox.id.to_string(), &changes)?),
            None => None,
        };
        Ok(Self { ctx, pass, cgroups, class, wanted, changes, sandbox_values })
    }

    /// Writes what changes in this direction. The quota grows before the weight and shrinks after it.
    async fn write(&mut self, resource: Resizable, direction: Change) -> Result<(), ResizeError> {
        let none = CgroupValues::default();
        let wanted = &self.wanted;
        let limit = CgroupValues { memory_max: wanted.memory_max, ..none.clone() };
        let quota = CgroupValues { cpu_max: wanted.cpu_max, ..none.clone() };
        let shares = CgroupValues { cpu_shares: wanted.cpu_shares, ..none };
        let changes = &self.changes;
        let steps = match resource {
            Resizable::Memory => {
                let protection =
                    (direction == Change::Decrease && !changes.protection.is_empty()).then_some(Change::Decrease);
                vec![(changes.memory, limit), (protection, changes.protection.clone())]
            }
            Resizable::Cpu if direction == Change::Increase => vec![(changes.quota, quota), (changes.shares, shares)],
            Resizable::Cpu => vec![(changes.shares, shares), (changes.quota, quota)],
        };
        for (_, values) in steps.into_iter().filter(|(change, _)| *change == Some(direction)) {
            self.write_one(resource, &values).await?;
        }
        Ok(())
    }

    /// Updates the sandbox, then writes. If that fails, the sandbox gets the previous values.
    async fn write_one(&mut self, resource: Resizable, values: &CgroupValues) -> Result<(), ResizeError> {
        let before = self.sandbox_values.as_ref().map(|sandbox_values| sandbox_values.resources.clone());
        if let Some(sandbox_values) = &mut self.sandbox_values {
            sandbox_values.advance(values);
        }
        self.update_sandbox(resource).await?;
        let Err(source) = self.cgroups.update_pod(self.class, self.pass.uid(), values).await else { return Ok(()) };
        if let Some((sandbox_values, before)) = self.sandbox_values.as_mut().zip(before) {
            sandbox_values.resources = before;
            if let Err(error) = self.update_sandbox(resource).await {
                tracing::warn!(pod = self.pass.describe(), %error, "the runtime has values of a pod that are not in force");
            }
        }
        Err(ResizeError::WriteCgroup { resource: resource.name(), pod: names::describe(&self.pass.pod), source })
    }

    /// Most runtimes do not have this call.
    async fn update_sandbox(&mut self, resource: Resizable) -> Result<(), ResizeError> {
        let Some(SandboxValues { sandbox, overhead, resources, .. }) = &self.sandbox_values else { return Ok(()) };
        let (overhead, resources) = (Some(overhead.clone()), Some(resources.clone()));
        match self.ctx.runtime.update_pod_sandbox_resources(sandbox, overhead, resources).await {
            Ok(()) => Ok(()),
            Err(error) if is_not_implemented(&error) => {
                self.sandbox_values = None;
                Ok(())
            }
            Err(source) => Err(ResizeError::Sandbox { resource: resource.name(), sandbox: sandbox.clone(), source }),
        }
    }
}

fn is_not_implemented(error: &RuntimeError) -> bool {
    error.is_unimplemented()
        || (error.code() == tonic::Code::Unknown && error.message().to_lowercase().contains("not implemented"))
}

impl SandboxValues {
    /// The present values, from which the overhead is taken where they are limits.
    fn new(ctx: &ActContext, pod: &Pod, sandbox: String, changes: &PodChanges) -> Result<Self, GenerateError> {
        let overhead = resources::sandbox_overhead(pod, &ctx.settings.resources)?;
        let next = resources::sandbox_resources(pod, &ctx.settings.resources)?;
        let has = changes.has;
        let signed = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        let without = |value: i64, overhead: i64| if value > 0 { (value - overhead).max(0) } else { value };
        let (quota, period) = has.cpu_max.unwrap_or_default();
        let memory = has.memory_max.filter(|bytes| *bytes < UNLIMITED).map_or(0, signed);
        let resources = cri::LinuxContainerResources {
            cpu_shares: signed(shares_without(has.cpu_shares.unwrap_or(0), cpu_overhead(pod)?)),
            cpu_quota: without(quota, overhead.cpu_quota),
            cpu_period: signed(period),
            memory_limit_in_bytes: without(memory, overhead.memory_limit_in_bytes),
            ..Default::default()
        };
        Ok(Self { sandbox, overhead, resources, next })
    }

    /// Takes over what these values of the cgroup stand for.
    fn advance(&mut self, values: &CgroupValues) {
        let Self { resources, next, .. } = self;
        if values.memory_max.is_some() {
            resources.memory_limit_in_bytes = next.memory_limit_in_bytes;
        }
        if values.cpu_max.is_some() {
            (resources.cpu_quota, resources.cpu_period) = (next.cpu_quota, next.cpu_period);
        }
        if values.cpu_shares > 0 {
            resources.cpu_shares = next.cpu_shares;
        }
    }
}

/// CPU of the pod's overhead, in thousandths; `None` if it has none.
fn cpu_overhead(pod: &Pod) -> Result<Option<i64>, GenerateError> {
    let overhead = qos::amounts(pod.spec.as_ref().and_then(|spec| spec.overhead.as_ref()))?;
    Ok(overhead.get("cpu").map(|amount| amount.milli_value()))
}

/// Shares without those of an overhead. The difference is computed in thousandths of a CPU, since shares are rounded.
fn shares_without(shares: u64, overhead: Option<i64>) -> u64 {
    match overhead {
        Some(overhead) => arithmetic::shares(arithmetic::milli_cpu(shares).saturating_sub(overhead)),
        None => shares.max(arithmetic::MIN_SHARES),
    }
}

/// A container is about to be created with its allocated resources.
pub(super) async fn record_start(ctx: &ActContext, pass: &PassContext, container: &Container) {
    let is_ephemeral = !spec::lasting_containers(&pass.pod).any(|lasting| lasting.name() == container.name);
    if !is_ephemeral {
        let applied = amounts::effective(&pass.pod, container);
        ctx.allocations.container_starts(&pass.pod_ref.uid, &container.name, applied).await;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use serde_json::json;

    use super::*;

    #[test]
    fn shares_of_a_sandbox_are_those_that_it_was_made_with() {
        let pod = |overhead: Value| -> Pod {
            let spec = json!({ "containers": [{ "name": "c" }], "overhead": overhead });
            serde_json::from_value(json!({ "spec": spec })).expect("a pod")
        };
        for (shares, overhead, expected) in [
            (306, json!({ "cpu": "100m" }), 203),
            (306, json!({ "memory": "64Mi" }), 306),
            (306, json!(null), 306),
            (arithmetic::shares(300), json!({ "cpu": "100m" }), arithmetic::shares(200)),
            (102, json!({ "cpu": "200m" }), 2),
            (0, json!(null), 2),
        ] {
            let left = shares_without(shares, cpu_overhead(&pod(overhead.clone())).expect("valid"));
            assert_eq!(left, expected, "{shares} {overhead}");
        }
    }
}
