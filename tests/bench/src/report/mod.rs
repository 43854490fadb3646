//! What a run found: on the terminal, as JSON, as one HTML page.

mod html;
mod json;
mod plot;
mod table;

use std::path::PathBuf;
use std::time::SystemTime;

use anyhow::Context as _;
use keblet_proto::cri::v1 as cri;
use serde::Serialize;

use super::results::Metric;
use super::results::Results;
use super::targets;

/// Figures without this are worth nothing.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Environment {
    /// When the run began, RFC 3339.
    pub(super) date: String,
    /// Version of the measuring keblet.
    pub(super) keblet: &'static str,
    /// Kernel release.
    pub(super) kernel: String,
    /// Processors that may be used.
    pub(super) processors: usize,
    /// Name and version of the runtime.
    pub(super) runtime: String,
}

impl Environment {
    /// Of this machine, with this runtime.
    pub(super) fn read(runtime: cri::VersionResponse) -> anyhow::Result<Self> {
        let system = nix::sys::utsname::uname().context("cannot read the kernel's release")?;
        Ok(Self {
            date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            keblet: env!("CARGO_PKG_VERSION"),
            kernel: system.release().to_string_lossy().into_owned(),
            processors: std::thread::available_parallelism().context("cannot count the processors")?.get(),
            runtime: format!("{} {}", runtime.runtime_name, runtime.runtime_version),
        })
    }

    /// In one line.
    pub(super) fn line(&self) -> String {
        let Self { date, keblet, kernel, processors, runtime } = self;
        format!("{date}, keblet {keblet}, {runtime}, Linux {kernel}, {processors} processors")
    }
}

/// A finished run.
#[derive(Debug)]
pub(super) struct Report {
    /// The benchmark's name, as the command line has it.
    pub(super) name: &'static str,
    /// Columns that all others are compared with.
    pub(super) references: Vec<String>,
    pub(super) environment: Environment,
    pub(super) columns: Vec<String>,
    pub(super) pods: u32,
    pub(super) idle_pods: u32,
    pub(super) rounds: u32,
    /// A missed target is an error.
    pub(super) check: bool,
    pub(super) output: PathBuf,
    pub(super) results: Results,
}

impl Report {
    /// Every promise was kept and nothing went wrong.
    pub(super) fn is_good(&self) -> bool {
        self.results.failures.is_empty() && targets::judge(&self.results).iter().all(targets::Verdict::is_kept)
    }

    /// The metrics that were measured.
    fn metrics(&self) -> impl Iterator<Item = Metric> {
        let measured = |metric: &Metric| self.columns.iter().any(|column| self.results.get(*metric, column).is_some());
        Metric::ALL.into_iter().filter(measured)
    }

    /// Heading of a metric's table.
    fn title(&self, metric: Metric) -> String {
        metric.title(if metric.is_single() { self.idle_pods } else { self.pods })
    }

    /// p50 of `column` over p50 of `floor`.
    fn ratio(&self, metric: Metric, column: &str, floor: &str) -> Option<f64> {
        let floor = self.results.summary(metric, floor)?.p50;
        let own = self.results.summary(metric, column)?.p50;
        (floor > 0.0).then_some(own / floor)
    }
}

/// Prints the tables and writes the files.
pub(super) fn write(report: &Report) -> anyhow::Result<()> {
    print!("{}", table::render(report));
    let folder = &report.output;
    std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    for (kind, text) in [("json", json::render(report)?), ("html", html::render(report)?)] {
        let path = folder.join(format!("{}.{kind}", report.name));
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        println!("written: {}", path.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::results::Series;
    use super::*;

    pub(super) fn report() -> Report {
        let mut results = Results::default();
        results.add(Metric::Restart, "event floor", Series::Values(vec![0.110, 0.111, 0.140]));
        results.add(Metric::Restart, "kernel floor", Series::Values(vec![0.066, 0.068, 0.110]));
        results.add(Metric::Restart, "evented", Series::Values(vec![0.070, 0.072, 0.300]));
        results.add(Metric::Notice, "evented", Series::Buckets(vec![(0.001, 19), (0.01, 1)]));
        results.add(Metric::IdleAgentCpu, "event floor", Series::Values(vec![0.0]));
        results.add(Metric::IdleAgentCpu, "evented", Series::Values(vec![0.05]));
        results.failures.push("evented: crash: <pod> ran twice".to_owned());
        Report {
            name: "pleg",
            references: ["kernel floor", "event floor"].map(str::to_owned).to_vec(),
            environment: Environment {
                date: "2026-01-01T00:00:00Z".to_owned(),
                keblet: "0.1.0",
                kernel: "6.1.0".to_owned(),
                processors: 2,
                runtime: "containerd 1.7.24".to_owned(),
            },
            columns: ["event floor", "kernel floor", "evented"].map(str::to_owned).to_vec(),
            pods: 20,
            idle_pods: 20,
            rounds: 1,
            check: false,
            output: PathBuf::new(),
            results,
        }
    }

    #[test]
    fn a_run_is_good_if_nothing_went_wrong_and_all_targets_are_met() {
        let mut bad = report();
        assert!(!bad.is_good());
        bad.results.failures.clear();
        assert!(!bad.is_good(), "the maximum is 2.7 times the floor's");
        bad.results = Results::default();
        assert!(bad.is_good());
    }

    #[test]
    fn ratios_compare_medians() {
        let report = report();
        let ratio = report.ratio(Metric::Restart, "evented", "kernel floor").unwrap();
        assert!((ratio - 72.0 / 68.0).abs() < 0.01, "{ratio}");
        assert_eq!(report.ratio(Metric::IdleAgentCpu, "evented", "event floor"), None, "nothing to divide by");
        assert_eq!(report.ratio(Metric::Chain, "evented", "event floor"), None);
    }
}
