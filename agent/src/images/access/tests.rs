//! The life of records, and what they permit.

use std::convert::Infallible;
use std::fs;
use std::time::Duration;

use super::*;

struct Room {
    dir: tempfile::TempDir,
    metrics: Arc<Metrics>,
    records: AccessRecords,
}

impl Room {
    fn new(policy: VerificationPolicy) -> Self {
        let (dir, metrics) = (tempfile::tempdir().expect("a folder"), Metrics::new());
        let records = AccessRecords::open(dir.path(), policy, metrics.clone()).expect("opened");
        Self { dir, metrics, records }
    }

    async fn may_use(&self, image: &str, presented: &[CredentialSource]) -> bool {
        let asked = async || Ok::<_, Infallible>(presented.to_vec());
        self.records.may_use(image, "id", asked).await.expect("infallible")
    }

    async fn pull(&self, image: &str, source: &CredentialSource) {
        self.records.begin(image).await.expect("written");
        self.records.pulled(image, "id", source).await;
    }

    fn intents(&self) -> usize {
        self.records.files.count::<Intent>().expect("counted")
    }

    fn record(&self) -> Option<PulledRecord> {
        self.records.files.get("id").expect("read")
    }
}

fn secret(uid: &str, namespace: &str, name: &str, hash: &str) -> CredentialSource {
    let [uid, namespace, name, credential_hash] = [uid, namespace, name, hash].map(str::to_owned);
    CredentialSource::Secret(SecretUse { uid, namespace, name, credential_hash })
}

#[tokio::test]
async fn preloaded_images_are_used_and_pulled_ones_verified() {
    let room = Room::new(VerificationPolicy::default());
    assert!(room.may_use("r.io/a:1", &[]).await, "preloaded");
    room.pull("r.io/a:1", &secret("u1", "ns", "s", "A")).await;
    assert_eq!(room.intents(), 0);
    for (presented, expected) in [
        (vec![], false),
        (vec![secret("u2", "ns", "s", "C")], false),
        (vec![secret("u1", "ns", "s", "A")], true),
        (vec![secret("u2", "ns2", "s2", "A")], true),
    ] {
        assert_eq!(room.may_use("r.io/a:1", &presented).await, expected, "{presented:?}");
    }
    let known = room.record().expect("a record").credentials["r.io/a"].kubernetes_secrets.len();
    assert_eq!(known, 2, "the secret with the same content is added");
    assert!(!room.may_use("a:1", &[secret("u1", "ns", "s", "A")]).await, "another name of the image");
    room.pull("r.io/a:1", &CredentialSource::Node).await;
    assert!(room.may_use("r.io/a:2", &[]).await, "everyone may use what was pulled without credentials");
    let text = room.metrics.render().expect("metrics");
    for (result, count) in [("credentialPolicyAllowed", 1), ("mustAuthenticate", 3), ("credentialRecordFound", 3)] {
        let line = format!("kubelet_imagemanager_image_mustpull_checks_total{{result=\"{result}\"}} {count}");
        assert!(text.contains(&line), "{line} in {text}");
    }
    assert!(text.contains("kubelet_imagemanager_ondisk_pulledrecords 1"), "{text}");
}

#[tokio::test]
async fn an_image_whose_pull_did_not_end_is_verified() {
    let room = Room::new(VerificationPolicy::default());
    room.records.begin("a:1").await.expect("written");
    room.records.begin("a:1").await.expect("written");
    room.records.not_pulled("a:1").await;
    assert_eq!(room.intents(), 1, "another pull is in progress");
    assert!(!room.may_use("a:1", &[secret("u", "ns", "s", "A")]).await);
    let again = AccessRecords::open(room.dir.path(), VerificationPolicy::default(), Metrics::new()).expect("opened");
    let asked = async || Ok::<_, Infallible>(Vec::new());
    assert!(!again.may_use("a:1", "id", asked).await.expect("infallible"), "after a restart too");
    room.records.not_pulled("a:1").await;
    assert_eq!(room.intents(), 0);
    assert!(room.may_use("a:1", &[]).await);
}

