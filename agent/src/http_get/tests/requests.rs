//! What is sent.

use k8s_openapi::api::core::v1::ContainerPort;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::server::Server;
use super::*;

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

#[test]
fn urls_are_made_of_the_action() {
    for (path, expected) in [
        ("/", "http://10.0.0.1:80/"),
        ("", "http://10.0.0.1:80"),
        ("healthz", "http://10.0.0.1:80/healthz"),
        ("?foo", "http://10.0.0.1:80?foo"),
        ("/a/../b?x=1&y=2#z", "http://10.0.0.1:80/a/../b?x=1&y=2"),
        ("a b", "http://10.0.0.1:80/a%20b"),
        ("/a%20b", "http://10.0.0.1:80/a%20b"),
        ("%zz", "http://10.0.0.1:80/%25zz"),
        ("/x?q=%zz \"", "http://10.0.0.1:80/x?q=%zz%20%22"),
        ("//other/x", "http://10.0.0.1:80/x"),
        ("https://user:p@other:99/x", "http://10.0.0.1:80/x"),
        ("1:2", "http://10.0.0.1:80/1:2"),
        ("a_b:c", "http://10.0.0.1:80/a_b:c"),
        ("a:/b:c", "http://10.0.0.1:80/b:c"),
        ("a:", "http://10.0.0.1:80"),
        ("a:?b", "http://10.0.0.1:80?b"),
        ("a://", "http://10.0.0.1:80"),
        ("/a\r\nHost: evil", "http://10.0.0.1:80/a%0D%0AHost:%20evil"),
        ("/ü", "http://10.0.0.1:80/%C3%BC"),
    ] {
        let request = HttpGet::new(&action(path, 80), &[], "10.0.0.1", &Caller::probe("v1.36.3")).expect(path);
        assert_eq!(request.url(), expected, "{path:?}");
        assert!(request.target.path_and_query().starts_with('/'), "{path:?}");
    }
}

#[test]
fn hosts_schemes_and_ports_of_the_action_are_used() {
    let named = ContainerPort { name: Some("web".into()), container_port: 93, ..ContainerPort::default() };
    let caller = Caller::probe("v1.36.3");
    let base = action("/", 80);
    let by_name = HTTPGetAction { port: IntOrString::String("web".into()), ..base.clone() };
    let https = HTTPGetAction { scheme: Some("HTTPS".into()), host: Some("example.org".into()), ..base.clone() };
    for (action, ip, expected) in [
        (&base, "fd00::1", "http://[fd00::1]:80/"),
        (&base, "", "http://:80/"),
        (&by_name, "10.0.0.1", "http://10.0.0.1:93/"),
        (&https, "10.0.0.1", "https://example.org:80/"),
    ] {
        let request = HttpGet::new(action, std::slice::from_ref(&named), ip, &caller).expect("a request");
        assert_eq!(request.url(), expected);
    }
    let refused = |action: HTTPGetAction| HttpGet::new(&action, &[], "10.0.0.1", &caller).expect_err("it is invalid");
    let error = refused(HTTPGetAction { scheme: Some("GOPHER".into()), ..base.clone() });
    assert_eq!(error.to_string(), "Get \"http://10.0.0.1:80/\": unsupported protocol scheme \"gopher\"");
    assert!(matches!(refused(action("/", 0)), HttpGetError::Port(PortError::Range(0))));
    assert!(matches!(refused(with_headers(base.clone(), &[("a b", "")])), HttpGetError::Invalid { .. }));
    assert!(matches!(refused(with_headers(base, &[("a", "b\nc: d")])), HttpGetError::Invalid { .. }));
}

/// Upstream's client gets `http:bar`: a probe fails, and so does a hook.
#[test]
fn a_path_that_is_a_url_without_authority_is_not_sent() {
    for (path, scheme, url) in [
        ("foo:bar", "HTTP", "http:bar"),
        ("foo:bar/baz?x=1", "HTTPS", "https:bar/baz?x=1"),
        ("healthz:80", "", "http:80"),
    ] {
        let action = HTTPGetAction { scheme: Some(scheme.into()), ..action(path, 80) };
        let error = HttpGet::new(&action, &[], "10.0.0.1", &Caller::probe("v1.36.3")).expect_err(path);
        assert!(matches!(error, HttpGetError::Invalid { .. }), "no host or port is wrong: {error:?}");
        assert_eq!(error.to_string(), format!("Get \"{url}\": http: no Host in request URL"));
    }
}

#[test]
fn more_headers_than_can_be_sent_are_an_error() {
    let built = |count: usize| {
        let names: Vec<String> = (0..count).map(|number| format!("x-{number}")).collect();
        let headers: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "")).collect();
        HttpGet::new(&with_headers(action("/", 80), &headers), &[], "10.0.0.1", &Caller::probe("v1.36.3"))
    };
    assert_eq!(built(10_000).expect("a request").headers.len(), 10_003, "with those that are sent in any case");
    let error = built(25_000).expect_err("a map of headers has no room for them");
    assert_eq!(error.to_string(), "Get \"http://10.0.0.1:80/\": more than 16384 headers");
}

