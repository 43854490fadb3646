//! Nested references that expand beyond all limits.

use super::*;

/// Each value refers ten times to the one before: the result of a few lines exceeds any memory.
#[test]
fn exponential_expansion_is_rejected_before_it_allocates() {
    let nested = |depth: usize| {
        let level = |n: usize| json!({"name": format!("V{}", n + 1), "value": format!("$(V{n})").repeat(10)});
        let base = json!({"name": "V0", "value": "x".repeat(10)});
        std::iter::once(base).chain((0..depth).map(level)).collect::<Vec<_>>()
    };
    let wide: Vec<Value> = (0..10_000).map(|n| json!({"name": format!("W{n}"), "value": "$(V4)"})).collect();
    let many = [nested(4), wide].concat();
    let args = |times: usize| json!({"env": nested(4), "args": ["$(V4)".repeat(times), "and more"]});
    for (extra, expected) in [
        (json!({"env": nested(30)}), "environment variable \"V5\" takes 1000004 bytes"),
        (json!({"env": many}), "the environment takes "),
        (args(50_000), "command and arguments take 5000000000 bytes"),
        (json!({"env": nested(4), "command": vec!["$(V4)"; 100]}), "command and arguments take "),
    ] {
        let error = generate(&with_container(extra), ImageUser::Id(0)).expect_err("rejected").to_string();
        assert!(error.contains(expected) && error.len() < 200, "{error}");
    }
    assert_eq!(generate(&with_container(args(30)), ImageUser::Id(0)).expect("valid").args[0].len(), 3_000_000);
}
