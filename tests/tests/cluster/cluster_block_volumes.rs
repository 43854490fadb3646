//! Raw block volumes: a local persistent volume whose device is a loop device.

use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::core::v1::Pod;
use keblet_tests::cluster::Tenant;
use kube::Api;
use kube::api::DeleteParams;
use kube::api::PostParams;
use serde_json::json;

/// A loop device on a file, detached when this is dropped.
struct LoopDevice(PathBuf);

impl LoopDevice {
    fn on(file: &Path) -> Self {
        std::fs::write(file, vec![b'k'; 1 << 20]).unwrap();
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

#[tokio::test]
#[ignore = "real cluster"]
async fn containers_get_the_device_of_a_block_volume() {
    if !Path::new("/dev/loop-control").exists() {
        return keblet_skip::skip("needs loop devices");
    }
    let tenant = Tenant::new_namespace("block").await.unwrap();
    let file = tenant.node.folder().unwrap().join(format!("{}.disk", tenant.namespace));
    let device = LoopDevice::on(&file);
    let volumes: Api<PersistentVolume> = Api::all(tenant.cluster.client());
    let volume = json!({ "metadata": { "name": tenant.namespace }, "spec": {
        "capacity": { "storage": "1Mi" }, "accessModes": ["ReadWriteOnce"], "volumeMode": "Block", "storageClassName": "",
        "claimRef": { "namespace": tenant.namespace, "name": "disk" }, "local": { "path": device.0 },
        "nodeAffinity": { "required": { "nodeSelectorTerms": [{ "matchExpressions":
            [{ "key": "kubernetes.io/hostname", "operator": "In", "values": [tenant.node.name()] }] }] } },
    } });
    volumes.create(&PostParams::default(), &serde_json::from_value(volume).unwrap()).await.unwrap();
    let claim = json!({ "metadata": { "name": "disk" }, "spec": { "accessModes": ["ReadWriteOnce"], "volumeMode": "Block",
        "storageClassName": "", "volumeName": tenant.namespace, "resources": { "requests": { "storage": "1Mi" } } } });
    tenant.create::<PersistentVolumeClaim>(claim).await.unwrap();

    let using = |script: &str, read_only: bool| {
        let mut pod = tenant.shell(script);
        pod["restartPolicy"] = json!("Never");
        pod["volumes"] =
            json!([{ "name": "v", "persistentVolumeClaim": { "claimName": "disk", "readOnly": read_only } }]);
        pod["containers"][0]["volumeDevices"] = json!([{ "name": "v", "devicePath": "/dev/disk" }]);
        pod
    };
    let ended = async |name: &str| {
        let pod = tenant.until_phase(name, "Succeeded").await.unwrap();
        let state = pod.status.unwrap().container_statuses.unwrap().remove(0).state.unwrap();
        state.terminated.unwrap().message.unwrap()
    };
    let write = "{ test -b /dev/disk && head -c 3 /dev/disk; printf new | dd of=/dev/disk conv=notrunc 2>/dev/null && sync; } \
                 > /dev/termination-log";
    tenant.pod("writing", using(write, false)).await.unwrap();
    assert_eq!(ended("writing").await, "kkk");
    let read = "{ head -c 4 /dev/disk; printf no 2>/dev/null > /dev/disk || echo refused; } > /dev/termination-log";
    tenant.pod("reading", using(read, true)).await.unwrap();
    assert_eq!(ended("reading").await, "newkrefused\n");

    let uid = tenant.api::<Pod>().get("reading").await.unwrap().metadata.uid.unwrap();
    let (node, name) = (tenant.node.clone(), tenant.namespace.clone());
    let (cluster, _) = tenant.delete_namespace().await.unwrap();
    let maps = node.node.root.join("plugins/kubernetes.io~local-volume/volumeDevices").join(&name);
    assert!(
        !maps.exists()
            && !node.node.root.join("pods").join(uid).join("volumeDevices/kubernetes.io~local-volume").exists()
    );
    let used = Command::new("losetup").arg("--list").output().unwrap();
    assert!(!String::from_utf8_lossy(&used.stdout).contains(&*maps.to_string_lossy()), "a loop device is left");
    Api::<PersistentVolume>::all(cluster.client()).delete(&name, &DeleteParams::default()).await.unwrap();
}
