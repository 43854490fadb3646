//! OOM kills in the kernel log (`mm/oom_kill.c`). Pure.
//!
//! A kill is a sequence of lines: the memory of the cgroup with its limit, a line with the cgroups, and one line for each
//! process. The kernel leaves out all but the last while kills are frequent.

/// Fields longer than this are no cgroup path.
const MAX_PATH: usize = 4096;

/// A process that the kernel log reports as killed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OomLogEntry {
    /// Microseconds of the log's clock, which begins at boot.
    pub at_micros: u64,
    /// Process id.
    pub pid: u32,
    /// Command name.
    pub comm: String,
    /// Resident anonymous, file and shared memory in KiB.
    pub memory_kib: Option<[u64; 3]>,
    /// Path of the process's cgroup in the memory hierarchy.
    pub cgroup: Option<String>,
    /// The exceeded limit.
    pub limit: OomLogLimit,
    /// It was killed because another one of its cgroup was chosen (`memory.oom.group`); `Some` for the chosen one too.
    pub group: Option<String>,
}

/// The limit that a kill enforced, according to the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OomLogLimit {
    /// The limit of the cgroup at this path, in KiB if it was logged.
    Cgroup(String, Option<u64>),
    /// None: the node was out of memory.
    Node,
    /// Not logged.
    Unknown,
}

/// Follows the lines of the kernel log.
#[derive(Debug, Default)]
pub struct OomLogParser {
    limit_kib: Option<u64>,
    chosen: Option<Chosen>,
}

/// The line about the chosen process.
#[derive(Debug)]
struct Chosen {
    pid: u32,
    cgroup: Option<String>,
    limit: OomLogLimit,
    /// The cgroup that is killed as a whole.
    group: Option<String>,
}

impl OomLogParser {
    /// Takes one record of `/dev/kmsg`. Records that were not written by the kernel itself are ignored.
    pub fn record(&mut self, record: &str) -> Option<OomLogEntry> {
        let (head, text) = record.split_once(';')?;
        let mut head = head.split(',');
        let priority: u32 = head.next()?.parse().ok()?;
        let at_micros: u64 = head.nth(1)?.parse().ok()?;
        // The facility; the kernel's own is 0, and it lets no process write with it.
        if priority >> 3 != 0 {
            return None;
        }
        let line = text.lines().next()?;
        if let Some(rest) = line.strip_prefix("memory: usage ") {
            self.limit_kib = between(rest, "limit ", "kB").and_then(|limit| limit.parse().ok());
        } else if let Some(rest) = line.strip_prefix("oom-kill:") {
            self.chosen = chosen(rest, self.limit_kib.take());
        } else if let Some(path) = line.strip_prefix("Tasks in ") {
            let path = path.strip_suffix(" are going to be killed due to memory.oom.group set");
            if let (Some(chosen), Some(path)) = (&mut self.chosen, path) {
                chosen.group = Some(path.to_owned());
            }
        } else if let Some((cause, rest)) = line.split_once(": Killed process ") {
            return self.killed(cause, rest, at_micros);
        }
        None
    }

    fn killed(&mut self, cause: &str, rest: &str, at_micros: u64) -> Option<OomLogEntry> {
        let (pid, rest) = rest.split_once(" (")?;
        let (comm, sizes) = rest.rsplit_once(") total-vm:")?;
        let pid: u32 = pid.parse().ok()?;
        let size = |name: &str| between(sizes, name, "kB")?.parse::<u64>().ok();
        let memory = [size("anon-rss:"), size("file-rss:"), size("shmem-rss:")];
        let is_node = !cause.ends_with("Memory cgroup out of memory");
        let otherwise = if is_node { OomLogLimit::Node } else { OomLogLimit::Unknown };
        // Further processes of a group come after the chosen one, each with a line of its own.
        let about = self.chosen.as_ref().filter(|chosen| chosen.pid == pid || chosen.group.is_some());
        Some(OomLogEntry {
            at_micros,
            pid,
            comm: comm.to_owned(),
            memory_kib: memory[0].zip(memory[1]).zip(memory[2]).map(|((anon, file), shmem)| [anon, file, shmem]),
            cgroup: about.and_then(|of| if of.pid == pid { of.cgroup.clone() } else { of.group.clone() }),
            limit: about.map_or(otherwise, |of| of.limit.clone()),
            group: about.and_then(|of| of.group.clone()),
        })
    }
}

