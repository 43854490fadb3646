//! What an error of a list or watch means for the resource version that is known.

use std::pin::pin;
use std::time::Duration;

use http::Request;
use kube::core::Status;
use tokio::time::Instant;

use super::sent_at::SentAt;

/// What to do with the known resource version after an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WatchErrorAction {
    /// The known resource version can be resumed.
    Resume,
    /// It cannot: too old, in the future, or of unknown state.
    Relist,
}

/// What an error means for the known resource version. Errors of unavailable or overloaded servers leave it valid. A client
/// without permission to watch may have that to list, so that objects are listed again, as by client-go.
pub(super) fn action_for(error: &kube::Error) -> WatchErrorAction {
    let kube::Error::Api(status) = error else { return WatchErrorAction::Resume };
    match status.code {
        _ if too_new(status) => WatchErrorAction::Relist,
        401 | 429 | 500..=599 => WatchErrorAction::Resume,
        _ => WatchErrorAction::Relist,
    }
}

/// True if the server's cache has not got as far as was asked for, or not as far back: another try may succeed.
pub(super) fn lags_behind(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 410 || too_new(status))
}

/// True if the server has refused a list or watch, and may do so until its configuration changes: a lack of permission, or a
/// resource that it does not serve. That credentials are rejected is logged by the API client.
pub(super) fn is_denial(status: &Status) -> bool {
    (400..=499).contains(&status.code) && !matches!(status.code, 401 | 408 | 409 | 410 | 429) && !too_new(status)
}

/// True if the permission is lacking.
pub(super) fn is_forbidden(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 403)
}

/// A watch without a head for this long, and a streaming list without a further line, is started again. A server that has
/// just started may accept one before it can serve it.
pub(crate) const WATCH_SILENCE: Duration = Duration::from_secs(30);
/// The head of the answer to any other request must arrive within this time; API servers time out after a minute.
pub(crate) const LIST_SILENCE: Duration = Duration::from_secs(90);

/// The answer to a request within `limit`: a server that accepts a request and never answers must not block the watch. A pause
/// for which the server asks (`Retry-After`) does not count.
///
/// # Errors
/// Those of the request, or a [`silence`].
pub(crate) async fn in_time<T, F>(
    limit: Duration,
    mut request: Request<Vec<u8>>,
    send: impl FnOnce(Request<Vec<u8>>) -> F,
) -> kube::Result<T>
where
    F: Future<Output = kube::Result<T>>,
{
    let sent_at = SentAt::now();
    request.extensions_mut().insert(sent_at.clone());
    let mut answer = pin!(send(request));
    loop {
        if let Ok(answer) = tokio::time::timeout_at(sent_at.get() + limit, answer.as_mut()).await {
            return answer;
        }
        if sent_at.get() + limit <= Instant::now() {
            return Err(silence(limit));
        }
    }
}

/// A request was accepted, and nothing is sent.
#[derive(Debug, thiserror::Error)]
#[error("nothing was sent for {0:?}")]
struct Silence(Duration);

/// The error of a server that has accepted a request and sends nothing for so long.
pub(crate) fn silence(limit: Duration) -> kube::Error {
    kube::Error::Service(Silence(limit).into())
}

/// True if every streaming list may fail in this way, also when a paginated one succeeds: the server lags behind, or fails,
/// as with an etcd that does not report its progress; or nothing arrives, as through a proxy that collects answers.
pub(crate) fn is_refusal(error: &kube::Error) -> bool {
    match error {
        kube::Error::Api(status) => lags_behind(error) || (500..=599).contains(&status.code),
        _ => is_silence(error),
    }
}

/// True for the error of [`silence`].
pub(crate) fn is_silence(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Service(error) if error.is::<Silence>())
}

/// The server has not got to a resource version: its cache lags behind, or it was restored to an earlier state.
pub(super) fn too_new(status: &Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    causes.into_iter().any(|cause| cause.reason == "ResourceVersionTooLarge")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn pauses_for_which_the_server_asks_are_not_silence() {
        let pause = 2 * WATCH_SILENCE;
        let answered_after = async |limit: Duration| {
            let send = |request: Request<Vec<u8>>| async move {
                let sent_at = request.extensions().get::<SentAt>().expect("an extension");
                for _ in 0..2 {
                    sent_at.postpone(pause);
                    tokio::time::sleep(pause).await;
                }
                tokio::time::sleep(limit).await;
                Ok(())
            };
            in_time(WATCH_SILENCE, Request::default(), send).await
        };
        answered_after(WATCH_SILENCE / 2).await.expect("an answer");
        let began = Instant::now();
        let error = answered_after(2 * WATCH_SILENCE).await.expect_err("no answer");
        assert!(is_silence(&error), "{error}");
        assert!(began.elapsed() < 2 * pause + WATCH_SILENCE + Duration::from_secs(1), "{:?}", began.elapsed());
    }

    #[test]
    fn verdicts() {
        let api = |code: u16, cause: Option<&str>| {
            let mut value = json!({"status": "Failure", "message": "x", "reason": "x", "code": code});
            if let Some(cause) = cause {
                value["details"] = json!({"causes": [{"reason": cause, "message": "Too large resource version"}]});
            }
            kube::Error::Api(serde_json::from_value(value).expect("a status"))
        };
        for code in [401, 429, 500, 503, 504] {
            assert_eq!(action_for(&api(code, None)), WatchErrorAction::Resume, "{code}");
        }
        for code in [400, 403, 404, 410, 422] {
            assert_eq!(action_for(&api(code, None)), WatchErrorAction::Relist, "{code}");
        }
        assert_eq!(action_for(&api(504, Some("ResourceVersionTooLarge"))), WatchErrorAction::Relist);
        let reset = kube::Error::ReadEvents(std::io::Error::other("reset"));
        assert_eq!(action_for(&reset), WatchErrorAction::Resume);
        for code in [410, 500, 503, 504] {
            assert!(is_refusal(&api(code, None)), "{code}");
        }
        for code in [401, 403, 429] {
            assert!(!is_refusal(&api(code, None)), "{code}");
        }
        assert!(!is_refusal(&reset));
        assert!(is_refusal(&silence(Duration::from_secs(30))));
        assert!(!is_refusal(&kube::Error::Service("connection refused".into())));
        let denies = |code: u16, cause| matches!(&api(code, cause), kube::Error::Api(status) if is_denial(status));
        let denials = [400, 401, 403, 404, 410, 422, 429, 500, 503].map(|code| (code, denies(code, None)));
        let denials: Vec<u16> = denials.into_iter().filter_map(|(code, denied)| denied.then_some(code)).collect();
        assert_eq!(denials, [400, 403, 404, 422]);
        assert!(!denies(400, Some("ResourceVersionTooLarge")));
    }
}
