//! Environments made from API objects.

use std::sync::Arc;

use super::*;
use crate::workers::generate::ObjectLookup;

fn objects() -> EnvObjects {
    let map = |json| ObjectLookup::Found(Arc::new(serde_json::from_value(json).expect("an object")));
    let absent = |text: &str| ObjectLookup::Absent(text.to_owned());
    EnvObjects {
        config_maps: BTreeMap::from([
            ("m".to_owned(), map(json!({"data": {"A": "1", "odd key": "x", "B": "m"}, "binaryData": {"bin": "AAEC"}}))),
            ("none".to_owned(), absent("configmap \"none\" not found")),
            ("broken".to_owned(), ObjectLookup::Failed("failed to sync configmap cache: away".to_owned())),
        ]),
        secrets: BTreeMap::from([
            (
                "s".to_owned(),
                ObjectLookup::Found(Arc::new(
                    serde_json::from_value(json!({"data": {"B": "cw==", "k": "dg=="}})).expect("a Secret"),
                )),
            ),
            ("none".to_owned(), ObjectLookup::Absent("secret \"none\" not found".to_owned())),
        ]),
        services: BTreeMap::from([("WEB_PORT".to_owned(), "80".to_owned()), ("A".to_owned(), "service".to_owned())]),
        files: Some(files()),
    }
}

fn files() -> EnvFiles {
    let mut files = EnvFiles::default();
    for (path, content) in [
        ("env", &b"KEY='from a file'\nEMPTY=''\nEMPTY='again'\n"[..]),
        ("malformed", &b"KEY=unquoted"[..]),
        ("binary", &b"KEY='\xff'"[..]),
    ] {
        files.add("v", path, file_values(content, ["KEY", "EMPTY", "NONE"].map(str::to_owned).into()));
    }
    files
}

fn environment_of(container: serde_json::Value) -> Result<Vec<String>, String> {
    let pod = with_container(container);
    let spec = ContainerSpec::named(&pod, "c").expect("the container");
    let found = environment(&pod, &spec, &[], &objects(), &settings()).map_err(|error| error.to_string())?;
    Ok(found.into_iter().map(|(name, value)| format!("{name}={}", value.escape_ascii())).collect())
}

#[test]
fn variables_from_files() {
    let of = |path: &str, key: &str, optional: bool| {
        let source = json!({"volumeName": "v", "path": path, "key": key, "optional": optional});
        environment_of(json!({"env": [{"name": "X", "valueFrom": {"fileKeyRef": source}}]}))
    };
    let with = |value: &str| Ok(vec!["A=service".to_owned(), "WEB_PORT=80".to_owned(), format!("X={value}")]);
    let without = Ok(vec!["A=service".to_owned(), "WEB_PORT=80".to_owned()]);
    let unusable = Err("couldn't parse env file".to_owned());
    assert_eq!(of("env", "KEY", false), with("from a file"));
    assert_eq!(of("env", "EMPTY", true), without);
    assert_eq!(of("env", "NONE", true), without);
    let missing = Err("environment variable key \"NONE\" not found in file \"env\"".to_owned());
    assert_eq!(of("env", "NONE", false), missing);
    assert_eq!(of("binary", "KEY", false), with("\\xff"), "any encoding is passed on");
    for path in ["malformed", "not read"] {
        assert_eq!(of(path, "KEY", true), unusable, "{path}");
    }
}

#[test]
fn variables_from_files_are_empty_while_the_gate_is_off() {
    let source = json!({"volumeName": "v", "path": "env", "key": "KEY"});
    let pod = with_container(json!({"env": [{"name": "X", "valueFrom": {"fileKeyRef": source}}]}));
    let spec = ContainerSpec::named(&pod, "c").expect("the container");
    let without = EnvObjects { files: None, ..objects() };
    let found = environment(&pod, &spec, &[], &without, &settings()).expect("valid");
    assert!(found["X"].is_empty(), "{found:?}");
}

#[test]
fn later_sources_win_and_services_come_last() {
    let container = json!({
        "envFrom": [
            {"configMapRef": {"name": "m"}}, {"secretRef": {"name": "s"}}, {"prefix": "P_", "configMapRef": {"name": "m"}},
            {"configMapRef": {"name": "none", "optional": true}}, {"secretRef": {"name": "none", "optional": true}},
        ],
        "env": [
            {"name": "FROM_SERVICE", "value": "$(WEB_PORT) $(A) $(NEXT)"},
            {"name": "k", "value": "own"},
            {"name": "NEXT", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "A"}}},
            {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            {"name": "NO_KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "x", "optional": true}}},
            {"name": "NO_MAP", "valueFrom": {"configMapKeyRef": {"name": "none", "key": "x", "optional": true}}},
        ],
    });
    assert_eq!(
        environment_of(container).expect("valid"),
        [
            "A=1",
            "B=s",
            "FROM_SERVICE=80 1 $(NEXT)",
            "NEXT=1",
            "P_A=1",
            "P_B=m",
            "P_odd key=x",
            "SECRET=v",
            "WEB_PORT=80",
            "k=own",
            "odd key=x",
        ]
    );
}

