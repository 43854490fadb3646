//! The one program of the test images.
//!
//! Runs, exits, exhausts memory, thrashes, executes commands, serves HTTP or leaves an orphan, as a container of tests, the demo or the benchmark.
//! Writes timestamps of the monotonic clock, so that latency is measured by the containers themselves.

mod arguments;
mod memory;
mod obey;
mod process;
mod random;
mod stamp;
mod thrash;
mod web;

use std::process::ExitCode;

use arguments::Action;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_none_or(|first| first == "--help" || first == "help") {
        print!("{}", arguments::HELP);
        return ExitCode::SUCCESS;
    }
    let action = match Action::parse(&arguments) {
        Ok(action) => action,
        Err(reason) => {
            eprintln!("probe: {reason}\n\n{}", arguments::HELP);
            return ExitCode::from(64);
        }
    };
    match perform(action) {
        Ok(code) => ExitCode::from(code),
        Err(reason) => {
            eprintln!("probe: {reason}");
            ExitCode::from(70)
        }
    }
}

fn perform(action: Action) -> Result<u8, String> {
    process::block_signals()?;
    match action {
        Action::Run { stamp } => process::run(&stamp),
        Action::Exit(exit) => process::exit(&exit),
        Action::Oom(oom) => memory::exhaust(&oom),
        Action::Grow { speed, first } => memory::grow(speed, first),
        Action::Thrash { file, leave } => thrash::thrash(&file, leave),
        Action::Obey { commands } => obey::execute(&commands),
        Action::Web(web) => web::serve(&web),
        Action::ForkExit => process::fork_and_exit(),
    }
}
