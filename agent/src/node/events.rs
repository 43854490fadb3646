//! Events of the node when its conditions change. Pure.

use k8s_openapi::api::core::v1::Node;

use super::conditions;
use crate::recorder::EventType;

/// An event of the node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct NodeEvent {
    pub(super) kind: EventType,
    pub(super) reason: &'static str,
    pub(super) message: String,
}

/// Conditions with events, and the reasons for True and otherwise.
const CONDITION_EVENTS: [(&str, &str, &str); 4] = [
    ("MemoryPressure", "NodeHasInsufficientMemory", "NodeHasSufficientMemory"),
    ("DiskPressure", "NodeHasDiskPressure", "NodeHasNoDiskPressure"),
    ("PIDPressure", "NodeHasInsufficientPID", "NodeHasSufficientPID"),
    (conditions::READY, "NodeReady", "NodeNotReady"),
];

/// A condition at the last status update.
#[derive(Debug)]
struct ReportedCondition {
    /// Its status in the API server.
    known: Option<String>,
    /// Its status by this agent.
    reported: String,
}

impl ReportedCondition {
    /// What a status is compared with: the one this agent has reported, unless another client has set one meanwhile, as the
    /// node controller sets Unknown. A patch that has not arrived is no change by another client.
    fn before<'a>(&'a self, known: Option<&'a str>) -> &'a str {
        let changed = known.filter(|_| known != self.known.as_deref());
        changed.unwrap_or(&self.reported)
    }
}

/// State in the last events.
#[derive(Debug, Default)]
pub(super) struct ReportedState {
    conditions: [Option<ReportedCondition>; CONDITION_EVENTS.len()],
    unschedulable: bool,
    rebooted: bool,
}

impl ReportedState {
    /// Events of the change from `known`, the Node in the API server, to `now`. Pressures have an event with the first status,
    /// readiness only if it differs from the known status, or for a new node if it is ready, a
    /// reboot once.
    pub(super) fn events_since(&mut self, known: &Node, now: &Node) -> Vec<NodeEvent> {
        let name = now.metadata.name.as_deref().unwrap_or_default();
        let mut events: Vec<NodeEvent> = self.reboot(known, now, name).into_iter().collect();
        let mut turned = |reason| {
            let message = format!("Node {name} status is now: {reason}");
            events.push(NodeEvent { kind: EventType::Normal, reason, message });
        };
        for ((type_, yes, no), last) in CONDITION_EVENTS.into_iter().zip(&mut self.conditions) {
            let Some(is) = conditions::status_of(now.status.as_ref(), type_) else { continue };
            let known = conditions::status_of(known.status.as_ref(), type_);
            let before = match last.as_ref() {
                Some(last) => Some(last.before(known)),
                None => known.filter(|_| type_ == conditions::READY),
            };
            // A node that has just been registered did not become unready.
            let is_new = type_ == conditions::READY && before.is_none();
            if before != Some(is) && (is == "True" || !is_new) {
                turned(if is == "True" { yes } else { no });
            }
            *last = Some(ReportedCondition { known: known.map(str::to_owned), reported: is.to_owned() });
        }
        let unschedulable = now.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or(false);
        if std::mem::replace(&mut self.unschedulable, unschedulable) != unschedulable {
            turned(if unschedulable { "NodeNotSchedulable" } else { "NodeSchedulable" });
        }
        events
    }

    fn reboot(&mut self, known: &Node, now: &Node, name: &str) -> Option<NodeEvent> {
        let boot_id = |node: &Node| Some(node.status.as_ref()?.node_info.as_ref()?.boot_id.clone());
        let (before, is) = (boot_id(known).filter(|id| !id.is_empty())?, boot_id(now)?);
        if before == is || std::mem::replace(&mut self.rebooted, true) {
            return None;
        }
        let message = format!("Node {name} has been rebooted, boot id: {is}");
        Some(NodeEvent { kind: EventType::Warning, reason: "Rebooted", message })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn node(ready: Option<&str>, memory: &str, boot_id: &str, unschedulable: bool) -> Node {
        let mut all = vec![json!({ "type": "MemoryPressure", "status": memory })];
        all.extend(ready.map(|ready| json!({ "type": "Ready", "status": ready })));
        let info = json!({
            "architecture": "", "bootID": boot_id, "containerRuntimeVersion": "", "kernelVersion": "", "kubeProxyVersion": "",
            "kubeletVersion": "", "machineID": "", "operatingSystem": "", "osImage": "", "systemUUID": "",
        });
        let node = json!({
            "metadata": { "name": "n" }, "spec": { "unschedulable": unschedulable }, "status": { "conditions": all, "nodeInfo": info },
        });
        serde_json::from_value(node).expect("a node")
    }

    fn reasons(events: Vec<NodeEvent>) -> Vec<&'static str> {
        events.into_iter().map(|event| event.reason).collect()
    }

