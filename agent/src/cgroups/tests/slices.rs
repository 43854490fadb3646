//! The manager with a simulated systemd.

use std::time::Duration;

use futures_util::StreamExt as _;
use zbus::Connection;
use zbus::Guid;
use zbus::MessageStream;
use zbus::OwnedVariant;

use super::*;
use crate::cgroups::systemd::Open;
use crate::cgroups::systemd::Systemd;
use crate::cgroups::systemd::or_socket;

/// Answers like systemd's manager, with one finished job per call, and records the calls. The first `refusals` calls that set
/// properties fail.
async fn fake_systemd(
    stream: std::os::unix::net::UnixStream,
    asked: Arc<Mutex<Vec<String>>>,
    refusals: &[&'static str],
) {
    let mut refusals = refusals.iter();
    let guid = Guid::generate();
    let connection =
        zbus::connection::Builder::unix_stream(stream).server(guid).p2p().build().await.expect("a connection");
    let mut messages = MessageStream::from(&connection);
    let mut jobs = 0u32;
    while let Some(Ok(message)) = messages.next().await {
        let header = message.header();
        let Some(method) = header.member().map(|member| member.to_string()) else { continue };
        let body = message.body();
        match method.as_str() {
            "StartTransientUnit" => {
                type Properties = Vec<(String, OwnedVariant)>;
                let (unit, mode, properties, _): (String, String, Properties, Vec<(String, Properties)>) =
                    body.deserialize().expect("the method's arguments");
                let names: Vec<String> = properties.into_iter().map(|(name, _)| name).collect();
                asked.lock().expect("unpoisoned").push(format!("start {unit} {mode} {}", names.join(",")));
                jobs += 1;
                finish_job(&connection, &header, jobs, &unit).await;
            }
            "StopUnit" => {
                let (unit, _): (String, String) = body.deserialize().expect("the method's arguments");
                asked.lock().expect("unpoisoned").push(format!("stop {unit}"));
                jobs += 1;
                finish_job(&connection, &header, jobs, &unit).await;
            }
            "SetUnitProperties" => {
                let (unit, runtime, properties): (String, bool, Vec<(String, OwnedVariant)>) =
                    body.deserialize().expect("the method's arguments");
                let texts: Vec<String> = properties
                    .into_iter()
                    .map(|(name, value)| format!("{name}={}", u64::try_from(value).expect("a number")))
                    .collect();
                asked.lock().expect("unpoisoned").push(format!("set {unit} {runtime} {}", texts.join(",")));
                if let Some(name) = refusals.next() {
                    let refused = connection.reply_error(&header, *name, &("refused",));
                    refused.await.expect("an answer");
                } else {
                    connection.reply(&header, &()).await.expect("an answer");
                }
            }
            _ => connection.reply(&header, &()).await.expect("an answer"),
        }
    }
}

async fn finish_job(connection: &Connection, call: &zbus::message::Header<'_>, id: u32, unit: &str) {
    let path = format!("/org/freedesktop/systemd1/job/{id}");
    let job = zbus::ObjectPath::try_from(path.as_str()).expect("a path");
    connection.reply(call, &job).await.expect("an answer");
    emit_removed(connection, (id, &job, unit, "done")).await;
}

async fn emit_removed(connection: &Connection, body: (u32, &zbus::ObjectPath<'_>, &str, &str)) {
    let (object, manager) = ("/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager");
    connection.emit_signal(None::<&str>, object, manager, "JobRemoved", &body).await.expect("a signal");
}

/// The agent's end of a connection, and systemd's.
async fn connections() -> (Connection, Connection) {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
    let server = zbus::connection::Builder::unix_stream(theirs).server(Guid::generate()).p2p();
    let client = zbus::connection::Builder::unix_stream(ours).p2p();
    let (client, server) = tokio::join!(client.build(), server.build());
    (client.expect("a connection"), server.expect("a connection"))
}

/// The manager with [`fake_systemd`], and what that is asked.
async fn with_systemd(layout: Layout, refusals: &'static [&'static str]) -> (Cgroups, Arc<Mutex<Vec<String>>>) {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
    let asked = Arc::new(Mutex::new(Vec::new()));
    tokio::spawn(fake_systemd(theirs, Arc::clone(&asked), refusals));
    let connection = zbus::connection::Builder::unix_stream(ours).p2p().build().await.expect("a connection");
    (Cgroups::with(layout, Driver::Systemd, CgroupName::default(), Some(Systemd::over(connection))), asked)
}

#[tokio::test]
async fn creates_slices_with_systemd() {
    let fixture = V2Fixture::make();
    let (cgroups, asked) = with_systemd(fixture.layout(), &[]).await;
    cgroups.ensure_pod(QosClass::BestEffort, "u-1", &values()).await.expect("a pod");
    let path = "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podu_1.slice";
    assert_eq!(cgroups.parent_for_runtime(QosClass::BestEffort, "u-1").expect("a path"), path);
    assert!(below(fixture.0.path(), path).is_dir());
    fixture.settle(path);
    cgroups.update_pod(QosClass::BestEffort, "u-1", &values()).await.expect("values");
    let quota = fixture.read(format!("{path}/cpu.max").trim_start_matches('/'));
    assert_eq!(quota.as_deref(), Some("51000 100000"), "rounded up to whole percents");
    assert_eq!(cgroups.pods(), BTreeMap::from([("u-1".to_owned(), QosClass::BestEffort)]));
    let classes = ["u-1", "u-2", "../u-1"].map(|uid| cgroups.class_of(uid));
    assert_eq!(classes, [Some(QosClass::BestEffort), None, None]);
    let unit = "kubepods-besteffort-podu_1.slice";
    let set = format!(
        "set {unit} true MemoryMax=67108864,CPUWeight=39,CPUQuotaPeriodUSec=100000,CPUQuotaPerSecUSec=510000,TasksMax=100"
    );
    let start = format!(
        "start {unit} replace Description,Wants,MemoryAccounting,CPUAccounting,TasksAccounting,IOAccounting,DefaultDependencies"
    );
    assert_eq!(*asked.lock().expect("unpoisoned"), [start, set.clone(), set]);
}

/// With the first values systemd may disable controllers that it does not use itself. The next cgroup has them enabled again.
#[tokio::test]
async fn a_slice_of_the_tree_is_checked_before_systemd_gets_its_values() {
    let fixture = V2Fixture::make();
    files::create(&fixture.layout(), "/kubepods.slice").expect("a folder");
    fixture.settle("/kubepods.slice");
    let (cgroups, asked) = with_systemd(fixture.layout(), &[]).await;
    let error = cgroups.ensure_tree().await.expect_err("no controllers").to_string();
    assert!(error.starts_with("cgroup [\"kubepods\" \"burstable\"] has some missing controllers: "), "{error}");
    let asked = asked.lock().expect("unpoisoned").clone();
    assert!(asked.len() == 1 && asked[0].starts_with("start kubepods-burstable.slice "), "{asked:?}");
}

/// systemd would reset values that only the kernel has.
#[tokio::test]
async fn a_slice_whose_properties_are_refused_is_limited_by_the_next_call() {
    let fixture = V2Fixture::make();
    let (cgroups, asked) = with_systemd(fixture.layout(), &["org.freedesktop.systemd1.LoadFailed"]).await;
    let error = cgroups.ensure_pod(QosClass::BestEffort, "u-1", &values()).await.expect_err("refused").to_string();
    assert!(error.starts_with("systemd: cannot set properties of kubepods-besteffort-podu_1.slice: "), "{error}");
    let path = cgroups.parent_for_runtime(QosClass::BestEffort, "u-1").expect("a path");
    fixture.settle(&path);
    cgroups.ensure_pod(QosClass::BestEffort, "u-1", &values()).await.expect("limited");
    let read = |file: &str| fixture.read(&format!("{}/{file}", path.trim_start_matches('/'))).expect("a file");
    assert_eq!(["memory.max", "pids.max", "cpu.max"].map(read), ["67108864", "100", "51000 100000"]);
    let asked = asked.lock().expect("unpoisoned").clone();
    assert!(asked.len() == 3 && asked[1].starts_with("set ") && asked[1] == asked[2], "{asked:?}");
}

#[tokio::test]
async fn an_old_systemd_gets_only_supported_properties() {
    let fixture = V2Fixture::make();
    let (cgroups, asked) = with_systemd(fixture.layout(), &["org.freedesktop.DBus.Error.PropertyReadOnly"]).await;
    cgroups.ensure_pod(QosClass::BestEffort, "u-1", &values()).await.expect("limited");
    let asked = asked.lock().expect("unpoisoned").clone();
    let sets: Vec<&String> = asked.iter().filter(|call| call.starts_with("set ")).collect();
    assert!(sets.len() == 2 && sets[0].contains("CPUQuotaPeriodUSec="), "{asked:?}");
    assert!(!sets[1].contains("CPUQuotaPeriodUSec=") && sets[1].contains("CPUQuotaPerSecUSec="), "{asked:?}");
}

#[tokio::test]
async fn an_answer_behind_many_signals_is_read() {
    let (ours, theirs) = connections().await;
    let mut calls = MessageStream::from(&theirs);
    let server = async {
        let call = calls.next().await.expect("a call").expect("a message");
        let job = zbus::ObjectPath::try_from("/org/freedesktop/systemd1/job/7").expect("a path");
        for _ in 0..300 {
            emit_removed(&theirs, (7, &job, "other.slice", "done")).await;
        }
        finish_job(&theirs, &call.header(), 1, "own.slice").await;
    };
    let systemd = Systemd::over(ours);
    let (started, ()) = tokio::join!(systemd.start("own.slice", None, true), server);
    started.expect("its own job is found");
}

/// Any user of the system bus can send one, also to the agent alone.
#[tokio::test]
async fn a_signal_of_another_sender_ends_no_job() {
    let (ours, theirs) = connections().await;
    let mut calls = MessageStream::from(&theirs);
    let server = async {
        let call = calls.next().await.expect("a call").expect("a message");
        let job = zbus::ObjectPath::try_from("/org/freedesktop/systemd1/job/1").expect("a path");
        let forged = || {
            let (object, manager) = ("/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager");
            zbus::Message::signal(object, manager, "JobRemoved").sender(":1.66")
        };
        let failed = forged().build(&(1u32, &job, "own.slice", "failed")).expect("a signal");
        theirs.send(&failed).await.expect("sent");
        theirs.reply(&call.header(), &job).await.expect("an answer");
        theirs.send(&forged().build(&"malformed").expect("a signal")).await.expect("sent");
        theirs.send(&failed).await.expect("sent");
        emit_removed(&theirs, (1, &job, "own.slice", "done")).await;
    };
    let systemd = Systemd::over(ours);
    let (started, ()) = tokio::join!(systemd.start("own.slice", None, true), server);
    started.expect("systemd itself says that the job is done");
}

#[tokio::test]
async fn a_node_without_a_bus_has_the_socket_of_systemd() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("private");
    let no_bus = || Err(zbus::Error::Unsupported);
    assert_eq!(or_socket(no_bus(), &path).await.expect_err("neither"), zbus::Error::Unsupported);
    let listener = tokio::net::UnixListener::bind(&path).expect("a socket");
    let asked = Arc::new(Mutex::new(Vec::new()));
    let calls = Arc::clone(&asked);
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.expect("a connection");
        fake_systemd(stream.into_std().expect("a stream"), calls, &[]).await;
    });
    let connection = or_socket(no_bus(), &path).await.expect("a connection");
    Systemd::over(connection).stop("own.slice").await.expect("stopped");
    assert_eq!(*asked.lock().expect("unpoisoned"), ["stop own.slice"]);
}

