//! The HTTP GET action of a hook.

use k8s_openapi::api::core::v1::ContainerPort;
use k8s_openapi::api::core::v1::HTTPGetAction;

use super::HookFailure;
use crate::http_get;
use crate::http_get::Caller;
use crate::http_get::HttpGet;
use crate::http_get::HttpGetError;

/// Destination of a hook's request unless its action names a host, and its sender.
pub(super) struct Origin<'a> {
    /// Ports of the container.
    pub(super) ports: &'a [ContainerPort],
    /// Addresses of the pod, primary first.
    pub(super) ips: &'a [String],
    pub(super) caller: &'a Caller,
}

impl Origin<'_> {
    /// The request of an action.
    ///
    /// # Errors
    /// It names no host and the pod has no address of its own, or it cannot be sent.
    pub(super) fn request(&self, action: &HTTPGetAction) -> Result<HttpGet, HookFailure> {
        let names_host = action.host.as_deref().is_some_and(|host| !host.is_empty());
        let ip = match self.ips.first() {
            Some(ip) => ip.as_str(),
            None if names_host => "",
            None => return Err(HookFailure::NoAddress),
        };
        Ok(HttpGet::new(action, self.ports, ip, self.caller)?)
    }
}

/// Sends the request of an action. Any response is success, whatever its status. A request for `https` to a server that does
/// not speak TLS is sent again without TLS and without credentials; `fell_back` is called if the server responds then. Waits
/// for the end of the response as long as the server takes.
///
/// # Errors
/// There is no response; of two attempts the error of the first.
pub(super) async fn get(
    action: &HTTPGetAction,
    origin: &Origin<'_>,
    fell_back: impl FnOnce(),
) -> Result<(), HookFailure> {
    let request = origin.request(action)?;
    match http_get::notify(&request).await {
        Err(first @ HttpGetError::HttpResponseToHttps { .. }) => match http_get::notify(&request.without_tls()).await {
            Ok(_) => {
                tracing::warn!(url = request.url(), "a hook's server does not speak TLS; sent the request without it");
                fell_back();
                Ok(())
            }
            Err(_) => Err(first.into()),
        },
        sent => Ok(sent.map(drop)?),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::Value;
    use serde_json::json;
    use tokio::io::AsyncReadExt as _;
    use tokio::io::AsyncWriteExt as _;
    use tokio::net::TcpListener;

    use super::*;

    fn action(fields: Value) -> HTTPGetAction {
        serde_json::from_value(fields).expect("an action")
    }

    fn caller() -> Caller {
        Caller::hook("v1.36.3")
    }

    /// A server that answers every request with this response and reports how the connections began. It keeps them open.
    async fn server(response: &'static str) -> (u16, tokio::sync::mpsc::UnboundedReceiver<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let (sender, requests) = tokio::sync::mpsc::unbounded_channel();
        tokio::spawn(async move {
            let mut open = Vec::new();
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut bytes = [0; 4096];
                let length = stream.read(&mut bytes).await.unwrap_or(0);
                sender.send(String::from_utf8_lossy(&bytes[..length]).into_owned()).expect("the test listens");
                stream.write_all(response.as_bytes()).await.expect("sent");
                open.push(stream);
            }
        });
        (port, requests)
    }

    async fn sent(fields: Value, ips: &[String]) -> (Result<(), HookFailure>, bool) {
        let (mut fell_back, caller) = (false, caller());
        let origin = Origin { ports: &[], ips, caller: &caller };
        let result = get(&action(fields), &origin, || fell_back = true).await;
        (result, fell_back)
    }

    #[tokio::test]
    async fn any_response_is_success() {
        let ips = ["127.0.0.1".to_owned()];
        for response in [
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
            "HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n",
            "HTTP/1.1 302 Elsewhere\r\nLocation: http://other.invalid/\r\nContent-Length: 0\r\n\r\n",
            // A body that is not read, for its length.
            "HTTP/1.1 200 OK\r\nContent-Length: 10241\r\n\r\nok",
        ] {
            let (port, mut requests) = server(response).await;
            let (result, fell_back) = sent(json!({"path": "/stop?now", "port": port}), &ips).await;
            assert!(result.is_ok() && !fell_back, "{response}: {result:?}");
            let request = requests.recv().await.expect("a request");
            assert!(request.starts_with("GET /stop?now HTTP/1.1\r\n"), "{request}");
            assert!(request.to_lowercase().contains("user-agent: kube-lifecycle/1.36\r\n"), "{request}");
        }
    }

    /// The server sends the head before it has done what it is asked for.
    #[tokio::test]
    async fn a_hook_lasts_until_the_body_of_its_response_ends() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let draining = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            assert!(stream.read(&mut [0; 4096]).await.expect("a request") > 0);
            let beginning = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n";
            stream.write_all(beginning).await.expect("sent");
            let closed = tokio::time::timeout(Duration::from_millis(1500), stream.read_u8()).await;
            assert!(closed.is_err(), "the hook did not wait: {closed:?}");
            stream.write_all(b"0\r\n\r\n").await.expect("sent");
            stream
        });
        let (result, _) = sent(json!({"path": "/drain", "port": port}), &["127.0.0.1".to_owned()]).await;
        assert!(result.is_ok(), "{result:?}");
        draining.await.expect("it was waited for");
    }

    #[tokio::test]
    async fn a_server_without_tls_gets_the_request_again_without_credentials() {
        let (port, mut requests) = server("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n").await;
        let headers = json!([{"name": "Authorization", "value": "secret"}, {"name": "X-Other", "value": "kept"}]);
        let fields = json!({"path": "/", "port": port, "scheme": "HTTPS", "host": "127.0.0.1", "httpHeaders": headers});
        let (result, fell_back) = sent(fields, &[]).await;
        assert!(result.is_ok() && fell_back, "{result:?}");
        let [_hello, request] = [requests.recv().await, requests.recv().await].map(|request| request.expect("two"));
        let request = request.to_lowercase();
        assert!(request.starts_with("get / http/1.1\r\n") && request.contains("x-other: kept\r\n"), "{request}");
        assert!(!request.contains("secret"), "{request}");
    }

    #[tokio::test]
    async fn a_failed_request_reports_the_cause() {
        let (result, _) = sent(json!({"path": "/", "port": 80}), &[]).await;
        let text = result.expect_err("no address").to_string();
        assert_eq!(text, "failed to find networking container: the pod has no address of its own");
        let (result, _) = sent(json!({"path": "/", "port": "web", "host": "127.0.0.1"}), &[]).await;
        let text = result.expect_err("no such port").to_string();
        assert_eq!(text, "port \"web\" not found");
        let closed = TcpListener::bind("127.0.0.1:0").await.expect("a port").local_addr().expect("an address").port();
        let (result, _) = sent(json!({"path": "/x", "port": closed, "host": "127.0.0.1"}), &[]).await;
        let text = result.expect_err("no listener").to_string();
        let expected =
            format!("Get \"http://127.0.0.1:{closed}/x\": dial tcp 127.0.0.1:{closed}: connect: connection refused");
        assert_eq!(text, expected);
    }
}
