//! The dispatcher: who asks, and whether they may.

use axum::body::Body;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};

use super::authenticate::{Authenticator, Unauthenticated};
use super::authorize::{Attributes, Authorizer, Denied};
use super::connections::Peer;
use crate::server::health::text;
use crate::server::paths::{subresources, verb};

/// Authentication and authorization.
pub(in crate::server) struct Guard {
    pub(super) authenticator: Authenticator,
    pub(super) authorizer: Authorizer,
}

impl Guard {
    /// Lets a request in, with its user as an extension, or says what to answer.
    ///
    /// # Errors
    /// The answer: 401, 403, or 500 if it could not be found out.
    pub(in crate::server) async fn admit(&self, request: &mut Request, decoded: &str) -> Result<(), Box<Response>> {
        let peer = request.extensions().get::<Peer>().cloned().unwrap_or_default();
        let identified = self.authenticator.authenticate(&peer.certificates, request.headers_mut()).await;
        let user = identified.map_err(|Unauthenticated(errors)| {
            tracing::debug!(peer = ?peer.address, path = decoded, ?errors, "not authenticated");
            Box::new(sniffed(StatusCode::UNAUTHORIZED, "Unauthorized".to_owned()))
        })?;
        let verb = verb(request.method().as_str());
        let attributes = Attributes { user: &user, verb, subresources: subresources(decoded), path: decoded };
        self.authorizer.authorize(attributes).await.map_err(|denied| Box::new(refusal(&denied, attributes)))?;
        peer.mark_authorized();
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
        Denied::Unknown { subresource, error } => {
            tracing::warn!(user = name, verb, path, error, "cannot find out whether this is allowed");
            let body =
                format!("Authorization error (user={name}, verb={verb}, resource=nodes, subresource={subresource})");
            sniffed(StatusCode::INTERNAL_SERVER_ERROR, body)
        }
    }
}

/// Text whose type is left for clients to see.
fn sniffed(status: StatusCode, body: String) -> Response {
    (status, [(header::CONTENT_TYPE, "text/plain; charset=utf-8")], Body::from(body)).into_response()
}
