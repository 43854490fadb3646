//! Reports: JSON of each run, and the merged figures of all runs as JSON, Markdown and HTML.
//!
//! ```text
//!  Results of a run ─▶ RunDocument (run<N>.json) ─┐
//!                                  more of them ──┴▶ Merged ─▶ .json · .md · terminal
//!  Results of all runs, pooled ────────────────────────────▶ .html with the distributions
//! ```

mod html;
mod merged;
mod plot;
mod run;
mod table;

use std::path::Path;
use std::path::PathBuf;
use std::time::SystemTime;

use anyhow::Context as _;
use anyhow::bail;
use keblet_proto::cri::v1 as cri;
use serde::Deserialize;
use serde::Serialize;

use super::metric::Metric;
use super::metric::PodCounts;
use super::results::Results;
use merged::Merged;
use run::RunDocument;

/// The machine and the runtime of the figures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Environment {
    /// When the run began, RFC 3339.
    pub(crate) date: String,
    /// Version of the benchmark.
    pub(crate) keblet: String,
    /// Kernel release.
    pub(crate) kernel: String,
    /// Available processors.
    pub(crate) processors: usize,
    /// Name and version of the runtime.
    pub(crate) runtime: String,
}

impl Environment {
    /// The environment of this process with this runtime.
    ///
    /// # Errors
    /// The kernel's release or the number of processors cannot be read.
    pub(crate) fn read(runtime: cri::VersionResponse) -> anyhow::Result<Self> {
        let system = nix::sys::utsname::uname().context("cannot read the kernel's release")?;
        Ok(Self {
            date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            keblet: env!("CARGO_PKG_VERSION").to_owned(),
            kernel: system.release().to_string_lossy().into_owned(),
            processors: std::thread::available_parallelism().context("cannot count the processors")?.get(),
            runtime: format!("{} {}", runtime.runtime_name, runtime.runtime_version),
        })
    }

    /// A summary in one line.
    fn line(&self) -> String {
        let Self { date, keblet, kernel, processors, runtime } = self;
        format!("{date}, keblet {keblet}, {runtime}, Linux {kernel}, {processors} processors")
    }
}

/// Common properties of all runs of a session.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// Name of the benchmark, and of the report's files.
    pub(crate) benchmark: &'static str,
    pub(crate) commit: String,
    /// Rows of the tables.
    pub(crate) participants: Vec<String>,
    /// Reference participants of the ratios.
    pub(crate) references: Vec<String>,
    pub(crate) counts: PodCounts,
    pub(crate) environment: Environment,
    pub(crate) output: PathBuf,
}

/// The finished runs of a session.
#[derive(Debug)]
pub(crate) struct Report {
    setup: Setup,
    runs: Vec<Results>,
}

impl Report {
    pub(crate) fn new(setup: Setup) -> Self {
        Self { setup, runs: Vec::new() }
    }

    /// Adds a run and writes its JSON, so that it is kept if a later run fails.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn add_run(&mut self, results: Results) -> anyhow::Result<()> {
        self.runs.push(results);
        let number = self.runs.len();
        let document = self.document(number - 1);
        let name = format!("{}-run{number}.json", self.setup.benchmark);
        write(&self.setup.output, &name, &serde_json::to_string_pretty(&document)?)
    }

    /// Prints the figures of all runs and writes the files.
    ///
    /// # Errors
    /// A file cannot be written, or a measurement failed.
    pub(crate) fn conclude(&self) -> anyhow::Result<()> {
        let documents: Vec<_> = (0..self.runs.len()).map(|index| self.document(index)).collect();
        let merged = Merged::of(&documents)?;
        write_merged(&merged, &self.setup.output)?;
        write(&self.setup.output, &format!("{}.html", self.setup.benchmark), &html::render(self)?)?;
        match self.runs.iter().map(|run| run.failures.len()).sum() {
            0 => Ok(()),
            failures => bail!("{failures} failures, see above"),
        }
    }

    fn document(&self, index: usize) -> RunDocument {
        RunDocument::new(&self.setup, &self.runs[index])
    }

    /// The pooled values of all runs.
    fn pooled(&self) -> Results {
        let mut pooled = Results::default();
        self.runs.iter().for_each(|run| pooled.pool(run));
        pooled
    }
}

