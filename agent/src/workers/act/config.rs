//! The configuration of a container that is about to be created: restart count, environment, mounts. Creates files of the
//! pod; makes no call to the runtime.

use std::fs;
use std::path::PathBuf;

use k8s_openapi::api::core::v1::Pod;
use keblet_proto::cri::v1 as cri;

use super::ActContext;
use super::Cause;
use super::NodeFiles;
use super::env_objects;
use super::image_volumes::ImageVolumes;
use super::sandbox::Sandbox;
use super::start::StartContext;
use crate::filesystem;
use crate::model::ContainerId;
use crate::model::PodSnapshot;
use crate::model::StartContainer;
use crate::model::spec;
use crate::volumes::PodVolumes;
use crate::workers::generate::ContainerSpec;
use crate::workers::generate::NodeSettings;
use crate::workers::generate::ResolvedImage;
use crate::workers::generate::container;
use crate::workers::generate::container::Instance;
use crate::workers::generate::env;
use crate::workers::generate::hostname;
use crate::workers::generate::hosts;
use crate::workers::generate::mounts;
use crate::workers::generate::mounts::MountSource;
use crate::workers::generate::names;
use crate::workers::generate::user_namespace;

/// restartCount of the new instance: the plan's, or one more than the highest in the names of its log files.
pub(super) async fn restart_count(settings: &NodeSettings, pod: &Pod, start: &StartContainer) -> u32 {
    if let Some(count) = start.restart_count {
        return count;
    }
    let dir = log_dir(settings, pod).join(&start.name);
    let listed = filesystem::blocking(move || {
        let entries = fs::read_dir(dir)?.flatten();
        // Not only regular files: the logs of a runtime that keeps them elsewhere are links.
        let files = entries.filter(|entry| entry.file_type().is_ok_and(|kind| !kind.is_dir()));
        Ok(files.filter_map(|entry| entry.file_name().into_string().ok()).collect::<Vec<_>>())
    });
    // The directory does not exist before the first start.
    let files = listed.await.unwrap_or_default();
    names::restarts_by_logs(files.iter().map(String::as_str)).unwrap_or(0)
}

/// The pod's log directory.
pub(super) fn log_dir(settings: &NodeSettings, pod: &Pod) -> PathBuf {
    settings.pod_logs_dir.join(names::log_dir_name(pod))
}

/// The configuration to create the instance with. Neither the API server nor that of a volume is waited for once the pod is
/// terminated.
///
/// # Errors
/// The cause of `CreateContainerConfigError`.
pub(super) async fn configure(
    context: StartContext<'_>,
    spec: &ContainerSpec<'_>,
    image: &ResolvedImage,
    restarts: u32,
) -> Result<cri::ContainerConfig, Cause> {
    let StartContext { ctx, pass, sandbox, image_volumes, terminated, .. } = context;
    let pod = &pass.pod;
    let target = target(spec, &pass.snapshot)?;
    let reading = env_objects::look_up(&ctx.objects, &ctx.volumes, pod, &spec.container, &ctx.settings);
    let objects = terminated.run_until_cancelled(reading).await.ok_or(Cause::Terminated)??;
    let environment = container::environment(pod, spec, &sandbox.ips, &objects, &ctx.settings)?;
    make_log_dir(log_dir(&ctx.settings, pod).join(&spec.container.name)).await?;
    let volumes = PodVolumes::of(pod);
    let mounting = volume_mounts(ctx, &volumes, spec, &environment, sandbox, image_volumes);
    let mut mounts = terminated.run_until_cancelled(mounting).await.ok_or(Cause::Terminated)??;
    mounts.extend(hosts_mount(ctx, pod, spec, sandbox).await?);
    let devices = block_devices(ctx, &volumes, spec)?;
    let instance =
        Instance { image, restarts, environment: &environment, mounts, devices, target, users: &sandbox.users };
    let mut config = container::container_config(pod, spec, instance, &ctx.settings)?;
    if let Some(security) = config.linux.as_mut().and_then(|linux| linux.security_context.as_mut()) {
        security.supplemental_groups.extend(ctx.volumes.groups(pod));
    }
    // Last, since every attempt has a file of its own, which exists until the pod is removed.
    let termination = termination_mount(ctx, pod, spec).await.into_iter().collect();
    config.mounts.extend(user_namespace::map_mounts(termination, &sandbox.users));
    Ok(config)
}

/// The instance whose processes an ephemeral container shares.
fn target<'a>(spec: &ContainerSpec<'_>, snapshot: &'a PodSnapshot) -> Result<Option<&'a ContainerId>, Cause> {
    let Some(name) = spec.target else { return Ok(None) };
    let found = snapshot.newest(name).map(|status| &status.id);
    found.map(Some).ok_or_else(|| Cause::NoTargetContainer(name.to_owned()))
}

