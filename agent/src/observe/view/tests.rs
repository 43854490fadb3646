use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::*;
use crate::observe::record::ExitInfo;
use crate::observe::record::ExitRecord;
use crate::observe::record::ExitSource;
use crate::observe::record::Line;
use crate::observe::record::PodName;
use crate::observe::record::PodRecord;
use crate::observe::record::Record;
use crate::observe::record::Timestamp;
use crate::observe::record::samples;

/// The view as text.
fn screen(node: &ObservedNode, settings: &Settings, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(node, settings, frame.area(), frame.buffer_mut())).unwrap();
    let buffer = terminal.backend().buffer();
    let row = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
    (0..height).map(row).collect()
}

fn shows(lines: &[String], words: &[&str]) -> bool {
    lines.iter().any(|line| words.iter().all(|word| line.contains(word)))
}

#[test]
fn pods_events_and_stalls_are_shown() {
    let lines = screen(&samples::node(), &Settings::default(), 130, 30);
    let text = lines.join("\n");
    for words in [
        &["keblet observe", "node-1", "containerd 1.7.24", "kernel 6.12.48", "cgroup v2", "5 pods"][..],
        &["cpu", "memory", "io", "CPUs"],
        &["! runtime-events down", "gives each event to one reader", "→ changes are noticed"],
        &["! 3 records of the kernel were lost"],
        &["shop/cart-7d9f", "1/1", "3", "OOMKilled 137", "4", "0.18", "61Mi/64Mi"],
        &["batch/report-28", "Error 1", "▂"],
        &["kube-system/coredns-5d78", "1/1", "0.01", "24Mi/170Mi"],
        &["OOM shop/cart-7d9f cart: child python3(4711) held 63Mi; limit"],
        &["batch/report-28 worker: Error 1", "cannot reach the database"],
        &["before", "OOM shop/cart-7d9f: 2 processes, unknown; limit unknown (counter)"],
        &["q quit", "by: pressure"],
    ] {
        assert!(shows(&lines, words), "{words:?} is missing in\n{text}");
    }
    let wrapped: String = lines.iter().map(|line| line.chars().skip(78).collect::<String>()).collect();
    let wrapped = wrapped.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(wrapped.contains("waits for memory 31 % of the time"), "{text}");
}

#[test]
fn that_pods_are_left_out_is_shown() {
    let mut node = samples::node();
    node.pods_left_out = 3;
    let lines = screen(&node, &Settings::default(), 130, 30);
    assert!(shows(&lines, &["! 4096 pods are kept; 3 records of further ones were left out"]), "{lines:?}");
}

#[test]
fn what_happened_last_is_on_top() {
    let mut node = ObservedNode::default();
    let pod = PodName { namespace: "ns".into(), name: "p".into(), uid: "u".into() };
    let at = |second: i64| Timestamp::from_nanos(second * 1_000_000_000).unwrap();
    // Reported in another order.
    for (container, finished, reported) in [("second", 5, 9), ("first", 3, 10), ("third", 8, 11)] {
        let exit = ExitInfo { reason: "Error".into(), finished_at: Some(at(finished)), ..ExitInfo::default() };
        let (container, id, source) = (container.to_owned(), String::new(), ExitSource::Runtime);
        let record = ExitRecord { pod: pod.clone(), container, id, exit, source, earlier: false };
        node.apply(&Line::new(at(reported), Record::Exit(record)));
    }
    let lines = screen(&node, &Settings::default(), 130, 30);
    let shown: Vec<&str> = lines.iter().filter_map(|line| line.split_once("ns/p ")?.1.split(':').next()).collect();
    assert_eq!(shown, ["third", "second", "first"], "{lines:#?}");
}

