//! Options of the simulated runtime: its speed, the features of its version, its seed.

use std::time::Duration;
use std::time::SystemTime;

use keblet_proto::cri::v1::CgroupDriver;

use super::events::Delivery;

/// Durations of calls and reports. The defaults were measured with containerd 1.7.24 and runc on two cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timings {
    /// RunPodSandbox.
    pub run_sandbox: Duration,
    /// StopPodSandbox, without stopping its containers.
    pub stop_sandbox: Duration,
    /// RemovePodSandbox, without removing its containers.
    pub remove_sandbox: Duration,
    /// CreateContainer.
    pub create: Duration,
    /// StartContainer.
    pub start: Duration,
    /// Part of StartContainer after which the process exists.
    pub start_to_process: Duration,
    /// From the stop request to the signal's delivery.
    pub kill: Duration,
    /// RemoveContainer.
    pub remove: Duration,
    /// From the exit of a container's init process to the runtime's report.
    pub exit_report: Duration,
    /// From a process's exit record to its pidfd being readable.
    pub to_gone: Duration,
    /// Any list.
    pub list: Duration,
    /// Any status.
    pub status: Duration,
    /// PullImage.
    pub pull: Duration,
    /// ExecSync, without the duration of the command.
    pub exec: Duration,
}

impl Timings {
    /// containerd 1.7.24 with runc.
    pub fn containerd() -> Self {
        let ms = Duration::from_millis;
        Self {
            run_sandbox: ms(80),
            stop_sandbox: ms(40),
            remove_sandbox: ms(15),
            create: ms(8),
            start: ms(55),
            start_to_process: ms(45),
            kill: ms(10),
            remove: ms(10),
            exit_report: ms(45),
            to_gone: Duration::from_micros(400),
            list: ms(2),
            status: ms(1),
            pull: ms(500),
            exec: ms(30),
        }
    }
}

/// Features that differ between runtimes and versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// GetContainerEvents.
    pub events: Delivery,
    /// RuntimeConfig; without it the call is unimplemented.
    pub runtime_config: bool,
    /// Stream* list calls; without it they are unimplemented.
    pub streaming_lists: bool,
    /// UpdatePodSandboxResources; without it the call is unimplemented.
    pub sandbox_resources: bool,
    /// PodSandboxStatus has a timestamp.
    pub status_timestamp: bool,
    /// PodSandboxStatus has the container statuses.
    pub status_containers: bool,
    /// Handlers report that they can make user namespaces.
    pub user_namespaces: bool,
}

impl Features {
    /// containerd 1.7.
    pub fn containerd_1_7() -> Self {
        Self {
            events: Delivery::Shared,
            runtime_config: false,
            streaming_lists: false,
            sandbox_resources: false,
            status_timestamp: false,
            status_containers: false,
            user_namespaces: false,
        }
    }

    /// A runtime with all features of the protocol.
    pub fn all() -> Self {
        Self {
            events: Delivery::PerReader,
            runtime_config: true,
            streaming_lists: true,
            sandbox_resources: true,
            status_timestamp: true,
            status_containers: true,
            user_namespaces: true,
        }
    }
}

/// Everything fixed at construction.
#[derive(Clone, Debug)]
pub struct Options {
    /// Seed of every random choice the simulation makes.
    pub seed: u64,
    /// Wall-clock time at construction.
    pub epoch: SystemTime,
    /// Speed.
    pub timings: Timings,
    /// Durations vary randomly by up to this share of themselves.
    pub jitter: f64,
    /// Features.
    pub features: Features,
    /// Result of Version.
    pub version: String,
    /// Result of RuntimeConfig, and format of cgroup paths.
    pub cgroup_driver: CgroupDriver,
    /// Runtime handlers beside the default one.
    pub handlers: Vec<String>,
}

impl Default for Options {
    /// containerd 1.7.24, seed 0, no jitter, a fixed date.
    fn default() -> Self {
        Self {
            seed: 0,
            epoch: SystemTime::UNIX_EPOCH + Duration::from_secs(1_767_225_600),
            timings: Timings::containerd(),
            jitter: 0.0,
            features: Features::containerd_1_7(),
            version: "1.7.24".to_owned(),
            cgroup_driver: CgroupDriver::Cgroupfs,
            handlers: vec!["runc".to_owned()],
        }
    }
}
