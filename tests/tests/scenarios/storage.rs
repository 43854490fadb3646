//! What tests of volumes on devices and servers share: programs of the machine, pods that use a volume, objects of volumes.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Child;
use std::process::Command;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use k8s_openapi::api::core::v1::Pod;
use keblet::apiserver::recovery::Recovered;
use keblet::model::Clock;
use keblet::objects::Objects;
use keblet::objects::ObjectsConfig;
use keblet::objects::Strategy;
use keblet::volumes::PodVolumes;
use keblet::volumes::Volumes;
use keblet_peers::BUSYBOX_IMAGE;
use keblet_tests::standalone::StandaloneNode;
use keblet_tests::standalone::timeout;
use kube::client::Body;
use serde_json::Value;
use serde_json::json;

const POLL: Duration = Duration::from_millis(100);

/// Runs a program; returns what it prints.
pub(crate) fn run(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot run {program}"))?;
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    ensure!(output.status.success(), "{program} {}: {}: {text}", arguments.join(" "), output.status);
    Ok(text)
}

/// Starts a program that serves until it is killed.
pub(crate) fn daemon(program: &str, arguments: &[&str]) -> Result<Child> {
    let mut command = Command::new(program);
    // The machine has few groups, each of which udevd misses by a line.
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().with_context(|| format!("cannot start {program}"))
}

/// Waits for a condition on the machine.
pub(crate) fn until(what: &str, condition: impl Fn() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + timeout();
    while !condition()? {
        ensure!(Instant::now() < deadline, "timed out waiting for: {what}");
        std::thread::sleep(POLL);
    }
    Ok(())
}

/// A pod whose container runs a script, for [`written`], with a volume of this source at `/data`.
pub(crate) fn pod(node: &StandaloneNode, name: &str, script: &str, plugin: &str, source: Value) -> Value {
    let out = node.stamps.join(format!("out-{name}"));
    let mut pod = node.pod(name, &[]);
    let spec = &mut pod["spec"];
    spec["securityContext"] = json!({ "fsGroup": 77 });
    let main = &mut spec["containers"][0];
    main["image"] = BUSYBOX_IMAGE.into();
    main["command"] = json!(["/bin/sh", "-c", format!("{{ {script}; }} > {} 2>&1; exec sleep 36000", out.display())]);
    if let Some(mounts) = main["volumeMounts"].as_array_mut() {
        mounts.push(json!({ "name": "data", "mountPath": "/data" }));
    }
    if let Some(volumes) = spec["volumes"].as_array_mut() {
        volumes.push(json!({ "name": "data", plugin: source }));
    }
    pod
}

/// What the script of the pod has written, which ends with the line `end`.
pub(crate) fn written(node: &mut StandaloneNode, name: &str) -> Result<String> {
    let out = node.stamps.join(format!("out-{name}"));
    node.until("the output of the script", |_| {
        let text = fs::read_to_string(&out).unwrap_or_default();
        Ok(text.ends_with("end\n").then(|| text.trim_end_matches("\nend\n").to_owned()))
    })
}

/// Mounts whose line in the table has this text.
pub(crate) fn mounts_of(name: &str) -> usize {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    table.lines().filter(|line| line.contains(name)).count()
}

/// What an API server answers to requests for these paths; can be changed while it is used.
pub(crate) type Replies = Arc<Mutex<BTreeMap<&'static str, Value>>>;

/// Objects of an API server that answers with these.
pub(crate) fn objects(replies: &Replies) -> Objects {
    let replies = replies.clone();
    let service = tower::service_fn(move |request: http::Request<Body>| {
        let replies = replies.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let reply = replies.get(request.uri().path()).cloned();
        drop(replies);
        async move {
            let code = if reply.is_some() { 200 } else { 404 };
            let missing = json!({ "kind": "Status", "status": "Failure", "code": 404, "reason": "NotFound" });
            let body = Body::from(reply.unwrap_or(missing).to_string().into_bytes());
            http::Response::builder().status(code).body(body)
        }
    });
    let config = ObjectsConfig {
        strategy: Strategy::default(),
        recovered: Recovered::default(),
        sync_frequency: Duration::from_secs(60),
        clock: Clock::System,
        node: None,
    };
    Objects::new(&kube::Client::new(service, "default"), config)
}

/// What an API server has of the claim `data`, which is bound to a persistent volume `pv` with this specification.
pub(crate) fn claimed(mut spec: Value) -> BTreeMap<&'static str, Value> {
    spec["claimRef"] = json!({ "uid": "c" });
    let claim = json!({ "metadata": { "uid": "c" }, "spec": { "volumeName": "pv" }, "status": { "phase": "Bound" } });
    BTreeMap::from([
        ("/api/v1/namespaces/default/persistentvolumeclaims/data", claim),
        ("/api/v1/persistentvolumes/pv", json!({ "metadata": { "name": "pv" }, "spec": spec })),
    ])
}

/// Volumes below this root directory, of an API server that answers with these.
pub(crate) fn volumes_with(root: &Path, replies: BTreeMap<&'static str, Value>) -> Volumes {
    Volumes::new(root).with_objects(objects(&Arc::new(Mutex::new(replies))), BTreeMap::new())
}

/// A pod that mounts the claim `data`.
pub(crate) fn mounting(uid: &str) -> Result<Pod> {
    claiming(uid, "volumeMounts", json!({ "name": "v", "mountPath": "/v" }))
}

/// A pod whose container has the claim `data`, its volume `v`, by this entry of a list.
fn claiming(uid: &str, list: &str, entry: Value) -> Result<Pod> {
    Ok(serde_json::from_value(json!({
        "metadata": { "name": "p", "namespace": "default", "uid": uid },
        "spec": {
            "volumes": [{ "name": "v", "persistentVolumeClaim": { "claimName": "data" } }],
            "containers": [{ "name": "c", list: [entry] }],
        },
    }))?)
}

/// Maps the claim `data` for a pod, as a device that can be written and holds the file system of an earlier mount, ext4.
pub(crate) async fn map_formatted(volumes: &Volumes, uid: &str) -> Result<()> {
    let using = claiming(uid, "volumeDevices", json!({ "name": "v", "devicePath": "/dev/x" }))?;
    volumes.make_pod_dirs(uid).await?;
    let done = volumes.set_up(&using, None).await;
    ensure!(done.is_ok(), "{done:?}");
    let (device, read_only) = volumes.device(&PodVolumes::of(&using), "v")?;
    let held = run("blkid", &["-p", "-s", "TYPE", "-o", "value", &device.to_string_lossy()])?;
    ensure!(held.trim() == "ext4" && !read_only, "{held}");
    Ok(())
}

/// Tears down the volumes of a pod, and releases what is unused then.
pub(crate) async fn tear_down_and_release(volumes: &Volumes, uid: &str) -> Result<()> {
    volumes.tear_down(uid).await?;
    for place in volumes.unused().await? {
        volumes.release_unused(&place).await?;
    }
    Ok(())
}
