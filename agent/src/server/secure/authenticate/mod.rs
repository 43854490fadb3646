//! Authentication of requests.
//!
//! Client certificate, bearer token, token in a WebSocket protocol, in this order; the first that yields a user is used.
//! Rejected credentials end in 401 even where anonymous requests are allowed: only requests without any are anonymous.

mod certificate;
mod credentials;
mod token;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::SystemTime;

use axum::http::HeaderMap;
use rustls::pki_types::CertificateDer;
use secrecy::SecretString;

pub(super) use certificate::user_of;
pub(super) use token::TokenError;
pub(super) use token::Tokens;

use super::User;
use super::client_ca::ClientCa;
use crate::metrics::Metrics;
use credentials::WebSocketToken;
use credentials::bearer;
use credentials::websocket;

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
    /// Feature gate `AllowParsingUserUIDFromCertAuth`.
    pub(super) uid_from_certificate: bool,
}

/// Why a request is not authenticated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Unauthenticated {
    /// No authenticator yields a user; the error of each that was tried (401).
    Rejected(Vec<String>),
    /// Its token cannot be reviewed now (429).
    TooManyReviews,
}

impl Authenticator {
    /// The user of a request; its credential is removed from the headers. `peer` is the client's address.
    ///
    /// # Errors
    /// No credential is accepted and anonymous requests are not allowed, or no review is possible now.
    pub(super) async fn authenticate(
        &self,
        peer: Option<IpAddr>,
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
            && let Some(user) = by_token(tokens, peer, headers, &mut errors).await?
        {
            return Ok(authenticated(user));
        }
        if self.anonymous && errors.is_empty() {
            let groups = vec![UNAUTHENTICATED.to_owned()];
            return Ok(User { name: ANONYMOUS.to_owned(), groups, ..User::default() });
        }
        Err(Unauthenticated::Rejected(errors))
    }

    fn certificate(&self, certificates: &[CertificateDer<'static>]) -> Result<Option<User>, String> {
        let (Some(client_ca), Some((leaf, intermediates))) = (&self.client_ca, certificates.split_first()) else {
            return Ok(None);
        };
        if let Some(seconds) = certificate::seconds_left(leaf, SystemTime::now()) {
            self.metrics.access.certificate_presented(seconds);
        }
        client_ca.verify(leaf, intermediates)?;
        user_of(leaf, self.uid_from_certificate)
    }
}

async fn by_token(
    tokens: &Tokens,
    peer: Option<IpAddr>,
    headers: &mut HeaderMap,
    errors: &mut Vec<String>,
) -> Result<Option<User>, Unauthenticated> {
    let mut review = async |token: &SecretString| match tokens.user(token, peer).await {
        Ok(user) => Ok(Some(user)),
        Err(TokenError::Rejected(error)) => {
            errors.push(error);
            Ok(None)
        }
        Err(TokenError::TooManyReviews) => Err(Unauthenticated::TooManyReviews),
    };
    if let Some(token) = bearer(headers)
        && let Some(user) = review(&token).await?
    {
        headers.remove(axum::http::header::AUTHORIZATION);
        return Ok(Some(user));
    }
    match websocket(headers) {
        Ok(Some(WebSocketToken { token, others })) => {
            let user = review(&token).await?;
            if user.is_some() {
                headers.insert(axum::http::header::SEC_WEBSOCKET_PROTOCOL, others);
            }
            Ok(user)
        }
        Ok(None) => Ok(None),
        Err(error) => {
            errors.push(error.to_owned());
            Ok(None)
        }
    }
}

/// Adds the group of all authenticated users.
fn authenticated(mut user: User) -> User {
    let settled = |group: &String| group == AUTHENTICATED || group == UNAUTHENTICATED;
    if user.name != ANONYMOUS && !user.groups.iter().any(settled) {
        user.groups.push(AUTHENTICATED.to_owned());
    }
    user
}

#[cfg(test)]
mod tests;
