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

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use serde_json::json;

    use super::*;

    fn of(spec: &Value) -> References {
        let pod = json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u"}, "spec": spec});
        References::of(&serde_json::from_value(pod).expect("a pod"))
    }

    fn needs(names: &Names) -> Vec<(&str, Need)> {
        assert_eq!(names.namespace, "ns");
        names.needs.iter().map(|(name, need)| (name.as_str(), *need)).collect()
    }

    #[test]
    fn objects_are_found_wherever_a_pod_names_them() {
        let container = |at: &str| {
            json!({"name": at,
            "env": [
                {"name": "A", "valueFrom": {"configMapKeyRef": {"name": format!("{at}-env"), "key": "k"}}},
                {"name": "B", "valueFrom": {"secretKeyRef": {"name": format!("{at}-env"), "key": "k"}}},
            ],
            "envFrom": [
                {"configMapRef": {"name": format!("{at}-all")}},
                {"secretRef": {"name": format!("{at}-all")}},
            ]})
        };
        let found = of(&json!({
            "containers": [container("main")], "initContainers": [container("init")],
            "ephemeralContainers": [container("debug")],
            "volumes": [
                {"name": "a", "configMap": {"name": "volume"}},
                {"name": "b", "secret": {"secretName": "volume"}},
                {"name": "c", "projected": {"sources": [
                    {"configMap": {"name": "projected"}},
                    {"secret": {"name": "projected"}},
                ]}},
            ],
        }));
        let both = [
            ("debug-all", Need::AtStart),
            ("debug-env", Need::AtStart),
            ("init-all", Need::AtStart),
            ("init-env", Need::AtStart),
            ("main-all", Need::AtStart),
            ("main-env", Need::AtStart),
            ("projected", Need::Always),
            ("volume", Need::Always),
        ];
        assert_eq!(needs(&found.config_maps), both);
        assert_eq!(needs(&found.secrets), both);
        assert!(!found.trust_bundles && !found.certificates);
    }

    #[test]
    fn the_longer_of_two_needs_counts() {
        let found = of(&json!({
            "containers": [{"name": "main", "envFrom": [{"secretRef": {"name": "both"}}]}],
            "imagePullSecrets": [{"name": "both"}, {"name": "pull"}, {"name": ""}, {}],
            "volumes": [{"name": "a", "secret": {"secretName": "both"}}],
        }));
        assert_eq!(needs(&found.secrets), [("both", Need::Always), ("pull", Need::AtStart)]);
        assert!(found.config_maps.needs.is_empty());
    }

    #[test]
    fn trust_bundles_and_certificates_are_distinguished() {
        let projected = |source: Value| {
            let found = of(&json!({"containers": [], "volumes": [{"name": "a", "projected": {"sources": [source]}}]}));
            (found.trust_bundles, found.certificates)
        };
        assert_eq!(projected(json!({"clusterTrustBundle": {"name": "b", "path": "p"}})), (true, false));
        let certificate = json!({"signerName": "s.example/x", "keyType": "ED25519", "credentialBundlePath": "p"});
        assert_eq!(projected(json!({"podCertificate": certificate})), (false, true));
        assert_eq!(projected(json!({"serviceAccountToken": {"path": "p"}})), (false, false));
    }
}