#[test]
fn a_pod_is_opened() {
    let node = samples::node();
    let uid = node.pods.values().find(|pod| pod.pod.pod.name == "cart-7d9f").unwrap().pod.pod.uid.clone();
    let lines = screen(&node, &Settings { opened: Some(uid.clone()), ..Settings::default() }, 130, 30);
    let text = lines.join("\n");
    for words in [
        &["shop/cart-7d9f", uid.as_str(), "10.244.1.9"][..],
        &["cart ", "running since", "3 restarts", "last exit: OOMKilled 137", "registry.example/cart:2.4.1"],
        &["memory", "some", "full", "▅"],
        &["memory 61Mi/64Mi", "reclaims"],
        &["waits for memory 31 %", "batch/report-28 grew by 210Mi"],
        &["OOM shop/cart-7d9f cart: child python3(4711)"],
    ] {
        assert!(shows(&lines, words), "{words:?} is missing in\n{text}");
    }
    assert!(!text.contains("kube-proxy"), "only this pod: {text}");
    // A pod that is gone is closed.
    let gone = Settings { opened: Some("gone".to_owned()), ..Settings::default() };
    assert!(shows(&screen(&node, &gone, 130, 30), &["kube-system/kube-proxy"]));
}

#[test]
fn filter_help_and_freeze_are_shown() {
    let node = samples::node();
    let typing = Settings { typing: true, filter: "cart".to_owned(), frozen: true, ..Settings::default() };
    let lines = screen(&node, &typing, 130, 12);
    assert!(shows(&lines, &["/cart█"]) && shows(&lines, &["FROZEN"]) && !shows(&lines, &["coredns"]));
    let help = screen(&node, &Settings { help: true, ..Settings::default() }, 130, 30);
    assert!(shows(&help, &["space", "freeze the view"]) && shows(&help, &["OOM", "before observing began"]));
}

#[test]
fn any_size_can_be_drawn() {
    let node = samples::node();
    for settings in [
        Settings::default(),
        Settings { help: true, ..Settings::default() },
        Settings { opened: node.pods.keys().next().cloned(), ..Settings::default() },
    ] {
        for (width, height) in [(1, 1), (39, 7), (40, 8), (60, 9), (80, 24), (300, 100), (500, 3)] {
            screen(&node, &settings, width, height);
            screen(&ObservedNode::default(), &settings, width, height);
        }
    }
    assert!(shows(&screen(&node, &Settings::default(), 39, 7), &["too small"]));
}

#[test]
fn a_narrow_terminal_leaves_out_columns_rather_than_names() {
    let node = samples::node();
    let headings = |width, height| {
        let lines = screen(&node, &Settings::default(), width, height);
        assert!(shows(&lines, &["kube-system/coredns-5d78", "1/1"]), "{lines:#?}");
        let headings = lines.iter().find(|line| line.starts_with("POD ")).expect("headings");
        headings.split_whitespace().skip(1).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(headings(120, 24), "RUN RST LAST EXIT OOM CPU MEMORY PRESSURE cpu mem io");
    assert_eq!(headings(80, 24), "RUN LAST EXIT OOM PRESSURE cpu mem io");
    assert_eq!(headings(40, 12), "RUN OOM");
}

#[test]
fn the_selected_pod_stays_visible() {
    let mut node = ObservedNode::default();
    for n in 0..200 {
        let pod = PodName { namespace: "ns".into(), name: format!("pod-{n:03}"), uid: format!("{n:03}") };
        let record = Record::Pod(PodRecord { pod, ..PodRecord::default() });
        node.apply(&Line::new(Timestamp::default(), record));
    }
    let settings = Settings { selected: Some("150".to_owned()), ..Settings::default() };
    assert!(shows(&screen(&node, &settings, 100, 30), &["ns/pod-150"]));
}

#[test]
fn names_cannot_steer_the_terminal() {
    let mut node = ObservedNode::default();
    let pod = PodName { namespace: "ns".into(), name: "a\u{1b}[2Jb\n".into(), uid: "u".into() };
    node.apply(&Line::new(Timestamp::default(), Record::Pod(PodRecord { pod, ..PodRecord::default() })));
    let mut terminal = Terminal::new(TestBackend::new(100, 30)).unwrap();
    terminal.draw(|frame| draw(&node, &Settings::default(), frame.area(), frame.buffer_mut())).unwrap();
    let cells = terminal.backend().buffer().content().iter();
    assert!(cells.clone().all(|cell| !cell.symbol().contains(char::is_control)));
}
