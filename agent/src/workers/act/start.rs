//! Starts one container: image, configuration, CreateContainer, StartContainer, postStart hook.

use std::path::Path;

use k8s_openapi::api::core::v1::Pod;
use tokio_util::sync::CancellationToken;

use super::ActContext;
use super::PassContext;
use super::PodError;
use super::config;
use super::hooks::Hook;
use super::image::FoundImage;
use super::image::ImageLookup;
use super::image::Origin;
use super::image_volumes::ImageVolumes;
use super::kill;
use super::kill::Kill;
use super::remove;
use super::resize;
use super::sandbox::Sandbox;
use crate::model::ContainerId;
use crate::model::KillReason;
use crate::model::StartContainer;
use crate::recorder::EventType;
use crate::workers::generate::ContainerSpec;
use crate::workers::generate::names;

/// Services and state that every step of a start uses.
#[derive(Clone, Copy)]
pub(super) struct StartContext<'a> {
    pub(super) ctx: &'a ActContext,
    pub(super) pass: &'a PassContext,
    pub(super) sandbox: &'a Sandbox,
    /// Images that containers mount.
    pub(super) image_volumes: &'a ImageVolumes,
    /// Called before an image is pulled.
    pub(super) before_pull: &'a (dyn Fn() + Sync),
    /// The pod is terminated meanwhile.
    pub(super) terminated: &'a CancellationToken,
}

/// The error of a start that crash-loop back-off blocks, with its event.
pub(super) fn crash_loop_back_off(ctx: &ActContext, pod: &Pod, start: &StartContainer) -> Option<PodError> {
    let error = PodError::crash_loop_back_off(pod, start)?;
    if let Some(spec) = ContainerSpec::of_start(pod, start) {
        ctx.report_start(pod, &spec, &error);
    }
    Some(error)
}

