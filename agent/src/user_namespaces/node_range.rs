//! Which of the node's ids pods get: what `getsubids` prints for the user `kubelet`, or, without that user or program, all
//! ids above those of the node itself.

use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use nix::errno::Errno;
use nix::unistd::User;
use tokio::process::Command;

use super::Mapping;
use super::StartError;

/// The user whose subordinate ids are the pods'.
const USER: &str = "kubelet";
const PROGRAM: &str = "getsubids";
/// The node's file of users, which a minimal image lacks.
const USERS: &str = "/etc/passwd";
/// A directory service that does not answer must not keep the agent from reporting why it does not start.
const TIMEOUT: Duration = Duration::from_secs(30);
/// What `idsPerPod` must be a multiple of, as the ranges that runtimes map.
const UNIT: u64 = 65_536;
/// One more than the highest id.
const ALL_IDS: u64 = 1 << 32;

/// The node's ids that pods can have, and how many each gets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IdRange {
    first: u32,
    per_pod: u32,
    slots: u32,
}

impl IdRange {
    /// `length` ids from `first` on, `per_pod` of them for each pod.
    ///
    /// # Errors
    /// The numbers do not fit together, or not enough ids for `max_pods`; in the kubelet's order.
    pub fn new(first: u64, length: u64, per_pod: u64, max_pods: i32) -> Result<Self, StartError> {
        let problem = if per_pod == 0 || !per_pod.is_multiple_of(UNIT) {
            format!("kubelet user namespace length {per_pod} is not a multiple of {UNIT}")
        } else if !first.is_multiple_of(per_pod) {
            format!("kubelet user assigned ID {first} is not a multiple of {per_pod}")
        } else if first < per_pod {
            format!("kubelet user assigned ID {first} must be greater or equal to {per_pod}")
        } else if !length.is_multiple_of(per_pod) {
            format!("kubelet user assigned IDs length {length} is not a multiple of {per_pod}")
        } else if i64::try_from(length / per_pod).is_ok_and(|slots| slots < i64::from(max_pods)) {
            format!("kubelet user assigned IDs are not enough to support {max_pods} pods")
        } else if first.checked_add(length).is_none_or(|end| end > ALL_IDS) {
            format!("kubelet user assigned IDs {first} and {length} more exceed the ids of the kernel")
        } else {
            let fits = |number: u64| u32::try_from(number).map_err(|_| StartError::Range(format!("{number} is no id")));
            return Ok(Self { first: fits(first)?, per_pod: fits(per_pod)?, slots: fits(length / per_pod)? });
        };
        Err(StartError::Range(problem))
    }

    /// How many ids a pod gets.
    pub(super) fn per_pod(&self) -> u32 {
        self.per_pod
    }

    /// How many slots can be given to pods. Not one with the last of all ids: that is no user (`(uid_t) -1`), and runtimes fail
    /// to make a user namespace with it.
    pub(super) fn usable_slots(&self) -> u32 {
        let end = u64::from(self.first) + u64::from(self.slots) * u64::from(self.per_pod);
        self.slots - u32::from(end == ALL_IDS)
    }

    /// The ids of a slot.
    pub(super) fn mapping(&self, slot: u32) -> Mapping {
        // The last id of the range is an id: see `new`.
        Mapping { first: self.first + slot * self.per_pod, length: self.per_pod }
    }

    /// The slot whose ids begin with `first`, which is a multiple of the ids per pod.
    pub(super) fn slot(&self, first: u32) -> Option<u32> {
        let slot = first.checked_sub(self.first)? / self.per_pod;
        Some(slot).filter(|slot| *slot < self.slots)
    }
}

/// The ids of this node for pods that get `per_pod` each. Runs `getsubids`, if installed, if there is a user `kubelet`.
///
/// # Errors
/// The user cannot be looked up; `getsubids` fails, does not end within 30 s or prints something else than one range for
/// users and groups; the range is of no use.
pub async fn node_range(per_pod: i64, max_pods: i32) -> Result<IdRange, StartError> {
    let per_pod = u64::try_from(per_pod).unwrap_or_default();
    // The look-up may query a directory service.
    let user = tokio::task::spawn_blocking(|| exists(User::from_name(USER), Path::new(USERS))).await;
    let user = user.map_err(|error| StartError::Mappings(error.to_string()))?;
    let configured = match user.map_err(StartError::Mappings)? {
        false => None,
        true => subordinate_ids(PROGRAM).await.map_err(StartError::Mappings)?,
    };
    let (first, length) = configured.unwrap_or((per_pod, ALL_IDS.saturating_sub(per_pod)));
    IdRange::new(first, length, per_pod, max_pods)
}

/// True if the look-up has found the user. Without a file of users it fails: there is none then. A directory service that is
/// not reachable may fail so, too, where there is a file.
pub(super) fn exists(found: nix::Result<Option<User>>, users: &Path) -> Result<bool, String> {
    match found {
        Ok(user) => Ok(user.is_some()),
        Err(Errno::ENOENT) if !users.exists() => Ok(false),
        Err(error) => Err(format!("user: lookup {USER}: {error}")),
    }
}

/// First id and number of the user's ids, by this program; `None` if it is not installed. Upstream means pods to have the
/// default range then, but the kubelets 1.36 and 1.37 do not start.
pub(super) async fn subordinate_ids(program: &str) -> Result<Option<(u64, u64)>, String> {
    let users = match run(program, &[USER]).await {
        Ok(users) => users,
        Err(Failure::Missing) => {
            tracing::warn!(user = USER, program, "not installed: pods get ids of the default range");
            return Ok(None);
        }
        Err(Failure::Failed(cause)) => {
            return Err(format!("error retrieving additional uids for user {USER:?}: {cause}"));
        }
    };
    let groups = run(program, &["-g", USER]).await;
    let groups = groups.map_err(|_| format!("error retrieving additional gids for user {USER:?}"))?;
    if users != groups {
        return Err(format!("mismatched subuids and subgids for user {USER:?}"));
    }
    parse(&String::from_utf8_lossy(&users)).map(Some)
}

enum Failure {
    Missing,
    Failed(String),
}

async fn run(program: &str, arguments: &[&str]) -> Result<Vec<u8>, Failure> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(TIMEOUT, command.output()).await;
    let output = output.map_err(|_| Failure::Failed(format!("{PROGRAM} did not end within {TIMEOUT:?}")))?;
    match output {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(Failure::Missing),
        Err(error) => Err(Failure::Failed(error.to_string())),
        Ok(output) if output.status.success() => Ok(output.stdout),
        Ok(output) => Err(Failure::Failed(match output.status.code() {
            Some(code) => format!("exit status {code}"),
            None => output.status.to_string(),
        })),
    }
}

/// Reads `0: kubelet <first> <length>`.
pub(super) fn parse(output: &str) -> Result<(u64, u64), String> {
    let line = output.trim_matches('\n');
    if line.contains('\n') {
        return Err(format!("error parsing line {output:?}: it must contain only one line"));
    }
    let fields: Vec<&str> = line.split_whitespace().collect();
    let [_, _, first, length] = fields[..] else { return Err(format!("invalid line {output:?}")) };
    let number = |text: &str| {
        text.parse::<u32>().map(u64::from).map_err(|error| format!("error parsing line {output:?}: {text:?}: {error}"))
    };
    Ok((number(first)?, number(length)?))
}
