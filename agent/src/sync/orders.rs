//! What other rooms ask of the sync loop: pods to be ended against their will, and no new ones.

use tokio::sync::mpsc;
use tokio::sync::watch;

use crate::model::Pod;
use crate::model::PodUid;
use crate::recorder::EventType;
use crate::recorder::Recorder;
use crate::workers::act::blocking_kill_limit;
use crate::workers::state::KillOptions;

/// Orders that may wait for the loop.
pub const ORDER_CAPACITY: usize = 256;

/// A pod is to end, whatever its sources say.
#[derive(Debug)]
pub struct KillOrder {
    /// The pod; one that is not there has ended already.
    pub uid: PodUid,
    /// How, and why.
    pub options: KillOptions,
}

/// Where orders come from.
#[derive(Debug)]
pub struct Orders {
    /// Pods to end.
    pub kills: mpsc::Receiver<KillOrder>,
    /// The machine goes down: no new pods.
    pub closed: watch::Receiver<bool>,
}

impl Orders {
    /// Nobody orders anything.
    pub fn none() -> Self {
        Self { kills: mpsc::channel(1).1, closed: watch::channel(false).1 }
    }
}

/// Who has a pod killed waits for its end: if that is late, an event says whose fault it is.
pub(super) fn mind_the_grace(pod: &Pod, options: &KillOptions, recorder: &Recorder) {
    let Some(finished) = options.finished.clone() else { return };
    let own = pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds);
    let limit = blocking_kill_limit(options.grace.or(own).unwrap_or(0));
    let (pod, recorder) = (pod.clone(), recorder.clone());
    tokio::spawn(async move {
        if tokio::time::timeout(limit, finished.cancelled()).await.is_err() {
            recorder.pod_event(&pod, "", EventType::Warning, EXCEEDED.0, EXCEEDED.1);
        }
    });
}

const EXCEEDED: (&str, &str) =
    ("ExceededGracePeriod", "Container runtime did not kill the pod within specified grace period.");

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::model::testing::pod;
    use crate::recorder::testing::listening;

    #[tokio::test(start_paused = true)]
    async fn a_kill_that_takes_too_long_is_told() {
        // The pod's own period, one that is asked for, and when the event is due.
        for (own, asked, due) in [(None, None, 10), (Some(30), None, 45), (Some(30), Some(2), 10)] {
            let mut pod = pod("Always", &[], &["a"]);
            pod.spec.as_mut().expect("a spec").termination_grace_period_seconds = own;
            let (recorder, mut told) = listening();
            let finished = CancellationToken::new();
            let options = KillOptions { grace: asked, finished: Some(finished.clone()), ..KillOptions::default() };
            mind_the_grace(&Arc::new(pod), &options, &recorder);
            tokio::time::sleep(Duration::from_secs(due - 1)).await;
            assert_eq!(told.take(), Vec::<String>::new());
            tokio::time::sleep(Duration::from_secs(2)).await;
            assert_eq!(told.take(), [format!("pod W {}: {}", EXCEEDED.0, EXCEEDED.1)]);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_kill_in_time_is_not() {
        let (recorder, mut told) = listening();
        let finished = CancellationToken::new();
        let options = KillOptions { finished: Some(finished.clone()), ..KillOptions::default() };
        mind_the_grace(&Arc::new(pod("Always", &[], &["a"])), &options, &recorder);
        mind_the_grace(&Arc::new(pod("Always", &[], &["a"])), &KillOptions::default(), &recorder);
        tokio::time::sleep(Duration::from_secs(5)).await;
        finished.cancel();
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(told.take(), Vec::<String>::new());
    }
}
