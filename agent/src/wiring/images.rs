//! The image service: limits on pulls, credentials, records of which pods may use which image.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;

use super::node;
use crate::config::Feature;
use crate::config::Settings;
use crate::filesystem;
use crate::images::AccessRecords;
use crate::images::Credentials;
use crate::images::Images;
use crate::images::Providers;
use crate::images::VerificationPolicy;
use crate::metrics::Metrics;
use crate::objects::Objects;
use crate::runtime::Runtime;

/// Images of this runtime, with access records unless their feature gate is off. Makes directories.
pub(super) async fn prepare(settings: &Settings, runtime: Runtime, metrics: &Arc<Metrics>) -> anyhow::Result<Images> {
    let images = Images::new(runtime, node::pull_limits(settings)).with_prefetch(settings.keblet.images.prefetch);
    if !settings.gates.enabled(Feature::KubeletEnsureSecretPulledImages) {
        return Ok(images);
    }
    let (root, policy, metrics) = (settings.flags.root_dir.clone(), verification_policy(settings), metrics.clone());
    let operation = format!("opening the records of pulled images below {}", root.display());
    let opening = filesystem::blocking(move || AccessRecords::open(&root, policy, metrics));
    Ok(images.with_access(opening.await.context(operation)?))
}

fn verification_policy(settings: &Settings) -> VerificationPolicy {
    let kubelet = &settings.kubelet;
    match kubelet.image_pull_credentials_verification_policy.as_str() {
        "NeverVerify" => VerificationPolicy::NeverVerify,
        "NeverVerifyPreloadedImages" => VerificationPolicy::NeverVerifyPreloadedImages,
        "NeverVerifyAllowlistedImages" => {
            VerificationPolicy::NeverVerifyAllowlistedImages(kubelet.preloaded_images_verification_allowlist.clone())
        }
        // Validation lets nothing else through.
        _ => VerificationPolicy::AlwaysVerify,
    }
}

/// Where credentials are looked up beside pods' secrets: files of the node, and plugins. `objects`: service accounts.
pub(super) async fn credentials(
    settings: &Settings,
    objects: &Objects,
    metrics: &Arc<Metrics>,
) -> anyhow::Result<Credentials> {
    let flags = &settings.flags;
    let credentials = Credentials::none().with_node_files(&flags.root_dir);
    let (config, directory) = (&flags.image_credential_provider_config, &flags.image_credential_provider_bin_dir);
    if config.is_empty() && directory.is_empty() {
        return Ok(credentials);
    }
    let tokens = settings.gates.enabled(Feature::KubeletServiceAccountTokenForCredentialProviders);
    let (config, directory) = (PathBuf::from(config), PathBuf::from(directory));
    let (objects, metrics) = (objects.clone(), metrics.clone());
    let reading = move || Providers::read(&config, &directory, tokens, objects, metrics);
    let providers =
        tokio::task::spawn_blocking(reading).await.context("reading the configuration of CRI auth plugins")?;
    Ok(credentials.with_providers(providers.context("failed to register CRI auth plugins")?))
}
