//! QoS class, aggregate requests and limits of a pod. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::Amount;
use super::QuantityError;
use super::spec;

/// Amounts by resource name.
pub type Amounts = BTreeMap<String, Amount>;

/// A quantity of a resource list that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("quantity of {resource}: {source}")]
pub struct InvalidAmount {
    /// Name of the resource.
    pub resource: String,
    /// Why its quantity cannot be read.
    pub source: QuantityError,
}

/// Quality of service class of a pod, which decides the parent of its cgroup.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum QosClass {
    /// Limits equal requests, for every container.
    Guaranteed,
    /// Some requests or limits, but not Guaranteed.
    Burstable,
    /// No requests and no limits.
    BestEffort,
}

impl QosClass {
    /// The API's spelling.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Guaranteed => "Guaranteed",
            Self::Burstable => "Burstable",
            Self::BestEffort => "BestEffort",
        }
    }
}

/// Resources that count for the QoS class.
const COMPUTE: [&str; 2] = ["cpu", "memory"];
/// Prefix of the names of huge pages.
const HUGEPAGES: &str = "hugepages-";

/// The class the API server stored, else the computed one (by regular and init containers, or `spec.resources`).
///
/// # Errors
/// A quantity that cannot be read.
pub fn qos_class(pod: &Pod) -> Result<QosClass, InvalidAmount> {
    match pod.status.as_ref().and_then(|status| status.qos_class.as_deref()) {
        Some("Guaranteed") => return Ok(QosClass::Guaranteed),
        Some("Burstable") => return Ok(QosClass::Burstable),
        Some("BestEffort") => return Ok(QosClass::BestEffort),
        _ => {}
    }
    let Some(spec) = &pod.spec else { return Ok(QosClass::BestEffort) };
    let stated: Vec<Option<&ResourceRequirements>> = match &spec.resources {
        Some(resources) if is_of_pods(resources) => vec![Some(resources)],
        _ => containers(pod).map(|container| container.resources.as_ref()).collect(),
    };
    let (mut requests, mut limits) = (Amounts::new(), Amounts::new());
    let mut all_limited = true;
    for resources in stated {
        add(&mut requests, &positive(resources.and_then(|r| r.requests.as_ref()))?);
        let own = positive(resources.and_then(|r| r.limits.as_ref()))?;
        all_limited &= COMPUTE.iter().all(|name| own.contains_key(*name));
        add(&mut limits, &own);
    }
    Ok(if requests.is_empty() && limits.is_empty() {
        QosClass::BestEffort
    } else if all_limited && requests == limits {
        QosClass::Guaranteed
    } else {
        QosClass::Burstable
    })
}

/// True if `spec.resources` names a resource that pods can have (KEP-2837). Without one it has no effect, as upstream since
/// 1.37.
fn is_of_pods(resources: &ResourceRequirements) -> bool {
    [&resources.requests, &resources.limits].into_iter().flatten().flat_map(BTreeMap::keys).any(|name| of_pods(name))
}

/// True for a resource that `spec.resources` can name.
fn of_pods(name: &str) -> bool {
    COMPUTE.contains(&name) || name.starts_with(HUGEPAGES)
}

/// cpu and memory amounts above zero.
fn positive(list: Option<&BTreeMap<String, Quantity>>) -> Result<Amounts, InvalidAmount> {
    let mut amounts = amounts(list)?;
    amounts.retain(|name, amount| COMPUTE.contains(&name.as_str()) && amount.is_positive());
    Ok(amounts)
}

/// Init containers, then regular ones.
pub fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    spec::init_containers(pod).iter().chain(spec::regular_containers(pod))
}

/// Reads a resource list.
///
/// # Errors
/// A quantity that cannot be read.
pub fn amounts(list: Option<&BTreeMap<String, Quantity>>) -> Result<Amounts, InvalidAmount> {
    let read = |(name, quantity): (&String, &Quantity)| match Amount::try_from(quantity) {
        Ok(amount) => Ok((name.clone(), amount)),
        Err(source) => Err(InvalidAmount { resource: name.clone(), source }),
    };
    list.into_iter().flatten().map(read).collect()
}

