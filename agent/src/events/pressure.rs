//! The memory pressure of the node as an event, so that the eviction manager need not poll for it.

use std::io;
use std::path::Path;
use std::time::Duration;

use tokio::sync::mpsc;

use super::sensors::Sensor;
use super::sensors::SensorBoard;
use super::sensors::SensorState;
use crate::kernel::psi::PsiTrigger;

/// The node's memory pressure.
pub const MEMORY: &str = "/proc/pressure/memory";
/// Stall and window of the notification. The kernel looks ten times within a window that needs a capability, and every two
/// seconds otherwise.
const FAST: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(500));
const UNPRIVILEGED: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// Sends on `wake` whenever memory is short. Ends when `wake` has no receiver, or at once if the kernel has no notifications,
/// with the reason on the board.
pub async fn follow(pressure_file: &Path, board: SensorBoard, wake: mpsc::Sender<()>) {
    let trigger = match open(pressure_file) {
        Ok(trigger) => trigger,
        Err(error) => {
            let reason = format!("{}: {error}", pressure_file.display());
            return board.set(Sensor::Pressure, SensorState::Down(reason));
        }
    };
    board.set(Sensor::Pressure, SensorState::Up);
    loop {
        let exceeded = tokio::select! {
            exceeded = trigger.exceeded() => exceeded,
            () = wake.closed() => return,
        };
        if let Err(error) = exceeded {
            return board.set(Sensor::Pressure, SensorState::Down(error.to_string()));
        }
        // A full channel holds a notification that was not taken yet.
        let _ = wake.try_send(());
    }
}

fn open(pressure_file: &Path) -> io::Result<PsiTrigger> {
    let (stall, window) = FAST;
    PsiTrigger::open(pressure_file, stall, window).or_else(|_| {
        let (stall, window) = UNPRIVILEGED;
        PsiTrigger::open(pressure_file, stall, window)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_kernel_without_notifications_is_reported() {
        let (board, (wake, mut woken)) = (SensorBoard::default(), mpsc::channel(1));
        follow(Path::new("/no/such/file"), board.clone(), wake).await;
        let Some(SensorState::Down(reason)) = board.get(Sensor::Pressure) else { panic!("{:?}", board.report()) };
        assert!(reason.starts_with("/no/such/file: "), "{reason}");
        assert_eq!(woken.recv().await, None, "the sender is gone");
    }
}
