//! Requests as a server sees them, and servers that misbehave.

mod misbehaving_servers;
mod redirects;
mod requests;
mod server;

use std::net::SocketAddr;

use k8s_openapi::api::core::v1::HTTPGetAction;
use k8s_openapi::api::core::v1::HTTPHeader;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::*;

/// The action that gets `path` from port `port`.
fn action(path: &str, port: u16) -> HTTPGetAction {
    let port = IntOrString::Int(port.into());
    HTTPGetAction { path: Some(path.to_owned()), port, ..HTTPGetAction::default() }
}

fn with_headers(action: HTTPGetAction, headers: &[(&str, &str)]) -> HTTPGetAction {
    let header = |(name, value): &(&str, &str)| HTTPHeader { name: (*name).to_owned(), value: (*value).to_owned() };
    HTTPGetAction { http_headers: Some(headers.iter().map(header).collect()), ..action }
}

fn probe(action: &HTTPGetAction) -> HttpGet {
    HttpGet::new(action, &[], "127.0.0.1", &Caller::probe("v1.36.3")).expect("a request")
}

/// A probe's request for `path` of a server.
fn request_to(server: SocketAddr, path: &str) -> HttpGet {
    probe(&action(path, server.port()))
}
