//! Runs systemd, a bus and logind in namespaces of their own, with a program as the service of `deploy/keblet.service`.
//! No unit of the system is started, and nothing outside of the namespaces is changed; powering off only ends the
//! processes.
//!
//! `private-systemd FOLDER CGROUP LOG PROGRAM ARGUMENT...`: units and traces are written to FOLDER, the machine's
//! cgroups are below CGROUP (cgroup v2), the output of the service goes to LOG.

use std::ffi::OsString;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use anyhow::bail;
use nix::mount::MntFlags;
use nix::mount::MsFlags;
use nix::mount::mount;
use nix::mount::umount2;

const USAGE: &str = "usage: private-systemd FOLDER CGROUP LOG PROGRAM ARGUMENT...";
/// First argument of the second execution, in the new namespaces.
const INSIDE: &str = "--inside";
const CGROUPS: &str = "/sys/fs/cgroup";
/// Folders with the state of a machine; empty tmpfs mounts here.
const FRESH: [&str; 3] = ["/run", "/etc/systemd", "/var/lib/systemd"];

const UNITS: [(&str, &str); 7] = [
    ("machine.target", "[Unit]\nDefaultDependencies=no\nRequires=dbus.service systemd-logind.service keblet.service\n"),
    ("dbus.socket", "[Unit]\nDefaultDependencies=no\n[Socket]\nListenStream=/run/dbus/system_bus_socket\n"),
    (
        "dbus.service",
        "[Unit]\nDefaultDependencies=no\nRequires=dbus.socket\n[Service]\nType=notify\n\
         ExecStart=/usr/bin/dbus-daemon --system --address=systemd: --nofork --nopidfile --systemd-activation\n",
    ),
    (
        "systemd-logind.service",
        "[Unit]\nDefaultDependencies=no\nAfter=dbus.service\n[Service]\nType=notify\n\
         BusName=org.freedesktop.login1\nExecStart=/lib/systemd/systemd-logind\n",
    ),
    ("keblet.service", include_str!("../../../deploy/keblet.service")),
    ("poweroff.target", "[Unit]\nDefaultDependencies=no\nRequires=off.service\nAfter=off.service\n"),
    // The traces have the time of the power-off.
    (
        "off.service",
        "[Unit]\nDefaultDependencies=no\nSuccessAction=exit-force\n[Service]\nType=oneshot\n\
         ExecStart=/bin/sh -c 'read up rest < /proc/uptime; echo $$up > @FOLDER@/off'\n",
    ),
];

fn main() -> anyhow::Result<()> {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    match arguments.split_first() {
        Some((first, rest)) if first == INSIDE => boot(Path::new(rest.first().context(USAGE)?)),
        _ => outside(&arguments),
    }
}

/// Writes the units and executes this program again in new namespaces, below the cgroup.
fn outside(arguments: &[OsString]) -> anyhow::Result<()> {
    let [folder, cgroup, log, service @ ..] = arguments else { bail!(USAGE) };
    let (folder, cgroup) = (PathBuf::from(folder), Path::new(cgroup));
    let units = folder.join("units");
    for path in [&units, &folder.join("none"), &units.join("keblet.service.d"), cgroup] {
        fs::create_dir_all(path).with_context(|| format!("cannot create {}", path.display()))?;
    }
    let write = |name: &str, text: &str| {
        let path = units.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    for (name, text) in UNITS {
        write(name, &text.replace("@FOLDER@", &folder.display().to_string()))?;
    }
    let command =
        service.join(" ".as_ref()).into_string().map_err(|_| anyhow::anyhow!("the command line is not UTF-8"))?;
    let log = Path::new(log).display();
    let ours = format!(
        "[Unit]\nDefaultDependencies=no\nAfter=systemd-logind.service\n[Service]\nExecStart=\nExecStart={command}\n\
         StandardOutput=append:{log}\nStandardError=append:{log}\n"
    );
    write("keblet.service.d/test.conf", &ours)?;
    let members = cgroup.join("cgroup.procs");
    fs::write(&members, "0").with_context(|| format!("cannot enter {}", cgroup.display()))?;
    let own = std::env::current_exe().context("cannot determine the path of this program")?;
    let namespaces = ["--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--uts", "--ipc", "--cgroup"];
    let error = Command::new("unshare").args(namespaces).arg(own).arg(INSIDE).arg(folder).exec();
    Err(error).context("cannot execute unshare")
}

/// Mounts the file systems of the new machine and executes systemd.
fn boot(folder: &Path) -> anyhow::Result<()> {
    for path in FRESH.iter().filter(|path| Path::new(path).is_dir()) {
        put(None, path, Some("tmpfs"), MsFlags::empty())?;
    }
    let machine = folder.join("machine-id");
    let id = format!("{:016x}{:016x}\n", fastrand::u64(1..), fastrand::u64(..));
    fs::write(&machine, id).with_context(|| format!("cannot write {}", machine.display()))?;
    put(Some(&machine), "/etc/machine-id", None, MsFlags::MS_BIND)?;
    put(Some(Path::new("/proc/sys")), "/proc/sys", None, MsFlags::MS_BIND)?;
    put(None, "/proc/sys", None, MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY)?;
    umount2(CGROUPS, MntFlags::MNT_DETACH).with_context(|| format!("cannot unmount {CGROUPS}"))?;
    put(None, CGROUPS, Some("cgroup2"), MsFlags::empty())?;
    // Without the system's units and generators.
    let (units, none) = (folder.join("units"), folder.join("none"));
    let error = Command::new("/lib/systemd/systemd")
        .args(["--system", "--unit=machine.target"])
        .env("container", "keblet")
        .env("SYSTEMD_UNIT_PATH", units)
        .env("SYSTEMD_GENERATOR_PATH", &none)
        .env("SYSTEMD_ENVIRONMENT_GENERATOR_PATH", &none)
        .env("SYSTEMD_LOG_TARGET", "console")
        .exec();
    Err(error).context("cannot execute systemd")
}

fn put(what: Option<&Path>, at: &str, kind: Option<&str>, flags: MsFlags) -> anyhow::Result<()> {
    mount(what, at, kind, flags, None::<&str>).with_context(|| format!("cannot mount {at}"))
}
