//! When the watch delivered each state of a pod, by the observer's clock.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use anyhow::bail;
use futures_util::Stream;
use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodCondition;
use kube::runtime::watcher;
use tokio::sync::Notify;

use crate::stamps::monotonic_now;

/// First times, in nanoseconds of CLOCK_MONOTONIC.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PodTimes {
    pub(crate) uid: Option<String>,
    pub(crate) ready: Option<u64>,
    pub(crate) terminated: Option<u64>,
    /// A container terminated with the reason OOMKilled.
    pub(crate) oom_killed: Option<u64>,
    /// The agent's event of an OOM kill.
    pub(crate) oom_event: Option<u64>,
    pub(crate) succeeded: Option<u64>,
    pub(crate) failed: Option<u64>,
    /// The agent has ended it (condition DisruptionTarget): an eviction, but not a rejection by admission.
    pub(crate) disrupted: Option<u64>,
    pub(crate) gone: Option<u64>,
    /// Of each CPU limit that its first container was reported with.
    pub(crate) cpu_limits: BTreeMap<String, u64>,
}

impl PodTimes {
    /// When its phase became Succeeded or Failed.
    pub(crate) fn ended(&self) -> Option<u64> {
        self.succeeded.or(self.failed)
    }
}

impl PodTimes {
    /// Records states of the pod that were not recorded before.
    fn record(&mut self, pod: &Pod, now: u64) {
        if self.uid.is_none() {
            self.uid.clone_from(&pod.metadata.uid);
        }
        let Some(status) = &pod.status else { return };
        let is_ready = || status.conditions.iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True");
        let ended = |reason: Option<&str>| {
            let states = status.container_statuses.iter().flatten().filter_map(|container| container.state.as_ref());
            let mut ends = states.filter_map(|state| state.terminated.as_ref());
            ends.any(|end| reason.is_none() || end.reason.as_deref() == reason)
        };
        let first = |time: &mut Option<u64>, holds: bool| {
            if holds && time.is_none() {
                *time = Some(now);
            }
        };
        first(&mut self.ready, is_ready());
        first(&mut self.terminated, ended(None));
        first(&mut self.oom_killed, ended(Some("OOMKilled")));
        first(&mut self.succeeded, status.phase.as_deref() == Some("Succeeded"));
        first(&mut self.failed, status.phase.as_deref() == Some("Failed"));
        let by_agent = |c: &PodCondition| {
            c.type_ == "DisruptionTarget" && c.status == "True" && c.reason.as_deref() == Some("TerminationByKubelet")
        };
        first(&mut self.disrupted, status.conditions.iter().flatten().any(by_agent));
        let reported = status.container_statuses.iter().flatten().next();
        let limits = reported.and_then(|container| container.resources.as_ref()?.limits.as_ref());
        if let Some(cpu) = limits.and_then(|limits| limits.get("cpu")) {
            self.cpu_limits.entry(cpu.0.clone()).or_insert(now);
        }
    }
}

/// Times by pod name. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct ObservedPods {
    times: Arc<Mutex<HashMap<String, PodTimes>>>,
    changed: Arc<Notify>,
}

impl ObservedPods {
    /// Reads the watch until the stream ends.
    pub(crate) async fn follow(self, events: impl Stream<Item = watcher::Result<watcher::Event<Pod>>>) {
        let mut events = std::pin::pin!(events);
        while let Some(event) = events.next().await {
            let Ok(now) = monotonic_now() else { return };
            match event {
                Ok(event) => self.take(&event, now),
                Err(error) => tracing::warn!(%error, "the watch of the benchmark's pods failed"),
            }
        }
    }

    /// Reads a watch of events of OOM kills until the stream ends.
    pub(crate) async fn follow_oom_events(self, events: impl Stream<Item = watcher::Result<Event>>) {
        let mut events = std::pin::pin!(events);
        while let Some(event) = events.next().await {
            let Ok(now) = monotonic_now() else { return };
            match event {
                Ok(event) => self.take_oom_event(&event, now),
                Err(error) => tracing::warn!(%error, "the watch of events failed"),
            }
        }
    }

    /// Events outlive their pods, whose names may have been used before.
    fn take_oom_event(&self, event: &Event, now: u64) {
        let object = &event.involved_object;
        let Some(uid) = &object.uid else { return };
        let mut times = self.lock();
        let pod = object.name.as_ref().and_then(|name| times.get_mut(name));
        if let Some(pod) = pod.filter(|pod| pod.uid.as_ref() == Some(uid)) {
            pod.oom_event.get_or_insert(now);
        }
        drop(times);
        self.changed.notify_waiters();
    }

    fn take(&self, event: &watcher::Event<Pod>, now: u64) {
        match event {
            watcher::Event::Apply(pod) | watcher::Event::InitApply(pod) => self.entry(pod, |m| m.record(pod, now)),
            watcher::Event::Delete(pod) => self.entry(pod, |m| m.gone = Some(now)),
            watcher::Event::Init | watcher::Event::InitDone => {}
        }
        self.changed.notify_waiters();
    }