impl StartContext<'_> {
    /// Starts one container. Returns the new instance.
    ///
    /// # Errors
    /// The step that failed; its event is sent.
    pub(super) async fn start(self, start: &StartContainer) -> Result<ContainerId, PodError> {
        let Some(spec) = ContainerSpec::of_start(&self.pass.pod, start) else {
            return Err(PodError::UnknownContainer { container: start.name.clone() });
        };
        let id = self.launch(start, &spec).await?;
        self.post_start(&spec, &id).await?;
        Ok(id)
    }

    /// Creates and starts a new instance.
    async fn launch(self, start: &StartContainer, spec: &ContainerSpec<'_>) -> Result<ContainerId, PodError> {
        let Self { ctx, pass, .. } = self;
        let pod = &pass.pod;
        self.image_volumes.check(ctx, pod, spec)?;
        let found = self.images().container(spec).await?;
        let _priority = ctx.pacing.priority.raise();
        if let Some(last) = pass.snapshot.newest(&start.name).filter(|newest| newest.start_was_cancelled()) {
            tracing::info!(pod = pass.describe(), container = start.name, id = %last.id, "repeating a cancelled start");
        }
        self.remove_unstarted(spec, &start.replaces).await?;
        let restarts = config::restart_count(&ctx.settings, pod, start).await;
        let created = self.create(spec, found, restarts).await;
        self.image_volumes.count(ctx, spec, &created);
        let (found, id) = created?;
        ctx.container_event(pod, spec, EventType::Normal, "Created", "Container created");
        if let Err(source) = ctx.runtime.start_container(id.as_str()).await {
            let (container, id) = (start.name.clone(), id.to_string());
            return Err(self.failed(spec, PodError::StartContainer { container, id, source }));
        }
        ctx.container_event(pod, spec, EventType::Normal, "Started", "Container started");
        self.link_log(&start.name, restarts, &id).await;
        if found.origin == (Origin::Cached { stale: true }) {
            self.refresh_image(&found).await;
        }
        Ok(id)
    }

    /// Runs the postStart hook, and stops the container if it fails. Nothing is held meanwhile that another pod waits for. The
    /// termination of the pod does not wait for the hook.
    async fn post_start(self, spec: &ContainerSpec<'_>, id: &ContainerId) -> Result<(), PodError> {
        let Self { ctx, pass, sandbox, .. } = self;
        let pod = &pass.pod;
        let Some(hook) = Hook::post_start(ctx, pod, spec, id, &sandbox.ips) else { return Ok(()) };
        let Some(Err(source)) = self.terminated.run_until_cancelled(hook.run()).await else { return Ok(()) };
        let container = spec.container.name.clone();
        // The worker that retries the start logs each change of the reason.
        tracing::debug!(pod = pass.describe(), container, error = %source, "postStart hook failed");
        let error = self.failed(spec, PodError::PostStartHook { container, source: Box::new(source) });
        let kill = Kill {
            id,
            name: &spec.container.name,
            reason: KillReason::PostStartFailed,
            message: "FailedPostStartHook",
            grace_override: None,
            ips: &sandbox.ips,
            until: kill::Until::Stopped,
        };
        if let Err(error) = kill::kill_container(ctx, pod, kill).await {
            tracing::warn!(pod = pass.describe(), %error, "cannot stop a container whose postStart hook failed");
        }
        Err(error)
    }

    fn images(&self) -> ImageLookup<'_> {
        ImageLookup {
            ctx: self.ctx,
            pod: &self.pass.pod,
            sandbox: &self.sandbox.config,
            before_pull: self.before_pull,
            terminated: self.terminated,
        }
    }

    /// Removes created instances that were never started. The runtime refuses while a start is in progress.
    async fn remove_unstarted(self, spec: &ContainerSpec<'_>, unstarted: &[ContainerId]) -> Result<(), PodError> {
        for id in unstarted {
            if let Err(source) = remove::remove_instance(self.ctx, id.as_str()).await {
                return Err(self.failed(spec, PodError::ReplaceContainer { id: id.to_string(), source }));
            }
        }
        Ok(())
    }

    /// Creates the instance. A cached image may have been removed or replaced: then it is inspected once more.
    async fn create(
        self,
        spec: &ContainerSpec<'_>,
        found: FoundImage,
        restarts: u32,
    ) -> Result<(FoundImage, ContainerId), PodError> {
        match self.create_from(spec, &found, restarts).await {
            Err(first @ PodError::CreateContainer { .. }) if matches!(found.origin, Origin::Cached { .. }) => {
                if self.images().still_has(&found).await {
                    return Err(self.failed(spec, first));
                }
                let fresh = self.images().container(spec).await?;
                let id = self.create_from(spec, &fresh, restarts).await.map_err(|error| self.failed(spec, error))?;
                Ok((fresh, id))
            }
            Err(error) => Err(self.failed(spec, error)),
            Ok(id) => Ok((found, id)),
        }
    }

    async fn create_from(
        self,
        spec: &ContainerSpec<'_>,
        found: &FoundImage,
        restarts: u32,
    ) -> Result<ContainerId, PodError> {
        let Self { ctx, pass, sandbox, .. } = self;
        let container = || spec.container.name.clone();
        let config = config::configure(self, spec, &found.image, restarts)
            .await
            .map_err(|source| PodError::ConfigureContainer { container: container(), source })?;
        resize::record_start(ctx, pass, &spec.container).await;
        let created = ctx.runtime.create_container(sandbox.id.as_str(), config, sandbox.config.clone()).await;
        created.map(ContainerId::from).map_err(|source| PodError::CreateContainer { container: container(), source })
    }

    /// Sends the event of a failed step.
    fn failed(self, spec: &ContainerSpec<'_>, error: PodError) -> PodError {
        self.ctx.report_start(&self.pass.pod, spec, &error);
        error
    }

    /// Links the log below the folder of all containers' logs, if it exists.
    async fn link_log(self, container: &str, restarts: u32, id: &ContainerId) {
        let Some(links) = &self.ctx.files.log_links else { return };
        let log = config::log_dir(&self.ctx.settings, &self.pass.pod).join(names::log_path(container, restarts));
        let at = links.join(names::log_link_name(&self.pass.pod_ref, container, id.as_str()));
        if let Err(error) = link(&log, &at).await {
            tracing::warn!(container, %id, %error, "cannot link the container log");
        }
    }

    /// Inspects a cached image again, for the next start.
    async fn refresh_image(self, found: &FoundImage) {
        let (images, uid) = (&self.ctx.images, self.pass.uid());
        match images.inspect(&found.name, self.pass.pod.metadata.annotations.as_ref()).await {
            Ok(Some(facts)) => images.set_cached(uid, &found.name, facts, self.ctx.clock.now()),
            Ok(None) | Err(_) => images.remove_cached(uid, &found.name),
        }
    }
}

async fn link(log: &Path, link: &Path) -> std::io::Result<()> {
    if !tokio::fs::try_exists(log).await? {
        return Ok(());
    }
    match tokio::fs::symlink(log, link).await {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        result => result,
    }
}
