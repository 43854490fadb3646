//! Registers a trigger; without `CAP_SYS_RESOURCE` with a window that the kernel allows then.

use std::io;
use std::path::Path;
use std::time::Duration;

use crate::config::pressure::Trigger;
use crate::kernel::psi::PsiTrigger;

/// Without `CAP_SYS_RESOURCE` windows are multiples of this (`PSI_FREQ` of the kernel).
const UNPRIVILEGED: Duration = Duration::from_secs(2);
/// The longest such window.
const LONGEST: Duration = Duration::from_secs(10);

/// A registered trigger.
#[derive(Debug)]
pub(super) struct Opened {
    /// The kernel's side.
    pub psi: PsiTrigger,
    /// As it was registered.
    pub trigger: Trigger,
    /// How it differs from what was configured.
    pub lack: Option<String>,
}

/// Registers a trigger on a pressure file, if need be with the next longer window that needs no capability.
///
/// # Errors
/// The kernel has no pressure stall information there, or refuses both windows.
pub(super) fn open(file: &Path, trigger: &Trigger) -> io::Result<Opened> {
    let register = |trigger: &Trigger| PsiTrigger::open(file, trigger.kind.as_str(), trigger.stall, trigger.window);
    let error = match register(trigger) {
        Ok(psi) => return Ok(Opened { psi, trigger: *trigger, lack: None }),
        Err(error) => error,
    };
    let Some(longer) = without_capability(trigger) else { return Err(error) };
    // The first error says more where the second has the same reason.
    let psi = register(&longer).map_err(|_| error)?;
    let (window, used) = (trigger.window, longer.window);
    tracing::info!(level = %trigger, ?window, ?used, "the window needs CAP_SYS_RESOURCE; a longer one is used");
    let lack = format!("{trigger}: a window of {window:?} needs CAP_SYS_RESOURCE, {used:?} is used");
    Ok(Opened { psi, trigger: longer, lack: Some(lack) })
}

/// The trigger with the next allowed window, and the same part of it waited; `None` if its window is allowed.
fn without_capability(trigger: &Trigger) -> Option<Trigger> {
    let units = trigger.window.as_micros().div_ceil(UNPRIVILEGED.as_micros());
    let window = (UNPRIVILEGED * u32::try_from(units).ok()?).min(LONGEST);
    let scaled = |time: Duration| {
        let micros = time.as_micros() * window.as_micros() / trigger.window.as_micros();
        Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
    };
    let (stall, leave_stall) = (scaled(trigger.stall), scaled(trigger.leave_stall));
    (window != trigger.window).then_some(Trigger { stall, window, leave_stall, ..*trigger })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::pressure::PressureSettings;

    #[test]
    fn windows_grow_to_what_needs_no_capability() {
        let trigger = PressureSettings::default().triggers()[0];
        let millis = Duration::from_millis;
        for (window, allowed) in
            [(500, Some(2000)), (1999, Some(2000)), (2001, Some(4000)), (9000, Some(10_000)), (4000, None)]
        {
            let trigger = Trigger { window: millis(window), stall: millis(window) / 10, ..trigger };
            let found = without_capability(&trigger);
            assert_eq!(found.map(|found| found.window), allowed.map(millis), "{window}");
            if let Some(found) = found {
                assert_eq!(found.stall, found.window / 10, "the same part");
            }
        }
    }

    #[tokio::test]
    async fn a_file_that_is_no_pressure_file_is_refused() {
        let trigger = PressureSettings::default().triggers()[0];
        let error = open(Path::new("/no/such/file"), &trigger).expect_err("there is none");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
