//! `cargo xtask layout`: finds out which functions a running agent needs, so that they lie side by side.
//!
//! ```text
//! release with symbols ─▶ standalone, traced              ─▶ functions called ─┐
//!            └──────────▶ as node of a cluster, traced ─▶ those beside them ─┴▶ agent/layout/called.txt ─▶ agent/build.rs
//! ```
//! The kernel maps a program in pieces of 16 pages. With needed functions strewn over the whole program, nearly all of it
//! becomes resident; side by side it is half. The list holds names without hashes, so that it outlives other versions of
//! crates and compiler; a name that exists no more is ignored. To be made anew when much has changed.

mod names;
pub mod trace;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::process::ExitCode;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;

use crate::cluster;
use crate::interrupt::Interrupt;
use crate::paths;
use crate::progress::step;
use crate::run;
use crate::setup;
use crate::system;

/// An agent starts, runs pods and idles.
const STANDALONE: [&str; 8] = ["--workload", "idle", "--pods", "30", "--idle-time", "30s", "--column", "evented"];
/// The same as a node, which loses them, too.
const IN_CLUSTER: [&str; 10] =
    ["--workload", "idle", "--workload", "burst", "--rounds", "1", "--idle-time", "30s", "--column", "keblet"];

/// Makes the list anew.
pub fn layout() -> Result<ExitCode> {
    let folder = paths::target().join("layout");
    let (alone, in_cluster) = (folder.join("standalone"), folder.join("cluster"));
    let agent = release_with_symbols(&folder)?;
    let called = trace_alone(&agent, &stage_tracer(&alone)?).and_then(|()| merge(&alone))?;
    let beside = trace_in_cluster(&agent, &stage_tracer(&in_cluster)?).and_then(|()| merge(&in_cluster))?;
    let text = list(&called, &beside);
    let file = paths::repository().join("agent/layout/called.txt");
    fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
    println!("{}: {} functions", file.display(), called.union(&beside).count());
    Ok(ExitCode::SUCCESS)
}

/// The functions in two groups: an agent on its own is not to have those of a node between its own.
fn list(alone: &BTreeSet<String>, in_cluster: &BTreeSet<String>) -> String {
    let lines = |names: &mut dyn Iterator<Item = &String>| names.map(|name| format!("{name}\n")).collect::<String>();
    let (first, then) = (lines(&mut alone.iter()), lines(&mut in_cluster.difference(alone)));
    format!("# standalone\n{first}# as the node of a cluster\n{then}")
}

fn trace_alone(agent: &Path, traced: &Path) -> Result<()> {
    let interrupt = Interrupt::install()?;
    let cache = setup::prepare()?;
    run::build_supervisor()?;
    let mut containerd = run::start(&cache, None)?;
    let mut words: Vec<OsString> = ["bench", "pleg", "--runtime-endpoint"].map(OsString::from).into();
    words.push(containerd.endpoint().into());
    let mut environment = run::environment(&containerd);
    scene(&mut words, &mut environment, &STANDALONE, agent, traced);
    let result = run::command(agent.as_os_str(), &words, &environment, &mut containerd, &interrupt);
    step("removing pods and runtime", || containerd.stop())?;
    // What it measures says nothing of a traced agent.
    result.map(drop)
}

fn trace_in_cluster(agent: &Path, traced: &Path) -> Result<()> {
    let code = cluster::without_node(|stage, interrupt| {
        let mut words: Vec<OsString> = ["bench", "cluster"].map(OsString::from).into();
        words.extend(stage.benchmark_arguments());
        let mut environment = stage.environment();
        scene(&mut words, &mut environment, &IN_CLUSTER, agent, traced);
        run::command(agent.as_os_str(), &words, &environment, stage.containerd(), interrupt)
    });
    code.map(drop)
}

/// What a benchmark is to do, and with whom.
fn scene(
    words: &mut Vec<OsString>,
    environment: &mut Vec<(&'static str, OsString)>,
    scene: &[&str],
    agent: &Path,
    traced: &Path,
) {
    words.extend(scene.iter().map(OsString::from));
    // What a traced agent is measured at is of no use, and stays out of the way.
    words.extend(["--agent".into(), traced.into(), "--output".into(), traced.with_file_name("report").into()]);
    environment.push((trace::PROGRAM, agent.into()));
}

/// A release as ever, but with the names of its functions.
fn release_with_symbols(folder: &Path) -> Result<PathBuf> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let mut cargo = Command::new(paths::cargo());
    cargo.args(["rustc", "--quiet", "--release", "--package", "keblet", "--bin", "keblet", "--", "-Cstrip=none"]);
    cargo.current_dir(paths::repository());
    step("building a release with symbols (minutes)", || system::quiet(&mut cargo))?;
    let (built, kept) = (paths::target().join("release/keblet"), folder.join("keblet"));
    fs::copy(&built, &kept).with_context(|| format!("cannot copy {} to {}", built.display(), kept.display()))?;
    Ok(kept)
}

/// This program under the name by which it traces, in an empty folder for what it finds.
fn stage_tracer(folder: &Path) -> Result<PathBuf> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let (own, traced) = (std::env::current_exe().context("cannot find this program")?, folder.join(trace::NAME));
    std::os::unix::fs::symlink(&own, &traced).with_context(|| format!("cannot create {}", traced.display()))?;
    Ok(traced)
}

/// The patterns of all functions that any of the agents called.
///
/// # Errors
/// No agent called any: it was not traced.
fn merge(folder: &Path) -> Result<BTreeSet<String>> {
    let mut all = BTreeSet::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == trace::EXTENSION) {
            let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            all.extend(text.lines().map(names::pattern));
        }
    }
    if all.is_empty() {
        bail!("no call of any function was seen in {}", folder.display());
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_any_agent_called_is_listed_once() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("1.calls"), "_RNvCsabc_1a1x\nmalloc\n").unwrap();
        fs::write(folder.path().join("2.calls"), "free\n_RNvCsdef_1a1x\nmalloc\n").unwrap();
        fs::write(folder.path().join("else"), "nothing\n").unwrap();
        let called: Vec<_> = merge(folder.path()).unwrap().into_iter().collect();
        assert_eq!(called, ["_RNvCs*_1a1x", "free", "malloc"]);
        let nothing = tempfile::tempdir().unwrap();
        assert!(merge(nothing.path()).unwrap_err().to_string().contains("no call"));
    }

    #[test]
    fn what_an_agent_needs_on_its_own_comes_first() {
        let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let text = list(&set(&["b", "c"]), &set(&["a", "c", "d"]));
        assert_eq!(text, "# standalone\nb\nc\n# as the node of a cluster\na\nd\n");
    }
}
