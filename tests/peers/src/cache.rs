//! Paths in the cache that `cargo xtask setup` fills.

use std::path::Path;
use std::path::PathBuf;

use anyhow::Result;
use anyhow::bail;

/// The sandbox image of all private runtimes.
pub const PAUSE_IMAGE: &str = "keblet.local/pause:1";
/// The image of the test program: `/probe`, see its `--help`.
pub const PROBE_IMAGE: &str = "keblet.local/probe:1";
/// A static busybox: shell and applets are in `/bin`.
pub const BUSYBOX_IMAGE: &str = "keblet.local/busybox:1";

/// The archive with the images of kubeadm's control plane, in the folder of upstream's programs.
pub const KUBEADM_IMAGES: &str = "kubeadm-images.tar";
/// Their `imageRepository`.
pub const KUBEADM_REPOSITORY: &str = "keblet.local";

/// The archive with the agent's image, beside the agent.
pub const AGENT_IMAGE: &str = "keblet-image.tar";
/// Its path, if it is elsewhere.
pub const AGENT_IMAGE_VARIABLE: &str = "KEBLET_IMAGE";

/// Selects the containerd of private runtimes: `1.7` (the default) or `2`.
pub const CONTAINERD_VARIABLE: &str = "KEBLET_CONTAINERD";

/// The folder with everything fetched and built for tests: `KEBLET_CACHE`, or `.cache` in the root of the repository.
#[derive(Clone, Debug)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// The cache of this checkout, filled or not.
    pub fn locate() -> Self {
        let root = match std::env::var_os("KEBLET_CACHE") {
            Some(root) => PathBuf::from(root),
            None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache"),
        };
        // Containers and runtimes receive these paths, so they must be absolute.
        let root = std::path::absolute(&root).unwrap_or(root);
        Self { root: root.components().collect() }.without_parents()
    }

    /// A cache at the given folder.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The folder itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Packages unpacked for this machine, with the layout of a root file system.
    pub fn packages(&self) -> PathBuf {
        self.root.join("packages")
    }

    /// Shared libraries that the unpacked programs need.
    pub fn libraries(&self) -> PathBuf {
        self.packages().join("usr/lib").join(format!("{}-linux-gnu", std::env::consts::ARCH))
    }

    /// containerd, its shim and ctr, of the series that `KEBLET_CONTAINERD` selects.
    pub fn containerd_bin(&self) -> PathBuf {
        let second = std::env::var(CONTAINERD_VARIABLE).is_ok_and(|series| series == "2");
        if second { self.containerd_2().join("usr/bin") } else { self.packages().join("usr/bin") }
    }

    /// The unpacked package of containerd 2.
    pub fn containerd_2(&self) -> PathBuf {
        self.root.join("containerd-2")
    }

    /// The OCI runtime.
    pub fn runc(&self) -> PathBuf {
        self.packages().join("usr/sbin/runc")
    }

    /// An OCI runtime with idmapped mounts, which user namespaces need: runc 1.2 or newer, built by `cargo xtask setup`.
    pub fn current_runc(&self) -> PathBuf {
        self.root.join("runc/runc")
    }

    /// The image registry `distribution`, built by `cargo xtask setup`.
    pub fn registry(&self) -> PathBuf {
        self.root.join("registry/registry")
    }

    /// CNI plugins.
    pub fn cni_bin(&self) -> PathBuf {
        self.packages().join("usr/lib/cni")
    }

    /// The static busybox.
    pub fn busybox(&self) -> PathBuf {
        self.packages().join("bin/busybox")
    }

    /// All test images in one archive for `ctr images import`.
    pub fn images(&self) -> PathBuf {
        self.root.join("images/images.tar")
    }

    /// Upstream's programs, built by `cargo xtask peers`.
    pub fn peers(&self) -> PathBuf {
        self.root.join("peers")
    }

    /// qemu, kernel and root file system of the virtual machine of `cargo xtask vm`.
    pub fn machine(&self) -> PathBuf {
        self.root.join("machine")
    }

    /// Checks that everything a private runtime needs exists.
    ///
    /// # Errors
    /// A file is missing; the error names it.
    pub fn check(&self) -> Result<()> {
        let needed = [
            self.containerd_bin().join("containerd"),
            self.containerd_bin().join("containerd-shim-runc-v2"),
            self.containerd_bin().join("ctr"),
            self.runc(),
            self.cni_bin().join("bridge"),
            self.busybox(),
            self.images(),
        ];
        if let Some(missing) = needed.iter().find(|path| !path.exists()) {
            bail!("{} is missing: run `cargo xtask setup`", missing.display());
        }
        Ok(())
    }

    /// Resolves `..` lexically, as the folder may not exist yet.
    fn without_parents(self) -> Self {
        let mut root = PathBuf::new();
        for component in self.root.components() {
            match component {
                std::path::Component::ParentDir => {
                    root.pop();
                }
                other => root.push(other),
            }
        }
        Self { root }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_are_resolved_without_the_file_system() {
        let cache = Cache::at("/nowhere/tests/peers/../../.cache").without_parents();
        assert_eq!(cache.root(), Path::new("/nowhere/.cache"));
    }

    #[test]
    fn missing_file_error_names_the_setup_command() {
        let error = Cache::at("/nowhere").check().unwrap_err().to_string();
        assert_eq!(error, "/nowhere/packages/usr/bin/containerd is missing: run `cargo xtask setup`");
    }
}
