//! Bounds on the connections of one port, and which of them is closed when there are too many.
//!
//! A connection is *unauthorized* until one of its requests was authorized; on ports without authorization it stays so.
//! A fixed number of those is kept: for one more, the oldest one is closed of the client address that has most of them,
//! so that clients which open connections and send nothing displace each other only. An authorized connection counts
//! for its user, which may have half of all connections: no user can keep the others out, however small its rights. All
//! connections together are bounded, too; beyond that, new ones are closed.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::net::IpAddr;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::OnceLock;
use std::sync::PoisonError;

use rustls::pki_types::CertificateDer;
use tokio_util::sync::CancellationToken;

/// Unauthorized connections at most.
const MAX_UNAUTHORIZED: usize = 1024;
/// Connections at most.
const MAX_CONNECTIONS: usize = 8192;
/// Authorized connections of one user at most. The API server, which is one user, has one for each stream.
const MAX_PER_USER: usize = MAX_CONNECTIONS / 2;

/// The client of a connection. Requests carry it as an extension.
#[derive(Clone, Debug, Default)]
pub struct Peer {
    /// Its address.
    pub address: Option<SocketAddr>,
    /// The certificates it presented, unverified, its own first.
    pub(super) certificates: Arc<[CertificateDer<'static>]>,
    pub(super) slot: Option<Arc<ConnectionSlot>>,
}

impl Peer {
    /// A request of `user` was authorized on this connection.
    ///
    /// # Errors
    /// The user has too many connections.
    pub(super) fn mark_authorized(&self, user: &str) -> Result<(), TooManyConnections> {
        self.slot.as_ref().map_or(Ok(()), |slot| slot.mark_authorized(user))
    }
}

/// A user has more connections than one user may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TooManyConnections;

/// All connections of one port.
#[derive(Clone, Debug, Default)]
pub(super) struct Connections(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    next: u64,
    open: usize,
    /// How many are in `unauthorized`.
    unauthorized_count: usize,
    /// By client address; the oldest first.
    unauthorized: HashMap<IpAddr, BTreeMap<u64, CancellationToken>>,
    per_user: HashMap<String, usize>,
}

impl Table {
    fn insert_unauthorized(&mut self, peer: IpAddr, number: u64, evicted: CancellationToken) {
        self.unauthorized.entry(peer).or_default().insert(number, evicted);
        self.unauthorized_count += 1;
    }

    fn remove_unauthorized(&mut self, peer: IpAddr, number: u64) {
        let Some(of_peer) = self.unauthorized.get_mut(&peer) else { return };
        if of_peer.remove(&number).is_some() {
            self.unauthorized_count -= 1;
        }
        if of_peer.is_empty() {
            self.unauthorized.remove(&peer);
        }
    }

