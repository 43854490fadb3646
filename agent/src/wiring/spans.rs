//! The export of spans.

use anyhow::Context as _;
use tokio::runtime::Runtime;

use crate::cli::host;
use crate::config::Settings;
use crate::telemetry::Spans;

/// Prepares the export of spans as `tracing:` configures it; `None` without that section. Nothing is sent before the layer
/// is installed.
///
/// # Errors
/// An invalid endpoint, or a host without a name.
pub fn spans(settings: &Settings, runtime: &Runtime) -> anyhow::Result<Option<Spans>> {
    let Some(config) = &settings.kubelet.tracing else { return Ok(None) };
    let host = host::node_name(&settings.flags.hostname_override)
        .context("could not determine hostname for tracer provider")?;
    let _inside = runtime.enter();
    Ok(Some(Spans::new(config, &host)?))
}
