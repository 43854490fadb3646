//! A watch against an API server with all faults but data loss: in the end the watcher has the server's objects. Random
//! faults on paused time; the seed is in the failure's message.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use http::Request;
use http::Response;
use http_body_util::BodyExt as _;
use http_body_util::Full;
use http_body_util::StreamBody;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Frame;
use k8s_openapi::api::core::v1::ConfigMap;
use keblet::apiserver::recovery::Recovered;
use keblet::apiserver::watch::Event;
use keblet::apiserver::watch::follow;
use kube::Api;
use kube::client::Body;
use kube::runtime::watcher::Config;
use serde_json::Value;
use serde_json::json;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;

type AnswerBody = UnsyncBoxBody<Bytes, std::io::Error>;
type Line = std::io::Result<Frame<Bytes>>;

/// Objects by name, with the version of their last change.
type Objects = BTreeMap<String, u64>;

struct Server {
    random: fastrand::Rng,
    /// One request in so many fails; 0 for none.
    faults: u32,
    streaming: bool,
    version: u64,
    objects: Objects,
    /// Changes in the history: version, kind, name.
    history: Vec<(u64, &'static str, String)>,
    /// Changes up to this version are compacted.
    forgotten: u64,
    watches: Vec<mpsc::UnboundedSender<Line>>,
}

fn object(name: &str, version: u64) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "resourceVersion": version.to_string()}})
}

fn line(kind: &str, object: &Value) -> Line {
    Ok(Frame::data(Bytes::from(format!("{}\n", json!({"type": kind, "object": object})))))
}

fn mark(version: u64, end: bool) -> Line {
    let mut mark = object("", version);
    if end {
        mark["metadata"]["annotations"] = json!({"k8s.io/initial-events-end": "true"});
    }
    line("BOOKMARK", &mark)
}

fn status(code: u16) -> Value {
    let reason = if code == 410 { "Expired" } else { "InternalError" };
    json!({"kind": "Status", "status": "Failure", "message": reason, "reason": reason, "code": code})
}

fn whole(code: u16, value: &Value) -> Response<AnswerBody> {
    let body = Full::from(value.to_string()).map_err(|never| match never {}).boxed_unsync();
    Response::builder().status(code).body(body).unwrap()
}

/// Outcome of a request.
enum Answer {
    Response(Box<Response<AnswerBody>>),
    Reset,
    Never,
}

impl Server {
    fn new(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let streaming = random.bool();
        Self {
            random,
            faults: 3,
            streaming,
            version: 1,
            objects: Objects::new(),
            history: Vec::new(),
            forgotten: 0,
            watches: Vec::new(),
        }
    }

    /// Changes an object, or breaks watches.
    fn happen(&mut self) {
        let name = format!("o{}", self.random.u32(0..5));
        self.version += 1;
        let kind = match (self.objects.contains_key(&name), self.random.u32(0..3)) {
            (true, 0) => "DELETED",
            (true, _) => "MODIFIED",
            (false, _) => "ADDED",
        };
        match kind {
            "DELETED" => drop(self.objects.remove(&name)),
            _ => drop(self.objects.insert(name.clone(), self.version)),
        }
        let object = object(&name, self.version);
        self.history.push((self.version, kind, name));
        self.watches.retain(|watch| watch.send(line(kind, &object)).is_ok());
        if self.faults == 0 {
            return;
        }
        match self.random.u32(0..12) {
            0 => self.watches.clear(),
            1 => self.watches.drain(..).for_each(|watch| drop(watch.send(Err(std::io::Error::other("reset"))))),
            2 => {
                let code = [410, 500][self.random.usize(0..2)];
                self.watches.retain(|watch| watch.send(line("ERROR", &status(code))).is_ok());
                self.watches.clear();
            }
            // They stay open without further events.
            3 => self.watches.drain(..).for_each(std::mem::forget),
            4 => {
                self.forgotten = self.version;
                self.history.clear();
            }
            5 => {
                let mark = |version| mark(version, false);
                self.watches.retain(|watch| watch.send(mark(self.version)).is_ok());
            }
            _ => {}
        }
    }

