use serde_json::json;

use super::*;
use crate::config::kubelet::KubeletConfiguration;
use crate::config::schema;
use crate::config::schema::Described;

fn value(flag: &str, texts: &[&str]) -> Result<Value, String> {
    let values: FlagValues = texts.iter().map(|text| (flag, *text)).collect();
    values.values().map(|mut values| values.remove(0).1).map_err(|error| error.to_string())
}

#[test]
fn every_form() {
    for (flag, texts, expected) in [
        ("fail-swap-on", vec!["true", "F"], json!(false)),
        ("oom-score-adj", vec!["-999"], json!(-999)),
        ("port", vec!["0x10"], json!(16)),
        ("port", vec!["010"], json!(8)),
        ("port", vec!["0o17"], json!(15)),
        ("port", vec!["0b101"], json!(5)),
        ("port", vec!["0"], json!(0)),
        ("port", vec!["1_0_250"], json!(10250)),
        ("port", vec!["0x_1_0"], json!(16)),
        ("port", vec!["0_17"], json!(15)),
        ("v", vec!["0"], json!(0)),
        ("v", vec!["010"], json!(10)),
        ("oom-score-adj", vec!["-0X1f"], json!(-31)),
        ("oom-score-adj", vec!["+5"], json!(5)),
        ("pod-max-pids", vec!["-9223372036854775808"], json!(i64::MIN)),
        ("sync-frequency", vec!["1m30s"], json!("1m30s")),
        ("cluster-dns", vec!["10.0.0.10,10.0.0.11", "fd00::a"], json!(["10.0.0.10", "10.0.0.11", "fd00::a"])),
        ("system-reserved", vec!["cpu=200m,memory=1Gi", "cpu=300m"], json!({"cpu": "300m", "memory": "1Gi"})),
        ("node-labels", vec!["a=b, only", "c=,only="], json!({"a": "b", "only": "", "c": ""})),
        ("feature-gates", vec!["A=true, B=false"], json!({"A": true, "B": false})),
        ("eviction-hard", vec!["memory.available<5%"], json!({"memory.available": "5%"})),
        ("cpu-manager-policy-options", vec!["full-pcpus-only=true"], json!({"full-pcpus-only": "true"})),
        ("manifest-url-header", vec!["a:1,b:2", "a:3"], json!({"a": ["1", "3"], "b": ["2"]})),
        (
            "reserved-memory",
            vec!["0:memory=1Gi,hugepages-2Mi=64Mi;1:memory=2Gi"],
            json!([
                {"numaNode": 0, "limits": {"memory": "1Gi", "hugepages-2Mi": "64Mi"}},
                {"numaNode": 1, "limits": {"memory": "2Gi"}}
            ]),
        ),
        (
            "register-with-taints",
            vec!["k=v:NoSchedule,only:NoExecute"],
            json!([
                {"key": "k", "value": "v", "effect": "NoSchedule"},
                {"key": "only", "value": "", "effect": "NoExecute"}
            ]),
        ),
        (
            "register-with-taints",
            vec!["a=b:NoSchedule", "c:NoExecute"],
            json!([{"key": "c", "value": "", "effect": "NoExecute"}]),
        ),
        ("register-with-taints", vec!["a=b:NoSchedule", ""], json!([])),
        (
            "register-with-taints",
            vec!["a-,b:NoSchedule-,c:NoExecute"],
            json!([{"key": "c", "value": "", "effect": "NoExecute"}]),
        ),
        ("vmodule", vec!["pleg*=04"], json!([{"filePattern": "pleg*", "verbosity": 4}])),
    ] {
        assert_eq!(value(flag, &texts), Ok(expected), "--{flag} {texts:?}");
    }
}