async fn make_log_dir(dir: PathBuf) -> Result<(), Cause> {
    let made = tokio::fs::DirBuilder::new().recursive(true).mode(0o755).create(&dir).await;
    made.map_err(|error| Cause::file(format!("create container log directory {}", dir.display()), error))
}

async fn volume_mounts(
    ctx: &ActContext,
    volumes: &PodVolumes<'_>,
    spec: &ContainerSpec<'_>,
    environment: &env::Environment,
    sandbox: &Sandbox,
    image_volumes: &ImageVolumes,
) -> Result<Vec<cri::Mount>, Cause> {
    let name = &spec.container.name;
    let security = &ctx.settings.security;
    let recursive_read_only = security.handlers.recursive_read_only(&sandbox.runtime_handler);
    let mut out = Vec::new();
    for (index, mount) in spec.container.volume_mounts.iter().flatten().enumerate() {
        let expanded = match mount.sub_path_expr.as_deref().filter(|text| !text.is_empty()) {
            Some(text) => Some(env::expand_sub_path(text, environment)?),
            None => mount.sub_path.clone(),
        };
        if let Some((image, sub_path)) = image_volumes.mount(mount, expanded.as_deref(), &sandbox.config)? {
            // Not relabelled, as upstream: the files of an image are the runtime's.
            let source = MountSource { read_only: true, ..MountSource::default() };
            let made = mounts::volume_mount(mount, source, recursive_read_only)?;
            out.push(cri::Mount { image: Some(image), image_sub_path: sub_path, ..made });
            continue;
        }
        let source = ctx.volumes.mount_source(volumes, name, index, mount, expanded.as_deref()).await?;
        let source = source.to_string_lossy().into_owned();
        let source = MountSource {
            host_path: source,
            read_only: ctx.volumes.is_read_only(volumes, &mount.name),
            selinux_relabel: security.selinux
                && (volumes.get(&mount.name).is_some_and(mounts::is_relabelled)
                    || ctx.volumes.is_relabelled(volumes, &mount.name)),
        };
        let mount = mounts::volume_mount(mount, source, recursive_read_only)?;
        out.push(mount);
    }
    Ok(out)
}

/// The devices of raw block volumes.
fn block_devices(
    ctx: &ActContext,
    volumes: &PodVolumes<'_>,
    spec: &ContainerSpec<'_>,
) -> Result<Vec<cri::Device>, Cause> {
    let mut out = Vec::new();
    for wanted in spec.container.volume_devices.iter().flatten() {
        let (device, read_only) = ctx.volumes.device(volumes, &wanted.name)?;
        out.push(mounts::device(wanted, &device, read_only));
    }
    Ok(out)
}

/// The hosts file, unless the container mounts its own or the pod has no address.
async fn hosts_mount(
    ctx: &ActContext,
    pod: &Pod,
    spec: &ContainerSpec<'_>,
    sandbox: &Sandbox,
) -> Result<Option<cri::Mount>, Cause> {
    let own = spec.container.volume_mounts.iter().flatten().any(|mount| mount.mount_path == mounts::HOSTS_FILE);
    let host_network = spec::host_network(pod);
    if own || (sandbox.ips.is_empty() && !host_network) {
        return Ok(None);
    }
    let aliases = pod.spec.as_ref().and_then(|spec| spec.host_aliases.as_deref()).unwrap_or_default();
    let text = if host_network {
        let node = NodeFiles::read(&ctx.files.hosts).await?;
        hosts::host_network_hosts(&node, aliases)
    } else {
        let name = hostname::hostname(pod, &ctx.settings.dns)?;
        hosts::pod_hosts(&sandbox.ips, &name, aliases)
    };
    let file = ctx.volumes.write_hosts_file(names::pod_uid(pod), text).await?;
    Ok(Some(mounts::agent_file(mounts::HOSTS_FILE, file.to_string_lossy().into_owned(), ctx.settings.security.selinux)))
}

/// The file for the termination message. Without it the container is started all the same.
async fn termination_mount(ctx: &ActContext, pod: &Pod, spec: &ContainerSpec<'_>) -> Option<cri::Mount> {
    let container = &spec.container;
    let path = container.termination_message_path.as_deref().filter(|path| !path.is_empty())?;
    match ctx.volumes.make_termination_file(names::pod_uid(pod), &container.name).await {
        Ok(file) => Some(mounts::agent_file(path, file.to_string_lossy().into_owned(), ctx.settings.security.selinux)),
        Err(error) => {
            tracing::warn!(pod = names::describe(pod), container = container.name, %error, "no termination message file");
            None
        }
    }
}
