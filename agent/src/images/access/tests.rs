//! The life of records, and what they permit.

use std::convert::Infallible;
use std::fs;
use std::sync::mpsc;
use std::time::Duration;

use futures_util::FutureExt as _;

use super::*;

struct Fixture {
    dir: tempfile::TempDir,
    metrics: Arc<Metrics>,
    records: AccessRecords,
}

impl Fixture {
    fn new(policy: VerificationPolicy) -> Self {
        let (dir, metrics) = (tempfile::tempdir().expect("a folder"), Metrics::new());
        let records = AccessRecords::open(dir.path(), policy, metrics.clone()).expect("opened");
        Self { dir, metrics, records }
    }

    async fn may_use(&self, image: &str, presented: &[CredentialSource]) -> bool {
        let asked = async || Ok::<_, Infallible>(presented.to_vec());
        self.records.may_use(image, "id", None, asked).await.expect("infallible")
    }

    async fn pull(&self, image: &str, source: &CredentialSource) {
        self.records.begin(image).await.expect("written");
        self.records.pulled(image, "id", source).await;
    }

    /// The agent is killed and started again.
    fn restart(&mut self) {
        let (policy, metrics) = (VerificationPolicy::default(), self.metrics.clone());
        self.records = AccessRecords::open(self.dir.path(), policy, metrics).expect("opened");
    }