    fn answer(&mut self, query: &str) -> Answer {
        if self.faults > 0 && self.random.u32(0..self.faults) == 0 {
            return match self.random.u32(0..6) {
                0 => Answer::Never,
                1 => Answer::Response(Box::new(whole(500, &status(500)))),
                2 => Answer::Response(Box::new(whole(429, &status(429)))),
                3 => Answer::Response(Box::new(whole(503, &status(503)))),
                _ => Answer::Reset,
            };
        }
        let field = |name: &str| query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
        let response = match (field("watch"), field("sendInitialEvents")) {
            (Some(_), Some(_)) if !self.streaming => whole(422, &status(422)),
            (Some(_), Some(_)) => {
                let mut lines: Vec<Line> =
                    self.objects.iter().map(|(name, version)| line("ADDED", &object(name, *version))).collect();
                lines.push(mark(self.version, true));
                // Sometimes the list is cut off.
                let broken = self.faults > 0 && self.random.u32(0..4) == 0;
                if broken {
                    lines.truncate(self.random.usize(0..=lines.len()));
                }
                self.open(lines, broken)
            }
            (Some(_), None) => {
                let from: u64 = field("resourceVersion").unwrap().parse().unwrap();
                if from < self.forgotten {
                    whole(410, &status(410))
                } else {
                    let missed = self.history.iter().filter(|(version, ..)| *version > from);
                    let lines = missed.map(|(version, kind, name)| line(kind, &object(name, *version))).collect();
                    self.open(lines, false)
                }
            }
            (None, _) => {
                let items: Vec<Value> = self.objects.iter().map(|(name, version)| object(name, *version)).collect();
                let meta = json!({"resourceVersion": self.version.to_string()});
                whole(200, &json!({"kind": "ConfigMapList", "apiVersion": "v1", "metadata": meta, "items": items}))
            }
        };
        Answer::Response(Box::new(response))
    }

    fn open(&mut self, lines: Vec<Line>, broken: bool) -> Response<AnswerBody> {
        let (sender, receiver) = mpsc::unbounded_channel();
        lines.into_iter().for_each(|line| drop(sender.send(line)));
        if !broken {
            self.watches.push(sender);
        }
        Response::new(StreamBody::new(UnboundedReceiverStream::new(receiver)).boxed_unsync())
    }
}

fn client(server: &Arc<Mutex<Server>>) -> kube::Client {
    let server = server.clone();
    let service = tower::service_fn(move |request: Request<Body>| {
        let outcome = server.lock().unwrap().answer(request.uri().query().unwrap_or_default());
        async move {
            match outcome {
                Answer::Response(response) => Ok(*response),
                Answer::Reset => Err(std::io::Error::other("reset by peer")),
                Answer::Never => std::future::pending().await,
            }
        }
    });
    kube::Client::new(service, "default")
}

/// The watcher's objects: none before the first complete list.
#[derive(Default)]
struct Replica {
    list: Objects,
    objects: Option<Objects>,
}

impl Replica {
    fn take(&mut self, event: Event<ConfigMap>) {
        let entry = |object: ConfigMap| {
            (object.metadata.name.unwrap(), object.metadata.resource_version.unwrap().parse::<u64>().unwrap())
        };
        match event {
            Event::Init => self.list.clear(),
            Event::InitApply(object) => self.list.extend([entry(object)]),
            Event::InitKeep(object) => panic!("{object:?} cannot be decoded"),
            Event::InitDone => self.objects = Some(std::mem::take(&mut self.list)),
            Event::Apply(object) => self.objects.as_mut().unwrap().extend([entry(object)]),
            Event::Delete(object) => drop(self.objects.as_mut().unwrap().remove(&object.name)),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn watch_converges_under_random_server_faults() {
    for seed in 0..60 {
        let server = Arc::new(Mutex::new(Server::new(seed)));
        let replica = Arc::new(Mutex::new(Replica::default()));
        let watching = tokio::spawn({
            let (api, replica) = (Api::<ConfigMap>::all(client(&server)), replica.clone());
            async move {
                let mut events = std::pin::pin!(follow(api, Config::default(), Recovered::default()));
                while let Some(event) = events.next().await {
                    replica.lock().unwrap().take(event);
                }
            }
        });
        for _ in 0..300 {
            let pause = {
                let mut server = server.lock().unwrap();
                server.happen();
                Duration::from_millis(server.random.u64(0..20_000))
            };
            tokio::time::sleep(pause).await;
        }
        // The server has no faults any more; a watch that hangs is noticed by its timeout.
        server.lock().unwrap().faults = 0;
        tokio::time::sleep(Duration::from_secs(900)).await;
        server.lock().unwrap().happen();
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(!watching.is_finished(), "seed {seed}: the watch has ended");
        let objects = replica.lock().unwrap().objects.clone();
        assert_eq!(objects.as_ref(), Some(&server.lock().unwrap().objects), "seed {seed}");
        watching.abort();
    }
}
