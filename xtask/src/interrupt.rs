//! Handles Ctrl-C and SIGTERM, so that started processes can be cleaned up before this process exits.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;

use anyhow::Context as _;
use anyhow::Result;
use signal_hook::consts::SIGHUP;
use signal_hook::consts::SIGINT;
use signal_hook::consts::SIGTERM;
use signal_hook::flag;

/// Whether SIGINT or SIGTERM arrived.
pub(crate) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Handles SIGINT, SIGTERM and SIGHUP. Child processes do not inherit handlers, whereas they would inherit a mask
    /// of blocked signals.
    ///
    /// # Errors
    /// A handler cannot be installed.
    pub(crate) fn install() -> Result<Self> {
        let raised = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            flag::register(signal, Arc::clone(&raised)).with_context(|| format!("cannot handle signal {signal}"))?;
        }
        Ok(Self(raised))
    }

    /// Whether one of the signals was received.
    pub(crate) fn raised(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}
