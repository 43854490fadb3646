//! Repeats hints about cgroups of containers. The kernel creates a container's cgroup before the runtime reports the
//! container as running, and removes it before the runtime reports the exit: an inspection at once is too early, and no
//! worker asks for another one. Repeated hints that the runtime has answered meanwhile cost nothing.

use std::time::Duration;

use futures_util::StreamExt as _;
use tokio::sync::mpsc;
use tokio_util::time::DelayQueue;

use crate::events::Expect;
use crate::events::Hint;
use crate::model::ContainerId;
use crate::model::PodUid;

/// When a hint is repeated. Starting a container takes some 50 ms, on a busy node seconds.
const DELAYS: [Duration; 3] = [Duration::from_millis(250), Duration::from_secs(1), Duration::from_secs(4)];
/// Hints that wait; beyond that they are not repeated, and lists of all pods find what they announced.
const MOST: usize = 4096;

/// Forwards hints, and repeats those about containers, until a channel closes.
pub(super) async fn forward(mut from: mpsc::Receiver<Hint>, to: mpsc::Sender<Hint>) {
    let mut waiting: DelayQueue<(PodUid, ContainerId, Expect)> = DelayQueue::new();
    loop {
        let hint = tokio::select! {
            hint = from.recv() => {
                let Some(hint) = hint else { return };
                if let Hint::Runtime { uid, id, expect, .. } = &hint
                    && waiting.len() < MOST
                {
                    for delay in DELAYS {
                        waiting.insert((uid.clone(), id.clone(), *expect), delay);
                    }
                }
                hint
            }
            Some(due) = waiting.next(), if !waiting.is_empty() => {
                let (uid, id, expect) = due.into_inner();
                Hint::Runtime { uid, id, expect, exited: None }
            }
        };
        if to.send(hint).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::events::RelistReason;

    #[tokio::test(start_paused = true)]
    async fn hints_about_containers_are_repeated() {
        let ((sender, from), (to, mut receiver)) = (mpsc::channel(4), mpsc::channel(4));
        tokio::spawn(forward(from, to));
        let hint = || Hint::Runtime { uid: "u".into(), id: "c".into(), expect: Expect::Started, exited: None };
        let began = Instant::now();
        sender.send(hint()).await.unwrap();
        sender.send(Hint::Gap(RelistReason::Dropped)).await.unwrap();
        assert!(matches!(receiver.recv().await, Some(Hint::Runtime { .. })));
        assert!(matches!(receiver.recv().await, Some(Hint::Gap(_))), "not repeated");
        for delay in DELAYS {
            assert!(matches!(receiver.recv().await, Some(Hint::Runtime { expect: Expect::Started, .. })));
            assert!(began.elapsed() >= delay && began.elapsed() < delay + Duration::from_millis(10));
        }
        drop(sender);
        assert!(receiver.recv().await.is_none());
    }
}
