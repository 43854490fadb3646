//! Volumes on disks that are attached to the node.

use serde_json::json;

use super::check;

#[test]
fn fc_volumes() {
    let at = "spec.volumes[1].fc";
    for (source, expected) in [
        (json!({"targetWWNs": ["50060e801049cfd1"], "lun": 255}), ""),
        (json!({"wwids": ["SVENDOR disk_1"]}), ""),
        (json!({}), ".targetWWNs: Required value: must specify either targetWWNs or wwids, but not both"),
        (json!({"lun": 0}), ".targetWWNs: Required value: must specify either targetWWNs or wwids, but not both"),
        (
            json!({"targetWWNs": ["a", "b"], "lun": 0, "wwids": ["c"]}),
            ".targetWWNs: Invalid value: \"a b\": targetWWNs and wwids can not be specified simultaneously",
        ),
        (json!({"targetWWNs": ["a"]}), ".lun: Required value: lun is required if targetWWNs is specified"),
        (json!({"targetWWNs": ["a"], "lun": -1}), ".lun: Invalid value: -1: must be between 0 and 255, inclusive"),
        (json!({"targetWWNs": ["a"], "lun": 256}), ".lun: Invalid value: 256: must be between 0 and 255, inclusive"),
        (
            json!({"targetWWNs": ["a", "../b"], "lun": 0}),
            ".targetWWNs[1]: Invalid value: \"../b\": must be at most 32 letters and digits",
        ),
        (json!({"wwids": ["a-part1"]}), ".wwids[0]: Invalid value: \"a-part1\": must not be a partition"),
        (json!({"wwids": ["a/b"]}), ".wwids[0]: Invalid value: \"a/b\": must begin with a letter or digit"),
    ] {
        let expected = if expected.is_empty() { String::new() } else { format!("{at}{expected}") };
        check(&[("/spec/volumes", json!([{"name": "v"}, {"name": "w", "fc": source}]), &expected)]);
    }
}
