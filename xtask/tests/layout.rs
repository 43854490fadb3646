//! Tracing, proven on a program at hand: this one.

use std::fs;
use std::process::Command;

const XTASK: &str = env!("CARGO_BIN_EXE_xtask");

#[test]
fn a_traced_program_does_its_work_and_its_calls_are_listed() {
    let folder = tempfile::tempdir().unwrap();
    let traced = folder.path().join("traced-agent");
    std::os::unix::fs::symlink(XTASK, &traced).unwrap();
    let run = Command::new(&traced).arg("--help").env("KEBLET_LAYOUT_PROGRAM", XTASK).output().unwrap();
    let plain = Command::new(XTASK).arg("--help").output().unwrap();
    assert!(run.status.success(), "{run:?}");
    assert_eq!(String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&plain.stdout));

    let lists = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let list = lists.into_iter().find(|path| path.extension().is_some_and(|e| e == "calls")).unwrap();
    let calls = fs::read_to_string(list).unwrap();
    let called = |name: &str| calls.lines().filter(|line| line.contains(name)).count();
    assert_eq!(called("5xtask4main"), 1, "{calls}");
    assert_eq!(called("5xtask4peers5build"), 0, "what was not called is not listed");

    let lost = Command::new(&traced).env("KEBLET_LAYOUT_PROGRAM", "/nowhere").output().unwrap();
    let said = String::from_utf8_lossy(&lost.stderr).into_owned();
    assert!(!lost.status.success() && said.contains("/nowhere"), "{said}");
}
