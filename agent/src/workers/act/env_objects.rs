//! Reads the API objects and files that a container's environment refers to.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::sync::Arc;

use futures_util::future::join_all;
use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Pod;

use crate::filesystem;
use crate::model::spec;
use crate::objects::ObjectError;
use crate::objects::Objects;
use crate::volumes::VolumeError;
use crate::volumes::Volumes;
use crate::workers::generate::EnvFiles;
use crate::workers::generate::EnvObjects;
use crate::workers::generate::FileValues;
use crate::workers::generate::NodeSettings;
use crate::workers::generate::ObjectLookup;
use crate::workers::generate::file_values;
use crate::workers::generate::names;

/// Longest file of variables in bytes. The kernel accepts no longer environment.
const MAX_ENV_FILE: u64 = 2 << 20;
/// Bytes of all files of variables that are read for one start of a container: far more than an environment can have. A
/// container can name thousands of large files, and is started again and again.
const MAX_ENV_FILES: u64 = 64 << 20;

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

/// The values of variables that are read from files. A reason why a file cannot be read is only logged: it names files
/// of the host. Files are read one after another, so that the content of only one is in memory, and each once,
/// however many of its keys are wanted. After one that cannot be read, or is longer than what may still be read, none is:
/// the container cannot be started, and may name thousands.
async fn files(volumes: &Volumes, pod: &Pod, container: &Container) -> EnvFiles {
    let sources =
        container.env.iter().flatten().filter_map(|variable| variable.value_from.as_ref()?.file_key_ref.as_ref());
    let mut wanted = BTreeMap::<_, BTreeSet<_>>::new();
    for source in sources {
        let file = (source.volume_name.clone(), source.path.clone());
        wanted.entry(file).or_default().insert(source.key.clone());
    }
    let (mut found, mut left) = (EnvFiles::default(), MAX_ENV_FILES);
    for ((volume, path), keys) in wanted {
        match values(volumes, pod, &volume, &path, keys, &mut left).await {
            Ok(values) => found.add(&volume, &path, values),
            Err(error) => {
                tracing::warn!(
                    pod = names::describe(pod), container = container.name, volume, path, %error, "cannot read an env file"
                );
                break;
            }
        }
    }
    found
}

