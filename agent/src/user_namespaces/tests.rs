use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use super::node_range::exists;
use super::node_range::parse;
use super::node_range::subordinate_ids;
use super::*;
use crate::filesystem::testing::InPlace;
use crate::filesystem::testing::in_time;

const L: u32 = 65_536;

fn range(slots: u64) -> IdRange {
    IdRange::new(u64::from(L), slots * u64::from(L), u64::from(L), 1).expect("a range")
}

/// Pods with these names have a directory.
fn disk(uids: &[&str]) -> (tempfile::TempDir, PodDirs) {
    let dir = tempfile::tempdir().expect("a folder");
    uids.iter().for_each(|uid| fs::create_dir_all(dir.path().join("pods").join(uid)).expect("a folder"));
    let dirs = PodDirs::new(dir.path());
    (dir, dirs)
}

fn file(dir: &tempfile::TempDir, uid: &str) -> std::path::PathBuf {
    dir.path().join("pods").join(uid).join("userns")
}

fn checkpoint(first: u32, length: u32) -> String {
    let list = format!(r#"[{{"hostId":{first},"containerId":0,"length":{length}}}]"#);
    format!(r#"{{"uidMappings":{list},"gidMappings":{list}}}"#)
}

/// Why the agent does not start with this content in the file of pod `u`, beside pod `a` with the first range.
fn start_error(content: &str) -> String {
    let (dir, dirs) = disk(&["a", "u"]);
    fs::write(file(&dir, "a"), checkpoint(L, L)).expect("written");
    fs::write(file(&dir, "u"), content).expect("written");
    UserNamespaces::open(dirs, range(2)).expect_err("refused").to_string()
}

#[test]
fn ranges_of_the_node_are_checked_in_the_kubelets_order() {
    let table = [
        ((65_536, 7_208_960, 65_536, 110), None),
        ((65_536, 7_208_960, 65_536, 111), Some("kubelet user assigned IDs are not enough to support 111 pods")),
        ((65_536, 65_536, 65_537, 1), Some("kubelet user namespace length 65537 is not a multiple of 65536")),
        ((65_537, 1, 65_536, 1), Some("kubelet user assigned ID 65537 is not a multiple of 65536")),
        ((0, 1, 65_536, 1), Some("kubelet user assigned ID 0 must be greater or equal to 65536")),
        ((65_536, 65_537, 65_536, 1), Some("kubelet user assigned IDs length 65537 is not a multiple of 65536")),
        (
            (4_294_901_760, 131_072, 65_536, 1),
            Some("kubelet user assigned IDs 4294901760 and 131072 more exceed the ids of the kernel"),
        ),
        ((65_536, 4_294_901_760, 65_536, 110), None),
        ((131_072, (1 << 32) - 131_072, 131_072, 110), None),
        (
            (196_608, (1 << 32) - 196_608, 196_608, 110),
            Some("kubelet user assigned IDs length 4294770688 is not a multiple of 196608"),
        ),
    ];
    for ((first, length, per_pod, max_pods), expected) in table {
        let error = IdRange::new(first, length, per_pod, max_pods).err().map(|error| error.to_string());
        assert_eq!(error.as_deref(), expected, "{first} {length} {per_pod} {max_pods}");
    }
    let range = IdRange::new(65_536, 7_208_960, 65_536, 110).expect("a range");
    assert_eq!(range.usable_slots(), 110);
    let all = IdRange::new(65_536, 4_294_901_760, 65_536, 110).expect("a range");
    assert_eq!(all.usable_slots(), 65_534, "the last id is no user");
    assert_eq!(range.mapping(109), Mapping { first: 7_208_960, length: L });
    assert_eq!([65_536, 7_208_960, 7_274_496, 0].map(|first| range.slot(first)), [Some(0), Some(109), None, None]);
}

#[test]
fn a_node_without_a_file_of_users_has_no_user() {
    use nix::errno::Errno;
    use nix::unistd::User;
    let dir = tempfile::tempdir().expect("a folder");
    let (there, none) = (dir.path(), dir.path().join("passwd"));
    assert_eq!(exists(User::from_name("root"), there), Ok(true));
    assert_eq!([exists(Ok(None), there), exists(Err(Errno::ENOENT), &none)], [Ok(false), Ok(false)]);
    for (error, users) in [(Errno::ENOENT, there), (Errno::EIO, none.as_path())] {
        let found = exists(Err(error), users);
        assert!(found.is_err_and(|error| error.starts_with("user: lookup kubelet: ")), "a service does not answer");
    }
}

#[test]
fn output_of_getsubids() {
    assert_eq!(parse("0: kubelet 65536 7208960\n"), Ok((65_536, 7_208_960)));
    let two = "0: kubelet 1 2\n1: kubelet 3 4\n";
    assert_eq!(parse(two), Err(format!("error parsing line {two:?}: it must contain only one line")));
    assert_eq!(parse("0: kubelet 1\n"), Err("invalid line \"0: kubelet 1\\n\"".to_owned()));
    for wrong in ["0: kubelet x 1", "0: kubelet 1 4294967296"] {
        let error = parse(wrong).expect_err("not a number");
        assert!(error.starts_with(&format!("error parsing line {wrong:?}: ")), "{error}");
    }
}

#[tokio::test]
async fn getsubids_is_called_for_users_and_groups() {
    let dir = tempfile::tempdir().expect("a folder");
    let program = dir.path().join("getsubids");
    let path = program.to_str().expect("a path");
    assert_eq!(subordinate_ids(path).await, Ok(None), "not installed: the default range");
    for (script, expected) in [
        ("exit 3", "error retrieving additional uids for user \"kubelet\": exit status 3"),
        ("[ $1 != -g ] && echo 0: kubelet 1 2", "error retrieving additional gids for user \"kubelet\""),
        ("echo 0: $1 1 2", "mismatched subuids and subgids for user \"kubelet\""),
        ("echo 0: kubelet", "invalid line \"0: kubelet\\n\""),
    ] {
        write_program(&program, script);
        let error = subordinate_ids(path).await.expect_err(script);
        assert_eq!(error, expected);
    }
    write_program(&program, "[ \"$1\" = kubelet ] || [ \"$1 $2\" = '-g kubelet' ] && echo 0: kubelet 131072 65536");
    assert_eq!(subordinate_ids(path).await, Ok(Some((131_072, 65_536))));
}

#[tokio::test(start_paused = true)]
async fn getsubids_that_does_not_end_is_given_up() {
    let dir = tempfile::tempdir().expect("a folder");
    let program = dir.path().join("getsubids");
    write_program(&program, "exec sleep 1000");
    let error = subordinate_ids(program.to_str().expect("a path")).await.expect_err("it hangs");
    let expected = "error retrieving additional uids for user \"kubelet\": getsubids did not end within 30s";
    assert_eq!(error, expected);
}

/// Replaces the program. The file is written under another name by a shell, so that no other test's child process can have
/// it open for writing while it is executed.
fn write_program(path: &std::path::Path, script: &str) {
    let command = r#"printf '#!/bin/sh\n%s\n' "$1" > "$0".new && chmod 755 "$0".new && mv "$0".new "$0""#;
    let written = std::process::Command::new("sh").arg("-c").arg(command).arg(path).arg(script).status();
    assert!(written.expect("a shell").success());
}

#[tokio::test]
async fn a_range_is_recorded_and_kept_over_a_restart() {
    let (dir, dirs) = disk(&["a", "b"]);
    let first = UserNamespaces::open(dirs.clone(), range(100)).expect("opened");
    let (a, b) = (first.of_pod("a").await.expect("a range"), first.of_pod("b").await.expect("a range"));
    assert_ne!(a, b);
    assert_eq!(fs::read_to_string(file(&dir, "a")).expect("written"), checkpoint(a.first, L));
    let mode = fs::metadata(file(&dir, "a")).expect("there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(fs::read_dir(dir.path().join("pods/a")).expect("listed").count(), 1, "nothing else is left");
    let second = UserNamespaces::open(dirs, range(100)).expect("opened");
    assert_eq!((second.of_pod("a").await.expect("kept"), second.of_pod("b").await.expect("kept")), (a, b));
}

#[tokio::test]
async fn no_two_pods_have_a_range_until_it_is_released() {
    let uids = ["a", "b", "c"];
    let (dir, dirs) = disk(&[&uids[..], &["d"]].concat());
    let namespaces = UserNamespaces::open(dirs, range(3)).expect("opened");
    let mut given = Vec::new();
    for uid in uids {
        given.push(namespaces.of_pod(uid).await.expect("a range").first);
    }
    given.sort_unstable();
    assert_eq!(given, [L, 2 * L, 3 * L]);
    let full = namespaces.of_pod("d").await.expect_err("no range is left").to_string();
    assert_eq!(full, "create user namespace: could not find an empty slot to allocate a user namespace");
    let of_b = namespaces.of_pod("b").await.expect("its range");
    namespaces.release("b").await.expect("released");
    namespaces.release("b").await.expect("twice is fine");
    assert!(!file(&dir, "b").exists());
    assert_eq!(namespaces.of_pod("d").await.expect("the only free one"), of_b);
    let mut recorded = namespaces.recorded();
    recorded.sort();
    assert_eq!(recorded, ["a", "c", "d"]);
}

#[test]
fn a_search_wraps() {
    let mut slots = Slots::new(range(4));
    for (uid, first) in [("a", 3 * L), ("b", 4 * L)] {
        slots.record(uid, Mapping { first, length: L }).expect("free");
    }
    assert_eq!([0, 1, 2, 3].map(|start| slots.free_from(start)), [Some(0), Some(1), Some(0), Some(0)]);
}

#[test]
fn files_that_cannot_be_right_prevent_the_start() {
    let configuration = "invalid user namespace configuration: ";
    let one = format!(r#"{{"hostId":{L},"containerId":0,"length":{L}}}"#);
    let inside = format!(r#"{{"hostId":{L},"containerId":1,"length":{L}}}"#);
    let with = |users: &str, groups: &str| format!(r#"{{"uidMappings":[{users}],"gidMappings":[{groups}]}}"#);
    let table = [
        (with("", ""), format!("{configuration}no more than one mapping allowed.")),
        ("{}".to_owned(), format!("{configuration}no more than one mapping allowed.")),
        (with(&format!("{one},{one}"), &one), format!("{configuration}no more than one mapping allowed.")),
        (with(&one, ""), format!("{configuration}GID and UID mappings should be identical.")),
        (with(&one, &inside), format!("{configuration}GID and UID mapping should be identical")),
        (with(&inside, &inside), format!("{configuration}UID 0 must be mapped")),
        (checkpoint(2 * L, 131_072), "wrong user namespace length 131072".to_owned()),
        (checkpoint(L + 1, L), "wrong user namespace offset specified 65537".to_owned()),
        (checkpoint(3 * L, L), "id 196608 is out of range".to_owned()),
        (checkpoint(0, L), "id 0 is out of range".to_owned()),
        (checkpoint(L, L), "range picked for pod \"u\" already taken".to_owned()),
    ];
    for (content, expected) in table {
        assert_eq!(
            start_error(&content),
            format!("record pod mappings for existing pod \"u\": {expected}"),
            "{content}"
        );
    }
    let broken = start_error("{");
    let prefix = "record pod mappings for existing pod \"u\": invalid user namespace mappings file: ";
    assert!(broken.starts_with(prefix), "{broken}");
}

#[test]
fn a_file_that_cannot_be_read_prevents_the_start() {
    let (dir, dirs) = disk(&["u"]);
    fs::create_dir(file(&dir, "u")).expect("a folder in the file's place");
    let error = UserNamespaces::open(dirs.clone(), range(2)).expect_err("refused").to_string();
    assert!(
        error.starts_with("record pod mappings for existing pod \"u\": cannot read the user namespace file"),
        "{error}"
    );
    fs::remove_dir(file(&dir, "u")).expect("removed");
    fs::write(file(&dir, "u"), "").expect("an empty file");
    let opened = UserNamespaces::open(dirs, range(2)).expect("an empty file is none");
    assert_eq!(opened.recorded(), Vec::<String>::new());
}

#[test]
fn what_lies_in_place_of_a_file_prevents_the_start_and_stays() {
    for found in InPlace::ALL {
        let (dir, dirs) = disk(&["u"]);
        let path = file(&dir, "u");
        found.put(&path).expect("made");
        let opened = in_time(move || UserNamespaces::open(dirs, range(2))).expect("no other process is waited for");
        let error = opened.expect_err("refused").to_string();
        assert!(error.starts_with("record pod mappings for existing pod \"u\": "), "{found:?}: {error}");
        assert!(found.is_at(&path), "{found:?}");
    }
}

/// Without power, less may be on the disk than was written.
#[test]
fn a_part_of_a_file_prevents_the_start() {
    let whole = checkpoint(2 * L, L);
    for length in 1..whole.len() {
        let error = start_error(&whole[..length]);
        assert!(error.contains("invalid user namespace mappings file: "), "{error}");
    }
}

#[tokio::test]
async fn the_file_takes_precedence_over_the_cached_range() {
    let (dir, dirs) = disk(&["a", "b"]);
    let namespaces = UserNamespaces::open(dirs, range(3)).expect("opened");
    fs::write(file(&dir, "a"), checkpoint(2 * L, L)).expect("written");
    assert_eq!(namespaces.of_pod("a").await.expect("the file's").first, 2 * L);
    fs::write(file(&dir, "a"), checkpoint(L, L)).expect("written");
    let error = namespaces.of_pod("a").await.expect_err("it has another").to_string();
    assert_eq!(error, "user namespace: different user namespace range already used by pod \"a\"");
    fs::write(file(&dir, "b"), checkpoint(2 * L, L)).expect("written");
    let error = namespaces.of_pod("b").await.expect_err("another pod's").to_string();
    assert_eq!(error, "user namespace: range picked for pod \"b\" already taken");
}

fn is_full(given: Result<Mapping, UserNamespaceError>) -> bool {
    matches!(given, Err(UserNamespaceError::Create(cause)) if matches!(*cause, UserNamespaceError::NoFreeRange))
}

#[tokio::test]
async fn failures_of_the_disk_free_no_range() {
    let (dir, dirs) = disk(&["a", "b"]);
    let namespaces = UserNamespaces::open(dirs, range(1)).expect("opened");
    // The range cannot be recorded: a folder lies in the way of the new file.
    let partial = dir.path().join("pods/a/.userns.tmp");
    fs::create_dir(&partial).expect("a folder");
    let error = namespaces.of_pod("a").await.expect_err("not recorded").to_string();
    assert!(error.starts_with("create user namespace: cannot write the user namespace file"), "{error}");
    assert!(is_full(namespaces.of_pod("b").await), "it may be on the disk");
    fs::remove_dir(&partial).expect("removed");
    namespaces.of_pod("a").await.expect("its range");
    // The file cannot be removed.
    fs::remove_file(file(&dir, "a")).expect("removed");
    fs::create_dir_all(file(&dir, "a").join("x")).expect("a folder");
    assert!(namespaces.release("a").await.is_err());
    assert!(is_full(namespaces.of_pod("b").await), "it is still recorded");
    fs::remove_dir_all(file(&dir, "a")).expect("removed");
    namespaces.release("a").await.expect("released");
    namespaces.of_pod("b").await.expect("a range");
}

/// The agent was killed before the file had its name: the runtime has not received the range.
#[tokio::test]
async fn a_range_whose_record_was_not_finished_is_free() {
    let (dir, dirs) = disk(&["a", "b"]);
    let left = dir.path().join("pods/a/.userns.tmp");
    fs::write(&left, checkpoint(L, L)).expect("written");
    let namespaces = UserNamespaces::open(dirs, range(1)).expect("opened");
    namespaces.of_pod("b").await.expect("the only range");
    assert!(is_full(namespaces.of_pod("a").await));
    namespaces.release("b").await.expect("released");
    namespaces.of_pod("a").await.expect("the only range");
    assert!(!left.exists(), "the next record replaces it");
}

#[tokio::test]
async fn uids_cannot_lead_elsewhere_and_nothing_is_given_without_a_range() {
    let (_dir, dirs) = disk(&[]);
    let namespaces = UserNamespaces::open(dirs, range(1)).expect("opened");
    assert!(matches!(namespaces.of_pod("../a").await, Err(UserNamespaceError::Uid { .. })));
    let none = UserNamespaces::default();
    assert!(matches!(none.of_pod("a").await, Err(UserNamespaceError::NotSetUp)));
    none.release("a").await.expect("nothing to release");
}
