//! Detects which tiers this machine can run.

use std::fs;
use std::path::Path;

use nix::unistd::Uid;

const CAP_PERFMON: u32 = 38;
const CAP_BPF: u32 = 39;

/// What is missing for a private container runtime.
pub(crate) fn lacks_for_runtime() -> Option<String> {
    if !Uid::effective().is_root() {
        return Some("a container runtime needs root".to_owned());
    }
    None
}

/// What is missing for running systemd, logind and a bus.
pub(crate) fn lacks_for_systemd() -> Option<String> {
    let programs = ["/lib/systemd/systemd", "/lib/systemd/systemd-logind", "/usr/bin/dbus-daemon"];
    let missing: Vec<_> = programs.into_iter().filter(|program| !Path::new(program).exists()).collect();
    (!missing.is_empty()).then(|| format!("{} not installed", missing.join(", ")))
}

/// What is missing for BPF programs.
pub(crate) fn lacks_for_kernel() -> Option<String> {
    if !Path::new("/sys/kernel/btf/vmlinux").exists() {
        return Some("the kernel has no BTF".to_owned());
    }
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    match effective_capabilities(&status) {
        Some(held) if held & (1 << CAP_BPF) != 0 && held & (1 << CAP_PERFMON) != 0 => None,
        Some(_) => Some("CAP_BPF and CAP_PERFMON are missing".to_owned()),
        None => Some("the process's capabilities cannot be read".to_owned()),
    }
}

/// Whether a program is on the path.
pub(crate) fn has_program(name: &str) -> bool {
    std::env::var_os("PATH").is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(name).is_file()))
}

fn effective_capabilities(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effective_capabilities_parse() {
        assert_eq!(effective_capabilities("CapPrm:\t0\nCapEff:\t000000c000000000\n"), Some(0b11 << CAP_PERFMON));
        assert_eq!(effective_capabilities("Name:\tx\n"), None);
    }
}
