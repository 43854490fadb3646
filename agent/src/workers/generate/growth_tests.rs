//! What a few lines of a pod can stand for.

use super::*;

/// Values made of values, ten of the one before each: what these few lines ask for fits into no machine.
#[test]
fn what_grows_without_end_is_refused_before_it_does() {
    let tower = |height: usize| {
        let stage = |n: usize| json!({"name": format!("V{}", n + 1), "value": format!("$(V{n})").repeat(10)});
        let ground = json!({"name": "V0", "value": "x".repeat(10)});
        std::iter::once(ground).chain((0..height).map(stage)).collect::<Vec<_>>()
    };
    let wide: Vec<Value> = (0..10_000).map(|n| json!({"name": format!("W{n}"), "value": "$(V4)"})).collect();
    let broad = [tower(4), wide].concat();
    let args = |times: usize| json!({"env": tower(4), "args": ["$(V4)".repeat(times), "and more"]});
    for (extra, expected) in [
        (json!({"env": tower(30)}), "environment variable \"V5\" takes 1000004 bytes"),
        (json!({"env": broad}), "the environment takes "),
        (args(50_000), "command and arguments take 5000000000 bytes"),
        (json!({"env": tower(4), "command": vec!["$(V4)"; 100]}), "command and arguments take "),
    ] {
        let error = generate(&with_container(extra), ImageUser::Id(0)).expect_err("refused").to_string();
        assert!(error.contains(expected) && error.len() < 200, "{error}");
    }
    assert_eq!(generate(&with_container(args(30)), ImageUser::Id(0)).expect("valid").args[0].len(), 3_000_000);
}
