//! Removes exited containers with their logs, and sandboxes.

use std::fs;
use std::io;
use std::path::Path;
use std::path::PathBuf;

use super::ActContext;
use super::Cause;
use super::PodError;
use crate::filesystem;
use crate::model::ContainerStatus;
use crate::model::PodRef;
use crate::model::PodSnapshot;
use crate::model::RemoveContainer;
use crate::model::SandboxId;
use crate::runtime::Runtime;
use crate::workers::generate::names;

/// Removes one instance. One that ran when the pod was inspected was stopped since, as the plan says; one in unknown state
/// that is only pruned is stopped by the runtime itself.
///
/// # Errors
/// It cannot be removed.
pub(super) async fn remove_planned(
    ctx: &ActContext,
    snapshot: &PodSnapshot,
    remove: &RemoveContainer,
) -> Result<(), PodError> {
    let removed = match snapshot.by_id(&remove.id).filter(|_| !remove.keep_logs) {
        Some(status) => remove_with_logs(ctx, &snapshot.pod, status).await,
        None => remove_instance(ctx, remove.id.as_str()).await,
    };
    removed.map_err(|source| PodError::RemoveContainer { container: remove.name.clone(), source })
}

/// Removes an instance of a pod with its log file and those rotated from it, unless logs are kept, and the link to it. If a
/// log cannot be deleted the instance stays, since only the instance still names the log.
///
/// # Errors
/// The log or the instance cannot be removed.
pub(super) async fn remove_with_logs(ctx: &ActContext, pod: &PodRef, status: &ContainerStatus) -> Result<(), Cause> {
    let (id, path) = (status.id.as_str(), &status.log_path);
    if !path.is_empty() {
        if !ctx.settings.keep_logs {
            let log = PathBuf::from(path);
            filesystem::blocking(move || remove_logs(&log))
                .await
                .map_err(|error| Cause::file(format!("failed to remove container {id:?} log {path:?}"), error))?;
        }
        if let Some(links) = &ctx.files.log_links {
            // By its name: listing the links of all pods for each container takes long on a full node.
            let link = links.join(names::log_link_name(pod, &status.name, id));
            ignore_missing(tokio::fs::remove_file(&link).await)
                .map_err(|error| Cause::file(format!("failed to remove container {id:?} log link {link:?}"), error))?;
        }
    }
    remove_instance(ctx, id).await
}

/// Removes an instance from the runtime. One that does not exist is no error.
///
/// # Errors
/// The runtime failed the call.
pub(super) async fn remove_instance(ctx: &ActContext, id: &str) -> Result<(), Cause> {
    match ctx.runtime.remove_container(id).await {
        Err(error) if !error.is_not_found() => Err(error.into()),
        _ => Ok(()),
    }
}

/// Stops and removes a sandbox. One that does not exist is no error.
///
/// # Errors
/// The runtime failed one of the calls.
pub(super) async fn remove_sandbox(runtime: &Runtime, id: &SandboxId) -> Result<(), PodError> {
    let removed = match runtime.stop_pod_sandbox(id.as_str()).await {
        Ok(()) => runtime.remove_pod_sandbox(id.as_str()).await,
        Err(error) => Err(error),
    };
    match removed {
        Err(source) if !source.is_not_found() => Err(PodError::RemoveSandbox { id: id.to_string(), source }),
        _ => Ok(()),
    }
}

/// Deletes a log file and those rotated from it.
fn remove_logs(log: &Path) -> io::Result<()> {
    let Some((dir, name)) = log.parent().zip(log.file_name().and_then(|name| name.to_str())) else { return Ok(()) };
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        result => result?,
    };
    for entry in entries {
        let entry = entry?;
        let is_ours = entry
            .file_name()
            .to_str()
            .is_some_and(|other| other.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')));
        if is_ours {
            ignore_missing(fs::remove_file(entry.path()))?;
        }
    }
    Ok(())
}

fn ignore_missing(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_goes_with_its_rotated_ones() {
        let dir = tempfile::tempdir().expect("a folder");
        for name in ["1.log", "1.log.20260101-000000", "1.log.20260101-000000.gz", "10.log", "11.log", "1.logbook"] {
            fs::write(dir.path().join(name), "").expect("a file");
        }
        remove_logs(&dir.path().join("1.log")).expect("gone");
        let mut left: Vec<_> =
            fs::read_dir(dir.path()).expect("a folder").flatten().map(|entry| entry.file_name()).collect();
        left.sort();
        assert_eq!(left, ["1.logbook", "10.log", "11.log"]);
        remove_logs(&dir.path().join("1.log")).expect("twice is fine");
        remove_logs(Path::new("/nowhere/at/all.log")).expect("no folder, no log");
    }
}