/// `constraint=CONSTRAINT_MEMCG,...,oom_memcg=/a,task_memcg=/a/b,task=name,pid=1,uid=0`; `global_oom` instead of the first
/// cgroup if the node was out of memory.
fn chosen(text: &str, limit_kib: Option<u64>) -> Option<Chosen> {
    let (head, tail) = text.split_once(",task=")?;
    let (tail, _) = tail.rsplit_once(",uid=")?;
    let (_, pid) = tail.rsplit_once(",pid=")?;
    let path = |text: &str| Some(text.to_owned()).filter(|path| path.starts_with('/') && path.len() <= MAX_PATH);
    let (head, cgroup) = head.split_once(",task_memcg=").unwrap_or((head, ""));
    let limit = match head.split_once(",oom_memcg=").and_then(|(_, limit)| path(limit)) {
        Some(limit) => OomLogLimit::Cgroup(limit, limit_kib),
        None if head.ends_with(",global_oom") => OomLogLimit::Node,
        None => OomLogLimit::Unknown,
    };
    Some(Chosen { pid: pid.parse().ok()?, cgroup: path(cgroup), limit, group: None })
}

fn between<'a>(text: &'a str, before: &str, after: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(before)?;
    rest.split_once(after).map(|(found, _)| found)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(lines: &[&str]) -> Vec<OomLogEntry> {
        let mut parser = OomLogParser::default();
        lines.iter().filter_map(|line| parser.record(line)).collect()
    }

    const LIMIT: &str = "6,99,1000,-;memory: usage 24576kB, limit 24576kB, failcnt 42";
    const CHOSEN: &str = "6,100,1001,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,\
                          oom_memcg=/kubepods/pod1,task_memcg=/kubepods/pod1/c,task=a) b,pid=4711,uid=0";
    const KILLED: &str = "3,101,1002,-;Memory cgroup out of memory: Killed process 4711 (a) b) total-vm:3000kB, \
                          anon-rss:2000kB, file-rss:30kB, shmem-rss:4kB, UID:0 pgtables:44kB oom_score_adj:0\n SUBSYSTEM=x";

    #[test]
    fn a_kill_in_a_cgroup() {
        let expected = OomLogEntry {
            at_micros: 1002,
            pid: 4711,
            comm: "a) b".to_owned(),
            memory_kib: Some([2000, 30, 4]),
            cgroup: Some("/kubepods/pod1/c".to_owned()),
            limit: OomLogLimit::Cgroup("/kubepods/pod1".to_owned(), Some(24576)),
            group: None,
        };
        assert_eq!(parse(&[LIMIT, CHOSEN, KILLED]), std::slice::from_ref(&expected));
        let rare = OomLogEntry { cgroup: None, limit: OomLogLimit::Unknown, ..expected };
        assert_eq!(parse(&[KILLED]), std::slice::from_ref(&rare), "only the last line was logged");
        let of_another = CHOSEN.replace("4711", "5");
        assert_eq!(parse(&[&of_another, KILLED]), [rare]);
    }

    #[test]
    fn a_kill_of_a_group() {
        let group = "6,1,1,-;Tasks in /kubepods/pod1/c are going to be killed due to memory.oom.group set";
        let second = KILLED.replace("4711", "4712");
        let found = parse(&[LIMIT, CHOSEN, group, KILLED, &second]);
        let of = |entry: &OomLogEntry| (entry.pid, entry.cgroup.clone(), entry.group.clone());
        let path = || Some("/kubepods/pod1/c".to_owned());
        assert_eq!(found.iter().map(of).collect::<Vec<_>>(), [(4711, path(), path()), (4712, path(), path())]);
    }

    #[test]
    fn a_kill_for_the_node() {
        let chosen = CHOSEN.replace("oom_memcg=/kubepods/pod1", "global_oom");
        let killed = KILLED.replace("Memory cgroup out", "Out");
        for lines in [vec![chosen.as_str(), &killed], vec![&killed]] {
            assert_eq!(parse(&lines)[0].limit, OomLogLimit::Node);
        }
    }

    #[test]
    fn what_processes_write_is_ignored() {
        assert_eq!(parse(&[&KILLED.replace("3,101", "11,101")]), []);
        assert_eq!(
            parse(&["", ";", "x;y", "3,1,1,-;a: Killed process 7", "3,1,1,-;a: Killed process x (a) total-vm:"]),
            []
        );
    }

    proptest! {
        /// Any text is parsed without a panic, and yields no longer paths than it has.
        #[test]
        fn any_text(text in "[0-9]{1,2},1,1,-;(oom-kill:|Tasks in |x: Killed process 1 \\(|memory: usage )?.{0,80}") {
            let mut parser = OomLogParser::default();
            parser.record(CHOSEN);
            let _ = parser.record(&text);
        }
    }
}
