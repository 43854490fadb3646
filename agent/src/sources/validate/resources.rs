//! Resource requests and limits of containers and of the pod as a whole.

use std::collections::BTreeMap;
use std::collections::HashSet;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodResourceClaim;
use k8s_openapi::api::core::v1::PodSpec;
use k8s_openapi::api::core::v1::ResourceClaim;
use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::super::field::Findings;
use super::super::field::Path;
use super::formats;
use super::text;
use crate::model::Amount;
use crate::model::qos;
use crate::model::qos::ResourceKind;
use crate::model::quote::Excerpt;
use crate::model::resources::RESTART_CONTAINER;

type ResourceList = BTreeMap<String, Quantity>;

const CONTAINER_RESOURCES: [&str; 3] = ["cpu", "ephemeral-storage", "memory"];
const POD_RESOURCES: [&str; 2] = ["cpu", "memory"];

/// Prefix of the names of huge pages.
const HUGEPAGES: &str = "hugepages-";

fn huge_pages(name: &str) -> bool {
    name.starts_with(HUGEPAGES)
}

/// Resources of one container, of a pod with these claims.
pub(super) fn check_container(
    requirements: &ResourceRequirements,
    claims_of_pod: &[PodResourceClaim],
    path: &Path,
    findings: &mut Findings,
) {
    for (field, list) in [("limits", &requirements.limits), ("requests", &requirements.requests)] {
        for (name, quantity) in list.iter().flatten() {
            let path = path.child(field).key(name);
            resource_name(name, &path, findings);
            amount(name, quantity, &path, findings);
        }
    }
    requests_within_limits(requirements, path, findings);
    huge_pages_need_others(requirements, path, findings);
    check_claims(requirements.claims.as_deref().unwrap_or_default(), claims_of_pod, &path.child("claims"), findings);
}

fn huge_pages_need_others(requirements: &ResourceRequirements, path: &Path, findings: &mut Findings) {
    let mut names = requirements.limits.iter().chain(&requirements.requests).flat_map(BTreeMap::keys);
    let ordinary = names.clone().any(|n| n == "cpu" || n == "memory");
    if names.any(|n| huge_pages(n)) && !ordinary {
        findings.forbidden(path, "HugePages require cpu or memory");
    }
}

/// Claims of a container: each is one of the pod's, and no part of it is named twice.
fn check_claims(claims: &[ResourceClaim], of_pod: &[PodResourceClaim], path: &Path, findings: &mut Findings) {
    for (i, claim) in claims.iter().enumerate() {
        let path = path.index(i);
        if claim.name.is_empty() {
            findings.required(&path.child("name"), "");
            continue;
        }
        let request = text(&claim.request);
        if !request.is_empty() {
            findings.invalid_each(&path.child("request"), request, formats::dns_label(request));
        }
        let overlaps = |other: &ResourceClaim| {
            let others = text(&other.request);
            other.name == claim.name && (others.is_empty() || request.is_empty() || others == request)
        };
        if claims[..i].iter().any(overlaps) {
            findings.duplicate(&path, &claim.name);
        }
        if !of_pod.iter().any(|known| known.name == claim.name) {
            findings.not_found(&path, &claim.name);
        }
    }
}

/// What a resize of a container's resources demands (KEP-1287).
pub(super) fn resize_policies(container: &Container, spec: &PodSpec, path: &Path, findings: &mut Findings) {
    let mut seen = HashSet::new();
    for (i, policy) in container.resize_policy.iter().flatten().enumerate() {
        let path = path.child("resizePolicy").index(i);
        if !seen.insert(&policy.resource_name) {
            findings.duplicate(&path, &policy.resource_name);
        }
        let fields: [(&str, &str, &[&str]); 2] = [
            ("resourceName", &policy.resource_name, &POD_RESOURCES),
            ("restartPolicy", &policy.restart_policy, &["NotRequired", RESTART_CONTAINER]),
        ];
        for (field, value, supported) in fields {
            if value.is_empty() {
                findings.required(&path.child(field), "");
            } else {
                findings.one_of(&path.child(field), value, supported);
            }
        }
        if text(&spec.restart_policy) == "Never" && policy.restart_policy == RESTART_CONTAINER {
            let message = "must be 'NotRequired' when pod `restartPolicy` is 'Never'";
            findings.invalid(&path.child("restartPolicy"), RESTART_CONTAINER, message);
        }
    }
}

/// Resources of the pod (KEP-2837).
pub(super) fn check_pod(requirements: &ResourceRequirements, path: &Path, findings: &mut Findings) {
    for (field, list) in [("limits", &requirements.limits), ("requests", &requirements.requests)] {
        for (name, quantity) in list.iter().flatten() {
            let path = path.child(field).key(name);
            if !POD_RESOURCES.contains(&name.as_str()) && !huge_pages(name) {
                findings.unsupported(&path, name, &["cpu", "hugepages-*", "memory"]);
            }
            amount(name, quantity, &path, findings);
        }
    }
    requests_within_limits(requirements, path, findings);
    huge_pages_need_others(requirements, path, findings);
    if requirements.claims.as_ref().is_some_and(|claims| !claims.is_empty()) {
        findings.forbidden(&path.child("claims"), "claims may not be set for Resources at pod-level");
    }
}

