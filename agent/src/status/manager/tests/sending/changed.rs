//! Statuses that change while the API server refuses them.

use std::time::Duration;

use tokio::time::Instant;
use tokio::time::sleep;
use tokio::time::timeout;

use super::Fault;
use super::Harness;
use super::site;

/// Refused calls after which the pauses are the longest ones, of 6.4 to 9.6 s.
const MANY: usize = 12;
/// What the server's calls, the rounding of timers and the test's own steps add.
const SLACK: Duration = Duration::from_millis(20);

impl Harness {
    /// Waits until the server was called `count` times, whether or not it has answered.
    async fn until_called(&self, count: usize) {
        let wait = async {
            while self.server.calls().len() < count {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(Duration::from_secs(600), wait).await.expect("the calls are made in time");
    }

    /// The pauses between the calls from the `first` one on.
    fn gaps(&self, first: usize) -> Vec<Duration> {
        self.server.calls()[first..].windows(2).map(|two| two[1].at - two[0].at).collect()
    }
}

#[tokio::test(start_paused = true)]
async fn a_status_that_changes_while_it_is_refused_is_sent_at_once() {
    let site = site();
    let pod = site.pod("a");
    site.server.script(&[Fault::Refused; MANY + 2]);
    site.publish(&pod, "One");
    site.until_called(MANY).await;
    sleep(Duration::from_secs(2)).await;
    assert_eq!(site.server.calls().len(), MANY, "the longest pause");
    let changed = Instant::now();
    site.publish(&pod, "Two");
    site.until_called(MANY + 1).await;
    assert!(changed.elapsed() <= SLACK, "{:?}", changed.elapsed());
    assert_eq!(site.server.calls()[MANY].body["status"]["reason"], "Two");

    sleep(Duration::from_millis(300)).await;
    site.publish(&pod, "Three");
    site.until_sent("a", "Three").await;
    let gaps = site.gaps(MANY);
    let (second, longest) = (Duration::from_secs(1), Duration::from_millis(6_400));
    assert!(gaps[0] >= second && gaps[0] <= second + SLACK, "a second after the last: {gaps:?}");
    assert!(gaps[1] >= longest, "the pauses do not start over: {gaps:?}");
}

#[tokio::test(start_paused = true)]
async fn a_status_that_changes_during_a_request_that_is_refused_is_sent_a_second_later() {
    let site = site();
    let pod = site.pod("a");
    let slow = Duration::from_secs(5);
    site.server.script(&[Fault::Refused; MANY]);
    site.server.script(&[Fault::SlowlyRefused(slow)]);
    site.publish(&pod, "One");
    site.until_called(MANY + 1).await;
    site.publish(&pod, "Two");
    site.until_sent("a", "Two").await;
    let gaps = site.gaps(MANY);
    let expected = slow + Duration::from_secs(1);
    assert!(gaps[0] >= expected && gaps[0] <= expected + SLACK, "{gaps:?}");
}

/// As of a container that is ready and not ready in turn.
#[tokio::test(start_paused = true)]
async fn a_status_that_changes_all_the_time_is_sent_once_a_second_while_it_is_refused() {
    let site = site();
    let pod = site.pod("a");
    site.server.script(&[Fault::Refused; 100]);
    site.publish(&pod, "One");
    site.until_called(MANY).await;
    for nth in 0..200 {
        sleep(Duration::from_millis(50)).await;
        site.publish(&pod, if nth % 2 == 0 { "Two" } else { "One" });
    }
    let gaps = site.gaps(MANY - 1);
    assert!((8..=10).contains(&gaps.len()), "in ten seconds: {gaps:?}");
    assert!(gaps.iter().all(|gap| *gap >= Duration::from_secs(1)), "{gaps:?}");
}
