//! CRI security contexts of sandboxes and containers. Pure.

use std::path::Component;
use std::path::Path;

use k8s_openapi::api::core::v1::AppArmorProfile;
use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodSecurityContext;
use k8s_openapi::api::core::v1::PodSpec;
use k8s_openapi::api::core::v1::SELinuxOptions;
use k8s_openapi::api::core::v1::SeccompProfile;
use keblet_proto::cri::v1 as cri;
use keblet_proto::cri::v1::security_profile::ProfileType;

use super::ContainerSpec;
use super::GenerateError;
use super::ImageUser;
use super::SecuritySettings;
use super::names;
use crate::model::ContainerId;
use crate::model::spec::APP_ARMOR_ANNOTATION;

/// What every kubelet masks in a container's /proc and /sys.
pub const MASKED_PATHS: [&str; 12] = [
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];
/// What every kubelet makes read-only in a container's /proc.
pub const READONLY_PATHS: [&str; 5] = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// `LinuxContainerConfig.security_context`. `target` is the instance that an ephemeral container targets, `users` the pod's
/// user namespace.
///
/// # Errors
/// The image or the spec violates `runAsNonRoot`; a localhost seccomp profile has no path, or one that leaves the seccomp
/// directory; a localhost AppArmor profile has no name; the type of a profile or the policy of groups is unknown.
#[expect(deprecated, reason = "older runtimes read only the string form of the AppArmor profile")]
pub fn container_security(
    pod: &Pod,
    spec: &ContainerSpec<'_>,
    user: &ImageUser,
    target: Option<&ContainerId>,
    users: &cri::UserNamespace,
    settings: &SecuritySettings,
) -> Result<cri::LinuxContainerSecurityContext, GenerateError> {
    let container = spec.container.as_ref();
    let own = container.security_context.clone().unwrap_or_default();
    let of_pod = pod_context(pod);
    let run_as_user = own.run_as_user.or(of_pod.and_then(|sc| sc.run_as_user));
    let non_root = own.run_as_non_root.or(of_pod.and_then(|sc| sc.run_as_non_root)).unwrap_or(false);
    if non_root {
        verify_non_root(pod, container, run_as_user, user)?;
    }
    let apparmor = apparmor(pod, container)?;
    let unmasked = own.proc_mount.as_deref() == Some("Unmasked");
    let mut out = cri::LinuxContainerSecurityContext {
        capabilities: own.capabilities.map(|list| cri::Capability {
            add_capabilities: list.add.unwrap_or_default(),
            drop_capabilities: list.drop.unwrap_or_default(),
            ..Default::default()
        }),
        privileged: own.privileged.unwrap_or(false),
        namespace_options: Some(namespaces(pod, target, users)),
        selinux_options: selinux(own.se_linux_options.as_ref().or(of_pod.and_then(|sc| sc.se_linux_options.as_ref()))),
        run_as_group: own.run_as_group.or(of_pod.and_then(|sc| sc.run_as_group)).map(int64),
        readonly_rootfs: own.read_only_root_filesystem.unwrap_or(false),
        supplemental_groups: supplemental_groups(of_pod),
        apparmor_profile: apparmor.as_ref().map(legacy_apparmor).unwrap_or_default(),
        no_new_privs: own.allow_privilege_escalation == Some(false),
        masked_paths: if unmasked { Vec::new() } else { masked_paths(settings) },
        readonly_paths: if unmasked { Vec::new() } else { READONLY_PATHS.map(str::to_owned).to_vec() },
        seccomp: Some(seccomp(pod, container, settings)?),
        apparmor,
        supplemental_groups_policy: groups_policy(of_pod)?,
        ..Default::default()
    };
    match (run_as_user, user) {
        (Some(uid), _) => out.run_as_user = Some(int64(uid)),
        (None, ImageUser::Id(uid)) => out.run_as_user = Some(int64(*uid)),
        (None, ImageUser::Name(name)) => out.run_as_username.clone_from(name),
    }
    Ok(out)
}

