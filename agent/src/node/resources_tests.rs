//! Capacity, reservations, allocatable.

use proptest::prelude::*;

use super::*;

fn sizes() -> Sizes {
    let hugepages = BTreeMap::from([(2 << 20, 64 << 20), (1 << 30, 0)]);
    Sizes { cpus: 4, memory: 8 << 30, hugepages, root_fs: Some(100 << 30), pids: 32768 }
}

fn config(kubelet: serde_json::Value) -> ResourceConfig {
    ResourceConfig::new(&serde_json::from_value(kubelet).expect("a configuration"), false)
}

fn text(amounts: &Amounts) -> Vec<String> {
    amounts.iter().map(|(name, amount)| format!("{name}={amount}")).collect()
}

#[test]
fn reservations_and_thresholds_are_subtracted() {
    let config = config(serde_json::json!({
        "systemReserved": { "cpu": "500m", "memory": "1Gi" },
        "kubeReserved": { "cpu": "250m", "memory": "512Mi", "ephemeral-storage": "10Gi" },
        "evictionHard": { "memory.available": "512Mi", "nodefs.available": "10%", "pid.available": "5%" },
    }));
    assert_eq!(
        text(&allocatable(&sizes(), &config)),
        [
            "cpu=3250m",
            "ephemeral-storage=85899345760",
            "hugepages-1Gi=0",
            "hugepages-2Mi=64Mi",
            "memory=6080Mi",
            "pods=110"
        ]
    );
    assert_eq!(capacity(&sizes(), &config)["ephemeral-storage"].to_string(), "107374182400");
    assert_eq!(check(&sizes(), &config), Ok(()));
}

#[test]
fn reserved_cpus_replace_both_reservations() {
    let config = config(serde_json::json!({
        "reservedSystemCPUs": "0-1", "systemReserved": { "cpu": "1" }, "kubeReserved": { "cpu": "1" }, "evictionHard": {},
    }));
    assert_eq!(allocatable(&sizes(), &config)["cpu"].to_string(), "2");
}

#[test]
fn limits_of_all_pods_leave_out_reservations_and_not_thresholds() {
    let config = config(serde_json::json!({
        "systemReserved": { "cpu": "500m", "memory": "1Gi", "pid": "1000" }, "kubeReserved": { "memory": "9Gi" },
        "evictionHard": { "memory.available": "512Mi" },
    }));
    let limits = pod_limits(&sizes(), Some(&config));
    assert_eq!(text(&limits), ["cpu=3500m", "memory=0", "pid=31768"], "never below zero");
    assert_eq!(text(&pod_limits(&sizes(), None)), ["cpu=4", "memory=8Gi", "pid=32768"]);
    let unknown = Sizes { pids: i64::MAX, ..sizes() };
    assert_eq!(text(&pod_limits(&unknown, None)), ["cpu=4", "memory=8Gi"]);
}

#[test]
fn pods_are_limited_per_core() {
    for (per_core, expected) in [(0, 110), (10, 40), (100, 110)] {
        let config = config(serde_json::json!({ "podsPerCore": per_core }));
        assert_eq!(capacity(&sizes(), &config)["pods"], Amount::units(expected));
    }
}

#[test]
fn local_storage_is_offered_only_if_it_is_isolated() {
    for isolated in [true, false] {
        let config = config(serde_json::json!({ "localStorageCapacityIsolation": isolated }));
        assert_eq!(allocatable(&sizes(), &config).contains_key("ephemeral-storage"), isolated);
    }
}

#[test]
fn thresholds_can_be_ignored_and_disabled() {
    let kubelet = serde_json::json!({ "evictionHard": { "memory.available": "1Gi", "nodefs.available": "0%" } });
    let kubelet: KubeletConfiguration = serde_json::from_value(kubelet).expect("a configuration");
    let thresholds = ResourceConfig::new(&kubelet, false).thresholds;
    assert_eq!(thresholds.keys().collect::<Vec<_>>(), ["memory"]);
    assert!(ResourceConfig::new(&kubelet, true).thresholds.is_empty());
}

#[test]
fn reservations_above_the_capacity_fail() {
    let config = config(serde_json::json!({ "systemReserved": { "memory": "9Gi" }, "evictionHard": {} }));
    assert_eq!(
        check(&sizes(), &config).expect_err("too much").to_string(),
        "invalid Node Allocatable configuration. Resource \"memory\" has a reservation of 9Gi but capacity of 8Gi. \
         Expected capacity >= reservation."
    );
    let all = self::config(serde_json::json!({ "systemReserved": { "memory": "8Gi" }, "evictionHard": {} }));
    assert_eq!(check(&sizes(), &all), Ok(()), "all of it");
    let pids = self::config(serde_json::json!({ "kubeReserved": { "pid": "40000" } }));
    assert_eq!(check(&sizes(), &pids).expect_err("too many").resource, "pid");
}

