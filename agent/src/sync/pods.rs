//! The desired pods of the sync loop, by UID and by full name, with the API copies (mirror pods) of static pods
//! kept apart. Pure bookkeeping: no API calls, no decisions.
//!
//! A mirror pod is never a pod of its own: look-ups by UID or full name find its static pod.

use std::collections::HashMap;
use std::collections::HashSet;

use k8s_openapi::api::core::v1::Pod as ApiPod;

use crate::model::Pod;
use crate::model::PodRef;
use crate::model::PodUid;
use crate::model::pod_ref;
use crate::model::spec;
use crate::sources::static_pod::CONFIG_HASH;
use crate::sources::static_pod::CONFIG_MIRROR;

/// Value of an annotation.
fn annotation<'a>(pod: &'a ApiPod, key: &str) -> Option<&'a str> {
    pod.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

/// An API object that represents a static pod.
pub fn is_mirror(pod: &ApiPod) -> bool {
    annotation(pod, CONFIG_MIRROR).is_some()
}

/// `mirror` represents this static pod: same name, namespace and hash.
pub fn is_mirror_of(mirror: &ApiPod, pod: &ApiPod) -> bool {
    let hash = annotation(pod, CONFIG_HASH);
    mirror.metadata.name == pod.metadata.name
        && mirror.metadata.namespace == pod.metadata.namespace
        && hash.is_some()
        && annotation(mirror, CONFIG_MIRROR) == hash
}

/// Index of pods by UID, and of the newest pod of each full name.
#[derive(Debug, Default)]
struct NameIndex {
    by_uid: HashMap<PodUid, Pod>,
    /// Full name to UID: where two pods share a name, the one set last.
    by_name: HashMap<String, PodUid>,
}

impl NameIndex {
    fn set(&mut self, reference: &PodRef, pod: Pod) {
        self.by_name.insert(reference.full_name(), reference.uid.clone());
        self.by_uid.insert(reference.uid.clone(), pod);
    }

    /// Another pod of the same name keeps the name, or gets it.
    fn remove(&mut self, reference: &PodRef) {
        self.by_uid.remove(&reference.uid);
        let name = reference.full_name();
        if self.by_name.get(&name) == Some(&reference.uid) {
            self.by_name.remove(&name);
            let left = self.by_uid.values().map(|pod| pod_ref(pod)).find(|other| other.full_name() == name);
            self.by_name.extend(left.map(|other| (name, other.uid)));
        }
    }

    fn named(&self, full_name: &str) -> Option<&Pod> {
        self.by_uid.get(self.by_name.get(full_name)?)
    }
}

/// All pods of this node, as desired. Only the sync loop writes it.
#[derive(Debug, Default)]
pub struct Pods {
    pods: NameIndex,
    mirrors: NameIndex,
    /// UID of a mirror pod to that of its static pod; stays until the mirror goes, even if the static pod goes first.
    translation: HashMap<PodUid, PodUid>,
}

impl Pods {
    /// Adds the pod or replaces the one with its UID.
    pub fn set(&mut self, pod: Pod) {
        let reference = pod_ref(&pod);
        let name = reference.full_name();
        if is_mirror(&pod) {
            self.mirrors.set(&reference, pod);
            if let Some(uid) = self.pods.by_name.get(&name) {
                self.translation.insert(reference.uid, uid.clone());
            }
        } else {
            if let Some(mirror) = self.mirrors.by_name.get(&name) {
                self.translation.insert(mirror.clone(), reference.uid.clone());
            }
            self.pods.set(&reference, pod);
        }
    }

    /// Removes the pod, if it is there.
    pub fn remove(&mut self, pod: &ApiPod) {
        let reference = pod_ref(pod);
        if is_mirror(pod) {
            self.mirrors.remove(&reference);
            self.translation.remove(&reference.uid);
        } else {
            self.pods.remove(&reference);
            let name = reference.full_name();
            if let Some((left, mirror)) = self.pods.by_name.get(&name).zip(self.mirrors.by_name.get(&name)) {
                self.translation.insert(mirror.clone(), left.clone());
            }
        }
    }

    /// The pod with this UID; mirror pods are not among them.
    pub fn by_uid(&self, uid: &PodUid) -> Option<&Pod> {
        self.pods.by_uid.get(uid)
    }

    /// The pod with this full name (`name_namespace`).
    pub fn by_full_name(&self, full_name: &str) -> Option<&Pod> {
        self.pods.named(full_name)
    }

    /// All pods, without mirror pods.
    pub fn all(&self) -> impl Iterator<Item = &Pod> {
        self.pods.by_uid.values()
    }

    /// All mirror pods.
    pub fn mirrors(&self) -> impl Iterator<Item = &Pod> {
        self.mirrors.by_uid.values()
    }