#[tokio::test]
async fn broken_files_permit_nothing_and_are_replaced() {
    let room = Room::new(VerificationPolicy::NeverVerify);
    room.pull("a:1", &secret("u", "ns", "s", "A")).await;
    let folder = room.dir.path().join("image_manager/pulled");
    let path = fs::read_dir(folder).expect("listed").next().expect("a record").expect("an entry").path();
    fs::write(&path, "{").expect("written");
    assert!(!room.may_use("a:1", &[]).await);
    room.pull("a:1", &secret("u", "ns", "s", "B")).await;
    assert!(room.record().is_some() && room.may_use("a:1", &[]).await);
}

#[tokio::test]
async fn without_a_place_for_intents_nothing_is_pulled() {
    let room = Room::new(VerificationPolicy::default());
    fs::remove_dir_all(room.dir.path().join("image_manager")).expect("removed");
    room.records.begin("a:1").await.expect_err("no folder");
    assert!(room.records.pulling.lock().await.is_empty());
}

#[tokio::test]
async fn a_record_that_cannot_be_written_leaves_the_intent() {
    let room = Room::new(VerificationPolicy::default());
    room.records.begin("a:1").await.expect("written");
    fs::remove_dir_all(room.dir.path().join("image_manager/pulled")).expect("removed");
    room.records.pulled("a:1", "id", &CredentialSource::Node).await;
    assert_eq!(room.intents(), 1);
}

#[tokio::test]
async fn intents_of_an_earlier_run_become_records() {
    let room = Room::new(VerificationPolicy::default());
    for image in ["docker.io/library/app:1", "app:1"] {
        room.records.begin(image).await.expect("written");
    }
    let again = AccessRecords::open(room.dir.path(), VerificationPolicy::default(), Metrics::new()).expect("opened");
    let listed = |id: &str, tag: &str| cri::Image {
        id: id.to_owned(),
        repo_tags: vec![tag.to_owned()],
        ..cri::Image::default()
    };
    again.recover(vec![listed("id", "docker.io/library/app:1"), listed("other", "b:1")]).await.expect("recovered");
    let record = room.record().expect("a record");
    assert!(record.credentials.is_empty());
    assert_eq!(again.files.count::<PulledRecord>().expect("counted"), 1, "other images stay preloaded");
    assert_eq!(again.files.all::<Intent>().expect("listed"), [Intent::new("app:1")]);
    let asked = async || Ok::<_, Infallible>(vec![secret("u", "ns", "s", "A")]);
    assert!(!again.may_use("docker.io/library/app:1", "id", asked).await.expect("infallible"));
}

#[tokio::test]
async fn a_record_that_cannot_be_read_is_replaced_and_the_other_pulls_are_recovered() {
    let room = Room::new(VerificationPolicy::default());
    room.pull("a:1", &secret("u", "ns", "s", "A")).await;
    let folder = room.dir.path().join("image_manager/pulled");
    let path = fs::read_dir(folder).expect("listed").next().expect("a record").expect("an entry").path();
    fs::write(&path, "{").expect("written");
    for image in ["a:1", "b:1"] {
        room.records.begin(image).await.expect("written");
    }
    let listed = |id: &str, tag: &str| cri::Image {
        id: id.to_owned(),
        repo_tags: vec![tag.to_owned()],
        ..cri::Image::default()
    };
    room.records.recover(vec![listed("id", "a:1"), listed("other", "b:1")]).await.expect("recovered");
    for id in ["id", "other"] {
        let record = room.records.files.get::<PulledRecord>(id).expect("readable").expect("a record");
        assert!(record.credentials.is_empty(), "{id}");
    }
    assert_eq!(room.intents(), 0);
}

#[tokio::test]
async fn records_of_images_that_are_gone_are_removed() {
    let room = Room::new(VerificationPolicy::default());
    room.pull("a:1", &CredentialSource::Node).await;
    let (past, future) = (SystemTime::UNIX_EPOCH, SystemTime::now() + Duration::from_secs(10));
    room.records.prune(HashSet::new(), past).await;
    assert!(room.record().is_some(), "newer than the list");
    room.records.prune(["id".to_owned()].into(), future).await;
    assert!(room.record().is_some(), "still there");
    room.records.prune(HashSet::new(), future).await;
    assert_eq!(room.record(), None);
}
