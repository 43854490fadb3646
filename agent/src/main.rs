//! The binary: parse, load configuration, build, run, drain.

use std::io;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::bail;
use keblet::cli;
use keblet::cli::Command;
use keblet::cli::RunArgs;
use keblet::cli::bench;
use keblet::cli::config;
use keblet::cli::docs;
use keblet::cli::doctor;
use keblet::cli::host;
use keblet::cli::logging;
use keblet::cli::observe;
use keblet::cli::process;
use keblet::cli::reports;
use keblet::cli::version;
use keblet::config::Settings;
use keblet::config::load;
use keblet::exit::Exit;
use keblet::kernel::memory;
use keblet::systemd;
use keblet::telemetry::Spans;
use keblet::wiring;

/// How long the parts may take to stop after a signal.
const DRAIN: Duration = Duration::from_secs(10);

fn main() -> Exit {
    memory::limit_arenas();
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
    let out = &mut io::stdout();
    match command {
        Command::Run(args) => return run(&args),
        Command::Doctor(args) => return process::runtime()?.block_on(doctor::run(&args, out)),
        Command::Observe(args) => return observe::run(&args),
        Command::Oom(args) => reports::oom(&args, out)?,
        Command::Pressure(args) => reports::pressure(&args, out)?,
        Command::Bench(args) => bench::run(&args)?,
        Command::Config(command) => config::run(command, out)?,
        Command::Version(args) => version::run(args, out)?,
        Command::Completions(args) => docs::completions(&args, out)?,
        Command::Man(args) => docs::man(&args, out)?,
    }
    Ok(Exit::Success)
}

/// Runs the node agent until a signal.
fn run(args: &RunArgs) -> anyhow::Result<Exit> {
    if let Some(version) = &args.version {
        println!("Kubernetes {version}");
        return Ok(Exit::Success);
    }
    let settings = load(&args.flags)?;
    let runtime = process::runtime().context("cannot start the async runtime")?;
    let spans = wiring::spans(&settings, &runtime)?;
    let verbosity = logging::init(&settings.kubelet.logging, spans.as_ref().map(Spans::layer))?;
    // The name of the line that a kubelet logs since 1.37: upstream's tests search the log for it.
    tracing::info!(config = %settings.logged(), "Effective KubeletConfiguration");
    tracing::debug!(flags = ?settings.flag_values(), "effective flags");
    settings.check_supported()?;
    settings.check_host(&host::facts())?;
    host::check_tunables(&settings)?;
    for notice in settings.notices() {
        tracing::warn!("{notice}");
    }
    let outcome = runtime.block_on(until_signalled(settings, verbosity));
    spans.into_iter().for_each(Spans::end);
    runtime.shutdown_background();
    outcome.map(|()| Exit::Success)
}

/// Runs the agent; after a signal its parts have [`DRAIN`] to stop.
async fn until_signalled(settings: Settings, verbosity: logging::Verbosity) -> anyhow::Result<()> {
    let shutdown = process::shutdown().context("cannot wait for signals")?;
    let agent = wiring::run(settings, verbosity, shutdown.clone());
    let overdue = async {
        shutdown.cancelled().await;
        systemd::stopping();
        tokio::time::sleep(DRAIN).await;
    };
    tokio::select! {
        // First, so that the error is reported before the agent ends.
        biased;
        () = overdue => bail!("some task did not end within {DRAIN:?}"),
        ended = agent => ended,
    }
}
