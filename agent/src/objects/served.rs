//! In which version the API server serves a resource: those of young APIs differ from server to server.

use kube::Client;
use kube::api::ApiResource;

use super::error::code;

/// The group of trust bundles and certificate requests.
const GROUP: &str = "certificates.k8s.io";

/// The resource `plural` of `certificates.k8s.io` in the first of these versions that the API server serves; `None` if it
/// serves none.
///
/// # Errors
/// The discovery request fails.
pub(super) async fn served(
    client: &Client,
    kind: &str,
    plural: &str,
    versions: &[&str],
) -> Result<Option<ApiResource>, kube::Error> {
    for version in versions {
        let api_version = format!("{GROUP}/{version}");
        let resources = match client.list_api_group_resources(&api_version).await {
            Ok(list) => list.resources,
            Err(error) if code(&error) == Some(404) => continue,
            Err(error) => return Err(error),
        };
        if resources.iter().any(|resource| resource.name == plural) {
            let (kind, plural) = (kind.to_owned(), plural.to_owned());
            let (group, version) = (GROUP.to_owned(), (*version).to_owned());
            return Ok(Some(ApiResource { group, version, api_version, kind, plural }));
        }
    }
    Ok(None)
}
