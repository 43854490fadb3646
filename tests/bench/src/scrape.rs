//! CPU time that an agent takes to answer a scrape: with all its pods running, what a monitoring system reads of it.
//!
//! Scrapes are further apart than an agent may keep its measurements, so that each of them measures.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::Context as _;

use super::agent::Agent;
use super::metric::Metric;
use super::results::Results;
use super::results::Series;

/// Paths that are scraped, and the metric of each.
const PATHS: [(&str, Metric); 4] = [
    ("metrics", Metric::ScrapeMetrics),
    ("metrics/cadvisor", Metric::ScrapeCadvisor),
    ("metrics/resource", Metric::ScrapeResource),
    ("stats/summary", Metric::ScrapeSummary),
];
/// Scrapes of each path.
const ROUNDS: usize = 4;
/// Time between two scrapes.
const APART: Duration = Duration::from_secs(11);
/// Time for work that goes on after the answer.
const SETTLE: Duration = Duration::from_millis(200);

/// Scrapes every path several times.
///
/// # Errors
/// The agent exited, or its threads cannot be observed. A path that it does not serve is left out.
pub(crate) async fn measure(results: &mut Results, participant: &str, agent: &Agent) -> anyhow::Result<()> {
    let mut spent: Vec<Vec<f64>> = vec![Vec::new(); PATHS.len()];
    for _ in 0..ROUNDS {
        for ((path, _), spent) in PATHS.iter().zip(&mut spent) {
            tokio::time::sleep(APART).await;
            let before = threads(agent.pid())?;
            match agent.scrape(path).await {
                Ok(bytes) => tracing::debug!(participant, path, bytes, "scraped"),
                Err(error) => {
                    tracing::warn!(participant, path, %error, "cannot be scraped");
                    continue;
                }
            }
            tokio::time::sleep(SETTLE).await;
            spent.push(seconds(&before, &threads(agent.pid())?));
        }
    }
    for ((_, metric), values) in PATHS.into_iter().zip(spent) {
        if !values.is_empty() {
            results.add(metric, participant, Series::Values(values));
        }
    }
    Ok(())
}

/// CPU time of each thread of a process in nanoseconds, by thread id.
fn threads(pid: u32) -> anyhow::Result<HashMap<String, u64>> {
    let folder = format!("/proc/{pid}/task");
    let entries = std::fs::read_dir(&folder).with_context(|| format!("cannot read {folder}"))?;
    let time = |entry: std::fs::DirEntry| {
        // A thread that has just ended has no file any more.
        let text = std::fs::read_to_string(entry.path().join("schedstat")).ok()?;
        Some((entry.file_name().to_string_lossy().into_owned(), text.split(' ').next()?.parse().ok()?))
    };
    Ok(entries.flatten().filter_map(time).collect())
}

/// What the threads have used between two readings; a new thread has used all of its time in between.
fn seconds(before: &HashMap<String, u64>, after: &HashMap<String, u64>) -> f64 {
    let used = after.iter().map(|(id, now)| now.saturating_sub(before.get(id).copied().unwrap_or(0)));
    used.sum::<u64>() as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_of_old_and_new_threads() {
        let times = |list: &[(&str, u64)]| list.iter().map(|(id, time)| ((*id).to_owned(), *time)).collect();
        let before: HashMap<String, u64> = times(&[("1", 5_000_000), ("2", 1)]);
        let after = times(&[("1", 7_000_000), ("3", 500_000)]);
        assert_eq!(seconds(&before, &after), 0.0025);
        let own = threads(std::process::id()).unwrap();
        assert!(own.values().sum::<u64>() > 0, "{own:?}");
    }
}
