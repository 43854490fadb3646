//! `containerRuntimeEndpoint`: a unix socket, configured or discovered.

use std::fmt;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::path::PathBuf;
use std::str::FromStr;

/// Usual places of a runtime's socket, in the order they are tried.
const USUAL_SOCKETS: [&str; 4] = [
    "/run/containerd/containerd.sock",
    "/run/crio/crio.sock",
    "/var/run/containerd/containerd.sock",
    "/var/run/crio/crio.sock",
];

/// Sockets of runtimes that belong to a distribution: of k3s and RKE2, of k0s, of MicroK8s. A node that has one may have
/// another containerd for Docker, at a usual place.
const SOCKETS_OF_DISTRIBUTIONS: [&str; 3] = [
    "/run/k3s/containerd/containerd.sock",
    "/run/k0s/containerd.sock",
    "/var/snap/microk8s/common/run/containerd.sock",
];

/// `containerRuntimeEndpoint`: the path of a unix socket.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RuntimeEndpoint(PathBuf);

/// A text that is not a unix socket endpoint.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("runtime endpoint {0:?}: expected unix:///path/of/the.sock, an absolute path")]
pub struct EndpointError(String);

impl RuntimeEndpoint {
    /// The socket's path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The first usual socket that exists below `root` (`/` in production).
    pub fn discover(root: &Path) -> Option<Self> {
        first(&USUAL_SOCKETS, root)
    }

    /// The socket that the kubelet of this node uses, for programs that only read: a distribution's, or else the first usual
    /// one.
    pub fn discover_of_kubelet(root: &Path) -> Option<Self> {
        first(&SOCKETS_OF_DISTRIBUTIONS, root).or_else(|| Self::discover(root))
    }
}

fn first(sockets: &[&str], root: &Path) -> Option<RuntimeEndpoint> {
    sockets.iter().map(|path| root.join(&path[1..])).find(|path| is_socket(path)).map(RuntimeEndpoint)
}

fn is_socket(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| metadata.file_type().is_socket())
}

impl FromStr for RuntimeEndpoint {
    type Err = EndpointError;

    /// Takes `unix:///path`, `unix:/path`, and the bare path as older configurations have it.
    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let path = text.strip_prefix("unix:").map_or(text, |path| path.strip_prefix("//").unwrap_or(path));
        if path.len() < 2 || !path.starts_with('/') || path.contains('\0') {
            return Err(EndpointError(text.to_owned()));
        }
        Ok(Self(PathBuf::from(path)))
    }
}

impl fmt::Display for RuntimeEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unix://{}", self.0.display())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn endpoints() {
        for text in ["unix:///run/a.sock", "unix:/run/a.sock", "/run/a.sock"] {
            let endpoint: RuntimeEndpoint = text.parse().unwrap();
            assert_eq!(endpoint.path(), Path::new("/run/a.sock"), "{text}");
            assert_eq!(endpoint.to_string(), "unix:///run/a.sock");
        }
        let relative = ["unix://run/a.sock", "unix:run/a.sock", "run/a.sock"];
        for text in ["", "/", "unix://", "unix:", "tcp://127.0.0.1:1", "unix:///a\0b"].into_iter().chain(relative) {
            let error = text.parse::<RuntimeEndpoint>().unwrap_err().to_string();
            assert!(error.contains(&format!("{text:?}")), "{error}");
        }
    }

    #[test]
    fn the_first_usual_socket_is_found() {
        let root = tempfile::tempdir().unwrap();
        let make = |path: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            path
        };
        assert_eq!(RuntimeEndpoint::discover(root.path()), None);

        std::fs::write(make("run/containerd/containerd.sock"), "a file, not a socket").unwrap();
        let crio = make("run/crio/crio.sock");
        let _crio = UnixListener::bind(&crio).unwrap();
        let _old = UnixListener::bind(make("var/run/containerd/containerd.sock")).unwrap();
        assert_eq!(RuntimeEndpoint::discover(root.path()), Some(RuntimeEndpoint(crio.clone())));
        assert_eq!(RuntimeEndpoint::discover_of_kubelet(root.path()), Some(RuntimeEndpoint(crio.clone())));

        let k0s = make("run/k0s/containerd.sock");
        let _k0s = UnixListener::bind(&k0s).unwrap();
        assert_eq!(RuntimeEndpoint::discover_of_kubelet(root.path()), Some(RuntimeEndpoint(k0s)));
        assert_eq!(RuntimeEndpoint::discover(root.path()), Some(RuntimeEndpoint(crio)), "an agent does not share it");
    }
}
