//! Detects tests that use a kubelet's default ports or folders: the ports are taken while the tests run, and the
//! folders are compared before and after, unless a kubelet runs here, which changes them itself.

use std::collections::BTreeMap;
use std::fs;
use std::net::Ipv4Addr;
use std::net::TcpListener;
use std::path::Path;
use std::path::PathBuf;
use std::time::SystemTime;

use anyhow::Result;
use anyhow::bail;

/// Defaults of `port`, `healthzPort` and `readOnlyPort`.
/// <https://kubernetes.io/docs/reference/networking/ports-and-protocols/>
const PORTS: [u16; 3] = [10250, 10248, 10255];
/// Defaults of `--root-dir`, `--cert-dir`, `podLogsDir`, `volumePluginDir` and kubeadm's folder. Not
/// `/var/log/containers`, which private runtimes of other tests use at the same time.
const FOLDERS: [&str; 5] =
    ["/var/lib/kubelet", "/var/log/pods", "/usr/libexec/kubernetes", "/etc/kubernetes", "/etc/systemd/logind.conf.d"];

type Entries = BTreeMap<PathBuf, Option<SystemTime>>;

/// Holds the ports until it is dropped.
pub(super) struct HostGuard {
    _ports: Vec<TcpListener>,
    folders: Vec<PathBuf>,
    before: Entries,
}

impl HostGuard {
    /// Binds the ports and records the entries of the folders.
    ///
    /// # Errors
    /// A port cannot be bound for another reason than that it is in use.
    pub(super) fn start() -> Result<Self> {
        Self::of(&PORTS, FOLDERS.map(PathBuf::from).to_vec())
    }

    /// Binds the loopback address only: that prevents others from listening there or on all addresses, but not on the
    /// addresses of test nodes.
    fn of(ports: &[u16], folders: Vec<PathBuf>) -> Result<Self> {
        let (mut held, mut is_beside_kubelet) = (Vec::new(), false);
        for port in ports {
            match TcpListener::bind((Ipv4Addr::LOCALHOST, *port)) {
                Ok(listener) => held.push(listener),
                // A port in use needs no guard: a test cannot bind it either.
                Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => is_beside_kubelet = true,
                Err(error) => bail!("cannot bind port {port}: {error}"),
            }
        }
        if is_beside_kubelet {
            println!("a port of a kubelet is in use: its folders are not compared, as it changes them itself");
        }
        let folders = if is_beside_kubelet { Vec::new() } else { folders };
        let before = entries(&folders);
        Ok(Self { _ports: held, folders, before })
    }

    /// Paths below the folders that were created, changed or removed.
    pub(super) fn changes(&self) -> Vec<String> {
        let after = entries(&self.folders);
        let all = self.before.keys().chain(after.keys().filter(|path| !self.before.contains_key(*path)));
        let changed = all.filter(|path| self.before.get(*path) != after.get(*path));
        changed.map(|path| path.display().to_string()).collect()
    }
}

fn entries(folders: &[PathBuf]) -> Entries {
    let mut entries = Entries::new();
    folders.iter().for_each(|folder| add(folder, &mut entries));
    entries
}

fn add(path: &Path, entries: &mut Entries) {
    let Ok(metadata) = fs::symlink_metadata(path) else { return };
    entries.insert(path.to_owned(), metadata.modified().ok());
    if metadata.is_dir() {
        fs::read_dir(path).into_iter().flatten().flatten().for_each(|entry| add(&entry.path(), entries));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guarded_ports_cannot_be_bound() {
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let guard = HostGuard::of(&[port], Vec::new()).unwrap();
        for address in [Ipv4Addr::LOCALHOST, Ipv4Addr::UNSPECIFIED] {
            assert!(TcpListener::bind((address, port)).is_err(), "{address}");
        }
        drop(guard);
        TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).unwrap();
    }

    #[test]
    fn what_a_running_kubelet_changes_is_not_reported() {
        let kubelet = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let root = tempfile::tempdir().unwrap();
        let port = kubelet.local_addr().unwrap().port();
        let guard = HostGuard::of(&[port], vec![root.path().to_owned()]).unwrap();
        fs::write(root.path().join("log"), "").unwrap();
        assert_eq!(guard.changes(), Vec::<String>::new());
    }

    #[test]
    fn new_changed_and_removed_files_are_reported() {
        let root = tempfile::tempdir().unwrap();
        let (absent, present) = (root.path().join("absent"), root.path().join("present"));
        fs::create_dir_all(present.join("old")).unwrap();
        let guard = HostGuard::of(&[], vec![absent.clone(), present.clone()]).unwrap();
        assert_eq!(guard.changes(), Vec::<String>::new());
        fs::create_dir(&absent).unwrap();
        fs::remove_dir(present.join("old")).unwrap();
        fs::write(present.join("new"), "").unwrap();
        let changes = guard.changes();
        for path in [absent, present.join("old"), present.join("new")] {
            assert!(changes.contains(&path.display().to_string()), "{changes:?}");
        }
    }
}
