//! Wait statuses, records, and random bytes.

use proptest::prelude::*;

use super::*;

fn bytes<T: Plain>(record: &T) -> Vec<u8> {
    let at = std::ptr::from_ref(record).cast::<u8>();
    // SAFETY: a plain record is readable as the bytes it consists of.
    unsafe { std::slice::from_raw_parts(at, size_of::<T>()) }.to_vec()
}

fn head(kind: u32, flags: u32) -> Head {
    Head { kind, flags, time_ns: 77 }
}

#[test]
fn wait_statuses_become_codes() {
    for (status, expected, code) in [
        (0x0000, ExitStatus::Code(0), 0),
        (0x0100, ExitStatus::Code(1), 1),
        (0xff00, ExitStatus::Code(255), 255),
        (0x0009, ExitStatus::Signal(9), 137),
        (0x008b, ExitStatus::Signal(11), 139),
        (0x000f, ExitStatus::Signal(15), 143),
    ] {
        let decoded = ExitStatus::from_wait_status(status);
        assert_eq!(decoded, expected, "{status:#x}");
        assert_eq!(decoded.code(), code, "{status:#x}");
    }
}

#[test]
fn an_exit_is_decoded() {
    let record = ExitRecord {
        head: head(kind::EXIT, flags::CGROUP_KNOWN | flags::PID_NS_INIT),
        cgroup_id: 42,
        start_ns: 5,
        pid: 1234,
        last_tid: 1235,
        wait_status: 0x0300,
        pid_ns_level: 1,
        comm: *b"sleep\0garbage!!!",
    };
    let Some(KernelRecord::Exit(exit)) = decode(&bytes(&record)) else {
        panic!("not an exit");
    };
    assert_eq!(exit.pid, 1234);
    assert_eq!(exit.started, BootTime(5));
    assert_eq!(exit.at, BootTime(77));
    assert_eq!(exit.status, ExitStatus::Code(3));
    assert_eq!(exit.cgroup, Some(CgroupId(42)));
    assert!(exit.pid_ns_init);
    assert!(!exit.oom_victim);
    assert_eq!(exit.comm, "sleep");
}

#[test]
fn unknown_fields_of_an_oom_kill_are_none() {
    let mut record = OomRecord { head: head(kind::OOM, 0), pid: 9, anon_kib: 64, ..OomRecord::default() };
    let oom = |record: &OomRecord| match decode(&bytes(record)) {
        Some(KernelRecord::Oom(oom)) => oom,
        other => panic!("not an OOM kill: {other:?}"),
    };
    let unknown = oom(&record);
    assert_eq!((unknown.cgroup, unknown.victim, unknown.memory), (None, None, None));
    assert_eq!((unknown.limit, unknown.kills, unknown.group, unknown.root), (OomLimit::Unknown, None, None, None));

    record.head.flags = flags::LIMIT_SEARCHED;
    assert_eq!(oom(&record).limit, OomLimit::None, "the node was out of memory");
    (record.limit_cgroup_id, record.limit_kib, record.kills, record.root_pid) = (8, 1024, 3, 5);
    record.head.flags = flags::LIMIT_KNOWN
        | flags::LIMIT_SEARCHED
        | flags::MEMORY_KNOWN
        | flags::KILLS_KNOWN
        | flags::ROOT_KNOWN
        | flags::ROOT_IS_INIT;
    let known = oom(&record);
    assert_eq!(known.limit, OomLimit::Exceeded { cgroup: CgroupId(8), kib: 1024 });
    assert_eq!(known.kills, Some(3));
    assert_eq!(known.root, Some(OomRoot { pid: 5, is_init: true, in_cgroup: false }));
    assert_eq!(known.memory.map(|memory| memory.anon_kib), Some(64));
}

#[test]
fn cgroup_paths_end_where_the_record_says() {
    let mut path = [b'x'; common::PATH_LEN];
    path[..9].copy_from_slice(b"/kubepods");
    let mut record = CgroupRecord {
        head: head(kind::CGROUP_CREATED, 0),
        cgroup_id: 1,
        parent_id: 2,
        hierarchy: 4,
        path_len: 9,
        path,
    };
    match decode(&bytes(&record)) {
        Some(KernelRecord::CgroupCreated(event)) => {
            assert_eq!(event.path, "/kubepods");
            assert_eq!((event.id, event.parent), (CgroupId(1), CgroupId(2)));
        }
        other => panic!("not a creation: {other:?}"),
    }
    record.path_len = u32::MAX;
    record.head.kind = kind::CGROUP_REMOVED;
    match decode(&bytes(&record)) {
        Some(KernelRecord::CgroupRemoved(event)) => assert_eq!(event.path.len(), common::PATH_LEN),
        other => panic!("not a removal: {other:?}"),
    }
}

#[test]
fn short_and_unknown_records_are_none() {
    let record = ExitRecord { head: head(kind::EXIT, 0), ..ExitRecord::default() };
    let whole = bytes(&record);
    for len in 0..whole.len() {
        assert_eq!(decode(&whole[..len]), None, "{len} bytes");
    }
    assert!(decode(&whole).is_some());
    assert_eq!(decode(&bytes(&Head { kind: 99, ..Head::default() })), None);
}

proptest! {
    #[test]
    fn random_bytes_do_not_panic(noise in proptest::collection::vec(any::<u8>(), 0..600), kind in 0u32..6) {
        let mut noise = noise;
        if noise.len() >= 4 {
            noise[..4].copy_from_slice(&kind.to_ne_bytes());
        }
        let _ = decode(&noise);
    }
}
