//! `cargo xtask bench`: a release of keblet measures itself and others on real parts of its own.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;

use crate::cluster;
use crate::interrupt::Interrupt;
use crate::paths;
use crate::peers;
use crate::progress::step;
use crate::run;
use crate::setup;

/// What to measure.
#[derive(clap::Args)]
pub struct Arguments {
    /// Which benchmark of keblet to run.
    #[arg(value_enum, default_value = "pleg")]
    benchmark: Benchmark,
    /// Measure upstream's kubelet beside keblet; builds it first if need be, which takes minutes.
    #[arg(long)]
    with_kubelet: bool,
    /// Further arguments of the benchmark, such as `--pods 20`.
    #[arg(last = true)]
    rest: Vec<OsString>,
}

#[derive(clap::ValueEnum, Clone, Copy)]
enum Benchmark {
    /// Agents on a private container runtime.
    Pleg,
    /// Agents as nodes of a private cluster.
    Cluster,
}

/// Builds a release and runs its benchmark.
pub fn bench(arguments: &Arguments) -> Result<ExitCode> {
    run::build(
        "building a release of keblet (minutes, the first time)",
        &["--release", "--package", "keblet", "--package", "keblet-bench"],
    )?;
    let program = paths::target().join("release/keblet-bench");
    match arguments.benchmark {
        Benchmark::Pleg => pleg(arguments, &program),
        Benchmark::Cluster => in_cluster(arguments, &program),
    }
}

fn pleg(arguments: &Arguments, program: &Path) -> Result<ExitCode> {
    let interrupt = Interrupt::install()?;
    let cache = setup::prepare()?;
    let kubelet = if arguments.with_kubelet { Some(peers::kubelet()?) } else { None };
    run::build_supervisor()?;
    let mut containerd = run::start(&cache, None)?;
    let mut words: Vec<OsString> = ["pleg", "--runtime-endpoint"].map(OsString::from).into();
    words.push(containerd.endpoint().into());
    if let Some(kubelet) = kubelet {
        words.push("--peer".into());
        words.push(format!("kubelet={} --config {{config}} --root-dir {{root}}", kubelet.display()).into());
    }
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
    let kubelet = if arguments.with_kubelet { Some(peers::kubelet()?) } else { None };
    cluster::without_node(|stage, interrupt| {
        let mut words: Vec<OsString> = vec!["cluster".into()];
        words.extend(stage.benchmark_arguments());
        if let Some(kubelet) = kubelet {
            words.push("--peer".into());
            words.push(format!("kubelet={} {KUBELET_FLAGS}", kubelet.display()).into());
        }
        words.extend(arguments.rest.iter().cloned());
        let environment = stage.environment();
        run::command(program.as_os_str(), &words, &environment, stage.containerd(), interrupt)
    })
}
