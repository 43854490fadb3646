//! Applies `maxOpenFiles` to the agent.

use crate::kernel::open_files;

/// Sets the limit. One that cannot be reached is logged: it delays no pod.
pub(super) fn limit(wanted: i64) {
    let wanted = u64::try_from(wanted).unwrap_or_default();
    match open_files::limit(wanted) {
        Ok(holds) if holds < wanted => {
            let lack = "raising it needs CAP_SYS_RESOURCE";
            tracing::info!(maxOpenFiles = wanted, holds, lack, "the limit of open files is lower");
        }
        Ok(_) => {}
        Err(error) => tracing::warn!(maxOpenFiles = wanted, %error, "cannot set the limit of open files"),
    }
}
