//! Who a request comes from.
//!
//! Client certificate, bearer token, token in a WebSocket protocol, in this order; the first that names a user wins.
//! Credentials that are refused end in 401 even where anonymous requests are allowed: only who shows none is anonymous.

mod certificate;
mod credentials;
mod token;

use std::sync::Arc;
use std::time::SystemTime;

use axum::http::HeaderMap;
use rustls::pki_types::CertificateDer;

pub(super) use certificate::user_of;
pub(super) use token::Tokens;

use super::User;
use super::client_ca::ClientCa;
use crate::metrics::Metrics;
use credentials::{WebSocketToken, bearer, websocket};

const AUTHENTICATED: &str = "system:authenticated";
const UNAUTHENTICATED: &str = "system:unauthenticated";
const ANONYMOUS: &str = "system:anonymous";

/// The authenticators that are configured.
pub(super) struct Authenticator {
    /// Client certificates.
    pub(super) client_ca: Option<Arc<ClientCa>>,
    /// Tokens.
    pub(super) tokens: Option<Tokens>,
    /// Requests without credentials are allowed.
    pub(super) anonymous: bool,
    /// Where credentials are counted.
    pub(super) metrics: Arc<Metrics>,
    /// Gate `AllowParsingUserUIDFromCertAuth`.
    pub(super) uid_from_certificate: bool,
}

/// Nobody, and what each authenticator had against the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Unauthenticated(pub(super) Vec<String>);

impl Authenticator {
    /// Names the user and takes the credential out of the headers.
    pub(super) async fn authenticate(
        &self,
        certificates: &[CertificateDer<'static>],
        headers: &mut HeaderMap,
    ) -> Result<User, Unauthenticated> {
        let mut errors = Vec::new();
        match self.certificate(certificates) {
            Ok(Some(user)) => return Ok(authenticated(user)),
            Ok(None) => {}
            Err(error) => errors.push(error),
        }
        if let Some(tokens) = &self.tokens
            && let Some(user) = by_token(tokens, headers, &mut errors).await
        {
            return Ok(authenticated(user));
        }
        if self.anonymous && errors.is_empty() {
            let groups = vec![UNAUTHENTICATED.to_owned()];
            return Ok(User { name: ANONYMOUS.to_owned(), groups, ..User::default() });
        }
        Err(Unauthenticated(errors))
    }

    fn certificate(&self, certificates: &[CertificateDer<'static>]) -> Result<Option<User>, String> {
        let (Some(client_ca), Some((leaf, intermediates))) = (&self.client_ca, certificates.split_first()) else {
            return Ok(None);
        };
        if let Some(seconds) = certificate::seconds_left(leaf, SystemTime::now()) {
            self.metrics.access.certificate_shown(seconds);
        }
        client_ca.verify(leaf, intermediates)?;
        user_of(leaf, self.uid_from_certificate)
    }
}

async fn by_token(tokens: &Tokens, headers: &mut HeaderMap, errors: &mut Vec<String>) -> Option<User> {
    if let Some(token) = bearer(headers) {
        match tokens.user(&token).await {
            Ok(user) => {
                headers.remove(axum::http::header::AUTHORIZATION);
                return Some(user);
            }
            Err(error) => errors.push(error),
        }
    }
    match websocket(headers) {
        Ok(None) => {}
        Err(error) => errors.push(error.to_owned()),
        Ok(Some(WebSocketToken { token, others })) => match tokens.user(&token).await {
            Ok(user) => {
                headers.insert(axum::http::header::SEC_WEBSOCKET_PROTOCOL, others);
                return Some(user);
            }
            Err(error) => errors.push(error),
        },
    }
    None
}

/// Adds the group of all who are authenticated.
fn authenticated(mut user: User) -> User {
    let settled = |group: &String| group == AUTHENTICATED || group == UNAUTHENTICATED;
    if user.name != ANONYMOUS && !user.groups.iter().any(settled) {
        user.groups.push(AUTHENTICATED.to_owned());
    }
    user
}

#[cfg(test)]
mod tests;
