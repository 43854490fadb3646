use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::routing::any;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::authentication::v1::TokenReviewStatus;
use k8s_openapi::api::authentication::v1::UserInfo;
use k8s_openapi::api::authorization::v1::SubjectAccessReviewStatus;
use rustls::pki_types::ServerName;
use rustls::version::TLS12;
use rustls::version::TLS13;
use tokio::io::AsyncReadExt as _;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::testing::Authority;
use super::testing::Script;
use super::*;
use crate::server::InFlight;
use crate::server::Mounted;
use crate::server::testing::Answer;
use crate::server::testing::Setup;
use crate::server::testing::TIMEOUT;
use crate::server::testing::client_of;
use crate::server::testing::exchange;

/// The API server of these tests: the token "good" is root's; `root` is allowed everything, `looker` everything but the
/// subresource proxy, other users nothing.
fn api() -> Arc<Script> {
    Script::new(
        |token| {
            let user = UserInfo { username: Some("root".to_owned()), ..UserInfo::default() };
            Ok(TokenReviewStatus { authenticated: Some(token == "good"), user: Some(user), ..Default::default() })
        },
        |spec| {
            let subresource = spec.resource_attributes.as_ref().and_then(|a| a.subresource.as_deref());
            let allowed = match spec.user.as_deref() {
                Some("root") => true,
                Some("looker") => subresource != Some("proxy"),
                Some("broken") => {
                    return Err(ReviewError { message: "unavailable".to_owned(), again: false, after: None });
                }
                _ => false,
            };
            Ok(SubjectAccessReviewStatus { allowed, ..SubjectAccessReviewStatus::default() })
        },
    )
}

/// All paths with the subresources of their reviews.
const PATHS: [(&str, &str); 34] = [
    ("/healthz", "healthz proxy"),
    ("/healthz/ping", "healthz proxy"),
    ("/healthz/log", "healthz proxy"),
    ("/healthz/syncloop", "healthz proxy"),
    ("/healthz/device-plugin", "healthz proxy"),
    ("/pods", "pods proxy"),
    ("/pods/", "pods proxy"),
    ("/pods/x", "pods proxy"),
    ("/stats/", "stats"),
    ("/stats/summary", "stats"),
    ("/metrics", "metrics"),
    ("/metrics/cadvisor", "metrics"),
    ("/metrics/resource", "metrics"),
    ("/metrics/probes", "metrics"),
    ("/metrics/slis", "metrics"),
    ("/logs/", "log"),
    ("/logs/syslog", "log"),
    ("/run/ns/pod/c", "proxy"),
    ("/run/ns/pod/uid/c", "proxy"),
    ("/exec/ns/pod/c", "proxy"),
    ("/exec/ns/pod/uid/c", "proxy"),
    ("/attach/ns/pod/c", "proxy"),
    ("/attach/ns/pod/uid/c", "proxy"),
    ("/portForward/ns/pod", "proxy"),
    ("/portForward/ns/pod/uid", "proxy"),
    ("/containerLogs/ns/pod/c", "proxy"),
    ("/runningpods/", "pods proxy"),
    ("/configz", "configz proxy"),
    ("/checkpoint/ns/pod/c", "checkpoint"),
    ("/debug/pprof/heap", "proxy"),
    ("/debug/flags/v", "proxy"),
    ("/flagz", "configz"),
    ("/statusz", "statusz"),
    ("/exec/%2e%2e/pods", "proxy"),
];

const METHODS: [(&str, &str); 9] = [
    ("GET", "get"),
    ("POST", "create"),
    ("PUT", "update"),
    ("PATCH", "patch"),
    ("DELETE", "delete"),
    ("OPTIONS", ""),
    ("TRACE", ""),
    ("BREW", ""),
    ("get", ""),
];

/// Many requests on one connection.
struct Session {
    stream: tokio_rustls::client::TlsStream<TcpStream>,
}

impl Session {
    async fn ask(&mut self, method: &str, path: &str, headers: &str) -> (u16, String) {
        let text = format!("{method} {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n");
        self.stream.write_all(text.as_bytes()).await.expect("sent");
        let mut answer = Vec::new();
        loop {
            let text = String::from_utf8_lossy(&answer).to_lowercase();
            if let Some((head, body)) = text.split_once("\r\n\r\n") {
                let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
                let length: usize = length.expect("answers here have a length").parse().expect("a number");
                if body.len() >= length {
                    let status = head.split(' ').nth(1).expect("a status").parse().expect("a number");
                    let whole = String::from_utf8_lossy(&answer).into_owned();
                    return (status, whole.split_once("\r\n\r\n").expect("found above").1.to_owned());
                }
            }
            let read = tokio::time::timeout(TIMEOUT, self.stream.read_buf(&mut answer)).await.expect("in time");
            assert!(read.expect("readable") > 0, "{method} {path}: closed after {text}");
        }
    }
}

