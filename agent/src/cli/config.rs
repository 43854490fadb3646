//! `keblet config check` and `keblet config explain`.

use std::io::Write;
use std::path::Path;

use serde_json::Value;
use serde_json::json;

use super::endpoints::Endpoints;
use super::host;
use super::output;
use super::output::Format;
use super::run_args::RunArgs;
use crate::config::ConfigError;
use crate::config::Settings;
use crate::config::explain;
use crate::config::explain::Row;
use crate::config::load;
use crate::server::secure;

/// The subcommands of `keblet config`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Check whether files and flags are valid, also for this machine
    Check(CheckArgs),
    /// Show the values that were set, where, and what has no effect
    Explain(ExplainArgs),
}

/// `keblet config check`
#[derive(Debug, clap::Args)]
pub struct CheckArgs {
    /// Skip the checks of this machine
    #[arg(long)]
    ignore_host: bool,
    #[command(flatten)]
    run: RunArgs,
}

/// `keblet config explain`
#[derive(Debug, clap::Args)]
pub struct ExplainArgs {
    /// Show defaults too
    #[arg(long)]
    all: bool,
    /// How to write the answer
    #[arg(long, short, value_enum, default_value_t)]
    output: Format,
    #[command(flatten)]
    run: RunArgs,
}

/// Runs a subcommand.
///
/// # Errors
/// A configuration that is not acceptable; the output cannot be written.
pub fn run(command: Command, out: &mut dyn Write) -> anyhow::Result<()> {
    match command {
        Command::Check(args) => check(&args, out),
        Command::Explain(args) => {
            let settings = load(&args.run.flags)?;
            match args.output {
                Format::Text => explain_text(&settings, args.all, out),
                Format::Json => explain_json(&settings, args.all, out),
            }
        }
    }
}

fn check(args: &CheckArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let settings = load(&args.run.flags)?;
    let endpoints = Endpoints::choose(&settings, Path::new("/"));
    let mut checks = vec![settings.check_supported(), endpoints.map(drop), secure::check_tls(&settings)];
    if !args.ignore_host {
        checks.extend([
            settings.check_host(&host::facts()),
            host::check_tunables(&settings),
            host::check_reservations(&settings),
        ]);
    }
    ConfigError::together(checks)?;
    for notice in settings.notices() {
        writeln!(out, "note: {notice}")?;
    }
    writeln!(out, "The configuration is acceptable.")?;
    Ok(())
}

/// What is shown: all rows, or those that were set.
fn shown(settings: &Settings, all: bool) -> Vec<Row> {
    explain::rows(settings).into_iter().filter(|row| all || row.set).collect()
}

fn explain_json(settings: &Settings, all: bool, out: &mut dyn Write) -> anyhow::Result<()> {
    let gates: Vec<Value> =
        settings.gates.named().map(|(gate, on)| json!({ "name": gate.spec().name, "enabled": on })).collect();
    let answer = json!({ "fields": shown(settings, all), "featureGates": gates, "notices": settings.notices() });
    output::json(out, &answer)
}

fn explain_text(settings: &Settings, all: bool, out: &mut dyn Write) -> anyhow::Result<()> {
    let rows = shown(settings, all);
    let mut document = "";
    let mut cells: Vec<[String; 4]> = Vec::new();
    for row in &rows {
        if row.document != document {
            flush(&mut cells, document, out)?;
            document = row.document;
        }
        let remark = row.remark().unwrap_or_default();
        cells.push([format!("  {}", row.field), text(&row.value), row.origin.clone(), remark]);
    }
    flush(&mut cells, document, out)?;
    if rows.is_empty() {
        writeln!(out, "Nothing is set; every value is a default (--all shows them).")?;
    }
    if !settings.notices().is_empty() {
        writeln!(out, "\nnotes")?;
        for notice in settings.notices() {
            writeln!(out, "  {notice}")?;
        }
    }
    Ok(())
}

fn flush(cells: &mut Vec<[String; 4]>, document: &str, out: &mut dyn Write) -> anyhow::Result<()> {
    if !cells.is_empty() {
        writeln!(out, "{document}")?;
        output::table(out, cells)?;
        cells.clear();
    }
    Ok(())
}

/// A value as one would write it: strings bare unless empty, everything else as JSON.
fn text(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) if !text.is_empty() => text.clone(),
        other => other.to_string(),
    }
}
