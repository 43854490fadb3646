//! Defaults inside a volume.

use k8s_openapi::api::core::v1::DownwardAPIVolumeFile;
use k8s_openapi::api::core::v1::EmptyDirVolumeSource;
use k8s_openapi::api::core::v1::Volume;
use k8s_openapi::api::core::v1::VolumeProjection;

use super::pull_policy;
use super::text;

/// Mode of files from the API: `rw-r--r--`.
const FILE_MODE: i32 = 0o644;
/// Life of a projected service account token, in seconds.
const TOKEN_SECONDS: i64 = 3600;

pub(super) fn apply(volume: &mut Volume) {
    let bare = Volume { name: volume.name.clone(), ..Volume::default() };
    if *volume == bare {
        volume.empty_dir = Some(EmptyDirVolumeSource::default());
    }
    if let Some(host_path) = &mut volume.host_path {
        host_path.type_.get_or_insert_default();
    }
    if let Some(secret) = &mut volume.secret {
        secret.default_mode.get_or_insert(FILE_MODE);
    }
    if let Some(config_map) = &mut volume.config_map {
        config_map.default_mode.get_or_insert(FILE_MODE);
    }
    if let Some(downward) = &mut volume.downward_api {
        downward.default_mode.get_or_insert(FILE_MODE);
        downward.items.iter_mut().flatten().for_each(downward_file);
    }
    if let Some(projected) = &mut volume.projected {
        projected.default_mode.get_or_insert(FILE_MODE);
        projected.sources.iter_mut().flatten().for_each(projection);
    }
    if let Some(image) = &mut volume.image {
        let policy = pull_policy(image.reference.as_deref().unwrap_or_default());
        text(&mut image.pull_policy, policy);
    }
    remote(volume);
}

fn projection(projection: &mut VolumeProjection) {
    if let Some(token) = &mut projection.service_account_token {
        token.expiration_seconds.get_or_insert(TOKEN_SECONDS);
    }
    if let Some(downward) = &mut projection.downward_api {
        downward.items.iter_mut().flatten().for_each(downward_file);
    }
}

fn downward_file(file: &mut DownwardAPIVolumeFile) {
    if let Some(field) = &mut file.field_ref {
        text(&mut field.api_version, "v1");
    }
}

fn remote(volume: &mut Volume) {
    if let Some(iscsi) = &mut volume.iscsi {
        text(&mut iscsi.iscsi_interface, "default");
    }
    if let Some(rbd) = &mut volume.rbd {
        text(&mut rbd.pool, "rbd");
        text(&mut rbd.user, "admin");
        text(&mut rbd.keyring, "/etc/ceph/keyring");
    }
    if let Some(disk) = &mut volume.azure_disk {
        text(&mut disk.caching_mode, "ReadWrite");
        text(&mut disk.kind, "Shared");
        text(&mut disk.fs_type, "ext4");
        disk.read_only.get_or_insert(false);
    }
    if let Some(scale_io) = &mut volume.scale_io {
        text(&mut scale_io.storage_mode, "ThinProvisioned");
        text(&mut scale_io.fs_type, "xfs");
    }
    if let Some(spec) = volume.ephemeral.as_mut().and_then(|e| e.volume_claim_template.as_mut()).map(|t| &mut t.spec) {
        text(&mut spec.volume_mode, "Filesystem");
    }
}
