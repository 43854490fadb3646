//! ClusterTrustBundles (KEP-3257): trust anchors for projected volumes, by one watch of all of them, which begins when the
//! first pod refers to one. Their API is young: its version is discovered, and it may be missing.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::sync::OnceLock;
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::ClusterTrustBundleProjection;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::Api;
use kube::Client;
use kube::core::NotUsed;
use kube::core::Object;
use kube::core::Selector;
use kube::core::SelectorExt as _;
use kube::runtime::watcher::Config;
use serde::Deserialize;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::error::ObjectError;
use super::error::describe;
use super::panics::Panics;
use super::pem_blocks;
use super::registration::Listeners;
use super::served::served;
use crate::apiserver::recovery::Recovered;
use crate::apiserver::watch::Event;
use crate::apiserver::watch::follow;
use crate::model::Backoff;

/// How long a volume waits for the first list.
const FIRST_READ: Duration = Duration::from_secs(1);
/// Versions of the API, the preferred one first.
const VERSIONS: [&str; 3] = ["v1", "v1beta1", "v1alpha1"];
/// First pause before the API is discovered again, after a failure or if it is not served.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_secs(60);
/// The resource, as messages name it.
const WORD: &str = "clustertrustbundle";
/// The resource, as paths name it.
const PLURAL: &str = "clustertrustbundles";

/// `spec` of a bundle, the same in all versions.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct BundleSpec {
    signer_name: Option<String>,
    trust_bundle: String,
}

/// One bundle, as the API has it.
type TrustBundle = Object<BundleSpec, NotUsed>;

/// What is kept of one bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Bundle {
    signer: String,
    labels: BTreeMap<String, String>,
    pem: String,
}

/// What is known of all bundles.
#[derive(Debug)]
enum Known {
    /// They were not listed yet; why not, if that was tried.
    Unlisted(Option<String>),
    /// The API server does not serve them.
    NotServed,
    /// By name.
    Listed(HashMap<String, Bundle>),
}

/// All bundles.
pub(super) struct TrustBundles {
    client: Client,
    recovered: Recovered,
    listeners: Arc<Listeners>,
    panics: Panics,
    watched: OnceLock<Watched>,
}

/// The watch, which ends with this.
struct Watched {
    known: watch::Receiver<Known>,
    _watch: AbortOnDropHandle<()>,
}

impl TrustBundles {
    pub(super) fn new(client: Client, recovered: Recovered, panics: Panics) -> Self {
        Self { client, recovered, listeners: Arc::default(), panics, watched: OnceLock::new() }
    }

    /// Pods notified of changes.
    pub(super) fn listeners(&self) -> &Listeners {
        &self.listeners
    }

    /// Starts the watch unless it runs.
    pub(super) fn ensure_watch(&self) {
        self.watched();
    }

    fn watched(&self) -> &Watched {
        self.watched.get_or_init(|| {
            let (sender, known) = watch::channel(Known::Unlisted(None));
            let (client, recovered) = (self.client.clone(), self.recovered.clone());
            let listeners = self.listeners.clone();
            let watching = BundleRefresher { client, recovered, sender, listeners }.run();
            Watched { known, _watch: self.panics.spawn("watch of trust bundles", watching) }
        })
    }

    /// The trust anchors that a volume asks for, PEM; none if there are none and they are optional.
    ///
    /// # Errors
    /// No bundle matches; a bundle is not PEM; the bundles cannot be read.
    pub(super) async fn anchors(&self, wanted: &ClusterTrustBundleProjection) -> Result<String, ObjectError> {
        let mut known = self.watched().known.clone();
        // What is known after the wait counts, whether it came in time or not.
        let listed = known.wait_for(|known| !matches!(known, Known::Unlisted(_)));
        let _ = tokio::time::timeout(FIRST_READ, listed).await;
        match (chosen(&known.borrow(), wanted), wanted.optional == Some(true)) {
            (Err(error), true) if error.is_not_found() => Ok(String::new()),
            (chosen, _) => chosen,
        }
    }
}