/// As a restart of the bus ends it.
#[tokio::test]
async fn a_connection_that_has_ended_is_replaced_before_the_next_call() {
    static NEXT: Mutex<Option<Connection>> = Mutex::new(None);
    let open: Open = || Box::pin(async { Ok(NEXT.lock().expect("unpoisoned").take().expect("opened once")) });
    let (ended, theirs) = connections().await;
    theirs.close().await.expect("closed");
    ended.closed().await;
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
    let asked = Arc::new(Mutex::new(Vec::new()));
    tokio::spawn(fake_systemd(theirs, Arc::clone(&asked), &[]));
    let next = zbus::connection::Builder::unix_stream(ours).p2p().build().await.expect("a connection");
    *NEXT.lock().expect("unpoisoned") = Some(next);
    let systemd = Systemd::over(ended).opened_by(open);
    systemd.stop("own.slice").await.expect("stopped");
    assert_eq!(*asked.lock().expect("unpoisoned"), ["stop own.slice"]);
}

/// Its new instance has another name, and ends the job without a signal that counts.
#[tokio::test]
async fn a_job_of_a_systemd_that_was_executed_again_is_requested_again() {
    static NEXT: Mutex<Option<Connection>> = Mutex::new(None);
    let open: Open = || Box::pin(async { Ok(NEXT.lock().expect("unpoisoned").take().expect("opened once")) });
    let (before, old) = connections().await;
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
    let asked = Arc::new(Mutex::new(Vec::new()));
    tokio::spawn(fake_systemd(theirs, Arc::clone(&asked), &[]));
    let next = zbus::connection::Builder::unix_stream(ours).p2p().build().await.expect("a connection");
    *NEXT.lock().expect("unpoisoned") = Some(next);
    let mut calls = MessageStream::from(&old);
    let server = async {
        let call = calls.next().await.expect("a call").expect("a message");
        let job = zbus::ObjectPath::try_from("/org/freedesktop/systemd1/job/1").expect("a path");
        old.reply(&call.header(), &job).await.expect("an answer");
        for (from, to) in [(":1.1", ""), ("", ":1.2")] {
            let (object, bus) = ("/org/freedesktop/DBus", "org.freedesktop.DBus");
            let signal = zbus::Message::signal(object, bus, "NameOwnerChanged").sender(bus);
            let signal = signal.build(&("org.freedesktop.systemd1", from, to)).expect("a signal");
            old.send(&signal).await.expect("sent");
        }
    };
    let systemd = Systemd::over(before).opened_by(open);
    let (stopped, ()) = tokio::join!(systemd.stop("own.slice"), server);
    stopped.expect("stopped");
    assert_eq!(*asked.lock().expect("unpoisoned"), ["stop own.slice"]);
}

#[tokio::test]
async fn properties_that_are_not_set_in_time_are_an_error() {
    let (ours, _theirs) = connections().await;
    tokio::time::pause();
    let systemd = Systemd::over(ours);
    let set = tokio::time::timeout(Duration::from_secs(60), systemd.set("own.slice", &values(), true)).await;
    let error = set.expect("an end").expect_err("no answer").to_string();
    assert_eq!(error, "systemd: cannot set properties of own.slice: no answer within 30 s");
}