/// What containers need fits into what is stated for the pod as a whole: their requests and huge pages together, and each
/// limit of a regular container.
pub(super) fn containers_fit(pod: &Pod, path: &Path, findings: &mut Findings) {
    let Some(spec) = &pod.spec else { return };
    let Some(of_pod) = &spec.resources else { return };
    // What cannot be read is reported by other rules.
    let stated = |list: &Option<ResourceList>, name: &str| list.as_ref()?.get(name)?.0.parse::<Amount>().ok();
    for (field, kind, list) in
        [("requests", ResourceKind::Requests, &of_pod.requests), ("limits", ResourceKind::Limits, &of_pod.limits)]
    {
        // Only limits of huge pages may not add up to more than the pod's.
        let is_added_up = |name: &str| kind == ResourceKind::Requests || huge_pages(name);
        let total = qos::containers_total(pod, kind).unwrap_or_default();
        for (name, needed) in total.into_iter().filter(|(name, _)| is_added_up(name)) {
            let Some(most) = stated(list, &name).filter(|most| needed > *most) else { continue };
            let path = path.child("resources").child(field).key(&name);
            let message = format!("must be greater than or equal to aggregate container {field} of {needed}");
            findings.invalid(&path, &most.to_string(), &message);
        }
    }
    for (i, container) in spec.containers.iter().enumerate() {
        let limits = container.resources.iter().flat_map(|own| own.limits.iter().flatten());
        for (name, limit) in limits {
            let own = limit.0.parse::<Amount>().ok();
            let Some((own, most)) = own.zip(stated(&of_pod.limits, name)).filter(|(own, most)| own > most) else {
                continue;
            };
            let path = path.child("containers").index(i).child("resources").child("limits").key(name);
            findings.invalid(&path, &own.to_string(), &format!("must be less than or equal to pod limits of {most}"));
        }
    }
}

/// A bare list, such as the pod's overhead.
pub(super) fn check_list(list: &ResourceList, path: &Path, findings: &mut Findings) {
    for (name, quantity) in list {
        let path = path.key(name);
        resource_name(name, &path, findings);
        amount(name, quantity, &path, findings);
    }
}

fn resource_name(name: &str, path: &Path, findings: &mut Findings) {
    findings.invalid_each(path, name, formats::qualified_name(name));
    if !name.contains('/') && !CONTAINER_RESOURCES.contains(&name) && !huge_pages(name) {
        findings.invalid(path, name, "must be a standard resource type or fully qualified");
        findings.invalid(path, name, "must be a standard resource for containers");
    }
}

/// Upstream's error for a text that is no quantity.
pub(super) const QUANTITY_FORM: &str =
    "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'";

fn amount(name: &str, quantity: &Quantity, path: &Path, findings: &mut Findings) -> Option<Amount> {
    match quantity.0.parse::<Amount>() {
        Err(_) => {
            findings.invalid(path, &quantity.0, QUANTITY_FORM);
            None
        }
        Ok(amount) => {
            if amount.is_negative() {
                findings.invalid(path, &quantity.0, "must be greater than or equal to 0");
            }
            if !CONTAINER_RESOURCES.contains(&name) && !amount.is_whole() {
                findings.invalid(path, &quantity.0, "must be an integer");
            }
            if huge_pages(name) && !is_whole_pages(name, amount) {
                let message = format!("{amount} is not positive integer multiple of {}", Excerpt(name));
                findings.invalid(path, &quantity.0, &message);
            }
            Some(amount)
        }
    }
}

/// Nothing or a number of pages, of the size that the name of the resource ends in.
fn is_whole_pages(name: &str, amount: Amount) -> bool {
    let size = name.strip_prefix(HUGEPAGES).and_then(|size| size.parse::<Amount>().ok());
    size.is_some_and(|size| size.is_positive() && size.is_whole() && amount.value() % size.value() == 0)
}

fn requests_within_limits(requirements: &ResourceRequirements, path: &Path, findings: &mut Findings) {
    for (name, request) in requirements.requests.iter().flatten() {
        let overcommit = CONTAINER_RESOURCES.contains(&name.as_str());
        let path = path.child("requests");
        let Some(limit) = requirements.limits.as_ref().and_then(|limits| limits.get(name)) else {
            if !overcommit {
                let path = Path::root(path.as_str().trim_end_matches(".requests")).child("limits");
                findings.required(&path, "Limit must be set for non overcommitable resources");
            }
            continue;
        };
        let (Ok(requested), Ok(limited)) = (request.0.parse::<Amount>(), limit.0.parse::<Amount>()) else { continue };
        let shown = Excerpt(&limit.0);
        if !overcommit && requested != limited {
            findings.invalid(&path, &request.0, &format!("must be equal to {name} limit of {shown}"));
        } else if requested > limited {
            findings.invalid(&path, &request.0, &format!("must be less than or equal to {name} limit of {shown}"));
        }
    }
}