/// The values of `keys` in a file of a volume. `left`: bytes that may still be read.
async fn values(
    volumes: &Volumes,
    pod: &Pod,
    volume: &str,
    path: &str,
    keys: BTreeSet<String>,
    left: &mut u64,
) -> Result<FileValues, VolumeError> {
    let content = volumes.read_file(pod, volume, path, MAX_ENV_FILE.min(*left)).await?;
    *left = left.saturating_sub(content.len() as u64);
    // On a thread for it: a file can have a million lines.
    let walked = filesystem::blocking(move || Ok(file_values(&content, keys))).await;
    walked.map_err(|error| VolumeError::Interrupted(error.to_string()))
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
    use std::os::unix::fs::symlink;
    use std::path::Path;
    use std::path::PathBuf;

    use k8s_openapi::api::core::v1::Secret;
    use serde_json::json;

    use super::*;
    use crate::workers::generate::GenerateError;

    const LINKS: usize = 20;

    /// A pod with a variable of the key `k` for each of so many links in its volume.
    fn pod_with_links(links: usize) -> Pod {
        let env = (0..links).map(|n| {
            let source = json!({"volumeName": "v", "path": n.to_string(), "key": "k"});
            json!({"name": format!("V{n}"), "valueFrom": {"fileKeyRef": source}})
        });
        let container = json!({"name": "c", "env": env.collect::<Vec<_>>()});
        serde_json::from_value(json!({
            "metadata": {"name": "pod", "namespace": "ns", "uid": "uid"},
            "spec": {"volumes": [{"name": "v", "emptyDir": {}}], "containers": [container]},
        }))
        .expect("a pod")
    }

    /// That volume below the agent's root directory.
    fn make_links(root: &Path, links: usize) -> PathBuf {
        let volume = root.join("pods/uid/volumes/kubernetes.io~empty-dir/v");
        std::fs::create_dir_all(&volume).expect("a folder");
        (0..links).for_each(|n| symlink("file", volume.join(n.to_string())).expect("a link"));
        volume
    }

    #[tokio::test]
    async fn what_is_read_of_all_files_together_has_a_bound() {
        let dir = tempfile::tempdir().expect("a folder");
        let volume = make_links(dir.path(), 2 * LINKS);
        std::fs::write(volume.join("file"), format!("k='v'\n#{}", "x".repeat((2 << 20) - 7))).expect("a file");
        let (volumes, pod) = (Volumes::new(dir.path()), pod_with_links(2 * LINKS));
        let found = files(&volumes, &pod, &pod.spec.as_ref().expect("a spec").containers[0]).await;
        let values = (0..2 * LINKS).map(|n| found.value("v", &n.to_string(), "k"));
        let (values, errors): (Vec<_>, Vec<_>) = values.partition(Result::is_ok);
        assert_eq!(values.len(), 32, "64 MiB in files of 2 MiB");
        assert!(errors.iter().all(|error| matches!(error, Err(GenerateError::EnvFile))), "{errors:?}");
    }

    #[tokio::test]
    async fn after_a_file_that_cannot_be_read_no_other_is() {
        let dir = tempfile::tempdir().expect("a folder");
        let volume = make_links(dir.path(), 0);
        let pod = pod_with_links(3);
        let container = &pod.spec.as_ref().expect("a spec").containers[0];
        let of_each = async || {
            let found = files(&Volumes::new(dir.path()), &pod, container).await;
            ["0", "1", "2"].map(|path| found.value("v", path, "k").ok().flatten().map(<[u8]>::to_vec))
        };
        std::fs::write(volume.join("0"), "k='first'").expect("a file");
        std::fs::write(volume.join("2"), "k='last'").expect("a file");
        assert_eq!(of_each().await, [Some(b"first".to_vec()), None, None]);
        std::fs::write(volume.join("1"), "k='second'").expect("a file");
        assert_eq!(of_each().await, ["first", "second", "last"].map(|value| Some(value.as_bytes().to_vec())));
    }

    #[tokio::test]
    async fn links_to_one_file_do_not_multiply_what_is_kept() {
        let dir = tempfile::tempdir().expect("a folder");
        let volume = make_links(dir.path(), LINKS);
        let (volumes, pod) = (Volumes::new(dir.path()), pod_with_links(LINKS));
        let container = &pod.spec.as_ref().expect("a spec").containers[0];
        let rest = "x".repeat((2 << 20) - 7);
        for (content, readable) in [(format!("k='v'\n#{rest}"), LINKS), (format!("k='{rest}'"), 6)] {
            std::fs::write(volume.join("file"), content).expect("a file");
            let found = files(&volumes, &pod, container).await;
            let kept = format!("{found:?}").len();
            assert!(kept < 13 << 20, "{kept} bytes");
            let values = (0..LINKS).map(|n| found.value("v", &n.to_string(), "k"));
            let (values, errors): (Vec<_>, Vec<_>) = values.partition(Result::is_ok);
            assert_eq!(values.len(), readable);
            assert!(errors.iter().all(|error| matches!(error, Err(GenerateError::EnvSize { .. }))), "{errors:?}");
        }
    }

    #[test]
    fn every_object_that_a_variable_refers_to_is_looked_up_once() {
        let by_key = |kind: &str, name: &str| json!({"name": "X", "valueFrom": {kind: {"name": name, "key": "k"}}});
        let container = json!({
            "name": "c",
            "env": [
                by_key("configMapKeyRef", "m1"), by_key("configMapKeyRef", "m2"), by_key("configMapKeyRef", "m1"),
                by_key("secretKeyRef", "s1"), {"name": "Y", "value": "plain"},
            ],
            "envFrom": [
                {"configMapRef": {"name": "m2"}}, {"configMapRef": {"name": "m3"}}, {"secretRef": {"name": "s2"}},
            ],
        });
        let container: Container = serde_json::from_value(container).expect("a container");
        let (config_maps, secrets) = references(&container);
        assert_eq!(config_maps.into_iter().collect::<Vec<_>>(), ["m1", "m2", "m3"]);
        assert_eq!(secrets.into_iter().collect::<Vec<_>>(), ["s1", "s2"]);
    }

    /// An optional reference does not stand for an object that may exist.
    #[test]
    fn an_object_is_not_absent_without_an_api_server() {
        let found = lookup::<Secret>(Err(ObjectError::Standalone), "secret", "ns", "s");
        let expected = "couldn't get secret ns/s, no kubeClient defined";
        assert!(matches!(&found, ObjectLookup::Failed(reason) if reason == expected), "{found:?}");
    }

    #[test]
    fn an_object_with_an_invalid_name_is_absent() {
        let error = ObjectError::BadName { kind: "secret", name: "A_b".to_owned() };
        let found = lookup::<Secret>(Err(error.clone()), "secret", "ns", "A_b");
        assert!(matches!(found, ObjectLookup::Absent(reason) if reason == error.to_string()));
    }
}
