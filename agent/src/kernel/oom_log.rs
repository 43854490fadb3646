//! OOM kills in the kernel log (`mm/oom_kill.c`). Pure.
//!
//! A kill is a sequence of lines: the memory of the cgroup with its limit, a line with the cgroups, and a line about the
//! process. While kills are frequent the kernel leaves out all but the last. If a whole cgroup is killed
//! (`memory.oom.group`), a line with its path comes next, then one about each of its processes, that of the chosen one once
//! more. What a line about a process means is therefore known when the next one is there.

use std::time::Duration;

/// Fields longer than this are no cgroup path.
const MAX_PATH: usize = 4096;
/// What the kernel writes before `: Killed process`. Of other lines every process chooses a part, such as the name of the
/// file in which it crashes: a line that has these words after anything else is about no kill.
const OF_CGROUP: &str = "Memory cgroup out of memory";
const OF_NODE: [&str; 2] = ["Out of memory", "Out of memory (oom_kill_allocating_task)"];
/// What the line with the cgroups begins with: longer than the name of a process, with which other lines begin.
const CHOSEN_LINE: &str = "oom-kill:constraint=";
/// The lines of a kill of a whole cgroup follow each other within this time. So long a kill waits for the line after it.
pub const GROUP_PAUSE: Duration = Duration::from_millis(100);

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
    /// Path of the process's cgroup in the memory hierarchy, or of the one that was killed as a whole.
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
    group: Option<Group>,
    /// The last kill, until it is known whether its cgroup is killed as a whole.
    held: Option<OomLogEntry>,
}

/// The line about the chosen process.
#[derive(Debug)]
struct Chosen {
    pid: u32,
    cgroup: Option<String>,
    limit: OomLogLimit,
}

/// A cgroup that is killed as a whole.
#[derive(Debug)]
struct Group {
    path: String,
    /// Time of its last line, in microseconds.
    last: u64,
    /// The chosen process and the limit that was enforced.
    chosen: Option<(u32, OomLogLimit)>,
}

impl OomLogParser {
    /// Takes one record of `/dev/kmsg`; returns the kill before it, or the one it is about if that is complete. Records that
    /// were not written by the kernel itself are ignored. `cgroup_of` returns the path of the cgroup of a process, if it
    /// still exists: the log does not always name it.
    pub fn record(&mut self, record: &str, cgroup_of: impl FnOnce(u32) -> Option<String>) -> Option<OomLogEntry> {
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
        } else if let Some(rest) = line.strip_prefix(CHOSEN_LINE) {
            let before = self.release();
            self.chosen = chosen(rest, self.limit_kib.take());
            self.group = None;
            return before;
        } else if let Some(path) = line.strip_prefix("Tasks in ") {
            let path = path.strip_suffix(" are going to be killed due to memory.oom.group set")?;
            return self.begin_group(path, at_micros);
        } else if let Some((cause, rest)) = line.split_once(": Killed process ") {
            let entry = self.killed(cause, rest, at_micros, cgroup_of)?;
            let before = self.release();
            self.held = Some(entry);
            return before;
        }
        None
    }

    /// The last kill, if it was not returned yet. To be called [`GROUP_PAUSE`] after its line, or at the end of the log.
    pub fn release(&mut self) -> Option<OomLogEntry> {
        let entry = self.held.take()?;
        let Some(mut group) = self.group.take_if(|group| group.contains(&entry)) else {
            // The kills of a group come one after the other.
            self.group = None;
            return Some(entry);
        };
        group.last = entry.at_micros;
        let member = group.member(entry);
        self.group = Some(group);
        member
    }

    /// A kill is held: [`Self::release`] is due.
    pub fn is_holding(&self) -> bool {
        self.held.is_some()
    }

    /// The cgroup at `path` is killed as a whole: the process of the line before was chosen.
    fn begin_group(&mut self, path: &str, at_micros: u64) -> Option<OomLogEntry> {
        let mut group = Group { path: path.to_owned(), last: at_micros, chosen: None };
        let before = match self.held.take_if(|entry| group.follows(entry)) {
            Some(entry) => {
                group.chosen = Some((entry.pid, entry.limit.clone()));
                let cgroup = entry.cgroup.or_else(|| Some(path.to_owned()));
                Some(OomLogEntry { cgroup, group: Some(path.to_owned()), ..entry })
            }
            // The line about the chosen process was lost, or it has exited before it was killed.
            None => self.release(),
        };
        self.group = Some(group);
        before
    }

    fn killed(
        &mut self,
        cause: &str,
        rest: &str,
        at_micros: u64,
        cgroup_of: impl FnOnce(u32) -> Option<String>,
    ) -> Option<OomLogEntry> {
        let (pid, rest) = rest.split_once(" (")?;
        let (comm, sizes) = rest.rsplit_once(") total-vm:")?;
        let pid: u32 = pid.parse().ok()?;
        let size = |name: &str| between(sizes, name, "kB")?.parse::<u64>().ok();
        let memory = [size("anon-rss:"), size("file-rss:"), size("shmem-rss:")];
        let otherwise = match cause {
            OF_CGROUP => OomLogLimit::Unknown,
            cause if OF_NODE.contains(&cause) => OomLogLimit::Node,
            _ => return None,
        };
        // It is about the next kill only: later ones may have no such line.
        let about = self.chosen.take().filter(|chosen| chosen.pid == pid);
        let (cgroup, limit) = about.map_or((None, otherwise), |chosen| (chosen.cgroup, chosen.limit));
        Some(OomLogEntry {
            at_micros,
            pid,
            comm: comm.to_owned(),
            memory_kib: memory[0].zip(memory[1]).zip(memory[2]).map(|((anon, file), shmem)| [anon, file, shmem]),
            cgroup: cgroup.or_else(|| cgroup_of(pid)),
            limit,
            group: None,
        })
    }
}

