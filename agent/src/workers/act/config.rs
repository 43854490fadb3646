//! Everything about one new instance that is decided before the runtime hears of it: its number, environment, mounts
//! and configuration. Touches only files of the pod.

use std::fs;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use k8s_openapi::api::core::v1::Pod;
use keblet_proto::cri::v1 as cri;

use super::ActContext;
use super::env_objects;
use super::sandbox::Sandbox;
use crate::model::ContainerId;
use crate::model::PodSnapshot;
use crate::model::StartContainer;
use crate::model::spec;
use crate::workers::generate::ContainerSpec;
use crate::workers::generate::ResolvedImage;
use crate::workers::generate::container;
use crate::workers::generate::container::Instance;
use crate::workers::generate::env;
use crate::workers::generate::hostname;
use crate::workers::generate::hosts;
use crate::workers::generate::mounts;
use crate::workers::generate::mounts::MountSource;
use crate::workers::generate::names;

/// restartCount of the new instance: the plan's, or one more than the log files tell.
pub(super) fn restart_count(ctx: &ActContext, pod: &Pod, start: &StartContainer) -> u32 {
    if let Some(count) = start.restart_count {
        return count;
    }
    let dir = log_dir(ctx, pod).join(&start.name);
    let files: Vec<String> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()))
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names::restarts_by_logs(files.iter().map(String::as_str)).unwrap_or(0)
}

/// The pod's log directory.
pub(super) fn log_dir(ctx: &ActContext, pod: &Pod) -> std::path::PathBuf {
    ctx.settings.pod_logs_dir.join(names::log_dir_name(pod))
}

/// The configuration to create the instance with. The error is the message of `CreateContainerConfigError`.
pub(super) async fn configure(
    ctx: &ActContext,
    pod: &Pod,
    spec: &ContainerSpec<'_>,
    sandbox: &Sandbox,
    snapshot: &PodSnapshot,
    image: &ResolvedImage,
    restarts: u32,
) -> Result<cri::ContainerConfig, String> {
    let target = target(spec, snapshot)?;
    let objects = env_objects::look_up(ctx, pod, &spec.container).await.map_err(|error| error.to_string())?;
    let environment =
        container::environment(pod, spec, &sandbox.ips, &objects, &ctx.settings).map_err(|error| error.to_string())?;
    make_log_dir(&log_dir(ctx, pod).join(&spec.container.name))?;
    let mut mounts = volume_mounts(ctx, pod, spec, &environment, &sandbox.runtime_handler).await?;
    mounts.extend(hosts_mount(ctx, pod, spec, sandbox)?);
    mounts.extend(termination_mount(ctx, pod, spec));
    let instance = Instance {
        image,
        restarts,
        environment: &environment,
        mounts,
        target,
        runtime_handler: &sandbox.runtime_handler,
    };
    container::container_config(pod, spec, instance, &ctx.settings).map_err(|error| error.to_string())
}

/// The instance an ephemeral container looks at.
fn target<'a>(spec: &ContainerSpec<'_>, snapshot: &'a PodSnapshot) -> Result<Option<&'a ContainerId>, String> {
    let Some(name) = spec.target else { return Ok(None) };
    let found = snapshot.newest(name).map(|status| &status.id);
    found.map(Some).ok_or_else(|| format!("unable to find target container {name}"))
}

fn make_log_dir(dir: &Path) -> Result<(), String> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o755).create(dir);
    made.map_err(|error| format!("create container log directory {}: {error}", dir.display()))
}

async fn volume_mounts(
    ctx: &ActContext,
    pod: &Pod,
    spec: &ContainerSpec<'_>,
    environment: &env::Environment,
    runtime_handler: &str,
) -> Result<Vec<cri::Mount>, String> {
    let name = &spec.container.name;
    let security = &ctx.settings.security;
    let recursive_read_only = security.handlers.recursive_read_only(runtime_handler);
    let mut out = Vec::new();
    for (index, mount) in spec.container.volume_mounts.iter().flatten().enumerate() {
        let expanded = match mount.sub_path_expr.as_deref().filter(|text| !text.is_empty()) {
            Some(text) => Some(env::expand_sub_path(text, environment).map_err(|error| error.to_string())?),
            None => mount.sub_path.clone(),
        };
        let source = ctx.volumes.mount_source(pod, name, index, mount, expanded.as_deref()).await;
        let source = source.map_err(|error| error.to_string())?.to_string_lossy().into_owned();
        let source = MountSource {
            host_path: source,
            read_only: ctx.volumes.is_read_only(pod, &mount.name),
            selinux_relabel: security.selinux && mounts::is_relabelled(pod, &mount.name),
        };
        let mount = mounts::volume_mount(mount, source, recursive_read_only).map_err(|error| error.to_string())?;
        out.push(mount);
    }
    Ok(out)
}

/// The hosts file, unless the container brings its own or the pod has no address.
fn hosts_mount(
    ctx: &ActContext,
    pod: &Pod,
    spec: &ContainerSpec<'_>,
    sandbox: &Sandbox,
) -> Result<Option<cri::Mount>, String> {
    let own = spec.container.volume_mounts.iter().flatten().any(|mount| mount.mount_path == mounts::HOSTS_FILE);
    let host_network = spec::host_network(pod);
    if own || (sandbox.ips.is_empty() && !host_network) {
        return Ok(None);
    }
    let aliases = pod.spec.as_ref().and_then(|spec| spec.host_aliases.as_deref()).unwrap_or_default();
    let text = if host_network {
        let file = &ctx.files.hosts;
        let node = fs::read_to_string(file).map_err(|error| format!("cannot read {}: {error}", file.display()))?;
        hosts::host_network_hosts(&node, aliases)
    } else {
        let name = hostname::hostname(pod, &ctx.settings.dns.cluster_domain).map_err(|error| error.to_string())?;
        hosts::pod_hosts(&sandbox.ips, &name, aliases)
    };
    let file = ctx.volumes.write_hosts_file(names::pod_uid(pod), &text).map_err(|error| error.to_string())?;
    Ok(Some(mounts::agent_file(mounts::HOSTS_FILE, file.to_string_lossy().into_owned(), ctx.settings.security.selinux)))
}

/// The file for the termination message. A container is better without it than not at all.
fn termination_mount(ctx: &ActContext, pod: &Pod, spec: &ContainerSpec<'_>) -> Option<cri::Mount> {
    let container = &spec.container;
    let path = container.termination_message_path.as_deref().filter(|path| !path.is_empty())?;
    match ctx.volumes.make_termination_file(names::pod_uid(pod), &container.name) {
        Ok(file) => Some(mounts::agent_file(path, file.to_string_lossy().into_owned(), ctx.settings.security.selinux)),
        Err(error) => {
            tracing::warn!(pod = names::describe(pod), container = container.name, %error, "no termination message file");
            None
        }
    }
}
