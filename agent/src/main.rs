//! The binary: parse, load configuration, build, run, drain.

use std::io;
use std::time::Duration;

use anyhow::{Context as _, bail};
use keblet::cli::{self, Command, RunArgs, bench, config, docs, doctor, host, logging, process, version};
use keblet::config::{Settings, load, missing_protections};
use keblet::exit::Exit;
use keblet::systemd;
use keblet::telemetry::Spans;
use keblet::wiring;

/// How long the parts may take to end after the process was told to.
const DRAIN: Duration = Duration::from_secs(10);

fn main() -> Exit {
    process::save_memory();
    match cli::parse(std::env::args_os()) {
        Ok(cli) => execute(cli.command).unwrap_or_else(|error| {
            eprintln!("keblet: {error:#}");
            Exit::of(&error)
        }),
        Err(message) => {
            let exit = if message.use_stderr() { Exit::Usage } else { Exit::Success };
            message.print().map_or(Exit::Failure, |()| exit)
        }
    }
}

fn execute(command: Command) -> anyhow::Result<Exit> {
    let out = &mut io::stdout().lock();
    match command {
        Command::Run(args) => return run(&args),
        Command::Doctor(args) => return process::runtime()?.block_on(doctor::run(&args, out)),
        Command::Bench(args) => bench::run(&args)?,
        Command::Config(command) => config::run(command, out)?,
        Command::Version(args) => version::run(args, out)?,
        Command::Completions(args) => docs::completions(&args, out)?,
        Command::Man(args) => docs::man(&args, out)?,
    }
    Ok(Exit::Success)
}

/// The node agent, until it is told to end.
fn run(args: &RunArgs) -> anyhow::Result<Exit> {
    if let Some(version) = &args.version {
        println!("Kubernetes {version}");
        return Ok(Exit::Success);
    }
    let settings = load(&args.flags)?;
    let runtime = process::runtime().context("cannot start the async runtime")?;
    let spans = wiring::spans(&settings, &runtime)?;
    let verbosity = logging::init(&settings.kubelet.logging, spans.as_ref().map(Spans::layer))?;
    settings.check_supported()?;
    settings.check_host(&host::facts())?;
    host::apply_tunables(&settings)?;
    for notice in settings.notices() {
        tracing::warn!("{notice}");
    }
    for (field, lack) in missing_protections(&settings.kubelet) {
        tracing::warn!(field, "not honoured yet: {lack}");
    }
    let outcome = runtime.block_on(until_told_to_end(settings, verbosity));
    spans.into_iter().for_each(Spans::end);
    runtime.shutdown_background();
    outcome.map(|()| Exit::Success)
}

/// Runs the agent; once told to end, its parts have [`DRAIN`] to do so.
async fn until_told_to_end(settings: Settings, verbosity: logging::Verbosity) -> anyhow::Result<()> {
    let shutdown = process::shutdown().context("cannot wait for signals")?;
    let agent = wiring::run(settings, verbosity, shutdown.clone());
    let overdue = async {
        shutdown.cancelled().await;
        systemd::stopping();
        tokio::time::sleep(DRAIN).await;
    };
    tokio::select! {
        // First, for it has something to say before the agent is gone.
        biased;
        () = overdue => bail!("some part did not end within {DRAIN:?}"),
        ended = agent => ended,
    }
}
