//! Open files and sockets of containers. `/proc/<pid>/fd` has an entry for each of them, and each socket has to be looked up
//! by itself, which costs more than all other numbers of a container together. Each request therefore counts for a bounded
//! time, from the containers that were counted longest ago; the others keep their numbers. Blocks.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::Duration;
use std::time::Instant;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::fcntl::open;
use nix::fcntl::readlinkat;
use nix::sys::stat::Mode;

use crate::kernel::listing::Listing;
use crate::kernel::open_files::soft_limit_of;
use crate::model::ContainerId;

/// Time for one request. Exceeded by at most what the kernel lists of a folder at once, some 1,400 entries, and by as many
/// links as a step has. Measured: about 1.5 µs for an entry.
pub(super) const LIMIT: Duration = Duration::from_millis(4);
/// Links of a process after which the time is checked again.
const STEP: usize = 64;

/// What the processes of a container have open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct OpenFiles {
    /// All descriptors.
    pub(super) files: u64,
    /// Sockets among them.
    pub(super) sockets: u64,
    /// The soft limit of the container's first process; absent if it has none.
    pub(super) soft_limit: Option<u64>,
}

/// A container to be counted.
#[derive(Clone, Debug)]
pub(super) struct ContainerProcesses {
    pub(super) id: ContainerId,
    /// Its init process.
    pub(super) init: u32,
    /// All its processes.
    pub(super) processes: Vec<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Counted {
    /// `None` if counting took too long, or was not permitted.
    open: Option<OpenFiles>,
    at: Instant,
}

/// The numbers of all containers, as far as they were counted.
#[derive(Debug, Default)]
pub(super) struct Descriptors(HashMap<ContainerId, Counted>);

impl Descriptors {
    /// The numbers of these containers, by id; those of other containers are dropped. Counts for `limit` at most.
    pub(super) fn count(
        &mut self,
        proc: &Path,
        wanted: Vec<ContainerProcesses>,
        limit: Duration,
    ) -> HashMap<ContainerId, OpenFiles> {
        let began = Instant::now();
        let mut order: Vec<(Option<Instant>, ContainerProcesses)> =
            wanted.into_iter().map(|one| (self.0.get(&one.id).map(|counted| counted.at), one)).collect();
        order.sort_by_key(|(at, _)| *at);
        let old = std::mem::take(&mut self.0);
        let deadline = began + limit;
        for (index, (_, one)) in order.into_iter().enumerate() {
            let known = old.get(&one.id).copied();
            let counted = if is_over(deadline) {
                known
            } else {
                let open = of_container(proc, &one, deadline);
                kept(known, Counted { open, at: began }, index > 0 && is_over(deadline))
            };
            if let Some(counted) = counted {
                self.0.insert(one.id, counted);
            }
        }
        self.0.iter().filter_map(|(id, counted)| Some((id.clone(), counted.open?))).collect()
    }
}

fn is_over(deadline: Instant) -> bool {
    Instant::now() >= deadline
}

/// What is kept of a container. One that has got only a part of the time, which did not suffice, is left as it was: it comes
/// first in the next request, which has more time for it. Pure.
fn kept(known: Option<Counted>, counted: Counted, was_cut_short: bool) -> Option<Counted> {
    if counted.open.is_none() && was_cut_short { known } else { Some(counted) }
}

/// `None` if the time is over before all are counted, or if the processes of other users may not be inspected.
fn of_container(proc: &Path, wanted: &ContainerProcesses, deadline: Instant) -> Option<OpenFiles> {
    let mut all = OpenFiles { soft_limit: soft_limit_of(proc, wanted.init), ..Default::default() };
    for process in &wanted.processes {
        // A container decides how many processes it has, and each may have few files.
        if is_over(deadline) {
            return None;
        }
        let links = match links_of(proc, *process) {
            Ok(folder) => Listing::new(folder),
            Err(Errno::EACCES | Errno::EPERM) => return None,
            // It has exited.
            Err(_) => continue,
        };
        let (files, sockets) = of_links(links, deadline)?;
        all.files += files;
        all.sockets += sockets;
    }
    Some(all)
}

/// The folder with a link for each open file of a process.
fn links_of(proc: &Path, process: u32) -> nix::Result<OwnedFd> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    open(&proc.join(process.to_string()).join("fd"), flags, Mode::empty())
}

