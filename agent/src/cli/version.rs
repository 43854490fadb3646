//! `keblet version`.

use std::io::Write;

use serde_json::json;

use super::output;
use super::output::Format;

pub use crate::model::KUBERNETES;

/// keblet's own version.
pub const KEBLET: &str = env!("CARGO_PKG_VERSION");

/// `keblet version`
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Args {
    /// How to write the answer
    #[arg(long, short, value_enum, default_value_t)]
    output: Format,
}

/// Prints the version.
///
/// # Errors
/// The output cannot be written.
pub fn run(args: Args, out: &mut dyn Write) -> anyhow::Result<()> {
    match args.output {
        Format::Text => writeln!(out, "keblet {KEBLET}\nKubernetes {KUBERNETES}")?,
        Format::Json => output::json(out, &json!({ "keblet": KEBLET, "kubernetes": KUBERNETES }))?,
    }
    Ok(())
}
