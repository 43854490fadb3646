//! Resolves the content of a volume. Waits for the API server where it must; touches no file.

use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use k8s_openapi::api::core::v1::ClusterTrustBundleProjection;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodCertificateProjection;
use k8s_openapi::api::core::v1::ProjectedVolumeSource;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::core::v1::ServiceAccountTokenProjection;
use k8s_openapi::api::core::v1::Volume;
use k8s_openapi::api::core::v1::VolumeProjection;
use secrecy::ExposeSecret as _;

use super::content;
use super::content::Downward;
use super::content::Form;
use super::content::mode;
use super::ownership::Owners;
use super::payload::File;
use super::payload::Payload;
use crate::objects::CertificateKey;
use crate::objects::ObjectError;
use crate::objects::Objects;
use crate::objects::TokenKey;
use crate::recorder::EventType;
use crate::recorder::Recorder;
use crate::volumes::VolumeError;

/// Sources of a projected volume that are resolved at a time: their content is counted only when it is put together.
const MOST_AT_ONCE: usize = 64;

/// Content, and when some of it expires.
#[derive(Debug, Default)]
pub(crate) struct Resolved {
    pub(crate) payload: Payload,
    /// When a token or certificate in it is to be replaced.
    pub(crate) refresh_at: Option<SystemTime>,
}

/// What content is made from.
pub(crate) struct Resolver<'a> {
    pub(crate) objects: &'a Objects,
    pub(super) downward: Downward<'a>,
    pub(crate) pod: &'a Pod,
    pub(crate) owners: Owners,
    /// Records events on the pod.
    pub(crate) recorder: Option<&'a Recorder>,
}

impl Resolver<'_> {
    /// The content of a volume of one of this module's kinds.
    ///
    /// # Errors
    /// An object is missing or cannot be read, or a field of the source is invalid.
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
            self.downward.files(items, stated(source.default_mode)?)?
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
        content::of_config_map(object.as_ref(), form)
    }

    async fn secret(&self, name: &str, form: Form<'_>) -> Result<Payload, VolumeError> {
        let object: Option<Arc<Secret>> = found(self.objects.secret(self.namespace(), name).await, form.optional)?;
        content::of_secret(object.as_ref(), form)
    }

    /// All sources, a later one over those before it. The error names every source that failed.
    async fn projected(&self, volume: &str, source: &ProjectedVolumeSource) -> Result<Resolved, VolumeError> {
        let default_mode = stated(source.default_mode)?;
        if self.objects.is_standalone() {
            return Err(VolumeError::NoClient { volume: volume.to_owned() });
        }
        let sources: Vec<_> = source.sources.iter().flatten().enumerate().collect();
        let (mut all, mut failed) = (Resolved::default(), Vec::new());
        for some in sources.chunks(MOST_AT_ONCE) {
            let resolving = some.iter().map(|&(index, source)| self.projection((volume, index), source, default_mode));
            for part in futures_util::future::join_all(resolving).await {
                match part {
                    Ok(part) => {
                        all.payload.merge(part.payload)?;
                        all.refresh_at = all.refresh_at.into_iter().chain(part.refresh_at).min();
                    }
                    Err(error) => failed.push(error),
                }
            }
        }
        VolumeError::all_of(failed).map_or(Ok(all), Err)
    }

    /// The content of one source; `place`: its volume and its position in it.
    async fn projection(
        &self,
        place: (&str, usize),
        source: &VolumeProjection,
        default_mode: u32,
    ) -> Result<Resolved, VolumeError> {
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
            self.downward.files(items, default_mode)?
        } else if let Some(source) = &source.service_account_token {
            return self.token(source, default_mode).await;
        } else if let Some(source) = &source.cluster_trust_bundle {
            self.trust_bundle(source, default_mode).await?
        } else if let Some(source) = &source.pod_certificate {
            return self.certificate(place, source, default_mode).await;
        } else {
            // The API permits a source without a type. It has no files.
            Payload::default()
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
        payload.put(&source.path, self.credential(token.text.expose_secret(), default_mode))?;
        Ok(Resolved { payload, refresh_at: token.refresh_at })
    }

    async fn trust_bundle(
        &self,
        source: &ClusterTrustBundleProjection,
        default_mode: u32,
    ) -> Result<Payload, VolumeError> {
        let anchors = self.objects.trust_anchors(source).await?;
        let mut payload = Payload::default();
        payload.put(&source.path, self.credential(&anchors, default_mode))?;
        Ok(payload)
    }

    /// The certificate and its key, in one file, or in one each, or in all.
    async fn certificate(
        &self,
        (volume, index): (&str, usize),
        source: &PodCertificateProjection,
        default_mode: u32,
    ) -> Result<Resolved, VolumeError> {
        let uid = self.pod.metadata.uid.as_deref().unwrap_or_default();
        let key = CertificateKey { pod: uid.into(), volume: volume.to_owned(), source: index };
        let notify = |kind: EventType, reason: &str, message: &str| {
            if let Some(recorder) = self.recorder {
                recorder.pod_event(self.pod, "", kind, reason, message);
            }
        };
        let made = self.objects.pod_certificate(self.pod, &key, source, &notify).await?;
        let (key, chain) = (made.key.expose_secret(), made.chain.as_str());
        let mut payload = Payload::default();
        for (path, text) in [
            (&source.credential_bundle_path, format!("{key}{chain}")),
            (&source.key_path, key.to_owned()),
            (&source.certificate_chain_path, chain.to_owned()),
        ] {
            if let Some(path) = path.as_deref().filter(|path| !path.is_empty()) {
                payload.put(path, self.credential(&text, default_mode))?;
            }
        }
        Ok(Resolved { payload, refresh_at: made.refresh_at })
    }

    /// A file that belongs to the user of the pod.
    fn credential(&self, text: &str, default_mode: u32) -> File {
        let (mode, owner) = (self.owners.credential_mode(default_mode), self.owners.user);
        File { data: Bytes::copy_from_slice(text.as_bytes()), mode, owner }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_optional_object_may_have_an_invalid_name() {
        let named = || Err::<(), _>(ObjectError::BadName { kind: "secret", name: "A_b".to_owned() });
        assert_eq!(found(named(), true).expect("nothing"), None);
        let error = found(named(), false).expect_err("it cannot exist").to_string();
        assert_eq!(error, "secret \"A_b\" cannot exist: the name is not a DNS subdomain");
    }

    /// Else a container would start without the content that it has elsewhere.
    #[test]
    fn an_optional_object_that_cannot_be_read_is_not_an_absent_one() {
        let missing = ObjectError::NotFound { kind: "secret", name: "s".to_owned() };
        assert_eq!(found(Err::<(), _>(missing.clone()), true).expect("nothing"), None);
        found(Err::<(), _>(missing), false).expect_err("it is needed");
        let not_synced = ObjectError::NotSynced { kind: "secret", cause: "timed out".to_owned() };
        for error in [ObjectError::Api("forbidden".to_owned()), not_synced] {
            found(Err::<(), _>(error.clone()), true).expect_err(&error.to_string());
        }
    }
}