/// Merges the JSON of several runs, of one session or several, into one report.
///
/// # Errors
/// A file is not the JSON of a run, or the runs are of different benchmarks or pod counts.
pub fn merge(files: &[PathBuf], output: &Path) -> anyhow::Result<()> {
    let read = |file: &PathBuf| -> anyhow::Result<RunDocument> {
        let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{} is not the JSON of a run", file.display()))
    };
    let documents = files.iter().map(read).collect::<anyhow::Result<Vec<_>>>()?;
    write_merged(&Merged::of(&documents)?, output)
}

fn write_merged(merged: &Merged, output: &Path) -> anyhow::Result<()> {
    let text = table::render(merged);
    print!("{text}");
    write(output, &format!("{}.md", merged.benchmark), &text)?;
    write(output, &format!("{}.json", merged.benchmark), &serde_json::to_string_pretty(merged)?)
}

fn write(folder: &Path, name: &str, text: &str) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let path = folder.join(name);
    let text = format!("{}\n", text.trim_end());
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    println!("wrote {}", path.display());
    Ok(())
}

/// The metrics that have values, in the order of the report.
fn measured<'a>(results: &'a Results, participants: &'a [String]) -> impl Iterator<Item = Metric> + 'a {
    let has = |metric: &Metric| participants.iter().any(|participant| results.get(*metric, participant).is_some());
    Metric::ALL.into_iter().filter(has)
}

#[cfg(test)]
mod tests {
    use super::super::results::Series;
    use super::*;

    pub(super) fn results(restart: [f64; 3]) -> Results {
        let mut results = Results::default();
        results.add(Metric::ExitToRestarted, "bare client", Series::Values(vec![0.066, 0.068, 0.110]));
        results.add(Metric::ExitToRestarted, "keblet", Series::Values(restart.to_vec()));
        results.add(Metric::ExitToNoticed, "keblet", Series::Buckets(vec![(0.001, 19), (f64::INFINITY, 1)]));
        results.add(Metric::IdleAgentCpu, "bare client", Series::Values(vec![0.0]));
        results.add(Metric::IdleAgentCpu, "keblet", Series::Values(vec![0.05]));
        results
    }

    pub(super) fn setup(output: &Path) -> Setup {
        Setup {
            benchmark: "pleg",
            commit: "abc".to_owned(),
            references: vec!["bare client".to_owned()],
            participants: ["bare client", "keblet"].map(str::to_owned).to_vec(),
            environment: Environment {
                date: "2026-01-01T00:00:00Z".to_owned(),
                keblet: "0.1.0".to_owned(),
                kernel: "6.1.0".to_owned(),
                processors: 2,
                runtime: "containerd 1.7.24".to_owned(),
            },
            counts: PodCounts { pods: 20, idle: 20 },
            output: output.to_owned(),
        }
    }

    #[test]
    fn runs_are_written_at_once_and_can_be_merged_later() {
        let folder = tempfile::tempdir().unwrap();
        let mut report = Report::new(setup(folder.path()));
        report.add_run(results([0.070, 0.072, 0.300])).unwrap();
        report.add_run(results([0.080, 0.082, 0.200])).unwrap();
        report.conclude().unwrap();
        let together = std::fs::read_to_string(folder.path().join("pleg.json")).unwrap();

        let later = tempfile::tempdir().unwrap();
        let files = ["pleg-run1.json", "pleg-run2.json"].map(|name| folder.path().join(name));
        merge(&files, later.path()).unwrap();
        assert_eq!(std::fs::read_to_string(later.path().join("pleg.json")).unwrap(), together);
        assert!(merge(&[folder.path().join("pleg.json")], later.path()).is_err(), "not the JSON of a run");
    }

    #[test]
    fn failures_fail_the_report() {
        let folder = tempfile::tempdir().unwrap();
        let mut report = Report::new(setup(folder.path()));
        let mut run = results([0.070, 0.072, 0.300]);
        run.failures.push("keblet: crash: a pod ran twice".to_owned());
        report.add_run(run).unwrap();
        assert!(report.conclude().is_err());
        let text = std::fs::read_to_string(folder.path().join("pleg.md")).unwrap();
        assert!(text.contains("a pod ran twice"), "{text}");
    }
}
