//! The bridge of the pods, to which CNI plugins attach them.

use std::path::Path;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use keblet_peers::Cache;
use tokio::process::Command;

use crate::config::Layout;

/// Creates the bridge and assigns the host the first address of the network.
///
/// Not left to the bridge plugin, which would enable IP forwarding on the whole host.
///
/// # Errors
/// `ip` fails.
pub(crate) async fn create(layout: &Layout, cache: &Cache) -> Result<()> {
    let bridge = layout.bridge.as_str();
    ip(cache, &["link", "add", "name", bridge, "type", "bridge"]).await?;
    ip(cache, &["addr", "add", &layout.host_address(), "dev", bridge]).await?;
    ip(cache, &["link", "set", "dev", bridge, "up"]).await
}

/// Removes the bridge if it exists.
///
/// # Errors
/// `ip` fails.
pub(crate) async fn remove(layout: &Layout, cache: &Cache) -> Result<()> {
    if exists(layout) { ip(cache, &["link", "del", "dev", &layout.bridge]).await } else { Ok(()) }
}

/// Whether the bridge exists.
pub(crate) fn exists(layout: &Layout) -> bool {
    Path::new("/sys/class/net").join(&layout.bridge).exists()
}

/// Runs `ip` of the static busybox, as the host may not have it.
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