/// `LinuxPodSandboxConfig.security_context`. `users` is the pod's user namespace.
///
/// # Errors
/// The policy of groups is unknown.
pub fn sandbox_security(
    pod: &Pod,
    users: &cri::UserNamespace,
) -> Result<cri::LinuxSandboxSecurityContext, GenerateError> {
    let context = pod_context(pod);
    Ok(cri::LinuxSandboxSecurityContext {
        namespace_options: Some(namespaces(pod, None, users)),
        selinux_options: selinux(context.and_then(|sc| sc.se_linux_options.as_ref())),
        run_as_user: context.and_then(|sc| sc.run_as_user).map(int64),
        run_as_group: context.and_then(|sc| sc.run_as_group).map(int64),
        supplemental_groups: supplemental_groups(context),
        privileged: any_privileged(pod),
        seccomp: Some(profile(ProfileType::RuntimeDefault, String::new())),
        supplemental_groups_policy: groups_policy(context)?,
        ..Default::default()
    })
}

fn pod_context(pod: &Pod) -> Option<&PodSecurityContext> {
    pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref())
}

fn int64(value: i64) -> cri::Int64Value {
    cri::Int64Value { value }
}

fn verify_non_root(
    pod: &Pod,
    container: &Container,
    run_as_user: Option<i64>,
    user: &ImageUser,
) -> Result<(), GenerateError> {
    let problem = match (run_as_user, user) {
        (Some(0), _) => "container's runAsUser breaks non-root policy".to_owned(),
        (Some(_), _) => return Ok(()),
        (None, ImageUser::Id(0)) => "container has runAsNonRoot and image will run as root".to_owned(),
        (None, ImageUser::Id(uid)) if !(0..=i64::from(i32::MAX)).contains(uid) => {
            let highest = i32::MAX;
            format!(
                "container has runAsNonRoot and image has an invalid user id ({uid}). (Must be 1-({highest})): must be \
                 between 0 and {highest}, inclusive"
            )
        }
        (None, ImageUser::Id(_)) => return Ok(()),
        (None, ImageUser::Name(name)) => {
            format!(
                "container has runAsNonRoot and image has non-numeric user ({name}), cannot verify user is non-root"
            )
        }
    };
    Err(GenerateError::NonRoot { problem, pod: names::describe(pod), container: container.name.clone() })
}

fn supplemental_groups(context: Option<&PodSecurityContext>) -> Vec<i64> {
    let Some(context) = context else { return Vec::new() };
    context.fs_group.into_iter().chain(context.supplemental_groups.iter().flatten().copied()).collect()
}

fn groups_policy(context: Option<&PodSecurityContext>) -> Result<i32, GenerateError> {
    let policy = match context.and_then(|sc| sc.supplemental_groups_policy.as_deref()) {
        None | Some("Merge") => cri::SupplementalGroupsPolicy::Merge,
        Some("Strict") => cri::SupplementalGroupsPolicy::Strict,
        Some(policy) => return Err(GenerateError::GroupsPolicy { policy: policy.to_owned() }),
    };
    Ok(policy as i32)
}

fn selinux(options: Option<&SELinuxOptions>) -> Option<cri::SeLinuxOption> {
    options.map(|options| cri::SeLinuxOption {
        user: options.user.clone().unwrap_or_default(),
        role: options.role.clone().unwrap_or_default(),
        r#type: options.type_.clone().unwrap_or_default(),
        level: options.level.clone().unwrap_or_default(),
    })
}

fn masked_paths(settings: &SecuritySettings) -> Vec<String> {
    MASKED_PATHS.iter().map(|path| (*path).to_owned()).chain(settings.thermal_throttle.iter().cloned()).collect()
}

fn any_privileged(pod: &Pod) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let privileged = |sc: &Option<k8s_openapi::api::core::v1::SecurityContext>| {
        sc.as_ref().and_then(|sc| sc.privileged).unwrap_or(false)
    };
    spec.init_containers.iter().flatten().chain(&spec.containers).any(|c| privileged(&c.security_context))
        || spec.ephemeral_containers.iter().flatten().any(|c| privileged(&c.security_context))
}

/// Namespace modes of the pod; `users` is its user namespace. With `target`, the container joins that instance's PID namespace unless the pod shares one.
pub fn namespaces(pod: &Pod, target: Option<&ContainerId>, users: &cri::UserNamespace) -> cri::NamespaceOption {
    let spec = pod.spec.as_ref();
    let flag = |field: fn(&PodSpec) -> Option<bool>| spec.and_then(field).unwrap_or(false);
    let shared = |host: bool| if host { cri::NamespaceMode::Node } else { cri::NamespaceMode::Pod };
    let pid = if flag(|spec| spec.host_pid) {
        cri::NamespaceMode::Node
    } else if flag(|spec| spec.share_process_namespace) {
        cri::NamespaceMode::Pod
    } else if target.is_some() {
        cri::NamespaceMode::Target
    } else {
        cri::NamespaceMode::Container
    };
    cri::NamespaceOption {
        network: shared(flag(|spec| spec.host_network)) as i32,
        pid: pid as i32,
        ipc: shared(flag(|spec| spec.host_ipc)) as i32,
        target_id: target
            .filter(|_| pid == cri::NamespaceMode::Target)
            .map(|id| id.as_str().to_owned())
            .unwrap_or_default(),
        userns_options: Some(users.clone()),
    }
}

