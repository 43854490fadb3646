//! Unmaps the program's code after each list of all pods.
//!
//! A list decodes what nothing else does here, in a few milliseconds of ten seconds or more. The kernel maps 64 KiB around each
//! page that is used: its code then is 7 MiB of resident memory until the next one.

use std::time::Duration;

use crate::events::RelistReason;
use crate::kernel::memory;
use crate::model::LifecycleEvent;
use crate::pleg::PlegObserver;

/// To be given to the PLEG of an observer. An agent uses the same code for other calls all the time.
pub(super) struct UnmapAfterRelist;

impl PlegObserver for UnmapAfterRelist {
    fn relist(&self, _reason: RelistReason, _took: Duration, _interval: Option<Duration>, _ok: bool) {
        memory::unmap_program();
    }

    fn event(&self, _event: &LifecycleEvent, _latency: Option<Duration>) {}
    fn inspection(&self, _took: Duration, _ok: bool) {}
    fn contradiction(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::memory::testing::Page;

    #[test]
    fn what_a_list_used_is_unmapped() {
        let page = Page::new();
        assert_eq!(page.read(), 7);
        assert!(page.is_mapped());
        UnmapAfterRelist.relist(RelistReason::Period, Duration::from_millis(5), None, true);
        assert!(!page.is_mapped());
    }
}
