//! `cargo xtask bench`: a release of keblet and other agents measured on private parts, and the results compared with
//! the promises of SPECIFICATION.md.

mod check;
mod promises;

use std::ffi::OsString;
use std::path::Path;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use anyhow::Result;

use crate::cluster;
use crate::interrupt::Interrupt;
use crate::paths;
use crate::peers;
use crate::progress::step;
use crate::run;
use crate::setup;
use crate::system;
use crate::vm;
use crate::vm::Disk;

/// Memory of the machine for the benchmark of pressure, in MiB.
const PRESSURE_MEMORY: u32 = 3072;

/// What to measure.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Which benchmark to run [default: pleg, or none with --check].
    #[arg(value_enum)]
    benchmark: Option<Benchmark>,
    /// Measure upstream's kubelets beside keblet: 1.36, and 1.37 with EventedPLEG. Builds them first if need be, which
    /// takes minutes.
    #[arg(long)]
    with_kubelet: bool,
    /// Compare results with the promises of SPECIFICATION.md, after the benchmark if one is named.
    #[arg(long)]
    check: bool,
    /// Folder of the results: written by a benchmark, read by --check.
    #[arg(long, default_value = "docs/bench")]
    results: PathBuf,
    /// Further arguments of the benchmark, such as `--only delete --runs 5`.
    #[arg(last = true)]
    rest: Vec<OsString>,
}

#[derive(clap::ValueEnum, Clone, Copy)]
enum Benchmark {
    /// Agents on a private container runtime.
    Pleg,
    /// Agents as nodes of a private cluster.
    Cluster,
    /// OOM kills, on a private container runtime in the virtual machine of `cargo xtask vm`.
    Pressure,
    /// Pods that grow towards an eviction threshold, in a private cluster in the virtual machine.
    Race,
    /// A pod that stalls the node, in a private cluster in the virtual machine.
    Thrash,
}

/// Runs a benchmark of a release, or compares results with promises, or both.
///
/// # Errors
/// The benchmark cannot be built, started or cleaned up, or results or promises cannot be read.
pub(crate) fn bench(arguments: &Arguments) -> Result<ExitCode> {
    let benchmark = match arguments.benchmark {
        None if arguments.check => None,
        None => Some(Benchmark::Pleg),
        chosen => chosen,
    };
    if let Some(benchmark) = benchmark {
        let code = measure(benchmark, arguments)?;
        if code != ExitCode::SUCCESS || !arguments.check {
            return Ok(code);
        }
    }
    check::check(&paths::repository(), &results(arguments)).map(|report| report.print())
}

fn measure(benchmark: Benchmark, arguments: &Arguments) -> Result<ExitCode> {
    let packages = ["--release", "--package", "keblet", "--package", "keblet-bench"];
    run::build("building a release of keblet (minutes, the first time)", &packages)?;
    let program = paths::target().join("release/keblet-bench");
    match benchmark {
        Benchmark::Pleg => pleg(arguments, &program),
        Benchmark::Cluster => in_cluster(arguments, &program),
        Benchmark::Pressure => {
            let peers = peers(arguments, "--config {config} --root-dir {root} --cert-dir {root}/pki")?;
            let around = &["xtask", "containerd", "--", "sh", "-c", ON_CONTAINERD, "sh"];
            in_machine(arguments, &program, peers, around, &["--node-oom", "--only", "oom"], None)
        }
        Benchmark::Race => in_cluster_of_machine(arguments, &program, "race", None),
        Benchmark::Thrash => in_cluster_of_machine(arguments, &program, "thrash", Some(THRASH_DISK)),
    }
}

/// A part of the benchmark of pressure in a cluster in a machine.
fn in_cluster_of_machine(arguments: &Arguments, program: &Path, part: &str, disk: Option<Disk>) -> Result<ExitCode> {
    peers::control_plane()?;
    let script =
        if disk.is_some() { format!("{MOUNT_DISK} && {IN_CLUSTER} --thrash-folder /data") } else { IN_CLUSTER.into() };
    let around = &["xtask", "cluster", "run", "--no-node", "--", "sh", "-c", &script, "sh"];
    in_machine(arguments, program, peers(arguments, KUBELET_FLAGS)?, around, &["--only", part], disk)
}

/// As busy a disk as a small node in a cloud has. Reads from a shared folder are served from the host's memory: tasks
/// that need them wait no longer than they compute, in emulation.
const THRASH_DISK: Disk = Disk { size: 1024, reads_per_second: 100 };
const MOUNT_DISK: &str = "modprobe virtio_blk && mkfs.ext4 -q /dev/vda && mkdir /data && mount /dev/vda /data";

