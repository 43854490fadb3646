//! Real folders, real inotify. The next periodic scan is an hour away, so every change here is detected by an event.

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;
use std::time::Instant;
use std::time::SystemTime;

use super::FileSource;
use crate::model::ConfigSource;
use crate::model::container_hash;
use crate::sources::SourceUpdate;
use crate::sources::SourcesConfig;
use crate::sources::SourcesHandle;
use crate::sources::adoption::Adoptions;
use crate::sources::adoption::StaticSandbox;
use crate::sources::static_pod::CONFIG_HASH;
use crate::sources::test_watcher::Watcher;
use crate::sources::test_watcher::config;
use crate::sources::test_watcher::manifest;

fn watch(path: impl Into<PathBuf>) -> Watcher {
    Watcher::start(SourcesConfig { static_pod_path: Some(path.into()), ..config() })
}

fn watch_often(path: impl Into<PathBuf>) -> Watcher {
    let often = Duration::from_millis(150);
    Watcher::start(SourcesConfig { static_pod_path: Some(path.into()), file_check_frequency: often, ..config() })
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

fn write(folder: &Path, name: &str, text: &str) {
    fs::write(folder.join(name), text).expect("written");
}

fn rename(folder: &Path, from: &str, to: &str) {
    fs::rename(folder.join(from), folder.join(to)).expect("renamed");
}

fn remove(folder: &Path, name: &str) {
    fs::remove_file(folder.join(name)).expect("removed");
}

#[tokio::test]
async fn an_empty_folder_is_ready_with_an_empty_add() {
    let dir = folder();
    let mut watcher = watch(dir.path());
    assert!(!watcher.handle.all_ready());
    watcher.update().await;
    assert_eq!(watcher.take_log(), ["add"]);
    assert!(watcher.handle.all_ready());
}

#[tokio::test]
async fn pods_come_change_and_go_with_their_files() {
    let dir = folder();
    write(dir.path(), "a.yaml", &manifest("a", "1"));
    write(dir.path(), ".hidden", &manifest("hidden", "1"));
    fs::create_dir(dir.path().join("sub")).expect("made");
    let mut watcher = watch(dir.path());
    watcher.until(["a-n=1"]).await;
    write(
        dir.path(),
        "b.json",
        "{\"apiVersion\":\"v1\",\"kind\":\"Pod\",\"metadata\":{\"name\":\"b\"},\"spec\":{\"containers\":[{\"name\":\"c\",\"image\":\"1\"}]}}",
    );
    watcher.until(["a-n=1", "b-n=1"]).await;
    write(dir.path(), "a.yaml", &manifest("a", "2"));
    watcher.until(["a-n=2", "b-n=1"]).await;
    remove(dir.path(), "b.json");
    watcher.until(["a-n=2"]).await;
    // New content is a new UID: the old pod goes, a new one comes, in one step each.
    assert_eq!(watcher.take_log(), ["add a-n", "add b-n", "remove a-n", "add a-n", "remove b-n"]);
}

#[tokio::test]
async fn a_new_file_is_delivered_within_milliseconds() {
    let dir = folder();
    let mut watcher = watch(dir.path());
    watcher.update().await;
    let mut best = Duration::MAX;
    for i in 0..10 {
        write(dir.path(), &format!("{i}.yaml"), &manifest(&format!("p{i}"), "1"));
        let written = Instant::now();
        watcher.update().await;
        best = best.min(written.elapsed());
    }
    // The best of ten: the others may have had to wait for a processor.
    assert!(best < Duration::from_millis(15), "{best:?}");
}

#[tokio::test]
async fn replacing_a_file_atomically_is_one_change() {
    let dir = folder();
    write(dir.path(), "a.yaml", &manifest("a", "1"));
    let mut watcher = watch(dir.path());
    watcher.until(["a-n=1"]).await;
    watcher.take_log();
    for version in ["2", "3", "4"] {
        write(dir.path(), ".a.yaml.tmp", &manifest("a", version));
        rename(dir.path(), ".a.yaml.tmp", "a.yaml");
        watcher.until([format!("a-n={version}").as_str()]).await;
        assert_eq!(watcher.take_log(), ["remove a-n", "add a-n"]);
    }
}

#[tokio::test]
async fn replacing_a_file_by_itself_changes_nothing() {
    let dir = folder();
    write(dir.path(), "a.yaml", &manifest("a", "1"));
    let mut watcher = watch(dir.path());
    watcher.until(["a-n=1"]).await;
    write(dir.path(), "a.yaml", &manifest("a", "1"));
    write(dir.path(), ".t", &manifest("a", "1"));
    rename(dir.path(), ".t", "a.yaml");
    write(dir.path(), "b.yaml", &manifest("b", "1"));
    watcher.until(["a-n=1", "b-n=1"]).await;
    assert_eq!(watcher.take_log(), ["add a-n", "add b-n"]);
}

/// As for a kubelet, where the pod starts again.
#[tokio::test]
async fn a_deleted_file_that_is_made_again_is_a_new_definition() {
    let dir = folder();
    write(dir.path(), "a.yaml", &manifest("a", "1"));
    write(dir.path(), "b.yaml", &manifest("b", "1"));
    let mut watcher = watch(dir.path());
    watcher.until(["a-n=1", "b-n=1"]).await;
    watcher.take_log();
    for _ in 0..3 {
        remove(dir.path(), "a.yaml");
        write(dir.path(), "a.yaml", &manifest("a", "1"));
        watcher.until(["b-n=1"]).await;
        watcher.until(["a-n=1", "b-n=1"]).await;
        assert_eq!(watcher.take_log(), ["remove a-n", "add a-n"]);
    }
    let single = dir.path().join("a.yaml");
    let mut watcher = watch(&single);
    watcher.until(["a-n=1"]).await;
    remove(dir.path(), "a.yaml");
    write(dir.path(), "a.yaml", &manifest("a", "1"));
    watcher.until([]).await;
    watcher.until(["a-n=1"]).await;
    assert_eq!(watcher.take_log(), ["add a-n", "remove a-n", "add a-n"]);
}

#[tokio::test]
async fn saving_with_a_backup_is_one_change() {
    let dir = folder();
    write(dir.path(), "a.yaml", &manifest("a", "1"));
    let mut watcher = watch(dir.path());
    watcher.until(["a-n=1"]).await;
    watcher.take_log();
    // As vim does: the old file becomes the backup, a new one is written, the backup goes.
    rename(dir.path(), "a.yaml", "a.yaml~");
    write(dir.path(), "a.yaml", &manifest("a", "2"));
    remove(dir.path(), "a.yaml~");
    watcher.until(["a-n=2"]).await;
    // A removed file must not reappear in the set after the burst of events.
    write(dir.path(), "b.yaml", &manifest("b", "1"));
    watcher.until(["a-n=2", "b-n=1"]).await;
    assert_eq!(watcher.take_log(), ["remove a-n", "add a-n", "add b-n"]);
}

#[tokio::test]
async fn a_file_written_in_chunks_is_read_when_it_is_closed() {
    let dir = folder();
    let mut watcher = watch(dir.path());
    watcher.update().await;
    let whole = manifest("a", "1") + "  - {name: d, image: \"1\"}\n";
    let mut file = fs::File::create(dir.path().join("a.yaml")).expect("created");
    for (i, chunk) in whole.as_bytes().chunks(40).enumerate() {
        file.write_all(chunk).expect("written");
        // A scan between the chunks, forced by a file that is complete.
        write(dir.path(), &format!("z{i}.yaml"), &manifest(&format!("z{i}"), "1"));
        watcher.update().await;
        assert!(!watcher.pods.contains_key("a-n"), "half a manifest was read");
    }
    drop(file);
    while !watcher.pods.contains_key("a-n") {
        watcher.update().await;
    }
    let containers = watcher.pods["a-n"].spec.as_ref().map(|s| s.containers.len());
    assert_eq!(containers, Some(2));
}

#[tokio::test]
async fn damage_keeps_the_pod_and_repair_replaces_it() {
    let dir = folder();
    write(dir.path(), "a.yaml", &manifest("a", "1"));
    let mut watcher = watch(dir.path());
    watcher.until(["a-n=1"]).await;
    write(dir.path(), "a.yaml", "kind: [\n");
    write(dir.path(), "b.yaml", &manifest("b", "1"));
    watcher.until(["a-n=1", "b-n=1"]).await;
    write(dir.path(), "a.yaml", &manifest("a", "2"));
    watcher.until(["a-n=2", "b-n=1"]).await;
}

#[tokio::test]
async fn damage_that_stays_ends_the_pod_at_a_periodic_scan() {
    let dir = folder();
    write(dir.path(), "a.yaml", &manifest("a", "1"));
    let mut watcher = watch_often(dir.path());
    watcher.until(["a-n=1"]).await;
    write(dir.path(), "a.yaml", "kind: [\n");
    watcher.until([]).await;
}

#[tokio::test]
async fn bad_files_do_not_disturb_good_ones() {
    let dir = folder();
    let path = dir.path();
    write(path, "bad-syntax.yaml", "a: [");
    write(path, "bad-name.yaml", &manifest("../../x", "1"));
    write(path, "bad-kind.yaml", "apiVersion: v1\nkind: Service\n");
    write(path, "empty.yaml", "");
    write(path, "half.yaml", &format!("kind: Pod\n---\n{}", manifest("half", "1")));
    write(path, "big.yaml", &format!("# {}", "x".repeat(10 << 20)));
    symlink("loop-b", path.join("loop-a")).expect("linked");
    symlink("loop-a", path.join("loop-b")).expect("linked");
    symlink("nowhere", path.join("dangling")).expect("linked");
    nix::unistd::mkfifo(&path.join("pipe"), nix::sys::stat::Mode::S_IRWXU).expect("made");
    write(path, "good.yaml", &manifest("good", "1"));
    let mut watcher = watch(path);
    watcher.until(["good-n=1"]).await;
    assert_eq!(watcher.take_log(), ["add good-n"]);
    write(path, "bad-syntax.yaml", &manifest("mended", "1"));
    watcher.until(["good-n=1", "mended-n=1"]).await;
}

#[tokio::test]
async fn links_are_followed_and_swapped_behind_their_backs() {
    let dir = folder();
    let path = dir.path();
    for version in ["1", "2"] {
        fs::create_dir(path.join(format!("..v{version}"))).expect("made");
        write(&path.join(format!("..v{version}")), "a.yaml", &manifest("a", version));
    }
    symlink("..v1", path.join("..data")).expect("linked");
    symlink("..data/a.yaml", path.join("a.yaml")).expect("linked");
    let mut watcher = watch(path);
    watcher.until(["a-n=1"]).await;
    // As config map volumes are updated.
    symlink("..v2", path.join("..data_tmp")).expect("linked");
    rename(path, "..data_tmp", "..data");
    watcher.until(["a-n=2"]).await;
    fs::hard_link(path.join("..v1/a.yaml"), path.join(".tmp")).expect("linked");
    write(path, ".c", &manifest("c", "1"));
    fs::hard_link(path.join(".c"), path.join("c.yaml")).expect("linked");
    watcher.until(["a-n=2", "c-n=1"]).await;
}

#[tokio::test]
async fn a_folder_that_does_not_exist_yet_is_seen_when_it_does() {
    let dir = folder();
    let path = dir.path().join("etc/kubernetes/manifests");
    let mut watcher = watch(path.join(""));
    watcher.update().await;
    assert_eq!(watcher.take_log(), ["add"], "the source is alive");
    fs::create_dir_all(&path).expect("made");
    write(&path, "a.yaml", &manifest("a", "1"));
    watcher.until(["a-n=1"]).await;
}

#[tokio::test]
async fn a_folder_may_vanish_and_come_back() {
    let dir = folder();
    let path = dir.path().join("manifests");
    fs::create_dir(&path).expect("made");
    write(&path, "a.yaml", &manifest("a", "1"));
    let mut watcher = watch(&path);
    watcher.until(["a-n=1"]).await;
    let uid = watcher.pods["a-n"].metadata.uid.clone();
    for _ in 0..3 {
        fs::remove_dir_all(&path).expect("removed");
        watcher.until([]).await;
        fs::create_dir(&path).expect("made");
        write(&path, "a.yaml", &manifest("a", "1"));
        watcher.until(["a-n=1"]).await;
        assert_eq!(watcher.pods["a-n"].metadata.uid, uid, "the same pod at the same place");
    }
    rename(dir.path(), "manifests", "away");
    watcher.until([]).await;
    rename(dir.path(), "away", "manifests");
    watcher.until(["a-n=1"]).await;
}

#[tokio::test]
async fn a_folder_swapped_for_another_is_one_change() {
    let dir = folder();
    for (name, image) in [("manifests", "1"), ("next", "2")] {
        fs::create_dir(dir.path().join(name)).expect("made");
        write(&dir.path().join(name), "a.yaml", &manifest("a", image));
        write(&dir.path().join(name), "same.yaml", &manifest("same", "1"));
    }
    let mut watcher = watch(dir.path().join("manifests"));
    watcher.until(["a-n=1", "same-n=1"]).await;
    watcher.take_log();
    rename(dir.path(), "manifests", "old");
    rename(dir.path(), "next", "manifests");
    watcher.until(["a-n=2", "same-n=1"]).await;
    assert_eq!(watcher.take_log(), ["remove a-n", "add a-n"], "the other pod was not touched");
    write(&dir.path().join("manifests"), "b.yaml", &manifest("b", "1"));
    watcher.until(["a-n=2", "b-n=1", "same-n=1"]).await;
}

#[tokio::test]
async fn a_linked_folder_may_be_switched() {
    let dir = folder();
    for version in ["1", "2"] {
        fs::create_dir(dir.path().join(version)).expect("made");
        write(&dir.path().join(version), "a.yaml", &manifest("a", version));
    }
    symlink("1", dir.path().join("current")).expect("linked");
    let mut watcher = watch(dir.path().join("current"));
    watcher.until(["a-n=1"]).await;
    symlink("2", dir.path().join("tmp")).expect("linked");
    rename(dir.path(), "tmp", "current");
    watcher.until(["a-n=2"]).await;
}

#[tokio::test]
async fn a_single_file_is_watched_through_replacement_and_return() {
    let dir = folder();
    write(dir.path(), "pod.yaml", &manifest("a", "1"));
    let mut watcher = watch(dir.path().join("pod.yaml"));
    watcher.until(["a-n=1"]).await;
    write(dir.path(), "neighbour.yaml", &manifest("b", "1"));
    write(dir.path(), "pod.yaml", &manifest("a", "2"));
    watcher.until(["a-n=2"]).await;
    write(dir.path(), "tmp", &manifest("a", "3"));
    rename(dir.path(), "tmp", "pod.yaml");
    watcher.until(["a-n=3"]).await;
    remove(dir.path(), "pod.yaml");
    watcher.until([]).await;
    write(dir.path(), "pod.yaml", &manifest("a", "4"));
    watcher.until(["a-n=4"]).await;
}

#[tokio::test]
async fn a_single_file_broken_from_the_start_is_never_ready() {
    let dir = folder();
    write(dir.path(), "pod.yaml", "kind: [");
    let mut watcher = watch_often(dir.path().join("pod.yaml"));
    assert_eq!(watcher.handle.waiting_for(), [ConfigSource::File]);
    write(dir.path(), "pod.yaml", &manifest("a", "1"));
    watcher.until(["a-n=1"]).await;
    assert_eq!(watcher.take_log(), ["add a-n"], "nothing was delivered before");
    assert!(watcher.handle.all_ready());
}

#[tokio::test]
async fn a_hundred_files_at_once_all_arrive() {
    let dir = folder();
    let mut watcher = watch(dir.path());
    watcher.update().await;
    for i in 0..100 {
        write(dir.path(), &format!("{i}.yaml"), &manifest(&format!("p{i}"), "1"));
    }
    while watcher.pods.len() < 100 {
        watcher.update().await;
    }
    assert!(watcher.take_log().iter().all(|entry| entry.starts_with("add")));
}

#[tokio::test]
async fn the_stream_ends_with_its_token() {
    let dir = folder();
    let mut watcher = watch(dir.path());
    watcher.update().await;
    let token = watcher.cancel.clone();
    token.cancel();
    let end = tokio::time::timeout(Duration::from_secs(20), watcher.closed()).await;
    assert!(end.is_ok(), "the stream is still open");
}

/// The runtime's sandbox of a pod that another kubelet made of a manifest.
fn sandbox_of_another_kubelet(name: &str, image: &str) -> StaticSandbox {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after the epoch");
    StaticSandbox {
        uid: "theirs".to_owned(),
        namespace: "default".to_owned(),
        name: format!("{name}-n"),
        ready: true,
        created_at: i64::try_from(now.as_nanos()).expect("before 2262"),
        marked: None,
        containers: vec![("c".to_owned(), container_hash("c", image))],
    }
}

#[tokio::test]
async fn a_running_static_pod_keeps_the_uid_of_another_kubelet_until_its_file_changes() {
    let (dir, root) = (folder(), folder());
    write(dir.path(), "a.yaml", &manifest("a", "1"));
    write(dir.path(), "b.yaml", &manifest("b", "1"));
    // File times advance in ticks, and b's file is to be newer than its sandbox.
    let stale = StaticSandbox { created_at: 1, ..sandbox_of_another_kubelet("b", "1") };
    let started = || vec![sandbox_of_another_kubelet("a", "1"), stale.clone()];
    let restarted = |sandboxes: Vec<StaticSandbox>| {
        let adoptions = Adoptions::new(sandboxes, root.path());
        Watcher::start(SourcesConfig { static_pod_path: Some(dir.path().into()), adoptions, ..config() })
    };
    let uid = |watcher: &Watcher, pod: &str| watcher.pods[pod].metadata.uid.clone().expect("a UID");
    let mut watcher = restarted(started());
    watcher.until(["a-n=1", "b-n=1"]).await;
    assert_eq!(uid(&watcher, "a-n"), "theirs");
    assert_ne!(uid(&watcher, "b-n"), "theirs", "changed since its sandbox was created");
    let hash = watcher.pods["a-n"].metadata.annotations.as_ref().and_then(|all| all.get(CONFIG_HASH)).cloned();
    assert_eq!(hash.as_deref(), Some("theirs"), "the mirror pod's annotation stays the same");

    // Written again with the same content, then changed; the agent was restarted in between.
    write(dir.path(), "a.yaml", &manifest("a", "1"));
    drop(watcher);
    let mut watcher = restarted(started());
    watcher.until(["a-n=1", "b-n=1"]).await;
    assert_eq!(uid(&watcher, "a-n"), "theirs");
    watcher.take_log();
    write(dir.path(), "a.yaml", &manifest("a", "2"));
    watcher.until(["a-n=2", "b-n=1"]).await;
    assert_eq!(watcher.take_log(), ["remove a-n", "add a-n"]);
    assert_ne!(uid(&watcher, "a-n"), "theirs");
}

#[tokio::test]
async fn a_running_static_pod_survives_a_second_document() {
    let (dir, root) = (folder(), folder());
    let and_service = |image: &str| manifest("a", image) + "---\napiVersion: v1\nkind: Service\n";
    write(dir.path(), "a.yaml", &and_service("1"));
    let adoptions = Adoptions::new(vec![sandbox_of_another_kubelet("a", "1")], root.path());
    let mut watcher = Watcher::start(SourcesConfig { static_pod_path: Some(dir.path().into()), adoptions, ..config() });
    watcher.until(["a-n=1"]).await;
    assert_eq!(watcher.pods["a-n"].metadata.uid.as_deref(), Some("theirs"), "a kubelet runs it, too");
    write(dir.path(), "a.yaml", &manifest("a", "2"));
    watcher.until(["a-n=2"]).await;
    watcher.take_log();
    for second in ["---\nkind: [", &format!("---\n{}", manifest("second", "1"))] {
        write(dir.path(), "a.yaml", &(manifest("a", "2") + second));
        write(dir.path(), "b.yaml", &manifest("b", "1"));
        watcher.until(["a-n=2", "b-n=1"]).await;
        remove(dir.path(), "b.yaml");
        watcher.until(["a-n=2"]).await;
    }
    assert_eq!(watcher.take_log(), ["add b-n", "remove b-n", "add b-n", "remove b-n"]);
    write(dir.path(), "a.yaml", &and_service("3"));
    watcher.until(["a-n=3"]).await;
}

/// The target of a link keeps its times, as a file does that is written when the clock was set back.
#[tokio::test]
async fn a_file_that_changes_while_the_agent_runs_is_another_pod_whatever_its_times_say() {
    let (dir, root, elsewhere) = (folder(), folder(), folder());
    write(elsewhere.path(), "a.yaml", &manifest("a", "1"));
    let adoptions = Adoptions::new(vec![sandbox_of_another_kubelet("a", "1")], root.path());
    let mut watcher = Watcher::start(SourcesConfig { static_pod_path: Some(dir.path().into()), adoptions, ..config() });
    watcher.update().await;
    assert!(watcher.pods.is_empty());
    symlink(elsewhere.path().join("a.yaml"), dir.path().join("a.yaml")).expect("a link");
    watcher.until(["a-n=1"]).await;
    assert_ne!(watcher.pods["a-n"].metadata.uid.as_deref(), Some("theirs"));
}

#[tokio::test(start_paused = true)]
async fn static_pods_that_run_wait_for_their_mirror_pods_but_not_for_long() {
    let dir = folder();
    write(dir.path(), "a.yaml", &manifest("a", "1"));
    let first_set_after = async |api_delivers: bool| {
        let handle = SourcesHandle::new(vec![ConfigSource::File, ConfigSource::Api]);
        let source = FileSource {
            path: dir.path().into(),
            check_frequency: Duration::from_secs(3600),
            node_name: "n".to_owned(),
            prevent_api_references: true,
            adoptions: Adoptions::default(),
            after: Some(handle.clone()),
        };
        let (sender, mut sets) = tokio::sync::mpsc::channel(1);
        let began = tokio::time::Instant::now();
        tokio::spawn(source.run(sender, tokio_util::sync::CancellationToken::new()));
        if api_delivers {
            tokio::time::sleep(Duration::from_millis(500)).await;
            assert!(sets.try_recv().is_err(), "it does not wait");
            handle.mark_delivered(ConfigSource::Api);
        }
        let set = sets.recv().await;
        assert!(matches!(&set, Some((ConfigSource::File, SourceUpdate::Set(pods))) if pods.len() == 1), "{set:?}");
        began.elapsed()
    };
    let (served, unserved) = (first_set_after(true).await, first_set_after(false).await);
    assert!(served >= Duration::from_millis(500) && served < Duration::from_secs(1), "{served:?}");
    assert!(unserved >= Duration::from_secs(2) && unserved < Duration::from_secs(3), "{unserved:?}");
}
