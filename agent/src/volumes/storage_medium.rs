//! The medium of an emptyDir: the node's disk, memory, or huge pages of one size. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::EmptyDirVolumeSource;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::model::Amount;
use crate::model::spec;

const MEMORY: &str = "Memory";
const HUGE_PAGES: &str = "HugePages";

/// The medium of an emptyDir.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum StorageMedium {
    /// The node's disk.
    Disk,
    /// A tmpfs of at most so many bytes; `None`: as many as the kernel allows.
    Memory { size: Option<i64> },
    /// A hugetlbfs with pages of so many bytes, and of at most `size` bytes.
    HugePages { page_size: u64, size: Option<i64> },
}

/// A medium that a pod cannot have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StorageMediumError {
    /// Not one of the API's.
    #[error("unknown storage medium {0:?}")]
    Unknown(String),
    /// Huge pages of which the pod requests none.
    #[error("medium {0}: hugePages storage requested, but there is no resource request for huge pages")]
    NotRequested(String),
    /// `HugePages` leaves the choice of a size to a pod that requests several.
    #[error("medium: {0} can't be used if container requests multiple huge page sizes")]
    SeveralSizes(String),
}

impl StorageMedium {
    /// The medium of a volume. `memory`: bytes that a volume in memory may take, which `sizeLimit` can only reduce.
    ///
    /// # Errors
    /// The medium is unknown, or the pod requests no huge pages of its size.
    pub(super) fn of(
        pod: &Pod,
        source: &EmptyDirVolumeSource,
        memory: Option<i64>,
    ) -> Result<Self, StorageMediumError> {
        let limit = source.size_limit.as_ref().and_then(|limit| Amount::try_from(limit).ok()).map(Amount::value);
        let smallest = |limits: [Option<i64>; 2]| limits.into_iter().flatten().filter(|bytes| *bytes > 0).min();
        match source.medium.as_deref().unwrap_or_default() {
            "" => Ok(Self::Disk),
            MEMORY => Ok(Self::Memory { size: smallest([limit, memory]) }),
            medium => Ok(Self::HugePages { page_size: huge_page_size(pod, medium)?, size: smallest([limit, None]) }),
        }
    }
}

/// The size that the medium names, if the pod requests such pages; without a name, the only size that the pod requests.
fn huge_page_size(pod: &Pod, medium: &str) -> Result<u64, StorageMediumError> {
    let named = match medium.strip_prefix(HUGE_PAGES).and_then(|rest| rest.strip_prefix('-')) {
        Some(size) => Some(bytes(size).ok_or_else(|| StorageMediumError::Unknown(medium.to_owned()))?),
        None if medium == HUGE_PAGES => None,
        None => return Err(StorageMediumError::Unknown(medium.to_owned())),
    };
    let mut found = None;
    for size in requested_sizes(pod).filter(|size| named.is_none_or(|named| named == *size)) {
        if found.is_some_and(|found| found != size) {
            return Err(StorageMediumError::SeveralSizes(medium.to_owned()));
        }
        found = Some(size);
    }
    found.ok_or_else(|| StorageMediumError::NotRequested(medium.to_owned()))
}

/// Page sizes that containers or the pod itself request. Requests and limits of huge pages are always equal.
fn requested_sizes(pod: &Pod) -> impl Iterator<Item = u64> {
    let of_pod = pod.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    let of_containers = spec::init_containers(pod).iter().chain(spec::regular_containers(pod));
    let all = of_pod.into_iter().chain(of_containers.filter_map(|container| container.resources.as_ref()));
    let requests = all.filter_map(|resources| resources.requests.as_ref()).flat_map(BTreeMap::<String, Quantity>::keys);
    requests.filter_map(|name| bytes(name.strip_prefix("hugepages-")?))
}