#[tokio::test]
async fn every_path_requires_authentication() {
    let port = Setup::new(Some(api())).start().await;
    let mut session = Session { stream: port.connect(port.client(None)).await.expect("a connection") };
    for (path, _) in PATHS {
        for (method, _) in METHODS {
            let (status, body) = session.ask(method, path, "").await;
            assert_eq!((status, body.as_str()), (401, "Unauthorized"), "{method} {path}");
            let (status, body) = session.ask(method, path, "Authorization: Bearer bad\r\n").await;
            assert_eq!((status, body.as_str()), (401, "Unauthorized"), "{method} {path} with an invalid token");
        }
    }
    let answer = port.ask(None, "HEAD", "/pods", "").await;
    assert_eq!(answer.status, 401);
    assert!(!answer.head.contains("www-authenticate"), "{}", answer.head);
}

#[tokio::test]
async fn every_path_requires_authorization() {
    let port = Setup::new(Some(api())).start().await;
    let eve = port.authority.client("eve", &[]);
    let mut session = Session { stream: port.connect(port.client(Some(&eve))).await.expect("a connection") };
    for (path, subresources) in PATHS {
        for (method, verb) in METHODS {
            let (status, body) = session.ask(method, path, "").await;
            let expected =
                format!("Forbidden (user=eve, verb={verb}, resource=nodes, subresource(s)=[{subresources}])\n");
            assert_eq!((status, body), (403, expected), "{method} {path}");
        }
    }
    let broken = port.authority.client("broken", &[]);
    let answer = port.ask(Some(&broken), "GET", "/pods", "").await;
    let expected = "Authorization error (user=broken, verb=get, resource=nodes, subresource=pods)";
    assert_eq!((answer.status, answer.body.as_str()), (500, expected));
}

#[tokio::test]
async fn unknown_paths_need_no_credentials() {
    let port = Setup::new(Some(api())).start().await;
    for path in ["/", "/nope", "/configz/", "/healthz/x", "/pods%2F", "/metrics/"] {
        let answer = port.ask(None, "GET", path, "").await;
        assert_eq!((answer.status, answer.body.as_str()), (404, "404 page not found\n"), "{path}");
    }
    for (path, to) in [
        ("/logs", "/logs/"),
        ("/stats?a=b&c", "/stats/?a=b&c"),
        ("//exec/a/b/c", "/exec/a/b/c"),
        ("/exec/../pods", "/pods"),
        ("/pods/./x", "/pods/x"),
    ] {
        let answer = port.ask(None, "GET", path, "").await;
        assert_eq!(answer.status, 307, "{path}");
        assert!(answer.head.contains(&format!("\r\nlocation: {to}\r\n")), "{path}: {}", answer.head);
    }
    for path in ["*", "/%zz"] {
        assert_eq!(port.ask(None, "GET", path, "").await.status, 400, "{path}");
    }
}

