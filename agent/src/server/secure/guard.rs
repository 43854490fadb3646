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
