//! UIDs of static pods that another kubelet has started.
//!
//! A kubelet derives the UID of a static pod from its own representation of the manifest, which cannot be computed here.
//! Without more, taking over a node would replace every static pod. A pod of the runtime is therefore adopted, with its
//! UID, for a manifest that has not changed since the pod's sandbox was created. What is adopted is recorded, so that
//! the UID stays the same over restarts of the agent, until another kubelet runs the pod under another UID; a changed manifest
//! has a new UID as always. This agent's own sandboxes name their UID, so that times do not count for them: after a clock
//! correction an edited manifest may seem older.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use k8s_openapi::api::core::v1::Pod;

use crate::filesystem;
use crate::model::Clock;
use crate::model::container_hash;

const NAME: &str = "adopted_static_pods.json";
const PARTIAL: &str = "adopted_static_pods.partial";
/// Longest record that is read, bytes; the agent writes some hundred for each static pod.
const MAX_FILE: usize = 4 << 20;

/// A sandbox of a static pod that the runtime reports, whichever agent created it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StaticSandbox {
    /// UID of the pod.
    pub uid: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod, that of the node included.
    pub name: String,
    /// Whether the sandbox is ready.
    pub ready: bool,
    /// Creation of the sandbox, in nanoseconds since the Unix epoch.
    pub created_at: i64,
    /// The UID by which this version of the agent has marked it; `None` for one that another version or kubelet created.
    pub marked: Option<String>,
    /// Name and hash (annotation `io.kubernetes.container.hash`) of its containers, whatever their state.
    pub containers: Vec<(String, u64)>,
}

/// The static pods that can be adopted, and those that were. Clones share what was adopted.
#[derive(Clone, Debug, Default)]
pub struct Adoptions {
    sandboxes: Arc<Vec<StaticSandbox>>,
    /// When they were listed, in nanoseconds since the Unix epoch.
    listed_at: i64,
    adopted: Arc<Mutex<Adopted>>,
    record: Option<PathBuf>,
}

/// What was adopted.
#[derive(Debug, Default)]
struct Adopted {
    /// The adopted UID by the one of the manifest's content.
    uids: BTreeMap<String, String>,
    /// Why they are not recorded: the last write failed.
    problem: Option<String>,
}

impl Adoptions {
    /// Candidates are the sandboxes of pods from files; the record of earlier adoptions is read from the agent's root
    /// directory. Blocks.
    pub fn new(sandboxes: Vec<StaticSandbox>, root: &Path) -> Self {
        let record = root.join(NAME);
        let known: BTreeSet<&str> = sandboxes.iter().map(|sandbox| sandbox.uid.as_str()).collect();
        let mut uids = read(&record);
        // The UID of a pod of which nothing is left has no advantage over another one.
        uids.retain(|_, uid| known.contains(uid.as_str()));
        let adopted = Arc::new(Mutex::new(Adopted { uids, problem: None }));
        let listed_at = Clock::System.wall_nanos();
        Self { sandboxes: Arc::new(sandboxes), listed_at, adopted, record: Some(record) }
    }

    /// Whether static pods run already.
    pub(super) fn any_runs(&self) -> bool {
        self.sandboxes.iter().any(|sandbox| sandbox.ready)
    }

    /// The static pods that run already, as namespace/name.
    pub(super) fn running(&self) -> BTreeSet<String> {
        let ready = self.sandboxes.iter().filter(|sandbox| sandbox.ready);
        ready.map(|sandbox| format!("{}/{}", sandbox.namespace, sandbox.name)).collect()
    }

    /// The UID under which the pod runs already, if it is another one than `content_uid`. The pod has its final name
    /// and namespace; `changed_at` is the file's last change in nanoseconds since the Unix epoch, `None` if it was changed since
    /// the agent was started: it is adopted then only as it was adopted before. Blocks for the record.
    pub(super) fn uid_of(&self, pod: &Pod, content_uid: &str, changed_at: Option<i64>) -> Option<String> {
        let mut adopted = self.lock();
        let recorded = adopted.uids.get(content_uid).cloned();
        let may_change = recorded.as_ref().is_none_or(|uid| is_replaced(&self.sandboxes, pod, uid));
        let changed_at = changed_at.filter(|_| may_change);
        let decided = changed_at.and_then(|at| decide(&self.sandboxes, pod, content_uid, at, self.listed_at));
        let Some(uid) = decided else { return recorded };
        if uid == content_uid {
            if adopted.uids.remove(content_uid).is_some() {
                self.store(&mut adopted);
            }
            return None;
        }
        adopted.uids.insert(content_uid.to_owned(), uid.to_owned());
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        tracing::info!(pod = name, uid, "adopting the static pod that another kubelet has started");
        self.store(&mut adopted);
        Some(uid.to_owned())
    }

