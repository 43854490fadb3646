//! Ctrl-C and SIGTERM: noticed, so that what was started can be cleaned up, instead of ending us on the spot.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;
use std::thread;

use anyhow::Context as _;
use anyhow::Result;
use nix::sys::signal::SigSet;
use nix::sys::signal::Signal;

/// Whether somebody wants us to end.
#[derive(Clone)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Takes over SIGINT, SIGTERM and SIGHUP. To be called before any thread is started; programs started later get
    /// the signals as ever, as the standard library clears the mask for them.
    pub fn install() -> Result<Self> {
        let signals: SigSet = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP].into_iter().collect();
        signals.thread_block().context("cannot block signals")?;
        let flag = Arc::new(AtomicBool::new(false));
        let raised = Arc::clone(&flag);
        thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || {
                while signals.wait().is_ok() {
                    raised.store(true, Ordering::SeqCst);
                }
            })
            .context("cannot start a thread for signals")?;
        Ok(Self(flag))
    }

    /// True once one of the signals came.
    pub fn raised(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}