impl Group {
    /// The line of this group comes right after that of the kill, whose process may be in it.
    fn follows(&self, entry: &OomLogEntry) -> bool {
        is_soon(entry.at_micros, self.last) && self.may_contain(entry)
    }

    /// The kill is one of this group. Of a process that is gone only the time decides: another kill so soon after these,
    /// without a line of its own before and after it, is rare.
    fn contains(&self, entry: &OomLogEntry) -> bool {
        is_soon(self.last, entry.at_micros) && self.may_contain(entry)
    }

    fn may_contain(&self, entry: &OomLogEntry) -> bool {
        let is_within = |cgroup: &str| {
            let below = cgroup.strip_prefix(self.path.as_str());
            below.is_some_and(|below| below.is_empty() || below.starts_with('/'))
        };
        entry.cgroup.as_deref().is_none_or(is_within)
    }

    /// The kill of one of its processes; none of the chosen one, which is logged twice.
    fn member(&self, entry: OomLogEntry) -> Option<OomLogEntry> {
        let chosen = self.chosen.as_ref();
        if chosen.is_some_and(|(pid, _)| *pid == entry.pid) {
            return None;
        }
        let limit = chosen.map_or_else(|| entry.limit.clone(), |(_, limit)| limit.clone());
        let cgroup = entry.cgroup.or_else(|| Some(self.path.clone()));
        Some(OomLogEntry { cgroup, limit, group: Some(self.path.clone()), ..entry })
    }
}

/// Two times of the log, in microseconds, are at most [`GROUP_PAUSE`] apart.
fn is_soon(earlier: u64, later: u64) -> bool {
    Duration::from_micros(later.saturating_sub(earlier)) <= GROUP_PAUSE
}