    /// Writes the record again if the last attempt failed: manifests that stay unchanged are not read again. Blocks.
    pub(super) fn write_again(&self) {
        let mut adopted = self.lock();
        if adopted.problem.is_some() {
            self.store(&mut adopted);
        }
    }

    /// Writes the record. Logs an error when it changes.
    fn store(&self, adopted: &mut Adopted) {
        let Some(path) = &self.record else { return };
        let problem = write(path, &adopted.uids).err().map(|error| error.to_string());
        match &problem {
            Some(error) if adopted.problem != problem => {
                let file = path.display();
                tracing::warn!(%file, error, "cannot record which static pods are adopted; retrying");
            }
            None if adopted.problem.is_some() => {
                tracing::info!(file = %path.display(), "recorded which static pods are adopted");
            }
            _ => {}
        }
        adopted.problem = problem;
    }

    fn lock(&self) -> MutexGuard<'_, Adopted> {
        self.adopted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The newest sandbox with the pod's name.
fn newest<'a>(sandboxes: &'a [StaticSandbox], pod: &Pod) -> Option<&'a StaticSandbox> {
    let (name, namespace) = (pod.metadata.name.as_deref()?, pod.metadata.namespace.as_deref()?);
    let same_name = sandboxes.iter().filter(|sandbox| sandbox.name == name && sandbox.namespace == namespace);
    same_name.max_by_key(|sandbox| sandbox.created_at)
}

/// Another kubelet runs the pod by now, under another UID than the adopted one. Pure.
fn is_replaced(sandboxes: &[StaticSandbox], pod: &Pod, adopted: &str) -> bool {
    newest(sandboxes, pod).is_some_and(|newest| newest.marked.is_none() && newest.ready && newest.uid != adopted)
}

/// The UID of the newest sandbox with the pod's name, if that sandbox is of this manifest: created after the last
/// change of the file, and without a container that the pod does not define by name and image. A sandbox with a creation in
/// the future is not that of the file: the clock was set back in between. A marked one is of the content that its mark
/// names, whatever the times say. Pure.
fn decide<'a>(
    sandboxes: &'a [StaticSandbox],
    pod: &Pod,
    content_uid: &str,
    changed_at: i64,
    listed_at: i64,
) -> Option<&'a str> {
    let newest = newest(sandboxes, pod)?;
    if let Some(marked) = &newest.marked {
        return (marked == content_uid).then_some(newest.uid.as_str());
    }
    let spec = pod.spec.as_ref()?;
    let defined: BTreeMap<&str, u64> = spec
        .init_containers
        .iter()
        .flatten()
        .chain(&spec.containers)
        .map(|one| (one.name.as_str(), container_hash(&one.name, one.image.as_deref().unwrap_or_default())))
        .collect();
    // Containers that are not created yet, or removed already, do not rule it out.
    let equal = newest.containers.iter().all(|(name, hash)| defined.get(name.as_str()) == Some(hash));
    let is_later = (changed_at..=listed_at).contains(&newest.created_at);
    (is_later && equal).then_some(newest.uid.as_str())
}

/// A missing or unreadable record is an empty one. Pods are adopted again by sandboxes that another kubelet has created; one
/// whose sandbox this agent has created since gets a new UID, and is replaced.
fn read(path: &Path) -> BTreeMap<String, String> {
    let read = filesystem::read_bounded(path, MAX_FILE).and_then(|text| Ok(serde_json::from_slice(&text)?));
    read.unwrap_or_else(|error| {
        if error.kind() != io::ErrorKind::NotFound {
            let file = path.display();
            tracing::warn!(%file, %error, "the record of adopted static pods is unreadable; the next one replaces it");
        }
        BTreeMap::new()
    })
}

