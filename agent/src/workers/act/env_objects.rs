//! Reads the API objects and files that a container's environment refers to.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::sync::Arc;

use futures_util::future::join_all;
use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Pod;

use crate::model::spec;
use crate::objects::ObjectError;
use crate::objects::Objects;
use crate::volumes::Volumes;
use crate::workers::generate::EnvFiles;
use crate::workers::generate::EnvObjects;
use crate::workers::generate::NodeSettings;
use crate::workers::generate::ObjectLookup;
use crate::workers::generate::names;

/// Longest file of variables in bytes. The kernel accepts no longer environment.
const MAX_ENV_FILE: u64 = 2 << 20;

/// Everything the environment of `container` refers to. An object that cannot be read is an error of the variable that needs
/// it.
///
/// # Errors
/// The services are not known yet.
pub(super) async fn look_up(
    objects: &Objects,
    volumes: &Volumes,
    pod: &Pod,
    container: &Container,
    settings: &NodeSettings,
) -> Result<EnvObjects, ObjectError> {
    let namespace = names::pod_namespace(pod);
    let links = pod.spec.as_ref().and_then(|spec| spec.enable_service_links).unwrap_or_default();
    let services = objects.service_variables(namespace, links, !spec::is_static(pod)).await?;
    let (config_maps, secrets) = references(container);
    let config_maps = config_maps.into_iter().map(async |name| {
        let result = objects.config_map(namespace, name).await;
        (name.to_owned(), lookup(result, "configMap", namespace, name))
    });
    let secrets = secrets.into_iter().map(async |name| {
        let result = objects.secret(namespace, name).await;
        (name.to_owned(), lookup(result, "secret", namespace, name))
    });
    let (config_maps, secrets) = tokio::join!(join_all(config_maps), join_all(secrets));
    let (config_maps, secrets) = (BTreeMap::from_iter(config_maps), BTreeMap::from_iter(secrets));
    let files = if settings.env_files { Some(files(volumes, pod, container).await) } else { None };
    Ok(EnvObjects { config_maps, secrets, services, files })
}

/// The files that variables are read from. A reason why one cannot be read is only logged: it names files of the host.
async fn files(volumes: &Volumes, pod: &Pod, container: &Container) -> EnvFiles {
    let sources =
        container.env.iter().flatten().filter_map(|variable| variable.value_from.as_ref()?.file_key_ref.as_ref());
    let wanted: BTreeSet<_> = sources.map(|source| (source.volume_name.clone(), source.path.clone())).collect();
    let mut found = EnvFiles::new();
    for (volume, path) in wanted {
        let content = match volumes.read_file(pod, &volume, &path, MAX_ENV_FILE).await {
            Ok(content) => String::from_utf8(content).ok(),
            Err(error) => {
                tracing::warn!(pod = names::describe(pod), container = container.name, volume, path, %error, "no env file");
                None
            }
        };
        found.insert((volume, path), content);
    }
    found
}

/// Names of ConfigMaps and Secrets.
fn references(container: &Container) -> (BTreeSet<&str>, BTreeSet<&str>) {
    let sources = || container.env.iter().flatten().filter_map(|variable| variable.value_from.as_ref());
    let wholes = || container.env_from.iter().flatten();
    let config_maps = sources().filter_map(|source| Some(source.config_map_key_ref.as_ref()?.name.as_str()));
    let config_maps =
        config_maps.chain(wholes().filter_map(|source| Some(source.config_map_ref.as_ref()?.name.as_str())));
    let secrets = sources().filter_map(|source| Some(source.secret_key_ref.as_ref()?.name.as_str()));
    let secrets = secrets.chain(wholes().filter_map(|source| Some(source.secret_ref.as_ref()?.name.as_str())));
    (config_maps.collect(), secrets.collect())
}

fn lookup<T>(result: Result<Arc<T>, ObjectError>, kind: &str, namespace: &str, name: &str) -> ObjectLookup<T> {
    match result {
        Ok(object) => ObjectLookup::Found(object),
        Err(ObjectError::Standalone) => {
            ObjectLookup::Failed(format!("couldn't get {kind} {namespace}/{name}, no kubeClient defined"))
        }
        Err(error) if error.is_not_found() => ObjectLookup::Absent(error.to_string()),
        Err(error) => ObjectLookup::Failed(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Secret;

    use super::*;

    #[test]
    fn an_object_with_an_invalid_name_is_absent() {
        let error = ObjectError::BadName { kind: "secret", name: "A_b".to_owned() };
        let found = lookup::<Secret>(Err(error.clone()), "secret", "ns", "A_b");
        assert!(matches!(found, ObjectLookup::Absent(reason) if reason == error.to_string()));
    }
}
