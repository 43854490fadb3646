//! Security contexts, host namespaces and sysctls.

use std::collections::HashSet;

use k8s_openapi::api::core::v1::AppArmorProfile;
use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::PodSecurityContext;
use k8s_openapi::api::core::v1::PodSpec;
use k8s_openapi::api::core::v1::SeccompProfile;
use k8s_openapi::api::core::v1::SecurityContext;
use k8s_openapi::api::core::v1::Sysctl;

use super::super::field::Findings;
use super::super::field::Path;
use super::formats;
use crate::model::SysctlNamespace;
use crate::model::spec::dotted_sysctl;

const PROFILE_TYPES: [&str; 3] = ["Localhost", "RuntimeDefault", "Unconfined"];

/// What the pod shares with the host, and its security context.
pub(super) fn check_pod(spec: &PodSpec, path: &Path, findings: &mut Findings) {
    let host_pid = spec.host_pid == Some(true);
    if spec.share_process_namespace == Some(true) && host_pid {
        let message = "ShareProcessNamespace and HostPID cannot both be enabled";
        findings.invalid(&path.child("shareProcessNamespace"), &true, message);
    }
    if spec.host_users == Some(false) {
        let shared = [
            ("hostNetwork", spec.host_network == Some(true)),
            ("hostPID", host_pid),
            ("hostIPC", spec.host_ipc == Some(true)),
        ];
        for (field, _) in shared.into_iter().filter(|(_, set)| *set) {
            findings.forbidden(&path.child(field), "when `hostUsers` is false");
        }
        for (path, container) in containers(spec, path) {
            if container.volume_devices.as_ref().is_some_and(|devices| !devices.is_empty()) {
                findings.forbidden(&path.child("volumeDevices"), "when `hostUsers` is false");
            }
        }
    }
    if spec.os.as_ref().is_some_and(|os| os.name == "linux") {
        let of_pod = spec.security_context.as_ref().is_some_and(|context| context.windows_options.is_some());
        let of_containers = containers(spec, path).filter(|(_, container)| {
            container.security_context.as_ref().is_some_and(|context| context.windows_options.is_some())
        });
        for path in of_pod.then(|| path.clone()).into_iter().chain(of_containers.map(|(path, _)| path)) {
            let path = path.child("securityContext").child("windowsOptions");
            findings.forbidden(&path, "windows options cannot be set for a linux pod");
        }
    }
    if let Some(context) = &spec.security_context {
        let path = path.child("securityContext");
        pod_context(context, &path, findings);
        sysctls(context.sysctls.as_deref().unwrap_or_default(), spec, &path.child("sysctls"), findings);
    }
}

/// Init containers and containers, with their paths.
fn containers<'a>(spec: &'a PodSpec, path: &Path) -> impl Iterator<Item = (Path, &'a Container)> {
    let init = spec.init_containers.as_deref().unwrap_or_default();
    let lists = [(path.child("initContainers"), init), (path.child("containers"), &*spec.containers)];
    lists.into_iter().flat_map(|(path, list)| list.iter().enumerate().map(move |(i, one)| (path.index(i), one)))
}

fn pod_context(context: &PodSecurityContext, path: &Path, findings: &mut Findings) {
    for (field, id) in
        [("fsGroup", context.fs_group), ("runAsGroup", context.run_as_group), ("runAsUser", context.run_as_user)]
    {
        user_or_group(id, &path.child(field), findings);
    }
    for (i, group) in context.supplemental_groups.iter().flatten().enumerate() {
        user_or_group(Some(*group), &path.child("supplementalGroups").index(i), findings);
    }
    let choices: [(&str, &Option<String>, &[&str]); 3] = [
        ("fsGroupChangePolicy", &context.fs_group_change_policy, &["Always", "OnRootMismatch"]),
        ("supplementalGroupsPolicy", &context.supplemental_groups_policy, &["Merge", "Strict"]),
        // As upstream while feature gate SELinuxMount is off; this agent lacks the feature.
        ("seLinuxChangePolicy", &context.se_linux_change_policy, &["Recursive"]),
    ];
    for (field, value, supported) in choices {
        if let Some(value) = value {
            findings.one_of(&path.child(field), value, supported);
        }
    }
    profiles(context.seccomp_profile.as_ref(), context.app_armor_profile.as_ref(), path, findings);
}