fn write(path: &Path, adopted: &BTreeMap<String, String>) -> io::Result<()> {
    filesystem::replace(path, PARTIAL, &serde_json::to_vec(adopted)?, 0o644)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use serde_json::json;
    use tokio::sync::mpsc;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::filesystem::testing::InPlace;
    use crate::filesystem::testing::in_time;
    use crate::sources::file::FileSource;
    use crate::sources::test_watcher::manifest;

    const HOUR: Duration = Duration::from_secs(3600);

    fn pod(image: &str) -> Pod {
        serde_json::from_value(json!({
            "metadata": { "name": "web-n", "namespace": "default" },
            "spec": {
                "initContainers": [{ "name": "first", "image": "init" }],
                "containers": [{ "name": "main", "image": image }],
            },
        }))
        .unwrap()
    }

    fn sandbox(uid: &str, created_at: i64, containers: &[(&str, &str)]) -> StaticSandbox {
        StaticSandbox {
            uid: uid.to_owned(),
            namespace: "default".to_owned(),
            name: "web-n".to_owned(),
            ready: true,
            created_at,
            marked: None,
            containers: containers
                .iter()
                .map(|(name, image)| ((*name).to_owned(), container_hash(name, image)))
                .collect(),
        }
    }

    #[test]
    fn only_the_newest_sandbox_of_an_unchanged_manifest_is_adopted() {
        let old = sandbox("old", 10, &[("main", "1")]);
        let new = sandbox("new", 20, &[("first", "init"), ("main", "1")]);
        let both = [new.clone(), old];
        let decide = |sandboxes: &[StaticSandbox], pod: &Pod, changed_at: i64| {
            super::decide(sandboxes, pod, "ours", changed_at, 30).map(ToOwned::to_owned)
        };
        let is = |uid: &str| Some(uid.to_owned());
        assert_eq!(decide(&both, &pod("1"), 20), is("new"));
        let future = sandbox("future", 31, &[("main", "1")]);
        assert_eq!(decide(&[new.clone(), future], &pod("1"), 20), None, "the clock was set back");
        assert_eq!(decide(&both, &pod("1"), 21), None, "the file was changed after the sandbox was created");
        assert_eq!(decide(&both, &pod("2"), 5), None, "another image");
        assert_eq!(decide(&[sandbox("u", 20, &[("gone", "1")])], &pod("1"), 5), None, "a container it does not define");
        assert_eq!(decide(&[sandbox("u", 20, &[])], &pod("1"), 5), is("u"), "nothing is created yet");
        let marked = |uid: &str| StaticSandbox { uid: uid.to_owned(), marked: Some(uid.to_owned()), ..new.clone() };
        assert_eq!(decide(&[marked("edited")], &pod("1"), 5), None, "of another content, though it seems newer");
        assert_eq!(decide(&[marked("ours")], &pod("1"), 25), is("ours"), "of this content, though it seems older");
        let other = |namespace: &str, name: &str| StaticSandbox {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            ..new.clone()
        };
        assert_eq!(decide(&[other("kube-system", "web-n"), other("default", "web-m")], &pod("1"), 5), None);
    }

    #[test]
    fn an_adopted_uid_outlives_the_process_while_the_runtime_has_the_pod() {
        let dir = tempfile::tempdir().unwrap();
        let sandboxes = || vec![sandbox("theirs", 20, &[("main", "1")])];
        let first = Adoptions::new(sandboxes(), dir.path());
        assert_eq!(first.uid_of(&pod("1"), "ours", Some(20)).as_deref(), Some("theirs"));
        // The file is written again with the same content, before and after a restart.
        assert_eq!(first.uid_of(&pod("1"), "ours", Some(30)).as_deref(), Some("theirs"));
        assert_eq!(first.uid_of(&pod("1"), "ours", None).as_deref(), Some("theirs"));
        assert_eq!(first.uid_of(&pod("1"), "changed", None), None, "whatever the clock says");
        let second = Adoptions::new(sandboxes(), dir.path());
        assert_eq!(second.uid_of(&pod("1"), "ours", Some(30)).as_deref(), Some("theirs"));
        assert_eq!(second.uid_of(&pod("1"), "changed", Some(30)), None);
        assert_eq!(Adoptions::new(Vec::new(), dir.path()).uid_of(&pod("1"), "ours", Some(30)), None);
        fs::write(dir.path().join(NAME), "{").unwrap();
        assert_eq!(Adoptions::new(sandboxes(), dir.path()).uid_of(&pod("1"), "ours", Some(30)), None);
    }

    #[test]
    fn what_lies_in_place_of_the_record_is_not_waited_for_and_stays() {
        for found in InPlace::ALL {
            let dir = tempfile::tempdir().unwrap();
            let (root, record) = (dir.path().to_owned(), dir.path().join(NAME));
            found.put(&record).unwrap();
            let adoptions = in_time(move || Adoptions::new(Vec::new(), &root)).expect("it is not waited for");
            assert_eq!(adoptions.uid_of(&pod("1"), "ours", None), None);
            assert!(found.is_at(&record), "{found:?}");
        }
    }

    /// The node was given back to a kubelet, and taken over again before the runtime has removed the dead sandbox.
    #[test]
    fn an_adopted_pod_that_another_kubelet_has_replaced_since_is_adopted_anew() {
        let (first, second) = (sandbox("G1", 20, &[("main", "1")]), sandbox("G2", 30, &[("main", "1")]));
        let dead = StaticSandbox { ready: false, ..first.clone() };
        let marked = StaticSandbox { marked: Some("G1".to_owned()), created_at: 40, ..first.clone() };
        let (own, ended) = (sandbox("ours", 30, &[]), StaticSandbox { ready: false, ..second.clone() });
        let uid_of = |sandboxes: Vec<StaticSandbox>, changed_at: Option<i64>| {
            let dir = tempfile::tempdir().unwrap();
            let known = Adoptions::new(vec![first.clone()], dir.path());
            assert_eq!(known.uid_of(&pod("1"), "ours", Some(10)).as_deref(), Some("G1"));
            let found = Adoptions::new(sandboxes, dir.path()).uid_of(&pod("1"), "ours", changed_at);
            let record = read(&dir.path().join(NAME)).remove("ours");
            assert_eq!(found, record, "it is recorded");
            found
        };
        let is = |uid: &str| Some(uid.to_owned());
        assert_eq!(uid_of(vec![dead.clone(), second.clone()], Some(10)), is("G2"));
        assert_eq!(uid_of(vec![dead.clone(), own], Some(10)), None, "it has the own UID");
        assert_eq!(uid_of(vec![dead.clone(), second.clone(), marked], Some(10)), is("G1"), "this agent's is newer");
        assert_eq!(uid_of(vec![dead.clone(), ended], Some(10)), is("G1"), "it does not run");
        assert_eq!(uid_of(vec![dead.clone(), second.clone()], None), is("G1"), "changed since the agent was started");
        assert_eq!(uid_of(vec![dead, second], Some(35)), is("G1"), "of another content");
    }

    #[tokio::test(start_paused = true)]
    async fn a_record_that_cannot_be_written_is_written_by_a_later_scan() {
        let (manifests, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(manifests.path().join("web.yaml"), manifest("web", "1")).unwrap();
        // A folder in its place: no file can be renamed to it.
        let record = root.path().join(NAME);
        fs::create_dir(&record).unwrap();
        let theirs = sandbox("theirs", Clock::System.wall_nanos(), &[("c", "1")]);
        let source = FileSource {
            path: manifests.path().into(),
            check_frequency: HOUR,
            node_name: "n".to_owned(),
            prevent_api_references: true,
            adoptions: Adoptions::new(vec![theirs.clone()], root.path()),
            after: None,
        };
        let (sender, mut sets) = mpsc::channel(1);
        tokio::spawn(source.run(sender, CancellationToken::new()));
        sets.recv().await.unwrap();
        fs::remove_dir(&record).unwrap();
        let written = async {
            while !record.exists() {
                tokio::time::sleep(HOUR).await;
            }
        };
        tokio::time::timeout(100 * HOUR, written).await.expect("written again");

        // The agent has created the sandbox again meanwhile. Its mark names the adopted UID, which is that of no content.
        let (content, _) = read(&record).pop_first().unwrap();
        let created_again = StaticSandbox { marked: Some("theirs".to_owned()), ..theirs };
        let next = Adoptions::new(vec![created_again], root.path());
        assert_eq!(next.uid_of(&pod("1"), &content, None).as_deref(), Some("theirs"));
    }

    #[test]
    fn the_own_uid_is_not_recorded() {
        let dir = tempfile::tempdir().unwrap();
        let adoptions = Adoptions::new(vec![sandbox("ours", 20, &[("main", "1")])], dir.path());
        assert_eq!(adoptions.uid_of(&pod("1"), "ours", Some(20)), None);
        assert!(!dir.path().join(NAME).exists());
    }
}
