//! Lifecycle hooks of containers: `lifecycle.postStart` and `lifecycle.preStop`.
//!
//! A hook has no deadline of its own, as upstream: the sync of the pod waits for postStart until it ends; the stop of a
//! container waits for preStop no longer than its grace period ([`pre_stop`]). No other pod waits for either.

mod action;
mod http;
mod pre_stop;

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ContainerPort;
use k8s_openapi::api::core::v1::LifecycleHandler;
use k8s_openapi::api::core::v1::Pod;

use self::http::Origin;
use action::Action;
pub use action::HookError;
pub use action::HookFailure;
pub(super) use pre_stop::PreStops;

use super::ActContext;
use crate::http_get::Caller;
use crate::metrics::Metrics;
use crate::model::ContainerId;
use crate::runtime::Runtime;
use crate::workers::generate::ContainerSpec;
use crate::workers::generate::names;

/// One hook of one container instance.
pub(super) struct Hook {
    handler: LifecycleHandler,
    runtime: Runtime,
    id: ContainerId,
    container: String,
    pod: String,
    ports: Vec<ContainerPort>,
    /// Addresses of the pod, primary first.
    ips: Vec<String>,
    caller: Caller,
    metrics: Option<Arc<Metrics>>,
}

impl Hook {
    /// `lifecycle.postStart` of the container, if it has one.
    pub(super) fn post_start(
        ctx: &ActContext,
        pod: &Pod,
        spec: &ContainerSpec<'_>,
        id: &ContainerId,
        ips: &[String],
    ) -> Option<Self> {
        let handler = spec.container.lifecycle.as_ref()?.post_start.clone()?;
        Some(Self::new(ctx, pod, spec, id, ips, handler))
    }

    /// `lifecycle.preStop` of the container, if it has one.
    pub(super) fn pre_stop(
        ctx: &ActContext,
        pod: &Pod,
        spec: &ContainerSpec<'_>,
        id: &ContainerId,
        ips: &[String],
    ) -> Option<Self> {
        let handler = spec.container.lifecycle.as_ref()?.pre_stop.clone()?;
        Some(Self::new(ctx, pod, spec, id, ips, handler))
    }

    fn new(
        ctx: &ActContext,
        pod: &Pod,
        spec: &ContainerSpec<'_>,
        id: &ContainerId,
        ips: &[String],
        handler: LifecycleHandler,
    ) -> Self {
        Self {
            handler,
            runtime: ctx.runtime.clone(),
            id: id.clone(),
            container: spec.container.name.clone(),
            pod: names::describe(pod),
            ports: spec.container.ports.clone().unwrap_or_default(),
            ips: ips.to_vec(),
            caller: Caller::hook(&ctx.settings.kubernetes_version),
            metrics: ctx.metrics.clone(),
        }
    }

    /// Runs it to its end. Dropping the future cancels a command in the container, if the runtime supports that.
    ///
    /// # Errors
    /// It failed, or the handler has no possible action.
    pub(super) async fn run(self) -> Result<(), HookError> {
        let action = Action::of(&self.handler)?;
        let failed = |source, output| HookError::Failed {
            action: action.describe(),
            container: self.container.clone(),
            pod: self.pod.clone(),
            output,
            source: Box::new(source),
        };
        match &action {
            Action::Exec(command) => {
                // Zero: no limit of time.
                let answer = self.runtime.exec_sync(self.id.as_str(), command.to_vec(), Duration::ZERO).await;
                action::exec_result(command, answer).map_err(|(source, output)| failed(source, Some(output)))
            }
            Action::HttpGet(action) => {
                let origin = Origin { ports: &self.ports, ips: &self.ips, caller: &self.caller };
                let fell_back = || self.metrics.iter().for_each(|metrics| metrics.containers.hook_fell_back());
                http::get(action, &origin, fell_back).await.map_err(|source| failed(source, None))
            }
            Action::Sleep(time) => {
                let counted = CutSleep(self.metrics.clone());
                tokio::time::sleep(*time).await;
                counted.disarm();
                Ok(())
            }
        }
    }
}

/// Counts a sleep that is dropped before its end: after the stop of its container, or with the sync that waits for it.
struct CutSleep(Option<Arc<Metrics>>);

impl CutSleep {
    /// The sleep has ended by itself.
    fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for CutSleep {
    fn drop(&mut self) {
        self.0.iter().for_each(|metrics| metrics.containers.sleep_cut());
    }
}
