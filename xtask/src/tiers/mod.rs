//! `cargo xtask test`: all tests that this machine can run, in tiers.
//!
//! ```text
//! tree      layers, paths in documents, licences
//! workspace unit tests and the simulated tier: anywhere
//! kernel    the ignored tests with `bpf` in their name: CAP_BPF, CAP_PERFMON, the kernel's BTF
//! runtime   tests marked #[ignore], on a private containerd 1.7: root
//! release   the scenarios of the runtime tier on containerd 2, with a release build: root
//! cluster   the ignored tests with `cluster_` in their name: root, and upstream's programs, built or given
//! vm        tests of the runtime and kernel tiers with cgroup v2 and a release build, in the machine of `cargo xtask vm`:
//!           root, Debian
//! ```
//! Reports which tier could not run and why; with `CI=true` that is a failure. A tier that cannot be prepared, such as for want
//! of a download, is a failure and keeps no other one from running; without the packages of its machine, vm is not run. The
//! output of the test runner is passed through; only its results are summed up.

mod host_guard;
pub(crate) mod machine;
mod release;
pub(crate) mod tally;

use std::ffi::OsString;
use std::io::BufRead as _;
use std::io::BufReader;
use std::io::IsTerminal as _;
use std::path::Path;
use std::process::Command;
use std::process::ExitCode;
use std::process::Stdio;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::anyhow;
use keblet_peers::AGENT_IMAGE_VARIABLE;
use keblet_peers::CONTAINERD_VARIABLE;
use keblet_peers::Cache;

use crate::docs_paths;
use crate::image;
use crate::interrupt::Group;
use crate::interrupt::Interrupt;
use crate::layers;
use crate::licences;
use crate::paths;
use crate::peers;
use crate::run;
use crate::setup;
use crate::vm;
use host_guard::HostGuard;
use release::ReleaseBuild;
use tally::Tally;

/// Options of the command.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Run only these tiers.
    #[arg(long, value_enum)]
    tier: Vec<Tier>,
    /// Run random schedules with COUNT new seeds, which are printed, instead of the fixed ones.
    #[arg(long, value_name = "COUNT")]
    fresh_seeds: Option<u32>,
}

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum Tier {
    /// Layers, paths in documents, licences.
    Tree,
    /// Unit tests and the simulated tier.
    Workspace,
    /// Tests that load BPF programs.
    Kernel,
    /// Tests on a real container runtime.
    Runtime,
    /// Scenarios of the runtime tier on containerd 2, with a release build.
    Release,
    /// Tests against a real control plane.
    Cluster,
    /// Tests in a virtual machine with cgroup v2 and PSI.
    Vm,
}

impl Tier {
    /// In the order in which they run: tests of BPF programs are timed, so that they precede the release build.
    const ALL: [Self; 7] =
        [Self::Tree, Self::Workspace, Self::Kernel, Self::Runtime, Self::Release, Self::Cluster, Self::Vm];

    /// Whether it uses the cache and the programs of the workspace.
    fn needs_cache(self) -> bool {
        !matches!(self, Self::Tree | Self::Workspace)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Tree => "tree",
            Self::Workspace => "workspace",
            Self::Kernel => "kernel",
            Self::Runtime => "runtime",
            Self::Cluster => "cluster",
            Self::Release => "release",
            Self::Vm => "vm",
        }
    }

    /// What this machine lacks for the tier.
    fn lacks(self) -> Option<String> {
        match self {
            Self::Tree | Self::Workspace => None,
            Self::Runtime | Self::Release => machine::lacks_for_runtime(),
            Self::Kernel => machine::lacks_for_kernel(),
            Self::Vm => vm::lacks(),
            Self::Cluster => machine::lacks_for_runtime().or_else(peers::lacks),
        }
    }
}

/// The result of a tier.
struct Outcome {
    tier: Tier,
    tally: Tally,
    seconds: f32,
}

/// Runs the tiers and prints the sum of passed and failed tests.
pub(crate) fn test(arguments: &Arguments) -> ExitCode {
    let wanted = |tier: &Tier| arguments.tier.is_empty() || arguments.tier.contains(tier);
    let mut missing = Vec::new();
    let mut tiers = Vec::new();
    for tier in Tier::ALL.into_iter().filter(wanted) {
        match tier.lacks() {
            None => tiers.push(tier),
            Some(lack) => missing.push(format!("{}: {lack}", tier.name())),
        }
    }
    if tiers.contains(&Tier::Workspace) && !machine::has_program("go") {
        missing.push("comparison with the published CRI: `go` is not installed".to_owned());
    }
    let (mut prepared, mut release) = (None, ReleaseBuild::default());
    let outcomes = run_all(&tiers, |tier| {
        let cache = if tier.needs_cache() {
            let prepared = prepared.get_or_insert_with(|| prepare().map_err(|error| format!("{error:#}")));
            Some(prepared.as_ref().map_err(|why| anyhow!("{why}"))?)
        } else {
            None
        };
        // The tests of this tier mostly wait; those of clusters do not.
        if tier == Tier::Runtime && tiers.contains(&Tier::Release) {
            release.begin();
        }
        let tally = perform(tier, arguments, cache, &mut release, &mut missing)?;
        if tally.as_ref() == Some(&Tally::default()) {
            missing.push(format!("{}: it has no tests", tier.name()));
        }
        Ok(tally)
    });
    summary(&outcomes, &missing)
}

