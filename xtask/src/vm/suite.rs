//! The tests that run in the machine: the same programs as in the runtime and kernel tiers, built on the host.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::BufRead as _;
use std::io::BufReader;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::process::ExitCode;
use std::process::Stdio;
use std::thread;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use keblet_peers::CONTAINERD_VARIABLE;
use keblet_peers::Cache;
use serde_json::Value;

use super::machine::Machine;
use super::machine::Output;
use super::prepare;
use crate::interrupt::Group;
use crate::interrupt::Interrupt;
use crate::paths;
use crate::run;
use crate::setup;
use crate::tiers::tally::Tally;

/// Runs each program with its arguments, which are separated by a line; fails if one fails. Programs are as large as
/// their debug information, of which nothing is read unless a test panics.
const ALL: &str = "code=0; for program do $program || code=1; done; exit $code";

/// Tests that run in one machine.
#[derive(Clone, Copy, Debug, PartialEq, clap::ValueEnum)]
pub(crate) enum Set {
    /// BPF programs on the machine's kernel.
    Kernel,
    /// The agent on containerd with the cgroupfs driver; sensors of pressure; OOM verdicts; volumes on file systems with
    /// project quotas; out-of-memory scores and AppArmor profiles of containers.
    Cgroupfs,
    /// The agent on containerd with the systemd driver, with systemd as the first process.
    Systemd,
    /// Protection of requested memory, with the cgroupfs driver.
    Protection,
    /// Disks of an iSCSI target and of SCSI hosts, exports of an NFS server in the machine, and local disks that grow.
    Storage,
}

/// A test program and the arguments of its runner.
struct Program {
    target: &'static str,
    arguments: &'static [&'static str],
    /// On containerd 2 instead of 1.7.
    containerd_2: bool,
}

const CGROUPS: Program =
    Program { target: "scenarios", arguments: &["--ignored", "--test-threads", "1", "cgroups::"], containerd_2: false };
/// Sensors of pressure: only cgroup v2 has `memory.events`.
const PRESSURE: Program = Program {
    target: "scenarios",
    arguments: &["--ignored", "--test-threads", "1", "eviction::pressure_"],
    containerd_2: false,
};
/// A killed child, and a kill for the whole machine. That of a main process is one of [`CGROUPS`].
const OOM: Program = Program {
    target: "scenarios",
    arguments: &["--ignored", "--test-threads", "1", "oom::a_killed_child_", "oom::vm_"],
    containerd_2: false,
};
/// OOM verdicts on the limits of containers, pods, classes and all pods, and on main processes, children and execs: of
/// [`KERNEL`] the tests that wait for one kill after the other, with deadlines that emulation keeps.
const OOM_EVIDENCE: Program = Program {
    target: "kernel",
    arguments: &["--ignored", "--test-threads", "1", "oom_evidence::the_exceeded_limit_", "oom_evidence::main_child_"],
    containerd_2: false,
};
/// Names its cgroups as the driver cgroupfs does.
const PROTECTION: Program = Program {
    target: "scenarios",
    arguments: &["--ignored", "--test-threads", "1", "node_allocatable::vm_"],
    containerd_2: false,
};
/// Mounts file systems, and changes `/etc`. User namespaces need containerd 2.
const QUOTAS: Program = Program {
    target: "scenarios",
    arguments: &["--ignored", "--test-threads", "1", "project_quotas::vm_"],
    containerd_2: true,
};
/// Negative out-of-memory scores need CAP_SYS_RESOURCE; AppArmor profiles are loaded into the machine's kernel.
const SECURITY: Program = Program {
    target: "scenarios",
    arguments: &["--ignored", "--test-threads", "1", "pod_security::vm_"],
    containerd_2: false,
};
/// BPF programs on the machine's kernel.
const KERNEL: Program =
    Program { target: "kernel", arguments: &["--ignored", "--test-threads", "1", "bpf"], containerd_2: false };
/// Logs in to targets, mounts exports and expands disks, with modules of the machine's kernel.
const STORAGE: Program = Program {
    target: "scenarios",
    arguments: &["--ignored", "--test-threads", "1", "fc::", "iscsi::", "local::", "nfs::"],
    containerd_2: false,
};

impl Set {
    const ALL: [Self; 5] = [Self::Kernel, Self::Cgroupfs, Self::Systemd, Self::Protection, Self::Storage];
    /// Those of `cargo xtask test`. The others are timed for a real processor: under emulation they fail now and then.
    const OF_TIER: [Self; 3] = [Self::Cgroupfs, Self::Systemd, Self::Storage];

    fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Cgroupfs => "cgroupfs",
            Self::Systemd => "systemd",
            Self::Protection => "protection",
            Self::Storage => "storage",
        }
    }

    /// Whether a second machine can run beside it without making its tests late: it leaves half of the processors idle.
    fn mostly_waits(self) -> bool {
        self == Self::Storage
    }

    fn programs(self) -> &'static [Program] {
        match self {
            Self::Kernel => &[KERNEL],
            Self::Cgroupfs => &[CGROUPS, PRESSURE, OOM, OOM_EVIDENCE, QUOTAS, SECURITY],
            Self::Systemd => &[CGROUPS],
            Self::Protection => &[PROTECTION],
            Self::Storage => &[STORAGE],
        }
    }
}

/// Runs sets and prints the sum; all of them if none is named.
///
/// # Errors
/// As [`all`].
pub(super) fn run(sets: &[Set], interrupt: &Interrupt) -> Result<ExitCode> {
    prepare()?;
    run::build_programs()?;
    let sets = if sets.is_empty() { &Set::ALL } else { sets };
    let tally = perform(sets, None, interrupt)?;
    println!("{} passed, {} failed", tally.passed, tally.failed);
    Ok(if tally.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs the sets of the tier with this agent, each in a machine of its own; the cache and the programs are there. A machine
/// that does not boot counts as a failed test, and the next set runs.
///
/// # Errors
/// The tests do not compile, or a signal ended them.
pub(crate) fn all(agent: &Path, interrupt: &Interrupt) -> Result<Tally> {
    perform(&Set::OF_TIER, Some(agent), interrupt)
}

/// With the agent of the last development build if `agent` names no other. A set whose tests mostly wait runs beside the
/// others; its output follows theirs.
fn perform(sets: &[Set], agent: Option<&Path>, interrupt: &Interrupt) -> Result<Tally> {
    let cache = Cache::locate();
    if sets.iter().flat_map(|set| set.programs()).any(|program| program.containerd_2) {
        setup::prepare_containerd_2(&cache)?;
    }
    let targets = sets.iter().flat_map(|set| set.programs()).map(|program| program.target).collect::<Vec<_>>();
    let suite = Suite { cache: &cache, built: &build(&targets)?, agent, interrupt };
    let mut print = |line: &str| println!("{line}");
    let (waiting, busy): (Vec<Set>, Vec<Set>) = sets.iter().partition(|set| set.mostly_waits());
    let tally = if waiting.is_empty() || busy.is_empty() {
        suite.run(sets, &mut print)?
    } else {
        thread::scope(|scope| -> Result<Tally> {
            let beside = scope.spawn(|| {
                let mut lines = Vec::new();
                (suite.run(&waiting, &mut |line| lines.push(line.to_owned())), lines)
            });
            let mut tally = suite.run(&busy, &mut print)?;
            let (result, lines) = beside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            lines.iter().for_each(|line| print(line));
            tally.add(result);
            Ok(tally)
        })?
    };
    if interrupt.raised() {
        bail!("interrupted");
    }
    Ok(tally)
}

/// What the sets share.
struct Suite<'a> {
    cache: &'a Cache,
    /// Paths of the test programs by the name of their target.
    built: &'a BTreeMap<String, PathBuf>,
    agent: Option<&'a Path>,
    interrupt: &'a Interrupt,
}

impl Suite<'_> {
    /// Runs sets one after the other, until a signal arrives, and passes each line of their output to `print`.
    fn run(&self, sets: &[Set], print: &mut (dyn FnMut(&str) + Send)) -> Result<Tally> {
        let mut tally = Tally::default();
        for set in sets.iter().take_while(|_| !self.interrupt.raised()) {
            print(&format!("\n== vm: {}", set.name()));
            tally.add(Ok(self.run_set(*set, print)?));
        }
        Ok(tally)
    }

    fn run_set(&self, set: Set, print: &mut (dyn FnMut(&str) + Send)) -> Result<Tally> {
        let mut machine = Machine::new(self.cache);
        machine.systemd = set == Set::Systemd;
        machine.environment.extend(environment(set));
        // The last value of a variable counts.
        machine.environment.extend(self.agent.map(|agent| ("KEBLET_BIN".to_owned(), agent.into())));
        let mut command: Vec<OsString> = ["sh", "-c", ALL, "sh"].map(OsString::from).into();
        for program in set.programs() {
            let path = self.built.get(program.target);
            command.push(line(path.with_context(|| format!("cargo built no test {}", program.target))?, program));
        }
        Ok(in_machine(print, |read| {
            let first = machine.run(&command, Output::Lines(read), self.interrupt);
            let Some(crash) = first.as_ref().err().filter(|error| set == Set::Storage && is_crash(error)) else {
                return first;
            };
            read(&format!("{crash:#}\nthe machine's kernel has crashed: the tests run once more"));
            machine.run(&command, Output::Lines(read), self.interrupt)
        }))
    }
}