    #[test]
    fn changes_have_one_event() {
        let mut reported = ReportedState::default();
        let known = node(Some("False"), "False", "1", false);
        let now = node(Some("True"), "False", "1", false);
        assert_eq!(reasons(reported.events_since(&known, &now)), ["NodeHasSufficientMemory", "NodeReady"]);
        assert!(reported.events_since(&known, &now).is_empty(), "even if the patch has not arrived");
        let worse = node(Some("False"), "True", "1", true);
        assert_eq!(
            reasons(reported.events_since(&now, &worse)),
            ["NodeHasInsufficientMemory", "NodeNotReady", "NodeNotSchedulable"]
        );
        let message = &reported.events_since(&worse, &now)[1].message;
        assert_eq!(message, "Node n status is now: NodeReady");
    }

    #[test]
    fn a_status_by_another_client_is_compared_with() {
        let mut reported = ReportedState::default();
        let now = node(Some("True"), "False", "1", false);
        reported.events_since(&now, &now);
        let unknown = node(Some("Unknown"), "Unknown", "1", false);
        let back = ["NodeHasSufficientMemory", "NodeReady"];
        assert_eq!(reasons(reported.events_since(&unknown, &now)), back);
        assert!(reported.events_since(&unknown, &now).is_empty(), "the patch has not arrived");
        assert!(reported.events_since(&now, &now).is_empty(), "it has");
        assert_eq!(reasons(reported.events_since(&unknown, &now)), back, "the node was away once more");
        let worse = node(Some("False"), "False", "1", false);
        assert_eq!(reasons(reported.events_since(&now, &worse)), ["NodeNotReady"]);
        assert!(reported.events_since(&now, &worse).is_empty(), "the patch has not arrived");
        assert_eq!(reasons(reported.events_since(&unknown, &worse)), ["NodeHasSufficientMemory", "NodeNotReady"]);
        let first = ReportedState::default().events_since(&unknown, &worse);
        assert_eq!(reasons(first), ["NodeHasSufficientMemory", "NodeNotReady"], "a restart while it was away");
    }

    #[test]
    fn a_restart_of_the_agent_records_no_readiness_event() {
        let now = node(Some("True"), "False", "1", false);
        assert_eq!(reasons(ReportedState::default().events_since(&now, &now)), ["NodeHasSufficientMemory"]);
        assert_eq!(
            reasons(ReportedState::default().events_since(&Node::default(), &now)),
            ["NodeHasSufficientMemory", "NodeReady"]
        );
    }

    #[test]
    fn a_new_node_did_not_become_unready() {
        let mut reported = ReportedState::default();
        let (starting, ready) = (node(Some("False"), "False", "1", false), node(Some("True"), "False", "1", false));
        assert_eq!(reasons(reported.events_since(&Node::default(), &starting)), ["NodeHasSufficientMemory"]);
        assert_eq!(reasons(reported.events_since(&starting, &ready)), ["NodeReady"]);
    }

    #[test]
    fn a_reboot_has_one_event() {
        let (old, new) = (node(None, "False", "1", false), node(None, "False", "2", false));
        let mut reported = ReportedState::default();
        let first = reported.events_since(&old, &new);
        assert_eq!(first[0].message, "Node n has been rebooted, boot id: 2");
        assert_eq!(first[0].kind, EventType::Warning);
        assert!(!reasons(reported.events_since(&old, &new)).contains(&"Rebooted"));
        assert!(
            !reasons(ReportedState::default().events_since(&node(None, "False", "", false), &new))
                .contains(&"Rebooted")
        );
    }
}
