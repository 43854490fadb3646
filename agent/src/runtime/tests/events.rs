//! Subscriptions to the event stream.

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::StreamExt;
use futures_util::stream;

use super::server::endless;
use super::*;

fn event(id: &str) -> Bytes {
    cri::ContainerEventResponse { container_id: id.to_owned(), ..Default::default() }.encode_to_vec().into()
}

/// Answers `Version`, and subscriptions by `events`.
fn streaming(
    events: impl Fn() -> futures_util::future::BoxFuture<'static, server::Answer> + Send + Sync + 'static,
) -> Script {
    Arc::new(move |method, _| match method {
        "GetContainerEvents" => events(),
        "Version" => async { say(&cri::VersionResponse::default()) }.boxed(),
        method => panic!("unexpected {method}"),
    })
}

#[tokio::test(start_paused = true)]
async fn a_subscription_to_a_silent_runtime_stands() {
    // As with grpc-go: no headers before the first event.
    let (_socket, runtime) = serving(streaming(|| std::future::pending().boxed()));
    let mut events = runtime.container_events().await.unwrap();
    let next = tokio::time::timeout(Duration::from_secs(86_400), events.next()).await;
    assert!(next.is_err(), "{next:?}");
}

#[tokio::test(start_paused = true)]
async fn events_arrive_in_order_from_the_first_one_on() {
    let three = || async { endless(stream::iter(["a", "b", "c"].map(|id| Ok(event(id))))) }.boxed();
    let (_socket, runtime) = serving(streaming(three));
    let events = runtime.container_events().await.unwrap();
    let ids: Vec<_> = events.take(3).map(|event| event.unwrap().container_id).collect().await;
    assert_eq!(ids, ["a", "b", "c"]);
}

#[tokio::test(start_paused = true)]
async fn a_runtime_without_events_refuses_the_subscription() {
    let (_socket, runtime) = serving(streaming(|| async { unimplemented() }.boxed()));
    let error = runtime.container_events().await.unwrap_err();
    assert!(error.is_unimplemented(), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_subscription_ends_with_the_connection() {
    let (socket, runtime) = serving(streaming(|| async { endless(stream::iter([Ok(event("a"))])) }.boxed()));
    let mut events = runtime.container_events().await.unwrap();
    assert_eq!(events.next().await.unwrap().unwrap().container_id, "a");
    socket.vanish();
    let error = events.next().await.expect("the reason").unwrap_err();
    assert!(error.is_unreachable(), "{error}");
    assert!(events.next().await.is_none());

    let error = runtime.container_events().await.unwrap_err();
    assert!(error.to_string().contains("unix:///run/test.sock does not answer"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_ends_at_once_is_no_subscription() {
    // After `Version` has answered.
    let ends = || async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        say_all::<cri::ContainerEventResponse>([])
    };
    let (_socket, runtime) = serving(streaming(move || ends().boxed()));
    let error = runtime.container_events().await.unwrap_err();
    assert!(error.is_unimplemented(), "{error}");
}
