//! Routers of other modules that are mounted into the servers.
//!
//! A module passes an [`axum::Router`] whose paths are written like upstream's, without a trailing slash:
//!
//! ```text
//! debug   /containerLogs/{ns}/{pod}/{container}                       GET
//!         /exec/{ns}/{pod}[/{uid}]/{container}                        GET POST   (also /attach)
//!         /portForward/{ns}/{pod}[/{uid}]                             GET POST
//!         /run/{ns}/{pod}[/{uid}]/{container}                         POST
//!         /checkpoint/{ns}/{pod}/{container}                          POST
//!         /logs  /logs/{*path}                                        GET
//! stats   /stats/summary                                              GET POST
//!         /metrics/resource  /metrics/cadvisor                        any
//! ```
//!
//! What a request has been through before such a router sees it: it is counted, its client is authenticated and
//! authorized (main port), its path is known, its method is one of the above, its `Accept` header is served, and its path
//! is in one canonical form (no `//`, no `..`, no slash at the end, `%2F` taken for a slash). So routes should use
//! [`axum::routing::any`] and leave refusals of methods and types to the server. EnabledHandlers such as
//! `enableDebuggingHandlers` are the server's business too.
//!
//! Connections can be upgraded (`hyper::upgrade::on(&mut request)`) when they speak HTTP/1.1. The `Authorization` header
//! and WebSocket bearer protocols are removed. An extension of type [`super::secure::User`] is the authenticated user.

use axum::Router;

/// Routers of other modules. An empty router answers `404: Page Not Found`.
#[derive(Clone, Debug, Default)]
pub struct Mounted {
    /// Mounted into the main port only.
    pub debug: Router,
    /// Mounted into both ports.
    pub stats: Router,
}
