//! Plans of pods that refer to objects of the API server: claims and runtime classes.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use keblet::apiserver::recovery::Recovered;
use keblet::model::Clock;
use keblet::objects::Objects;
use keblet::objects::ObjectsConfig;
use keblet::objects::Strategy;
use keblet::workers::act::execute;
use kube::client::Body;
use serde_json::Value;
use serde_json::json;

use super::CREATE;
use super::Node;
use super::UID;
use super::pass;
use super::plan;
use super::pod;

/// Objects of an API server that answers GETs of these, by path.
fn objects(replies: BTreeMap<&'static str, Value>) -> Objects {
    let replies = Arc::new(replies);
    let service = tower::service_fn(move |request: http::Request<Body>| {
        let reply = replies.get(request.uri().path()).cloned();
        async move {
            let missing =
                json!({"kind": "Status", "status": "Failure", "code": 404, "reason": "NotFound", "message": "no"});
            let code = if reply.is_some() { 200 } else { 404 };
            let body = Body::from(reply.unwrap_or(missing).to_string().into_bytes());
            Ok::<_, std::io::Error>(http::Response::builder().status(code).body(body).unwrap())
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

#[tokio::test]
#[ignore = "real runtime"]
async fn pod_runs_with_its_runtime_class_and_the_volume_of_its_claim() {
    let mut node = Node::start().await;
    let disk = node.dir.join("act/disk");
    fs::create_dir_all(&disk).unwrap();
    fs::write(disk.join("file"), "from the disk\n").unwrap();
    let class = |handler: &str| json!({"metadata": {"name": "c"}, "handler": handler});
    let claim =
        json!({"metadata": {"name": "data", "uid": "c-1"}, "spec": {"volumeName": "pv"}, "status": {"phase": "Bound"}});
    let volume = json!({"metadata": {"name": "pv"}, "spec": {"local": {"path": disk}, "claimRef": {"uid": "c-1"}}});
    let replies = [
        ("/apis/node.k8s.io/v1/runtimeclasses/usual", class("runc")),
        ("/apis/node.k8s.io/v1/runtimeclasses/odd", class("no-such")),
        ("/api/v1/namespaces/default/persistentvolumeclaims/data", claim),
        ("/api/v1/persistentvolumes/pv", volume),
    ];
    node.ctx = node.ctx.with_objects(objects(replies.into()));
    let script = "cat /part/file; stat -c '%g %a' /part; echo new >/part/new; sleep 600";
    let mut pod = pod(&disk, script);
    // A static pod does not wait for the services of the cluster.
    let source = [("kubernetes.io/config.source".to_owned(), "file".to_owned())];
    pod.metadata.annotations = Some(source.into());
    let spec = pod.spec.as_mut().unwrap();
    spec.runtime_class_name = Some("odd".to_owned());
    spec.security_context = Some(serde_json::from_value(json!({"fsGroup": 77})).unwrap());
    spec.volumes.as_mut().unwrap()[1] =
        serde_json::from_value(json!({"name": "host", "persistentVolumeClaim": {"claimName": "data"}})).unwrap();
    let mount = json!({"name": "host", "mountPath": "/part"});
    spec.containers[0].volume_mounts.as_mut().unwrap()[1] = serde_json::from_value(mount).unwrap();
    let failed = execute(&node.ctx, &pass(&pod, node.snapshot().await), &plan(CREATE, None)).await;
    let error = failed.errors[0].to_string();
    assert!(error.contains("CreatePodSandboxError") && error.contains("no-such"), "{error}");

    pod.spec.as_mut().unwrap().runtime_class_name = Some("usual".to_owned());
    let outcome = execute(&node.ctx, &pass(&pod, node.snapshot().await), &plan(CREATE, None)).await;
    assert!(outcome.is_ok(), "{outcome:?}");
    let log = node.log_with(0, "77 2775").await;
    assert!(log.contains("from the disk"), "{log}");
    let snapshot = node.snapshot().await;
    let sandbox = node.ctx.runtime.pod_sandbox_status(snapshot.sandboxes[0].id.as_str()).await.unwrap();
    assert_eq!(sandbox.runtime_handler, "runc");

    node.remove(&pod, snapshot).await;
    assert!(!node.dir.join(format!("act/root/pods/{UID}")).exists());
    assert_eq!(fs::read_to_string(disk.join("new")).unwrap(), "new\n", "written by the container, kept on the disk");
    node.stop().await;
}

/// A loop device on a file, detached when this is dropped.
struct LoopDevice(PathBuf);

impl LoopDevice {
    fn on(file: &Path) -> Self {
        fs::write(file, vec![b'k'; 1 << 20]).unwrap();
        let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        Self(String::from_utf8_lossy(&made.stdout).trim().into())
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

/// Loop devices, as losetup lists them.
fn loops() -> String {
    let listed = Command::new("losetup").args(["--list", "--noheadings"]).output().unwrap();
    String::from_utf8_lossy(&listed.stdout).into_owned()
}

#[tokio::test]
#[ignore = "real runtime"]
async fn pod_gets_the_raw_device_of_its_claim() {
    if !Path::new("/dev/loop-control").exists() {
        return keblet_skip::skip("needs loop devices");
    }
    for (read_only, write, expected) in
        [(false, "printf new | dd of=/dev/disk conv=notrunc", "new"), (true, "true", "kkk")]
    {
        let mut node = Node::start().await;
        fs::create_dir_all(node.dir.join("act")).unwrap();
        let device = LoopDevice::on(&node.dir.join("act/disk"));
        let claim = json!({"metadata": {"name": "data", "uid": "c-1"}, "spec": {"volumeName": "pv"}, "status": {"phase": "Bound"}});
        let volume = json!({"metadata": {"name": "pv"},
            "spec": {"local": {"path": device.0}, "volumeMode": "Block", "claimRef": {"uid": "c-1"}}});
        let replies = [
            ("/api/v1/namespaces/default/persistentvolumeclaims/data", claim),
            ("/api/v1/persistentvolumes/pv", volume),
        ];
        node.ctx = node.ctx.with_objects(objects(replies.into()));
        let script = format!(
            "{write}; test -b /dev/disk && head -c 3 /dev/disk; echo; (printf no >/dev/disk) 2>/dev/null && echo writable; \
             echo done; sleep 600"
        );
        let host = node.dir.join("act/host");
        fs::create_dir_all(host.join("inner")).unwrap();
        let mut pod = pod(&host, &script);
        let source = [("kubernetes.io/config.source".to_owned(), "file".to_owned())];
        pod.metadata.annotations = Some(source.into());
        let spec = pod.spec.as_mut().unwrap();
        let claim = json!({"name": "disk", "persistentVolumeClaim": {"claimName": "data", "readOnly": read_only}});
        spec.volumes.as_mut().unwrap().push(serde_json::from_value(claim).unwrap());
        // Device nodes belong to root.
        (spec.security_context, spec.containers[0].security_context) = (None, None);
        let wanted = json!([{"name": "disk", "devicePath": "/dev/disk"}]);
        spec.containers[0].volume_devices = serde_json::from_value(wanted).unwrap();
        let outcome = execute(&node.ctx, &pass(&pod, node.snapshot().await), &plan(CREATE, None)).await;
        assert!(outcome.is_ok(), "{outcome:?}");
        let log = node.log_with(0, "done").await;
        assert!(log.contains(expected) && log.contains("writable") != read_only, "{log}");
        let root = node.dir.join("act/root");
        let maps = root.join("plugins/kubernetes.io~local-volume/volumeDevices/pv");
        assert!(loops().contains(&*maps.join(UID).to_string_lossy()), "{}", loops());

        let snapshot = node.snapshot().await;
        node.remove(&pod, snapshot).await;
        assert!(!root.join("pods").join(UID).exists() && !maps.exists());
        assert!(!loops().contains(&*maps.to_string_lossy()), "{}", loops());
        drop(device);
        node.stop().await;
    }
}
