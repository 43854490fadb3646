//! Lists of pods as API objects.

use std::sync::Arc;

use axum::http::StatusCode;
use axum::http::header;
use axum::response::IntoResponse;
use axum::response::Response;
use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodSpec;
use serde::Serialize;
use serde::ser::SerializeMap;

use super::answer;
use crate::model::ContainerState;
use crate::model::PodSnapshot;

/// The response that lists these pods.
pub(super) fn answer(pods: Vec<Arc<Pod>>) -> Response {
    match serde_json::to_vec(&PodList(pods)) {
        Ok(mut body) => {
            // As Go's encoder ends a value.
            body.push(b'\n');
            ([(header::CONTENT_TYPE, "application/json")], body).into_response()
        }
        Err(error) => answer::error(StatusCode::INTERNAL_SERVER_ERROR, format!("cannot encode the pods: {error}")),
    }
}

/// The running pods as the runtime reports them: their names, and their running containers. Pods without a running
/// container or a ready sandbox are left out.
pub fn running(snapshots: &[Arc<PodSnapshot>]) -> Vec<Arc<Pod>> {
    snapshots.iter().filter_map(|snapshot| running_pod(snapshot)).map(Arc::new).collect()
}

fn running_pod(snapshot: &PodSnapshot) -> Option<Pod> {
    let container = |found: &crate::model::ContainerStatus| Container {
        name: found.name.clone(),
        image: Some(found.image.clone()),
        ..Container::default()
    };
    let mut containers: Vec<Container> =
        snapshot.containers.iter().filter(|c| c.state == ContainerState::Running).map(container).collect();
    containers.sort_by(|a, b| a.name.cmp(&b.name));
    if containers.is_empty() && !snapshot.sandboxes.iter().any(|sandbox| sandbox.ready) {
        return None;
    }
    let mut pod = Pod::default();
    pod.metadata.uid = Some(snapshot.pod.uid.to_string());
    pod.metadata.namespace = Some(snapshot.pod.namespace.to_string());
    pod.metadata.name = Some(snapshot.pod.name.to_string());
    pod.spec = Some(PodSpec { containers, ..PodSpec::default() });
    Some(pod)
}

/// A v1 PodList. Its items have no kind and apiVersion of their own.
struct PodList(Vec<Arc<Pod>>);

impl Serialize for PodList {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_map(Some(4))?;
        list.serialize_entry("kind", "PodList")?;
        list.serialize_entry("apiVersion", "v1")?;
        list.serialize_entry("metadata", &serde_json::Map::new())?;
        let items: Vec<Item<'_>> = self.0.iter().map(|pod| Item(pod)).collect();
        // An empty list is `null`, as upstream encodes it.
        list.serialize_entry("items", &Some(items).filter(|items| !items.is_empty()))?;
        list.end()
    }
}

struct Item<'a>(&'a Pod);

impl Serialize for Item<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut item = serializer.serialize_map(None)?;
        item.serialize_entry("metadata", &self.0.metadata)?;
        item.serialize_entry("spec", &self.0.spec)?;
        match &self.0.status {
            Some(status) => item.serialize_entry("status", status)?,
            // The API's encoding has a status in every pod.
            None => item.serialize_entry("status", &serde_json::Map::new())?,
        }
        item.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing;

    /// Names of the listed pods with their containers and images.
    fn listed(snapshots: Vec<PodSnapshot>) -> Vec<String> {
        let snapshots: Vec<Arc<PodSnapshot>> = snapshots.into_iter().map(Arc::new).collect();
        let show = |pod: &Arc<Pod>| {
            let (meta, containers) = (&pod.metadata, &pod.spec.as_ref().unwrap().containers);
            let named = [&meta.namespace, &meta.name, &meta.uid].map(|part| part.clone().unwrap()).join("/");
            let show = |container: &Container| format!(" {}={}", container.name, container.image.as_ref().unwrap());
            named + &containers.iter().map(show).collect::<String>()
        };
        running(&snapshots).iter().map(show).collect()
    }

    #[test]
    fn pods_that_run_and_their_running_containers() {
        let several = vec![testing::running("b", 1), testing::running("a", 0), testing::exited("b", 0, 1)];
        assert_eq!(listed(vec![testing::snapshot(several)]), ["ns/pod/uid a=image b=image"]);
        let exited = || vec![testing::exited("a", 0, 0), testing::status("b", 0, ContainerState::Created)];
        assert_eq!(listed(vec![testing::snapshot(exited())]), ["ns/pod/uid"], "its sandbox is ready");
        let dead = |containers| {
            let mut snapshot = testing::snapshot(containers);
            snapshot.sandboxes[0].ready = false;
            snapshot
        };
        assert!(listed(vec![dead(exited()), dead(Vec::new())]).is_empty());
        assert_eq!(listed(vec![dead(vec![testing::running("a", 0)])]), ["ns/pod/uid a=image"]);
    }
}
