//! Errors of actions on a pod: the action, its target and the cause. One function renders the reason and the message that
//! users of kubelets know, another the event.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::Pod;

use super::cause::Cause;
use super::hooks::HookError;
use super::resize::ResizeError;
use crate::cgroups::CgroupError;
use crate::images::CredentialError;
use crate::images::PullError;
use crate::images::ReferenceError;
use crate::model::StartContainer;
use crate::model::StartFailure;
use crate::model::aggregate;
use crate::recorder::EventType;
use crate::runtime::RuntimeError;
use crate::user_namespaces::UserNamespaceError;
use crate::volumes::FailedVolume;
use crate::volumes::VolumeError;
use crate::workers::backoff::crash_loop_message;
use crate::workers::generate::GenerateError;
use crate::workers::generate::names;

/// An action on a pod that failed. Its text is that of the pod's sync result.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the fields are the target and the cause of the action")]
pub enum PodError {
    /// The runtime's network is not ready; nothing was started.
    NetworkNotReady { problem: String },
    /// The pod's directories cannot be created.
    CreatePodDirectories { source: VolumeError },
    /// A field of the pod that the agent cannot use.
    InvalidSpec { source: GenerateError },
    /// The pod's cgroup cannot be created.
    CreateCgroup { uid: String, source: CgroupError },
    /// Volumes cannot be set up; nothing was started.
    SetUpVolumes { failed: Vec<FailedVolume> },

    /// A container cannot be stopped.
    KillContainer { container: String, source: Cause },
    /// A sandbox of the pod cannot be stopped.
    KillSandbox { uid: String, source: RuntimeError },
    /// An instance that the plan removes cannot be removed.
    RemoveContainer { container: String, source: Cause },
    /// An exited instance cannot be removed by garbage collection.
    CollectContainer { id: String, source: Cause },
    /// A sandbox cannot be removed.
    RemoveSandbox { id: String, source: RuntimeError },

    /// The configuration of an existing sandbox cannot be generated.
    ConfigureSandbox { pod: String, source: Cause },
    /// A sandbox cannot be created. `step` is what was tried.
    CreateSandbox { pod: String, step: &'static str, source: Cause },
    /// The status of a new sandbox cannot be read.
    InspectSandbox { id: String, source: RuntimeError },

    /// The container's image reference is invalid.
    ParseImage { image: String, source: ReferenceError },
    /// The image cannot be inspected.
    InspectImage { image: String, source: RuntimeError },
    /// The image is not present and must not be pulled.
    NeverPull { image: String },
    /// The pod's credentials for the image are not known.
    ImageCredentials { source: CredentialError },
    /// The pull cannot be recorded, so that it is not begun.
    RecordPull { image: String, source: io::Error },
    /// The image cannot be pulled.
    PullImage { image: String, source: PullError, recheck_at: SystemTime },
    /// The pull is held back after an earlier failure.
    PullBackOff { image: String, last: Option<String>, until: SystemTime },
    /// The image that was just pulled cannot be inspected.
    InspectPulledImage { image: String, source: RuntimeError },
    /// The image of a volume that the container mounts is not there: the failure of that image.
    ImageVolume { volume: String, failure: StartFailure },
    /// The spec does not name the container to start.
    UnknownContainer { container: String },
    /// An instance of an earlier start cannot be removed, so that no other is created.
    ReplaceContainer { id: String, source: Cause },
    /// The container's configuration cannot be generated.
    ConfigureContainer { container: String, source: Cause },
    /// The runtime did not create the container.
    CreateContainer { container: String, source: RuntimeError },
    /// The runtime did not start the container.
    StartContainer { container: String, id: String, source: RuntimeError },
    /// The postStart hook failed, and the container was stopped.
    PostStartHook { container: String, source: Box<HookError> },
    /// The start is held back after the container's last exit.
    CrashLoopBackOff { container: String, pod: String, back_off: String, until: SystemTime },

    /// Resources cannot be changed in place.
    Resize { source: Box<ResizeError> },

    /// The pod cannot be stopped.
    KillPod { failed: Vec<PodError> },
    /// The task that stops the pod ended abnormally.
    StopTask { source: tokio::task::JoinError },
    /// The pod's volumes cannot be torn down.
    TearDownVolumes { uid: String, source: VolumeError },
    /// The pod's cgroup cannot be removed.
    RemoveCgroup { uid: String, source: CgroupError },
    /// The range of ids of a pod cannot be given back.
    ReleaseUserNamespace { uid: String, source: UserNamespaceError },
    /// A directory of a pod that no longer exists cannot be removed.
    RemoveDirectory { directory: PathBuf, source: io::Error },
}

/// An error in upstream's words.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rendered {
    /// Error token: the reason of a waiting container, or of an action in the pod's sync result. Upstream has a text of its
    /// own for errors without a token.
    pub reason: Cow<'static, str>,
    /// Message.
    pub message: String,
}

