//! Whole manifests to whole pods.

use k8s_openapi::api::core::v1::Pod as ApiPod;
use proptest::prelude::*;
use serde_json::json;

use super::decode::MAX_MANIFEST_BYTES;
use super::decode::Manifest;
use super::decode::decode;
use super::static_pod::Origin;
use crate::model::ConfigSource;

const ORIGIN: Origin<'static> = Origin {
    adoptions: None,
    source: ConfigSource::File,
    location: "/manifests/web.yaml",
    node_name: "node-1",
    prevent_api_references: true,
};

const WEB: &str = "
apiVersion: v1
kind: Pod
metadata:
  name: web
spec:
  containers:
  - name: web
    image: nginx:1
";

fn read(text: &str) -> Manifest {
    decode(text.as_bytes(), &ORIGIN).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

fn refused(text: &str) -> String {
    match decode(text.as_bytes(), &ORIGIN) {
        Ok(manifest) => panic!("not refused: {manifest:?}"),
        Err(error) => error.to_string(),
    }
}

fn only(text: &str) -> ApiPod {
    let manifest = read(text);
    assert_eq!(manifest.pods.len(), 1, "{text}");
    ApiPod::clone(&manifest.pods[0])
}

fn uid(text: &str, origin: &Origin<'_>) -> String {
    let manifest = decode(text.as_bytes(), origin).expect("a manifest");
    manifest.pods[0].metadata.uid.clone().expect("a UID")
}

#[test]
fn a_static_pod_gets_its_identity() {
    let pod = only(WEB);
    let uid = pod.metadata.uid.clone().expect("a UID");
    assert!(uid.len() == 32 && uid.bytes().all(|b| b.is_ascii_hexdigit()), "{uid}");
    assert_eq!(pod.metadata.name.as_deref(), Some("web-node-1"));
    assert_eq!(pod.metadata.namespace.as_deref(), Some("default"));
    let annotations = pod.metadata.annotations.expect("annotations");
    assert_eq!(annotations["kubernetes.io/config.hash"], uid);
    assert_eq!(annotations["kubernetes.io/config.source"], "file");
    let spec = pod.spec.expect("a spec");
    assert_eq!(spec.node_name.as_deref(), Some("node-1"));
    let tolerations = serde_json::to_value(spec.tolerations).expect("JSON");
    assert_eq!(tolerations, json!([{"operator": "Exists", "effect": "NoExecute"}]));
    assert_eq!(pod.status.and_then(|s| s.phase).as_deref(), Some("Pending"));
}

#[test]
fn the_uid_follows_content_and_place_but_not_spelling() {
    let of = |text: &str| uid(text, &ORIGIN);
    let base = of(WEB);
    assert_eq!(of(WEB), base);
    let respelt = r#"{"kind":"Pod","apiVersion":"v1","spec":{"restartPolicy":"Always","containers":[
        {"image":"nginx:1","name":"web"}]},"metadata":{"name":"web"}}"#;
    assert_eq!(of(respelt), base, "JSON, other order, a default spelt out");
    assert_ne!(of(&WEB.replace("nginx:1", "nginx:2")), base);
    let elsewhere = Origin { location: "/manifests/b.yaml", ..ORIGIN };
    assert_ne!(uid(WEB, &elsewhere), base);
    let other_node = Origin { node_name: "node-2", ..ORIGIN };
    assert_ne!(uid(WEB, &other_node), base);
    let url = Origin { source: ConfigSource::Http, ..ORIGIN };
    assert_eq!(uid(WEB, &url), uid(WEB, &Origin { node_name: "node-2", ..url }), "URLs are hashed without the host");
    assert_eq!(of(&WEB.replace("name: web\nspec", "name: web\n  uid: mine\nspec")), "mine");
}

#[test]
fn uids_do_not_change_between_releases() {
    // Changing this value restarts every static pod of every node that upgrades: then the changelog must mention it.
    assert_eq!(uid(WEB, &ORIGIN), "e4b512f5979a810ff50c744211a2127a");
}

