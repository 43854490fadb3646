//! `cargo xtask deb`: a Debian package that replaces the kubelet.
//!
//! Owns content and control file of the package. Does not cross-compile: the architecture is read from the header of
//! the given binary.

mod archive;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::Path;
use std::path::PathBuf;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use object::Object as _;

use crate::paths;
use crate::run;
use archive::Tarball;

/// The Kubernetes version of the kubelet that the package provides.
const KUBERNETES: &str = "1.36.3";
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Debian requires a name and an address. A publisher passes `--maintainer`; mail to the default cannot be delivered,
/// as RFC 2606 reserves `invalid`.
const DEFAULT_MAINTAINER: &str = "The keblet developers <developers@keblet.invalid>";

/// Where to take the agent from and where to put the package.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Package this binary instead of building one for release.
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
    /// Put the package into this folder [default: cargo's target folder].
    #[arg(long, value_name = "FOLDER")]
    output: Option<PathBuf>,
    /// The package's maintainer, as `NAME <ADDRESS>` [default: an address that cannot receive mail].
    #[arg(long, value_name = "MAINTAINER", default_value = DEFAULT_MAINTAINER, value_parser = maintainer)]
    maintainer: String,
}

/// Name and address as the policy requires them (5.6.2): on one line, with the address in angle brackets at the end.
fn maintainer(text: &str) -> Result<String, String> {
    let parts = text.strip_suffix('>').and_then(|rest| rest.split_once(" <"));
    let good = |(name, address): (&str, &str)| {
        let plain = |part: &str| !part.is_empty() && !part.contains(|c: char| "<>,@".contains(c) || c.is_control());
        let host = |host: &str| plain(host) && !host.contains(char::is_whitespace);
        plain(name.trim()) && address.split_once('@').is_some_and(|(user, domain)| host(user) && host(domain))
    };
    parts.is_some_and(good).then(|| text.to_owned()).ok_or_else(|| "expected NAME <USER@DOMAIN>".to_owned())
}

/// Builds the package and prints its path.
///
/// # Errors
/// The agent cannot be built or read, or the package cannot be written.
pub(crate) fn deb(arguments: &Arguments) -> Result<()> {
    let binary = match &arguments.binary {
        Some(binary) => binary.clone(),
        None => run::build_release()?,
    };
    let folder = arguments.output.clone().unwrap_or_else(|| paths::target().join("deb"));
    let package = package(&binary, &folder, &arguments.maintainer)?;
    println!("{}", package.display());
    Ok(())
}

/// Packages `binary` into `folder`; returns the package's path.
fn package(binary: &Path, folder: &Path, maintainer: &str) -> Result<PathBuf> {
    let program = fs::read(binary).with_context(|| format!("cannot read {}", binary.display()))?;
    let architecture = architecture(&program).with_context(|| format!("{} is not a program", binary.display()))?;
    let (data, size) = data(&program)?;
    let control = control(architecture, size, maintainer)?;
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let path = folder.join(format!("keblet_{VERSION}_{architecture}.deb"));
    archive::write(&path, &control, &data).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// Debian's name of the architecture that a program is built for.
fn architecture(program: &[u8]) -> Result<&'static str> {
    match object::File::parse(program)?.architecture() {
        object::Architecture::X86_64 => Ok("amd64"),
        object::Architecture::Aarch64 => Ok("arm64"),
        other => bail!("cannot package programs for {other:?}"),
    }
}

/// The compressed files of the package, and their size in KiB.
fn data(program: &[u8]) -> Result<(Vec<u8>, u64)> {
    let mut files = Tarball::new();
    let units = "usr/lib/systemd/system";
    files.file("etc/default/kubelet", 0o644, &deploy("deb/kubelet.default")?)?;
    files.file("usr/bin/keblet", 0o755, program)?;
    files.link("usr/bin/kubelet", "keblet")?;
    files.file(&format!("{units}/kubelet.service"), 0o644, &deploy("kubelet.service")?)?;
    // kubeadm's package has a drop-in named 10-kubeadm.conf; systemd reads it later, so its settings win.
    files.file(&format!("{units}/kubelet.service.d/05-keblet.conf"), 0o644, &deploy("10-kubeadm.conf")?)?;
    files.file("usr/share/doc/keblet/copyright", 0o644, &repository("LICENSE")?)?;
    let size = files.kibibytes();
    Ok((files.finish()?, size))
}

/// The control archive: control file, configuration files, and scripts that dpkg runs.
fn control(architecture: &str, size: u64, maintainer: &str) -> Result<Vec<u8>> {
    let mut files = Tarball::new();
    files.file("control", 0o644, about(architecture, size, maintainer).as_bytes())?;
    files.file("conffiles", 0o644, b"/etc/default/kubelet\n")?;
    for script in ["preinst", "postinst", "prerm", "postrm"] {
        files.file(script, 0o755, &deploy(&format!("deb/{script}"))?)?;
    }
    Ok(files.finish()?)
}

/// The control paragraph. It provides `kubelet` with a version, on which the kubeadm package depends.
fn about(architecture: &str, size: u64, maintainer: &str) -> String {
    format!(
        "Package: keblet\n\
         Version: {VERSION}\n\
         Architecture: {architecture}\n\
         Maintainer: {maintainer}\n\
         Installed-Size: {size}\n\
         Section: net\n\
         Priority: optional\n\
         Depends: libc6 (>= 2.36), mount, util-linux\n\
         Recommends: containerd | cri-o, kubernetes-cni | containernetworking-plugins\n\
         Suggests: e2fsprogs, nfs-common, open-iscsi\n\
         Provides: kubelet (= {KUBERNETES})\n\
         Conflicts: kubelet\n\
         Replaces: kubelet\n\
         Description: Kubernetes node agent driven by events\n \
         keblet takes the place of kubelet on a node: the same flags, configuration,\n \
         API and metrics, but it learns what happens from the container runtime's\n \
         events and the kernel instead of asking again and again.\n"
    )
}

fn deploy(name: &str) -> Result<Vec<u8>> {
    repository(&format!("deploy/{name}"))
}

fn repository(name: &str) -> Result<Vec<u8>> {
    let path = paths::repository().join(name);
    fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
}
