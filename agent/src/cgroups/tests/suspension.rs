//! The suspension of pods, on the machine's v2 hierarchy: its freezer needs no controllers.

use super::*;

/// An own subtree of the machine's v2 hierarchy, which may be mounted beside those of v1.
fn own_subtree() -> Option<OwnSubtree> {
    let mut mounts = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new).into_iter();
    let mount = mounts.find(|mount| mount.join("cgroup.controllers").exists() && nix::unistd::geteuid().is_root());
    let Some(mount) = mount else {
        keblet_skip::skip("needs root and cgroup v2");
        return None;
    };
    let root = CgroupName::parse(&format!("keblet-test-suspended-{}", std::process::id())).expect("a name");
    Some(OwnSubtree { layout: Layout::V2 { mount: mount.to_owned() }, root })
}

#[tokio::test(start_paused = true)]
async fn a_pod_is_suspended_for_a_while_and_can_be_killed_meanwhile() {
    let Some(own) = own_subtree() else { return };
    let cgroups = Cgroups::new(own.layout.clone(), Driver::Cgroupfs, own.root.clone()).expect("cgroupfs");
    let path = cgroups.parent_for_runtime(QosClass::Burstable, "u-1").expect("a path");
    files::create(&own.layout, &path).expect("root may make cgroups");
    let mut child = Command::new("sleep").arg("600").spawn().expect("a process");
    let procs = below(own.layout.mounts()[0], &path).join("cgroup.procs");
    std::fs::write(procs, child.id().to_string()).expect("the process moves");
    let suspend = || cgroups.suspend_pod(QosClass::Burstable, "u-1", Duration::from_secs(1));

    suspend().await.expect("suspended");
    assert_eq!(own.read("memory", &path, "cgroup.freeze"), "1");
    tokio::time::timeout(Duration::from_secs(60), async {
        while own.read("memory", &path, "cgroup.freeze") != "0" {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    })
    .await
    .expect("it is resumed");

    suspend().await.expect("suspended");
    cgroups.kill_pod(QosClass::Burstable, "u-1").await.expect("killed");
    let status = child.wait().expect("its end");
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
    assert!(cgroups.suspend_pod(QosClass::Burstable, "u-2", Duration::from_secs(1)).await.is_err(), "it has no cgroup");
}
