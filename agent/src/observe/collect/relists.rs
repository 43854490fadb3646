//! Unmaps the program's code after each list of all pods.
//!
//! A list, and the inspections and the measurement that follow it, use code that nothing else uses here, for a few milliseconds
//! of ten seconds or more. The kernel maps 64 KiB around each page that is used: 11 MiB would stay resident until the next list.

use std::time::Duration;

use crate::events::RelistReason;
use crate::kernel::program_pages;
use crate::model::LifecycleEvent;
use crate::pleg::PlegObserver;

/// From the end of a list until what follows it has ended.
const DELAY: Duration = Duration::from_secs(1);

/// For the PLEG of `observe`. An agent uses the same code for other calls all the time.
pub(super) struct UnmapAfterRelist;

impl PlegObserver for UnmapAfterRelist {
    fn relist(&self, _reason: RelistReason, _took: Duration, _interval: Option<Duration>, _ok: bool) {
        tokio::spawn(async {
            tokio::time::sleep(DELAY).await;
            program_pages::unmap();
        });
    }

    fn event(&self, _event: &LifecycleEvent, _latency: Option<Duration>) {}
    fn inspection(&self, _took: Duration, _ok: bool) {}
    fn contradiction(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::program_pages::testing::Page;

    #[tokio::test(start_paused = true)]
    async fn what_a_list_used_is_unmapped() {
        let page = Page::new();
        assert_eq!(page.read(), 7);
        UnmapAfterRelist.relist(RelistReason::Period, Duration::from_millis(5), None, true);
        assert!(page.is_mapped());
        tokio::time::sleep(2 * DELAY).await;
        assert!(!page.is_mapped());
    }
}
