//! Slices over systemd's D-Bus interface: start, properties, stop.
//!
//! `cgroups-rs` does not fit here: its `SystemdManager` starts a unit only together with a process (a slice takes none),
//! opens a blocking connection for each call, does not wait for the job, and sends `Wants` as a string.

use std::path::Path;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream;
use tokio::sync::Mutex;
use zbus::Connection;
use zbus::Message;
use zbus::MessageStream;
use zbus::OwnedObjectPath;
use zbus::Variant;
use zbus::message::Type;

use super::CgroupError;
use super::CgroupValues;
use super::arithmetic;
use super::systemd_socket;

const SERVICE: &str = "org.freedesktop.systemd1";
const OBJECT: &str = "/org/freedesktop/systemd1";
const MANAGER: &str = "org.freedesktop.systemd1.Manager";
/// The bus itself, which reports the owners of names.
const BUS: &str = "org.freedesktop.DBus";
/// systemd's own socket.
const SOCKET: &str = "/run/systemd/private";
/// How long a job or another call of systemd may take.
const JOB_LIMIT: Duration = Duration::from_secs(30);

/// Properties of systemd 242 and 244, whose values only the kernel has with older versions.
const NEWER: [&str; 2] = ["CPUQuotaPeriodUSec", "AllowedCPUs"];

type Property<'a> = (&'static str, Variant<'a>);

/// Opens a connection.
pub(super) type Open = fn() -> BoxFuture<'static, zbus::Result<Connection>>;

/// The connection to systemd, opened on first use, and again when it has ended, as after a restart of the bus, or after a
/// transport error.
#[derive(Debug)]
pub(super) struct Systemd {
    connection: Mutex<Option<Connection>>,
    open: Open,
}

fn open() -> BoxFuture<'static, zbus::Result<Connection>> {
    Box::pin(async { or_socket(Connection::system().await, Path::new(SOCKET)).await })
}

/// The system bus; without one, systemd's own socket, which takes the same calls and sends its signals to every client.
///
/// # Errors
/// That of the bus if neither accepts the connection.
pub(super) async fn or_socket(bus: zbus::Result<Connection>, socket: &Path) -> zbus::Result<Connection> {
    match bus {
        Err(error) => systemd_socket::connect(socket).await.map_err(|_| error),
        bus => bus,
    }
}

impl Systemd {
    /// Checks that systemd runs; connects on first use.
    pub(super) fn new() -> Result<Self, CgroupError> {
        if !Path::new("/run/systemd/system").is_dir() {
            return Err(CgroupError::NoSystemd);
        }
        Ok(Self { connection: Mutex::default(), open })
    }

    /// Uses a connection that exists already.
    #[cfg(test)]
    pub(super) fn over(connection: Connection) -> Self {
        Self { connection: Mutex::new(Some(connection)), open }
    }

    /// Opens further connections with `open`.
    #[cfg(test)]
    pub(super) fn opened_by(self, open: Open) -> Self {
        Self { open, ..self }
    }

