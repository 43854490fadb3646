//! Volumes: names, one source each, and the sources a node serves by itself.

use std::collections::HashMap;
use std::collections::HashSet;

use k8s_openapi::api::core::v1::DownwardAPIVolumeFile;
use k8s_openapi::api::core::v1::FCVolumeSource;
use k8s_openapi::api::core::v1::HostPathVolumeSource;
use k8s_openapi::api::core::v1::ISCSIVolumeSource;
use k8s_openapi::api::core::v1::KeyToPath;
use k8s_openapi::api::core::v1::NFSVolumeSource;
use k8s_openapi::api::core::v1::ProjectedVolumeSource;
use k8s_openapi::api::core::v1::Volume;

use super::super::field::Findings;
use super::super::field::Path;
use super::env;
use super::formats;
use super::resources::QUANTITY_FORM;
use super::spec::first_of_its_name;
use super::text;
use crate::model::Amount;
use crate::model::fc;
use crate::model::iscsi;

/// What containers may use a volume for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum VolumeKind {
    /// Could be a block device.
    Claim,
    /// May have files of variables.
    EmptyDir,
    /// Any other.
    Other,
}

const HOST_PATH_TYPES: [&str; 8] =
    ["", "BlockDevice", "CharDevice", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket"];
/// Of the name of an interface of the iSCSI initiator.
const MAX_INTERFACE: usize = 64;
const MIN_TOKEN_SECONDS: i64 = 600;
const MAX_TOKEN_SECONDS: i64 = 1 << 32;
const DOWNWARD_FIELDS: [&str; 5] =
    ["metadata.annotations", "metadata.labels", "metadata.name", "metadata.namespace", "metadata.uid"];

/// Checks all volumes; what is left are those with a usable name.
pub(super) fn check_all<'a>(
    volumes: &'a [Volume],
    path: &Path,
    findings: &mut Findings,
) -> HashMap<&'a str, VolumeKind> {
    let mut seen = HashSet::new();
    let mut usable = HashMap::new();
    for (i, volume) in volumes.iter().enumerate() {
        let path = path.index(i);
        if volume.name.is_empty() {
            findings.required(&path.child("name"), "");
        } else {
            let problems = formats::dns_label(&volume.name);
            let good = problems.is_empty();
            findings.invalid_each(&path.child("name"), &volume.name, problems);
            if good && first_of_its_name(&volume.name, &mut seen, &path.child("name"), findings) {
                usable.insert(volume.name.as_str(), kind(volume));
            }
        }
        one_source(volume, &path, findings);
        source(volume, &path, findings);
    }
    usable
}

fn kind(volume: &Volume) -> VolumeKind {
    if volume.persistent_volume_claim.is_some() || volume.ephemeral.is_some() {
        VolumeKind::Claim
    } else if volume.empty_dir.is_some() {
        VolumeKind::EmptyDir
    } else {
        VolumeKind::Other
    }
}

/// The JSON form of a volume is its name and one field per source.
fn one_source(volume: &Volume, path: &Path, findings: &mut Findings) {
    let value = serde_json::to_value(volume).unwrap_or_default();
    let mut sources = value.as_object().into_iter().flat_map(|o| o.keys()).filter(|&k| k != "name");
    if sources.next().is_none() {
        findings.required(path, "must specify a volume type");
    }
    for extra in sources {
        findings.forbidden(&path.child(extra), "may not specify more than 1 volume type");
    }
}

