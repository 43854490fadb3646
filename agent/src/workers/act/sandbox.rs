//! Creates sandboxes, and generates the configuration that every container in one is created with.

use std::io;
use std::path::Path;

use k8s_openapi::api::core::v1::Pod;
use keblet_proto::cri::v1 as cri;

use super::ActContext;
use super::Cause;
use super::NodeFiles;
use super::PassContext;
use super::PodError;
use super::prerequisites;
use super::user_namespace;
use crate::model::SandboxId;
use crate::model::SandboxStatus;
use crate::model::spec;
use crate::recorder::EventType;
use crate::workers::generate::names;
use crate::workers::generate::sandbox::SandboxConfig;
use crate::workers::generate::sandbox::sandbox_config;

/// The sandbox that containers are started in.
pub(super) struct Sandbox {
    pub(super) id: SandboxId,
    pub(super) config: cri::PodSandboxConfig,
    /// The pod's user namespace.
    pub(super) users: cri::UserNamespace,
    /// Primary first; empty with the host's network.
    pub(super) ips: Vec<String>,
    /// Empty for the runtime's default.
    pub(super) runtime_handler: String,
}

impl Sandbox {
    /// The status of a sandbox that was just created.
    pub(super) fn status(&self, ctx: &ActContext, pod: &Pod) -> SandboxStatus {
        SandboxStatus {
            id: self.id.clone(),
            attempt: self.config.metadata.as_ref().map_or(0, |metadata| metadata.attempt),
            ready: true,
            created_at: ctx.clock.wall_nanos(),
            ips: self.ips.clone(),
            // As upstream, one that was just created counts as ready whatever the runtime reports.
            reports_network: !self.ips.is_empty(),
            host_network: spec::host_network(pod),
            shares_pid_namespace: spec::shares_pid_namespace(pod),
            runtime_handler: self.runtime_handler.clone(),
            is_static: spec::is_static(pod),
        }
    }
}

/// The existing sandbox.
///
/// # Errors
/// Its configuration cannot be generated.
pub(super) async fn keep(ctx: &ActContext, pass: &PassContext, id: &SandboxId) -> Result<Sandbox, PodError> {
    let status = pass.snapshot.sandboxes.iter().find(|sandbox| &sandbox.id == id);
    let attempt = status.map_or(0, |status| status.attempt);
    let runtime_handler = status.map(|status| status.runtime_handler.clone()).unwrap_or_default();
    let users = user_namespace::of_pod(ctx, &pass.pod, &runtime_handler).await;
    let users = users.map_err(|source| PodError::ConfigureSandbox { pod: pass.describe(), source })?;
    let config = configure(ctx, pass, attempt, &users)
        .await
        .map_err(|source| PodError::ConfigureSandbox { pod: pass.describe(), source })?;
    Ok(Sandbox { id: id.clone(), config: config.config, users, ips: pass.snapshot.ips.clone(), runtime_handler })
}

/// A new sandbox, with its addresses.
///
/// # Errors
/// It cannot be created, or its status cannot be read. The event of either is not sent yet.
pub(super) async fn create(ctx: &ActContext, pass: &PassContext, attempt: u32) -> Result<Sandbox, PodError> {
    let pod = &pass.pod;
    let failed = |step: &'static str, source: Cause| PodError::CreateSandbox { pod: pass.describe(), step, source };
    let runtime_handler = ctx.objects.runtime_handler(pod).await;
    let runtime_handler = runtime_handler.map_err(|error| failed("generate sandbox config", error.into()))?;
    let users = user_namespace::of_pod(ctx, pod, &runtime_handler).await;
    let users = users.map_err(|source| failed("generate sandbox config", source))?;
    let generated = configure(ctx, pass, attempt, &users).await;
    let generated = generated.map_err(|source| failed("generate sandbox config", source))?;
    for (reason, message) in &generated.warnings {
        warn(ctx, pod, reason, message);
    }
    let config = generated.config;
    make_log_dir(Path::new(&config.log_directory)).await.map_err(|source| failed("create log directory", source))?;
    let _priority = ctx.pacing.priority.raise();
    let began = ctx.clock.now();
    let id = ctx.runtime.run_pod_sandbox(config.clone(), &runtime_handler).await;
    let took = ctx.clock.now().saturating_duration_since(began);
    ctx.count(|metrics| metrics.runtime.sandbox(&runtime_handler, took, id.is_ok()));
    let id = id.map_err(|error| failed("create sandbox", error.into()))?;
    let ips = addresses(ctx, pod, &id).await?;
    Ok(Sandbox { id: id.into(), config, users, ips, runtime_handler })
}

/// Log collectors find a pod's logs by the name of this directory, which consists of namespace, name and UID and can exceed
/// the limit of a file system: such a pod does not run under any kubelet.
async fn make_log_dir(dir: &Path) -> Result<(), Cause> {
    let made = tokio::fs::DirBuilder::new().recursive(true).mode(0o755).create(dir).await;
    made.map_err(|error| match error.kind() {
        io::ErrorKind::InvalidFilename => {
            let length = dir.file_name().map_or(0, std::ffi::OsStr::len);
            Cause::LogDirectoryName { directory: dir.to_owned(), length }
        }
        _ => Cause::file(format!("mkdir {}", dir.display()), error),
    })
}

/// Sends a warning about the pod's configuration. Missing cluster DNS is reported on the node as well.
fn warn(ctx: &ActContext, pod: &Pod, reason: &str, message: &str) {
    if reason == "MissingClusterDNS" {
        let prefix = format!("pod: {:?}. ", names::describe(pod));
        ctx.recorder.node_event(EventType::Warning, reason, message.strip_prefix(&prefix).unwrap_or(message));
    }
    ctx.pod_event(pod, EventType::Warning, reason, message);
}

/// Addresses of a new sandbox, for the hosts file and the environment of its containers; none on the host's network.
async fn addresses(ctx: &ActContext, pod: &Pod, id: &str) -> Result<Vec<String>, PodError> {
    if spec::host_network(pod) {
        return Ok(Vec::new());
    }
    let status = ctx.runtime.pod_sandbox_status(id).await;
    let status = status.map_err(|source| PodError::InspectSandbox { id: id.to_owned(), source })?;
    let network = status.network.unwrap_or_default();
    let additional = network.additional_ips.into_iter().map(|additional| additional.ip);
    Ok(std::iter::once(network.ip).chain(additional).filter(|ip| !ip.is_empty()).collect())
}

async fn configure(
    ctx: &ActContext,
    pass: &PassContext,
    attempt: u32,
    users: &cri::UserNamespace,
) -> Result<SandboxConfig, Cause> {
    let resolv_conf = match &ctx.files.resolv_conf {
        Some(path) => Some(NodeFiles::read(path).await?),
        None => None,
    };
    let parent = prerequisites::cgroup_parent(ctx.cgroups.as_ref(), pass)?;
    let mut generated = sandbox_config(&pass.pod, attempt, &parent, resolv_conf.as_deref(), users, &ctx.settings)?;
    let linux = generated.config.linux.as_mut();
    if let Some(security) = linux.and_then(|linux| linux.security_context.as_mut()) {
        security.supplemental_groups.extend(ctx.volumes.groups(&pass.pod));
    }
    Ok(generated)
}