#[test]
fn url_pods_get_no_toleration() {
    let origin = Origin { source: ConfigSource::Http, ..ORIGIN };
    let manifest = decode(WEB.as_bytes(), &origin).expect("a manifest");
    let pod = &manifest.pods[0];
    assert_eq!(pod.spec.as_ref().and_then(|s| s.tolerations.clone()), None);
    assert_eq!(pod.metadata.annotations.as_ref().expect("annotations")["kubernetes.io/config.source"], "http");
}

#[test]
fn an_equal_toleration_is_not_doubled() {
    let text = WEB.replace("spec:\n", "spec:\n  tolerations: [{operator: Exists, effect: NoExecute}]\n");
    assert_eq!(only(&text).spec.and_then(|s| s.tolerations).map(|t| t.len()), Some(1));
}

#[test]
fn of_several_documents_only_the_first_is_read() {
    let second = WEB.replace("name: web", "name: db");
    for rest in ["---\napiVersion: v1\nkind: Service\n", "---\na: [", &format!("---{second}"), &format!("---{WEB}")] {
        let manifest = read(&format!("---{WEB}{rest}"));
        let names: Vec<_> = manifest.pods.iter().filter_map(|pod| pod.metadata.name.as_deref()).collect();
        assert_eq!((names, manifest.ignores_documents), (vec!["web-node-1"], true), "{rest}");
    }
    assert!(!read(&format!("# nothing\n---{WEB}---\n# nothing\n")).ignores_documents);
    assert_eq!(uid(&format!("{WEB}---{second}"), &ORIGIN), uid(WEB, &ORIGIN), "the UID is that of the pod");
    assert_eq!(refused(&format!("---\n# nothing\n---{WEB}")), "has an empty first document");
    assert!(
        refused(&format!("apiVersion: v1\nkind: Service\n---{WEB}")).starts_with("line 2: kind: Unsupported value")
    );
}

#[test]
fn lists() {
    let list = r#"{"apiVersion":"v1","kind":"PodList","items":[
        {"metadata":{"name":"a"},"spec":{"containers":[{"name":"c","image":"i"}]}},
        {"apiVersion":"v1","kind":"Pod","metadata":{"name":"b"},"spec":{"containers":[{"name":"c","image":"i"}]}}]}"#;
    assert_eq!(read(list).pods.len(), 2);
    assert_eq!(read("{\"apiVersion\":\"v1\",\"kind\":\"PodList\",\"items\":[]}").pods.len(), 0);
    let twice = list.replace("\"b\"", "\"a\"");
    assert_eq!(read(&twice).pods.len(), 2, "the merge of the source drops the second");
}

#[test]
fn bare_numbers_are_quantities() {
    let text = WEB.replace("image: nginx:1", "image: nginx:1\n    resources: {limits: {cpu: 1, memory: 1.5}}");
    let pod = only(&text);
    let resources = pod.spec.expect("a spec").containers[0].resources.clone().expect("resources");
    assert_eq!(serde_json::to_value(&resources.limits).expect("JSON"), json!({"cpu": "1", "memory": "1.5"}));
}

#[test]
fn errors_name_line_and_field() {
    for (text, expected) in [
        (String::new(), "holds no document"),
        ("# only a comment\n".into(), "holds no document"),
        ("- a\n".into(), "line 1: kind: Required value: must be Pod or PodList"),
        (WEB.replace("kind: Pod", "kind: Deployment"), "line 3: kind: Unsupported value: \"Deployment\""),
        (WEB.replace("v1", "v2"), "line 2: apiVersion: Unsupported value: \"v2\""),
        (
            WEB.replace("name: web\nspec", "namespace: x\nspec"),
            "line 5: metadata.name: Required value: name is needed for the pod",
        ),
        (WEB.replace("image: nginx:1", "image: [1]"), "line 9: spec.containers[0].image: invalid type"),
        (WEB.replace("image: nginx:1", "tty: maybe"), "line 9: spec.containers[0].tty: invalid type: string"),
        (WEB.replace("image: nginx:1", ""), "line 8: spec.containers[0].image: Required value"),
        (WEB.replace("- name: web", "- name: Web_1"), "line 8: spec.containers[0].name: Invalid value: \"Web_1\""),
        (
            WEB.replace("spec:", "spec:\n  serviceAccountName: x"),
            "line 7: spec: Forbidden: static pods may not reference serviceaccounts",
        ),
        (WEB.replace("  - name", "\t- name"), "line 8: is neither YAML nor JSON"),
        ("{\"apiVersion\": \"v1\",\n oops".into(), "line 2: is neither YAML nor JSON"),
        ("{\"kind\": \"Pod\"}\n---\n{}".into(), "line 2: is neither YAML nor JSON"),
    ] {
        let error = refused(&text);
        assert!(error.starts_with(expected), "{expected:?} is not the start of {error:?}");
    }
    let list = r#"{"apiVersion":"v1","kind":"PodList","items":[{"metadata":{"name":"a"},"spec":{"containers":[]}}]}"#;
    assert!(refused(list).starts_with("line 1: items[0].spec.containers: Required value"));
}

