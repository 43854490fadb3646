//! Making sandboxes, and the configuration every container of one is created with.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use k8s_openapi::api::core::v1::Pod;
use keblet_proto::cri::v1 as cri;

use super::ActContext;
use super::prerequisites;
use super::report;
use crate::model::PodSnapshot;
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
    /// Primary first; empty with the host's network.
    pub(super) ips: Vec<String>,
    /// Empty for the runtime's default.
    pub(super) runtime_handler: String,
}

impl Sandbox {
    /// A sandbox that was just created, as the runtime answered.
    pub(super) fn status(&self, ctx: &ActContext, pod: &Pod) -> SandboxStatus {
        SandboxStatus {
            id: self.id.clone(),
            attempt: self.config.metadata.as_ref().map_or(0, |metadata| metadata.attempt),
            ready: true,
            created_at: ctx.clock.wall_nanos(),
            ips: self.ips.clone(),
            host_network: spec::host_network(pod),
            shares_pid_namespace: spec::shares_pid_namespace(pod),
            runtime_handler: self.runtime_handler.clone(),
        }
    }
}

/// The sandbox that exists already.
pub(super) fn keep(ctx: &ActContext, pod: &Pod, snapshot: &PodSnapshot, id: &SandboxId) -> Result<Sandbox, String> {
    let status = snapshot.sandboxes.iter().find(|sandbox| &sandbox.id == id);
    let attempt = status.map_or(0, |status| status.attempt);
    let config = configure(ctx, pod, attempt).map_err(|error| {
        let message = format!("GeneratePodSandboxConfig for pod {:?} failed: {error}", names::describe(pod));
        report::failed("ConfigPodSandbox", &names::describe(pod), "ConfigPodSandboxError", &message)
    })?;
    let runtime_handler = status.map(|status| status.runtime_handler.clone()).unwrap_or_default();
    Ok(Sandbox { id: id.clone(), config: config.config, ips: snapshot.ips.clone(), runtime_handler })
}

/// A new one, with its address.
pub(super) async fn create(ctx: &ActContext, pod: &Pod, attempt: u32) -> Result<Sandbox, String> {
    let described = names::describe(pod);
    // The event tells what went wrong, the sync's result also what was tried.
    let error = |tried: &str, problem: String| {
        if !spec::deletion_requested(pod) {
            let text = format!("Failed to create pod sandbox: {problem}");
            ctx.pod_event(pod, EventType::Warning, "FailedCreatePodSandBox", &text);
        }
        let message = format!("Failed to {tried} for pod {described:?}: {problem}");
        report::failed("CreatePodSandbox", &described, "CreatePodSandboxError", &message)
    };
    let generated = configure(ctx, pod, attempt).map_err(|problem| error("generate sandbox config", problem))?;
    for (reason, message) in &generated.warnings {
        warn(ctx, pod, reason, message);
    }
    let config = generated.config;
    make_log_dir(Path::new(&config.log_directory)).map_err(|problem| error("create log directory", problem))?;
    let _priority = ctx.pacing.priority.raise();
    let id = ctx.runtime.run_pod_sandbox(config.clone(), "").await;
    let id = id.map_err(|problem| error("create sandbox", problem.rpc_text()))?;
    let ips = addresses(ctx, pod, &id).await?;
    Ok(Sandbox { id: id.into(), config, ips, runtime_handler: String::new() })
}

/// Others find a pod's logs by the name of this folder, which is made of namespace, name and UID and may be too long for a
/// file system: such a pod does not run under any kubelet.
fn make_log_dir(dir: &Path) -> Result<(), String> {
    fs::DirBuilder::new().recursive(true).mode(0o755).create(dir).map_err(|error| {
        let name = dir.file_name().map_or(0, std::ffi::OsStr::len);
        match error.kind() {
            io::ErrorKind::InvalidFilename => format!(
                "mkdir {}: file name too long: namespace, name and UID of the pod make {name} bytes",
                dir.display()
            ),
            _ => format!("mkdir {}: {error}", dir.display()),
        }
    })
}

/// A node without cluster DNS is a matter of the node as well.
fn warn(ctx: &ActContext, pod: &Pod, reason: &str, message: &str) {
    if reason == "MissingClusterDNS" {
        let prefix = format!("pod: {:?}. ", names::describe(pod));
        ctx.recorder.node_event(EventType::Warning, reason, message.strip_prefix(&prefix).unwrap_or(message));
    }
    ctx.pod_event(pod, EventType::Warning, reason, message);
}

/// Addresses of a sandbox just made: hosts file and environment of its containers need them. On the host's network they
/// are the node's.
async fn addresses(ctx: &ActContext, pod: &Pod, id: &str) -> Result<Vec<String>, String> {
    if spec::host_network(pod) {
        return Ok(Vec::new());
    }
    let inspection = ctx.runtime.pod_sandbox_status(id, false).await.map_err(|error| {
        let text = format!("Unable to get pod sandbox status: {}", error.rpc_text());
        ctx.pod_event(pod, EventType::Warning, "FailedPodSandBoxStatus", &text);
        text
    })?;
    let network = inspection.status.network.unwrap_or_default();
    let additional = network.additional_ips.into_iter().map(|additional| additional.ip);
    Ok(std::iter::once(network.ip).chain(additional).filter(|ip| !ip.is_empty()).collect())
}

fn configure(ctx: &ActContext, pod: &Pod, attempt: u32) -> Result<SandboxConfig, String> {
    let resolv_conf = match &ctx.files.resolv_conf {
        Some(path) => {
            let text = fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
            Some(text)
        }
        None => None,
    };
    let parent = prerequisites::cgroup_parent(ctx, pod)?;
    sandbox_config(pod, attempt, &parent, resolv_conf.as_deref(), &ctx.settings).map_err(|error| error.to_string())
}
