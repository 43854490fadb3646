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
//! Before such a router gets a request, it is counted, its client is authenticated and authorized (main port), its
//! path, method and `Accept` header are checked, and its path is canonical (no `//`, no `..`, no trailing slash, `%2F`
//! decoded). So routes use [`axum::routing::any`]: the server refuses methods and types, and applies
//! `enableDebuggingHandlers`.
//!
//! Connections can be upgraded (`hyper::upgrade::on(&mut request)`) when they speak HTTP/1.1. The `Authorization`
//! header and WebSocket bearer protocols are removed. An extension of type [`super::secure::User`] is the authenticated
//! user.

use axum::Router;

/// Routers of other modules. An empty router answers `404: Page Not Found`.
#[derive(Clone, Debug, Default)]
pub struct Mounted {
    /// Mounted into the main port only.
    pub debug: Router,
    /// Mounted into both ports.
    pub stats: Router,
}