/// The fields of the volume's source.
fn source(volume: &Volume, path: &Path, findings: &mut Findings) {
    if let Some(host_path) = &volume.host_path {
        check_host_path(host_path, &path.child("hostPath"), findings);
    }
    if let Some(limit) = volume.empty_dir.as_ref().and_then(|e| e.size_limit.as_ref()) {
        check_size_limit(&limit.0, &path.child("emptyDir").child("sizeLimit"), findings);
    }
    object_source(volume, path, findings);
    if let Some(image) = &volume.image {
        let path = path.child("image");
        if text(&image.reference).is_empty() {
            findings.required(&path.child("reference"), "");
        }
        findings.one_of(&path.child("pullPolicy"), text(&image.pull_policy), &["Always", "IfNotPresent", "Never"]);
    }
    if let Some(nfs) = &volume.nfs {
        check_nfs(nfs, &path.child("nfs"), findings);
    }
    if let Some(source) = &volume.iscsi {
        check_iscsi(source, &path.child("iscsi"), findings);
        // The name of the interface that is made for the initiator.
        if source.initiator_name.is_some() && volume.name.len() + 1 + source.target_portal.len() > MAX_INTERFACE {
            let message = "Total length of <volume name>:<iscsi.targetPortal> must be under 64 characters if \
                           iscsi.initiatorName is specified.";
            findings.invalid(&path.child("name"), &volume.name, message);
        }
    }
    if let Some(source) = &volume.fc {
        check_fc(source, &path.child("fc"), findings);
    }
    if volume.persistent_volume_claim.as_ref().is_some_and(|claim| claim.claim_name.is_empty()) {
        findings.required(&path.child("persistentVolumeClaim").child("claimName"), "");
    }
}

/// Sources whose files come from API objects.
fn object_source(volume: &Volume, path: &Path, findings: &mut Findings) {
    if let Some(secret) = &volume.secret {
        let path = path.child("secret");
        if text(&secret.secret_name).is_empty() {
            findings.required(&path.child("secretName"), "");
        }
        files(secret.default_mode, secret.items.as_deref(), &path, findings);
    }
    if let Some(map) = &volume.config_map {
        let path = path.child("configMap");
        if map.name.is_empty() {
            findings.required(&path.child("name"), "");
        }
        files(map.default_mode, map.items.as_deref(), &path, findings);
    }
    if let Some(downward) = &volume.downward_api {
        let path = path.child("downwardAPI");
        mode(downward.default_mode, &path.child("defaultMode"), findings);
        for (i, file) in downward.items.iter().flatten().enumerate() {
            downward_file(file, &path.child("items").index(i), findings);
        }
    }
    if let Some(projected) = &volume.projected {
        check_projected(projected, &path.child("projected"), findings);
    }
}

fn check_size_limit(limit: &str, path: &Path, findings: &mut Findings) {
    match limit.parse::<Amount>() {
        Ok(amount) if !amount.is_negative() => {}
        Ok(_) => findings.forbidden(path, "SizeLimit field must be a valid resource quantity"),
        Err(_) => findings.invalid(path, limit, QUANTITY_FORM),
    }
}

fn check_nfs(nfs: &NFSVolumeSource, path: &Path, findings: &mut Findings) {
    if nfs.server.is_empty() {
        findings.required(&path.child("server"), "");
    }
    if nfs.path.is_empty() {
        findings.required(&path.child("path"), "");
    } else if !nfs.path.starts_with('/') {
        findings.invalid(&path.child("path"), &nfs.path, "must be an absolute path");
    }
}

fn check_host_path(host_path: &HostPathVolumeSource, path: &Path, findings: &mut Findings) {
    if host_path.path.is_empty() {
        findings.required(&path.child("path"), "");
    } else {
        super::no_backsteps(&host_path.path, &path.child("path"), findings);
    }
    findings.one_of(&path.child("type"), text(&host_path.type_), &HOST_PATH_TYPES);
}

