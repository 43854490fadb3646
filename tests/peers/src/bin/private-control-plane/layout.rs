//! Address, ports, folders and files of one control plane. Creates only the folder.

use std::fs;
use std::net::Ipv4Addr;
use std::net::SocketAddrV4;
use std::net::TcpListener;
use std::path::PathBuf;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use keblet_peers::Part;

/// How many addresses are tried; two collide once in four million.
const ATTEMPTS: usize = 8;

/// Names and paths of one control plane.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    /// Upstream's programs.
    pub programs: PathBuf,
    /// The folder of all files.
    pub dir: PathBuf,
    /// The loopback address on which all components listen.
    pub address: Ipv4Addr,
    /// The port of each listener.
    pub ports: Ports,
}

/// Free ports of the address. They stay free because no other program uses the address.
#[derive(Clone, Debug)]
pub(crate) struct Ports {
    /// etcd, for clients.
    pub etcd: u16,
    /// etcd, for other members; required although there are none.
    pub etcd_peer: u16,
    /// The API server.
    pub api_server: u16,
    /// Health and metrics of the controller manager.
    pub controller_manager: u16,
    /// Health and metrics of the scheduler.
    pub scheduler: u16,
    /// The metrics API.
    pub metrics_server: u16,
}

impl Layout {
    /// Chooses an unused address and creates the folder.
    ///
    /// # Errors
    /// No address has free ports, or the folder cannot be created.
    pub(crate) fn create(programs: PathBuf) -> Result<Self> {
        // The default seed is the time: processes that begin at the same moment would choose the same names and addresses.
        fastrand::seed((u64::from(std::process::id()) << 32) ^ fastrand::u64(..));
        let (address, ports) = own_address()?;
        let id = format!("{:06x}", fastrand::u32(..1 << 24));
        let dir = std::env::temp_dir().join(format!("keblet-control-plane-{id}"));
        let layout = Self { programs, dir, address, ports };
        fs::create_dir(&layout.dir).with_context(|| format!("cannot create {}", layout.dir.display()))?;
        for folder in [layout.path("certificates"), layout.path("home")] {
            fs::create_dir(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        }
        Ok(layout)
    }

    /// A path in the folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Path of a certificate by its name.
    pub(crate) fn certificate(&self, name: &str) -> PathBuf {
        self.dir.join("certificates").join(format!("{name}.crt"))
    }

    /// Path of the private key of a certificate.
    pub(crate) fn key(&self, name: &str) -> PathBuf {
        self.dir.join("certificates").join(format!("{name}.key"))
    }

    /// Path of a kubeconfig by the name of its user.
    pub(crate) fn kubeconfig(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.kubeconfig"))
    }

    /// Path of a component's log.
    pub(crate) fn log(&self, part: Part) -> PathBuf {
        self.dir.join(format!("{}.log", part.program()))
    }

    /// Socket address and path of a component's readiness check.
    pub(crate) fn health(&self, part: Part) -> (SocketAddrV4, &'static str) {
        let (port, path) = match part {
            Part::Etcd => (self.ports.etcd, "/readyz"),
            Part::ApiServer => (self.ports.api_server, "/readyz"),
            Part::ControllerManager => (self.ports.controller_manager, "/healthz"),
            Part::Scheduler => (self.ports.scheduler, "/readyz"),
            // Its /readyz waits for a node's metrics, which may never exist.
            Part::MetricsServer => (self.ports.metrics_server, "/livez"),
        };
        (SocketAddrV4::new(self.address, port), path)
    }

    /// The API server's address for clients.
    pub(crate) fn server(&self) -> String {
        format!("https://{}:{}", self.address, self.ports.api_server)
    }
}

/// A loopback address on which the ports are free.
fn own_address() -> Result<(Ipv4Addr, Ports)> {
    for _ in 0..ATTEMPTS {
        let address = Ipv4Addr::new(127, fastrand::u8(64..128), fastrand::u8(..), fastrand::u8(1..255));
        if let Some(ports) = free_ports(address) {
            return Ok((address, ports));
        }
    }
    bail!("no free ports on {ATTEMPTS} addresses of 127.64.0.0/10")
}

/// Binds all ports at the same time, so that they are distinct.
fn free_ports(address: Ipv4Addr) -> Option<Ports> {
    let listeners: Vec<TcpListener> = (0..6).map(|_| TcpListener::bind((address, 0))).collect::<Result<_, _>>().ok()?;
    let mut ports = listeners.iter().map(|listener| listener.local_addr().ok().map(|address| address.port()));
    Some(Ports {
        etcd: ports.next()??,
        etcd_peer: ports.next()??,
        api_server: ports.next()??,
        controller_manager: ports.next()??,
        scheduler: ports.next()??,
        metrics_server: ports.next()??,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_is_loopback_and_ports_are_distinct() {
        let (address, ports) = own_address().unwrap();
        assert!(address.is_loopback());
        let mut all = vec![
            ports.etcd,
            ports.etcd_peer,
            ports.api_server,
            ports.controller_manager,
            ports.scheduler,
            ports.metrics_server,
        ];
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 6);
    }
}