/// The event of an error.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::workers) struct ErrorEvent {
    pub(in crate::workers) kind: EventType,
    pub(in crate::workers) reason: Cow<'static, str>,
    pub(in crate::workers) message: String,
}

impl PodError {
    /// The error of a planned start that crash-loop back-off blocks; `None` if it is not blocked.
    pub fn crash_loop_back_off(pod: &Pod, start: &StartContainer) -> Option<Self> {
        let blocked = start.blocked.as_ref()?;
        Some(Self::CrashLoopBackOff {
            container: start.name.clone(),
            pod: names::describe(pod),
            back_off: crash_loop_message(pod, &start.name, blocked.backoff),
            until: blocked.until,
        })
    }

    /// Reason and message. An error that upstream has no token for has an empty reason.
    pub fn render(&self) -> Rendered {
        Rendered { reason: self.reason(), message: self.message() }
    }

    fn reason(&self) -> Cow<'static, str> {
        Cow::Borrowed(match self {
            Self::ImageCredentials { source } => return Cow::Owned(source.to_string()),
            Self::RecordPull { source, .. } => {
                return Cow::Owned(format!("failed to record image pull intent: {source}"));
            }
            Self::ImageVolume { failure, .. } => return Cow::Owned(failure.token.clone()),
            Self::NetworkNotReady { .. } => "NetworkNotReady",
            Self::CreatePodDirectories { .. } => "Failed",
            Self::CreateCgroup { .. } => "FailedCreatePodContainer",
            Self::SetUpVolumes { .. } => "FailedMount",
            Self::KillContainer { .. } => "KillContainerError",
            Self::KillSandbox { .. } => "KillPodSandboxError",
            Self::RemoveContainer { .. } => "RemoveContainerError",
            Self::CollectContainer { .. } | Self::RemoveSandbox { .. } => "ContainerGCFailed",
            Self::ConfigureSandbox { .. } => "ConfigPodSandboxError",
            Self::CreateSandbox { .. } => "CreatePodSandboxError",
            Self::InspectSandbox { .. } => "FailedPodSandBoxStatus",
            Self::ParseImage { .. } => "InvalidImageName",
            Self::InspectImage { .. } => "ImageInspectError",
            Self::NeverPull { .. } => "ErrImageNeverPull",
            Self::PullImage { image, source, .. } => pull_failure(image, source).0,
            Self::PullBackOff { .. } => StartFailure::IMAGE_PULL_BACK_OFF,
            Self::InspectPulledImage { .. } | Self::UnknownContainer { .. } | Self::ConfigureContainer { .. } => {
                "CreateContainerConfigError"
            }
            Self::ReplaceContainer { .. } | Self::CreateContainer { .. } => "CreateContainerError",
            Self::StartContainer { .. } => "RunContainerError",
            Self::PostStartHook { .. } => "PostStartHookError",
            Self::Resize { .. } => "ResizePodInPlaceError",
            Self::CrashLoopBackOff { .. } => "CrashLoopBackOff",
            Self::KillPod { .. } | Self::StopTask { .. } => "FailedKillPod",
            Self::InvalidSpec { .. }
            | Self::TearDownVolumes { .. }
            | Self::RemoveCgroup { .. }
            | Self::ReleaseUserNamespace { .. }
            | Self::RemoveDirectory { .. } => "",
        })
    }

    fn message(&self) -> String {
        match self {
            Self::NetworkNotReady { problem } => format!("network is not ready: {problem}"),
            Self::CreatePodDirectories { source } => format!("error making pod data directories: {source}"),
            Self::InvalidSpec { source } => source.to_string(),
            Self::CreateCgroup { uid, source } => {
                format!("failed to ensure that the pod: {uid} cgroups exist and are correctly applied: {source}")
            }
            Self::SetUpVolumes { failed } => unmounted(failed),
            Self::KillContainer { source, .. }
            | Self::RemoveContainer { source, .. }
            | Self::CollectContainer { source, .. }
            | Self::ConfigureContainer { source, .. } => source.to_string(),
            Self::KillSandbox { source, .. } | Self::RemoveSandbox { source, .. } => source.rpc_text(),
            Self::ConfigureSandbox { pod, source } => {
                format!("GeneratePodSandboxConfig for pod {pod:?} failed: {source}")
            }
            Self::CreateSandbox { pod, step, source } => format!("Failed to {step} for pod {pod:?}: {source}"),
            Self::InspectSandbox { source, .. } => format!("Unable to get pod sandbox status: {}", source.rpc_text()),
            Self::ParseImage { image, source } => format!("Failed to apply default image tag {image:?}: {source}"),
            Self::InspectImage { source, .. } => format!("Failed to inspect image \"\": {}", source.rpc_text()),
            Self::NeverPull { image } => {
                format!("Container image {image:?} is not present with pull policy of Never")
            }
            Self::ImageCredentials { source } => source.to_string(),
            Self::RecordPull { image, .. } => {
                format!("Failed to record image pull intent for container image {image:?}: {}", self.reason())
            }
            Self::PullImage { image, source, .. } => pull_failure(image, source).1,
            Self::ImageVolume { failure, .. } => failure.message.clone(),
            Self::PullBackOff { image, last, .. } => {
                let last = last.as_ref().map(|last| format!(": {last}")).unwrap_or_default();
                format!("Back-off pulling image {image:?}{last}")
            }
            Self::InspectPulledImage { source, .. } | Self::CreateContainer { source, .. } => source.message(),
            Self::UnknownContainer { container } => format!("container {container:?} is not in the pod's spec"),
            Self::ReplaceContainer { id, source } => {
                format!("an earlier start may still succeed: {}", source.to_string().replace(id.as_str(), "it"))
            }
            Self::StartContainer { container, id, source } => source.message().replace(id.as_str(), container),
            Self::PostStartHook { source, .. } => source.to_string(),
            Self::Resize { source } => source.to_string(),
            Self::CrashLoopBackOff { back_off, .. } => back_off.clone(),
            Self::KillPod { failed } => format!("error killing pod: {}", aggregate(failed.iter().map(Self::to_string))),
            Self::StopTask { source } => format!("stopping the pod: {source}"),
            Self::TearDownVolumes { source, .. } => source.to_string(),
            Self::RemoveCgroup { source, .. } => source.to_string(),
            Self::ReleaseUserNamespace { source, .. } => source.to_string(),
            Self::RemoveDirectory { directory, source } => format!("cannot remove {}: {source}", directory.display()),
        }
    }

    /// The event to send for this error, if it has one.
    pub(in crate::workers) fn event(&self) -> Option<ErrorEvent> {
        let warning = |reason, message| Some(ErrorEvent { kind: EventType::Warning, reason, message });
        let Rendered { reason, message } = self.render();
        match self {
            Self::NetworkNotReady { .. }
            | Self::CreatePodDirectories { .. }
            | Self::InspectSandbox { .. }
            | Self::NeverPull { .. }
            | Self::KillPod { .. }
            | Self::StopTask { .. } => warning(reason, message),
            Self::CreateCgroup { source, .. } => {
                warning(reason, format!("unable to ensure pod container exists: {source}"))
            }
            Self::CreateSandbox { source, .. } => {
                warning("FailedCreatePodSandBox".into(), format!("Failed to create pod sandbox: {source}"))
            }
            Self::ParseImage { .. } | Self::InspectImage { .. } => warning("InspectFailed".into(), message),
            Self::PullImage { image, source, .. } => {
                warning("Failed".into(), format!("Failed to pull image {image:?}: {source}"))
            }
            Self::ImageVolume { .. } => warning("Failed".into(), format!("Error: {reason}")),
            Self::PullBackOff { image, .. } => {
                let message = format!("Back-off pulling image {image:?}");
                Some(ErrorEvent { kind: EventType::Normal, reason: "BackOff".into(), message })
            }
            Self::ReplaceContainer { .. }
            | Self::ConfigureContainer { .. }
            | Self::CreateContainer { .. }
            | Self::StartContainer { .. } => warning("Failed".into(), format!("Error: {message}")),
            Self::PostStartHook { .. } => warning("FailedPostStartHook".into(), "PostStartHook failed".to_owned()),
            Self::CrashLoopBackOff { container, pod, .. } => {
                warning("BackOff".into(), format!("Back-off restarting failed container {container} in pod {pod}"))
            }
            _ => None,
        }
    }

    /// Name and target of an action that the sync result of a pod names.
    fn action(&self) -> Option<(&'static str, &str)> {
        match self {
            Self::KillContainer { container, .. } => Some(("KillContainer", container)),
            Self::KillSandbox { uid, .. } => Some(("KillPodSandbox", uid)),
            Self::RemoveContainer { container, .. } => Some(("RemoveContainer", container)),
            Self::ConfigureSandbox { pod, .. } => Some(("ConfigPodSandbox", pod)),
            Self::CreateSandbox { pod, .. } => Some(("CreatePodSandbox", pod)),
            _ => None,
        }
    }
}

