//! What the runtime is asked for, and its failures.

use super::*;

fn container(id: &str, created_at: i64) -> cri::Container {
    cri::Container { id: id.to_owned(), created_at, ..Default::default() }
}

fn listed(containers: Vec<cri::Container>) -> Answer {
    say(&cri::ListContainersResponse { containers })
}

/// A node whose runtime lists `main-0` as running and answers everything else like this.
async fn answering(answer: fn() -> Answer) -> Node {
    Node::with(Asked::default(), move |method, _| match method {
        "ListContainers" => listed(vec![container("main-0", 0)]),
        _ => answer(),
    })
    .await
}

#[tokio::test]
async fn the_newest_running_container_of_the_name_is_used() {
    let (url, _) = echo().await;
    let asked = Asked::default();
    let recorded = asked.clone();
    let node = Node::with(asked, move |method, message| {
        recorded.lock().unwrap().push((method.to_owned(), message));
        match method {
            "ListContainers" => listed(vec![container("old", 1), container("new", 3), container("middle", 2)]),
            _ => say(&cri::ExecResponse { url: url.clone() }),
        }
    })
    .await;
    let (head, _stream) = node.send("POST", "/exec/ns/pod/terminal?output=1", UPGRADE).await;
    assert!(head.starts_with("http/1.1 101"), "{head}");
    assert_eq!(node.asked::<cri::ExecRequest>("Exec").container_id, "new");
    let labels = [("io.kubernetes.pod.uid", "uid"), ("io.kubernetes.container.name", "terminal")];
    let expected = cri::ContainerFilter {
        label_selector: labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
        state: Some(cri::ContainerStateValue { state: cri::ContainerState::ContainerRunning as i32 }),
        ..Default::default()
    };
    assert_eq!(node.asked::<cri::ListContainersRequest>("ListContainers").filter, Some(expected));
}

/// A node whose runtime has these sandboxes, by their ids, states and times.
async fn with_sandboxes(url: &str, sandboxes: &'static [(&'static str, cri::PodSandboxState, i64)]) -> Node {
    let (url, asked) = (url.to_owned(), Asked::default());
    let recorded = asked.clone();
    let sandbox = |(id, state, created_at): &(&str, cri::PodSandboxState, i64)| cri::PodSandbox {
        id: (*id).to_owned(),
        state: *state as i32,
        created_at: *created_at,
        ..Default::default()
    };
    Node::with(asked, move |method, message| {
        recorded.lock().unwrap().push((method.to_owned(), message));
        match method {
            "ListPodSandbox" => say(&cri::ListPodSandboxResponse { items: sandboxes.iter().map(sandbox).collect() }),
            _ => say(&cri::PortForwardResponse { url: url.clone() }),
        }
    })
    .await
}

#[tokio::test]
async fn ports_are_forwarded_to_the_newest_sandbox_that_is_ready() {
    const READY: cri::PodSandboxState = cri::PodSandboxState::SandboxReady;
    const DEAD: cri::PodSandboxState = cri::PodSandboxState::SandboxNotready;
    let (url, _) = echo().await;
    let node =
        with_sandboxes(&url, &[("old", READY, 1), ("new", READY, 3), ("dead", DEAD, 4), ("middle", READY, 2)]).await;
    let (head, _stream) = node.send("POST", "/portForward/ns/pod", UPGRADE).await;
    assert!(head.starts_with("http/1.1 101"), "{head}");
    assert_eq!(node.asked::<cri::PortForwardRequest>("PortForward").pod_sandbox_id, "new");
    let filter = node.asked::<cri::ListPodSandboxRequest>("ListPodSandbox").filter.unwrap();
    assert_eq!(filter.label_selector, [("io.kubernetes.pod.uid".to_owned(), "uid".to_owned())].into());
    let dead = with_sandboxes(&url, &[("dead", DEAD, 4)]).await;
    let refused = dead.answer("POST", "/portForward/ns/pod", UPGRADE).await;
    assert_eq!(refused, (500, "pod not found (\"pod_ns\")".to_owned()));
}

#[tokio::test]
async fn the_ports_of_a_websocket_are_passed_to_the_runtime() {
    let (url, _) = echo().await;
    let node = Node::start(&url).await;
    let websocket = "Connection: Upgrade\r\nUpgrade: websocket\r\nX-Stream-Protocol-Version: x\r\n";
    let (head, _stream) = node.send("GET", "/portForward/ns/pod?port=80,443", websocket).await;
    assert!(head.starts_with("http/1.1 101"), "{head}");
    assert_eq!(node.asked::<cri::PortForwardRequest>("PortForward").port, [80, 443]);
}

#[tokio::test]
async fn clients_of_a_busy_runtime_are_asked_to_wait() {
    let busy = answering(|| Err(Status::resource_exhausted("busy"))).await;
    let (head, _stream) = busy.send("POST", "/exec/ns/pod/main?output=1", UPGRADE).await;
    assert!(head.starts_with("http/1.1 429") && head.contains("\r\nretry-after: 60\r\n"), "{head}");
    let gone = answering(|| Err(Status::not_found("gone"))).await;
    let (head, _stream) = gone.send("POST", "/exec/ns/pod/main?output=1", UPGRADE).await;
    assert!(head.starts_with("http/1.1 404") && !head.contains("retry-after"), "{head}");
}

#[tokio::test]
async fn output_of_commands_has_a_type_and_their_failures_one_status() {
    let node = Node::start("").await;
    let (head, _stream) = node.send("POST", "/run/ns/pod/main?cmd=x", "").await;
    assert!(head.contains("\r\ncontent-type: application/json\r\n"), "{head}");
    let silent = answering(|| say(&cri::ExecSyncResponse::default())).await;
    let (head, _stream) = silent.send("POST", "/run/ns/pod/main?cmd=x", "").await;
    assert!(head.starts_with("http/1.1 200") && !head.contains("content-type"), "{head}");
    assert_eq!(silent.answer("POST", "/run/ns/pod/main?cmd=x", "").await, (200, String::new()));
    let gone = answering(|| Err(Status::not_found("gone"))).await;
    let response = gone.answer("POST", "/run/ns/pod/main?cmd=x", "").await;
    assert_eq!(response, (500, "rpc error: code = NotFound desc = gone".to_owned()));
}

#[tokio::test]
async fn failed_checkpoints_have_one_status_and_name_their_container() {
    type Case = (fn() -> Answer, &'static str);
    let failed = |why: &str| (500, format!("checkpointing of ns/pod/main failed ({why})"));
    let target = "/checkpoint/ns/pod/main";
    let cases: [Case; 2] = [
        (|| Err(Status::not_found("gone")), "rpc error: code = NotFound desc = gone"),
        (|| Err(Status::unimplemented("no criu")), "rpc error: code = Unimplemented desc = no criu"),
    ];
    for (answer, why) in cases {
        assert_eq!(answering(answer).await.answer("POST", target, "").await, failed(why));
    }
    let empty = Node::with(Asked::default(), |_, _| listed(Vec::new())).await;
    assert_eq!(empty.answer("POST", target, "").await, failed("container main not found"));
    let unknown = empty.answer("POST", "/checkpoint/ns/nope/main?timeout=x", "").await;
    assert_eq!(unknown, (404, "pod does not exist".to_owned()), "before the parameter");
}
