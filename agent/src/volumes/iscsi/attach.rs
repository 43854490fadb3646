//! Makes the device of a disk appear on the node: logs in to its target at each portal and waits for udev.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use tokio::time::Instant;

use super::chap::Chap;
use super::commands;
use super::commands::Failure;
use super::commands::Interface;
use super::commands::Step;
use super::disk::DiskRecord;
use super::host::Session;
use crate::host_program;
use crate::host_program::Programs;
use crate::volumes::VolumeError;
use crate::volumes::disks::Host;
use crate::volumes::global_mounts::Locks;
use crate::volumes::plugin::blocking;

/// Rounds over the portals: a second one for those that failed while others did not.
const ROUNDS: usize = 2;
/// How long the device of a portal is waited for, and the map of several portals.
const DEVICE_TIMEOUT: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(100);

/// A disk that is about to be attached.
#[derive(Debug)]
pub(super) struct Attaching<'a> {
    pub(super) programs: &'a dyn Programs,
    pub(super) host: &'a Host,
    /// One lock for each target: serialises logins and logouts.
    pub(super) targets: &'a Locks,
    pub(super) record: &'a DiskRecord,
    pub(super) chap: &'a Chap,
}

/// The interface that a volume names.
///
/// # Errors
/// There is none, or iscsiadm(8) is missing.
pub(super) async fn interface(programs: &dyn Programs, record: &DiskRecord) -> Result<Interface, VolumeError> {
    let shown = commands::show_interface(&record.base_interface);
    let found = Interface::parse(&host_program::succeed(programs, &shown).await?);
    if found.transport().is_none() {
        return Err(shown.failed("the interface has no transport").into());
    }
    Ok(found)
}

impl Attaching<'_> {
    /// Logs in where no session is, and returns the device: that of all portals if multipathd makes one, or of the first
    /// portal that has one. `base` is the interface that the volume names.
    ///
    /// # Errors
    /// No portal leads to the disk: what happened at each.
    pub(super) async fn run(&self, base: &Interface) -> Result<PathBuf, VolumeError> {
        let _alone = self.targets.lock(&self.record.target).await;
        if self.record.owns_interface() {
            perform(self.programs, &commands::make_interface(self.record, base)).await?;
        }
        let devices = self.devices(base.transport().unwrap_or_default()).await?;
        let multipath = self.multipath(devices.values().cloned().collect()).await?;
        // In the order of the volume's portals.
        let first = self.record.portals.iter().find_map(|portal| devices.get(portal).cloned());
        multipath.or(first).ok_or_else(|| self.no_path(BTreeMap::new()))
    }

    /// Devices by portal, at least one.
    async fn devices(&self, transport: &str) -> Result<BTreeMap<String, PathBuf>, VolumeError> {
        let (mut found, mut failed) = (BTreeMap::new(), BTreeMap::new());
        for _ in 0..ROUNDS {
            for portal in &self.record.portals {
                if found.contains_key(portal) {
                    continue;
                }
                match self.device(portal, transport).await {
                    Ok(device) => _ = found.insert(portal.clone(), device),
                    Err(error) => _ = failed.insert(portal.clone(), error),
                }
            }
            if found.is_empty() || found.len() == self.record.portals.len() {
                break;
            }
        }
        failed.retain(|portal, _| !found.contains_key(portal));
        if found.is_empty() {
            if self.record.owns_interface() {
                // Of no use without a session; the next attempt makes it again.
                let _ = self.programs.run(&commands::remove_interface(self.record)).await;
            }
            return Err(self.no_path(failed));
        }
        for (portal, error) in &failed {
            tracing::warn!(portal, target = self.record.target, %error, "a portal does not lead to the disk; others do");
        }
        Ok(found)
    }

    fn no_path(&self, failed: BTreeMap<String, VolumeError>) -> VolumeError {
        let problems = failed.into_values().map(|error| error.to_string()).collect();
        let lun = self.record.unit().unwrap_or_default();
        VolumeError::NoPath { target: self.record.target.clone(), lun, problems }
    }

    /// The device of one portal.
    async fn device(&self, portal: &str, transport: &str) -> Result<PathBuf, VolumeError> {
        let lacks = |problem: &str| VolumeError::Portal { portal: portal.to_owned(), problem: problem.to_owned() };
        let session = match self.session(portal).await? {
            Some(session) => session,
            None => {
                perform(self.programs, &commands::log_in(self.record, portal, self.chap)).await?;
                self.session(portal).await?.ok_or_else(|| lacks("there is no session after the login"))?
            }
        };
        let (host, lun, number) = (self.host.clone(), self.record.unit()?, session.host);
        blocking(move || host.scan(number, lun)).await?;
        let deadline = Instant::now() + DEVICE_TIMEOUT;
        loop {
            let (host, target) = (self.host.clone(), self.record.target.clone());
            let (of, by) = (portal.to_owned(), transport.to_owned());
            if let Some(device) = blocking(move || Ok(host.device(&by, &of, &target, lun))).await? {
                return Ok(device);
            }
            if Instant::now() >= deadline {
                let seconds = DEVICE_TIMEOUT.as_secs();
                return Err(lacks(&format!("no device of unit {lun} in /dev/disk/by-path within {seconds} s")));
            }
            tokio::time::sleep(POLL).await;
        }
    }

    async fn session(&self, portal: &str) -> Result<Option<Session>, VolumeError> {
        let (host, target, portal) = (self.host.clone(), self.record.target.clone(), portal.to_owned());
        blocking(move || Ok(host.sessions(&target).into_iter().find(|session| session.has(&portal)))).await
    }

    /// The map of several paths to the disk. It is waited for if the volume has several portals.
    async fn multipath(&self, devices: Vec<PathBuf>) -> Result<Option<PathBuf>, VolumeError> {
        let timeout = if self.record.portals.len() > 1 { DEVICE_TIMEOUT } else { Duration::ZERO };
        let deadline = Instant::now() + timeout;
        loop {
            let (host, devices) = (self.host.clone(), devices.clone());
            let found = blocking(move || Ok(devices.iter().find_map(|device| host.multipath(device)))).await?;
            if found.is_some() || Instant::now() >= deadline {
                return Ok(found);
            }
            tokio::time::sleep(POLL).await;
        }
    }
}

/// Makes the calls in order, until one fails that must not.
///
/// # Errors
/// That one.
pub(super) async fn perform(programs: &dyn Programs, steps: &[Step]) -> Result<(), VolumeError> {
    for step in steps {
        let error = match programs.run(&step.call).await {
            Ok(ended) if step.is_done(&ended) => continue,
            Ok(ended) => step.call.failed(ended.describe(&step.call)),
            Err(error) => error,
        };
        match &step.failure {
            Failure::Ignored => tracing::debug!(%error, "a step is not needed"),
            Failure::Final => return Err(error.into()),
            Failure::Undone(undo) => {
                let _ = programs.run(undo).await;
                return Err(error.into());
            }
        }
    }
    Ok(())
}
