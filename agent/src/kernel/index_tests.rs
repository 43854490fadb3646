//! Cgroup names, and adding and removing entries.

use proptest::prelude::*;

use super::*;

const A: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
const B: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

#[test]
fn ids_are_read_from_leaf_names() {
    for (path, expected) in [
        (format!("/kubepods/burstable/pod1234-ab/{A}"), Some(A)),
        (format!("/kubepods.slice/kubepods-pod1.slice/cri-containerd-{B}.scope"), Some(B)),
        (format!("/kubepods.slice/kubepods-pod1.slice/crio-{B}.scope"), Some(B)),
        (format!("/kubepods/pod1/crio-{B}"), Some(B)),
        (format!("crio-{B}.scope"), Some(B)),
        (format!("/system.slice/crio-conmon-{B}.scope"), None),
        (format!("/kubepods/{A}/init"), None),
        ("/kubepods/burstable/pod0123456789abcdef0123456789abcdef".to_owned(), None),
        (format!("/k8s.io/{}", &A[1..]), None),
        (format!("/k8s.io/{A}0"), None),
        (A.to_uppercase(), None),
        ("/".to_owned(), None),
        (String::new(), None),
    ] {
        assert_eq!(container_of_path(&path), expected, "{path}");
    }
}

#[test]
fn a_container_is_indexed_before_the_runtime_reports_it() {
    let mut index = ContainerIndex::new();
    index.cgroup_created(CgroupId(10), None, "/kubepods/pod1");
    index.cgroup_created(CgroupId(11), Some(CgroupId(10)), &format!("/kubepods/pod1/{A}"));
    assert_eq!(index.by_cgroup(CgroupId(10)), None);
    let found = index.by_cgroup(CgroupId(11)).expect("its name holds the id");
    assert_eq!(found, Membership { container: A.into(), own: true });
}

#[test]
fn descendants_belong_to_the_container() {
    let mut index = ContainerIndex::new();
    index.cgroup_created(CgroupId(11), None, &format!("/kubepods/pod1/{A}"));
    index.cgroup_created(CgroupId(12), Some(CgroupId(11)), &format!("/kubepods/pod1/{A}/docker/{B}"));
    index.cgroup_created(CgroupId(13), None, &format!("/kubepods/pod1/{A}/docker/{B}"));
    // The path was too long; the record contains the name only.
    index.cgroup_created(CgroupId(14), Some(CgroupId(12)), B);
    for id in [12, 13, 14] {
        let found = index.by_cgroup(CgroupId(id)).expect("inside a container");
        assert_eq!(found, Membership { container: A.into(), own: false }, "{id}");
    }
}

#[test]
fn pids_of_the_runtime_are_indexed() {
    let mut index = ContainerIndex::new();
    let container = ContainerId::from(A);
    index.container_runs(&container, 77, Some(CgroupId(5)));
    assert_eq!(index.by_pid(77), Some(&container));
    assert_eq!(index.by_cgroup(CgroupId(5)).map(|found| found.own), Some(true));
    // The pid is reused by another container.
    index.process_gone(77);
    assert_eq!(index.by_pid(77), None);
    let other = ContainerId::from(B);
    index.container_runs(&other, 77, None);
    index.container_removed(&container);
    assert_eq!(index.by_pid(77), Some(&other));
    assert_eq!(index.by_cgroup(CgroupId(5)), None);
    index.container_removed(&other);
    assert!(index.is_empty());
}

#[test]
fn a_removed_cgroup_is_not_indexed() {
    let mut index = ContainerIndex::new();
    index.cgroup_created(CgroupId(11), None, A);
    index.cgroup_removed(CgroupId(11));
    index.cgroup_removed(CgroupId(11));
    assert!(index.is_empty());
}

proptest! {
    /// Every id found is 64 hexadecimal digits of the path.
    #[test]
    fn found_ids_are_ids(path in "[a-f0-9/.-]{0,100}(crio-)?[a-f0-9]{60,68}(\\.scope)?") {
        if let Some(id) = container_of_path(&path) {
            prop_assert_eq!(id.len(), 64);
            prop_assert!(path.contains(id));
        }
    }
}