#[test]
fn secret_values_that_are_not_utf8_reach_the_runtime_unchanged() {
    let pod = with_container(json!({
        "env": [
            {"name": "RAW", "valueFrom": {"secretKeyRef": {"name": "s", "key": "latin"}}},
            {"name": "MADE", "value": "<$(RAW)>"},
        ],
        "args": ["$(RAW)"],
    }));
    let secret = json!({"data": {"latin": "5OT/"}});
    let secret = ObjectLookup::Found(Arc::new(serde_json::from_value(secret).expect("a Secret")));
    let objects = EnvObjects { secrets: BTreeMap::from([("s".to_owned(), secret)]), ..EnvObjects::default() };
    let spec = ContainerSpec::named(&pod, "c").expect("the container");
    let found = environment(&pod, &spec, &[], &objects, &settings()).expect("valid");
    let config = |pod: &Pod| {
        let instance = Instance {
            image: &image(ImageUser::Id(0)),
            restarts: 0,
            environment: &found,
            mounts: Vec::new(),
            devices: Vec::new(),
            target: None,
            users: &user_namespace::host(),
        };
        container_config(pod, &ContainerSpec::named(pod, "c").expect("the container"), instance, &settings())
    };
    let error = config(&pod).expect_err("CRI arguments are text").to_string();
    assert!(error.contains("\"$(RAW)\" refers to a variable that is not valid UTF-8"), "{error}");
    let config = config(&with_container(json!({}))).expect("valid");
    let value = |name: &str| config.envs.iter().find(|env| env.key == name).expect("set").value.clone();
    assert_eq!(value("RAW"), &[0xe4, 0xe4, 0xff][..]);
    assert_eq!(value("MADE"), &b"<\xe4\xe4\xff>"[..]);
}

#[test]
fn missing_objects_and_keys_are_named() {
    let key = |kind: &str, name: &str, key: &str| json!({"env": [{"name": "X", "valueFrom": {kind: {"name": name, "key": key}}}]});
    for (container, expected) in [
        (key("configMapKeyRef", "none", "k"), "configmap \"none\" not found"),
        (key("secretKeyRef", "none", "k"), "secret \"none\" not found"),
        (key("configMapKeyRef", "m", "x"), "couldn't find key x in ConfigMap ns/m"),
        (key("configMapKeyRef", "m", "bin"), "couldn't find key bin in ConfigMap ns/m"),
        (key("secretKeyRef", "s", "x"), "couldn't find key x in Secret ns/s"),
        (json!({"envFrom": [{"secretRef": {"name": "none"}}]}), "secret \"none\" not found"),
        (
            json!({"envFrom": [{"configMapRef": {"name": "broken", "optional": true}}]}),
            "failed to sync configmap cache: away",
        ),
    ] {
        assert_eq!(environment_of(container.clone()), Err(expected.to_owned()), "{container}");
    }
}

#[test]
fn environments_that_execve_rejects_are_rejected() {
    let one = |name: &str, size: usize| json!({"env": [{"name": name, "value": "x".repeat(size)}]});
    assert_eq!(environment_of(one("A", 131_069)).expect("it just fits").len(), 2, "and one of a service");
    let error = environment_of(one("A", 131_070)).expect_err("too long");
    assert_eq!(error, "environment variable \"A\" takes 131073 bytes, more than the 131072 a process can be given");
    let error = environment_of(one("A", 200_000)).expect_err("too long");
    assert!(error.starts_with("environment variable \"A\" takes 200003 bytes"), "{error}");
    let many: Vec<_> = (0..64).map(|n| json!({"name": format!("V{n}"), "value": "x".repeat(100_000)})).collect();
    let error = environment_of(json!({ "env": many })).expect_err("too much");
    assert!(error.starts_with("the environment takes 64"), "{error}");
    for (name, value) in [("", "x"), ("A=B", "x"), ("A\0", "x"), ("A", "x\0y")] {
        let error = environment_of(json!({"env": [{"name": name, "value": value}]})).expect_err("refused");
        assert!(error.contains("cannot be given to a process"), "{error}");
    }
}