fn profile(kind: ProfileType, localhost_ref: String) -> cri::SecurityProfile {
    cri::SecurityProfile { profile_type: kind as i32, localhost_ref }
}

/// The container's profile, else the pod's, else the node's default.
fn seccomp(
    pod: &Pod,
    container: &Container,
    settings: &SecuritySettings,
) -> Result<cri::SecurityProfile, GenerateError> {
    let of_pod = pod_context(pod).and_then(|sc| sc.seccomp_profile.as_ref());
    let stated = container.security_context.as_ref().and_then(|sc| sc.seccomp_profile.as_ref()).or(of_pod);
    match stated {
        Some(stated) => stated_seccomp(stated, &container.name, settings),
        None if settings.seccomp_default => Ok(profile(ProfileType::RuntimeDefault, String::new())),
        None => Ok(profile(ProfileType::Unconfined, String::new())),
    }
}

fn stated_seccomp(
    stated: &SeccompProfile,
    container: &str,
    settings: &SecuritySettings,
) -> Result<cri::SecurityProfile, GenerateError> {
    match stated.type_.as_str() {
        "RuntimeDefault" => Ok(profile(ProfileType::RuntimeDefault, String::new())),
        "Localhost" => match stated.localhost_profile.as_deref().filter(|path| !path.is_empty()) {
            Some(path) if stays_below(path) => {
                Ok(profile(ProfileType::Localhost, settings.seccomp_root.join(path).to_string_lossy().into_owned()))
            }
            Some(path) => {
                Err(GenerateError::SeccompPathEscapes { container: container.to_owned(), path: path.to_owned() })
            }
            None => Err(GenerateError::SeccompPath { container: container.to_owned() }),
        },
        "Unconfined" => Ok(profile(ProfileType::Unconfined, String::new())),
        // Upstream runs such a container without a profile.
        kind => Err(GenerateError::SeccompType { kind: kind.to_owned() }),
    }
}

/// True if the path joined to a directory stays below that directory. Static pods are not validated by an API server.
fn stays_below(path: &str) -> bool {
    Path::new(path).components().all(|component| matches!(component, Component::Normal(_) | Component::CurDir))
}

/// The container's field, else the legacy annotation, else the pod's field.
fn apparmor(pod: &Pod, container: &Container) -> Result<Option<cri::SecurityProfile>, GenerateError> {
    if let Some(stated) = container.security_context.as_ref().and_then(|sc| sc.app_armor_profile.as_ref()) {
        return stated_apparmor(stated).map(Some);
    }
    let annotations = pod.metadata.annotations.as_ref();
    let annotation = annotations.and_then(|map| map.get(&format!("{APP_ARMOR_ANNOTATION}{}", container.name)));
    match annotation.map(String::as_str) {
        Some("runtime/default") => return Ok(Some(profile(ProfileType::RuntimeDefault, String::new()))),
        Some("unconfined") => return Ok(Some(profile(ProfileType::Unconfined, String::new()))),
        Some(text) => {
            if let Some(name) = text.strip_prefix("localhost/") {
                return Ok(Some(profile(ProfileType::Localhost, name.to_owned())));
            }
        }
        None => {}
    }
    pod_context(pod).and_then(|sc| sc.app_armor_profile.as_ref()).map(stated_apparmor).transpose()
}

fn stated_apparmor(stated: &AppArmorProfile) -> Result<cri::SecurityProfile, GenerateError> {
    match stated.type_.as_str() {
        "RuntimeDefault" => Ok(profile(ProfileType::RuntimeDefault, String::new())),
        "Unconfined" => Ok(profile(ProfileType::Unconfined, String::new())),
        "Localhost" => {
            let name = stated.localhost_profile.clone().ok_or(GenerateError::AppArmorName)?;
            Ok(profile(ProfileType::Localhost, name))
        }
        kind => Err(GenerateError::AppArmorType { kind: kind.to_owned() }),
    }
}

