//! The own Node as last seen, by watch or in the answer to a write. Newest version wins.

use std::sync::Arc;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::runtime::watcher;
use tokio::sync::watch as channel;
use tokio_util::sync::CancellationToken;

use crate::apiserver::recovery::Recovered;
use crate::apiserver::watch;

/// The own Node. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct NodeCache {
    latest: Arc<channel::Sender<Option<Arc<Node>>>>,
}

impl NodeCache {
    /// Wakes on every change.
    pub fn subscribe(&self) -> channel::Receiver<Option<Arc<Node>>> {
        self.latest.subscribe()
    }

    /// The Node as last seen; `None` if it was not seen yet, or is gone.
    pub fn current(&self) -> Option<Arc<Node>> {
        self.latest.borrow().clone()
    }

    /// Takes in a Node that was seen, unless a newer one was seen before.
    pub(super) fn offer(&self, node: Node) {
        self.latest.send_if_modified(|latest| {
            let is_newer = latest.as_ref().is_none_or(|known| version(known) < version(&node));
            if is_newer {
                *latest = Some(Arc::new(node));
            }
            is_newer
        });
    }

    /// The Node of this version is gone.
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

/// Versions of one kind of object are numbers that grow (KEP-5504).
fn version(node: &Node) -> u64 {
    node.metadata.resource_version.as_deref().and_then(|version| version.parse().ok()).unwrap_or(0)
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
    let mut events = std::pin::pin!(watch::follow(nodes, config, recovered));
    let mut listing = Listing::default();
    while let Some(Some(event)) = shutdown.run_until_cancelled(events.next()).await {
        take(&cache, &mut listing, event);
    }
}

/// What is known of a list that is being read.
#[derive(Debug, Default)]
struct Listing {
    /// Version of the cached Node when the list began.
    before: u64,
    found: bool,
}

fn take(cache: &NodeCache, listing: &mut Listing, event: watcher::Event<Node>) {
    match event {
        watcher::Event::Init => *listing = Listing { before: cache.version(), found: false },
        watcher::Event::InitApply(node) => {
            listing.found = true;
            cache.offer(node);
        }
        // A Node created while the list was read is not in it.
        watcher::Event::InitDone if !listing.found => cache.gone(listing.before),
        watcher::Event::InitDone => {}
        watcher::Event::Apply(node) => cache.offer(node),
        watcher::Event::Delete(node) => cache.gone(version(&node)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(version: u64) -> Node {
        let mut node = Node::default();
        node.metadata.resource_version = Some(version.to_string());
        node
    }

    fn seen(events: Vec<watcher::Event<Node>>) -> u64 {
        let (cache, mut listing) = (NodeCache::default(), Listing::default());
        for event in events {
            take(&cache, &mut listing, event);
        }
        cache.version()
    }

    #[test]
    fn the_newest_version_wins() {
        use watcher::Event::*;
        assert_eq!(seen(vec![Init, InitApply(node(9)), InitDone, Apply(node(10)), Apply(node(8))]), 10);
        assert_eq!(seen(vec![Apply(node(5)), Delete(node(6))]), 0);
        assert_eq!(seen(vec![Apply(node(7)), Delete(node(6))]), 7, "made anew before the deletion was seen");
        assert_eq!(seen(vec![Apply(node(5)), Init, InitDone]), 0, "gone while nobody watched");
        assert_eq!(seen(vec![Init, Apply(node(5)), InitDone]), 5, "made while the list was read");
    }
}
