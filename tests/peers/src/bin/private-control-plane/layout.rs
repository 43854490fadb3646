//! Address, ports, folders and files of one control plane. Owns the names; refuses to start things.

use std::fs;
use std::net::Ipv4Addr;
use std::net::SocketAddrV4;
use std::net::TcpListener;
use std::path::PathBuf;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use keblet_peers::Part;

/// How many addresses are tried before giving up; a collision of two is one in four million.
const ATTEMPTS: usize = 8;

/// What belongs to one control plane, by name.
#[derive(Clone, Debug)]
pub struct Layout {
    /// Upstream's programs.
    pub programs: PathBuf,
    /// The folder of all files.
    pub dir: PathBuf,
    /// The loopback address that all parts listen on.
    pub address: Ipv4Addr,
    /// Which port each listens on.
    pub ports: Ports,
}

/// Free ports of the address. Nobody else uses the address, so that they stay free until they are used.
#[derive(Clone, Debug)]
pub struct Ports {
    /// etcd, for clients.
    pub etcd: u16,
    /// etcd, for other members, of which there are none.
    pub etcd_peer: u16,
    /// The API.
    pub api_server: u16,
    /// Health and metrics of the controller manager.
    pub controller_manager: u16,
    /// Health and metrics of the scheduler.
    pub scheduler: u16,
    /// The metrics API.
    pub metrics_server: u16,
}

impl Layout {
    /// Chooses names that nobody else has, and creates the folder.
    pub fn create(programs: PathBuf) -> Result<Self> {
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
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// A certificate by the name it was made for.
    pub fn certificate(&self, name: &str) -> PathBuf {
        self.dir.join("certificates").join(format!("{name}.crt"))
    }

    /// The private key of a certificate.
    pub fn key(&self, name: &str) -> PathBuf {
        self.dir.join("certificates").join(format!("{name}.key"))
    }

    /// Access to the API server by the name of who has it.
    pub fn kubeconfig(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.kubeconfig"))
    }

    /// What a part prints.
    pub fn log(&self, part: Part) -> PathBuf {
        self.dir.join(format!("{}.log", part.program()))
    }

    /// Where a part answers whether it is ready: its socket and the path.
    pub fn health(&self, part: Part) -> (SocketAddrV4, &'static str) {
        let (port, path) = match part {
            Part::Etcd => (self.ports.etcd, "/readyz"),
            Part::ApiServer => (self.ports.api_server, "/readyz"),
            Part::ControllerManager => (self.ports.controller_manager, "/healthz"),
            Part::Scheduler => (self.ports.scheduler, "/readyz"),
            // Its /readyz waits for a node's metrics, which it may never get.
            Part::MetricsServer => (self.ports.metrics_server, "/livez"),
        };
        (SocketAddrV4::new(self.address, port), path)
    }

    /// The API server's address for clients.
    pub fn server(&self) -> String {
        format!("https://{}:{}", self.address, self.ports.api_server)
    }
}

/// An address of the loopback network on which nobody listens where we are about to.
fn own_address() -> Result<(Ipv4Addr, Ports)> {
    for _ in 0..ATTEMPTS {
        let address = Ipv4Addr::new(127, fastrand::u8(64..128), fastrand::u8(..), fastrand::u8(1..255));
        if let Some(ports) = free_ports(address) {
            return Ok((address, ports));
        }
    }
    bail!("no free ports on {ATTEMPTS} addresses of 127.64.0.0/10")
}

/// All at once, so that no port is given twice.
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