impl fmt::Display for PodError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Rendered { reason, message } = self.render();
        match self.action() {
            Some((action, target)) => write!(f, "failed to {action:?} for {target:?} with {reason}: {message:?}"),
            None => f.write_str(&message),
        }
    }
}

impl From<&PodError> for StartFailure {
    fn from(error: &PodError) -> Self {
        let Rendered { reason, message } = error.render();
        let retry_at = match error {
            PodError::CrashLoopBackOff { until, .. } | PodError::PullBackOff { until, .. } => Some(*until),
            PodError::PullImage { recheck_at, .. } => Some(*recheck_at),
            PodError::ImageVolume { failure, .. } => failure.retry_at,
            _ => None,
        };
        Self { token: reason.into_owned(), message, retry_at }
    }
}

/// Runtimes put a token in front of errors whose kind they know.
fn pull_failure(image: &str, error: &PullError) -> (&'static str, String) {
    let text = error.to_string();
    let known = [
        ("RegistryUnavailable", "the registry is unavailable"),
        ("SignatureValidationFailed", "the signature validation failed"),
    ];
    for (token, meaning) in known {
        if let Some(rest) = text.strip_prefix(token) {
            return (token, format!("image pull failed for {image} because {meaning}{rest}"));
        }
    }
    ("ErrImagePull", text)
}

