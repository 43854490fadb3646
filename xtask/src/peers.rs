//! `cargo xtask peers`: upstream's programs, built from published Go modules for benchmarks and tests.
//!
//! Builds `tests/upstream` and `tests/upstream137` once into the cache: one binary each, called by the name of each
//! program. With `KEBLET_CONTROL_PLANE` set nothing is built, and the programs of that folder are used. Building the
//! agent and tests without a cluster need none of it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use keblet_peers::Cache;
use keblet_peers::KUBEADM_IMAGES;
use keblet_peers::KUBEADM_REPOSITORY;
use sha2::Digest as _;
use sha2::Sha256;

use crate::lock;
use crate::paths;
use crate::progress::step;
use crate::setup::images::Image;
use crate::setup::images::Layer;
use crate::setup::images::write_archive;
use crate::system;
use crate::tiers::machine;

const MODULE: &str = "k8s.io/kubernetes";
const BINARY: &str = "upstream";
const KUBEADM: &str = "kubeadm";
/// Programs that kubeadm runs in static pods.
const IN_IMAGES: [&str; 4] = ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"];
const NO_GO: &str = "upstream's programs are written in Go: `go` (1.26 or newer) is not on the path, and \
                     KEBLET_CONTROL_PLANE names no folder of ready ones";
/// File with the digest of the sources that the binary was built from.
const STAMP: &str = "stamp";

/// A Go module of this repository that requires upstream's programs in one version.
struct Upstream {
    /// Its folder in the repository.
    source: &'static str,
    /// Folder of the programs, in the cache's folder for peers.
    folder: &'static str,
    /// Names of the programs in the binary.
    programs: &'static [&'static str],
}

/// Control plane, kubeadm, kubectl, metrics-server and kubelet of the version that the tests run against.
const CLUSTER: Upstream = Upstream {
    source: "tests/upstream",
    folder: "",
    programs: &[
        "etcd",
        "kube-apiserver",
        "kube-controller-manager",
        "kube-scheduler",
        "kubeadm",
        "kubectl",
        "kubelet",
        "metrics-server",
    ],
};
/// The kubelet whose EventedPLEG requests a relist of one pod from the generic PLEG, for comparison.
const KUBELET_1_37: Upstream = Upstream { source: "tests/upstream137", folder: "1.37", programs: &["kubelet"] };

/// Builds missing programs and prints their folder.
///
/// # Errors
/// The programs cannot be built, or do not run.
pub(crate) fn build() -> Result<()> {
    let folder = CLUSTER.provide()?;
    let kubelet = KUBELET_1_37.provide()?;
    for (folder, upstream) in [(&folder, &CLUSTER), (&kubelet, &KUBELET_1_37)] {
        for program in upstream.programs {
            println!("{}", folder.join(program).display());
        }
    }
    let version = system::output(Command::new(folder.join("kube-apiserver")).arg("--version"))?;
    println!("control plane: {}", version.trim());
    Ok(())
}

/// Upstream's kubelet, built if missing.
///
/// # Errors
/// It cannot be built.
pub(crate) fn kubelet() -> Result<PathBuf> {
    Ok(CLUSTER.provide()?.join("kubelet"))
}

/// Upstream's kubelet 1.37, built if missing.
///
/// # Errors
/// It cannot be built.
pub(crate) fn kubelet_1_37() -> Result<PathBuf> {
    Ok(KUBELET_1_37.provide()?.join("kubelet"))
}

/// The folder of a control plane's programs, built if missing.
///
/// # Errors
/// The programs cannot be built, or one is missing in `KEBLET_CONTROL_PLANE`.
pub(crate) fn control_plane() -> Result<PathBuf> {
    let folder = match std::env::var_os("KEBLET_CONTROL_PLANE") {
        Some(_) => keblet_peers::find_programs()?,
        None => CLUSTER.provide()?,
    };
    keblet_peers::check_programs(&folder)?;
    Ok(folder)
}

/// What is missing for building or finding the programs.
pub(crate) fn lacks() -> Option<String> {
    let given = std::env::var_os("KEBLET_CONTROL_PLANE").is_some();
    let built = || CLUSTER.source_digest().is_ok_and(|digest| is_built(&CLUSTER.cached(), &digest));
    (!given && !machine::has_program("go") && !built()).then(|| NO_GO.to_owned())
}

impl Upstream {
    fn source(&self) -> PathBuf {
        paths::repository().join(self.source)
    }

    fn cached(&self) -> PathBuf {
        Cache::locate().peers().join(self.folder)
    }

