//! The agent's own limit of open files (`maxOpenFiles`), setrlimit(2), what fails for lack of one, and the limits of other
//! processes.

use std::fs;
use std::io;
use std::path::Path;
use std::process;

use nix::errno::Errno;
use nix::sys::resource::Resource;
use nix::sys::resource::getrlimit;
use nix::sys::resource::setrlimit;

use super::read;

/// The soft limit of processes that do not raise it.
const USUAL: usize = 1024;

/// Sets the limit of open files to `wanted`; without CAP_SYS_RESOURCE at most to the hard limit of the process. Returns the
/// limit that holds now.
///
/// # Errors
/// The kernel refuses both.
pub fn limit(wanted: u64) -> Result<u64, Errno> {
    if setrlimit(Resource::RLIMIT_NOFILE, wanted, wanted).is_ok() {
        return Ok(wanted);
    }
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let reachable = wanted.min(most);
    setrlimit(Resource::RLIMIT_NOFILE, reachable, most)?;
    Ok(reachable)
}

/// How many files the process may have open now; the usual number if that cannot be read.
pub fn soft_limit() -> usize {
    getrlimit(Resource::RLIMIT_NOFILE).map_or(USUAL, |(soft, _)| usize::try_from(soft).unwrap_or(usize::MAX))
}

/// How many files a process in `proc` may have open now; `None` without a limit, and if the process is gone.
///
/// The system call takes less time than the file, whose 16 lines the kernel formats for each reader, but needs
/// CAP_SYS_RESOURCE for processes of other users and groups.
pub fn soft_limit_of(proc: &Path, process: u32) -> Option<u64> {
    let called = if has_own_pids(proc) { by_call(process) } else { Err(Errno::EPERM) };
    called.unwrap_or_else(|_| by_file(&proc.join(process.to_string()).join("limits")))
}

/// Whether system calls find the processes in `proc` by the same pids. It may be of another PID namespace than the agent, as
/// the host's in a container; `self` in it then has another pid.
fn has_own_pids(proc: &Path) -> bool {
    fs::read_link(proc.join("self")).is_ok_and(|own| own == Path::new(&process::id().to_string()))
}

/// By prlimit(2).
fn by_call(process: u32) -> nix::Result<Option<u64>> {
    // 0 is the caller.
    let pid = libc::pid_t::try_from(process).ok().filter(|pid| *pid > 0).ok_or(Errno::ESRCH)?;
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: nix has no function for this call. The kernel sets no limit, as the pointer to a new one is null, and writes
    // one structure of this type.
    let called = unsafe { libc::prlimit(pid, libc::RLIMIT_NOFILE, std::ptr::null(), &raw mut limit) };
    Errno::result(called)?;
    Ok((limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur))
}

/// By `/proc/<pid>/limits`.
fn by_file(limits: &Path) -> Option<u64> {
    let table = read::text(limits, read::PROC_FILE_LIMIT).ok()?;
    let line = table.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

/// No file could be opened for lack of descriptors or memory: a later attempt may succeed.
pub fn is_shortage(error: &io::Error) -> bool {
    matches!(error.raw_os_error().map(Errno::from_raw), Some(Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::process::CommandExt as _;
    use std::process::Command;

    use super::*;

    const PROC: &str = "/proc";

    #[test]
    fn the_call_and_the_file_have_the_same_limit() {
        let mut own = Command::new("sleep");
        let mut of_another_user = Command::new("sleep");
        // Without CAP_SYS_RESOURCE the call fails for it. Only root can start it.
        of_another_user.uid(65_534).gid(65_534);
        let mut processes = vec![own.arg("600").spawn().expect("a process")];
        processes.extend(of_another_user.arg("600").spawn());
        let found: Vec<_> = processes
            .iter()
            .map(|process| {
                let file = Path::new(PROC).join(process.id().to_string()).join("limits");
                (soft_limit_of(Path::new(PROC), process.id()), by_file(&file))
            })
            .collect();
        let called = by_call(processes[0].id());
        for process in &mut processes {
            process.kill().expect("killed");
            process.wait().expect("ended");
        }
        assert!(has_own_pids(Path::new(PROC)), "the call is made");
        assert_eq!(called.expect("of a process of the same user"), found[0].1);
        assert!(found.iter().all(|(limit, in_file)| limit.is_some() && limit == in_file), "{found:?}");
    }

    #[test]
    fn processes_of_another_folder_have_the_limits_in_it() {
        let proc = tempfile::tempdir().expect("a folder");
        // A pid that exists outside of the folder too.
        let own = process::id();
        let process = proc.path().join(own.to_string());
        fs::create_dir(&process).expect("a folder");
        let limit = |soft: &str| {
            let table = format!(
                "Limit                     Soft Limit           Hard Limit           Units     \n\
                 Max processes             7                    7                    processes \n\
                 Max open files            {soft:<20} 4096                 files     \n"
            );
            fs::write(process.join("limits"), table).expect("a file");
            soft_limit_of(proc.path(), own)
        };
        assert_eq!((limit("321"), limit("unlimited")), (Some(321), None));
        assert_eq!(soft_limit_of(proc.path(), 0), None);
        let link = proc.path().join("self");
        symlink((own + 1).to_string(), &link).expect("a link");
        assert_eq!(limit("321"), Some(321), "the agent has another pid there");
        fs::remove_file(&link).expect("removed");
        symlink(own.to_string(), &link).expect("a link");
        assert_ne!(limit("321"), Some(321), "by the system call");
    }

    #[test]
    fn there_is_no_limit_of_a_process_that_is_gone() {
        assert_eq!((by_call(0), by_call(u32::MAX)), (Err(Errno::ESRCH), Err(Errno::ESRCH)));
        let mut ended = Command::new("true").spawn().expect("a process");
        ended.wait().expect("ended");
        assert_eq!(soft_limit_of(Path::new(PROC), ended.id()), None);
    }

    #[test]
    fn shortages_pass_and_other_failures_do_not() {
        for errno in [Errno::EMFILE, Errno::ENFILE, Errno::ENOMEM] {
            assert!(is_shortage(&errno.into()), "{errno}");
        }
        for errno in [Errno::ENOENT, Errno::EPERM, Errno::EACCES] {
            assert!(!is_shortage(&errno.into()), "{errno}");
        }
    }

    #[test]
    fn the_limit_that_holds_is_returned() {
        let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).expect("limits");
        let holds = limit(most).expect("the hard limit is reachable");
        assert_eq!((holds, getrlimit(Resource::RLIMIT_NOFILE).expect("limits").0), (most, most));
        // More than the kernel allows any process (fs.nr_open).
        let holds = limit(1 << 40).expect("as much as is allowed");
        assert_eq!((holds, getrlimit(Resource::RLIMIT_NOFILE).expect("limits").0), (most, most));
    }
}