#[tokio::test]
async fn responses_to_authorized_requests() {
    let port = Setup::new(Some(api())).start().await;
    let root = port.authority.client("root", &[]);
    for (method, path, status, body) in [
        ("GET", "/healthz", 200, Some("ok")),
        ("DELETE", "/healthz/device-plugin", 200, Some("ok")),
        ("GET", "/pods", 200, Some("{\"kind\":\"PodList\",\"apiVersion\":\"v1\",\"metadata\":{},\"items\":null}\n")),
        ("GET", "/pods/x", 404, Some("404: Page Not Found")),
        ("HEAD", "/pods", 405, Some("")),
        ("PUT", "/exec/a/b/c", 405, Some("405: Method Not Allowed")),
        ("GET", "/exec/a/b/c", 404, Some("404: Page Not Found")),
        ("GET", "/runningpods/", 500, Some("no runtime yet")),
        ("GET", "/configz", 200, Some(r#"{"kubeletconfig":{"port":10250}}"#)),
        ("DELETE", "/metrics/slis", 200, Some("metrics reset\n")),
        ("GET", "/debug/flags/v", 406, Some("unsupported http method\n")),
        ("GET", "/debug/pprof/heap", 404, Some("Unknown profile\n")),
        ("GET", "/debug/pprof/", 404, Some("404: Page Not Found")),
        ("GET", "/metrics", 200, None),
        ("GET", "/metrics/cadvisor", 404, Some("404: Page Not Found")),
        ("GET", "/metrics/probes", 200, None),
        ("GET", "/flagz", 200, None),
        ("GET", "/statusz", 200, None),
    ] {
        let answer = port.ask(Some(&root), method, path, "").await;
        assert_eq!(answer.status, status, "{method} {path}: {}", answer.body);
        if let Some(body) = body {
            assert_eq!(answer.body, body, "{method} {path}");
        }
    }
    let answer = port.ask(Some(&root), "DELETE", "/exec/a/b/c", "").await;
    assert!(answer.head.contains("\r\nallow: get, post\r\n"), "{}", answer.head);
    let answer = port.ask(Some(&root), "GET", "/containerLogs/a/b/c", "Accept: application/json\r\n").await;
    assert_eq!((answer.status, answer.body.as_str()), (406, "406: Not Acceptable\n\nAvailable representations: "));
    let text = port.metrics.render().expect("encodes");
    let line = "kubelet_http_requests_total{long_running=\"true\",method=\"DELETE\",path=\"exec\",server_type=\"readwrite\"} 1";
    assert!(text.lines().any(|found| found == line), "{text}");
}

#[tokio::test]
async fn fine_grained_rights_do_and_tokens_work() {
    let port = Setup::new(Some(api())).start().await;
    let looker = port.authority.client("looker", &[]);
    for (path, status) in [("/pods", 200), ("/healthz", 200), ("/configz", 200), ("/flagz", 200), ("/exec/a/b/c", 403)]
    {
        assert_eq!(port.ask(Some(&looker), "GET", path, "").await.status, status, "{path}");
    }
    assert_eq!(port.ask(None, "GET", "/pods", "Authorization: Bearer good\r\n").await.status, 200);
    let strange = Authority::new("strange").client("root", &[]);
    assert_eq!(port.ask(Some(&strange), "GET", "/pods", "").await.status, 401, "the handshake is no place to refuse");
}

/// A router that returns the request it got, and echoes upgraded connections.
fn mounted() -> Mounted {
    async fn show(request: Request) -> String {
        let user = request.extensions().get::<User>().map(|user| user.name.clone());
        let credential = request.headers().contains_key("authorization");
        format!("{} {:?} {user:?} {credential}", request.method(), request.uri())
    }
    async fn echo(mut request: Request) -> axum::response::Response {
        let in_flight = request.extensions().get::<InFlight>().cloned();
        let upgrade = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let mut stream = TokioIo::new(upgrade.await.expect("an upgrade"));
            let (mut reader, mut writer) = tokio::io::split(&mut stream);
            // Either end may end it.
            let _ = tokio::io::copy(&mut reader, &mut writer).await;
            drop(in_flight);
        });
        let response = hyper::Response::builder().status(101).header("connection", "upgrade").header("upgrade", "echo");
        response.body(axum::body::Body::empty()).expect("a response")
    }
    let debug = Router::new()
        .route("/exec/{ns}/{pod}/{container}", any(show))
        .route("/attach/{ns}/{pod}/{container}", any(echo))
        .route("/logs/{*path}", any(show));
    let stats = ["/stats/summary", "/metrics/resource", "/metrics/cadvisor"];
    Mounted { debug, stats: stats.into_iter().fold(Router::new(), |router, path| router.route(path, any(show))) }
}

#[tokio::test]
async fn mounted_routers_get_admitted_requests() {
    let mut setup = Setup::new(Some(api()));
    setup.mounted = mounted();
    let port = setup.start().await;
    let root = port.authority.client("root", &[]);
    for (path, shown) in [
        ("/exec/a/b/c?command=x%20y", "GET /exec/a/b/c?command=x%20y Some(\"root\") false"),
        ("/exec/a%2Fb/%63/", "GET /exec/a/b/c Some(\"root\") false"),
        ("/logs/a%20b/../c?tail=1", ""),
        ("/logs/sub/", "GET /logs/sub/ Some(\"root\") false"),
        ("/logs/%2e%2e/shadow", "GET /logs/../shadow Some(\"root\") false"),
        ("/stats/summary", "GET /stats/summary Some(\"root\") false"),
        ("/metrics/resource?x", "GET /metrics/resource?x Some(\"root\") false"),
        ("/metrics/cadvisor", "GET /metrics/cadvisor Some(\"root\") false"),
    ] {
        let answer = port.ask(Some(&root), "GET", path, "").await;
        assert_eq!(
            answer.body.split("\">").next().filter(|_| answer.status == 200).unwrap_or_default(),
            shown,
            "{path}"
        );
    }
    let answer = port.ask(None, "POST", "/exec/a/b/c", "Authorization: bearer good\r\n").await;
    assert_eq!(answer.body, "POST /exec/a/b/c Some(\"root\") false", "the token goes no further");
    let answer = port.ask(Some(&root), "GET", "/run/a/b/c/d/e", "").await;
    assert_eq!((answer.status, answer.body.as_str()), (404, "404: Page Not Found"));
}