/// The string form of the profile that older runtimes read.
fn legacy_apparmor(profile: &cri::SecurityProfile) -> String {
    match profile.profile_type() {
        ProfileType::RuntimeDefault => "runtime/default".to_owned(),
        ProfileType::Unconfined => "unconfined".to_owned(),
        ProfileType::Localhost => format!("localhost/{}", profile.localhost_ref),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use serde_json::json;

    use super::*;
    use crate::workers::generate::user_namespace;

    /// A pod with these fields of its spec.
    fn pod(spec: Value) -> Pod {
        let metadata = json!({"name": "p", "namespace": "ns", "uid": "u"});
        serde_json::from_value(json!({"metadata": metadata, "spec": spec})).expect("a pod")
    }

    /// A pod and its container `c` with these security contexts.
    fn contexts(of_pod: Value, own: Value) -> Pod {
        pod(json!({"securityContext": of_pod, "containers": [{"name": "c", "securityContext": own}]}))
    }

    /// The context of the container `c`, whose image runs as root.
    fn of_container(pod: &Pod) -> Result<cri::LinuxContainerSecurityContext, GenerateError> {
        let (spec, users) = (ContainerSpec::named(pod, "c").expect("the container"), user_namespace::host());
        container_security(pod, &spec, &ImageUser::Id(0), None, &users, &SecuritySettings::default())
    }

    #[test]
    fn what_a_container_states_counts_before_what_its_pod_states() {
        let of_pod = json!({"runAsUser": 1, "runAsGroup": 2, "seLinuxOptions": {"level": "s0:c1"}});
        let own = json!({"runAsUser": 7, "runAsGroup": 8, "seLinuxOptions": {"level": "s0:c2"}});
        let stated = of_container(&contexts(of_pod, own)).expect("valid");
        let id = |value| Some(cri::Int64Value { value });
        assert_eq!((stated.run_as_user, stated.run_as_group), (id(7), id(8)));
        assert_eq!(stated.selinux_options.expect("a label").level, "s0:c2");
        for (of_pod, own, is_refused) in [
            (json!(true), json!(null), true),
            (json!(true), json!(false), false),
            (json!(false), json!(true), true),
            (json!(null), json!(null), false),
        ] {
            let pod = contexts(json!({"runAsNonRoot": of_pod}), json!({"runAsNonRoot": own}));
            assert_eq!(of_container(&pod).is_err(), is_refused, "{of_pod} {own}");
        }
    }

    #[test]
    fn a_seccomp_profile_is_the_containers_else_the_pods_else_the_nodes() {
        use ProfileType::RuntimeDefault;
        use ProfileType::Unconfined;
        for (own, of_pod, seccomp_default, expected) in [
            (None, None, false, Unconfined),
            (None, None, true, RuntimeDefault),
            (None, Some("RuntimeDefault"), false, RuntimeDefault),
            (None, Some("Unconfined"), true, Unconfined),
            (Some("RuntimeDefault"), Some("Unconfined"), false, RuntimeDefault),
            (Some("Unconfined"), Some("RuntimeDefault"), true, Unconfined),
        ] {
            let context = |kind: Option<&str>| json!({"seccompProfile": kind.map(|kind| json!({"type": kind}))});
            let pod = contexts(context(of_pod), context(own));
            let container = &pod.spec.as_ref().expect("a spec").containers[0];
            let settings = SecuritySettings { seccomp_default, ..SecuritySettings::default() };
            let made = seccomp(&pod, container, &settings).expect("valid");
            assert_eq!(made.profile_type(), expected, "{own:?} {of_pod:?} {seccomp_default}");
        }
    }

    /// Annotations of static pods are not converted to fields.
    #[test]
    fn an_apparmor_profile_is_the_containers_else_that_of_its_annotation_else_the_pods() {
        use ProfileType::Localhost;
        use ProfileType::RuntimeDefault;
        use ProfileType::Unconfined;
        for (own, annotated, of_pod, expected) in [
            (None, None, None, None),
            (None, None, Some("RuntimeDefault"), Some((RuntimeDefault, ""))),
            (None, Some(("c", "unconfined")), Some("RuntimeDefault"), Some((Unconfined, ""))),
            (None, Some(("c", "runtime/default")), Some("Unconfined"), Some((RuntimeDefault, ""))),
            (None, Some(("c", "localhost/web")), Some("Unconfined"), Some((Localhost, "web"))),
            (None, Some(("other", "unconfined")), Some("RuntimeDefault"), Some((RuntimeDefault, ""))),
            (Some("RuntimeDefault"), Some(("c", "unconfined")), Some("Unconfined"), Some((RuntimeDefault, ""))),
        ] {
            let context = |kind: Option<&str>| json!({"appArmorProfile": kind.map(|kind| json!({"type": kind}))});
            let mut pod = contexts(context(of_pod), context(own));
            pod.metadata.annotations = annotated.map(|(container, text)| {
                let key = format!("container.apparmor.security.beta.kubernetes.io/{container}");
                [(key, text.to_owned())].into()
            });
            let found = apparmor(&pod, &pod.spec.as_ref().expect("a spec").containers[0]).expect("valid");
            let found = found.as_ref().map(|found| (found.profile_type(), found.localhost_ref.as_str()));
            assert_eq!(found, expected, "{own:?} {annotated:?} {of_pod:?}");
        }
    }

    #[test]
    fn namespaces_of_the_host_and_of_the_pod_are_asked_for() {
        use cri::NamespaceMode::Container;
        use cri::NamespaceMode::Node;
        use cri::NamespaceMode::Pod as OfPod;
        use cri::NamespaceMode::Target;
        // Network, IPC, PID, and PID of an ephemeral container with a target.
        for (spec, expected) in [
            (json!({}), [OfPod, OfPod, Container, Target]),
            (json!({"hostNetwork": true}), [Node, OfPod, Container, Target]),
            (json!({"hostIPC": true}), [OfPod, Node, Container, Target]),
            (json!({"hostPID": true}), [OfPod, OfPod, Node, Node]),
            (json!({"shareProcessNamespace": true}), [OfPod, OfPod, OfPod, OfPod]),
        ] {
            let mut with_containers = spec.clone();
            with_containers["containers"] = json!([]);
            let (pod, users) = (pod(with_containers), user_namespace::host());
            let plain = namespaces(&pod, None, &users);
            let debugging = namespaces(&pod, Some(&"target".into()), &users);
            assert_eq!([plain.network(), plain.ipc(), plain.pid(), debugging.pid()], expected, "{spec}");
            let joined = if expected[3] == Target { "target" } else { "" };
            assert_eq!((plain.target_id.as_str(), debugging.target_id.as_str()), ("", joined), "{spec}");
        }
    }

    #[test]
    fn a_sandbox_is_privileged_for_any_container_of_its_pod() {
        let container = |is_privileged: bool| json!([{"name": "c", "securityContext": {"privileged": is_privileged}}]);
        for (list, is_privileged) in
            [("containers", false), ("containers", true), ("initContainers", true), ("ephemeralContainers", true)]
        {
            let mut spec = json!({"containers": []});
            spec[list] = container(is_privileged);
            let made = sandbox_security(&pod(spec), &user_namespace::host()).expect("valid");
            assert_eq!(made.privileged, is_privileged, "{list}");
        }
    }

    #[test]
    fn what_a_newer_api_may_demand_is_refused() {
        let seccomp = |kind: &str| {
            let stated: SeccompProfile = serde_json::from_value(json!({"type": kind})).expect("a profile");
            let made = stated_seccomp(&stated, "c", &SecuritySettings::default());
            made.map(|made| made.profile_type()).map_err(|error| error.to_string())
        };
        assert_eq!(seccomp("Unconfined"), Ok(ProfileType::Unconfined));
        assert_eq!(seccomp("Traced"), Err(r#"unknown seccomp profile type: "Traced""#.to_owned()));
        let apparmor = |kind: &str| {
            let stated: AppArmorProfile = serde_json::from_value(json!({"type": kind})).expect("a profile");
            stated_apparmor(&stated).map(|made| made.profile_type()).map_err(|error| error.to_string())
        };
        assert_eq!(apparmor("Unconfined"), Ok(ProfileType::Unconfined));
        assert_eq!(apparmor("Traced"), Err(r#"unknown apparmor profile type: "Traced""#.to_owned()));
        assert_eq!(apparmor("Localhost"), Err("missing localhost apparmor profile name".to_owned()));
        let policy = |policy: Option<&str>| {
            let policy = policy.map(str::to_owned);
            let context = PodSecurityContext { supplemental_groups_policy: policy, ..PodSecurityContext::default() };
            groups_policy(Some(&context)).map_err(|error| error.to_string())
        };
        assert_eq!(policy(None), Ok(cri::SupplementalGroupsPolicy::Merge as i32));
        assert_eq!(policy(Some("None")), Err("unsupported supplementalGroupsPolicy: None".to_owned()));
    }
}