/// The anchors of all bundles that the source selects.
fn chosen(known: &Known, wanted: &ClusterTrustBundleProjection) -> Result<String, ObjectError> {
    let all = match known {
        Known::Listed(all) => all,
        Known::NotServed => return Err(ObjectError::NotServed { kind: PLURAL }),
        Known::Unlisted(cause) => {
            let cause = cause.clone().unwrap_or_else(|| "timed out waiting for the condition".to_owned());
            return Err(ObjectError::NotSynced { kind: WORD, cause });
        }
    };
    let found: Vec<(&String, &Bundle)> = match (&wanted.name, &wanted.signer_name) {
        (Some(name), _) => all.get_key_value(name).into_iter().collect(),
        (None, Some(signer)) => {
            let fits = selector(wanted.label_selector.as_ref())?;
            all.iter().filter(|(_, bundle)| bundle.signer == *signer && fits(&bundle.labels)).collect()
        }
        (None, None) => return Err(ObjectError::UnnamedTrustBundle),
    };
    if found.is_empty() {
        return Err(match (&wanted.name, &wanted.signer_name) {
            (Some(name), _) => ObjectError::NotFound { kind: WORD, name: name.clone() },
            (None, signer) => ObjectError::NoTrustBundle { signer: signer.clone().unwrap_or_default() },
        });
    }
    let mut anchors = Vec::new();
    for (name, bundle) in found {
        let parsed = pem_blocks::certificates(&bundle.pem);
        let invalid =
            |error: pem::PemError| ObjectError::BadPem { what: format!("{WORD} {name:?}"), cause: error.to_string() };
        anchors.extend(parsed.map_err(invalid)?);
    }
    Ok(pem_blocks::anchors(anchors))
}

/// Whether labels match: none without a selector, all with an empty one.
fn selector(wanted: Option<&LabelSelector>) -> Result<impl Fn(&BTreeMap<String, String>) -> bool, ObjectError> {
    let parsed = wanted.cloned().map(Selector::try_from).transpose();
    let selector = parsed.map_err(|error| ObjectError::BadSelector(error.to_string()))?;
    Ok(move |labels: &BTreeMap<String, String>| selector.as_ref().is_some_and(|selector| selector.matches(labels)))
}

/// The task of the watch.
struct BundleRefresher {
    client: Client,
    recovered: Recovered,
    sender: watch::Sender<Known>,
    listeners: Arc<Listeners>,
}

impl BundleRefresher {
    /// Never ends.
    async fn run(mut self) {
        let mut backoff = Backoff::new(FIRST_RETRY, LAST_RETRY);
        let resource = loop {
            let state = match served(&self.client, "ClusterTrustBundle", PLURAL, &VERSIONS).await {
                Ok(Some(resource)) => break resource,
                Ok(None) => Known::NotServed,
                Err(error) => Known::Unlisted(Some(describe(&error))),
            };
            self.sender.send_replace(state);
            self.recovered.wait(backoff.failed(fastrand::f64())).await;
        };
        tracing::debug!(version = resource.version, "watching trust bundles");
        let api = Api::<TrustBundle>::all_with(self.client.clone(), &resource);
        let mut events = pin!(follow(api, Config::default(), self.recovered.clone()));
        let mut listing = HashMap::new();
        while let Some(event) = events.next().await {
            match event {
                Event::Init => listing = HashMap::new(),
                Event::InitApply(bundle) => drop(put(&mut listing, bundle)),
                Event::InitKeep(bundle) => listing.extend(self.known(bundle.name)),
                Event::InitDone => self.listed(std::mem::take(&mut listing)),
                Event::Apply(bundle) => self.change(|all| put(all, bundle)),
                Event::Delete(bundle) => self.change(|all| all.remove(&bundle.name).is_some()),
            }
        }
    }

    fn known(&self, name: String) -> Option<(String, Bundle)> {
        match &*self.sender.borrow() {
            Known::Listed(all) => all.get(&name).cloned().map(|bundle| (name, bundle)),
            Known::Unlisted(_) | Known::NotServed => None,
        }
    }

    fn listed(&self, all: HashMap<String, Bundle>) {
        let is_new = !matches!(&*self.sender.borrow(), Known::Listed(known) if *known == all);
        self.sender.send_replace(Known::Listed(all));
        if is_new {
            self.listeners.notify_all();
        }
    }

