//! Images of the node status: the largest, each with up to five names. Pure.

use k8s_openapi::api::core::v1::ContainerImage;
use keblet_proto::cri::v1 as cri;

/// Names per image.
const NAMES: usize = 5;

/// The list for the status; -1 means all images.
pub(super) fn listed(mut images: Vec<cri::Image>, max: i32) -> Vec<ContainerImage> {
    images.sort_by(|a, b| b.size.cmp(&a.size).then_with(|| b.id.cmp(&a.id)));
    let max = usize::try_from(max).unwrap_or(usize::MAX);
    let one = |image: cri::Image| {
        let names: Vec<String> = image.repo_digests.into_iter().chain(image.repo_tags).take(NAMES).collect();
        let size = i64::try_from(image.size).unwrap_or(i64::MAX);
        // As the API server returns them: no names and a size of 0 are absent. Else the list would always differ from its.
        ContainerImage {
            names: Some(names).filter(|names| !names.is_empty()),
            size_bytes: Some(size).filter(|size| *size != 0),
        }
    };
    images.into_iter().take(max).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(id: &str, size: u64, digests: &[&str], tags: &[&str]) -> cri::Image {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        cri::Image {
            id: id.to_owned(),
            size,
            repo_digests: owned(digests),
            repo_tags: owned(tags),
            ..Default::default()
        }
    }

    #[test]
    fn large_images_come_first() {
        let all = [image("a", 1, &[], &["a:1"]), image("b", 7, &["b@x"], &["b:1"]), image("c", 1, &[], &["c:1"])];
        let names = |max| -> Vec<String> {
            listed(all.to_vec(), max).into_iter().filter_map(|image| Some(image.names?.join(" "))).collect()
        };
        assert_eq!(names(-1), ["b@x b:1", "c:1", "a:1"]);
        assert_eq!(names(2), ["b@x b:1", "c:1"]);
        assert!(names(0).is_empty());
    }

    #[test]
    fn an_image_without_names_is_as_the_api_server_returns_it() {
        let ours = listed(vec![image("a", 7, &[], &[]), image("b", 0, &[], &["b:1"])], -1);
        let returned = serde_json::json!([{ "names": null, "sizeBytes": 7 }, { "names": ["b:1"] }]);
        let returned: Vec<ContainerImage> = serde_json::from_value(returned).expect("images");
        assert_eq!(ours, returned);
    }

    #[test]
    fn names_are_limited() {
        let many = image("a", 1, &["d1", "d2"], &["t1", "t2", "t3", "t4"]);
        assert_eq!(listed(vec![many], -1)[0].names.as_ref().map(Vec::len), Some(5));
    }
}
