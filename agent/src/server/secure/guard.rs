//! The filter in front of the main port's endpoints: authentication and authorization.

use axum::body::Body;
use axum::extract::Request;
use axum::http::HeaderValue;
use axum::http::StatusCode;
use axum::http::header;
use axum::response::IntoResponse as _;
use axum::response::Response;

use super::authenticate::Authenticator;
use super::authenticate::Unauthenticated;
use super::authorize::Attributes;
use super::authorize::Authorizer;
use super::authorize::Denied;
use crate::server::connections::Peer;
use crate::server::health::text;
use crate::server::paths::subresources;
use crate::server::paths::verb;

/// Authentication and authorization.
pub(in crate::server) struct Guard {
    pub(super) authenticator: Authenticator,
    pub(super) authorizer: Authorizer,
}

impl Guard {
    /// Admits a request, with its user as an extension.
    ///
    /// # Errors
    /// The response to send instead: 401, 403, 429 if too many requests are in flight, or 500 if the API server's
    /// review fails.
    pub(in crate::server) async fn admit(&self, request: &mut Request, decoded: &str) -> Result<(), Box<Response>> {
        let peer = request.extensions().get::<Peer>().cloned().unwrap_or_default();
        let address = peer.address.map(|address| address.ip());
        let identified = self.authenticator.authenticate(address, &peer.certificates, request.headers_mut()).await;
        let user = identified.map_err(|why| {
            tracing::debug!(peer = ?peer.address, path = decoded, ?why, "not authenticated");
            Box::new(match why {
                Unauthenticated::Rejected(_) => sniffed(StatusCode::UNAUTHORIZED, "Unauthorized".to_owned()),
                Unauthenticated::TooManyReviews => too_many("too many token reviews are in flight"),
            })
        })?;
        let verb = verb(request.method().as_str());
        let attributes = Attributes { user: &user, verb, subresources: subresources(decoded), path: decoded };
        self.authorizer.authorize(attributes).await.map_err(|denied| Box::new(refusal(&denied, attributes)))?;
        peer.mark_authorized(&user.name).map_err(|_| {
            tracing::debug!(peer = ?peer.address, user = user.name, "too many connections of this user");
            let mut response = too_many("too many connections of this user");
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            Box::new(response)
        })?;
        request.extensions_mut().insert(user);
        Ok(())
    }
}

fn refusal(denied: &Denied, attributes: Attributes<'_>) -> Response {
    let Attributes { user, verb, subresources, path } = attributes;
    let name = &user.name;
    match denied {
        Denied::Forbidden => {
            tracing::debug!(user = name, verb, path, "forbidden");
            let list = subresources.join(" ");
            let body = format!("Forbidden (user={name}, verb={verb}, resource=nodes, subresource(s)=[{list}])\n");
            text((StatusCode::FORBIDDEN, body))
        }
        Denied::TooManyReviews => too_many("too many access reviews are in flight"),
        Denied::Unknown { subresource, error } => {
            tracing::warn!(user = name, verb, path, error, "cannot review the access");
            let body =
                format!("Authorization error (user={name}, verb={verb}, resource=nodes, subresource={subresource})");
            sniffed(StatusCode::INTERNAL_SERVER_ERROR, body)
        }
    }
}

/// A response that asks the client to try again in a second.
fn too_many(why: &str) -> Response {
    let mut response = text((StatusCode::TOO_MANY_REQUESTS, format!("{why}\n")));
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    response
}

/// Text without `nosniff`, as upstream's authentication filter writes it.
fn sniffed(status: StatusCode, body: String) -> Response {
    (status, [(header::CONTENT_TYPE, "text/plain; charset=utf-8")], Body::from(body)).into_response()
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::sync::Arc;
    use std::time::Duration;

    use futures_util::future::join_all;

    use super::super::User;
    use super::super::authenticate::Tokens;
    use super::super::testing::Script;
    use super::*;
    use crate::metrics::Metrics;
    use crate::server::connections::Connections;

    const CLIENT: [u8; 4] = [192, 0, 2, 1];

    /// Allows every authenticated request, and those without credentials.
    fn guard(tokens: Option<Tokens>) -> Guard {
        let (client_ca, metrics) = (None, Metrics::new());
        let authenticator = Authenticator { client_ca, tokens, anonymous: true, metrics, uid_from_certificate: true };
        Guard { authenticator, authorizer: Authorizer::AlwaysAllow }
    }

    fn asks_to_wait(response: &Response) -> bool {
        response.status() == StatusCode::TOO_MANY_REQUESTS && response.headers()[header::RETRY_AFTER] == "1"
    }

    #[tokio::test]
    async fn a_user_with_too_many_connections_is_refused_on_a_further_one() {
        let connections = Connections::default();
        let connect = || Peer { slot: connections.accept(IpAddr::from(CLIENT)).map(Arc::new), ..Peer::default() };
        let mut open = Vec::new();
        let further = loop {
            let peer = connect();
            match peer.mark_authorized("system:anonymous") {
                Ok(()) => open.push(peer),
                Err(_) => break peer,
            }
        };
        let guard = guard(None);
        let asked = |peer: Peer| {
            let mut request = Request::new(Body::empty());
            request.extensions_mut().insert(peer);
            request
        };
        let mut request = asked(further);
        let refused = guard.admit(&mut request, "/pods").await.expect_err("too many");
        assert!(asks_to_wait(&refused) && refused.headers()[header::CONNECTION] == "close", "{refused:?}");
        assert_eq!(request.extensions().get::<User>(), None);
        open.pop();
        let mut request = asked(connect());
        guard.admit(&mut request, "/pods").await.expect("room");
        assert_eq!(request.extensions().get::<User>().expect("a user").name, "system:anonymous");
    }

    #[tokio::test(start_paused = true)]
    async fn clients_beyond_the_reviews_in_flight_are_asked_to_wait() {
        let script = Script::tokens(|_| Ok(Default::default())).slow(Duration::from_secs(3600));
        let guard = guard(Some(Tokens::new(script, Duration::ZERO, Metrics::new()).expect("random bytes")));
        let asking = (0..100).map(|number| {
            let guard = &guard;
            async move {
                let request = axum::http::Request::get("/pods").header("authorization", format!("Bearer {number}"));
                let mut request = request.body(Body::empty()).expect("a request");
                let address = Some((CLIENT, 1).into());
                request.extensions_mut().insert(Peer { address, ..Peer::default() });
                tokio::time::timeout(Duration::from_secs(1), guard.admit(&mut request, "/pods")).await
            }
        });
        let refused: Vec<_> = join_all(asking).await.into_iter().filter_map(|ended| ended.ok()?.err()).collect();
        assert!(!refused.is_empty() && refused.iter().all(|response| asks_to_wait(response)), "{refused:?}");
        let user = User::default();
        let attributes = Attributes { user: &user, verb: "get", subresources: &["pods"], path: "/pods" };
        assert!(asks_to_wait(&refusal(&Denied::TooManyReviews, attributes)));
    }
}