    /// Starts a slice; one that is already active is not an error.
    pub(super) async fn start(&self, unit: &str, parent: Option<&str>, is_v2: bool) -> Result<(), CgroupError> {
        let mut properties: Vec<Property<'_>> = vec![("Description", format!("libcontainer container {unit}").into())];
        if let Some(parent) = parent {
            properties.push(("Wants", vec![parent.to_owned()].into()));
        }
        for name in ["MemoryAccounting", "CPUAccounting", "TasksAccounting"] {
            properties.push((name, true.into()));
        }
        properties.push((if is_v2 { "IOAccounting" } else { "BlockIOAccounting" }, true.into()));
        properties.push(("DefaultDependencies", false.into()));
        let auxiliary: Vec<(String, Vec<Property<'_>>)> = Vec::new();
        let body = (unit, "replace", properties, auxiliary);
        match self.job("start", unit, "StartTransientUnit", &body).await {
            Err(Failure::Exists) => Ok(()),
            result => result.map_err(|failure| failure.on("start", unit)),
        }
    }

    /// Sets the properties that systemd would otherwise reset when it reloads the unit.
    pub(super) async fn set(&self, unit: &str, values: &CgroupValues, is_v2: bool) -> Result<(), CgroupError> {
        let properties = properties_of(values, is_v2);
        if properties.is_empty() {
            return Ok(());
        }
        let mut set = within_limit(self.call("SetUnitProperties", &(unit, true, &properties))).await;
        if matches!(set, Err(Failure::Unknown(_))) {
            let old: Vec<_> = properties.iter().filter(|(name, _)| !NEWER.contains(name)).collect();
            set = within_limit(self.call("SetUnitProperties", &(unit, true, old))).await;
        }
        self.keep_if_alive(set).await.map_err(|failure| failure.on("set properties of", unit))
    }

    /// Stops a slice and resets its failed state; one that does not exist is not an error.
    pub(super) async fn stop(&self, unit: &str) -> Result<(), CgroupError> {
        match self.job("stop", unit, "StopUnit", &(unit, "replace")).await {
            Ok(()) | Err(Failure::Missing) => {}
            Err(failure) => return Err(failure.on("stop", unit)),
        }
        // Fails for a unit that is not in the failed state.
        let _ = within_limit(self.call("ResetFailedUnit", &(unit,))).await;
        Ok(())
    }

    /// Calls a method that returns nothing.
    async fn call<B>(&self, method: &'static str, body: &B) -> Result<(), Failure>
    where
        B: serde::Serialize + zbus::wire::DynamicType,
    {
        let connection = self.connection().await?;
        call(&connection, method, body).await.map(drop)
    }

    async fn connection(&self) -> Result<Connection, Failure> {
        let mut slot = self.connection.lock().await;
        if let Some(connection) = slot.as_ref().filter(|connection| !connection.is_closed()) {
            return Ok(connection.clone());
        }
        let connection = (self.open)().await?;
        // Without it systemd sends no signals over the bus.
        call(&connection, "Subscribe", &()).await?;
        Ok(slot.insert(connection).clone())
    }

    /// Drops the connection after a transport error.
    async fn keep_if_alive<T>(&self, result: Result<T, Failure>) -> Result<T, Failure> {
        if matches!(result, Err(Failure::Transport(_))) {
            self.connection.lock().await.take();
        }
        result
    }

    /// Calls a method that returns a job, and waits until the job is removed. Calls it again if systemd was executed again
    /// meanwhile (`daemon-reexec`): the unit then is as it was to become, or gets another job.
    async fn job<B>(&self, verb: &'static str, unit: &str, method: &'static str, body: &B) -> Result<(), Failure>
    where
        B: serde::Serialize + zbus::wire::DynamicType,
    {
        tracing::debug!(unit, verb, "calling systemd");
        let result = within_limit(async {
            match self.run_job(method, body).await {
                Err(Failure::Replaced) => {
                    // It may have forgotten that this connection gets its signals.
                    self.connection.lock().await.take();
                    self.run_job(method, body).await
                }
                result => result,
            }
        });
        self.keep_if_alive(result.await).await
    }

    async fn run_job<B>(&self, method: &'static str, body: &B) -> Result<(), Failure>
    where
        B: serde::Serialize + zbus::wire::DynamicType,
    {
        let connection = self.connection().await?;
        let rule = zbus::MatchRule::builder().msg_type(Type::Signal).sender(SERVICE).interface(MANAGER);
        let rule = rule.member("JobRemoved").build()?;
        let mut removed = MessageStream::for_match_rule(rule, &connection, None).await?;
        let rule = zbus::MatchRule::builder().msg_type(Type::Signal).sender(BUS).interface(BUS);
        let rule = rule.member("NameOwnerChanged").arg(0, SERVICE).build()?;
        let mut owners = MessageStream::for_match_rule(rule, &connection, None).await?;
        let mut asked = std::pin::pin!(call(&connection, method, body));
        // The answer may be behind more signals than their queue takes, and a full queue keeps the connection from being
        // read: signals are taken from it also before it is known which job is waited for.
        let mut ended = Vec::new();
        let answer = loop {
            tokio::select! {
                answer = &mut asked => break answer?,
                Some(signal) = removed.next() => ended.push(signal?),
            }
        };
        let job: OwnedObjectPath = answer.body().deserialize()?;
        let mut signals = stream::iter(ended.into_iter().map(Ok)).chain(removed);
        loop {
            tokio::select! {
                biased;
                signal = signals.next() => {
                    let Some(signal) = signal else { return Err(Failure::Job("connection closed".to_owned())) };
                    match outcome_of(&job, &answer, &signal?)? {
                        Some(outcome) if outcome == "done" => return Ok(()),
                        Some(outcome) => return Err(Failure::Job(outcome)),
                        None => {}
                    }
                }
                // The end of the job is signalled with the new name, if at all.
                Some(changed) = owners.next() => {
                    if has_owner(&changed?) {
                        return Err(Failure::Replaced);
                    }
                }
            }
        }
    }
}

/// Whether the name of a signal NameOwnerChanged has an owner now.
fn has_owner(signal: &Message) -> bool {
    let change: zbus::Result<(String, String, String)> = signal.body().deserialize();
    change.is_ok_and(|(_, _, owner)| !owner.is_empty())
}

/// How `job` has ended, if the signal JobRemoved reports that. Any user of the bus can send a signal of this name: that of
/// the sender of `answer` counts. On systemd's own socket all messages have the same one.
fn outcome_of(job: &OwnedObjectPath, answer: &Message, signal: &Message) -> Result<Option<String>, Failure> {
    if signal.header().sender() != answer.header().sender() {
        return Ok(None);
    }
    let (_, removed, _, outcome): (u32, OwnedObjectPath, String, String) = signal.body().deserialize()?;
    Ok((removed == *job).then_some(outcome))
}

/// Fails a call that systemd does not answer within [`JOB_LIMIT`].
async fn within_limit<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    tokio::time::timeout(JOB_LIMIT, work).await.unwrap_or(Err(Failure::Timeout))
}

async fn call<B>(connection: &Connection, method: &'static str, body: &B) -> Result<Message, Failure>
where
    B: serde::Serialize + zbus::wire::DynamicType,
{
    Ok(connection.call_method(Some(SERVICE), OBJECT, Some(MANAGER), method, body).await?)
}

/// Errors of systemd or of the bus.
enum Failure {
    Exists,
    Missing,
    Timeout,
    Job(String),
    /// systemd was executed again.
    Replaced,
    /// A property is not known to this version, and none was set.
    Unknown(String),
    Refused(String),
    Transport(String),
}

impl From<zbus::Error> for Failure {
    fn from(error: zbus::Error) -> Self {
        match &error {
            zbus::Error::MethodError(name, _, _) => match name.as_str() {
                "org.freedesktop.systemd1.UnitExists" => Self::Exists,
                "org.freedesktop.systemd1.NoSuchUnit" => Self::Missing,
                _ => Self::Refused(error.to_string()),
            },
            zbus::Error::FDO(refused) if matches!(**refused, zbus::fdo::Error::PropertyReadOnly(_)) => {
                Self::Unknown(error.to_string())
            }
            _ => Self::Transport(error.to_string()),
        }
    }
}

impl Failure {
    fn on(self, verb: &'static str, unit: &str) -> CgroupError {
        let detail = match self {
            Self::Exists => "it exists already".to_owned(),
            Self::Missing => "there is no such unit".to_owned(),
            Self::Timeout => format!("no answer within {} s", JOB_LIMIT.as_secs()),
            Self::Job(outcome) => format!("its job ended as {outcome:?}"),
            Self::Replaced => "systemd was executed again".to_owned(),
            Self::Unknown(detail) | Self::Refused(detail) | Self::Transport(detail) => detail,
        };
        CgroupError::Systemd { verb, unit: unit.to_owned(), detail }
    }
}

fn properties_of(values: &CgroupValues, is_v2: bool) -> Vec<Property<'static>> {
    let mut properties: Vec<Property<'static>> = Vec::new();
    if let Some(bytes) = values.memory_max.filter(|bytes| *bytes > 0) {
        properties.push((if is_v2 { "MemoryMax" } else { "MemoryLimit" }, bytes.into()));
    }
    if values.cpu_shares > 0 {
        properties.push(if is_v2 {
            ("CPUWeight", arithmetic::weight(values.cpu_shares).into())
        } else {
            ("CPUShares", values.cpu_shares.into())
        });
    }
    if let Some((quota, period)) = values.cpu_max.filter(|(quota, _)| *quota != 0) {
        properties.push(("CPUQuotaPeriodUSec", period.into()));
        properties.push(("CPUQuotaPerSecUSec", arithmetic::systemd_quota_per_second(quota, period).into()));
    }
    if let Some(limit) = values.pids {
        let tasks = u64::try_from(limit).map_or(u64::MAX, |limit| limit.max(1));
        properties.push(("TasksMax", tasks.into()));
    }
    if is_v2 {
        let memory =
            [("MemoryMin", values.memory_min), ("MemoryLow", values.memory_low), ("MemoryHigh", values.memory_high)];
        properties.extend(memory.into_iter().filter_map(|(name, bytes)| Some((name, bytes?.into()))));
        // Without it systemd disables the cpuset controller, which it then has no use for.
        let mask = values.cpus.as_deref().and_then(arithmetic::cpu_mask);
        properties.extend(mask.map(|mask| ("AllowedCPUs", mask.into())));
    }
    properties
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn properties_that_only_v2_has() {
        let values = CgroupValues {
            memory_max: Some(2),
            memory_min: Some(1),
            memory_low: Some(0),
            memory_high: Some(2),
            cpus: Some("0-1".to_owned()),
            ..CgroupValues::default()
        };
        let names = |is_v2| properties_of(&values, is_v2).into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        assert_eq!(names(true), ["MemoryMax", "MemoryMin", "MemoryLow", "MemoryHigh", "AllowedCPUs"]);
        assert_eq!(names(false), ["MemoryLimit"]);
    }
}