/// The links, and how many of them are of sockets; `None` if the time is over before the last one. A process that has exited
/// since its folder was opened has no more links, also if its pid is used again. A link that is gone was one of a file.
fn of_links(mut links: Listing, deadline: Instant) -> Option<(u64, u64)> {
    let (mut index, mut files, mut sockets) = (0_usize, 0, 0);
    while let Ok(Some(link)) = links.next_entry() {
        if index % STEP == STEP - 1 && is_over(deadline) {
            return None;
        }
        index += 1;
        files += 1;
        let target = readlinkat(link.dir, link.name).unwrap_or_default();
        sockets += u64::from(target.as_bytes().starts_with(b"socket:"));
    }
    Some((files, sockets))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    const LIMITS: &str = "Limit                     Soft Limit           Hard Limit           Units     \n\
                          Max processes             unlimited            unlimited            processes \n\
                          Max open files            1024                 4096                 files     \n";

    fn process(proc: &Path, pid: u32, sockets: usize, files: usize) {
        let fds = proc.join(pid.to_string()).join("fd");
        fs::create_dir_all(&fds).unwrap();
        (0..sockets).for_each(|n| symlink(format!("socket:[{n}]"), fds.join(n.to_string())).unwrap());
        (0..files).for_each(|n| symlink("/dev/null", fds.join(format!("1{n}"))).unwrap());
        fs::write(proc.join(pid.to_string()).join("limits"), LIMITS).unwrap();
    }

    fn wanted(id: &str, processes: &[u32]) -> ContainerProcesses {
        ContainerProcesses { id: id.into(), init: processes[0], processes: processes.to_vec() }
    }

    #[test]
    fn files_and_sockets_of_all_processes_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        process(dir.path(), 7, 2, 3);
        process(dir.path(), 8, 1, 0);
        let mut descriptors = Descriptors::default();
        let second = Duration::from_secs(1);
        let found = descriptors.count(dir.path(), vec![wanted("a", &[7, 8, 9])], second);
        let expected = OpenFiles { files: 6, sockets: 3, soft_limit: Some(1024) };
        assert_eq!(found, [(ContainerId::from("a"), expected)].into(), "process 9 has exited");
        let own = descriptors.count(Path::new("/proc"), vec![wanted("b", &[std::process::id()])], second);
        assert!(own[&ContainerId::from("b")].files > 2 && own.len() == 1, "a container that is gone is dropped");
    }

    #[test]
    fn links_are_those_of_the_process_whose_folder_was_opened() {
        let dir = tempfile::tempdir().unwrap();
        process(dir.path(), 7, 2, 1);
        // No link can be read here, as of a file that is closed between both calls.
        fs::write(dir.path().join("7/fd/closed"), "").unwrap();
        let opened = links_of(dir.path(), 7).unwrap();
        fs::rename(dir.path().join("7"), dir.path().join("8")).unwrap();
        process(dir.path(), 7, 5, 5);
        let deadline = Instant::now() + Duration::from_secs(60);
        assert_eq!(of_links(Listing::new(opened), deadline), Some((4, 2)), "its pid was used again");

        let opened = links_of(dir.path(), 8).unwrap();
        fs::remove_dir_all(dir.path().join("8")).unwrap();
        assert_eq!(of_links(Listing::new(opened), deadline), Some((0, 0)), "it has exited");
        assert_eq!(links_of(dir.path(), 8).unwrap_err(), Errno::ENOENT);
    }

    #[test]
    fn without_time_the_known_numbers_stay() {
        let dir = tempfile::tempdir().unwrap();
        process(dir.path(), 7, 1, 0);
        let mut descriptors = Descriptors::default();
        let mut count = |limit| descriptors.count(dir.path(), vec![wanted("a", &[7])], limit);
        assert!(count(Duration::ZERO).is_empty(), "not counted yet");
        let known = count(Duration::from_secs(1));
        process(dir.path(), 7, 0, 5);
        assert_eq!(count(Duration::ZERO), known);
        assert_eq!(count(Duration::from_secs(1))[&ContainerId::from("a")].files, 6);
        process(dir.path(), 8, 0, 1000);
        let past = Instant::now();
        let links = Listing::new(links_of(dir.path(), 8).unwrap());
        assert_eq!(of_links(links, past), None, "a part would mislead");
    }

    #[test]
    fn the_time_is_limited_also_for_processes_with_few_files_or_none() {
        let dir = tempfile::tempdir().unwrap();
        process(dir.path(), 7, 1, 1);
        let (past, later) = (Instant::now(), Instant::now() + Duration::from_secs(60));
        // Process 8 has exited.
        for processes in [&[7][..], &[8][..]] {
            let counted = |deadline| of_container(dir.path(), &wanted("a", processes), deadline);
            assert!(counted(past).is_none() && counted(later).is_some(), "{processes:?}");
        }
    }

    #[test]
    fn a_container_whose_time_was_cut_short_is_counted_first_in_the_next_request() {
        let now = Instant::now();
        let later = now + Duration::from_secs(9);
        let files = |files| Some(OpenFiles { files, ..Default::default() });
        let known = Some(Counted { open: files(5), at: now });
        let result = |known, open, was_cut_short| {
            let counted = kept(known, Counted { open, at: later }, was_cut_short);
            counted.map(|counted| (counted.open, counted.at))
        };
        assert_eq!(result(known, None, true), Some((files(5), now)));
        assert_eq!(result(None, None, true), None, "a new one comes before all that were counted");
        assert_eq!(result(known, None, false), Some((None, later)), "the whole time does not suffice");
        assert_eq!(result(known, files(6), true), Some((files(6), later)), "just in time");
    }
}
