//! Which redirects are followed.

use std::time::Duration;

use super::server::Server;
use super::*;

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
const LONG: Duration = Duration::from_secs(60);

fn redirect(location: &str) -> String {
    format!("HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 4\r\n\r\nmove")
}

#[tokio::test]
async fn redirects_to_the_same_host_are_followed_whatever_their_port() {
    let target = Server::answering(&[OK]).await;
    let location = format!("http://{}/b?c", target.address);
    let first = Server::answering(&[&redirect(&location)]).await;
    let action = with_headers(action("/a", first.address.port()), &[("Host", "custom"), ("Authorization", "secret")]);
    let response = send(&probe(&action), LONG).await.expect("a response");
    assert_eq!(response.status.as_u16(), 200);
    let head = target.requests().remove(0);
    assert!(head.starts_with("GET /b?c HTTP/1.1\r\n"), "{head}");
    assert!(head.contains(&format!("Host: {}\r\n", target.address)), "{head}");
    assert!(head.contains("Authorization: secret\r\n"), "{head}");
    assert!(head.contains(&format!("Referer: http://{}/a\r\n", first.address)), "{head}");
}

#[tokio::test]
async fn a_relative_location_keeps_the_custom_host() {
    let server = Server::answering(&[&redirect("../b"), OK]).await;
    let action = with_headers(action("/x/a", server.address.port()), &[("Host", "custom")]);
    send(&probe(&action), LONG).await.expect("a response");
    let heads = server.requests();
    assert!(heads[1].starts_with("GET /b HTTP/1.1\r\n"), "{heads:?}");
    assert!(heads[1].contains("Host: custom\r\n"), "{heads:?}");
}

#[tokio::test]
async fn other_redirects_are_final() {
    let no_location = "HTTP/1.1 302 Found\r\nContent-Length: 4\r\n\r\nmove".to_owned();
    let other_status = redirect("/b").replace("302", "304").replace("Content-Length: 4\r\n\r\nmove", "\r\n");
    let other_hosts = ["http://localhost:1/", "//127.0.0.2/", "app://callback", "mailto:node@example.org"];
    for response in other_hosts.map(redirect).into_iter().chain([no_location, other_status]) {
        let server = Server::answering(&[&response]).await;
        let response = send(&request_to(server.address, "/"), LONG).await.expect("a response");
        assert!(response.status.is_redirection());
        assert!(response.body.is_empty() || &response.body[..] == b"move");
        assert_eq!(server.requests().len(), 1);
    }
}

#[tokio::test]
async fn redirects_end() {
    let server = Server::answering(&[&redirect("/again")]).await;
    let error = send(&request_to(server.address, "/"), LONG).await.expect_err("it never ends");
    assert_eq!(error.to_string(), "Get \"/again\": stopped after 10 redirects");
    assert_eq!(server.requests().len(), 10);
    for location in ["http://[", "gopher://127.0.0.1/"] {
        let server = Server::answering(&[&redirect(location)]).await;
        let error = send(&request_to(server.address, "/"), LONG).await.expect_err("there is no such place");
        assert!(matches!(error, HttpGetError::Redirect { .. }), "{error}");
    }
}
