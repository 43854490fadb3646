//! Starting one container: image, configuration, CreateContainer, StartContainer.

use std::path::Path;

use k8s_openapi::api::core::v1::Pod;

use super::ActContext;
use super::config;
use super::image;
use super::image::FoundImage;
use super::image::Origin;
use super::remove;
use super::report;
use super::sandbox::Sandbox;
use crate::model::ContainerId;
use crate::model::PodSnapshot;
use crate::model::StartContainer;
use crate::model::StartFailure;
use crate::recorder::EventType;
use crate::workers::backoff::crash_loop_message;
use crate::workers::generate::ContainerSpec;
use crate::workers::generate::names;

/// What every step of a start uses.
#[derive(Clone, Copy)]
pub(super) struct StartContext<'a> {
    pub(super) ctx: &'a ActContext,
    pub(super) pod: &'a Pod,
    pub(super) snapshot: &'a PodSnapshot,
    pub(super) sandbox: &'a Sandbox,
    /// Called before an image is pulled.
    pub(super) before_pull: &'a (dyn Fn() + Sync),
}

/// The failure of a start that crash-loop back-off blocks, with its event.
pub(super) fn held_back(ctx: &ActContext, pod: &Pod, start: &StartContainer) -> Option<StartFailure> {
    let blocked = start.blocked.as_ref()?;
    if let Some(spec) = ContainerSpec::of_start(pod, start) {
        let described = names::describe(pod);
        let message = format!("Back-off restarting failed container {} in pod {described}", start.name);
        ctx.container_event(pod, &spec, EventType::Warning, "BackOff", &message);
    }
    let message = crash_loop_message(pod, &start.name, blocked.backoff);
    Some(StartFailure { retry_at: Some(blocked.until), ..report::failure("CrashLoopBackOff", message) })
}

impl StartContext<'_> {
    /// Starts one container; the result names the new instance or the step that failed.
    pub(super) async fn start(self, start: &StartContainer) -> Result<ContainerId, StartFailure> {
        let Self { ctx, pod, sandbox, .. } = self;
        let Some(spec) = ContainerSpec::of_start(pod, start) else {
            let message = format!("container {:?} is not in the pod's spec", start.name);
            return Err(report::failure("CreateContainerConfigError", message));
        };
        let found = image::ensure(ctx, pod, &spec, &sandbox.config, self.before_pull).await?;
        let _priority = ctx.pacing.priority.raise();
        self.remove_unstarted(&spec, &start.replaces).await?;
        let restarts = config::restart_count(ctx, pod, start);
        let (found, id) = self.create(&spec, found, restarts).await?;
        ctx.container_event(pod, &spec, EventType::Normal, "Created", "Container created");
        if let Err(error) = ctx.runtime.start_container(id.as_str()).await {
            let message = error.message().replace(id.as_str(), &start.name);
            return Err(ctx.start_failed(pod, &spec, "RunContainerError", message));
        }
        ctx.container_event(pod, &spec, EventType::Normal, "Started", "Container started");
        self.link_log(&start.name, restarts, &id);
        if found.origin == (Origin::Remembered { stale: true }) {
            self.refresh_image(&found).await;
        }
        Ok(id)
    }

    /// Removes created instances that were never started. The runtime refuses while a start is in progress.
    async fn remove_unstarted(self, spec: &ContainerSpec<'_>, unstarted: &[ContainerId]) -> Result<(), StartFailure> {
        for id in unstarted {
            if let Err(error) = remove::remove_instance(self.ctx, id.as_str(), None).await {
                let message = format!("an earlier start may still succeed: {}", error.replace(id.as_str(), "it"));
                return Err(self.ctx.start_failed(self.pod, spec, CREATE_ERROR, message));
            }
        }
        Ok(())
    }

    /// Creates the instance. A cached image may be removed or replaced by now: then it is looked up once more.
    async fn create(
        self,
        spec: &ContainerSpec<'_>,
        found: FoundImage,
        restarts: u32,
    ) -> Result<(FoundImage, ContainerId), StartFailure> {
        let Self { ctx, pod, sandbox, .. } = self;
        match self.create_from(spec, &found, restarts).await {
            Err(first) if matches!(found.origin, Origin::Remembered { .. }) && first.token == CREATE_ERROR => {
                ctx.images.remove_cached(names::pod_uid(pod), &found.name);
                let fresh = image::ensure(ctx, pod, spec, &sandbox.config, self.before_pull).await?;
                if fresh.origin == Origin::Present && fresh.image == found.image {
                    return Err(self.create_failed(spec, first));
                }
                let id =
                    self.create_from(spec, &fresh, restarts).await.map_err(|error| self.create_failed(spec, error))?;
                Ok((fresh, id))
            }
            Err(error) => Err(self.create_failed(spec, error)),
            Ok(id) => Ok((found, id)),
        }
    }

    async fn create_from(
        self,
        spec: &ContainerSpec<'_>,
        found: &FoundImage,
        restarts: u32,
    ) -> Result<ContainerId, StartFailure> {
        let Self { ctx, pod, snapshot, sandbox, .. } = self;
        let config = config::configure(ctx, pod, spec, sandbox, snapshot, &found.image, restarts)
            .await
            .map_err(|message| report::failure("CreateContainerConfigError", message))?;
        let created = ctx.runtime.create_container(sandbox.id.as_str(), config, sandbox.config.clone()).await;
        created.map(ContainerId::from).map_err(|error| report::failure(CREATE_ERROR, error.message()))
    }

    fn create_failed(self, spec: &ContainerSpec<'_>, failure: StartFailure) -> StartFailure {
        let message = format!("Error: {}", failure.message);
        self.ctx.container_event(self.pod, spec, EventType::Warning, "Failed", &message);
        failure
    }

    /// Links the log below the folder of all containers' logs, if it exists.
    fn link_log(self, container: &str, restarts: u32, id: &ContainerId) {
        let Some(links) = &self.ctx.files.log_links else { return };
        let log = config::log_dir(self.ctx, self.pod).join(names::log_path(container, restarts));
        if let Err(error) = link(&log, &links.join(names::log_link_name(self.pod, container, id.as_str()))) {
            tracing::warn!(container, %id, %error, "cannot link the container log");
        }
    }

    /// Looks up a cached image again, for the next start.
    async fn refresh_image(self, found: &FoundImage) {
        let (images, uid) = (&self.ctx.images, names::pod_uid(self.pod));
        match images.inspect(&found.name, self.pod.metadata.annotations.as_ref()).await {
            Ok(Some(facts)) => images.set_cached(uid, &found.name, facts, self.ctx.clock.now()),
            Ok(None) | Err(_) => images.remove_cached(uid, &found.name),
        }
    }
}

const CREATE_ERROR: &str = "CreateContainerError";

fn link(log: &Path, link: &Path) -> std::io::Result<()> {
    if !log.exists() {
        return Ok(());
    }
    match std::os::unix::fs::symlink(log, link) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        result => result,
    }
}