/// Runs tiers one after the other, each by `run`, which returns `None` for one that is left out. An error counts as a failed
/// test, and the next tier runs.
fn run_all(tiers: &[Tier], mut run: impl FnMut(Tier) -> Result<Option<Tally>>) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    for &tier in tiers {
        println!("\n== {}", tier.name());
        let start = Instant::now();
        let Some(result) = run(tier).transpose() else { continue };
        let mut tally = Tally::default();
        tally.add(result);
        outcomes.push(Outcome { tier, tally, seconds: start.elapsed().as_secs_f32() });
    }
    outcomes
}

/// Runs one tier; `None` if the machine cannot, which is added to `missing`.
fn perform(
    tier: Tier,
    arguments: &Arguments,
    cache: Option<&Cache>,
    release: &mut ReleaseBuild,
    missing: &mut Vec<String>,
) -> Result<Option<Tally>> {
    let tally = match tier {
        Tier::Tree => tree(),
        Tier::Workspace => workspace(arguments.fresh_seeds)?,
        Tier::Kernel => cargo_test(&["--workspace"], &["--ignored", "bpf", "--test-threads", "1"], cache, &[])?,
        Tier::Runtime => runtime(cache, &on_runtime(missing))?,
        Tier::Cluster => cluster(cache)?,
        Tier::Release => scenarios(cache, &release.agent()?, &on_runtime(missing))?,
        Tier::Vm => {
            if let Err(error) = cache.map_or(Ok(()), setup::prepare_machine) {
                missing.push(format!("vm: {error:#}"));
                return Ok(None);
            }
            in_machines(cache, release)?
        }
    };
    Ok(Some(tally))
}

/// Prepares what tests on a real runtime need: the cache, the supervisors and the agent.
fn prepare() -> Result<Cache> {
    let cache = setup::prepare()?;
    run::build_programs()?;
    Ok(cache)
}

/// These tests run on any machine, also beside a real kubelet: they may neither listen on its ports nor write to its
/// folders.
fn workspace(fresh_seeds: Option<u32>) -> Result<Tally> {
    let guard = HostGuard::start()?;
    let seeds: Vec<_> = fresh_seeds.map(|count| ("SIM_SEEDS", format!("fresh:{count}").into())).into_iter().collect();
    let mut tally = cargo_test(&["--workspace"], &[], None, &seeds)?;
    for change in guard.changes() {
        println!("a test changed the default folder of a kubelet: {change}");
        tally.failed += 1;
    }
    Ok(tally)
}

/// Arguments for the runner of tests on a private containerd: each test has its own, and mostly waits. Tests that the machine
/// cannot run are added to `missing`.
fn on_runtime(missing: &mut Vec<String>) -> Vec<&'static str> {
    let mut options = vec!["--ignored", "--test-threads", "4", "--skip", "bpf", "--skip", "cluster_", "--skip", "vm_"];
    if let Some(lack) = machine::lacks_for_systemd() {
        options.extend(["--skip", "systemd_"]);
        let lack = format!("the agent as a service of systemd: {lack}");
        if !missing.contains(&lack) {
            missing.push(lack);
        }
    }
    options
}

fn runtime(cache: Option<&Cache>, arguments: &[&str]) -> Result<Tally> {
    if let Some(cache) = cache {
        setup::prepare_registry(cache)?;
    }
    cargo_test(&["--workspace"], arguments, cache, &[])
}

/// All packages are selected, as for the runtime tier: with the features that one package alone enables, agent and test
/// program would be built again.
fn scenarios(cache: Option<&Cache>, agent: &Path, arguments: &[&str]) -> Result<Tally> {
    if let Some(cache) = cache {
        setup::prepare_registry(cache)?;
        setup::prepare_containerd_2(cache)?;
    }
    let variables = [(CONTAINERD_VARIABLE, "2".into()), ("KEBLET_BIN", OsString::from(agent))];
    cargo_test(&["--workspace", "--test", "scenarios"], arguments, cache, &variables)
}

