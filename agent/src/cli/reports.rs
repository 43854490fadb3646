//! `keblet oom` and `keblet pressure`: what `keblet observe` shows, once, as a table or as JSON lines.

use std::io::Write;
use std::time::Duration;

use anyhow::Context as _;

use super::observe;
use super::observe::Source;
use super::output;
use crate::observe::record::Line;
use crate::observe::record::Record;
use crate::observe::report;
use crate::observe::state::ObservedNode;

/// Time between the two measurements of `keblet pressure`, from which stalls are concluded.
const WINDOW: Duration = Duration::from_secs(2);

/// `keblet oom`, `keblet pressure`
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    source: Source,
    /// Print JSON lines, as `keblet observe --json` does
    #[arg(long)]
    json: bool,
}

/// Reports past OOM kills, from the counters of cgroups and the runtime's dead containers.
///
/// # Errors
/// The node cannot be observed, or the output cannot be written.
pub fn oom(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let node = observe::once(&args.source, WINDOW, 1)?;
    print_oom(&node, args.json, out).context("cannot print the report")
}

/// Reports the pressure of the node and its pods, and which pods stall which. Takes two seconds.
///
/// # Errors
/// The node cannot be observed, or the output cannot be written.
pub fn pressure(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let node = observe::once(&args.source, WINDOW, 2)?;
    print_pressure(&node, args.json, out).context("cannot print the report")
}

fn print_oom(node: &ObservedNode, json: bool, out: &mut dyn Write) -> anyhow::Result<()> {
    if json {
        let kills = node.oom_kills.iter().map(|(time, oom)| Line::new(*time, Record::Oom(oom.clone())));
        return lines(kills, out);
    }
    write!(out, "{}", report::lacks(node))?;
    if node.oom_kills.is_empty() {
        writeln!(out, "No OOM kill is known: neither the cgroups of pods nor dead containers show one.")?;
        return Ok(());
    }
    output::table(out, &report::oom_table(node))?;
    Ok(())
}

fn print_pressure(node: &ObservedNode, json: bool, out: &mut dyn Write) -> anyhow::Result<()> {
    if json {
        let pods = node.pods.values().filter_map(|pod| pod.pressure.clone());
        let pressure = pods.chain(node.pressure.clone()).map(Record::Pressure);
        let stalls = node.current_stalls().into_iter().cloned().map(Record::Stall);
        return lines(pressure.chain(stalls).map(|record| Line::new(node.now, record)), out);
    }
    write!(out, "{}", report::lacks(node))?;
    output::table(out, &report::pressure_table(node))?;
    let stalls = report::stalls(node);
    writeln!(out)?;
    if stalls.is_empty() {
        writeln!(out, "No pod waits noticeably.")?;
    }
    stalls.iter().try_for_each(|stall| writeln!(out, "{stall}"))?;
    Ok(())
}

fn lines(lines: impl Iterator<Item = Line>, out: &mut dyn Write) -> anyhow::Result<()> {
    for line in lines {
        writeln!(out, "{}", serde_json::to_string(&line)?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::record::samples;

    type Print = fn(&ObservedNode, bool, &mut dyn Write) -> anyhow::Result<()>;

    fn printed(print: Print, node: &ObservedNode, json: bool) -> String {
        let mut out = Vec::new();
        print(node, json, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn tables_are_for_people() {
        let node = samples::node();
        let oom = printed(print_oom, &node, false);
        assert!(oom.starts_with("! runtime-events down: ") && oom.contains("\nTIME    POD "), "{oom}");
        assert_eq!(oom.lines().count(), 5);
        let pressure = printed(print_pressure, &node, false);
        assert!(pressure.contains("\nnode ") && pressure.contains("\nshop/cart-7d9f waits for memory"), "{pressure}");
        let nothing = ObservedNode::default();
        assert!(printed(print_oom, &nothing, false).starts_with("No OOM kill is known"));
        assert!(printed(print_pressure, &nothing, false).ends_with("No pod waits noticeably.\n"));
    }

    #[test]
    fn lines_are_those_of_observe() {
        let node = samples::node();
        for (print, kinds) in [(print_oom as Print, vec!["oom"]), (print_pressure, vec!["pressure", "stall"])] {
            let text = printed(print, &node, true);
            let lines: Vec<Line> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            assert!(lines.len() >= 3, "{text}");
            for line in text.lines() {
                assert!(kinds.iter().any(|kind| line.contains(&format!("\"kind\":\"{kind}\""))), "{line}");
            }
        }
    }
}
