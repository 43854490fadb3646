//! Formats lines for the terminal: columns and colours.

use std::io::IsTerminal as _;
use std::time::Instant;

use serde_json::Value;

use super::event::Event;
use super::observed::ObservedState;
use super::steps::DemoStep;

/// Writes lines to standard output.
pub(super) struct Screen {
    start: Instant,
    colours: bool,
    verbose: bool,
}

const GREEN: &str = "32";
const RED: &str = "31";
const YELLOW: &str = "33";
const CYAN: &str = "36";
const DIM: &str = "2";

impl Screen {
    /// Times are printed relative to this moment.
    pub(super) fn new(verbose: bool) -> Self {
        Self { start: Instant::now(), colours: std::io::stdout().is_terminal(), verbose }
    }

    /// Prints the head of the table of events.
    pub(super) fn started(&self, pid: u32, endpoint: &str) {
        println!("\nkeblet runs as process {pid} on {endpoint}");
        println!("latency is the time since the kernel's timestamp\n");
        let head = format!(
            "{:>8}  {:<8} {:<8} {:<18} {:<8} {:>10}  {}",
            "seconds", "pod", "container", "event", "source", "latency", ""
        );
        println!("{}", self.paint(DIM, head.trim_end()));
    }

    /// Prints an event.
    pub(super) fn event(&self, event: &Event) {
        let latency = event.latency_ms.map_or_else(|| "-".to_owned(), |latency| format!("{latency:.1} ms"));
        let mut detail = Vec::new();
        detail.extend(event.exit_code.map(|code| format!("exit code {code}")));
        detail.extend(event.victim.as_ref().map(|victim| format!("victim {victim}")));
        let colour = match event.kind.as_str() {
            "OomKilled" => RED,
            "ContainerDied" => YELLOW,
            "ContainerStarted" => GREEN,
            _ => DIM,
        };
        let container = if event.container.is_empty() { "(sandbox)" } else { &event.container };
        println!(
            "{:>8.3}  {:<8} {container:<9} {} {:<8} {latency:>10}  {}",
            self.start.elapsed().as_secs_f64(),
            event.pod_name(),
            self.paint(colour, &format!("{:<17}", event.kind)),
            event.source,
            detail.join(", "),
        );
    }

    /// Prints a line of the agent's log that is not an event.
    pub(super) fn other(&self, line: &str) {
        if !self.verbose {
            return;
        }
        let level =
            serde_json::from_str::<Value>(line).ok().and_then(|record| record["level"].as_str().map(str::to_owned));
        if matches!(level.as_deref(), None | Some("WARN" | "ERROR")) {
            println!("{}", self.paint(DIM, line));
        }
    }

    /// Prints an action or a finding of the demo.
    pub(super) fn note(&self, step: &str, text: &str) {
        let seconds = self.start.elapsed().as_secs_f64();
        println!("{seconds:>8.3}  {step:<8} {}", self.paint(CYAN, text));
    }

    /// Prints the results.
    pub(super) fn summary(&self, steps: &[DemoStep], observed: &ObservedState) {
        println!("\n{:<7} {:<42} {:<10} proof", "step", "what is shown", "result");
        for step in steps {
            let (result, proof) = step.result(observed);
            let colour = if result == "ok" { GREEN } else { RED };
            println!("{:<7} {:<42} {} {proof}", step.name, step.title, self.paint(colour, &format!("{result:<10}")));
        }
        let kernel: Vec<f64> = observed
            .events
            .iter()
            .filter(|event| event.source == "kernel")
            .filter_map(|event| event.latency_ms)
            .collect();
        let slowest = kernel.iter().copied().fold(0.0, f64::max);
        let seconds = self.start.elapsed().as_secs_f32();
        println!(
            "\n{} events in {seconds:.1} s, {} of them from the kernel{}",
            observed.events.len(),
            kernel.len(),
            if kernel.is_empty() { String::new() } else { format!(", none later than {slowest:.1} ms") },
        );
    }

    fn paint(&self, colour: &str, text: &str) -> String {
        if self.colours { format!("\u{1b}[{colour}m{text}\u{1b}[0m") } else { text.to_owned() }
    }
}
