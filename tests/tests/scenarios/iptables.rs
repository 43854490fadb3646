//! The agent with the real iptables: it creates the chains that other programs rely on, and creates them again after a flush.
//! Agent and test are in a network namespace of their own: the tables of the machine are never touched.

use std::fs;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use keblet_peers::Cache;
use keblet_tests::standalone::StandaloneNode;
use nix::sched::CloneFlags;
use serde_json::json;

const PROGRAMS: [&str; 2] = ["iptables", "ip6tables"];
const TABLES: [&str; 3] = ["mangle", "nat", "filter"];

/// Runs a test on a thread in a network namespace of its own, which the processes share that it starts.
fn in_network_namespace(test: fn() -> Result<()>) -> Result<()> {
    let thread = std::thread::spawn(move || {
        nix::sched::unshare(CloneFlags::CLONE_NEWNET).context("cannot make a network namespace")?;
        run(Command::new(Cache::locate().busybox()).args(["ip", "link", "set", "lo", "up"]))?;
        test()
    });
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// The standard output of a program that has to succeed.
fn run(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// A folder with both programs, which Debian's package would link when it is installed, with their libraries from the cache.
fn install(node: &StandaloneNode) -> Result<PathBuf> {
    let cache = Cache::locate();
    let (folder, libraries) = (node.containerd.ready().dir.join("iptables"), cache.libraries().display().to_string());
    let program = cache.packages().join("usr/sbin/xtables-nft-multi").display().to_string();
    fs::create_dir(&folder)?;
    for name in PROGRAMS {
        let file = folder.join(name);
        let environment = format!("LD_LIBRARY_PATH='{libraries}' XTABLES_LIBDIR='{libraries}/xtables'");
        fs::write(&file, format!("#!/bin/sh\nexec env {environment} '{program}' {name} \"$@\"\n"))?;
        fs::set_permissions(&file, Permissions::from_mode(0o755))?;
    }
    Ok(folder)
}

/// The rules of all tables, one string for each program and table.
fn rules(folder: &Path) -> Result<Vec<String>> {
    let listed = |program: &str, table: &str| run(Command::new(folder.join(program)).args(["-S", "-t", table]));
    PROGRAMS.into_iter().flat_map(|program| TABLES.map(|table| listed(program, table))).collect()
}

/// The chain that is created last is in all tables.
fn are_complete(rules: &[String]) -> bool {
    rules.iter().all(|table| table.contains("-N KUBE-KUBELET-CANARY\n"))
}

#[test]
#[ignore = "real runtime"]
fn iptables_chains_are_created_and_restored_after_a_flush() -> Result<()> {
    in_network_namespace(|| {
        let mut node = StandaloneNode::with(json!({ "makeIPTablesUtilChains": true }))?;
        let folder = install(&node)?;
        ensure!(rules(&folder)?.iter().all(|rules| !rules.contains("KUBE-")), "a new namespace has no chains");
        let path = format!("PATH={}:{}", folder.display(), std::env::var("PATH")?);
        node.start_under(&["env", &path])?;
        let created = node.until("the chains", |_| Ok(Some(rules(&folder)?).filter(|rules| are_complete(rules))))?;
        let [mangle, _, filter, mangle_v6, _, filter_v6] = &created[..] else { anyhow::bail!("{created:?}") };
        ensure!([mangle, mangle_v6].iter().all(|table| table.contains("-N KUBE-IPTABLES-HINT\n")), "{created:?}");
        for line in [
            "-A INPUT -j KUBE-FIREWALL\n",
            "-A OUTPUT -j KUBE-FIREWALL\n",
            "-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment \"block incoming localnet connections\" \
             -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP\n",
        ] {
            ensure!(filter.matches(line).count() == 1, "{line} in {filter}");
        }
        ensure!(!filter_v6.contains("KUBE-FIREWALL"), "{filter_v6}");

        for program in PROGRAMS {
            for operation in TABLES.into_iter().flat_map(|table| [["-t", table, "-F"], ["-t", table, "-X"]]) {
                run(Command::new(folder.join(program)).args(operation))?;
            }
        }
        // At the next check, which is due once a minute.
        node.until_true("the same chains", |_| Ok(rules(&folder)? == created))?;
        node.stop()
    })
}
