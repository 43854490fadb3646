//! Returns memory when the pods of the node come to rest.

use std::time::Duration;

use tokio::task::JoinSet;

use crate::kernel::memory;
use crate::kernel::program_pages;
use crate::model::named;
use crate::pacing::Priority;

/// How long no container was started and no pod stopped. Longer than the pauses of a rollout, so that its pods find the
/// code mapped that the ones before have used.
const REST: Duration = Duration::from_secs(30);

/// Returns memory at each such moment, of which the first is that after the start of the agent.
pub(super) fn return_at_rest(priority: Priority, tasks: &mut JoinSet<()>) {
    let returning = async move {
        let return_memory = || {
            // Walking the allocator's arenas takes milliseconds.
            tokio::task::spawn_blocking(|| {
                memory::return_all();
                program_pages::unmap();
            });
        };
        priority.after_bursts(REST, return_memory).await;
    };
    tasks.spawn(named("return of memory", returning));
}
