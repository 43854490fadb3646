//! Calls and decisions, with tables of which a test flushes some.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::Mutex;

use futures_util::future::BoxFuture;

use super::*;
use crate::host_program::Ended;
use crate::host_program::testing::ScriptedPrograms;

const RULE: &str = "-m comment --comment block incoming localnet connections --dst 127.0.0.0/8 ! --src 127.0.0.0/8 \
                    -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP";

/// Chains and rules, each as `<program> <table> <chain> <rule>`.
type Tables = Arc<Mutex<BTreeSet<String>>>;

/// iptables on these tables. A call that contains the text of `broken` ends with its code.
fn iptables(tables: &Tables, broken: &Arc<Mutex<Option<(&'static str, i32)>>>) -> ScriptedPrograms {
    let (tables, broken) = (tables.clone(), broken.clone());
    ScriptedPrograms::new(move |call| {
        if let Some((part, code)) = *broken.lock().expect("unpoisoned")
            && call.contains(part)
        {
            let lock = "Another app is currently holding the xtables lock. Stopped waiting after 5s.";
            return Some((code, if code == RESOURCE_PROBLEM { lock } else { "broken" }.to_owned()));
        }
        let words: Vec<&str> = call.splitn(8, ' ').collect();
        let [program, "-w", "5", operation, chain, "-t", table, ref rule @ ..] = words[..] else { panic!("{call}") };
        let entry = format!("{program} {table} {chain} {}", rule.concat());
        let mut tables = tables.lock().expect("unpoisoned");
        let done = match operation {
            "-S" => chain == "POSTROUTING" || tables.contains(&entry),
            "-C" => tables.contains(&entry),
            "-N" | "-I" | "-A" => tables.insert(entry),
            _ => panic!("{call}"),
        };
        Some((i32::from(!done), String::new()))
    })
}

/// Keeps the chains while `others` runs.
async fn meanwhile(programs: &dyn Programs, others: impl Future<Output = ()>) {
    tokio::select! {
        () = keep(programs) => panic!("it ends"),
        () = others => {}
    }
}

async fn seconds(count: u64) {
    tokio::time::sleep(Duration::from_secs(count)).await;
}

#[tokio::test(start_paused = true)]
async fn the_calls_are_those_of_a_kubelet() {
    let (tables, none) = (Tables::default(), Arc::default());
    let programs = iptables(&tables, &none);
    meanwhile(&programs, seconds(1)).await;
    let canaries = |program: &str| WATCHED.map(|table| format!("{program} -w 5 -N KUBE-KUBELET-CANARY -t {table}"));
    let mut expected = vec![
        "iptables -w 5 -S POSTROUTING -t nat".to_owned(),
        "ip6tables -w 5 -S POSTROUTING -t nat".to_owned(),
        "iptables -w 5 -N KUBE-IPTABLES-HINT -t mangle".to_owned(),
        "iptables -w 5 -N KUBE-FIREWALL -t filter".to_owned(),
        "iptables -w 5 -C OUTPUT -t filter -j KUBE-FIREWALL".to_owned(),
        "iptables -w 5 -I OUTPUT -t filter -j KUBE-FIREWALL".to_owned(),
        "iptables -w 5 -C INPUT -t filter -j KUBE-FIREWALL".to_owned(),
        "iptables -w 5 -I INPUT -t filter -j KUBE-FIREWALL".to_owned(),
        format!("iptables -w 5 -C KUBE-FIREWALL -t filter {RULE}"),
        format!("iptables -w 5 -A KUBE-FIREWALL -t filter {RULE}"),
    ];
    expected.extend(canaries("iptables"));
    expected.push("ip6tables -w 5 -N KUBE-IPTABLES-HINT -t mangle".to_owned());
    expected.extend(canaries("ip6tables"));
    assert_eq!(programs.take(), expected);
    assert!(DROP_MARTIANS.contains(&"block incoming localnet connections"), "the comment is one argument");

    // The next agent finds all of it.
    meanwhile(&programs, seconds(1)).await;
    let calls = programs.take();
    assert!(
        calls.len() == 14 && calls.iter().all(|call| !call.contains(" -I ") && !call.contains(" -A ")),
        "{calls:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn what_was_flushed_is_made_again_once_all_tables_are() {
    let (tables, none) = (Tables::default(), Arc::default());
    let programs = iptables(&tables, &none);
    let flushes = async {
        seconds(1).await;
        let made = tables.lock().expect("unpoisoned").clone();
        programs.take();
        seconds(60).await;
        let checks = ["iptables", "ip6tables"].map(|name| format!("{name} -w 5 -S KUBE-KUBELET-CANARY -t mangle"));
        assert_eq!(programs.take(), checks, "one call a minute while nothing is flushed");
        let keep_only = |part: &str| tables.lock().expect("unpoisoned").retain(|entry| entry.contains(part));
        keep_only(" filter ");
        // The check is due in 59 s; the flush goes on for two seconds longer.
        seconds(61).await;
        assert!(!programs.take().iter().any(|call| call.contains(" -N ")), "while the flush goes on");
        keep_only("no entry");
        seconds(1).await;
        assert_eq!(*tables.lock().expect("unpoisoned"), made);
        // Only one table was flushed: the others are not waited for without end.
        keep_only(" filter ");
        seconds(80).await;
        assert_eq!(*tables.lock().expect("unpoisoned"), made);
    };
    meanwhile(&programs, flushes).await;
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_another_program_holds_is_no_flush_and_a_failure_is_tried_again() {
    let (tables, broken) = (Tables::default(), Arc::default());
    let programs = iptables(&tables, &broken);
    let set = |fault| *broken.lock().expect("unpoisoned") = fault;
    set(Some((" -C INPUT ", RESOURCE_PROBLEM)));
    let faults = async {
        seconds(1).await;
        assert!(
            tables.lock().expect("unpoisoned").contains("ip6tables mangle KUBE-KUBELET-CANARY "),
            "of the other family"
        );
        set(None);
        seconds(60).await;
        assert!(tables.lock().expect("unpoisoned").contains("iptables filter INPUT -j KUBE-FIREWALL"));
        set(Some((CANARY, RESOURCE_PROBLEM)));
        programs.take();
        seconds(120).await;
        let calls = programs.take();
        assert!(calls.len() == 4 && calls.iter().all(|call| call.contains(" -S ")), "{calls:?}");
    };
    meanwhile(&programs, faults).await;
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_is_held_at_the_start_is_waited_for() {
    let tables = Tables::default();
    let broken = Arc::new(Mutex::new(Some(("tables", RESOURCE_PROBLEM))));
    let programs = iptables(&tables, &broken);
    let unlocking = async {
        seconds(1).await;
        *broken.lock().expect("unpoisoned") = None;
        seconds(60).await;
        for made in ["iptables mangle KUBE-IPTABLES-HINT ", "ip6tables mangle KUBE-IPTABLES-HINT "] {
            assert!(tables.lock().expect("unpoisoned").contains(made), "{made}");
        }
    };
    meanwhile(&programs, unlocking).await;
}

#[tokio::test(start_paused = true)]
async fn one_family_is_enough_and_without_both_it_ends() {
    let (tables, broken) = (Tables::default(), Arc::new(Mutex::new(Some(("ip6tables", 3)))));
    let programs = iptables(&tables, &broken);
    meanwhile(&programs, seconds(1)).await;
    assert!(tables.lock().expect("unpoisoned").contains("iptables mangle KUBE-IPTABLES-HINT "));
    programs.take();
    *broken.lock().expect("unpoisoned") = Some(("tables", 3));
    keep(&programs).await;
    assert_eq!(programs.take().len(), 2, "one look for each family");
    keep(&NoPrograms).await;
}

/// A node without programs.
#[derive(Debug)]
struct NoPrograms;

impl Programs for NoPrograms {
    fn run<'a>(&'a self, call: &'a Call) -> BoxFuture<'a, Result<Ended, ProgramError>> {
        Box::pin(async move { Err(call.failed("the program is not installed on this node")) })
    }
}