/// The API server validates the names of headers alone.
#[test]
fn values_of_headers_with_control_characters_are_not_sent() {
    for (name, value) in [
        ("Host", "a\r\nX-Forged: b"),
        ("host", "a\0"),
        ("X-A", "b\nc: d"),
        ("X-A", "b\rc"),
        ("User-Agent", "\u{7f}"),
        ("Accept", "\u{1b}[31m"),
        ("Content-Length", "0\n"),
    ] {
        let action = with_headers(action("/", 80), &[(name, value)]);
        let error = HttpGet::new(&action, &[], "10.0.0.1", &Caller::probe("v1.36.3")).expect_err(name);
        let expected = format!("Get \"http://10.0.0.1:80/\": net/http: invalid header field value for {name:?}");
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn a_zone_is_for_the_node_and_not_for_the_server() {
    let action = HTTPGetAction { host: Some("fe80::1%eth0".into()), ..action("/a", 8080) };
    let request = HttpGet::new(&action, &[], "10.0.0.1", &Caller::probe("v1.36.3")).expect("a request");
    assert_eq!(request.url(), "http://[fe80::1%25eth0]:8080/a");
    assert_eq!((request.target.authority().as_str(), request.target.host.as_str()), ("[fe80::1]:8080", "fe80::1%eth0"));
    let headers = [(http::header::LOCATION, "/b".parse().expect("a header"))].into_iter().collect();
    let next = redirect::next_request(&request, &request, 1, http::StatusCode::FOUND, &headers);
    let next = next.expect("a location").expect("the same host");
    assert_eq!(next.url(), "http://[fe80::1%25eth0]:8080/b");
}

/// The head that a server gets, without the order of its headers.
async fn sent(headers: &[(&str, &str)], caller: &Caller) -> (String, Vec<String>) {
    let server = Server::answering(&[OK]).await;
    let action = with_headers(action("/x", server.address.port()), headers);
    let request = HttpGet::new(&action, &[], "127.0.0.1", caller).expect("a request");
    let response = send(&request, LONG).await.expect("a response");
    assert_eq!((response.status.as_u16(), &response.body[..]), (200, &b"ok"[..]));
    let head = server.requests().remove(0).replace(&server.address.to_string(), "ADDRESS");
    let mut lines = head.trim_end().lines().map(str::to_owned);
    let request = lines.next().expect("a request line");
    let mut headers: Vec<String> = lines.collect();
    headers.sort();
    (request, headers)
}

const LONG: std::time::Duration = std::time::Duration::from_secs(60);

#[tokio::test]
async fn headers_are_those_of_upstream() {
    let probe = Caller::probe("v1.36.3");
    let (line, headers) = sent(&[], &probe).await;
    assert_eq!(line, "GET /x HTTP/1.1");
    assert_eq!(headers, ["Accept: */*", "Connection: close", "Host: ADDRESS", "User-Agent: kube-probe/1.36"]);
    for (listed, expected) in [
        (vec![("User-Agent", "")], vec!["Accept: */*", "Connection: close", "Host: ADDRESS"]),
        (vec![("accept", "")], vec!["Connection: close", "Host: ADDRESS", "User-Agent: kube-probe/1.36"]),
        (
            vec![("Host", "x"), ("host", "y"), ("X-muffins-or-CUPCAKES", "1"), ("X-Muffins-Or-Cupcakes", "2")],
            vec![
                "Accept: */*",
                "Connection: close",
                "Host: x",
                "User-Agent: kube-probe/1.36",
                "X-Muffins-Or-Cupcakes: 1",
                "X-Muffins-Or-Cupcakes: 2",
            ],
        ),
        (
            vec![
                ("Content-Length", "9"),
                ("Transfer-Encoding", "chunked"),
                ("Accept-Encoding", "gzip"),
                ("Accept", "a"),
            ],
            vec![
                "Accept-Encoding: gzip",
                "Accept: a",
                "Connection: close",
                "Host: ADDRESS",
                "User-Agent: kube-probe/1.36",
            ],
        ),
    ] {
        assert_eq!(sent(&listed, &probe).await.1, expected, "{listed:?}");
    }
    let (_, headers) = sent(&[], &Caller::hook("v1.36.3")).await;
    let expected = ["Accept-Encoding: gzip", "Accept: */*", "Host: ADDRESS", "User-Agent: kube-lifecycle/1.36"];
    assert_eq!(headers, expected);
}

#[tokio::test]
async fn user_information_of_the_path_becomes_credentials() {
    let server = Server::answering(&[OK]).await;
    let request = request_to(server.address, "//user:pass%21@elsewhere/x");
    send(&request, LONG).await.expect("a response");
    let head = server.requests().remove(0);
    assert!(head.contains("Authorization: Basic dXNlcjpwYXNzIQ==\r\n"), "{head}");
    assert!(!request.without_tls().headers.contains_key("authorization"));
}
