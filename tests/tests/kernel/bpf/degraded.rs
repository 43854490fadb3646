//! Machines without BTF, capabilities or bpf(2): one clear reason each, and no panic.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use keblet::cgroups::Hierarchy;
use keblet::kernel::bpf;
use keblet::kernel::bpf::Options;
use nix::libc;

use crate::support::machine_lacks;

fn options() -> Options {
    Options::new(Hierarchy::find().expect("checked before"))
}

async fn reason(options: Options) -> String {
    match bpf::load(options).await {
        Ok(_) => "loaded".to_owned(),
        Err(error) => error.to_string(),
    }
}

#[tokio::test]
#[ignore = "needs root and BPF"]
async fn missing_btf_is_reported() {
    if machine_lacks().is_some() {
        return;
    }
    let mut options = options();
    options.btf = "/nonexistent/vmlinux".into();
    assert_eq!(reason(options).await, "cannot read the kernel's type information /nonexistent/vmlinux");
}

#[tokio::test]
#[ignore = "needs root and BPF"]
async fn foreign_btf_is_rejected() {
    if machine_lacks().is_some() {
        return;
    }
    let mut options = options();
    options.btf = "/proc/version".into();
    assert_eq!(reason(options).await, "malformed type information: wrong magic number");
}

/// Set in child processes with fewer capabilities.
const RESTRICTED: &str = "KEBLET_TEST_RESTRICTED";

/// Loading works with all capabilities; in the child processes of the tests below it prints the reason why it does not.
#[tokio::test]
#[ignore = "needs root and BPF"]
async fn loading_works_with_all_capabilities() {
    if std::env::var_os(RESTRICTED).is_some() {
        println!("reason: {}", reason(options()).await);
    } else if machine_lacks().is_none() {
        assert_eq!(reason(options()).await, "loaded");
    }
}

/// Runs the test above in a child process that has first called `restrict`.
fn reason_in_child(restrict: fn() -> std::io::Result<()>) -> String {
    let mut command = Command::new(std::env::current_exe().expect("the test's own program"));
    command
        .args(["--ignored", "--exact", "--nocapture", "bpf::degraded::loading_works_with_all_capabilities"])
        .env(RESTRICTED, "1");
    // SAFETY: `restrict` only makes system calls.
    unsafe { command.pre_exec(restrict) };
    let output = command.output().expect("the child runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let reason = text.split("reason: ").nth(1).and_then(|rest| rest.lines().next());
    reason.unwrap_or_else(|| panic!("no reason in {text:?}")).to_owned()
}

fn drop_from_bounding_set(capabilities: &[libc::c_ulong]) -> std::io::Result<()> {
    for capability in capabilities {
        // SAFETY: integers only.
        let result = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, *capability, 0, 0, 0) };
        if result != 0 {
            return Err(std::io::Error::last_os_error());
        }
    }
    Ok(())
}

const CAP_SYS_ADMIN: libc::c_ulong = 21;
const CAP_PERFMON: libc::c_ulong = 38;
const CAP_BPF: libc::c_ulong = 39;

#[test]
#[ignore = "needs root and BPF"]
fn missing_capabilities_are_reported() {
    if machine_lacks().is_some() {
        return;
    }
    let reason = reason_in_child(|| drop_from_bounding_set(&[CAP_SYS_ADMIN, CAP_PERFMON, CAP_BPF]));
    assert_eq!(
        reason,
        "bpf() is refused (Operation not permitted (os error 1)): the agent lacks CAP_BPF and CAP_PERFMON"
    );
    let reason = reason_in_child(|| drop_from_bounding_set(&[CAP_SYS_ADMIN, CAP_PERFMON]));
    assert_eq!(reason, "bpf() is refused (Operation not permitted (os error 1)): the agent lacks CAP_PERFMON");
}

#[test]
#[ignore = "needs root and BPF"]
fn bpf_and_perfmon_capabilities_suffice() {
    if machine_lacks().is_some() {
        return;
    }
    let keep_two = || {
        let others: Vec<libc::c_ulong> = (0..=40).filter(|cap| ![CAP_PERFMON, CAP_BPF].contains(cap)).collect();
        drop_from_bounding_set(&others)
    };
    assert_eq!(reason_in_child(keep_two), "loaded");
}

/// As default seccomp profiles of container runtimes do.
#[test]
#[ignore = "needs root and BPF"]
fn forbidden_system_call_is_reported() {
    if machine_lacks().is_some() {
        return;
    }
    let reason = reason_in_child(forbid_bpf);
    assert_eq!(
        reason,
        "bpf() is refused (Operation not permitted (os error 1)): the agent has the capabilities: a seccomp filter, \
         a security module or lockdown forbids it"
    );
}

fn forbid_bpf() -> std::io::Result<()> {
    const LOAD_NUMBER: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JUMP_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let instruction = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut filter = [
        instruction(LOAD_NUMBER, 0, 0, 0),
        instruction(JUMP_EQUAL, 0, 1, libc::SYS_bpf as u32),
        instruction(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        instruction(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program outlives the call, and its length is its own.
    let result = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}