#[tokio::test]
async fn connections_can_be_upgraded() {
    let mut setup = Setup::new(Some(api()));
    setup.mounted = mounted();
    let port = setup.start().await;
    let root = port.authority.client("root", &[]);
    let mut stream = port.connect(port.client(Some(&root))).await.expect("a connection");
    let asked = "POST /attach/a/b/c HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n";
    stream.write_all(asked.as_bytes()).await.expect("sent");
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.expect("readable"));
    }
    assert!(head.starts_with(b"HTTP/1.1 101 "), "{}", String::from_utf8_lossy(&head));
    let in_flight = || {
        let text = port.metrics.render().expect("encodes");
        let line =
            text.lines().find(|line| line.starts_with("kubelet_http_inflight_requests") && line.contains("attach"));
        line.and_then(|line| line.rsplit(' ').next()).map(str::to_owned)
    };
    for word in [&b"hello"[..], b"world"] {
        stream.write_all(word).await.expect("sent");
        let mut back = vec![0; word.len()];
        tokio::time::timeout(TIMEOUT, stream.read_exact(&mut back)).await.expect("in time").expect("readable");
        assert_eq!(back, word);
    }
    assert_eq!(in_flight().as_deref(), Some("1"), "it lasts");
    drop(stream);
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    while in_flight().as_deref() != Some("0") {
        assert!(tokio::time::Instant::now() < deadline, "still in flight: {:?}", in_flight());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn start_up_errors() {
    let refused = async |change: fn(&mut Setup)| {
        let mut setup = Setup::new(None);
        change(&mut setup);
        setup.open().await.err().expect("refused").to_string()
    };
    let no_token = "authentication.webhook: no client provided, cannot use webhook authentication";
    assert_eq!(refused(|_| {}).await, no_token);
    let off = |setup: &mut Setup| setup.config.authentication.webhook.enabled = false;
    let _ = off;
    let mode = async |mode: &str| {
        let mut setup = Setup::new(None);
        setup.config.authentication.webhook.enabled = false;
        setup.config.authorization.mode = mode.to_owned();
        setup.open().await.map(drop).map_err(|error| error.to_string())
    };
    let field = "authorization.mode: ";
    assert_eq!(mode("Webhook").await, Err(format!("{field}no client provided, cannot use webhook authorization")));
    assert_eq!(mode("").await, Err(format!("{field}no authorization mode specified")));
    assert_eq!(mode("ABAC").await, Err(format!("{field}unknown authorization mode ABAC")));
    assert_eq!(mode("AlwaysAllow").await, Ok(()));
    let taken = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    let mut setup = Setup::new(Some(api()));
    setup.config.port = taken.local_addr().expect("an address").port().into();
    let error = setup.open().await.err().expect("refused").to_string();
    assert!(error.starts_with("cannot bind the address 127.0.0.1:"), "{error}");
}

#[tokio::test]
async fn without_authenticators_all_requests_are_denied() {
    let mut setup = Setup::new(None);
    setup.config.authentication.webhook.enabled = false;
    setup.config.authentication.x509.client_ca_file.clear();
    setup.config.authorization.mode = "AlwaysAllow".to_owned();
    let port = setup.start().await;
    let root = port.authority.client("root", &[]);
    assert_eq!(port.ask(Some(&root), "GET", "/healthz", "").await.status, 401);
}

#[tokio::test]
async fn anonymous_requests_where_allowed() {
    let mut setup = Setup::new(None);
    setup.config.authentication.webhook.enabled = false;
    setup.config.authentication.anonymous.enabled = true;
    setup.config.authorization.mode = "AlwaysAllow".to_owned();
    let port = setup.start().await;
    assert_eq!(port.ask(None, "GET", "/pods", "").await.status, 200);
    let strange = Authority::new("strange").client("root", &[]);
    assert_eq!(port.ask(Some(&strange), "GET", "/pods", "").await.status, 401);
}

mod limits;
mod transport;
