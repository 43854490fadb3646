//! Loads the probe object and attaches each program. Blocking: milliseconds of system calls.

use std::io;

use aya::Ebpf;
use aya::EbpfError;
use aya::EbpfLoader;
use aya::Pod;
use aya::maps::MapData;
use aya::maps::MapError;
use aya::maps::RingBuf;
use aya::programs::Program;
use aya::programs::ProgramError;
use aya::programs::RawTracePoint;
use keblet_ebpf_common as common;
use keblet_ebpf_common::names;
use thiserror::Error;

use super::Options;
use super::ProbeStatus;
use super::offsets;
use super::offsets::Resolved;
use super::watch::Probes;
use crate::cgroups::HierarchyKind;
use crate::cgroups::arithmetic::page_size;
use crate::kernel::btf::Btf;
use crate::kernel::btf::BtfError;
use crate::kernel::facts::Capabilities;
use crate::kernel::proc;

/// The kernel side, built by `cargo xtask ebpf`.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("CARGO_MANIFEST_DIR"), "/../ebpf/prebuilt/probes.o"));

/// The probes were not loaded.
#[derive(Debug, Error)]
pub enum LoadError {
    /// The kernel's type information is missing or incomplete.
    #[error("{0}")]
    Btf(#[from] BtfError),
    /// The system call is not permitted.
    #[error("bpf() is refused ({source}): {why}")]
    Refused {
        /// The system's error.
        source: io::Error,
        /// What is missing, as far as known.
        why: String,
    },
    /// The agent runs in a PID namespace of its own: pids of probes would refer to other processes.
    #[error("the agent does not run in the host's PID namespace")]
    PidNamespace,
    /// The object does not load.
    #[error("cannot load the probes: {0}")]
    Object(String),
    /// The ring buffers cannot be polled.
    #[error("cannot wait for the ring buffers: {0}")]
    Register(io::Error),
    /// The loading thread ended early.
    #[error("loading was aborted: {0}")]
    Aborted(String),
}

/// Parts of a loaded object.
pub(super) struct Parts {
    pub(super) probes: Probes,
    pub(super) rings: Rings,
    pub(super) status: Vec<ProbeStatus>,
}

/// The two ring buffers.
pub(super) struct Rings {
    pub(super) exits: RingBuf<MapData>,
    pub(super) cgroups: RingBuf<MapData>,
}

/// A program and its hooks.
struct Spec {
    program: &'static str,
    hooks: &'static [&'static str],
    /// Why the kernel does not support it, if it does not.
    needs: fn(&Resolved) -> Option<String>,
}

const SPECS: [Spec; 6] = [
    Spec {
        program: "process_exit",
        hooks: &["sched_process_exit"],
        needs: |found| first([&found.task, &found.cgroup]),
    },
    Spec {
        program: "oom_victim",
        hooks: &["mark_victim"],
        needs: |found| first([&found.task, &found.cgroup, &found.oom]),
    },
    Spec { program: "cgroup_created", hooks: &["cgroup_mkdir"], needs: |found| first([&found.cgroup]) },
    Spec { program: "cgroup_removed", hooks: &["cgroup_rmdir"], needs: |found| first([&found.cgroup]) },
    Spec {
        program: "reclaim_begin",
        hooks: &["mm_vmscan_memcg_reclaim_begin", "mm_vmscan_direct_reclaim_begin"],
        needs: |found| first([&found.task, &found.cgroup]),
    },
    Spec {
        program: "reclaim_end",
        hooks: &["mm_vmscan_memcg_reclaim_end", "mm_vmscan_direct_reclaim_end"],
        needs: |found| first([&found.task, &found.cgroup]),
    },
];

fn first<const N: usize>(reasons: [&Option<String>; N]) -> Option<String> {
    reasons.into_iter().flatten().next().cloned()
}

/// Loads the object with globals for this kernel and attaches what can be attached.
pub(super) fn load(options: &Options) -> Result<Parts, LoadError> {
    if !proc::in_host_pid_namespace() {
        return Err(LoadError::PidNamespace);
    }
    try_bpf()?;
    let btf = Btf::read(&options.btf)?;
    let found = offsets::resolve(&btf);
    let config = Global(config(&btf, options, &found)?);
    drop(btf);

    let global_offsets = Global(found.offsets);
    let mut loader = EbpfLoader::new();
    loader.btf(None).override_global(names::CONFIG, &config, true).override_global(
        names::OFFSETS,
        &global_offsets,
        true,
    );
    if let Some(bytes) = options.exits_ring {
        loader.map_max_entries(names::EXITS, bytes);
    }
    let mut ebpf = loader.load(OBJECT).map_err(|error| object_error(&error))?;
    let status = SPECS.iter().map(|spec| attach_or_report(&mut ebpf, spec, &found)).collect();
    let rings = Rings { exits: ring(&mut ebpf, names::EXITS)?, cgroups: ring(&mut ebpf, names::CGROUPS)? };
    let probes = Probes::new(ebpf)?;
    Ok(Parts { probes, rings, status })
}

