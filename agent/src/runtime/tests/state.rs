//! The state of a runtime that is replaced, or loses its network.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;

use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::*;

fn ready() -> cri::StatusResponse {
    ready_with_network(true)
}

fn ready_with_network(network: bool) -> cri::StatusResponse {
    let is = |(kind, status): (&str, bool)| cri::RuntimeCondition { r#type: kind.into(), status, ..Default::default() };
    let conditions = [("RuntimeReady", true), ("NetworkReady", network)].map(is).to_vec();
    cri::StatusResponse { status: Some(cri::RuntimeStatus { conditions }), ..Default::default() }
}

/// As cri-dockerd, whose socket is systemd's: calls to it wait while it is replaced.
#[tokio::test(start_paused = true)]
async fn a_runtime_that_was_replaced_between_two_checks_has_its_new_version() {
    let version = Arc::new(Mutex::new("1.7.24"));
    let running = version.clone();
    let (_socket, runtime) = serving(script(move |method, _| match method {
        "Status" => say(&ready()),
        "Version" => {
            let runtime_version = (*running.lock().unwrap()).to_owned();
            say(&cri::VersionResponse { runtime_version, ..Default::default() })
        }
        method => panic!("unexpected {method}"),
    }));
    let (sender, mut state) = watch::channel(RuntimeState::Unknown);
    let (checks, requests) = watch::channel(());
    let shutdown = CancellationToken::new();
    tokio::spawn(watch_runtime(runtime, sender, requests, shutdown.clone()));
    let _running = shutdown.drop_guard();
    for next in ["1.7.24", "2.1.9"] {
        *version.lock().unwrap() = next;
        checks.send_replace(());
        let is_it = |state: &RuntimeState| matches!(state, RuntimeState::Ready { offer, .. } if offer.version == next);
        let found = timeout(Duration::from_secs(5), state.wait_for(is_it)).await;
        assert!(found.is_ok_and(|state| state.is_ok()), "{next}");
    }
}

/// Waits until the runtime is known to be ready, with or without its network.
async fn show_network(state: &mut watch::Receiver<RuntimeState>, network: bool) {
    let is_it = |state: &RuntimeState| state.is_ready() && state.network_error().is_none() == network;
    let found = timeout(Duration::from_secs(2), state.wait_for(is_it)).await;
    assert!(found.is_ok_and(|state| state.is_ok()), "network {network}");
}

/// The CNI configuration was removed: until that is known, the node gets pods that it cannot run.
#[tokio::test(start_paused = true)]
async fn a_sandbox_that_fails_has_the_network_checked() {
    let (network, checks) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicUsize::new(0)));
    let (has_network, counted) = (network.clone(), checks.clone());
    let (_socket, runtime) = serving(script(move |method, _| match method {
        "Status" => {
            counted.fetch_add(1, SeqCst);
            say(&ready_with_network(has_network.load(SeqCst)))
        }
        "Version" => say(&cri::VersionResponse::default()),
        "RunPodSandbox" => Err(Status::unknown("it fails")),
        method => panic!("unexpected {method}"),
    }));
    let (sender, mut state) = watch::channel(RuntimeState::Unknown);
    let (_checks, requests) = watch::channel(());
    let shutdown = CancellationToken::new();
    tokio::spawn(watch_runtime(runtime.clone(), sender, requests, shutdown.clone()));
    let _running = shutdown.drop_guard();
    let fails = async || runtime.run_pod_sandbox(cri::PodSandboxConfig::default(), "").await.expect_err("it fails");
    show_network(&mut state, true).await;
    for _ in 0..100 {
        fails().await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let checked = checks.load(SeqCst);
    assert!((9..=12).contains(&checked), "once a second, however many sandboxes fail: {checked}");
    network.store(false, SeqCst);
    fails().await;
    show_network(&mut state, false).await;
}

#[tokio::test(start_paused = true)]
async fn another_version_of_the_runtime_is_asked_for_streamed_lists_again() {
    let (version, listed) = (Arc::new(Mutex::new("2.1.9")), Arc::new(Mutex::new(Vec::new())));
    let (running, asked) = (version.clone(), listed.clone());
    let socket = Socket::default();
    socket.serve(script(move |method, _| match method {
        "Status" => say(&ready()),
        "Version" => {
            let runtime_version = (*running.lock().unwrap()).to_owned();
            say(&cri::VersionResponse { runtime_version, ..Default::default() })
        }
        method => {
            asked.lock().unwrap().push(method.to_owned());
            match method {
                "ListContainers" => say(&cri::ListContainersResponse::default()),
                _ => unimplemented(),
            }
        }
    }));
    let runtime = client_with(&socket, RuntimeOptions { streams_lists: true, ..RuntimeOptions::default() });
    let (sender, mut state) = watch::channel(RuntimeState::Unknown);
    let (checks, requests) = watch::channel(());
    let shutdown = CancellationToken::new();
    tokio::spawn(watch_runtime(runtime.clone(), sender, requests, shutdown.clone()));
    let _running = shutdown.drop_guard();
    for next in ["2.1.9", "2.2.0"] {
        *version.lock().unwrap() = next;
        checks.send_replace(());
        let is_it = |state: &RuntimeState| matches!(state, RuntimeState::Ready { offer, .. } if offer.version == next);
        let found = timeout(Duration::from_secs(5), state.wait_for(is_it)).await;
        assert!(found.is_ok_and(|state| state.is_ok()), "{next}");
        for _ in 0..2 {
            runtime.list_containers(Default::default()).await.unwrap();
        }
    }
    let of_each = ["StreamContainers", "ListContainers", "ListContainers"];
    assert_eq!(*listed.lock().unwrap(), [of_each, of_each].concat());
}