/// Volumes and causes are sorted, and each cause is there once, as upstream: several volumes may have the same claim.
fn unmounted(failed: &[FailedVolume]) -> String {
    let in_order = |texts: BTreeSet<String>, with: &str| texts.into_iter().collect::<Vec<_>>().join(with);
    let name = |failure: &FailedVolume| failure.volume.clone();
    let unprocessed = || failed.iter().filter(|failure| failure.is_unprocessed());
    // What is wrong with claims ends the wait for the others.
    let cause = match unprocessed().next() {
        None => failed.first().map(|failure| failure.error.to_string()).unwrap_or_default(),
        Some(_) => in_order(unprocessed().map(|failure| failure.error.to_string()).collect(), "; "),
    };
    let all = in_order(failed.iter().map(name).collect(), " ");
    let unattached = in_order(failed.iter().filter(|failure| failure.is_unattached()).map(name).collect(), " ");
    let unprocessed = in_order(unprocessed().map(name).collect(), " ");
    format!(
        "unmounted volumes=[{all}], unattached volumes=[{unattached}], failed to process volumes=[{unprocessed}]: {cause}"
    )
}

/// The texts of several errors, for one log line or event.
pub fn joined(errors: &[PodError]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::volumes::ClaimError;
    use crate::volumes::ClaimProblem;
    use crate::volumes::Step;

    fn unknown(container: &str) -> PodError {
        PodError::KillContainer {
            container: container.to_owned(),
            source: Cause::NoTargetContainer("\"x\"".to_owned()),
        }
    }

    #[test]
    fn an_action_of_the_sync_result() {
        let text = unknown("c").to_string();
        let expected =
            r#"failed to "KillContainer" for "c" with KillContainerError: "unable to find target container \"x\"""#;
        assert_eq!(text, expected);
    }

    #[test]
    fn several_errors_of_one_pod() {
        let [a, b] = ["a", "b"].map(|container| unknown(container).to_string());
        let table = [(vec!["a"], a.clone()), (vec!["a", "a"], a.clone()), (vec!["b", "a", "b"], format!("[{b}, {a}]"))];
        for (containers, expected) in table {
            let failed = containers.into_iter().map(unknown).collect();
            assert_eq!(PodError::KillPod { failed }.to_string(), format!("error killing pod: {expected}"));
        }
    }

    #[test]
    fn claims_that_cannot_be_used_are_volumes_that_cannot_be_processed() {
        let claim = |volume: &str, claim: &str, problem| FailedVolume {
            volume: volume.to_owned(),
            error: ClaimError { namespace: "ns".to_owned(), claim: claim.to_owned(), problem }.into(),
        };
        let other = FailedVolume { volume: "o".to_owned(), error: VolumeError::NodeUnknown };
        let failed = vec![
            other,
            claim("vol3", "c-b", ClaimProblem::Deleted),
            claim("vol2", "c-a", ClaimProblem::NotBound),
            claim("vol03", "c-b", ClaimProblem::Deleted),
        ];
        let expected = "unmounted volumes=[o vol03 vol2 vol3], unattached volumes=[], failed to process volumes=[vol03 vol2 \
                        vol3]: error processing PVC ns/c-a: PVC is not bound; error processing PVC ns/c-b: PVC is being \
                        deleted";
        assert_eq!(unmounted(&failed), expected);
        let failed = vec![FailedVolume { volume: "o".to_owned(), error: VolumeError::NodeUnknown }];
        let expected = "unmounted volumes=[o], unattached volumes=[], failed to process volumes=[]: the Node object was not \
                        received yet";
        assert_eq!(unmounted(&failed), expected);
    }

    #[test]
    fn volumes_that_are_not_attached_are_named() {
        let (name, waited, lack) = ("kubernetes.io/iscsi/d".to_owned(), Duration::from_secs(123), "it is not there");
        let source = Box::new(VolumeError::NotAttached { name, waited, lack });
        let error = VolumeError::Step { name: "pv".to_owned(), step: Step::Mount("WaitForAttach"), source };
        let failed = [FailedVolume { volume: "v".to_owned(), error }];
        let expected = "unmounted volumes=[v], unattached volumes=[v], failed to process volumes=[]: volume \
                        kubernetes.io/iscsi/d was not attached to this node within 123s: it is not there";
        assert_eq!(unmounted(&failed), expected);
    }

    #[test]
    fn the_end_of_a_back_off_is_kept_for_the_status() {
        let until = SystemTime::UNIX_EPOCH;
        let [container, pod, back_off] = ["c", "pod_ns(uid)", "back-off 10s"].map(str::to_owned);
        let error = PodError::CrashLoopBackOff { container, pod, back_off, until };
        let failure = StartFailure::from(&error);
        assert_eq!((failure.token.as_str(), failure.retry_at), ("CrashLoopBackOff", Some(until)));
        let event = error.event().expect("an event");
        assert_eq!(event.message, "Back-off restarting failed container c in pod pod_ns(uid)");
    }
}