fn check_iscsi(source: &ISCSIVolumeSource, path: &Path, findings: &mut Findings) {
    let mut check =
        |path: &Path, value: &str, is_required: bool, check: fn(&str) -> Result<(), &'static str>| match check(value) {
            _ if value.is_empty() && !is_required => {}
            Err(_) if value.is_empty() => findings.required(path, ""),
            Err(problem) => findings.invalid(path, value, problem),
            Ok(()) => {}
        };
    let portal = |text: &str| iscsi::portal(text).map(|_| ());
    check(&path.child("targetPortal"), &source.target_portal, true, portal);
    for (i, other) in source.portals.iter().flatten().enumerate() {
        check(&path.child("portals").index(i), other, true, portal);
    }
    check(&path.child("iqn"), &source.iqn, true, iscsi::check_name);
    check(&path.child("initiatorName"), text(&source.initiator_name), false, iscsi::check_name);
    check(&path.child("iscsiInterface"), text(&source.iscsi_interface), false, iscsi::check_interface);
    if let Err(problem) = iscsi::check_lun(source.lun) {
        findings.invalid(&path.child("lun"), &source.lun, problem);
    }
    let has_chap = source.chap_auth_discovery == Some(true) || source.chap_auth_session == Some(true);
    if has_chap && source.secret_ref.is_none() {
        findings.required(&path.child("secretRef"), "");
    }
}

fn check_fc(source: &FCVolumeSource, path: &Path, findings: &mut Findings) {
    let wwns = source.target_wwns.as_deref().unwrap_or_default();
    let wwids = source.wwids.as_deref().unwrap_or_default();
    let targets = path.child("targetWWNs");
    match (wwns, wwids) {
        ([], []) => findings.required(&targets, "must specify either targetWWNs or wwids, but not both"),
        ([_, ..], [_, ..]) => {
            let message = "targetWWNs and wwids can not be specified simultaneously";
            findings.invalid(&targets, &wwns.join(" "), message);
        }
        _ => {}
    }
    type Check = fn(&str) -> Result<(), &'static str>;
    let lists: [(&str, &[String], Check); 2] = [("targetWWNs", wwns, fc::check_wwn), ("wwids", wwids, fc::check_wwid)];
    for (field, list, check) in lists {
        for (i, name) in list.iter().enumerate() {
            if let Err(problem) = check(name) {
                findings.invalid(&path.child(field).index(i), name, problem);
            }
        }
    }
    if wwns.is_empty() {
        return;
    }
    match source.lun.map(|lun| (lun, fc::check_lun(lun))) {
        None => findings.required(&path.child("lun"), "lun is required if targetWWNs is specified"),
        Some((lun, Err(problem))) => findings.invalid(&path.child("lun"), &lun, problem),
        Some((_, Ok(_))) => {}
    }
}

fn mode(mode: Option<i32>, path: &Path, findings: &mut Findings) {
    if let Some(mode) = mode.filter(|m| !(0..=0o777).contains(m)) {
        findings.invalid(path, &mode, "must be a number between 0 and 0777 (octal), both inclusive");
    }
}

fn files(default_mode: Option<i32>, items: Option<&[KeyToPath]>, path: &Path, findings: &mut Findings) {
    mode(default_mode, &path.child("defaultMode"), findings);
    for (i, item) in items.unwrap_or_default().iter().enumerate() {
        let path = path.child("items").index(i);
        if item.key.is_empty() {
            findings.required(&path.child("key"), "");
        }
        file_path(&item.path, &path.child("path"), findings);
        mode(item.mode, &path.child("mode"), findings);
    }
}

/// Where a file appears inside its volume. Names that start with `..` belong to the volume's own bookkeeping.
fn file_path(file: &str, path: &Path, findings: &mut Findings) {
    if file.is_empty() {
        findings.required(path, "");
        return;
    }
    super::local_path(file, path, findings);
    if file.starts_with("..") && !file.split('/').any(|part| part == "..") {
        findings.invalid(path, file, "must not start with '..'");
    }
}

