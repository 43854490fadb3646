//! Streams of kubectl to and from a container through API server and node: logs, exec, attach, cp, port-forward and
//! debug.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use keblet_peers::BUSYBOX_IMAGE;
use keblet_peers::PROBE_IMAGE;
use keblet_tests::cluster::Kubectl;
use keblet_tests::cluster::Tenant;
use serde_json::json;
use tokio::io::AsyncReadExt as _;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

#[tokio::test]
#[ignore = "real cluster"]
async fn logs_follow_a_container_until_exit() {
    let tenant = Tenant::new_namespace("logs").await.unwrap();
    // Writes when the file is created, so that the output is certainly new.
    let script = "for n in 1 2 3; do echo old $n; done; echo to stderr >&2; \
                  until test -e /tmp/go; do sleep 0.05; done; echo new; exit 0";
    let mut pod = tenant.shell(script);
    pod["restartPolicy"] = json!("Never");
    tenant.pod("talker", pod).await.unwrap();
    tenant.until_ready("talker").await.unwrap();
    let kubectl = tenant.kubectl();
    let mut follower = kubectl.start(&["logs", "-f", "talker"]).unwrap();
    for old in ["old 3\n", "to stderr\n"] {
        follower.until_output(old).await.unwrap();
    }
    kubectl.ok(&["exec", "talker", "--", "touch", "/tmp/go"]).await.unwrap();
    let (code, output) = follower.ended().await.unwrap();
    // The two streams reach the runtime independently; each keeps its order.
    let (errors, lines): (Vec<&str>, Vec<&str>) = output.lines().partition(|line| *line == "to stderr");
    assert_eq!((code, errors.len(), lines), (0, 1, vec!["old 1", "old 2", "old 3", "new"]));
    tenant.until_phase("talker", "Succeeded").await.unwrap();
    assert_eq!(kubectl.ok(&["logs", "talker", "--tail=1"]).await.unwrap(), "new\n");
    assert_eq!(kubectl.ok(&["logs", "talker", "--limit-bytes=5"]).await.unwrap().len(), 5);
    let stamped = kubectl.ok(&["logs", "talker", "--timestamps", "--tail=1"]).await.unwrap();
    let (stamp, line) = stamped.split_once(' ').unwrap();
    assert!(stamp.ends_with('Z') && stamp.contains('T') && line == "new\n", "{stamped}");
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn previous_logs_are_kept_after_a_crash() {
    let tenant = Tenant::new_namespace("previous").await.unwrap();
    let script = "test -e /marks/once && { echo second run; sleep 3600; }; touch /marks/once; echo first run; exit 1";
    let mut pod = tenant.shell(script);
    pod["volumes"] = json!([{ "name": "marks", "emptyDir": {} }]);
    pod["containers"][0]["volumeMounts"] = json!([{ "name": "marks", "mountPath": "/marks" }]);
    tenant.pod("crasher", pod).await.unwrap();
    let restarted = |pod: Option<&Pod>| {
        let status = pod?.status.as_ref()?.container_statuses.as_ref()?.first()?;
        (status.restart_count == 1 && status.ready).then(|| status.last_state.clone())
    };
    let last = tenant.until("crasher", "running again", restarted).await.unwrap();
    assert_eq!(last.unwrap().terminated.unwrap().exit_code, 1);
    let kubectl = tenant.kubectl();
    assert_eq!(kubectl.ok(&["logs", "crasher", "--previous"]).await.unwrap(), "first run\n");
    kubectl.start(&["logs", "-f", "crasher"]).unwrap().until_output("second run\n").await.unwrap();
    assert_eq!(kubectl.ok(&["logs", "crasher"]).await.unwrap(), "second run\n");
    let output = kubectl.run(&["logs", "crasher", "-c", "missing"]).await.unwrap();
    assert!(output.code != 0 && output.err.contains("missing"), "{output:?}");
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn exec_passes_streams_and_exit_codes() {
    let tenant = Tenant::new_namespace("exec").await.unwrap();
    tenant.pod("shell", tenant.shell("sleep 3600")).await.unwrap();
    tenant.until_ready("shell").await.unwrap();
    let kubectl = tenant.kubectl();
    let output = kubectl.run(&["exec", "shell", "--", "sh", "-c", "echo out; echo err >&2; exit 42"]).await.unwrap();
    assert_eq!((output.code, output.out.as_str()), (42, "out\n"));
    assert!(output.err.starts_with("err\n"), "{output:?}");
    let input = "one\ntwo\n".repeat(20_000);
    let output = kubectl.run_with(&["exec", "-i", "shell", "--", "md5sum"], &input).await.unwrap();
    let here = kubectl.run_with(&["exec", "-i", "shell", "--", "wc", "-c"], &input).await.unwrap();
    assert_eq!(output.code, 0, "{output:?}");
    assert_eq!(here.out.trim(), input.len().to_string());
    let output = kubectl.run(&["exec", "shell", "--", "no-such-program"]).await.unwrap();
    assert!(output.code != 0 && output.err.contains("no-such-program"), "{output:?}");
    tenant.delete_namespace().await.unwrap();
}

/// Types into a shell of the pod, interrupts the running command but not the shell, and exits it.
pub(crate) async fn on_a_terminal(kubectl: &Kubectl, pod: &str) {
    let mut session = kubectl.start_on_terminal(&["exec", "-it", pod, "--", "sh"]).unwrap();
    session.until_output("#").await.unwrap();
    session.send("test -t 0 && echo is$((1+1))terminal\n").await.unwrap();
    session.until_output("is2terminal").await.unwrap();
    session.send("echo sleeping$((1+3)); sleep 3600\n").await.unwrap();
    session.until_output("sleeping4").await.unwrap();
    // Repeated if needed: a signal before the shell has started the command is lost.
    session.send_until_output("\u{3}echo still$((1+2))here\n", "still3here").await.unwrap();
    session.send("exit 5\n").await.unwrap();
    let (code, output) = session.ended().await.unwrap();
    assert_eq!(code, 5, "{output}");
}

#[tokio::test]
#[ignore = "real cluster"]
async fn exec_allocates_a_terminal() {
    let tenant = Tenant::new_namespace("terminal").await.unwrap();
    tenant.pod("shell", tenant.shell("sleep 3600")).await.unwrap();
    tenant.until_ready("shell").await.unwrap();
    for kubectl in [tenant.kubectl(), tenant.kubectl().without_websockets()] {
        on_a_terminal(&kubectl, "shell").await;
    }
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn attach_joins_a_running_container() {
    let tenant = Tenant::new_namespace("attach").await.unwrap();
    let mut pod = tenant.shell("while read line; do echo heard $line; done; echo end of input");
    pod["restartPolicy"] = json!("Never");
    pod["containers"][0]["stdin"] = json!(true);
    pod["containers"][0]["stdinOnce"] = json!(true);
    tenant.pod("listener", pod).await.unwrap();
    tenant.until_ready("listener").await.unwrap();
    let mut session = tenant.kubectl().start(&["attach", "-i", "listener"]).unwrap();
    session.send_until_output("you\n", "heard you").await.unwrap();
    session.close_input();
    tenant.until_phase("listener", "Succeeded").await.unwrap();
    let (_, output) = session.ended().await.unwrap();
    assert!(output.contains("end of input"), "{output}");
    tenant.delete_namespace().await.unwrap();
}

/// Copies a file of this length to the pod and back.
pub(crate) async fn copy_there_and_back(kubectl: &Kubectl, pod: &str, length: usize) {
    let folder = tempfile::tempdir().unwrap();
    let (there, back) = (folder.path().join("there"), folder.path().join("back"));
    let content: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(length).collect();
    std::fs::write(&there, &content).unwrap();
    let in_pod = format!("{pod}:/tmp/file");
    kubectl.ok(&["cp", there.to_str().unwrap(), &in_pod]).await.unwrap();
    kubectl.ok(&["cp", &in_pod, back.to_str().unwrap()]).await.unwrap();
    assert!(std::fs::read(&back).unwrap() == content, "the file was changed");
}

#[tokio::test]
#[ignore = "real cluster"]
async fn cp_copies_files_in_both_directions() {
    let tenant = Tenant::new_namespace("cp").await.unwrap();
    tenant.pod("box", tenant.shell("sleep 3600")).await.unwrap();
    tenant.until_ready("box").await.unwrap();
    for kubectl in [tenant.kubectl(), tenant.kubectl().without_websockets()] {
        copy_there_and_back(&kubectl, "box", 1 << 20).await;
    }
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn port_forward_passes_connections() {
    let tenant = Tenant::new_namespace("forward").await.unwrap();
    let mut pod = tenant.shell("");
    pod["containers"][0]["image"] = json!(PROBE_IMAGE);
    pod["containers"][0]["command"] = json!(["/probe", "web"]);
    tenant.pod("web", pod).await.unwrap();
    tenant.until_listening("web", 8080).await.unwrap();
    let mut session = tenant.kubectl().start(&["port-forward", "pod/web", ":8080"]).unwrap();
    let output = session.until_output("-> 8080").await.unwrap();
    let port: u16 = output.split("127.0.0.1:").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    for _ in 0..3 {
        let talk = async {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
            stream.write_all(b"GET / HTTP/1.0\r\nHost: web\r\n\r\n").await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            answer
        };
        let answer = tokio::time::timeout(Duration::from_secs(20), talk).await.unwrap();
        assert!(answer.starts_with("HTTP/1.") && answer.contains(" 200 "), "{answer:?} {}", session.output_so_far());
    }
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn debug_adds_a_container_to_a_running_pod() {
    let tenant = Tenant::new_namespace("debug").await.unwrap();
    let mut pod = tenant.shell("");
    pod["containers"][0]["image"] = json!(PROBE_IMAGE);
    pod["containers"][0]["command"] = json!(["/probe", "web"]);
    tenant.pod("web", pod).await.unwrap();
    tenant.until_listening("web", 8080).await.unwrap();
    let image = format!("--image={BUSYBOX_IMAGE}");
    let arguments = ["debug", "web", &image, "--image-pull-policy=Never", "-c", "look", "--profile=general"];
    let script = ["--", "sh", "-c", "wget -q -O - http://127.0.0.1:8080/ && echo seen; exit 4"];
    let output = tenant.kubectl().run(&[&arguments[..], &script[..]].concat()).await.unwrap();
    assert_eq!(output.code, 0, "{output:?}");
    let ended = |pod: Option<&Pod>| {
        let statuses = pod?.status.as_ref()?.ephemeral_container_statuses.as_ref()?;
        statuses.iter().find(|one| one.name == "look")?.state.as_ref()?.terminated.clone()
    };
    let ended = tenant.until("web", "the ephemeral container has ended", ended).await.unwrap();
    assert_eq!((ended.exit_code, ended.reason.as_deref()), (4, Some("Error")));
    let output = tenant.kubectl().ok(&["logs", "web", "-c", "look"]).await.unwrap();
    assert!(output.contains("seen"), "{output}");
    // The pod itself is unchanged.
    let pod = tenant.until_ready("web").await.unwrap();
    assert_eq!(pod.status.unwrap().container_statuses.unwrap()[0].restart_count, 0);
    tenant.delete_namespace().await.unwrap();
}
