//! Where `cargo xtask setup` puts things. Owns the names; refuses to fetch or build.

use std::path::Path;
use std::path::PathBuf;

use anyhow::Result;
use anyhow::bail;

/// The sandbox image of every private runtime.
pub const PAUSE_IMAGE: &str = "keblet.local/pause:1";
/// The image of the test program: `/probe`, see its `--help`.
pub const PROBE_IMAGE: &str = "keblet.local/probe:1";
/// A static busybox with its shell and applets in `/bin`.
pub const BUSYBOX_IMAGE: &str = "keblet.local/busybox:1";

/// Names the containerd of private runtimes: `1.7` (the default) or `2`.
pub const CONTAINERD_VARIABLE: &str = "KEBLET_CONTAINERD";

/// The folder of things fetched and built for tests: `KEBLET_CACHE`, or `.cache` at the root of the repository.
#[derive(Clone, Debug)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// The cache of this checkout, whether it is filled or not.
    pub fn locate() -> Self {
        let root = match std::env::var_os("KEBLET_CACHE") {
            Some(root) => PathBuf::from(root),
            None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache"),
        };
        // Containers and runtimes are given these paths, so they must hold from any working directory.
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

    /// Packages unpacked for this machine, laid out like a file system root.
    pub fn packages(&self) -> PathBuf {
        self.root.join("packages")
    }

    /// Shared libraries that the unpacked programs need.
    pub fn libraries(&self) -> PathBuf {
        self.packages().join("usr/lib").join(format!("{}-linux-gnu", std::env::consts::ARCH))
    }

    /// containerd, its shim and its command line tool, of the series that `KEBLET_CONTAINERD` names.
    pub fn containerd_bin(&self) -> PathBuf {
        let second = std::env::var(CONTAINERD_VARIABLE).is_ok_and(|series| series == "2");
        if second { self.containerd_2().join("usr/bin") } else { self.packages().join("usr/bin") }
    }

    /// The package of containerd 2, unpacked.
    pub fn containerd_2(&self) -> PathBuf {
        self.root.join("containerd-2")
    }

    /// The OCI runtime.
    pub fn runc(&self) -> PathBuf {
        self.packages().join("usr/sbin/runc")
    }

    /// CNI plugins.
    pub fn cni_bin(&self) -> PathBuf {
        self.packages().join("usr/lib/cni")
    }

    /// The static busybox.
    pub fn busybox(&self) -> PathBuf {
        self.packages().join("bin/busybox")
    }

    /// All test images in one archive that `ctr images import` takes.
    pub fn images(&self) -> PathBuf {
        self.root.join("images/images.tar")
    }

    /// Upstream's own programs, as `cargo xtask peers` builds them.
    pub fn peers(&self) -> PathBuf {
        self.root.join("peers")
    }

    /// Says what is missing for a private runtime.
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

    /// Resolves `..` by name, as the folder may not be there yet.
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
