//! Ctrl-C and SIGTERM: noticed, so that what was started can be cleaned up, instead of ending us on the spot.

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
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Takes over SIGINT, SIGTERM and SIGHUP. By handlers, which programs that we start do not inherit; a blocked
    /// signal would stay blocked in them.
    pub fn install() -> Result<Self> {
        let raised = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            flag::register(signal, Arc::clone(&raised)).with_context(|| format!("cannot handle signal {signal}"))?;
        }
        Ok(Self(raised))
    }

    /// True once one of the signals came.
    pub fn raised(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}