#[test]
fn invalid_names_never_become_pods() {
    for name in ["../../etc/passwd", "a/b", "..", "a\\u0000b", "a\\nb", "%2e%2e", "\\u202e"] {
        let text = WEB.replacen("name: web", &format!("name: \"{name}\""), 1);
        assert!(refused(&text).contains("metadata.name: Invalid value"), "{name}");
        let text = WEB.replace("- name: web", &format!("- name: \"{name}\""));
        assert!(refused(&text).contains("spec.containers[0].name: Invalid value"), "{name}");
        let text = WEB.replacen("name: web", &format!("name: web\n  uid: \"{name}/\""), 1);
        assert!(refused(&text).contains("metadata.uid: Invalid value"), "{name}");
        assert!(!refused(&text).contains('\n'), "one line");
    }
}

#[test]
fn a_megabyte_of_environment_is_fine_ten_of_anything_are_not() {
    let env = |bytes: usize| {
        WEB.replace("image: nginx:1", &format!("image: a\n    env: [{{name: A, value: {}}}]", "x".repeat(bytes)))
    };
    assert_eq!(read(&env(1 << 20)).pods.len(), 1);
    let too_big = env(usize::try_from(MAX_MANIFEST_BYTES).expect("fits"));
    assert!(refused(&too_big).starts_with("is too big: must be under 10485760 bytes"));
}

#[test]
fn a_copy_of_a_mirror_pod_is_refused() {
    let text = WEB.replacen("name: web", "name: web\n  annotations: {kubernetes.io/config.mirror: x}", 1);
    assert!(refused(&text).starts_with("line 6: metadata.annotations: Forbidden"));
}

#[test]
fn not_utf8() {
    let error = decode(b"kind: Pod\nname: \xff\n", &ORIGIN).expect_err("refused");
    assert_eq!(error.to_string(), "line 2: is not valid UTF-8");
}

#[test]
fn unknown_fields_are_named() {
    let text = WEB
        .replace("image: nginx:1", "image: nginx:1\n    comand: [x]\n    env: [{name: A, vaule: b}]\n    args: null");
    assert_eq!(read(&text).unknown_fields, ["spec.containers[0].comand", "spec.containers[0].env[0].vaule"]);
    assert_eq!(read(WEB).unknown_fields, Vec::<String>::new());
}

#[test]
fn the_gate_allows_references() {
    let text = WEB.replace("spec:", "spec:\n  serviceAccountName: x");
    let origin = Origin { prevent_api_references: false, ..ORIGIN };
    assert!(decode(text.as_bytes(), &origin).is_ok());
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = decode(&bytes, &ORIGIN);
    }

    #[test]
    fn arbitrary_text_never_panics(text in "[-a-z0-9{}\\[\\]:,&*!|>'\"\n #%@`~?.]{0,300}") {
        let _ = decode(text.as_bytes(), &ORIGIN);
    }

    /// Cutting or garbling a good manifest anywhere gives pods or a one-line error.
    #[test]
    fn damaged_manifests_never_panic(at in 0usize..WEB.len(), with in any::<u8>(), cut in any::<bool>()) {
        let mut bytes = WEB.as_bytes().to_vec();
        if cut { bytes.truncate(at) } else { bytes[at] = with }
        if let Err(error) = decode(&bytes, &ORIGIN) {
            prop_assert!(!error.to_string().contains('\n'), "{}", error);
        }
    }
}
