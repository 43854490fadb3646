//! The sockets of the container runtime, for the agent and for `keblet doctor`.

use std::path::Path;

use crate::config::ConfigError;
use crate::config::Origin;
use crate::config::Settings;
use crate::config::Violation;
use crate::runtime::RuntimeEndpoint;

/// Where the runtime is expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoints {
    /// The runtime service.
    pub runtime: RuntimeEndpoint,
    /// The image service, if `imageServiceEndpoint` is set.
    pub images: Option<RuntimeEndpoint>,
}

impl Endpoints {
    /// Those of the configuration. While `containerRuntimeEndpoint` is not set, a usual socket below `root` (`/` in
    /// production) goes before its default.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with an endpoint that is not a unix socket.
    pub fn choose(settings: &Settings, root: &Path) -> Result<Self, ConfigError> {
        const RUNTIME: &str = "containerRuntimeEndpoint";
        let unset = matches!(settings.origin(RUNTIME), Origin::Default | Origin::LegacyDefault);
        let runtime = match RuntimeEndpoint::discover(root) {
            Some(found) if unset => found,
            _ => endpoint(settings, RUNTIME, &settings.kubelet.container_runtime_endpoint)?,
        };
        let images = match settings.kubelet.image_service_endpoint.as_str() {
            "" => None,
            text => Some(endpoint(settings, "imageServiceEndpoint", text)?),
        };
        Ok(Self { runtime, images })
    }
}

fn endpoint(settings: &Settings, field: &str, text: &str) -> Result<RuntimeEndpoint, ConfigError> {
    text.parse::<RuntimeEndpoint>().map_err(|error| {
        let origin = settings.origin(field);
        let violation = Violation { origin, field: field.to_owned(), message: error.to_string() };
        ConfigError::Invalid { violations: vec![violation] }
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::config::load;

    fn chosen<'a>(root: &Path, flags: &[(&'a str, &'a str)]) -> Result<Endpoints, ConfigError> {
        let settings = load(&flags.iter().copied().collect()).expect("acceptable");
        Endpoints::choose(&settings, root)
    }

    #[test]
    fn an_unset_endpoint_is_the_socket_that_exists() {
        let root = tempfile::tempdir().unwrap();
        let containerd = "unix:///run/containerd/containerd.sock";
        let runtime = |flags: &[(&str, &str)]| chosen(root.path(), flags).unwrap().runtime.to_string();
        assert_eq!(runtime(&[]), containerd, "the default where there is none");

        let crio = root.path().join("run/crio/crio.sock");
        std::fs::create_dir_all(crio.parent().unwrap()).unwrap();
        let _crio = UnixListener::bind(&crio).unwrap();
        assert_eq!(runtime(&[]), format!("unix://{}", crio.display()));
        assert_eq!(runtime(&[("container-runtime-endpoint", containerd)]), containerd, "what is written counts");
    }

    #[test]
    fn the_image_service_may_be_elsewhere() {
        let root = tempfile::tempdir().unwrap();
        let images = |text: &str| chosen(root.path(), &[("image-service-endpoint", text)]).map(|chosen| chosen.images);
        assert_eq!(images("").unwrap(), None);
        assert_eq!(images("unix:///run/images.sock").unwrap(), Some("unix:///run/images.sock".parse().unwrap()));
        let error = images("tcp://127.0.0.1:1").unwrap_err().to_string();
        let place = "invalid configuration: --image-service-endpoint: imageServiceEndpoint: ";
        assert!(error.starts_with(place) && error.contains("\"tcp://127.0.0.1:1\""), "{error}");
    }
}