    /// The folder of its programs, built if missing.
    fn provide(&self) -> Result<PathBuf> {
        let folder = self.cached();
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        // A second command that builds the same programs waits here.
        let _lock = lock::hold(&folder.join("lock"))?;
        let digest = self.source_digest()?;
        if is_built(&folder, &digest) {
            return Ok(folder);
        }
        if !machine::has_program("go") {
            bail!(NO_GO);
        }
        let source = self.source();
        let version = version(&source)?;
        let stamp = folder.join(STAMP);
        let mark =
            |digest: &str| fs::write(&stamp, digest).with_context(|| format!("cannot write {}", stamp.display()));
        // A build that fails may have replaced the programs already.
        mark("")?;
        step(&format!("building upstream's programs {version} (minutes, the first time)"), || {
            go_build(&source, &folder.join(BINARY), &version)
        })?;
        for program in self.programs {
            let link = folder.join(program);
            if !link.exists() {
                symlink(BINARY, &link).with_context(|| format!("cannot create {}", link.display()))?;
            }
        }
        if self.programs.contains(&KUBEADM) {
            step("packing the control plane's images", || pack(&folder, &version))?;
        }
        mark(&digest)?;
        Ok(folder)
    }

    fn source_digest(&self) -> Result<String> {
        let source = self.source();
        let entries = fs::read_dir(&source).with_context(|| format!("cannot read {}", source.display()))?;
        let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        files.sort();
        let mut hash = Sha256::new();
        for file in files {
            hash.update(fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?);
        }
        Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

/// Packs the images of the control plane that kubeadm runs as static pods: all have the one binary as their layer.
fn pack(folder: &Path, version: &str) -> Result<()> {
    let mut list = Command::new(folder.join(KUBEADM));
    list.args(["config", "images", "list", "--image-repository", KUBEADM_REPOSITORY, "--kubernetes-version", version]);
    let names = system::output(&mut list)?;
    let program = |name: &&str| {
        let (_, short) = name.rsplit_once('/')?;
        let (short, _) = short.split_once(':')?;
        IN_IMAGES.into_iter().find(|program| *program == short)
    };
    let names: Vec<&str> = names.lines().map(str::trim).filter(|name| program(name).is_some()).collect();
    if names.len() != IN_IMAGES.len() {
        bail!("kubeadm names other images than those of {IN_IMAGES:?}: {names:?}");
    }
    let binary = folder.join(BINARY);
    let content = fs::read(&binary).with_context(|| format!("cannot read {}", binary.display()))?;
    let mut layer = Layer::new();
    layer.folder("bin", 0o755)?;
    layer.folder("etc", 0o755)?;
    layer.folder("tmp", 0o1777)?;
    layer.file(&format!("bin/{BINARY}"), 0o755, &content)?;
    for program in IN_IMAGES {
        layer.link(&format!("bin/{program}"), BINARY)?;
    }
    let layer = layer.finish()?;
    let image = |name| Image { name, layer: layer.as_slice().into(), entrypoint: &[], command: &[] };
    let images: Vec<Image<'_>> = names.into_iter().map(image).collect();
    write_archive(&folder.join(KUBEADM_IMAGES), &images)
}

fn is_built(folder: &Path, digest: &str) -> bool {
    fs::read_to_string(folder.join(STAMP)).is_ok_and(|there| there == digest) && folder.join(BINARY).exists()
}

fn go_build(source: &Path, binary: &Path, version: &str) -> Result<()> {
    let (major, minor) = major_minor(version).with_context(|| format!("{version} is not a version"))?;
    // Without a version the programs report v0.0.0 and reject options that depend on the version.
    let stamp = |field: &str, value: &str| format!("-X k8s.io/component-base/version.{field}={value}");
    let flags = ["-s -w".to_owned(), stamp("gitVersion", version), stamp("gitMajor", major), stamp("gitMinor", minor)]
        .join(" ");
    system::quiet_twice(
        // Low priority: the build takes minutes.
        Command::new("nice")
            .args(["-n", "10", "go", "build", "-trimpath", "-ldflags", &flags, "-o"])
            .arg(binary)
            .arg(".")
            .current_dir(source)
            .env("CGO_ENABLED", "0")
            .env("GOFLAGS", "-mod=readonly"),
    )
}

/// The version of the module that the build requires.
fn version(source: &Path) -> Result<String> {
    let file = source.join("go.mod");
    let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let line = text.lines().find_map(|line| line.trim().strip_prefix(MODULE)?.strip_prefix(" v"));
    let version = line.and_then(|rest| rest.split_whitespace().next());
    Ok(format!("v{}", version.with_context(|| format!("{} does not require {MODULE}", file.display()))?))
}

fn major_minor(version: &str) -> Option<(&str, &str)> {
    let mut numbers = version.strip_prefix('v')?.split('.');
    Some((numbers.next()?, numbers.next()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_the_required_one() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("go.mod"), "require (\n\tk8s.io/kubernetes v1.36.3 // why\n)\n").unwrap();
        assert_eq!(version(folder.path()).unwrap(), "v1.36.3");
        assert_eq!(major_minor("v1.36.3"), Some(("1", "36")));
    }
}
