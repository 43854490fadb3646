//! Resolves names of hosts, by the node's resolver.
//!
//! A lookup keeps its thread until the resolver answers, which may be long after its caller has given up, and nothing
//! can end it sooner. The threads are those that file access needs too. So only a few lookups run at a time, one for
//! each name, and one whose callers have all timed out is never begun.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::net::ToSocketAddrs as _;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::Semaphore;
use tokio::sync::watch;

/// The answer of the resolver: addresses without a port, or why there are none.
type Found = Result<Vec<SocketAddr>, String>;
/// A lookup in progress.
type Running = watch::Receiver<Option<Found>>;
/// Queries the resolver. Blocks.
type LookUp = dyn Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync;

/// Resolves names, a bounded number at a time.
pub(super) struct Resolver(Arc<Shared>);

struct Shared {
    look_up: Box<LookUp>,
    permits: Arc<Semaphore>,
    running: Mutex<HashMap<String, Running>>,
}

impl Shared {
    fn running(&self) -> MutexGuard<'_, HashMap<String, Running>> {
        // Changed by one insertion or removal at a time: a panic elsewhere leaves it usable.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Resolver {
    /// The node's resolver, asked for this many names at a time.
    pub(super) fn of_node(at_once: usize) -> Self {
        Self::new(at_once, |host| Ok((host, 0).to_socket_addrs()?.collect()))
    }

    fn new(at_once: usize, look_up: impl Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync + 'static) -> Self {
        let (look_up, permits) = (Box::new(look_up), Arc::new(Semaphore::new(at_once)));
        Self(Arc::new(Shared { look_up, permits, running: Mutex::default() }))
    }

    /// The addresses of a name, with this port. Waits as long as the resolver does: the caller sets the limit. Cancel-safe.
    ///
    /// # Errors
    /// The resolver's reason why there are none.
    pub(super) async fn addresses(&self, host: &str, port: u16) -> Found {
        let known = self.0.running().get(host).cloned();
        let mut running = match known {
            Some(running) => running,
            None => self.begin(host).await,
        };
        let found = match running.wait_for(Option::is_some).await {
            Ok(found) => found.clone(),
            // The runtime ended before it ran, or it panicked.
            Err(_) => None,
        };
        let mut addresses = found.unwrap_or_else(|| Err("the lookup was abandoned".to_owned()))?;
        addresses.iter_mut().for_each(|address| address.set_port(port));
        Ok(addresses)
    }

    /// Waits for a permit, then begins to look up the name unless that has begun meanwhile.
    async fn begin(&self, host: &str) -> Running {
        // The semaphore is never closed.
        let permit = self.0.permits.clone().acquire_owned().await.ok();
        let mut all = self.0.running();
        if let Some(running) = all.get(host) {
            return running.clone();
        }
        let (sender, running) = watch::channel(None);
        all.insert(host.to_owned(), running.clone());
        drop(all);
        let lookup = Lookup { shared: self.0.clone(), host: host.to_owned(), found: None, sender, _permit: permit };
        drop(tokio::task::spawn_blocking(move || lookup.run()));
        running
    }
}

/// One lookup, with the permit that it keeps until the resolver has answered, whether a caller waits or not.
struct Lookup {
    shared: Arc<Shared>,
    host: String,
    found: Option<Found>,
    sender: watch::Sender<Option<Found>>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Lookup {
    /// Blocks.
    fn run(mut self) {
        self.found = Some((self.shared.look_up)(&self.host).map_err(|error| error.to_string()));
    }
}

impl Drop for Lookup {
    /// Also of a lookup that never ran: the next caller begins another one.
    fn drop(&mut self) {
        self.shared.running().remove(&self.host);
        self.sender.send_replace(self.found.take());
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::mpsc;
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    /// The timeout of a probe.
    const SHORT: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(60);

    /// A resolver that does not answer for `dead` before `hold` is dropped, and the names it was asked for.
    struct Fixture {
        resolver: Resolver,
        asked: Arc<Mutex<Vec<String>>>,
        hold: mpsc::Sender<()>,
    }

    impl Fixture {
        fn new(at_once: usize) -> Self {
            let (hold, held) = mpsc::channel();
            let (held, asked) = (Mutex::new(held), Arc::new(Mutex::new(Vec::new())));
            let names = asked.clone();
            let resolver = Resolver::new(at_once, move |host| {
                names.lock().expect("unpoisoned").push(host.to_owned());
                if host != "dead" {
                    return Ok(vec![address(0)]);
                }
                held.lock().expect("unpoisoned").recv().map_err(|_| io::Error::other("no answer"))?;
                Ok(Vec::new())
            });
            Self { resolver, asked, hold }
        }

        fn asked(&self) -> Vec<String> {
            self.asked.lock().expect("unpoisoned").clone()
        }
    }

    fn address(port: u16) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, port))
    }

    #[tokio::test]
    async fn a_name_whose_servers_do_not_answer_is_resolved_once_at_a_time() {
        let fixture = Fixture::new(2);
        for _ in 0..3 {
            timeout(SHORT, fixture.resolver.addresses("dead", 80)).await.expect_err("no answer");
        }
        let other = timeout(LONG, fixture.resolver.addresses("live", 80)).await.expect("it waits for no other name");
        assert_eq!(other, Ok(vec![address(80)]));
        assert_eq!(fixture.asked(), ["dead", "live"]);
    }

    #[tokio::test]
    async fn lookups_beyond_the_limit_wait_and_end_with_their_caller() {
        let fixture = Fixture::new(1);
        timeout(SHORT, fixture.resolver.addresses("dead", 80)).await.expect_err("no answer");
        timeout(SHORT, fixture.resolver.addresses("live", 80)).await.expect_err("the limit is reached");
        drop(fixture.hold);
        let other = timeout(LONG, fixture.resolver.addresses("other", 443)).await.expect("there is room again");
        assert_eq!(other, Ok(vec![address(443)]));
        let asked = fixture.asked.lock().expect("unpoisoned").clone();
        assert_eq!(asked, ["dead", "other"], "the caller of the one between them has timed out");
    }

    #[tokio::test]
    async fn who_waits_for_a_name_shares_its_answer() {
        let Fixture { resolver, asked, hold } = Fixture::new(2);
        let answer = async { drop(hold) };
        let (first, second, ()) = tokio::join!(resolver.addresses("dead", 1), resolver.addresses("dead", 2), answer);
        assert_eq!((first, second), (Err("no answer".to_owned()), Err("no answer".to_owned())));
        let again = timeout(LONG, resolver.addresses("dead", 1)).await.expect("an answer");
        assert_eq!(again, Err("no answer".to_owned()));
        assert_eq!(*asked.lock().expect("unpoisoned"), ["dead", "dead"]);
    }
}