/// Creates a small map first, since the loader mistakes a missing permission for an old kernel.
fn try_bpf() -> Result<(), LoadError> {
    match super::super::facts::bpf_allowed() {
        Ok(()) => {
            let lacking = Capabilities::of_this_process().lacking_for_bpf();
            if lacking.is_empty() {
                return Ok(());
            }
            let why = format!("the agent lacks {}", lacking.join(" and "));
            Err(LoadError::Refused { source: io::Error::from_raw_os_error(libc::EPERM), why })
        }
        Err(source) => {
            let lacking = Capabilities::of_this_process().lacking_for_bpf();
            let why = if source.raw_os_error() == Some(libc::ENOSYS) {
                "the kernel has no such system call".to_owned()
            } else if lacking.is_empty() {
                "the agent has the capabilities: a seccomp filter, a security module or lockdown forbids it".to_owned()
            } else {
                format!("the agent lacks {}", lacking.join(" and "))
            };
            Err(LoadError::Refused { source, why })
        }
    }
}

fn config(btf: &Btf, options: &Options, found: &Resolved) -> Result<common::Config, BtfError> {
    let subsystem = match options.hierarchy.kind {
        HierarchyKind::Unified => common::SUBSYSTEM_DEFAULT_HIERARCHY,
        HierarchyKind::V1(controller) => btf.constant(&format!("{}_cgrp_id", controller.as_str()))?,
    };
    Ok(common::Config {
        hierarchy: options.hierarchy.number,
        subsystem,
        memory: btf.constant("memory_cgrp_id").unwrap_or(common::ABSENT),
        reserved: 0,
        page_kib: u32::try_from(page_size() / 1024).unwrap_or(4),
        victim_is_task: u32::from(found.victim_is_task),
    })
}

/// A global of the probes as plain bytes.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Global<T>(T);

// SAFETY: integers only, without padding.
unsafe impl Pod for Global<common::Config> {}
// SAFETY: integers only, without padding.
unsafe impl Pod for Global<common::Offsets> {}

fn attach_or_report(ebpf: &mut Ebpf, spec: &Spec, found: &Resolved) -> ProbeStatus {
    let down = (spec.needs)(found).or_else(|| attach(ebpf, spec).err());
    ProbeStatus { program: spec.program, down }
}

fn attach(ebpf: &mut Ebpf, spec: &Spec) -> Result<(), String> {
    match ebpf.program_mut(spec.program) {
        Some(Program::RawTracePoint(program)) => attach_tracepoint(program, spec.hooks),
        Some(_) => Err("the probe object has another kind of program".to_owned()),
        None => Err("the probe object has no such program".to_owned()),
    }
}

fn attach_tracepoint(program: &mut RawTracePoint, hooks: &[&str]) -> Result<(), String> {
    program.load().map_err(|error| describe(&error))?;
    for hook in hooks {
        program.attach(hook).map_err(|error| format!("{hook}: {}", describe(&error)))?;
    }
    Ok(())
}

fn ring(ebpf: &mut Ebpf, name: &str) -> Result<RingBuf<MapData>, LoadError> {
    let map = ebpf.take_map(name).ok_or_else(|| LoadError::Object(format!("it has no map {name}")))?;
    RingBuf::try_from(map).map_err(|error| LoadError::Object(format!("map {name}: {error}")))
}

fn object_error(error: &EbpfError) -> LoadError {
    match error {
        EbpfError::MapError(MapError::CreateError { name, io_error, .. }) => {
            LoadError::Object(format!("cannot create map {name}: {io_error}"))
        }
        other => LoadError::Object(with_sources(other)),
    }
}

/// One line: of the verifier's log only the last message.
fn describe(error: &ProgramError) -> String {
    match error {
        ProgramError::LoadError { io_error, verifier_log } => {
            let log = verifier_log.to_string();
            let statistics = ["processed ", "stack depth ", "verification time "];
            let is_statistics = |line: &&str| statistics.iter().any(|start| line.starts_with(start));
            let message = log.lines().rev().find(|line| !line.is_empty() && !is_statistics(line));
            match message {
                Some(message) => format!("the verifier rejects it ({io_error}): {message}"),
                None => format!("the kernel rejects it: {io_error}"),
            }
        }
        other => with_sources(other),
    }
}

fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        let inner_text = inner.to_string();
        if !text.contains(&inner_text) {
            text = format!("{text}: {inner_text}");
        }
        source = inner.source();
    }
    text
}
