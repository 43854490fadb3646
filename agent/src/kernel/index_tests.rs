//! Cgroup names, and adding and removing entries.

use proptest::prelude::*;

use super::*;

const A: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
const B: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

#[test]
fn ids_are_read_from_leaf_names() {
    for (name, expected) in [
        (A.to_owned(), Some(A)),
        (format!("cri-containerd-{B}.scope"), Some(B)),
        (format!("crio-{B}.scope"), Some(B)),
        (format!("crio-{B}"), Some(B)),
        (format!("crio-conmon-{B}.scope"), None),
        ("init".to_owned(), None),
        ("pod0123456789abcdef0123456789abcdef".to_owned(), None),
        (A[1..].to_owned(), None),
        (format!("{A}0"), None),
        (A.to_uppercase(), None),
        (String::new(), None),
    ] {
        assert_eq!(container_of_component(&name), expected, "{name}");
    }
}

#[test]
fn places_in_the_tree_of_pods() {
    use CgroupRole::*;
    for (path, role, pod, container) in [
        ("/".to_owned(), Other, None, None),
        ("/system.slice/ssh.service".to_owned(), Other, None, None),
        ("/kubepods".to_owned(), AllPods, None, None),
        ("/kubepods.slice".to_owned(), AllPods, None, None),
        ("/x.slice/x-kubepods.slice".to_owned(), AllPods, None, None),
        ("/kubepods/burstable".to_owned(), QosClass, None, None),
        ("/kubepods.slice/kubepods-besteffort.slice".to_owned(), QosClass, None, None),
        ("/kubepods/pod1234-ab".to_owned(), Pod, Some("1234-ab"), None),
        ("/kubepods/burstable/pod1234-ab".to_owned(), Pod, Some("1234-ab"), None),
        (
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1234_ab.slice".to_owned(),
            Pod,
            Some("1234-ab"),
            None,
        ),
        (format!("/kubepods/besteffort/pod1/{A}"), Container, Some("1"), Some(A)),
        (format!("/kubepods.slice/kubepods-pod1_2.slice/cri-containerd-{B}.scope"), Container, Some("1-2"), Some(B)),
        (format!("/kubepods.slice/kubepods-pod1_2.slice/crio-{B}.scope/container"), InContainer, Some("1-2"), Some(B)),
        (format!("/kubepods/pod1/{A}/docker/{B}"), InContainer, Some("1"), Some(A)),
        (format!("/kubepods/pod1/{A}/kubepods/pod2"), InContainer, Some("1"), Some(A)),
        (format!("/kubepods/pod1/{A}/x/{B}/kubepods/pod2"), InContainer, Some("1"), Some(A)),
        (format!("/k8s.io/{A}"), Container, None, Some(A)),
        ("/kubepods/pod1/other".to_owned(), Other, Some("1"), None),
        (format!("/kubepods/pod1/crio-conmon-{B}.scope"), Other, Some("1"), None),
        ("/podman/pod1".to_owned(), Other, None, None),
    ] {
        let place = place_of(&path);
        let (found_pod, found) = (place.pod.as_ref().map(PodUid::as_str), place.container.as_ref());
        assert_eq!((place.role, found_pod, found.map(ContainerId::as_str)), (role, pod, container), "{path}");
        assert_eq!(place.path, path);
    }
}

/// As the kernel log of the machine has them, which a node that is a container (kind, minikube) reads too.
#[test]
fn the_container_that_is_a_node_is_no_container_of_its_pods() {
    use CgroupRole::*;
    let scope = format!("/system.slice/docker-{A}.scope");
    let pods = format!("{scope}/kubelet.slice/kubelet-kubepods.slice");
    let pod = format!("{pods}/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod1_2.slice");
    for (path, role, uid, container) in [
        (scope.clone(), Container, None, Some(A)),
        (format!("{scope}/system.slice"), InContainer, None, Some(A)),
        (pods.clone(), AllPods, None, None),
        (pod.clone(), Pod, Some("1-2"), None),
        (format!("{pod}/cri-containerd-{B}.scope"), Container, Some("1-2"), Some(B)),
        (format!("{pod}/cri-containerd-{B}.scope/below"), InContainer, Some("1-2"), Some(B)),
        (format!("/docker/{A}/kubelet/kubepods/pod1-2/{B}"), Container, Some("1-2"), Some(B)),
    ] {
        let place = place_of(&path);
        let (found_pod, found) = (place.pod.as_ref().map(PodUid::as_str), place.container.as_ref());
        assert_eq!((place.role, found_pod, found.map(ContainerId::as_str)), (role, uid, container), "{path}");
    }
}

#[test]
fn a_path_that_was_too_long_is_completed_from_the_parent() {
    let mut index = ContainerIndex::new();
    index.cgroup_created(CgroupId(10), None, "/kubepods/pod1");
    index.cgroup_created(CgroupId(11), Some(CgroupId(10)), A);
    index.cgroup_created(CgroupId(12), Some(CgroupId(11)), B);
    assert_eq!(index.by_cgroup(CgroupId(11)), Some(&place_of(&format!("/kubepods/pod1/{A}"))));
    assert_eq!(index.by_cgroup(CgroupId(12)).map(|place| place.role), Some(CgroupRole::InContainer));
}

#[test]
fn a_removed_cgroup_stays_known_for_a_while() {
    let mut index = ContainerIndex::new();
    index.cgroup_created(CgroupId(11), None, &format!("/kubepods/pod1/{A}"));
    index.cgroup_removed(CgroupId(11));
    index.cgroup_removed(CgroupId(11));
    assert!(index.existing().is_empty() && index.containers().next().is_none());
    assert!(index.by_cgroup(CgroupId(11)).is_some());
    for id in 100..100 + MAX_REMOVED as u64 {
        index.cgroup_created(CgroupId(id), None, "/kubepods/pod2");
        index.cgroup_removed(CgroupId(id));
    }
    assert_eq!(index.by_cgroup(CgroupId(11)), None, "bounded");
    assert!(index.by_cgroup(CgroupId(100)).is_some());
    index.cgroup_removed(CgroupId(5));
    assert!(index.existing().is_empty());
}

#[test]
fn a_walk_finds_what_was_removed_without_a_record() {
    let mut index = ContainerIndex::new();
    let pod = |number: u64| (CgroupId(number), format!("/kubepods/pod{number}"));
    [pod(1), pod(2)].iter().for_each(|(id, path)| index.cgroup_created(*id, None, path));
    let before = index.existing();
    index.cgroup_created(CgroupId(3), None, "/kubepods/pod3");
    index.found(&before, &[pod(2), pod(4)]);
    let ids = |ids: &[u64]| ids.iter().copied().map(CgroupId).collect();
    assert_eq!(index.existing(), ids(&[2, 3, 4]), "3 was created during the walk");
    assert!(index.by_cgroup(CgroupId(1)).is_some(), "its last records are attributed");
}

proptest! {
    /// Every id found is 64 hexadecimal digits of the name.
    #[test]
    fn found_ids_are_ids(name in "([a-f0-9.-]{0,100}-)?(crio-)?[a-f0-9]{60,68}(\\.scope)?") {
        if let Some(id) = container_of_component(&name) {
            prop_assert_eq!(id.len(), 64);
            prop_assert!(name.contains(id));
        }
    }
}
