//! Pods with a user namespace of their own.

use super::*;
use crate::runtime::HandlerOffer;
use crate::runtime::RuntimeOffer;
use crate::runtime::RuntimeState;
use crate::user_namespaces::IdRange;
use crate::user_namespaces::UserNamespaces;
use crate::workers::generate::HandlerFeatures;

/// A node with room for one pod, whose runtime has these handlers.
fn node(handlers: &[(&str, bool)]) -> Node {
    let mut node = Node::new();
    node.has_image("app:1", "sha256:1");
    let range = IdRange::new(131_072, 65_536, 65_536, 1).expect("a range");
    let dirs = node.ctx.volumes.dirs().clone();
    node.ctx.user_namespaces = UserNamespaces::open(dirs, range).expect("opened");
    let handler = |(name, user_namespaces): &(&str, bool)| HandlerOffer {
        name: (*name).to_owned(),
        user_namespaces: *user_namespaces,
        ..HandlerOffer::default()
    };
    let offer = RuntimeOffer { handlers: handlers.iter().map(handler).collect(), ..RuntimeOffer::default() };
    let ready = RuntimeState::Ready { network_error: None, offer: Arc::new(offer) };
    node.ctx.settings.security.handlers = HandlerFeatures::new(watch::channel(ready).1);
    node
}

fn own_users() -> Pod {
    pod(json!({"hostUsers": false}))
}

fn options(context: Option<cri::NamespaceOption>) -> cri::UserNamespace {
    context.expect("namespaces").userns_options.expect("a user namespace")
}

#[tokio::test(start_paused = true)]
async fn sandbox_containers_and_mounts_have_the_ids_of_the_pod() {
    let node = node(&[("", true)]);
    let plan = actions(create(), vec![regular(0, "c")]);
    let outcome = execute(&node.ctx, &own_users(), &plan, &empty()).await;
    assert!(outcome.is_ok(), "{outcome:?}");
    let ids = vec![cri::IdMapping { host_id: 131_072, container_id: 0, length: 65_536 }];
    let own = cri::UserNamespace { mode: cri::NamespaceMode::Pod as i32, uids: ids.clone(), gids: ids.clone() };
    let sandbox = node.runtime.state().sandboxes[0].clone();
    let created = node.runtime.state().created[0].clone();
    let sandbox = sandbox.linux.and_then(|linux| linux.security_context).expect("a context");
    assert_eq!(options(sandbox.namespace_options), own);
    let container = created.linux.clone().and_then(|linux| linux.security_context).expect("a context");
    assert_eq!(options(container.namespace_options), own);
    assert!(!created.mounts.is_empty(), "the hosts file and the termination message");
    assert!(created.mounts.iter().all(|mount| mount.uid_mappings == ids && mount.gid_mappings == ids), "{created:?}");
    assert!(node.path("root/pods/uid/userns").exists());

    let host = pod(json!({}));
    execute(&node.ctx, &host, &actions(create(), vec![]), &empty()).await;
    let sandbox = node.runtime.state().sandboxes[1].clone().linux.and_then(|linux| linux.security_context);
    let users = options(sandbox.expect("a context").namespace_options);
    assert_eq!((users.mode(), users.uids.len()), (cri::NamespaceMode::Node, 0));

    cleanup_pod(&node.ctx, &pass(&own_users(), &empty())).await.expect("released");
    assert!(!node.path("root/pods/uid/userns").exists());
    assert!(node.ctx.user_namespaces.recorded().is_empty());
}

/// What does not work in a user namespace often shows only when a container is created.
#[tokio::test(start_paused = true)]
async fn a_container_that_cannot_be_created_counts_as_a_failure_of_its_pod() {
    let (mut node, metrics) = (node(&[("", true)]), Metrics::new());
    node.ctx.metrics = Some(metrics.clone());
    let counts = || {
        let text = metrics.render().expect("metrics");
        ["", "errors_"].map(|errors| {
            let name = format!("kubelet_started_user_namespaced_pods_{errors}total ");
            text.lines().find_map(|line| line.strip_prefix(&name)).expect("the family").to_owned()
        })
    };
    node.runtime.fail("CreateContainer", tonic::Status::unknown("no id-mapped mounts"));
    let plan = |sandbox| actions(sandbox, vec![regular(0, "c")]);
    let outcome = execute(&node.ctx, &own_users(), &plan(create()), &empty()).await;
    assert!(!outcome.is_ok());
    assert_eq!(counts(), ["1", "1"]);

    node.runtime.fail("CreateContainer", tonic::Status::unknown("still none"));
    let outcome = execute(&node.ctx, &own_users(), &plan(keep()), &running(&[])).await;
    assert!(!outcome.is_ok());
    assert_eq!(counts(), ["1", "1"], "the sandbox is not new");
}

#[tokio::test(start_paused = true)]
async fn an_orphan_gives_its_range_back() {
    let node = node(&[("", true)]);
    execute(&node.ctx, &own_users(), &actions(create(), vec![]), &empty()).await;
    std::fs::remove_dir_all(node.path("root/pods/uid")).expect("removed");
    assert_eq!(node.ctx.user_namespaces.recorded(), ["uid"]);
    cleanup_orphan(&node.ctx, "uid").await.expect("gone");
    assert!(node.ctx.user_namespaces.recorded().is_empty());
}

#[tokio::test(start_paused = true)]
async fn handlers_without_user_namespaces_get_none() {
    let cannot = "can't set `spec.hostUsers: false`, runtime does not support user namespaces";
    let unknown = format!("{cannot}: the handler \"\" is not known");
    for (handlers, expected) in
        [(vec![], cannot), (vec![("", false)], cannot), (vec![("runc", true)], unknown.as_str())]
    {
        let node = node(&handlers);
        let failed = execute(&node.ctx, &own_users(), &actions(create(), vec![]), &empty()).await;
        let event = failed.errors[0].event().expect("an event");
        let message = format!("Failed to create pod sandbox: {expected}");
        assert_eq!((&*event.reason, event.message), ("FailedCreatePodSandBox", message));
        assert_eq!(failed.errors[0].render().reason, "CreatePodSandboxError");
        assert!(node.runtime.state().sandboxes.is_empty());
    }
    let with_handler = crate::user_namespaces::UserNamespaceError::Unsupported { handler: "h".into(), is_known: true };
    let expected = "can't set `spec.hostUsers: false`, RuntimeClass handler \"h\" does not support user namespaces";
    assert_eq!(with_handler.to_string(), expected);
}