    fn change(&self, edit: impl FnOnce(&mut HashMap<String, Bundle>) -> bool) {
        let mut has_changed = false;
        self.sender.send_modify(|known| {
            if let Known::Listed(all) = known {
                has_changed = edit(all);
            }
        });
        if has_changed {
            self.listeners.notify_all();
        }
    }
}

/// True if that changes something for pods.
fn put(all: &mut HashMap<String, Bundle>, bundle: TrustBundle) -> bool {
    let Object { metadata, spec, .. } = bundle;
    let signer = spec.signer_name.unwrap_or_default();
    let bundle = Bundle { signer, labels: metadata.labels.unwrap_or_default(), pem: spec.trust_bundle };
    let before = all.insert(metadata.name.unwrap_or_default(), bundle.clone());
    before != Some(bundle)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use serde_json::json;

    use super::*;

    fn pem(byte: u8) -> String {
        pem_blocks::block("CERTIFICATE", vec![byte; 9])
    }

    fn known() -> Known {
        let bundle = |signer: &str, tier: &str, pem: String| Bundle {
            signer: signer.to_owned(),
            labels: [("tier".to_owned(), tier.to_owned())].into(),
            pem,
        };
        let all = [
            ("plain", bundle("", "a", pem(1))),
            ("s.io:s:1", bundle("s.io/s", "a", format!("{}{}", pem(2), pem(3)))),
            ("s.io:s:2", bundle("s.io/s", "b", format!("noise\n{}{}", pem(3), pem(4)))),
            ("t.io:t:1", bundle("t.io/t", "a", pem(5))),
            ("broken", bundle("", "a", "-----BEGIN X-----\n?\n-----END X-----\n".to_owned())),
        ];
        Known::Listed(all.into_iter().map(|(name, bundle)| (name.to_owned(), bundle)).collect())
    }

    fn anchors(known: &Known, wanted: Value) -> Result<String, String> {
        let mut wanted = wanted;
        wanted["path"] = json!("p");
        chosen(known, &serde_json::from_value(wanted).expect("a projection")).map_err(|error| error.to_string())
    }

    #[test]
    fn bundles_are_chosen_by_name_or_by_signer_and_labels() {
        let of = |bytes: &[u8]| Ok(pem_blocks::anchors(bytes.iter().map(|byte| vec![*byte; 9])));
        let by = |signer: &str, labels: Value| json!({"signerName": signer, "labelSelector": labels});
        let none = |signer: &str| Err(format!("no clustertrustbundle of signer {signer:?} matches the label selector"));
        for (wanted, expected) in [
            (json!({"name": "plain"}), of(&[1])),
            (json!({"name": "s.io:s:1"}), of(&[2, 3])),
            (json!({"name": "gone"}), Err("clustertrustbundle \"gone\" not found".to_owned())),
            (by("s.io/s", json!({})), of(&[2, 3, 4])),
            (by("s.io/s", json!({"matchLabels": {"tier": "b"}})), of(&[3, 4])),
            (
                by("s.io/s", json!({"matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["b"]}]})),
                of(&[2, 3]),
            ),
            (by("s.io/s", json!({"matchLabels": {"tier": "c"}})), none("s.io/s")),
            (json!({"signerName": "s.io/s"}), none("s.io/s")),
            (by("x.io/x", json!({})), none("x.io/x")),
            (json!({}), Err("a clusterTrustBundle source needs either name or signerName".to_owned())),
        ] {
            assert_eq!(anchors(&known(), wanted.clone()), expected, "{wanted}");
        }
        let error = anchors(&known(), json!({"name": "broken"})).expect_err("no PEM");
        assert!(error.starts_with("clustertrustbundle \"broken\" is not PEM: "), "{error}");
        let odd = by("s.io/s", json!({"matchExpressions": [{"key": "tier", "operator": "Like"}]}));
        assert!(anchors(&known(), odd).expect_err("no operator").starts_with("invalid label selector: "));
    }

    #[test]
    fn without_the_api_there_is_a_reason() {
        let wanted = || json!({"name": "plain"});
        let missing = anchors(&Known::NotServed, wanted());
        assert_eq!(missing, Err("the API server does not serve clustertrustbundles".to_owned()));
        let unread = anchors(&Known::Unlisted(Some("refused".to_owned())), wanted());
        assert_eq!(unread, Err("failed to sync clustertrustbundle cache: refused".to_owned()));
    }
}
