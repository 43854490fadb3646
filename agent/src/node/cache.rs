//! Cache of the own Node, from the watch and from responses to writes. The newest version is kept, but what a complete list
//! has replaces what was cached when it began: after a restore of the API server's data its versions are lower.
//!
//! Fields that cannot be decoded, such as a taint's time at the end of the year 9999, are left out: without the Node its
//! status could not be reported.

use std::sync::Arc;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::runtime::watcher;
use tokio::sync::watch as channel;
use tokio_util::sync::CancellationToken;

use crate::apiserver::recovery::Recovered;
use crate::apiserver::watch;
use crate::apiserver::watch::Event;

/// The own Node. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct NodeCache {
    latest: Arc<channel::Sender<Option<Arc<Node>>>>,
    synced: Arc<channel::Sender<bool>>,
}

impl NodeCache {
    /// Notifies of every change.
    pub fn subscribe(&self) -> channel::Receiver<Option<Arc<Node>>> {
        self.latest.subscribe()
    }

    /// True once the first list was complete, with the Node or without it (upstream: `nodeHasSynced`). What it had is cached by
    /// then.
    pub fn synced(&self) -> channel::Receiver<bool> {
        self.synced.subscribe()
    }

    /// The cached Node; `None` before the first event and after its deletion.
    pub fn current(&self) -> Option<Arc<Node>> {
        self.latest.borrow().clone()
    }

    /// Stores a Node unless a newer one is cached.
    pub(super) fn offer(&self, node: Node) {
        self.latest.send_if_modified(|latest| {
            let is_newer = latest.as_ref().is_none_or(|known| version(known) < version(&node));
            if is_newer {
                *latest = Some(Arc::new(node));
            }
            is_newer
        });
    }

    /// Stores the Node of a complete list. `before`: the version that was cached when the list began. If another one is
    /// cached now, a write was answered meanwhile, and the newest version wins.
    fn listed(&self, node: Node, before: u64) {
        self.latest.send_if_modified(|latest| {
            let changes = match latest.as_deref() {
                None => true,
                Some(known) if version(known) == before => *known != node,
                Some(known) => version(known) < version(&node),
            };
            if changes {
                *latest = Some(Arc::new(node));
            }
            changes
        });
    }

    /// Stores the Node as it was sent: the answer cannot be decoded.
    pub(super) fn sent(&self, node: Node) {
        let before = version(&node);
        self.listed(node, before);
    }

    /// The Node of this version was deleted.
    fn gone(&self, deleted: u64) {
        self.latest.send_if_modified(|latest| {
            let gone = latest.as_ref().is_some_and(|known| version(known) <= deleted);
            if gone {
                *latest = None;
            }
            gone
        });
    }

    fn version(&self) -> u64 {
        self.latest.borrow().as_deref().map_or(0, version)
    }
}

fn version(node: &Node) -> u64 {
    number(node.metadata.resource_version.as_deref().unwrap_or_default())
}

/// Resource versions of one kind of object are increasing numbers (KEP-5504).
fn number(version: &str) -> u64 {
    version.parse().unwrap_or(0)
}

/// Keeps the cache up to date until `shutdown`.
pub async fn follow(
    nodes: Api<Node>,
    name: String,
    recovered: Recovered,
    cache: NodeCache,
    shutdown: CancellationToken,
) {
    let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let mut events = std::pin::pin!(watch::follow_in_part(nodes, config, recovered));
    let mut listing = Listing::default();
    while let Some(Some(event)) = shutdown.run_until_cancelled(events.next()).await {
        take(&cache, &mut listing, event);
    }
}

/// State of a list in progress.
#[derive(Debug, Default)]
struct Listing {
    /// Version of the cached Node when the list began.
    before: u64,
    found: Option<Node>,
    /// It is in the list and cannot be decoded.
    is_kept: bool,
}

fn take(cache: &NodeCache, listing: &mut Listing, event: Event<Node>) {
    match event {
        Event::Init => *listing = Listing { before: cache.version(), ..Listing::default() },
        Event::InitApply(node) => listing.found = Some(node),
        Event::InitKeep(_) => listing.is_kept = true,
        Event::InitDone => {
            match listing.found.take() {
                Some(node) => cache.listed(node, listing.before),
                None if listing.is_kept => {}
                // A Node created while the list was read is not in it.
                None => cache.gone(listing.before),
            }
            cache.synced.send_replace(true);
        }
        Event::Apply(node) => cache.offer(node),
        Event::Delete(node) => cache.gone(number(&node.resource_version)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apiserver::watch::Identity;

    fn identity(version: u64) -> Identity {
        Identity { resource_version: version.to_string(), ..Identity::default() }
    }

    fn node(version: u64) -> Node {
        let mut node = Node::default();
        node.metadata.resource_version = Some(version.to_string());
        node
    }

    fn seen(events: Vec<Event<Node>>) -> u64 {
        let (cache, mut listing) = (NodeCache::default(), Listing::default());
        for event in events {
            take(&cache, &mut listing, event);
        }
        cache.version()
    }

    #[test]
    fn the_newest_version_wins() {
        use Event::*;
        assert_eq!(seen(vec![Init, InitApply(node(9)), InitDone, Apply(node(10)), Apply(node(8))]), 10);
        assert_eq!(seen(vec![Apply(node(5)), Delete(identity(6))]), 0);
        assert_eq!(seen(vec![Apply(node(7)), Delete(identity(6))]), 7, "created again before the deletion was seen");
        assert_eq!(seen(vec![Apply(node(5)), Init, InitDone]), 0, "deleted during a gap of the watch");
        assert_eq!(seen(vec![Apply(node(5)), Init, InitKeep(identity(9)), InitDone]), 5, "it cannot be decoded");
        assert_eq!(seen(vec![Init, Apply(node(5)), InitDone]), 5, "created while the list was read");
    }

    #[test]
    fn a_complete_list_is_known_with_the_node_or_without() {
        use Event::*;
        for listed in [Some(InitApply(node(9))), Some(InitKeep(identity(9))), None] {
            let (cache, mut listing) = (NodeCache::default(), Listing::default());
            let (synced, is_there) = (cache.synced(), matches!(listed, Some(InitApply(_))));
            for event in [Apply(node(3)), Delete(identity(3)), Init].into_iter().chain(listed) {
                take(&cache, &mut listing, event);
                assert!(!*synced.borrow(), "the list is not complete");
            }
            take(&cache, &mut listing, InitDone);
            assert_eq!((*synced.borrow(), cache.current().is_some()), (true, is_there));
        }
    }

    #[test]
    fn a_complete_list_replaces_the_cached_node() {
        use Event::*;
        let restored = vec![Apply(node(9)), Init, InitApply(node(4)), InitDone];
        assert_eq!(seen(restored.clone()), 4, "the server's data was restored to an earlier state");
        assert_eq!(seen([restored, vec![Apply(node(5))]].concat()), 5, "and goes on from there");
        assert_eq!(seen(vec![Apply(node(9)), Init, InitApply(node(4))]), 9, "the list is not complete");
        // As the answer to a write of the agent.
        assert_eq!(seen(vec![Apply(node(9)), Init, InitApply(node(9)), Apply(node(10)), InitDone]), 10);
        let cache = NodeCache::default();
        cache.offer(node(4));
        let mut other = node(4);
        other.metadata.name = Some("other".to_owned());
        cache.listed(other.clone(), 4);
        assert_eq!(cache.current().as_deref(), Some(&other), "another object of the same version");
    }
}
