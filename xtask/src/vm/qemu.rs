//! The command lines of qemu and of the daemons that share folders. Pure, except for finding the programs.

use std::ffi::OsString;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use keblet_peers::Cache;

/// Ports of the machine, each a socket of this name.
pub(super) const PORTS: [&str; 3] = ["control", "stdout", "stderr"];
/// Tag of the root file system.
pub(super) const ROOT: &str = "root";

/// Programs and data of the cache.
pub(super) struct Programs {
    folder: PathBuf,
    kernel: PathBuf,
}

impl Programs {
    /// Finds them in the cache.
    pub(super) fn find(cache: &Cache) -> Result<Self> {
        let folder = cache.machine().join("qemu");
        let boot = cache.machine().join("kernel/boot");
        let entries = std::fs::read_dir(&boot).with_context(|| format!("cannot read {}", boot.display()))?;
        let is_kernel = |path: &PathBuf| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("vmlinuz-"));
        let kernel = entries.flatten().map(|entry| entry.path()).find(is_kernel);
        Ok(Self { kernel: kernel.with_context(|| format!("no kernel in {}", boot.display()))?, folder })
    }

    /// A daemon that serves a folder to a machine through a socket, until the machine ends.
    pub(super) fn daemon(&self, folder: &Path, writable: bool, socket: &Path) -> Command {
        let mut command = self.command("usr/libexec/virtiofsd");
        // Not a namespace of its own, which containers may not be permitted to create.
        command.args(["--xattr", "--log-level", "error", "--sandbox", "chroot"]);
        command.arg(argument("--socket-path=", socket)).arg(argument("--shared-dir=", folder));
        command.args(if writable { &["--cache", "auto"][..] } else { &["--cache", "always", "--readonly"] });
        command
    }

    /// The machine.
    pub(super) fn machine(&self, specification: &Specification<'_>) -> Command {
        let mut command = self.command("usr/bin/qemu-system-x86_64");
        for data in ["usr/share/qemu", "usr/share/seabios"] {
            command.arg("-L").arg(self.folder.join(data));
        }
        command.arg("-kernel").arg(&self.kernel);
        command.args(arguments(specification));
        command
    }

    /// A program, run by the loader of its own suite and with its libraries. It is killed with the thread that starts it,
    /// so that nothing stays behind if this process is killed.
    fn command(&self, program: &str) -> Command {
        let libraries = self.folder.join("usr/lib").join(format!("{}-linux-gnu", std::env::consts::ARCH));
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(self.folder.join("usr/lib64/ld-linux-x86-64.so.2"));
        command.arg("--library-path").arg(&libraries).arg(self.folder.join(program));
        command.env("QEMU_MODULE_DIR", libraries.join("qemu"));
        command
    }
}

/// What the machine is made of.
pub(super) struct Specification<'a> {
    /// Memory in MiB.
    pub memory: u32,
    /// Number of processors.
    pub cpus: u32,
    /// Whether systemd is the first process.
    pub systemd: bool,
    /// Tags of the shared folders, the root file system first.
    pub tags: &'a [String],
    /// A disk in the file [`disk`].
    pub disk: Option<Disk>,
    /// Folder of the sockets and the kernel's log.
    pub folder: &'a Path,
}

/// An empty disk, `/dev/vda` in the machine once its module `virtio_blk` is loaded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Disk {
    /// Size in MiB.
    pub size: u32,
    /// Most read requests that it serves in a second.
    pub reads_per_second: u32,
}

/// The file of the disk.
pub(super) fn disk(folder: &Path) -> PathBuf {
    folder.join("disk.raw")
}

/// The socket of a port or of a shared folder.
pub(super) fn socket(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.sock"))
}

/// The file of the kernel's messages.
pub(super) fn kernel_log(folder: &Path) -> PathBuf {
    folder.join("kernel.log")
}

/// qemu's arguments.
fn arguments(machine: &Specification<'_>) -> Vec<OsString> {
    let mut words: Vec<OsString> =
        ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"].map(Into::into).into();
    let mut add = |option: &str, value: OsString| words.extend([option.into(), value]);
    add("-accel", "tcg,thread=multi".into());
    add("-cpu", "max".into());
    add("-smp", machine.cpus.to_string().into());
    add("-m", format!("{}M", machine.memory).into());
    // The daemons that share folders access the memory of the machine.
    add("-object", format!("memory-backend-memfd,id=memory,size={}M,share=on", machine.memory).into());
    add("-machine", "q35,memory-backend=memory".into());
    add("-append", kernel_parameters(machine.systemd).into());
    add("-serial", argument("file:", &kernel_log(machine.folder)));
    add("-device", "virtio-rng-pci".into());
    for tag in machine.tags {
        add("-chardev", argument(&format!("socket,id={tag},path="), &socket(machine.folder, tag)));
        add("-device", format!("vhost-user-fs-pci,chardev={tag},tag={tag}").into());
    }
    if let Some(Disk { reads_per_second, .. }) = machine.disk {
        let drive = format!("if=none,id=disk,format=raw,throttling.iops-read={reads_per_second},file=");
        add("-drive", argument(&drive, &disk(machine.folder)));
        add("-device", "virtio-blk-pci,drive=disk".into());
    }
    add("-device", "virtio-serial-pci".into());
    for port in PORTS {
        add("-chardev", argument(&format!("socket,id={port},path="), &socket(machine.folder, port)));
        add("-device", format!("virtserialport,chardev={port},name={port}").into());
    }
    words
}

/// Errors only are written to the emulated serial port, which is slow; a panic ends the machine at once.
fn kernel_parameters(systemd: bool) -> String {
    let mark = if systemd { " vm.systemd" } else { "" };
    format!(
        "console=ttyS0 loglevel=4 panic=-1 reboot=t psi=1 mitigations=off root={ROOT} rootfstype=virtiofs ro \
         init=/vm/init{mark}"
    )
}

fn argument(prefix: &str, path: &Path) -> OsString {
    let mut word = OsString::from(prefix);
    word.push(path);
    word
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_has_a_port_and_a_device_per_socket() {
        let tags = [ROOT.to_owned(), "share0".to_owned()];
        let machine =
            Specification { memory: 512, cpus: 1, systemd: true, tags: &tags, disk: None, folder: Path::new("/t") };
        let words = arguments(&machine);
        let text = words.join(" ".as_ref()).into_string().unwrap();
        for name in ["control", "stdout", "stderr", ROOT, "share0"] {
            assert!(text.contains(&format!("socket,id={name},path=/t/{name}.sock")), "{text}");
            assert!(text.contains(&format!("chardev={name},")), "{text}");
        }
        assert!(text.contains("-m 512M") && text.contains("size=512M"), "{text}");
        assert!(text.contains("init=/vm/init vm.systemd"), "{text}");
        assert!(!kernel_parameters(false).contains("vm.systemd"));
        assert!(!text.contains("-drive"), "{text}");
        let machine = Specification { disk: Some(Disk { size: 64, reads_per_second: 300 }), ..machine };
        let text = arguments(&machine).join(" ".as_ref()).into_string().unwrap();
        assert!(text.contains("throttling.iops-read=300,file=/t/disk.raw -device virtio-blk-pci,drive=disk"), "{text}");
    }
}