/// `CONSTRAINT_MEMCG,...,oom_memcg=/a,task_memcg=/a/b,task=name,pid=1,uid=0`; `global_oom` instead of the first
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
    Some(Chosen { pid: pid.parse().ok()?, cgroup: path(cgroup), limit })
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
        parse_with(lines, |_| None)
    }

    /// `cgroup_of`: the cgroups of processes that still exist.
    fn parse_with(lines: &[&str], cgroup_of: fn(u32) -> Option<&'static str>) -> Vec<OomLogEntry> {
        let mut parser = OomLogParser::default();
        let cgroup_of = |pid| cgroup_of(pid).map(str::to_owned);
        let mut found: Vec<OomLogEntry> = lines.iter().filter_map(|line| parser.record(line, cgroup_of)).collect();
        found.extend(parser.release());
        found
    }

    /// Pid, cgroup and group of each kill.
    fn places(found: &[OomLogEntry]) -> Vec<(u32, Option<&str>, Option<&str>)> {
        found.iter().map(|entry| (entry.pid, entry.cgroup.as_deref(), entry.group.as_deref())).collect()
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

    const GROUP: &str = "6,102,1003,-;Tasks in /kubepods/pod1/c are going to be killed due to memory.oom.group set";

    /// The line about another process, so many microseconds after that of the chosen one.
    fn killed_after(pid: u32, micros: u64) -> String {
        KILLED.replace("4711", &pid.to_string()).replace(",1002,", &format!(",{},", 1002 + micros))
    }

    #[test]
    fn a_kill_of_a_group() {
        // The kernel logs the chosen process before it looks for a group, and then among the others once more.
        let (first, again, last) = (killed_after(4712, 3), killed_after(4711, 4), killed_after(4713, 5));
        let lines = [LIMIT, CHOSEN, KILLED, GROUP, &first, &again, &last];
        let (path, limit) = (Some("/kubepods/pod1/c"), OomLogLimit::Cgroup("/kubepods/pod1".to_owned(), Some(24576)));
        let found = parse(&lines);
        assert_eq!(places(&found), [(4711, path, path), (4712, path, path), (4713, path, path)]);
        assert!(found.iter().all(|entry| entry.limit == limit), "{found:?}");
        let found = parse(&lines[2..]);
        assert_eq!(places(&found), [(4711, path, path), (4712, path, path), (4713, path, path)]);
        assert!(found.iter().all(|entry| entry.limit == OomLogLimit::Unknown), "no limit was logged: {found:?}");
        let found = parse(&lines[3..]);
        assert_eq!(places(&found)[0], (4712, path, path), "the beginning was not read");
    }

    #[test]
    fn a_kill_is_held_until_the_next_line_of_kills() {
        let mut parser = OomLogParser::default();
        let mut take = |line: &str| parser.record(line, |_| None).map(|entry| entry.pid);
        assert_eq!((take(CHOSEN), take(KILLED), take("6,102,1003,-;another line")), (None, None, None));
        assert_eq!(take(&killed_after(5, 9)), Some(4711));
        assert!(parser.is_holding());
        assert_eq!(parser.release().map(|entry| entry.pid), Some(5));
        assert_eq!((parser.is_holding(), parser.release()), (false, None));
    }

    /// While kills are frequent, those of other cgroups have neither limit nor cgroups before them.
    #[test]
    fn a_later_kill_is_in_no_earlier_group() {
        let place = |pid: u32| match pid {
            5 => Some("/kubepods/pod2/d"),
            6 => Some("/kubepods/pod1/c/below"),
            _ => None,
        };
        let (other, member) = (killed_after(5, 3), killed_after(6, 4));
        let path = Some("/kubepods/pod1/c");
        let found = parse_with(&[CHOSEN, KILLED, GROUP, &member, &other], place);
        let inside = (6, Some("/kubepods/pod1/c/below"), path);
        assert_eq!(places(&found), [(4711, path, path), inside, (5, Some("/kubepods/pod2/d"), None)]);
        assert_eq!(found[2].limit, OomLogLimit::Unknown, "that was the limit of others");
        let found = parse_with(&[CHOSEN, KILLED, GROUP, &other, &killed_after(7, 5)], place);
        assert_eq!(places(&found)[2], (7, None, None), "the group was complete");
        let pause = u64::try_from(GROUP_PAUSE.as_micros()).unwrap();
        let found = parse(&[CHOSEN, KILLED, GROUP, &killed_after(7, 2 * pause)]);
        assert_eq!(places(&found)[1], (7, None, None), "too late");
    }

    #[test]
    fn groups_that_follow_each_other_are_distinguished() {
        let second = GROUP.replace("pod1/c", "pod2/d").replace(",1003,", ",1006,");
        let (chosen, member) = (killed_after(5, 3), killed_after(6, 5));
        let found = parse(&[CHOSEN, KILLED, GROUP, &chosen, &second, &member]);
        let (one, other) = (Some("/kubepods/pod1/c"), Some("/kubepods/pod2/d"));
        assert_eq!(places(&found), [(4711, one, one), (5, other, other), (6, other, other)]);
        assert_eq!(found[1].limit, OomLogLimit::Unknown);
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

    /// The kernel logs the names of a process that crashes and of the file in which it does.
    #[test]
    fn what_processes_let_the_kernel_write_is_no_kill() {
        let crashed = |process: &str, file: &str| {
            format!("6,101,1002,-;{process}[8]: segfault at 0 ip 0 sp 0 error 4 in {file}[55d0,1000+1000]")
        };
        for cause in ["Memory cgroup out of memory", "Out of memory"] {
            let sizes = "total-vm:1kB, anon-rss:1kB, file-rss:1kB, shmem-rss:1kB";
            let file = format!("{cause}: Killed process 4711 (a) {sizes}");
            assert_eq!(parse(&[&crashed("a", &file)]), []);
            assert_eq!(parse(&[&crashed("Out of memory", &file)]), []);
        }
        let chosen = crashed("oom-kill:", "x,global_oom,task_memcg=,task=a,pid=4711,uid=0");
        assert_eq!(parse(&[&chosen, KILLED])[0].limit, OomLogLimit::Unknown);
        let allocating = KILLED.replace("Memory cgroup out of memory", "Out of memory (oom_kill_allocating_task)");
        assert_eq!(parse(&[&allocating])[0].limit, OomLogLimit::Node);
    }

    proptest! {
        /// Any text is parsed without a panic, and yields no longer paths than it has.
        #[test]
        fn any_text(text in "[0-9],1,1,-;(oom-kill:|Tasks in |Out of memory: Killed process 1 \\(|memory: usage )?.{0,80}") {
            let mut parser = OomLogParser::default();
            parser.record(CHOSEN, |_| None);
            let _ = (parser.record(&text, |_| None), parser.release());
        }
    }
}