    /// The static pod that a mirror pod represents.
    fn of_mirror(&self, mirror: &ApiPod) -> Option<&Pod> {
        self.pods.named(&pod_ref(mirror).full_name())
    }

    /// The mirror pod of a static pod.
    fn mirror_of(&self, pod: &ApiPod) -> Option<&Pod> {
        self.mirrors.named(&pod_ref(pod).full_name())
    }

    /// The mirror pod with this full name (`name_namespace`).
    pub fn mirror_named(&self, full_name: &str) -> Option<&Pod> {
        self.mirrors.named(full_name)
    }

    /// Pod and mirror pod to an object that may be either; no pod if `pod` is the mirror of none.
    pub fn pair(&self, pod: &Pod) -> (Option<Pod>, Option<Pod>) {
        if is_mirror(pod) {
            (self.of_mirror(pod).cloned(), Some(pod.clone()))
        } else {
            (Some(pod.clone()), self.mirror_of(pod).cloned())
        }
    }

    /// The UID under which this node runs the pod: a mirror pod's is that of its static pod, any other is itself.
    pub fn translate(&self, uid: &PodUid) -> PodUid {
        self.translation.get(uid).unwrap_or(uid).clone()
    }

    /// The API object of the pod with this UID: its own, or its mirror pod, which is still found
    /// until it goes, even if the static pod went first.
    pub fn api_copy(&self, uid: &PodUid) -> Option<&Pod> {
        let shows = |mirror: &&Pod| self.translation.get(&pod_ref(mirror).uid) == Some(uid);
        match self.by_uid(uid) {
            Some(pod) if spec::is_static(pod) => self.mirror_of(pod).filter(shows),
            Some(pod) => Some(pod),
            None => self.mirrors().find(shows),
        }
    }