#[test]
fn bad_texts_name_the_flag_and_what_was_expected() {
    for (flag, text, message) in [
        ("fail-swap-on", "no", "--fail-swap-on: \"no\" is neither true nor false"),
        ("max-pods", "many", "--max-pods: \"many\" is not a whole number"),
        ("max-pods", "08", "--max-pods: \"08\" is not a whole number"),
        ("max-pods", "9223372036854775808", "--max-pods: \"9223372036854775808\" is not a whole number"),
        ("max-pods", "--110", "--max-pods: \"--110\" is not a whole number"),
        ("max-pods", "0x-10", "--max-pods: \"0x-10\" is not a whole number"),
        ("max-pods", "_110", "--max-pods: \"_110\" is not a whole number"),
        ("max-pods", "110_", "--max-pods: \"110_\" is not a whole number"),
        ("max-pods", "1__10", "--max-pods: \"1__10\" is not a whole number"),
        ("max-pods", "0x_", "--max-pods: \"0x_\" is not a whole number"),
        ("v", "0x4", "--v: \"0x4\" is not a level of verbosity"),
        ("v", "1_0", "--v: \"1_0\" is not a level of verbosity"),
        ("v", "+4", "--v: \"+4\" is not a level of verbosity"),
        ("vmodule", "a=0x4", "--vmodule: \"0x4\" is not a level of verbosity"),
        ("pod-max-pids", "--9223372036854775808", "--pod-max-pids: \"--9223372036854775808\" is not a whole number"),
        ("address", "localhost", "--address: \"localhost\" is not an IP address"),
        ("feature-gates", "A", "--feature-gates: \"A\" has no '='; expected key=value"),
        ("feature-gates", "A=2", "--feature-gates: A: \"2\" is neither true nor false"),
        (
            "eviction-hard",
            "memory.available=1Gi",
            "--eviction-hard: \"memory.available=1Gi\" has no '<'; expected key<value",
        ),
        ("register-with-taints", "k=v", "--register-with-taints: \"k=v\" has no effect; expected key=value:Effect"),
        (
            "register-with-taints",
            "k=v:NoSchedule,k=v:NoExecute,k=w:NoSchedule",
            "--register-with-taints: \"k=w:NoSchedule\" has the key and the effect of another taint",
        ),
    ] {
        assert_eq!(value(flag, &[text]), Err(message.to_owned()));
    }
    let error = value("sync-frequency", &["10"]).expect_err("no unit");
    assert!(error.starts_with("--sync-frequency: \"10\" is not a duration"), "{error}");
}

#[test]
fn spelling() {
    for (given, canonical) in [
        ("--max_pods=3", "--max-pods=3"),
        ("--node_labels=a_b=c_d", "--node-labels=a_b=c_d"),
        ("--fail_swap_on", "--fail-swap-on"),
        ("some_value", "some_value"),
        ("-v=2", "-v=2"),
    ] {
        assert_eq!(normalize(given), canonical);
    }
}

#[test]
fn table_is_sound() {
    let mut names: Vec<_> = FLAGS.iter().map(|flag| flag.name).collect();
    names.sort_unstable();
    let count = names.len();
    names.dedup();
    assert_eq!(names.len(), count, "a flag is listed twice");
    for flag in FLAGS {
        match flag.target {
            Target::Field(path) => {
                let field = schema::find(KubeletConfiguration::FIELDS, path);
                assert_eq!(field.map(|field| field.name), path.rsplit('.').next(), "--{}", flag.name);
            }
            Target::Own => assert!(FlagSettings::FIELDS.iter().any(|field| field.name == flag.name), "--{}", flag.name),
            Target::Nothing => {}
        }
    }
    for field in FlagSettings::FIELDS {
        assert!(find(field.name).is_some_and(|flag| flag.target == Target::Own), "no flag sets {}", field.name);
    }
}

#[test]
fn an_empty_address_sets_nothing() {
    let flags: FlagValues = [("address", ""), ("healthz-bind-address", "")].into_iter().collect();
    assert_eq!(flags.values().map(|values| values.len()), Ok(0));
}

#[test]
fn own_settings() {
    let values: FlagValues =
        [("root-dir", "/srv/kubelet"), ("node-labels", "a=b"), ("maximum-dead-containers", "7")].into_iter().collect();
    let own = values.own().expect("valid");
    assert_eq!(own.root_dir, std::path::Path::new("/srv/kubelet"));
    assert_eq!(own.node_labels["a"], "b");
    assert_eq!(own.maximum_dead_containers, 7);
    assert_eq!(own.maximum_dead_containers_per_container, 1);
    let error: FlagValues = [("maximum-dead-containers", "99999999999")].into_iter().collect();
    assert!(error.own().expect_err("too large").to_string().starts_with("--maximum-dead-containers: "));
}