fn downward_file(file: &DownwardAPIVolumeFile, path: &Path, findings: &mut Findings) {
    file_path(&file.path, &path.child("path"), findings);
    match (&file.field_ref, &file.resource_field_ref) {
        (Some(field), None) => env::field_ref(field, &DOWNWARD_FIELDS, &path.child("fieldRef"), findings),
        (None, Some(resource)) => {
            let path = path.child("resourceFieldRef");
            if text(&resource.container_name).is_empty() {
                findings.required(&path.child("containerName"), "");
            }
            env::resource_ref(resource, &path, findings);
        }
        (Some(_), Some(_)) => {
            findings.invalid(path, "resource", "fieldRef and resourceFieldRef can not be specified simultaneously");
        }
        (None, None) => findings.required(path, "one of fieldRef and resourceFieldRef is required"),
    }
    mode(file.mode, &path.child("mode"), findings);
}

fn check_projected(projected: &ProjectedVolumeSource, path: &Path, findings: &mut Findings) {
    mode(projected.default_mode, &path.child("defaultMode"), findings);
    distinct_paths(projected, path, findings);
    for (i, source) in projected.sources.iter().flatten().enumerate() {
        let path = path.child("sources").index(i);
        let value = serde_json::to_value(source).unwrap_or_default();
        // One without a type is valid, and has no files.
        if value.as_object().map_or(0, serde_json::Map::len) > 1 {
            findings.forbidden(&path, "may not specify more than 1 volume type per source");
        }
        if let Some(downward) = &source.downward_api {
            for (j, file) in downward.items.iter().flatten().enumerate() {
                downward_file(file, &path.child("downwardAPI").child("items").index(j), findings);
            }
        }
        let objects = [
            ("configMap", source.config_map.as_ref().map(|map| (&map.name, &map.items))),
            ("secret", source.secret.as_ref().map(|secret| (&secret.name, &secret.items))),
        ];
        for (field, object) in objects {
            let Some((name, items)) = object else { continue };
            let path = path.child(field);
            if name.is_empty() {
                findings.required(&path.child("name"), "");
            }
            files(None, items.as_deref(), &path, findings);
        }
        if let Some(token) = &source.service_account_token {
            let path = path.child("serviceAccountToken");
            file_path(&token.path, &path.child("path"), findings);
            let seconds = token.expiration_seconds.unwrap_or(MIN_TOKEN_SECONDS);
            let path = path.child("expirationSeconds");
            if seconds < MIN_TOKEN_SECONDS {
                findings.invalid(&path, &seconds, "may not specify a duration less than 10 minutes");
            }
            if seconds > MAX_TOKEN_SECONDS {
                findings.invalid(&path, &seconds, "may not specify a duration larger than 2^32 seconds");
            }
        }
    }
}

/// All sources together have each path once. Upstream names the object instead of the path if there is one.
fn distinct_paths(projected: &ProjectedVolumeSource, path: &Path, findings: &mut Findings) {
    let mut seen = HashSet::new();
    let mut add = |file: &str, named: &str| {
        if !file.is_empty() && !seen.insert(file.to_owned()) {
            findings.invalid(path, named, "conflicting duplicate paths");
        }
    };
    for source in projected.sources.iter().flatten() {
        let secret = source.secret.iter().flat_map(|secret| items(&secret.name, secret.items.as_deref()));
        let map = source.config_map.iter().flat_map(|map| items(&map.name, map.items.as_deref()));
        secret.chain(map).for_each(|(file, object)| add(file, object));
        let downward = source.downward_api.iter().flat_map(|downward| downward.items.iter().flatten());
        downward.for_each(|file| add(&file.path, &file.path));
        source.cluster_trust_bundle.iter().for_each(|bundle| add(&bundle.path, &bundle.path));
        if let Some(certificate) = &source.pod_certificate {
            let paths =
                [&certificate.credential_bundle_path, &certificate.key_path, &certificate.certificate_chain_path];
            paths.map(text).into_iter().for_each(|file| add(file, file));
        }
    }
}

/// The paths of an object's items, with its name.
fn items<'a>(object: &'a str, items: Option<&'a [KeyToPath]>) -> impl Iterator<Item = (&'a str, &'a str)> {
    items.unwrap_or_default().iter().map(move |item| (item.path.as_str(), object))
}