    /// UIDs of all pods and mirror pods.
    pub fn uids(&self) -> HashSet<PodUid> {
        self.pods.by_uid.keys().chain(self.mirrors.by_uid.keys()).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::sources::static_pod::CONFIG_SOURCE;

    fn pod(name: &str, uid: &str, annotations: &[(&str, &str)]) -> Pod {
        let mut pod = ApiPod::default();
        pod.metadata.name = Some(name.to_owned());
        pod.metadata.namespace = Some("ns".to_owned());
        pod.metadata.uid = Some(uid.to_owned());
        let annotations: BTreeMap<String, String> =
            annotations.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        pod.metadata.annotations = Some(annotations);
        Arc::new(pod)
    }

    fn static_pod(name: &str, uid: &str) -> Pod {
        pod(name, uid, &[(CONFIG_SOURCE, "file"), (CONFIG_HASH, uid)])
    }

    fn mirror(name: &str, uid: &str, hash: &str) -> Pod {
        pod(name, uid, &[(CONFIG_SOURCE, "api"), (CONFIG_HASH, hash), (CONFIG_MIRROR, hash)])
    }

    fn uid(text: &str) -> PodUid {
        PodUid::from(text)
    }

    #[test]
    fn kinds_of_pods() {
        let api = pod("a", "1", &[(CONFIG_SOURCE, "api")]);
        let bare = pod("a", "1", &[]);
        assert!(is_mirror(&mirror("a", "2", "1")) && !is_mirror(&static_pod("a", "1")));
        assert!(is_mirror_of(&mirror("a", "2", "1"), &static_pod("a", "1")));
        assert!(!is_mirror_of(&mirror("a", "2", "old"), &static_pod("a", "1")), "other content");
        assert!(!is_mirror_of(&mirror("b", "2", "1"), &static_pod("a", "1")), "other name");
        assert!(!is_mirror_of(&api, &bare), "no hash at all");
    }

    #[test]
    fn pods_are_found_by_uid_and_full_name_and_mirrors_are_not_pods() {
        let mut pods = Pods::default();
        pods.set(static_pod("a", "1"));
        pods.set(mirror("a", "m", "1"));
        assert_eq!(pods.by_uid(&uid("1")), Some(&static_pod("a", "1")));
        assert_eq!(pods.by_full_name("a_ns"), Some(&static_pod("a", "1")));
        assert_eq!(pods.by_uid(&uid("m")), None);
        assert_eq!((pods.all().count(), pods.mirrors().count()), (1, 1));
        assert_eq!(pods.uids(), HashSet::from([uid("1"), uid("m")]));
        let changed = pod("a", "1", &[(CONFIG_SOURCE, "file"), ("x", "y")]);
        pods.set(changed.clone());
        assert_eq!(pods.by_full_name("a_ns"), Some(&changed));
        pods.remove(&changed);
        assert_eq!((pods.by_uid(&uid("1")), pods.by_full_name("a_ns")), (None, None));
    }

    #[test]
    fn translation_is_built_in_either_order() {
        for static_first in [true, false] {
            let mut pods = Pods::default();
            let mut both = [static_pod("a", "1"), mirror("a", "m", "1")];
            if !static_first {
                both.reverse();
            }
            both.into_iter().for_each(|pod| pods.set(pod));
            assert_eq!(pods.translate(&uid("m")), uid("1"));
            assert_eq!(pods.translate(&uid("1")), uid("1"));
        }
    }

    #[test]
    fn the_copy_at_the_api_server() {
        let mut pods = Pods::default();
        let api = pod("b", "2", &[(CONFIG_SOURCE, "api")]);
        pods.set(api.clone());
        assert_eq!(pods.api_copy(&uid("2")), Some(&api));
        pods.set(static_pod("a", "1"));
        assert_eq!(pods.api_copy(&uid("1")), None, "no mirror yet");
        pods.set(mirror("a", "m", "1"));
        assert_eq!(pods.api_copy(&uid("1")), Some(&mirror("a", "m", "1")));
        assert_eq!(pods.api_copy(&uid("m")), None, "a mirror has no copy of its own");
        pods.remove(&static_pod("a", "1"));
        assert_eq!(pods.api_copy(&uid("1")), Some(&mirror("a", "m", "1")), "the pod may still be terminating");
        pods.remove(&mirror("a", "m", "1"));
        assert_eq!(pods.api_copy(&uid("1")), None);
    }

    #[test]
    fn each_side_finds_the_other() {
        let mut pods = Pods::default();
        let (plain, copy) = (static_pod("a", "1"), mirror("a", "m", "1"));
        assert_eq!(pods.pair(&copy), (None, Some(copy.clone())));
        pods.set(plain.clone());
        assert_eq!(pods.pair(&plain), (Some(plain.clone()), None));
        pods.set(copy.clone());
        assert_eq!(pods.pair(&plain), (Some(plain.clone()), Some(copy.clone())));
        assert_eq!(pods.pair(&copy), (Some(plain), Some(copy)));
    }

    #[test]
    fn a_mirror_without_its_pod_still_translates() {
        let mut pods = Pods::default();
        pods.set(static_pod("a", "1"));
        pods.set(mirror("a", "m", "1"));
        pods.remove(&static_pod("a", "1"));
        assert_eq!(pods.translate(&uid("m")), uid("1"), "the pod may still be terminating");
        pods.remove(&mirror("a", "m", "1"));
        assert_eq!(pods.translate(&uid("m")), uid("m"));
    }

    #[test]
    fn removing_the_older_of_two_with_one_name_leaves_the_newer() {
        let mut pods = Pods::default();
        pods.set(static_pod("a", "1"));
        pods.set(static_pod("a", "2"));
        pods.remove(&static_pod("a", "1"));
        assert_eq!(pods.by_full_name("a_ns"), Some(&static_pod("a", "2")));
    }

    #[test]
    fn removing_the_newer_of_two_with_one_name_leaves_the_older_with_its_mirror() {
        let mut pods = Pods::default();
        pods.set(static_pod("a", "1"));
        pods.set(static_pod("b", "other"));
        pods.set(mirror("a", "m", "1"));
        pods.set(static_pod("a", "2"));
        pods.remove(&static_pod("a", "2"));
        assert_eq!(pods.by_full_name("a_ns"), Some(&static_pod("a", "1")));
        assert_eq!(pods.api_copy(&uid("1")), Some(&mirror("a", "m", "1")));
        pods.remove(&static_pod("a", "1"));
        assert_eq!(pods.by_full_name("a_ns"), None);
    }

    proptest! {
        /// By UID, the pods are those set and not removed since; every name leads to one of them.
        #[test]
        fn bookkeeping_agrees_with_a_plain_map(steps in prop::collection::vec((0u8..3, 0u8..5, any::<bool>(), any::<bool>()), 0..40)) {
            let mut pods = Pods::default();
            let mut plain: BTreeMap<(bool, String), Pod> = BTreeMap::new();
            for (name, id, is_copy, remove) in steps {
                let (name, id) = (format!("p{name}"), format!("{is_copy}-{name}-{id}"));
                let pod = if is_copy { mirror(&name, &id, "h") } else { static_pod(&name, &id) };
                if remove {
                    pods.remove(&pod);
                    plain.remove(&(is_copy, id));
                } else {
                    pods.set(pod.clone());
                    plain.insert((is_copy, id), pod);
                }
            }
            let kept = |copies: bool| plain.iter().filter(move |((c, _), _)| *c == copies).map(|(_, p)| p);
            prop_assert_eq!(pods.all().count(), kept(false).count());
            prop_assert_eq!(pods.mirrors().count(), kept(true).count());
            for pod in kept(false) {
                let reference = pod_ref(pod);
                prop_assert_eq!(pods.by_uid(&reference.uid), Some(pod));
                let named = pods.by_full_name(&reference.full_name());
                prop_assert_eq!(named.map(|named| &named.metadata.name), Some(&pod.metadata.name));
            }
        }
    }
}
