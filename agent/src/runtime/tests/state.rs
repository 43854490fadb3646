//! The state of a runtime that is replaced.

use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::*;

fn ready() -> cri::StatusResponse {
    let met = |kind: &str| cri::RuntimeCondition { r#type: kind.to_owned(), status: true, ..Default::default() };
    let conditions = ["RuntimeReady", "NetworkReady"].map(met).to_vec();
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
