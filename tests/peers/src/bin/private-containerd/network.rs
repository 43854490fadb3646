//! The bridge of the pods. Owns its making and removal; the CNI plugins attach pods to it.

use std::path::Path;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use keblet_peers::Cache;
use tokio::process::Command;

use crate::config::Layout;

/// Makes the bridge and gives the host the first address on it.
///
/// Done here and not by the bridge plugin, which would turn on IP forwarding for the whole host.
pub async fn create(layout: &Layout, cache: &Cache) -> Result<()> {
    let bridge = layout.bridge.as_str();
    ip(cache, &["link", "add", "name", bridge, "type", "bridge"]).await?;
    ip(cache, &["addr", "add", &layout.host_address(), "dev", bridge]).await?;
    ip(cache, &["link", "set", "dev", bridge, "up"]).await
}

/// Removes the bridge if it is there.
pub async fn remove(layout: &Layout, cache: &Cache) -> Result<()> {
    if exists(layout) { ip(cache, &["link", "del", "dev", &layout.bridge]).await } else { Ok(()) }
}

/// Whether the bridge is there.
pub fn exists(layout: &Layout) -> bool {
    Path::new("/sys/class/net").join(&layout.bridge).exists()
}

/// The static busybox brings `ip` along, so the host need not have it.
async fn ip(cache: &Cache, arguments: &[&str]) -> Result<()> {
    let busybox = cache.busybox();
    let output = Command::new(&busybox)
        .arg("ip")
        .args(arguments)
        .output()
        .await
        .with_context(|| format!("cannot run {}", busybox.display()))?;
    if !output.status.success() {
        bail!("`ip {}` failed: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
