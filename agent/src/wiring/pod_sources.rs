//! Which sources of pods the configuration names.

use crate::config::Feature;
use crate::config::Settings;
use crate::sources::SourcesConfig;
use crate::sources::adoption::Adoptions;

/// Without the pods of an API server, and without adopted ones.
pub(super) fn config(settings: &Settings, node_name: &str) -> SourcesConfig {
    let kubelet = &settings.kubelet;
    let set = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
    SourcesConfig {
        static_pod_path: set(&kubelet.static_pod_path).map(Into::into),
        file_check_frequency: kubelet.file_check_frequency.std(),
        static_pod_url: set(&kubelet.static_pod_url),
        static_pod_url_headers: kubelet.static_pod_url_header.clone().into_iter().collect(),
        http_check_frequency: kubelet.http_check_frequency.std(),
        node_name: node_name.to_owned(),
        prevent_static_pod_api_references: settings.gates.enabled(Feature::PreventStaticPodAPIReferences),
        adoptions: Adoptions::default(),
        api: None,
    }
}