    fn evict_unauthorized(&mut self) {
        let most = self.unauthorized.iter().max_by_key(|(_, connections)| connections.len());
        let oldest = most.and_then(|(peer, connections)| Some((*peer, *connections.keys().next()?)));
        if let Some((peer, number)) = oldest {
            if let Some(evicted) = self.unauthorized.get(&peer).and_then(|connections| connections.get(&number)) {
                evicted.cancel();
            }
            self.remove_unauthorized(peer, number);
        }
    }
}

/// The place of one connection; dropping it frees the place.
#[derive(Debug)]
pub(super) struct ConnectionSlot {
    connections: Connections,
    peer: IpAddr,
    number: u64,
    evicted: CancellationToken,
    /// The user that it counts for, since its first authorized request.
    user: OnceLock<String>,
}

impl Connections {
    /// A place for a connection from `peer`, or `None` if there is none. May close an unauthorized connection.
    pub(super) fn accept(&self, peer: IpAddr) -> Option<ConnectionSlot> {
        let mut table = self.table();
        if table.open >= MAX_CONNECTIONS {
            return None;
        }
        if table.unauthorized_count >= MAX_UNAUTHORIZED {
            table.evict_unauthorized();
        }
        let (number, evicted) = (table.next, CancellationToken::new());
        table.next += 1;
        table.open += 1;
        table.insert_unauthorized(peer, number, evicted.clone());
        Some(ConnectionSlot { connections: self.clone(), peer, number, evicted, user: OnceLock::new() })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // A panic elsewhere leaves counts that are wrong by one at most.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConnectionSlot {
    /// Cancelled when the connection has to be closed.
    pub(super) fn evicted(&self) -> CancellationToken {
        self.evicted.clone()
    }

    fn mark_authorized(&self, user: &str) -> Result<(), TooManyConnections> {
        if self.user.get().is_some() {
            return Ok(());
        }
        let mut table = self.connections.table();
        let count = table.per_user.get(user).copied().unwrap_or_default();
        if count >= MAX_PER_USER {
            return Err(TooManyConnections);
        }
        // Of concurrent requests on one connection only the first one counts.
        if self.user.set(user.to_owned()).is_ok() {
            table.per_user.insert(user.to_owned(), count + 1);
            table.remove_unauthorized(self.peer, self.number);
        }
        Ok(())
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut table = self.connections.table();
        table.remove_unauthorized(self.peer, self.number);
        table.open -= 1;
        if let Some(user) = self.user.get()
            && let Some(count) = table.per_user.get_mut(user)
        {
            *count -= 1;
            if *count == 0 {
                table.per_user.remove(user);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    #[test]
    fn the_oldest_unauthorized_connection_is_evicted() {
        let connections = Connections::default();
        let accept = || connections.accept(peer(1)).expect("room");
        let mut slots: Vec<ConnectionSlot> = (0..MAX_UNAUTHORIZED).map(|_| accept()).collect();
        slots[0].mark_authorized("ann").expect("room");
        let one_more = accept();
        assert!(slots.iter().all(|slot| !slot.evicted.is_cancelled()), "authorized connections do not count");
        let another = accept();
        assert!(slots[1].evicted.is_cancelled());
        assert!(!slots[0].evicted.is_cancelled() && !slots[2].evicted.is_cancelled());
        slots.clear();
        drop((one_more, another));
        let table = connections.table();
        assert_eq!((table.open, table.unauthorized_count), (0, 0));
        assert!(table.unauthorized.is_empty() && table.per_user.is_empty());
    }

    #[test]
    fn a_client_that_floods_evicts_its_own_connections() {
        let connections = Connections::default();
        let quiet = connections.accept(peer(1)).expect("room");
        let flood: Vec<_> = (0..2 * MAX_UNAUTHORIZED).map(|_| connections.accept(peer(2)).expect("room")).collect();
        assert!(!quiet.evicted.is_cancelled(), "the oldest of all, but of another client");
        assert!(flood[0].evicted.is_cancelled());
    }

    #[test]
    fn one_user_leaves_room_for_others() {
        let connections = Connections::default();
        let mut slots = Vec::new();
        let refused = loop {
            let slot = connections.accept(peer(1)).expect("never full by one user");
            match slot.mark_authorized("small-right") {
                Ok(()) => slots.push(slot),
                Err(_) => break slot,
            }
        };
        assert_eq!(slots.len(), MAX_PER_USER);
        assert_eq!(refused.mark_authorized("apiserver"), Ok(()), "another user");
        slots.pop();
        let slot = connections.accept(peer(1)).expect("room");
        assert_eq!(slot.mark_authorized("small-right"), Ok(()));
        assert_eq!(slot.mark_authorized("small-right"), Ok(()), "counted once for each connection");
        assert_eq!(connections.table().per_user["small-right"], MAX_PER_USER);
    }

    #[test]
    fn all_connections_are_bounded() {
        let connections = Connections::default();
        let mut slots = Vec::new();
        for number in 0..MAX_CONNECTIONS {
            let slot = connections.accept(peer(1)).expect("room");
            slot.mark_authorized(["ann", "bob"][number % 2]).expect("room");
            slots.push(slot);
        }
        assert!(connections.accept(peer(1)).is_none());
        slots.pop();
        assert!(connections.accept(peer(1)).is_some());
    }
}
