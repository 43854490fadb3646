//! Which ConfigMaps and Secrets a pod refers to, and whether it uses trust bundles and certificates. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::EnvFromSource;
use k8s_openapi::api::core::v1::EnvVar;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::Volume;

use crate::model::spec;

/// When an object is needed; of two needs the longer one counts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Need {
    /// When a container starts.
    AtStart,
    /// As long as the pod runs (volumes).
    Always,
}

/// Objects of one kind, by name, in one namespace.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Names {
    pub(super) namespace: String,
    pub(super) needs: BTreeMap<String, Need>,
}

/// The objects of a pod.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct References {
    pub(super) config_maps: Names,
    pub(super) secrets: Names,
    /// Some volume has trust anchors.
    pub(super) trust_bundles: bool,
    /// Some volume has a certificate of the pod.
    pub(super) certificates: bool,
}

impl References {
    pub(super) fn of(pod: &Pod) -> Self {
        let namespace = pod.metadata.namespace.clone().unwrap_or_default();
        let names = || Names { namespace: namespace.clone(), needs: BTreeMap::new() };
        let mut found = Self { config_maps: names(), secrets: names(), ..Self::default() };
        for container in spec::lasting_containers(pod) {
            found.container(container.spec.env.as_deref(), container.spec.env_from.as_deref());
        }
        for container in spec::ephemeral_containers(pod) {
            found.container(container.env.as_deref(), container.env_from.as_deref());
        }
        let Some(spec) = &pod.spec else { return found };
        for secret in spec.image_pull_secrets.iter().flatten() {
            found.secrets.add(&secret.name, Need::AtStart);
        }
        spec.volumes.iter().flatten().for_each(|volume| found.volume(volume));
        found
    }

    fn container(&mut self, env: Option<&[EnvVar]>, env_from: Option<&[EnvFromSource]>) {
        for source in env.into_iter().flatten().filter_map(|variable| variable.value_from.as_ref()) {
            if let Some(key) = &source.config_map_key_ref {
                self.config_maps.add(&key.name, Need::AtStart);
            }
            if let Some(key) = &source.secret_key_ref {
                self.secrets.add(&key.name, Need::AtStart);
            }
        }
        for source in env_from.into_iter().flatten() {
            if let Some(config_map) = &source.config_map_ref {
                self.config_maps.add(&config_map.name, Need::AtStart);
            }
            if let Some(secret) = &source.secret_ref {
                self.secrets.add(&secret.name, Need::AtStart);
            }
        }
    }

    fn volume(&mut self, volume: &Volume) {
        if let Some(config_map) = &volume.config_map {
            self.config_maps.add(&config_map.name, Need::Always);
        }
        if let Some(name) = volume.secret.as_ref().and_then(|secret| secret.secret_name.as_deref()) {
            self.secrets.add(name, Need::Always);
        }
        for source in volume.projected.iter().flat_map(|projected| projected.sources.iter().flatten()) {
            if let Some(config_map) = &source.config_map {
                self.config_maps.add(&config_map.name, Need::Always);
            }
            if let Some(secret) = &source.secret {
                self.secrets.add(&secret.name, Need::Always);
            }
            self.trust_bundles |= source.cluster_trust_bundle.is_some();
            self.certificates |= source.pod_certificate.is_some();
        }
    }
}

impl Names {
    fn add(&mut self, name: &str, need: Need) {
        if name.is_empty() {
            return;
        }
        let known = self.needs.entry(name.to_owned()).or_insert(need);
        *known = need.max(*known);
    }
}
