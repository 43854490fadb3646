//! `keblet completions` and `keblet man`.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::CommandFactory;

use super::Cli;

/// `keblet completions`
#[derive(Clone, Debug, clap::Args)]
pub struct CompletionsArgs {
    /// For which shell
    #[arg(value_enum)]
    shell: clap_complete::Shell,
}

/// `keblet man`
#[derive(Clone, Debug, clap::Args)]
pub struct ManArgs {
    /// Write one page per command into this folder instead
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
}

/// Prints completions.
///
/// # Errors
/// The output cannot be written.
pub fn completions(args: &CompletionsArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "keblet", &mut script);
    out.write_all(&script).context("cannot print the completions")
}

/// Prints the manual page, or writes all pages.
///
/// # Errors
/// The output or a file cannot be written.
pub fn man(args: &ManArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    match &args.output {
        Some(folder) => {
            std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
            clap_mangen::generate_to(Cli::command(), folder)
                .with_context(|| format!("cannot write the manual pages into {}", folder.display()))
        }
        None => clap_mangen::Man::new(Cli::command()).render(out).context("cannot print the manual page"),
    }
}