/// The security context of one container. `host_users` is the pod's.
pub(super) fn check_container(
    context: &SecurityContext,
    host_users: Option<bool>,
    path: &Path,
    findings: &mut Findings,
) {
    user_or_group(context.run_as_user, &path.child("runAsUser"), findings);
    user_or_group(context.run_as_group, &path.child("runAsGroup"), findings);
    if let Some(kind) = &context.proc_mount {
        findings.one_of(&path.child("procMount"), kind, &["Default", "Unmasked"]);
        if kind == "Unmasked" && host_users != Some(false) {
            findings.invalid(&path.child("procMount"), kind, "`hostUsers` must be false to use `Unmasked`");
        }
    }
    if context.allow_privilege_escalation == Some(false) {
        if context.privileged == Some(true) {
            let message = "cannot set `allowPrivilegeEscalation` to false and `privileged` to true";
            findings.invalid(path, "", message);
        }
        let added = context.capabilities.iter().flat_map(|c| c.add.iter().flatten());
        if added.clone().any(|cap| cap == "CAP_SYS_ADMIN") {
            let message = "cannot set `allowPrivilegeEscalation` to false and `capabilities.Add` CAP_SYS_ADMIN";
            findings.invalid(path, "", message);
        }
    }
    profiles(context.seccomp_profile.as_ref(), context.app_armor_profile.as_ref(), path, findings);
}

fn user_or_group(id: Option<i64>, path: &Path, findings: &mut Findings) {
    if let Some(id) = id.filter(|id| !(0..=i64::from(i32::MAX)).contains(id)) {
        findings.invalid(path, &id, "must be between 0 and 2147483647, inclusive");
    }
}

fn profiles(
    seccomp: Option<&SeccompProfile>,
    apparmor: Option<&AppArmorProfile>,
    path: &Path,
    findings: &mut Findings,
) {
    if let Some(profile) = seccomp {
        let path = path.child("seccompProfile");
        let file = profile.localhost_profile.as_deref();
        profile_type(&profile.type_, file, "seccomp type", &path, findings);
        super::local_path(file.unwrap_or_default(), &path.child("localhostProfile"), findings);
    }
    if let Some(profile) = apparmor {
        let path = path.child("appArmorProfile");
        let name = profile.localhost_profile.as_deref();
        profile_type(&profile.type_, name, "AppArmor type", &path, findings);
        let name = name.unwrap_or_default();
        if name.trim() != name {
            findings.invalid(&path.child("localhostProfile"), name, "must not be padded with whitespace");
        }
        if name.len() > 4095 {
            findings.too_long(&path.child("localhostProfile"), 4095);
        }
    }
}

fn profile_type(kind: &str, local: Option<&str>, what: &str, path: &Path, findings: &mut Findings) {
    let local_path = path.child("localhostProfile");
    match (kind, local) {
        ("", _) => findings.required(&path.child("type"), "type is required when profile is set"),
        ("Localhost", None | Some("")) => {
            findings.required(&local_path, &format!("must be set when {what} is Localhost"));
        }
        ("Localhost", Some(_)) => {}
        (_, Some(set)) if PROFILE_TYPES.contains(&kind) => {
            findings.invalid(&local_path, set, &format!("can only be set when {what} is Localhost"));
        }
        _ => findings.one_of(&path.child("type"), kind, &PROFILE_TYPES),
    }
}

fn sysctls(sysctls: &[Sysctl], spec: &PodSpec, path: &Path, findings: &mut Findings) {
    let mut seen = HashSet::new();
    for (i, sysctl) in sysctls.iter().enumerate() {
        let path = path.index(i).child("name");
        if sysctl.name.is_empty() {
            findings.required(&path, "");
        } else if !formats::sysctl(&sysctl.name) {
            let message = "must have at most 253 characters and match regex \
                           ^([a-z0-9]([-_a-z0-9]*[a-z0-9])?[\\./])*[a-z0-9]([-_a-z0-9]*[a-z0-9])?$";
            findings.invalid(&path, &sysctl.name, message);
        } else if !seen.insert(sysctl.name.replace('/', ".")) {
            findings.duplicate(&path, &sysctl.name);
        }
        let namespace = SysctlNamespace::of(&dotted_sysctl(&sysctl.name));
        if spec.host_network == Some(true) && namespace == Some(SysctlNamespace::Net) {
            findings.invalid(&path, &sysctl.name, "may not be specified when 'hostNetwork' is true");
        }
        if spec.host_ipc == Some(true) && namespace == Some(SysctlNamespace::Ipc) {
            findings.invalid(&path, &sysctl.name, "may not be specified when 'hostIPC' is true");
        }
    }
}