/// The machine's kernel crashed. Linux 6.12 does now and then when the login to an iSCSI target was refused:
/// `iscsi_sw_tcp_conn_stop` releases a socket that is not there any more.
fn is_crash(error: &anyhow::Error) -> bool {
    error.to_string().contains("Kernel panic - not syncing")
}

/// The results of the tests that `run` executes in one machine: it passes each line of their output to the function that it
/// gets, which also prints it, and returns their exit code. A machine that fails counts as a failed test beside those that were
/// reported before.
fn in_machine(
    print: &mut (dyn FnMut(&str) + Send),
    run: impl FnOnce(&mut (dyn FnMut(&str) + Send)) -> Result<u8>,
) -> Tally {
    let mut tally = Tally::default();
    let result = run(&mut |line: &str| {
        print(line);
        tally.read(line);
    });
    // A runner that crashes reports no failed test.
    let result = result.and_then(|code| {
        if code != 0 && tally.failed == 0 {
            bail!("the tests exited with {code} without a failed test, which counts as a failure");
        }
        Ok(Tally::default())
    });
    tally.add(result);
    tally
}

/// The words are split again by the shell, so none may have spaces.
fn line(path: &Path, program: &Program) -> OsString {
    let mut line = OsString::new();
    if program.containerd_2 {
        line.push(format!("env {CONTAINERD_VARIABLE}=2 "));
    }
    line.push(path);
    for argument in program.arguments {
        line.push(" ");
        line.push(argument);
    }
    line
}

fn environment(set: Set) -> Vec<(String, OsString)> {
    let driver = if set == Set::Systemd { "systemd" } else { "cgroupfs" };
    let constant = [("KEBLET_TEST_CGROUP_DRIVER", driver), ("KEBLET_TEST_EMULATED", "1"), ("RUST_LIB_BACKTRACE", "0")];
    let mut variables = constant.map(|(name, value)| (name.to_owned(), OsString::from(value))).to_vec();
    variables.extend(std::env::var_os("CI").map(|ci| ("CI".to_owned(), ci)));
    variables
}

/// Builds test programs; returns their paths by the name of their target. All packages are selected, as for the other tiers:
/// with the features that one package alone enables, they would be built again.
fn build(targets: &[&str]) -> Result<BTreeMap<String, PathBuf>> {
    let mut command = Command::new(paths::cargo());
    command.args(["test", "--no-run", "--quiet", "--message-format", "json", "--workspace"]);
    for target in targets {
        command.args(["--test", target]);
    }
    command.current_dir(paths::repository()).stdin(Stdio::null()).stdout(Stdio::piped());
    let (mut child, _group) = Group::spawn(&mut command).context("cannot run cargo")?;
    let output = child.stdout.take().context("cargo has no standard output")?;
    let mut built = BTreeMap::new();
    for line in BufReader::new(output).lines() {
        let message: Value = serde_json::from_str(&line.context("cannot read cargo's output")?).unwrap_or_default();
        if let Some(rendered) = message["message"]["rendered"].as_str() {
            eprint!("{rendered}");
        }
        if let (Some(name), Some(path)) = (message["target"]["name"].as_str(), message["executable"].as_str()) {
            built.insert(name.to_owned(), PathBuf::from(path));
        }
    }
    let status = child.wait().context("cannot wait for cargo")?;
    if !status.success() {
        bail!("the tests do not compile");
    }
    Ok(built)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_fails_is_one_failure_beside_the_results_that_it_reported() {
        let reported = |lines: &[&str], end: Result<u8>| {
            let tally = in_machine(&mut |line| println!("{line}"), |read| {
                for line in lines {
                    read(line);
                }
                end
            });
            (tally.passed, tally.failed)
        };
        let passed = "test result: ok. 2 passed; 0 failed; 0 ignored";
        let failed = "test result: FAILED. 5 passed; 3 failed; 0 ignored";
        assert_eq!(reported(&[passed], Ok(0)), (2, 0));
        assert_eq!(reported(&[passed, failed], Ok(1)), (7, 3));
        assert_eq!(reported(&[passed], Ok(101)), (2, 1), "a runner that crashed");
        assert_eq!(reported(&[], Err(anyhow::anyhow!("the machine did not boot"))), (0, 1));
        assert_eq!(reported(&[failed], Err(anyhow::anyhow!("the machine ended without an exit code"))), (5, 4));
    }
}