#[test]
fn extended_resources_are_kept() {
    let mut status = NodeStatus {
        capacity: Some([("example.com/gpu".to_owned(), Quantity("2".to_owned()))].into()),
        allocatable: Some(
            [("example.com/gpu", "1"), ("gone.io/x", "1"), ("kubernetes.io/batch-cpu", "900"), ("cpu", "1")]
                .map(|(k, v)| (k.to_owned(), Quantity(v.to_owned())))
                .into(),
        ),
        ..NodeStatus::default()
    };
    let machine = Machine { sizes: Some(sizes()), ..Machine::default() };
    apply(&machine, &config(serde_json::json!({})), &mut status);
    let value = |map: &Option<BTreeMap<String, Quantity>>, name: &str| {
        map.as_ref().and_then(|m| m.get(name)).map(|q| q.0.clone())
    };
    assert_eq!(value(&status.capacity, "example.com/gpu").as_deref(), Some("2"));
    assert_eq!(value(&status.allocatable, "example.com/gpu").as_deref(), Some("2"), "all of it");
    assert_eq!(value(&status.allocatable, "gone.io/x"), None, "no longer in capacity");
    assert_eq!(value(&status.allocatable, "kubernetes.io/batch-cpu").as_deref(), Some("900"), "not extended");
    assert_eq!(value(&status.allocatable, "cpu").as_deref(), Some("4"));
    assert_eq!(value(&status.capacity, "memory").as_deref(), Some("8Gi"));
}

#[test]
fn there_is_none_of_the_resources_of_device_plugins() {
    let amounts = [("example.com/gpu", "2"), ("example.com/theirs", "5")];
    let amounts: BTreeMap<_, _> = amounts.map(|(name, text)| (name.to_owned(), Quantity(text.to_owned()))).into();
    let both = Some(amounts);
    let mut status = NodeStatus { capacity: both.clone(), allocatable: both, ..NodeStatus::default() };
    let machine = Machine { sizes: Some(sizes()), ..Machine::default() };
    let devices = ["example.com/gpu", "example.com/gone"].map(str::to_owned).into();
    let config = ResourceConfig { devices, ..config(serde_json::json!({})) };
    apply(&machine, &config, &mut status);
    for map in [status.capacity, status.allocatable] {
        let map = map.expect("amounts");
        let of = |name: &str| map[name].0.as_str();
        assert_eq!((of("example.com/gpu"), of("example.com/gone"), of("example.com/theirs")), ("0", "0", "5"));
    }
    assert_eq!(allocatable(&sizes(), &config)["example.com/gpu"], Amount::ZERO);
    assert_eq!(check(&sizes(), &config), Ok(()));
}

#[test]
fn equal_amounts_keep_their_text() {
    let mut status = NodeStatus {
        capacity: Some([("memory".to_owned(), Quantity("8388608Ki".to_owned()))].into()),
        ..NodeStatus::default()
    };
    let machine = Machine { sizes: Some(sizes()), ..Machine::default() };
    apply(&machine, &config(serde_json::json!({})), &mut status);
    assert_eq!(status.capacity.expect("capacity")["memory"].0, "8388608Ki");
}

#[test]
fn an_unreadable_machine_has_no_capacity() {
    let mut status = NodeStatus::default();
    apply(&Machine::default(), &config(serde_json::json!({ "maxPods": 7 })), &mut status);
    let capacity = status.capacity.expect("capacity");
    assert_eq!(
        (capacity["cpu"].0.as_str(), capacity["memory"].0.as_str(), capacity["pods"].0.as_str()),
        ("0", "0", "7")
    );
}

proptest! {
    /// Never negative, at most the capacity, and for the same resources.
    #[test]
    fn allocatable_lies_within_capacity(
        memory in 0_i64..1 << 40, huge in 0_i64..1 << 20, reserved in 0_i64..1 << 41, percent in 0_u8..=100,
    ) {
        let sizes = Sizes { memory, hugepages: BTreeMap::from([(2 << 20, huge << 21)]), ..sizes() };
        let config = config(serde_json::json!({
            "systemReserved": { "memory": reserved.to_string() },
            "evictionHard": { "memory.available": format!("{percent}%") },
        }));
        let (all, left) = (capacity(&sizes, &config), allocatable(&sizes, &config));
        prop_assert!(all.keys().eq(left.keys()));
        for (name, amount) in &left {
            prop_assert!(!amount.is_negative() && *amount <= all[name], "{name}");
        }
        prop_assert_eq!(left["memory"].is_zero() || check(&sizes, &config).is_ok(), true);
    }
}
