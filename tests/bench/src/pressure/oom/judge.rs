//! Compares what the kernel did with what an agent reported. Pure.

use serde_json::Value;

use super::case::Case;
use super::case::Victim;
use crate::pressure::kernel_log::Kill;

/// keblet's log line of an OOM kill.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Report {
    pub(crate) pid: u32,
    pub(crate) pod: String,
    pub(crate) victim: String,
    pub(crate) scope: String,
    /// Whether a whole cgroup was killed.
    pub(crate) group: bool,
    /// When the line was read, in nanoseconds of CLOCK_MONOTONIC.
    pub(crate) seen: u64,
}

impl Report {
    /// Parses a line of the log; `None` for other lines.
    pub(crate) fn parse(line: &str, seen: u64) -> Option<Self> {
        let line: Value = serde_json::from_str(line).ok()?;
        let text = |field: &str| line[field].as_str().unwrap_or_default().to_owned();
        if line["event"] != "OomKilled" {
            return None;
        }
        Some(Self {
            pid: line["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok())?,
            pod: text("pod"),
            victim: text("victim"),
            scope: text("scope"),
            group: line["group"] == "chosen",
            seen,
        })
    }

    /// Its cell of the matrix.
    fn label(&self, case: &Case) -> String {
        // Names of static pods have the node's name as suffix.
        if !self.pod.contains(&case.name) {
            return format!("pod {}", self.pod);
        }
        let victim = if self.group { Victim::Group.name() } else { self.victim.as_str() };
        format!("{victim} / {}", self.scope)
    }
}

/// The row of a kill, and the column of what was reported of it: of one event, the first process.
pub(crate) fn verdict(case: &Case, kills: &[Kill], reports: &[Report]) -> (String, String) {
    let truth = format!("{} / {}", case.victim.name(), case.scope.name());
    let found = kills.iter().find_map(|kill| reports.iter().find(|report| report.pid == kill.pid));
    (truth, found.map_or_else(|| "not reported".to_owned(), |report| report.label(case)))
}

/// Checks that the kernel killed what the case is about; otherwise the case says nothing about the agent.
///
/// # Errors
/// It killed something else; the error names it.
pub(crate) fn as_planned(case: &Case, main: u32, kills: &[Kill]) -> Result<(), String> {
    let killed_main = kills.iter().any(|kill| kill.pid == main);
    let planned = match case.victim {
        Victim::Main => kills.len() == 1 && killed_main,
        Victim::Child | Victim::Exec => kills.len() == 1 && !killed_main,
        Victim::Group => kills.len() == 2 && killed_main,
    };
    if planned { Ok(()) } else { Err(format!("the kernel killed {kills:?}, the main process is {main}")) }
}

/// The row of a container's end, and the column of its reported reason.
pub(crate) fn reason(case: &Case, reported: Option<&str>) -> (String, String) {
    let truth = match case.victim {
        Victim::Main => "main process killed: OOMKilled",
        Victim::Group => "whole container killed: OOMKilled",
        Victim::Child => "child killed, exit 3 later: Error",
        Victim::Exec => "exec killed, exit 3 later: Error",
    };
    (truth.to_owned(), reported.unwrap_or("not reported").to_owned())
}

/// Whether a column is the right one of its row.
pub(crate) fn is_right(row: &str, column: &str) -> bool {
    row == column || row.rsplit_once(": ").is_some_and(|(_, expected)| expected == column)
}

#[cfg(test)]
mod tests {
    use super::super::case::Scope;
    use super::*;

    fn case(victim: Victim) -> Case {
        Case { name: "p-1".to_owned(), victim, scope: Scope::Pod, kills: 1 }
    }

    fn kill(pid: u32) -> Kill {
        Kill { at: 1, pid, comm: "probe".to_owned() }
    }

    const LINE: &str =
        r#"{"event":"OomKilled","pid":8,"pod":"default/p-1-node","victim":"child","scope":"pod","group":"single"}"#;

    #[test]
    fn verdicts_are_found_by_pid() {
        let report = Report::parse(LINE, 5).unwrap();
        let (row, column) = verdict(&case(Victim::Child), &[kill(8)], std::slice::from_ref(&report));
        assert_eq!((row.as_str(), column.as_str()), ("child / pod", "child / pod"));
        assert!(is_right(&row, &column));
        let (row, column) = verdict(&case(Victim::Exec), &[kill(8)], std::slice::from_ref(&report));
        assert!(!is_right(&row, &column));
        assert_eq!(verdict(&case(Victim::Child), &[kill(9)], &[report]).1, "not reported");
        let chosen = Report::parse(&LINE.replace("single", "chosen"), 5).unwrap();
        assert_eq!(verdict(&case(Victim::Group), &[kill(7), kill(8)], &[chosen]).1, "group / pod");
        let other = Report::parse(&LINE.replace("p-1", "q"), 5).unwrap();
        assert_eq!(verdict(&case(Victim::Child), &[kill(8)], &[other]).1, "pod default/q-node");
        assert_eq!(Report::parse(&LINE.replace("OomKilled", "ContainerDied"), 5), None);
    }

    #[test]
    fn unplanned_kills_are_recognised() {
        assert!(as_planned(&case(Victim::Main), 7, &[kill(7)]).is_ok());
        assert!(as_planned(&case(Victim::Child), 7, &[kill(7)]).is_err());
        assert!(as_planned(&case(Victim::Exec), 7, &[kill(8)]).is_ok());
        assert!(as_planned(&case(Victim::Group), 7, &[kill(8)]).is_err());
        assert!(as_planned(&case(Victim::Group), 7, &[kill(8), kill(7)]).is_ok());
    }

    #[test]
    fn an_ordinary_exit_is_no_oom_kill() {
        let (row, column) = reason(&case(Victim::Child), Some("OOMKilled"));
        assert!(!is_right(&row, &column));
        let (row, column) = reason(&case(Victim::Exec), Some("Error"));
        assert!(is_right(&row, &column));
        let (row, column) = reason(&case(Victim::Group), None);
        assert!(!is_right(&row, &column));
    }
}
