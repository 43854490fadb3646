//! Why no configuration can be made. The texts are what `CreateContainerConfigError` shows.

use crate::model::DownwardError;
use crate::model::RecursiveReadOnlyError;
use crate::model::qos::InvalidAmount;

/// A spec, file or setting that cannot be turned into a configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what each case is")]
pub enum GenerateError {
    #[error(transparent)]
    Quantity(#[from] InvalidAmount),
    #[error("{field} {value:?} is not a valid DNS name")]
    Hostname { field: &'static str, value: String },
    #[error(
        "failed to construct FQDN from pod hostname and cluster domain, FQDN {fqdn} is too long (64 characters is the max, {} characters requested)",
        fqdn.len()
    )]
    FqdnTooLong { fqdn: String },
    #[error("resolver file of the node: nameserver without an address in line {line}")]
    ResolvConf { line: usize },
    #[error("nil pod.spec.enableServiceLinks encountered, cannot construct envvars")]
    NoServiceLinks,
    #[error("missing value for {names}")]
    MissingValue { names: String },
    #[error(transparent)]
    Downward(#[from] DownwardError),
    #[error("{message}")]
    Object { message: String },
    #[error("couldn't parse env file")]
    EnvFile,
    #[error("environment variable key {key:?} not found in file {path:?}")]
    NoSuchFileKey { key: String, path: String },
    #[error("couldn't find key {key} in {kind} {namespace}/{name}")]
    NoSuchKey { key: String, kind: &'static str, namespace: String, name: String },
    #[error(
        "environment variable {name:?} cannot be given to a process: a name must not be empty or contain '=' or NUL, a value must not contain NUL"
    )]
    EnvText { name: String },
    #[error("environment variable {name:?} takes {size} bytes, more than the {limit} a process can be given")]
    EnvVariableSize { name: String, size: usize, limit: usize },
    #[error("the environment takes {size} bytes, more than the {limit} a process can be given")]
    EnvSize { size: usize, limit: usize },
    #[error("command and arguments take {size} bytes and more, a process can be given {limit}")]
    WordsSize { size: usize, limit: usize },
    #[error("{word:?} refers to a variable that is not valid UTF-8, which only environment variables can carry")]
    WordText { word: String },
    #[error("subPathExpr becomes {size} bytes long, a path can have {limit}")]
    SubPathSize { size: usize, limit: usize },
    #[error("the address of the node is not known, cannot resolve status.hostIP")]
    NoNodeIp,
    #[error("{problem} (pod: {pod:?}, container: {container})")]
    NonRoot { problem: String, pod: String, container: String },
    #[error("localhostProfile must be set if seccompProfile type is Localhost (container {container:?})")]
    SeccompPath { container: String },
    #[error(
        "localhostProfile {path:?} of container {container:?} must be a relative path below the seccomp directory, without \"..\""
    )]
    SeccompPathEscapes { container: String, path: String },
    #[error("unknown seccomp profile type: {kind:?}")]
    SeccompType { kind: String },
    #[error("unknown apparmor profile type: {kind:?}")]
    AppArmorType { kind: String },
    #[error("missing localhost apparmor profile name")]
    AppArmorName,
    #[error("unsupported supplementalGroupsPolicy: {policy}")]
    GroupsPolicy { policy: String },
    #[error("invalid MountPropagation mode: {mode:?}")]
    MountPropagation { mode: String },
    #[error("failed to resolve recursive read-only mode: {0}")]
    RecursiveReadOnly(#[from] RecursiveReadOnlyError),
}