    fn intents(&self) -> usize {
        self.records.files.count::<Intent>()
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
    let fixture = Fixture::new(VerificationPolicy::default());
    assert!(fixture.may_use("r.io/a:1", &[]).await, "preloaded");
    fixture.pull("r.io/a:1", &secret("u1", "ns", "s", "A")).await;
    assert_eq!(fixture.intents(), 0);
    for (presented, expected) in [
        (vec![], false),
        (vec![secret("u2", "ns", "s", "C")], false),
        (vec![secret("u1", "ns", "s", "A")], true),
        (vec![secret("u2", "ns2", "s2", "A")], true),
    ] {
        assert_eq!(fixture.may_use("r.io/a:1", &presented).await, expected, "{presented:?}");
    }
    let known = fixture.record().expect("a record").credentials["r.io/a"].kubernetes_secrets.len();
    assert_eq!(known, 2, "the secret with the same content is added");
    assert!(!fixture.may_use("a:1", &[secret("u1", "ns", "s", "A")]).await, "another name of the image");
    fixture.pull("r.io/a:1", &CredentialSource::Node).await;
    assert!(fixture.may_use("r.io/a:2", &[]).await, "every pod may use what was pulled without credentials");
    let text = fixture.metrics.render().expect("metrics");
    for (result, count) in [("credentialPolicyAllowed", 1), ("mustAuthenticate", 3), ("credentialRecordFound", 3)] {
        let line = format!("kubelet_imagemanager_image_mustpull_checks_total{{result=\"{result}\"}} {count}");
        assert!(text.contains(&line), "{line} in {text}");
    }
    assert!(text.contains("kubelet_imagemanager_ondisk_pulledrecords 1"), "{text}");
}

#[tokio::test]
async fn an_image_whose_pull_did_not_end_is_verified() {
    let fixture = Fixture::new(VerificationPolicy::default());
    fixture.records.begin("a:1").await.expect("written");
    fixture.records.begin("a:1").await.expect("written");
    fixture.records.not_pulled("a:1").await;
    assert_eq!(fixture.intents(), 1, "another pull is in progress");
    assert!(!fixture.may_use("a:1", &[secret("u", "ns", "s", "A")]).await);
    let again = AccessRecords::open(fixture.dir.path(), VerificationPolicy::default(), Metrics::new()).expect("opened");
    let asked = async || Ok::<_, Infallible>(Vec::new());
    assert!(!again.may_use("a:1", "id", None, asked).await.expect("infallible"), "after a restart too");
    fixture.records.not_pulled("a:1").await;
    assert_eq!(fixture.intents(), 0);
    assert!(fixture.may_use("a:1", &[]).await);
}

#[tokio::test]
async fn broken_files_permit_nothing_and_are_replaced() {
    let fixture = Fixture::new(VerificationPolicy::NeverVerify);
    fixture.pull("a:1", &secret("u", "ns", "s", "A")).await;
    let folder = fixture.dir.path().join("image_manager/pulled");
    let path = fs::read_dir(folder).expect("listed").next().expect("a record").expect("an entry").path();
    fs::write(&path, "{").expect("written");
    assert!(!fixture.may_use("a:1", &[]).await);
    fixture.pull("a:1", &secret("u", "ns", "s", "B")).await;
    assert!(fixture.record().is_some() && fixture.may_use("a:1", &[]).await);
}

#[tokio::test]
async fn a_broken_intent_does_not_hide_the_record() {
    let fixture = Fixture::new(VerificationPolicy::default());
    fixture.records.begin("a:1").await.expect("written");
    let folder = fixture.dir.path().join("image_manager/pulling");
    let path = fs::read_dir(folder).expect("listed").next().expect("an intent").expect("an entry").path();
    fixture.records.not_pulled("a:1").await;
    let break_intent = || fs::write(&path, "{").expect("written");
    break_intent();
    assert!(!fixture.may_use("a:1", &[]).await, "it may have been pulled");
    fixture.pull("a:1", &CredentialSource::Node).await;
    break_intent();
    assert!(fixture.may_use("a:1", &[]).await);
}

#[tokio::test]
async fn without_a_place_for_intents_nothing_is_pulled() {
    let fixture = Fixture::new(VerificationPolicy::default());
    let folder = fixture.dir.path().join("image_manager");
    fs::remove_dir_all(&folder).expect("removed");
    fs::write(&folder, "").expect("written");
    fixture.records.begin("a:1").await.expect_err("no folder");
    assert!(fixture.records.pulling.lock().await.is_empty());
}

#[test]
fn a_change_whose_caller_is_gone_is_not_overtaken_by_the_next_one() {
    // One thread for file calls, which is busy.
    let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build().expect("a runtime");
    runtime.block_on(async {
        let fixture = Fixture::new(VerificationPolicy::default());
        let (release, released) = mpsc::channel::<()>();
        let busy = tokio::task::spawn_blocking(move || released.recv());
        assert!(fixture.records.begin("a:1").now_or_never().is_none(), "dropped before its file is written");
        assert!(fixture.records.pulling.try_lock().is_err(), "the file is still to be written");
        drop(release);
        busy.await.expect("ended").expect_err("nothing was sent");
        fixture.records.begin("a:1").await.expect("written");
        assert_eq!(fixture.records.pulling.lock().await["a:1"].running, 1);
        fixture.records.not_pulled("a:1").await;
        assert_eq!(fixture.intents(), 0);
    });
}

#[tokio::test]
async fn a_record_that_cannot_be_written_leaves_the_intent() {
    let mut fixture = Fixture::new(VerificationPolicy::default());
    fixture.records.begin("a:1").await.expect("written");
    let folder = fixture.dir.path().join("image_manager/pulled");
    let replace_folder =
        || fs::remove_dir_all(&folder).and_then(|()| fs::write(&folder, "")).expect("replaced by a file");
    replace_folder();
    fixture.records.pulled("a:1", "id", &CredentialSource::Node).await;
    assert_eq!(fixture.intents(), 1);
    fs::remove_file(&folder).expect("removed");
    fixture.restart();
    replace_folder();
    fixture.records.settle("a:1", Some("id")).await;
    fixture.records.begin("a:1").await.expect("written");
    fixture.records.not_pulled("a:1").await;
    assert_eq!(fixture.intents(), 1, "after a restart too");
}

#[tokio::test]
async fn an_intent_of_an_earlier_run_stays_until_it_is_known_what_became_of_it() {
    let (mut fixture, all) = (Fixture::new(VerificationPolicy::default()), ["a:1", "b:1", "c:1"]);
    for image in all {
        fixture.records.begin(image).await.expect("written");
    }
    fixture.restart();
    let mut unsettled = fixture.records.unsettled().await;
    unsettled.sort();
    assert_eq!(unsettled, all);
    // The runtime does not answer, and the registry refuses pods without credentials.
    for image in all {
        fixture.records.begin(image).await.expect("written");
        fixture.records.not_pulled(image).await;
        assert!(!fixture.may_use(image, &[]).await, "{image}");
    }
    assert_eq!(fixture.intents(), 3);
    fixture.pull("a:1", &secret("u", "ns", "s", "A")).await;
    assert_eq!(fixture.intents(), 2, "it has succeeded");
    fixture.records.settle("b:1", None).await;
    assert_eq!(fixture.intents(), 2, "until the next pull ends");
    fixture.records.begin("b:1").await.expect("written");
    fixture.records.not_pulled("b:1").await;
    assert_eq!(fixture.intents(), 1);
    fixture.records.settle("c:1", Some("id")).await;
    assert_eq!((fixture.intents(), fixture.records.unsettled().await), (0, Vec::new()));
    assert!(fixture.may_use("a:1", &[secret("u", "ns", "s", "A")]).await, "the record has not been replaced");
}

#[tokio::test(start_paused = true)]
async fn an_image_that_a_cancelled_pull_may_have_brought_is_verified() {
    let (fixture, before) = (Fixture::new(VerificationPolicy::default()), Instant::now());
    tokio::time::advance(SECOND).await;
    let asked = Instant::now();
    let cancel = async || {
        fixture.records.begin("a:1").await.expect("written");
        fixture.records.cancelled("a:1", asked).await;
    };
    cancel().await;
    // The registry refuses a pod without credentials.
    fixture.records.begin("a:1").await.expect("written");
    fixture.records.not_pulled("a:1").await;
    assert_eq!(fixture.intents(), 1);
    for (seen, expected) in [(None, false), (Some(asked), false), (Some(before), true)] {
        let presented = async || Ok::<_, Infallible>(Vec::new());
        let may_use = fixture.records.may_use("a:1", "id", seen, presented).await.expect("infallible");
        assert_eq!(may_use, expected, "{seen:?}");
    }
    fixture.records.settle_present("a:1", "id", Some(before)).await;
    assert!(fixture.intents() == 0 && fixture.record().is_none() && fixture.may_use("a:1", &[]).await, "preloaded");
    cancel().await;
    fixture.records.settle_present("a:1", "id", None).await;
    assert!(fixture.intents() == 0 && !fixture.may_use("a:1", &[]).await);
    let source = secret("u", "ns", "s", "A");
    fixture.pull("a:1", &source).await;
    assert!(fixture.may_use("a:1", &[source]).await);
}

#[tokio::test]
async fn intents_of_an_earlier_run_become_records() {
    let mut fixture = Fixture::new(VerificationPolicy::default());
    for image in ["app:1", "absent:1"] {
        fixture.records.begin(image).await.expect("written");
    }
    fixture.restart();
    fixture.records.settle("app:1", Some("id")).await;
    fixture.records.settle("absent:1", None).await;
    let record = fixture.record().expect("a record");
    assert!(record.credentials.is_empty());
    assert_eq!(fixture.records.files.count::<PulledRecord>(), 1, "other images stay preloaded");
    assert_eq!(fixture.records.files.all::<Intent>().expect("listed"), [Intent::new("absent:1")]);
    assert!(!fixture.may_use("app:1", &[secret("u", "ns", "s", "A")]).await);
}

#[tokio::test]
async fn a_record_that_cannot_be_read_is_replaced_and_the_other_pulls_are_recovered() {
    let mut fixture = Fixture::new(VerificationPolicy::default());
    fixture.pull("a:1", &secret("u", "ns", "s", "A")).await;
    let folder = fixture.dir.path().join("image_manager/pulled");
    let path = fs::read_dir(folder).expect("listed").next().expect("a record").expect("an entry").path();
    fs::write(&path, "{").expect("written");
    for image in ["a:1", "b:1"] {
        fixture.records.begin(image).await.expect("written");
    }
    fixture.restart();
    for (image, id) in [("a:1", "id"), ("b:1", "other")] {
        fixture.records.settle(image, Some(id)).await;
        let record = fixture.records.files.get::<PulledRecord>(id).expect("readable").expect("a record");
        assert!(record.credentials.is_empty(), "{id}");
    }
    assert_eq!(fixture.intents(), 0);
}

#[tokio::test]
async fn records_of_images_that_are_gone_are_removed() {
    let fixture = Fixture::new(VerificationPolicy::default());
    fixture.pull("a:1", &CredentialSource::Node).await;
    let (past, future) = (SystemTime::UNIX_EPOCH, SystemTime::now() + Duration::from_secs(10));
    fixture.records.prune(HashSet::new(), past).await;
    assert!(fixture.record().is_some(), "newer than the list");
    fixture.records.prune(["id".to_owned()].into(), future).await;
    assert!(fixture.record().is_some(), "still there");
    fixture.records.prune(HashSet::new(), future).await;
    assert_eq!(fixture.record(), None);
}

#[tokio::test(start_paused = true)]
async fn records_of_images_that_are_gone_are_searched_while_others_are_changed() {
    let fixture = Fixture::new(VerificationPolicy::default());
    fixture.pull("a:1", &CredentialSource::Node).await;
    let changing = fixture.records.lock().await;
    let future = SystemTime::now() + Duration::from_secs(10);
    let nothing = fixture.records.prune(["id".to_owned()].into(), future);
    tokio::time::timeout(Duration::from_secs(60), nothing).await.expect("nothing is to be removed");
    let removal = fixture.records.prune(HashSet::new(), future);
    assert!(tokio::time::timeout(Duration::from_secs(60), removal).await.is_err(), "a removal is a change");
    assert!(fixture.record().is_some());
    drop(changing);
    fixture.records.prune(HashSet::new(), future).await;
    assert_eq!(fixture.record(), None);
}

#[tokio::test]
async fn an_image_that_is_pulled_again_after_images_were_listed_keeps_its_record() {
    let (fixture, source) = (Fixture::new(VerificationPolicy::default()), secret("u", "ns", "s", "A"));
    fixture.pull("a:1", &source).await;
    let mut old = fixture.record().expect("a record");
    old.updated(SystemTime::UNIX_EPOCH);
    fixture.records.files.write(&old).expect("written");
    // The image has been removed since.
    let (images, listed_at) = (HashSet::new(), SystemTime::now());
    fixture.pull("a:1", &source).await;
    fixture.records.prune(images, listed_at).await;
    assert!(fixture.record().is_some());
    assert!(!fixture.may_use("a:1", &[]).await, "a pulled image counts as no preloaded one");
}