/// Which list of `resources` to add up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ResourceKind {
    /// `resources.requests`.
    Requests,
    /// `resources.limits`.
    Limits,
}

impl ResourceKind {
    fn of(self, resources: Option<&ResourceRequirements>) -> Option<&BTreeMap<String, Quantity>> {
        match self {
            Self::Requests => resources.and_then(|r| r.requests.as_ref()),
            Self::Limits => resources.and_then(|r| r.limits.as_ref()),
        }
    }
}

/// What the whole pod needs: the larger of regular containers with all sidecars and any moment of the init sequence
/// (KEP-753); `spec.resources` takes precedence for what it names (KEP-2837). Overhead (KEP-688) is added if asked for; to
/// limits only where there is one.
///
/// # Errors
/// A quantity that cannot be read.
pub fn pod_total(pod: &Pod, kind: ResourceKind, with_overhead: bool) -> Result<Amounts, InvalidAmount> {
    let mut total = containers_total(pod, kind)?;
    let Some(spec) = &pod.spec else { return Ok(total) };
    for (name, amount) in amounts(kind.of(spec.resources.as_ref()))? {
        if of_pods(&name) {
            total.insert(name, amount);
        }
    }
    if with_overhead {
        for (name, amount) in amounts(spec.overhead.as_ref())? {
            match total.get_mut(&name) {
                Some(sum) if kind == ResourceKind::Requests || !sum.is_zero() => *sum += amount,
                None if kind == ResourceKind::Requests => {
                    total.insert(name, amount);
                }
                _ => {}
            }
        }
    }
    Ok(total)
}

/// Requests and limits of the whole pod with its overhead, for `status.resources` (KEP-5419). Lists without entries are
/// left out.
///
/// # Errors
/// A quantity that cannot be read.
pub fn pod_resources(pod: &Pod) -> Result<ResourceRequirements, InvalidAmount> {
    let list = |kind| -> Result<Option<BTreeMap<String, Quantity>>, InvalidAmount> {
        let total = pod_total(pod, kind, true)?;
        let quantities = total.into_iter().map(|(name, amount)| (name, amount.to_quantity()));
        Ok(Some(quantities.collect()).filter(|list: &BTreeMap<_, _>| !list.is_empty()))
    };
    let (requests, limits) = (list(ResourceKind::Requests)?, list(ResourceKind::Limits)?);
    Ok(ResourceRequirements { requests, limits, claims: None })
}

/// [`pod_total`] by the containers alone.
///
/// # Errors
/// A quantity that cannot be read.
pub fn containers_total(pod: &Pod, kind: ResourceKind) -> Result<Amounts, InvalidAmount> {
    let mut running = Amounts::new();
    for container in spec::regular_containers(pod) {
        add(&mut running, &amounts(kind.of(container.resources.as_ref()))?);
    }
    let (mut sidecars, mut peak) = (Amounts::new(), Amounts::new());
    for container in spec::init_containers(pod) {
        let own = amounts(kind.of(container.resources.as_ref()))?;
        if spec::is_sidecar(container) {
            add(&mut running, &own);
            add(&mut sidecars, &own);
            raise(&mut peak, &sidecars);
        } else {
            let mut moment = sidecars.clone();
            add(&mut moment, &own);
            raise(&mut peak, &moment);
        }
    }
    raise(&mut running, &peak);
    Ok(running)
}

fn add(sum: &mut Amounts, more: &Amounts) {
    for (name, amount) in more {
        *sum.entry(name.clone()).or_default() += *amount;
    }
}

fn raise(sum: &mut Amounts, floor: &Amounts) {
    for (name, amount) in floor {
        let held = sum.entry(name.clone()).or_default();
        *held = (*held).max(*amount);
    }
}