/// The tests limit by themselves how many use a control plane at a time; the others can run in parallel. One deploys the
/// agent's image.
fn cluster(cache: Option<&Cache>) -> Result<Tally> {
    peers::control_plane()?;
    if let Some(cache) = cache {
        setup::prepare_registry(cache)?;
    }
    let variables = [(AGENT_IMAGE_VARIABLE, image::of_tests()?.into_os_string())];
    cargo_test(&["--workspace"], &["--ignored", "cluster_", "--test-threads", "24"], cache, &variables)
}

/// Last of all tiers, as signals are handled from here on. With a release build: an unoptimized agent is slow in emulation.
fn in_machines(cache: Option<&Cache>, release: &mut ReleaseBuild) -> Result<Tally> {
    let commands = ["--package", "xtask", "--test", "virtual_machine"];
    let mut tally = cargo_test(&commands, &["--ignored", "--test-threads", "1"], cache, &[])?;
    tally.add(release.agent().and_then(|agent| vm::suite::all(&agent, &Interrupt::install()?)));
    Ok(tally)
}

fn tree() -> Tally {
    let mut tally = Tally::default();
    for report in [layers::check(), docs_paths::check(), licences::check()] {
        tally.add(report.map(|report| {
            let passed = report.print() == ExitCode::SUCCESS;
            Tally { passed: usize::from(passed), failed: usize::from(!passed) }
        }));
    }
    tally
}

/// Runs the tests that `selection` names with `arguments` for their runner, prints its output and sums up its results.
fn cargo_test(
    selection: &[&str],
    arguments: &[&str],
    cache: Option<&Cache>,
    variables: &[(&str, OsString)],
) -> Result<Tally> {
    let mut command = Command::new(paths::cargo());
    command.arg("test").args(selection).args(["--no-fail-fast", "--"]).args(arguments).current_dir(paths::repository());
    let colour = if std::io::stdout().is_terminal() { "always" } else { "never" };
    command.env("CARGO_TERM_COLOR", colour);
    // Backtraces of errors add nothing to their messages and would hide them in the report of a failure.
    command.env("RUST_LIB_BACKTRACE", "0");
    if let Some(cache) = cache {
        command
            .env("KEBLET_CACHE", cache.root())
            .env("KEBLET_PRIVATE_CONTAINERD", run::supervisor())
            .env("KEBLET_PRIVATE_CONTROL_PLANE", run::control_plane_supervisor())
            .env("KEBLET_BIN", run::agent());
    }
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let (mut child, _group) = Group::spawn(&mut command).context("cannot run cargo test")?;
    let mut tally = Tally::default();
    let output = child.stdout.take().context("cargo test has no standard output")?;
    for line in BufReader::new(output).lines() {
        let line = line.context("cannot read the output of cargo test")?;
        println!("{line}");
        tally.read(&line);
    }
    let status = child.wait().context("cannot wait for cargo test")?;
    // A crate that does not compile or a runner that crashes reports no failed test.
    if !status.success() && tally.failed == 0 {
        tally.failed = 1;
        println!("cargo test exited with {status} without a failed test, which counts as a failure");
    }
    Ok(tally)
}

fn summary(outcomes: &[Outcome], missing: &[String]) -> ExitCode {
    println!("\n{:<10} {:>7} {:>7} {:>9}", "tier", "passed", "failed", "seconds");
    let mut total = Tally::default();
    for Outcome { tier, tally, seconds } in outcomes {
        println!("{:<10} {:>7} {:>7} {seconds:>9.1}", tier.name(), tally.passed, tally.failed);
        total.passed += tally.passed;
        total.failed += tally.failed;
    }
    let strict = std::env::var("CI").is_ok_and(|ci| ci == "true");
    for lack in missing {
        println!("not run: {lack}");
    }
    if strict && !missing.is_empty() {
        println!("CI=true, so each tier that was not run is a failure");
        total.failed += missing.len();
    }
    println!("{} passed, {} failed", total.passed, total.failed);
    if total.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tier_that_cannot_be_prepared_is_a_failure_and_the_next_ones_run() {
        let outcomes = run_all(&[Tier::Runtime, Tier::Vm, Tier::Cluster], |tier| match tier {
            Tier::Runtime => Err(anyhow!("a download failed")),
            Tier::Vm => Ok(None),
            _ => Ok(Some(Tally { passed: 3, failed: 0 })),
        });
        let results: Vec<_> = outcomes.iter().map(|Outcome { tier, tally, .. }| (tier.name(), tally)).collect();
        let (failure, success) = (Tally { passed: 0, failed: 1 }, Tally { passed: 3, failed: 0 });
        assert_eq!(results, [("runtime", &failure), ("cluster", &success)]);
        assert_eq!(summary(&outcomes, &[]), ExitCode::FAILURE);
        assert_eq!(summary(&outcomes[1..], &[]), ExitCode::SUCCESS);
    }
}
