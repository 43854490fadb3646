//! Resolves the content of a volume. Waits for the API server where it must; touches no file.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::ProjectedVolumeSource;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::core::v1::ServiceAccountTokenProjection;
use k8s_openapi::api::core::v1::Volume;
use k8s_openapi::api::core::v1::VolumeProjection;
use secrecy::ExposeSecret as _;

use super::content;
use super::content::Form;
use super::content::mode;
use super::ownership::Owners;
use super::payload::File;
use super::payload::Payload;
use crate::model::Amount;
use crate::objects::ObjectError;
use crate::objects::Objects;
use crate::objects::TokenKey;
use crate::volumes::VolumeError;

/// Content, and when some of it expires.
#[derive(Debug, Default)]
pub(crate) struct Resolved {
    pub(crate) payload: Payload,
    /// When a token in it is to be replaced.
    pub(crate) refresh_at: Option<SystemTime>,
}

/// What content is made from.
pub(crate) struct Resolver<'a> {
    pub(crate) objects: &'a Objects,
    pub(crate) allocatable: &'a BTreeMap<String, Amount>,
    pub(crate) pod: &'a Pod,
    pub(crate) owners: Owners,
}

impl Resolver<'_> {
    /// The content of a volume of one of this module's kinds.
    pub(crate) async fn resolve(&self, volume: &Volume) -> Result<Resolved, VolumeError> {
        let payload = if let Some(source) = &volume.config_map {
            let items = source.items.as_deref().unwrap_or_default();
            let form = Form { items, mode: stated(source.default_mode)?, optional: source.optional == Some(true) };
            self.config_map(&source.name, form).await?
        } else if let Some(source) = &volume.secret {
            let items = source.items.as_deref().unwrap_or_default();
            let form = Form { items, mode: stated(source.default_mode)?, optional: source.optional == Some(true) };
            self.secret(source.secret_name.as_deref().unwrap_or_default(), form).await?
        } else if let Some(source) = &volume.downward_api {
            let items = source.items.as_deref().unwrap_or_default();
            content::of_downward_api(self.pod, items, stated(source.default_mode)?, self.allocatable)?
        } else if let Some(source) = &volume.projected {
            return self.projected(&volume.name, source).await;
        } else {
            return Err(VolumeError::Unsupported { volume: volume.name.clone() });
        };
        Ok(Resolved { payload, refresh_at: None })
    }

    fn namespace(&self) -> &str {
        self.pod.metadata.namespace.as_deref().unwrap_or_default()
    }

    async fn config_map(&self, name: &str, form: Form<'_>) -> Result<Payload, VolumeError> {
        let object: Option<Arc<ConfigMap>> =
            found(self.objects.config_map(self.namespace(), name).await, form.optional)?;
        content::of_config_map(object.as_deref(), form)
    }

    async fn secret(&self, name: &str, form: Form<'_>) -> Result<Payload, VolumeError> {
        let object: Option<Arc<Secret>> = found(self.objects.secret(self.namespace(), name).await, form.optional)?;
        content::of_secret(object.as_deref(), form)
    }

    /// All sources, a later one over those before it. The error names every source that failed.
    async fn projected(&self, volume: &str, source: &ProjectedVolumeSource) -> Result<Resolved, VolumeError> {
        let default_mode = stated(source.default_mode)?;
        if self.objects.is_standalone() {
            return Err(VolumeError::NoClient { volume: volume.to_owned() });
        }
        let sources = source.sources.iter().flatten();
        let parts = futures_util::future::join_all(sources.map(|source| self.projection(source, default_mode))).await;
        let (mut all, mut failed) = (Resolved::default(), Vec::new());
        for part in parts {
            match part {
                Ok(part) => {
                    all.payload.merge(part.payload);
                    all.refresh_at = all.refresh_at.into_iter().chain(part.refresh_at).min();
                }
                Err(error) => failed.push(error),
            }
        }
        VolumeError::all_of(failed).map_or(Ok(all), Err)
    }

    async fn projection(&self, source: &VolumeProjection, default_mode: u32) -> Result<Resolved, VolumeError> {
        let payload = if let Some(source) = &source.secret {
            let items = source.items.as_deref().unwrap_or_default();
            let form = Form { items, mode: default_mode, optional: source.optional == Some(true) };
            self.secret(&source.name, form).await?
        } else if let Some(source) = &source.config_map {
            let items = source.items.as_deref().unwrap_or_default();
            let form = Form { items, mode: default_mode, optional: source.optional == Some(true) };
            self.config_map(&source.name, form).await?
        } else if let Some(source) = &source.downward_api {
            let items = source.items.as_deref().unwrap_or_default();
            content::of_downward_api(self.pod, items, default_mode, self.allocatable)?
        } else if let Some(source) = &source.service_account_token {
            return self.token(source, default_mode).await;
        } else {
            return Err(VolumeError::UnsupportedSource);
        };
        Ok(Resolved { payload, refresh_at: None })
    }

    async fn token(&self, source: &ServiceAccountTokenProjection, default_mode: u32) -> Result<Resolved, VolumeError> {
        let meta = &self.pod.metadata;
        let account = self.pod.spec.as_ref().and_then(|spec| spec.service_account_name.clone());
        let claim = TokenKey {
            namespace: self.namespace().to_owned(),
            service_account: account.unwrap_or_default(),
            audiences: source.audience.clone().filter(|audience| !audience.is_empty()).into_iter().collect(),
            expiration_seconds: source.expiration_seconds,
            pod: (meta.name.clone().unwrap_or_default(), meta.uid.as_deref().unwrap_or_default().into()),
        };
        let token = self.objects.token(&claim).await?;
        let mut payload = Payload::default();
        let file = File {
            data: token.text.expose_secret().as_bytes().to_owned(),
            mode: self.owners.credential_mode(default_mode),
            owner: self.owners.user,
        };
        payload.put(&source.path, file)?;
        Ok(Resolved { payload, refresh_at: token.refresh_at })
    }
}

/// `defaultMode`, which the API always sets.
fn stated(default_mode: Option<i32>) -> Result<u32, VolumeError> {
    default_mode.map(mode).ok_or(VolumeError::NoDefaultMode)
}

fn found<T>(result: Result<T, ObjectError>, optional: bool) -> Result<Option<T>, VolumeError> {
    match result {
        Err(error) if error.is_not_found() && optional => Ok(None),
        result => Ok(Some(result?)),
    }
}
