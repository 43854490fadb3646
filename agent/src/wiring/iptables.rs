//! Keeps the iptables chains that other programs rely on.

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::host_program::HostPrograms;
use crate::iptables;
use crate::model::named;
use crate::model::until;

/// Makes and watches the chains if `makeIPTablesUtilChains` is set, beside the start of the agent. They stay when it ends.
pub(super) fn keep(wanted: bool, tasks: &mut JoinSet<()>, shutdown: &CancellationToken) {
    if wanted {
        tasks.spawn(named("iptables chains", until(shutdown.clone(), iptables::keep(&HostPrograms))));
    }
}
