//! logind over D-Bus: the inhibitor lock that delays a shutdown, and the signal `PrepareForShutdown`.

use std::fs;
use std::os::fd;
use std::path::PathBuf;
use std::time::Duration;

use futures_util::Stream;
use futures_util::StreamExt as _;
use zbus::Connection;
use zbus::OwnedFd;
use zbus::OwnedVariant;
use zbus::Proxy;

use crate::filesystem;
use crate::model::Backoff;

const SERVICE: &str = "org.freedesktop.login1";
const OBJECT: &str = "/org/freedesktop/login1";
const MANAGER: &str = "org.freedesktop.login1.Manager";
const DROP_IN: &str = "etc/systemd/logind.conf.d/99-kubelet.conf";
/// What is written before it is renamed: logind reads only names that end in `.conf`.
const PARTIAL: &str = ".99-kubelet.conf.partial";
/// Reads of the delay after logind was reloaded.
const CHECKS: u32 = 5;
const FIRST_PAUSE: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 100 });
const LONGEST_PAUSE: Duration = Duration::from_millis(800);
const SIGHUP: i32 = 1;

/// Errors of logind.
#[derive(Debug, thiserror::Error)]
pub enum LogindError {
    /// It is not available, or returned an error.
    #[error("{what}: {error}")]
    Bus {
        /// What was tried.
        what: &'static str,
        /// The bus's error.
        error: zbus::Error,
    },
    /// Its configuration was not written.
    #[error("cannot write {}: {error}", file.display())]
    DropIn {
        /// The file.
        file: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// Its maximum delay is too short.
    #[error(
        "node shutdown manager was timed out waiting for logind InhibitDelayMaxSec to update to {needed:?} \
         (ShutdownGracePeriod), current value is {is:?}"
    )]
    TooShort {
        /// The configured grace period.
        needed: Duration,
        /// logind's maximum delay.
        is: Duration,
    },
}

/// Delays a shutdown until it is dropped, up to logind's limit.
#[derive(Debug)]
pub struct DelayLock {
    _descriptor: fd::OwnedFd,
}

/// The connection to logind.
#[derive(Clone, Debug)]
pub struct Logind {
    connection: Connection,
    root: PathBuf,
}

impl Logind {
    /// Connects to the system bus.
    ///
    /// # Errors
    /// The bus is not available.
    pub async fn connect() -> Result<Self, LogindError> {
        let connection = Connection::system().await.map_err(during("connecting to the system bus"))?;
        Ok(Self { connection, root: PathBuf::from("/") })
    }

    /// Over a connection that exists already; files are below `root`.
    #[cfg(test)]
    pub(super) fn over(connection: Connection, root: PathBuf) -> Self {
        Self { connection, root }
    }

    /// Makes logind delay shutdowns for `needed`, by a configuration file if its present limit is shorter.
    ///
    /// # Errors
    /// logind is not available, its configuration was not written, or its delay stays too short.
    pub async fn allow_delay(&self, needed: Duration) -> Result<(), LogindError> {
        if self.max_delay().await? >= needed {
            return Ok(());
        }
        self.configure(needed).await?;
        self.reload().await?;
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        for _ in 1..CHECKS {
            if self.max_delay().await? >= needed {
                return Ok(());
            }
            tokio::time::sleep(backoff.failed(0.0)).await;
        }
        match self.max_delay().await? {
            is if is >= needed => Ok(()),
            is => Err(LogindError::TooShort { needed, is }),
        }
    }

    async fn max_delay(&self) -> Result<Duration, LogindError> {
        let what = "reading InhibitDelayMaxUSec";
        let value = self.property("InhibitDelayMaxUSec", what).await?;
        let micros = u64::try_from(value).map_err(during(what))?;
        Ok(Duration::from_micros(micros))
    }

    async fn property(&self, name: &str, what: &'static str) -> Result<OwnedVariant, LogindError> {
        let (properties, arguments) = (Some("org.freedesktop.DBus.Properties"), (MANAGER, name));
        let called = self.connection.call_method(Some(SERVICE), OBJECT, properties, "Get", &arguments).await;
        called.map_err(during(what))?.body().deserialize().map_err(during(what))
    }

    /// A shutdown has begun and was not cancelled.
    ///
    /// # Errors
    /// logind returned an error.
    pub async fn is_shutting_down(&self) -> Result<bool, LogindError> {
        let what = "reading PreparingForShutdown";
        bool::try_from(self.property("PreparingForShutdown", what).await?).map_err(during(what))
    }

    async fn configure(&self, needed: Duration) -> Result<(), LogindError> {
        use std::os::unix::fs::PermissionsExt as _;
        let file = self.root.join(DROP_IN);
        let text = format!(
            "# Written by the node agent: its shutdownGracePeriod needs this delay.\n[Login]\nInhibitDelayMaxSec={}\n",
            needed.as_secs()
        );
        let path = file.clone();
        let write = move || {
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder)?;
            }
            // On a full disk the earlier delay stays.
            filesystem::replace(&path, PARTIAL, text.as_bytes(), 0o644)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o644))
        };
        filesystem::blocking(write).await.map_err(|error| LogindError::DropIn { file, error })
    }

    /// Reloads logind through systemd.
    async fn reload(&self) -> Result<(), LogindError> {
        let (service, object) = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1");
        let manager = Some("org.freedesktop.systemd1.Manager");
        let arguments = ("systemd-logind.service", "all", SIGHUP);
        let called = self.connection.call_method(Some(service), object, manager, "KillUnit", &arguments).await;
        called.map(drop).map_err(during("reloading systemd-logind"))
    }

    /// Takes the inhibitor lock.
    ///
    /// # Errors
    /// logind returned an error.
    pub async fn inhibit(&self) -> Result<DelayLock, LogindError> {
        let what = "inhibiting shutdowns";
        let arguments = ("shutdown", "kubelet", "Kubelet needs time to handle node shutdown", "delay");
        let called = self.connection.call_method(Some(SERVICE), OBJECT, Some(MANAGER), "Inhibit", &arguments).await;
        let answer = called.map_err(during(what))?;
        let descriptor: OwnedFd = answer.body().deserialize().map_err(during(what))?;
        Ok(DelayLock { _descriptor: descriptor.into() })
    }

    /// True when a shutdown begins, false when it is cancelled. Ends with the connection.
    ///
    /// # Errors
    /// The signal cannot be subscribed.
    pub async fn shutdowns(&self) -> Result<impl Stream<Item = bool> + use<>, LogindError> {
        let what = "listening for PrepareForShutdown";
        // Any user of the bus can send a signal of this name; a proxy takes those of the service's owner alone.
        let manager = Proxy::new(&self.connection, SERVICE, OBJECT, MANAGER).await.map_err(during(what))?;
        let signals = manager.receive_signal("PrepareForShutdown").await.map_err(during(what))?;
        Ok(signals.filter_map(async |signal| signal.body().deserialize::<bool>().ok()))
    }
}

fn during<E: Into<zbus::Error>>(what: &'static str) -> impl FnOnce(E) -> LogindError {
    move |error| LogindError::Bus { what, error: error.into() }
}