fn bytes(size: &str) -> Option<u64> {
    let size: Amount = size.parse().ok()?;
    u64::try_from(size.value()).ok().filter(|bytes| *bytes > 0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn chosen(requests: &[&str], source: serde_json::Value, memory: Option<i64>) -> Result<StorageMedium, String> {
        let containers: Vec<_> = requests
            .iter()
            .map(|name| json!({"name": "c", "resources": {"requests": {*name: "4Mi", "memory": "1Mi"}}}))
            .collect();
        let pod: Pod = serde_json::from_value(json!({"spec": {"containers": containers}})).expect("a pod");
        let source: EmptyDirVolumeSource = serde_json::from_value(source).expect("a source");
        StorageMedium::of(&pod, &source, memory).map_err(|error| error.to_string())
    }

    #[test]
    fn memory_has_the_smallest_of_all_limits() {
        for (limit, memory, expected) in [
            (None, None, None),
            (None, Some(100), Some(100)),
            (Some("50"), Some(100), Some(50)),
            (Some("200"), Some(100), Some(100)),
            (Some("1Ki"), None, Some(1024)),
            (Some("0"), Some(100), Some(100)),
            (Some("nonsense"), Some(100), Some(100)),
        ] {
            let found = chosen(&[], json!({"medium": "Memory", "sizeLimit": limit}), memory);
            assert_eq!(found, Ok(StorageMedium::Memory { size: expected }), "{limit:?} {memory:?}");
        }
        assert_eq!(chosen(&[], json!({"sizeLimit": "1Ki"}), Some(1)), Ok(StorageMedium::Disk));
    }

    #[test]
    fn huge_pages_have_the_size_that_the_pod_requests() {
        let pages = |page_size| Ok(StorageMedium::HugePages { page_size, size: None });
        let error = |text: &str| Err(text.to_owned());
        let none = "hugePages storage requested, but there is no resource request for huge pages";
        for (requests, name, expected) in [
            (vec!["hugepages-2Mi"], "HugePages", pages(2 << 20)),
            (vec!["hugepages-2Mi", "hugepages-2Mi"], "HugePages", pages(2 << 20)),
            (vec!["hugepages-2Mi", "hugepages-1Gi"], "HugePages-1Gi", pages(1 << 30)),
            (vec!["hugepages-1024Mi"], "HugePages-1Gi", pages(1 << 30)),
            (
                vec!["hugepages-2Mi", "hugepages-1Gi"],
                "HugePages",
                error("medium: HugePages can't be used if container requests multiple huge page sizes"),
            ),
            (vec!["hugepages-2Mi"], "HugePages-1Gi", error(&format!("medium HugePages-1Gi: {none}"))),
            (vec!["cpu"], "HugePages", error(&format!("medium HugePages: {none}"))),
            (vec![], "HugePages-", error("unknown storage medium \"HugePages-\"")),
            (vec![], "HugePages-x,size=1", error("unknown storage medium \"HugePages-x,size=1\"")),
            (vec![], "HugePages--1", error("unknown storage medium \"HugePages--1\"")),
            (vec![], "memory", error("unknown storage medium \"memory\"")),
        ] {
            assert_eq!(chosen(&requests, json!({"medium": name}), Some(1)), expected, "{name} {requests:?}");
        }
        let requests = json!({"requests": {"hugepages-2Mi": "4Mi"}});
        for spec in [
            json!({"containers": [{"name": "c"}], "resources": requests}),
            json!({"containers": [{"name": "c"}], "initContainers": [{"name": "i", "resources": requests}]}),
        ] {
            let pod: Pod = serde_json::from_value(json!({"spec": spec})).expect("a pod");
            let source =
                EmptyDirVolumeSource { medium: Some("HugePages".to_owned()), ..EmptyDirVolumeSource::default() };
            assert_eq!(
                StorageMedium::of(&pod, &source, None).map_err(|error| error.to_string()),
                pages(2 << 20),
                "{spec}"
            );
        }
        let limited = chosen(&["hugepages-2Mi"], json!({"medium": "HugePages", "sizeLimit": "4Mi"}), None);
        assert_eq!(limited, Ok(StorageMedium::HugePages { page_size: 2 << 20, size: Some(4 << 20) }));
    }
}
