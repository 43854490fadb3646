//! The Event object: its reference to an object, its name, its message. Pure, but for the random UUID that replaces a name
//! which the API server would refuse.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::core::v1::EventSource;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use tokio::time::Instant;

use crate::model::labels;

/// `source.component` and `reportingComponent`.
pub(super) const COMPONENT: &str = "kubelet";

/// `type` of a core/v1 Event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EventType {
    /// Something expected.
    Normal,
    /// Something an operator should see.
    Warning,
}

impl EventType {
    /// As the API spells it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Normal => "Normal",
            Self::Warning => "Warning",
        }
    }
}

/// Something that happened to an object.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Occurrence {
    pub(super) object: ObjectReference,
    pub(super) kind: EventType,
    pub(super) reason: String,
    pub(super) message: String,
    pub(super) annotations: BTreeMap<String, String>,
    /// When, in nanoseconds since the Unix epoch.
    pub(super) nanos: i64,
    /// When: the clock may be set before it is delivered.
    pub(super) recorded_at: Instant,
    /// Its number, which no other has: near `nanos`, from which it differs after the clock was set back.
    pub(super) number: i64,
}

/// Refers to a pod, or to the container at `field_path`.
pub(super) fn pod(pod: &Pod, field_path: &str) -> ObjectReference {
    let set = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: set(&pod.metadata.namespace),
        name: set(&pod.metadata.name),
        uid: set(&pod.metadata.uid),
        resource_version: set(&pod.metadata.resource_version),
        field_path: Some(field_path.to_owned()).filter(|path| !path.is_empty()),
    }
}

/// Refers to a node: by nothing but its name while its UID is not known.
pub(super) fn node(name: &str, uid: Option<String>) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Node".to_owned()),
        name: Some(name.to_owned()),
        uid,
        ..ObjectReference::default()
    }
}

impl Occurrence {
    /// The event as it is first sent. Events on objects of the cluster are in namespace `default`.
    pub(super) fn event(&self, host: &str) -> Event {
        let namespace = self.object.namespace.clone().unwrap_or_else(|| "default".to_owned());
        let object = self.object.name.as_deref().unwrap_or_default();
        let at = time(self.nanos);
        Event {
            metadata: ObjectMeta {
                name: Some(event_name(object, self.number)),
                namespace: Some(namespace),
                annotations: Some(self.annotations.clone()).filter(|all| !all.is_empty()),
                ..ObjectMeta::default()
            },
            involved_object: self.object.clone(),
            type_: Some(self.kind.as_str().to_owned()),
            reason: Some(self.reason.clone()),
            message: Some(self.message.clone()),
            source: Some(EventSource { component: Some(COMPONENT.to_owned()), host: Some(host.to_owned()) }),
            reporting_component: Some(COMPONENT.to_owned()),
            reporting_instance: Some(host.to_owned()),
            first_timestamp: Some(at.clone()),
            last_timestamp: Some(at),
            count: Some(1),
            ..Event::default()
        }
    }
}

/// The name of an event: its object's and the number, as upstream a nanosecond; a random UUID where that is no name.
pub(super) fn event_name(object: &str, number: i64) -> String {
    let name = format!("{object}.{number:x}");
    if labels::is_subdomain(&name) { name } else { random_uuid() }
}

/// A moment as the API writes it.
pub(super) fn time(nanos: i64) -> Time {
    Time(Timestamp::from_nanosecond(i128::from(nanos)).unwrap_or(Timestamp::UNIX_EPOCH))
}

/// A version 4 UUID.
fn random_uuid() -> String {
    let bits = fastrand::u128(..) & !(0xf000 << 64) & !(0xc000 << 48) | (0x4000 << 64) | (0x8000 << 48);
    let hex = format!("{bits:032x}");
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::model::testing;

    const NANOS: i64 = 1_700_000_000_123_456_789;

    fn occurrence(object: ObjectReference) -> Occurrence {
        Occurrence {
            object,
            kind: EventType::Warning,
            reason: "BackOff".to_owned(),
            message: "again".to_owned(),
            annotations: BTreeMap::new(),
            nanos: NANOS,
            recorded_at: Instant::now(),
            number: NANOS,
        }
    }

    #[test]
    fn an_event_on_a_container() {
        let mut of = testing::pod("Always", &[], &["c"]);
        of.metadata.resource_version = Some("7".to_owned());
        let mut occurrence = occurrence(pod(&of, "spec.containers{c}"));
        occurrence.annotations.insert("starved_resource".to_owned(), "memory".to_owned());
        let event = occurrence.event("node-1");
        let expected = json!({
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": "pod.17979cfe3d85cd15",
                "namespace": "ns",
                "annotations": { "starved_resource": "memory" },
            },
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "namespace": "ns",
                "name": "pod",
                "uid": "uid",
                "resourceVersion": "7",
                "fieldPath": "spec.containers{c}",
            },
            "type": "Warning",
            "reason": "BackOff",
            "message": "again",
            "source": { "component": "kubelet", "host": "node-1" },
            "reportingComponent": "kubelet",
            "reportingInstance": "node-1",
            "firstTimestamp": "2023-11-14T22:13:20Z",
            "lastTimestamp": "2023-11-14T22:13:20Z",
            "count": 1,
        });
        assert_eq!(serde_json::to_value(event).unwrap(), expected);
    }

    #[test]
    fn an_event_on_a_node_before_it_is_registered_has_neither_uid_nor_namespace() {
        let event = occurrence(node("node-1", None)).event("node-1");
        assert_eq!(event.metadata.namespace.as_deref(), Some("default"));
        let object = serde_json::to_value(event.involved_object).unwrap();
        assert_eq!(object, json!({ "apiVersion": "v1", "kind": "Node", "name": "node-1" }));
        assert_eq!(node("node-1", Some("u".to_owned())).uid.as_deref(), Some("u"));
    }

    #[test]
    fn names_that_are_none_become_uuids() {
        assert_eq!(event_name("web-1.a", 0xff), "web-1.a.ff");
        for bad in ["", "Web", "a_b", "-a", "a-", "a..b", &"x".repeat(250)] {
            let name = event_name(bad, i64::MAX);
            assert_eq!(name.len(), 36, "{bad} gave {name}");
            assert_eq!((&name[8..9], &name[14..15]), ("-", "4"), "{name}");
            assert!("89ab".contains(&name[19..20]), "{name}");
        }
    }
}
