//! Servers that answer with given bytes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::Mutex;

use tokio::io::AsyncRead;
use tokio::io::AsyncReadExt as _;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;
use tokio::net::TcpStream;
use tokio_util::task::AbortOnDropHandle;

/// A server and the heads of the requests it got.
pub(super) struct Server {
    pub(super) address: SocketAddr,
    requests: Arc<Mutex<Vec<String>>>,
    _task: AbortOnDropHandle<()>,
}

impl Server {
    /// Answers the requests in turn with these responses, repeating the last one; then closes each connection.
    pub(super) async fn answering(responses: &[&str]) -> Self {
        let responses: Vec<String> = responses.iter().map(|response| (*response).to_owned()).collect();
        Self::start(move |mut stream, requests| {
            let responses = responses.clone();
            async move {
                let head = read_head(&mut stream).await;
                let count = {
                    let mut requests = requests.lock().expect("not poisoned");
                    requests.push(head);
                    requests.len()
                };
                let response = &responses[(count - 1).min(responses.len() - 1)];
                drop(stream.write_all(response.as_bytes()).await);
            }
        })
        .await
    }

    /// Hands every connection to `serve`.
    pub(super) async fn start<F, S>(serve: S) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
        S: Fn(TcpStream, Arc<Mutex<Vec<String>>>) -> F + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let requests = Arc::<Mutex<Vec<String>>>::default();
        let seen = requests.clone();
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, seen.clone()));
            }
        });
        Self { address, requests, _task: AbortOnDropHandle::new(task) }
    }

    pub(super) fn requests(&self) -> Vec<String> {
        self.requests.lock().expect("not poisoned").clone()
    }
}

/// Reads up to the empty line.
pub(super) async fn read_head(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => break,
        }
    }
    String::from_utf8_lossy(&head).into_owned()
}