/// In the machine, variables are expanded by its shell.
const ON_CONTAINERD: &str =
    r#"exec "$@" --runtime-endpoint "$KEBLET_RUNTIME_ENDPOINT" --cgroup-root "$KEBLET_CGROUP_ROOT""#;
const IN_CLUSTER: &str = r#"exec "$@" --runtime-endpoint "$KEBLET_RUNTIME_ENDPOINT" \
    --cgroup-root "$KEBLET_CGROUP_ROOT" --kubeconfig "$KUBECONFIG" --node-kubeconfig "$KEBLET_NODE_KUBECONFIG" \
    --node-name "$KEBLET_NODE_NAME" --node-ip "$KEBLET_NODE_IP""#;

/// The benchmark of pressure in a machine, which may run out of memory, with a command around it. The folder of the
/// results is shared with the machine, programs are anyway.
fn in_machine(
    arguments: &Arguments,
    program: &Path,
    peers: Vec<OsString>,
    around: &[&str],
    options: &[&str],
    disk: Option<Disk>,
) -> Result<ExitCode> {
    let interrupt = Interrupt::install()?;
    run::build_cluster(false)?;
    let mut words: Vec<OsString> = around.iter().map(OsString::from).collect();
    words.push(program.into());
    words.extend(["pressure", "--output", "/share", "--commit"].map(OsString::from));
    words.push(commit()?.into());
    words.extend(options.iter().map(OsString::from));
    words.extend(peers);
    words.extend(arguments.rest.iter().cloned());
    let results = results(arguments);
    std::fs::create_dir_all(&results).with_context(|| format!("cannot create {}", results.display()))?;
    vm::command(&words, PRESSURE_MEMORY, disk, &results, &interrupt)
}

fn pleg(arguments: &Arguments, program: &Path) -> Result<ExitCode> {
    let interrupt = Interrupt::install()?;
    let cache = setup::prepare()?;
    let peers = peers(arguments, "--config {config} --root-dir {root} --cert-dir {root}/pki")?;
    run::build_supervisor()?;
    let mut containerd = run::start(&cache, None)?;
    let mut words: Vec<OsString> = ["pleg", "--runtime-endpoint"].map(OsString::from).into();
    words.push(containerd.endpoint().into());
    words.extend(common(arguments)?);
    words.extend(peers);
    words.extend(arguments.rest.iter().cloned());
    let environment = run::environment(&containerd);
    let result = run::command(program.as_os_str(), &words, &environment, &mut containerd, &interrupt);
    step("removing pods and runtime", || containerd.stop())?;
    result
}

/// A kubelet's flags as a node of the cluster.
const KUBELET_FLAGS: &str = "--config={config} --root-dir={root} --cert-dir={root}/pki --kubeconfig={kubeconfig} \
                             --hostname-override={node} --node-ip={ip}";

fn in_cluster(arguments: &Arguments, program: &Path) -> Result<ExitCode> {
    let peers = peers(arguments, KUBELET_FLAGS)?;
    let common = common(arguments)?;
    cluster::without_node(|cluster, interrupt| {
        let mut words: Vec<OsString> = vec!["cluster".into()];
        words.extend(cluster.benchmark_arguments());
        words.extend(common);
        words.extend(peers);
        words.extend(arguments.rest.iter().cloned());
        let environment = cluster.environment();
        run::command(program.as_os_str(), &words, &environment, cluster.containerd(), interrupt)
    })
}

/// The kubelets to measure, as arguments of the benchmark.
fn peers(arguments: &Arguments, flags: &str) -> Result<Vec<OsString>> {
    if !arguments.with_kubelet {
        return Ok(Vec::new());
    }
    let (polling, evented) = (peers::kubelet()?, peers::kubelet_1_37()?);
    Ok(vec![
        "--peer".into(),
        format!("kubelet 1.36={} {flags}", polling.display()).into(),
        "--peer".into(),
        format!("kubelet 1.37 evented={} {flags} --feature-gates=EventedPLEG=true", evented.display()).into(),
    ])
}

/// Arguments of every benchmark.
fn common(arguments: &Arguments) -> Result<Vec<OsString>> {
    Ok(vec!["--output".into(), results(arguments).into(), "--commit".into(), commit()?.into()])
}

fn results(arguments: &Arguments) -> PathBuf {
    paths::repository().join(&arguments.results)
}

/// The commit that is measured, marked if the tree differs from it.
fn commit() -> Result<String> {
    let git = |arguments: &[&str]| system::output(&mut system::git(&paths::repository(), arguments));
    let head = git(&["rev-parse", "--short=12", "HEAD"])?;
    let changes = git(&["status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs", ":!*.md"])?;
    let mark = if changes.trim().is_empty() { "" } else { "-modified" };
    Ok(format!("{}{mark}", head.trim()))
}
