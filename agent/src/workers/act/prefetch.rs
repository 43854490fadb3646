//! Which images are pulled ahead when an init container has been started: those of the containers after it.

use std::collections::HashSet;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Pod;

use super::image;
use super::pull_secrets;
use super::start::StartContext;
use crate::images::PrefetchRequest;
use crate::images::with_default_tag;
use crate::model::ContainerClass;
use crate::model::StartContainer;
use crate::model::spec;

/// Begins to pull what the containers after this one need. Waits for no pull. Does nothing if the pod is terminated before
/// its pull secrets are read.
pub(super) async fn after(context: StartContext<'_>, started: &StartContainer) {
    let StartContext { ctx, pass, sandbox, terminated, .. } = context;
    if !ctx.images.prefetches() || started.class != ContainerClass::Init {
        return;
    }
    let wanted = later_images(&pass.pod, &started.name);
    if wanted.is_empty() {
        return;
    }
    let reading = pull_secrets::look_up(ctx, &pass.pod);
    let Some(secrets) = terminated.run_until_cancelled(reading).await else { return };
    for image in wanted {
        // One that is no name is reported at its container's turn.
        let Ok(name) = with_default_tag(image) else { continue };
        let (image, secrets, sandbox) = (image.to_owned(), secrets.found.clone(), sandbox.config.clone());
        ctx.images.prefetch(PrefetchRequest { pod: pass.pod.clone(), image, name, sandbox, secrets });
    }
}

/// Images of the containers that are started after this init container, in their order: only those that are pulled if they
/// are not on the node, since others depend on the moment of the pull.
fn later_images<'a>(pod: &'a Pod, started: &str) -> Vec<&'a str> {
    let init = spec::init_containers(pod).iter().skip_while(|container| container.name != started).skip(1);
    let pulled = init.chain(spec::regular_containers(pod)).filter(|container| is_pulled_if_absent(container));
    let images = pulled.map(|container| container.image.as_deref().unwrap_or_default());
    let mut seen = HashSet::new();
    images.filter(|image| seen.insert(*image)).collect()
}

fn is_pulled_if_absent(container: &Container) -> bool {
    let image = container.image.as_deref().unwrap_or_default();
    image::is_pulled_if_absent(image, container.image_pull_policy.as_deref())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn images_of_later_containers_that_may_be_absent() {
        let container =
            |name: &str, image: &str, policy: &str| json!({"name": name, "image": image, "imagePullPolicy": policy});
        let pod: Pod = serde_json::from_value(json!({"metadata": {}, "spec": {
            "initContainers": [container("a", "a:1", ""), container("b", "b:1", ""), container("c", "c", "")],
            "containers": [container("d", "d:1", "Always"), container("e", "e:1", "Never"), container("f", "b:1", "IfNotPresent"),
                container("g", "g", "IfNotPresent")]}}))
        .expect("a pod");
        assert_eq!(later_images(&pod, "a"), ["b:1", "g"]);
        assert_eq!(later_images(&pod, "b"), ["b:1", "g"]);
        assert_eq!(later_images(&pod, "d"), ["b:1", "g"], "none is left");
    }
}