    fn entry(&self, pod: &Pod, change: impl FnOnce(&mut PodTimes)) {
        if let Some(name) = &pod.metadata.name {
            change(self.lock().entry(name.clone()).or_default());
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, PodTimes>> {
        // Entries are changed one field at a time: they stay consistent after a panic.
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Times of one pod.
    pub(crate) fn of(&self, name: &str) -> PodTimes {
        self.lock().get(name).cloned().unwrap_or_default()
    }

    /// Waits until `time` is known of every pod; returns it for each, in the same order. `what` names it in errors.
    ///
    /// # Errors
    /// It is not known of a pod after `limit`.
    pub(crate) async fn wait(
        &self,
        names: &[String],
        what: &str,
        time: impl Fn(&PodTimes) -> Option<u64>,
        limit: Duration,
    ) -> anyhow::Result<Vec<u64>> {
        let deadline = tokio::time::Instant::now() + limit;
        loop {
            let changed = self.changed.notified();
            let reached: Vec<_> = {
                let times = self.lock();
                names.iter().map(|name| times.get(name).and_then(&time)).collect()
            };
            if let Some(all) = reached.iter().copied().collect::<Option<Vec<u64>>>() {
                return Ok(all);
            }
            if tokio::time::timeout_at(deadline, changed).await.is_err() {
                let missing = reached.iter().filter(|time| time.is_none()).count();
                let first = reached.iter().position(Option::is_none).map_or("", |index| names[index].as_str());
                let limit = humantime::format_duration(limit);
                bail!("{missing} of {} pods are not {what} after {limit}, for example {first}", names.len());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(status: serde_json::Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "p"}, "status": status})).unwrap()
    }

    #[test]
    fn only_the_first_time_counts() {
        let observed = ObservedPods::default();
        let ready = pod(json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}));
        let ended =
            pod(json!({"phase": "Succeeded", "containerStatuses": [{"name": "main", "image": "", "imageID": "",
            "ready": false, "restartCount": 0, "state": {"terminated": {"exitCode": 0}},
            "resources": {"limits": {"cpu": "20m"}}}]}));
        for (at, event) in [
            watcher::Event::Apply(pod(json!({"phase": "Pending"}))),
            watcher::Event::Apply(ready.clone()),
            watcher::Event::InitApply(ready),
            watcher::Event::Apply(ended.clone()),
            watcher::Event::Delete(ended),
        ]
        .iter()
        .enumerate()
        {
            observed.take(event, at as u64);
        }
        let expected = PodTimes {
            ready: Some(1),
            terminated: Some(3),
            succeeded: Some(3),
            gone: Some(4),
            cpu_limits: [("20m".to_owned(), 3)].into_iter().collect(),
            ..PodTimes::default()
        };
        assert_eq!(observed.lock()["p"], expected);
    }

    #[test]
    fn an_eviction_is_distinguished_from_a_rejection() {
        let times = |status| {
            let observed = ObservedPods::default();
            observed.take(&watcher::Event::Apply(pod(status)), 1);
            observed.of("p")
        };
        let rejected = times(json!({"phase": "Failed", "reason": "Evicted"}));
        assert_eq!((rejected.ended(), rejected.disrupted), (Some(1), None));
        let condition = json!({"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"});
        let evicted = times(json!({"phase": "Succeeded", "conditions": [condition]}));
        assert_eq!((evicted.ended(), evicted.disrupted), (Some(1), Some(1)));
    }

    #[test]
    fn an_oom_kill_is_known_by_its_reason_and_by_an_event_of_the_same_pod() {
        let observed = ObservedPods::default();
        let ended = |reason: &str| {
            let mut pod =
                pod(json!({"containerStatuses": [{"name": "main", "image": "", "imageID": "", "ready": false,
                "restartCount": 0, "state": {"terminated": {"exitCode": 137, "reason": reason}}}]}));
            pod.metadata.uid = Some("u".to_owned());
            watcher::Event::Apply(pod)
        };
        let event = |uid: &str| {
            let object = json!({"metadata": {}, "reason": "OOMKilled", "involvedObject": {"name": "p", "uid": uid}});
            serde_json::from_value::<Event>(object).unwrap()
        };
        observed.take(&ended("Error"), 1);
        observed.take(&ended("OOMKilled"), 2);
        observed.take_oom_event(&event("earlier"), 3);
        assert_eq!(observed.of("p").oom_event, None);
        observed.take_oom_event(&event("u"), 4);
        observed.take_oom_event(&event("u"), 5);
        let times = observed.of("p");
        assert_eq!((times.terminated, times.oom_killed, times.oom_event), (Some(1), Some(2), Some(4)));
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_returns_the_times_or_the_name_of_a_missing_pod() {
        let observed = ObservedPods::default();
        let names = ["p".to_owned(), "q".to_owned()];
        let error = observed.wait(&names, "gone", |m| m.gone, Duration::from_secs(5)).await.unwrap_err().to_string();
        assert_eq!(error, "2 of 2 pods are not gone after 5s, for example p");
        let waiting = observed.wait(&names[..1], "gone", |m| m.gone, Duration::from_secs(5));
        let (times, ()) = tokio::join!(waiting, async {
            tokio::task::yield_now().await;
            observed.take(&watcher::Event::Delete(pod(json!({}))), 7);
        });
        assert_eq!(times.unwrap(), [7]);
    }
}
