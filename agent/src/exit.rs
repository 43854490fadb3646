//! Exit codes of the process.

use std::process::ExitCode;
use std::process::Termination;

use crate::config::ConfigError;

/// The meaning of an exit code. Service managers decide by it whether starting again may help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Done, or stopped by a signal.
    Success = 0,
    /// Something failed that may succeed another time.
    Failure = 1,
    /// The command line does not make sense.
    Usage = 2,
    /// The configuration is not acceptable; starting again will not help.
    Configuration = 3,
}

impl Exit {
    /// The code that goes with an error.
    pub fn of(error: &anyhow::Error) -> Self {
        if error.downcast_ref::<ConfigError>().is_some() { Self::Configuration } else { Self::Failure }
    }
}

impl Termination for Exit {
    fn report(self) -> ExitCode {
        ExitCode::from(self as u8)
    }
}

#[cfg(test)]
mod tests {
    use anyhow::Context as _;

    use super::*;

    #[test]
    fn configuration_errors_are_found_below_their_context() {
        let refused = || ConfigError::Invalid { violations: Vec::new() };
        assert_eq!(Exit::of(&refused().into()), Exit::Configuration);
        let with_context = Err::<(), _>(refused()).context("cannot start").expect_err("an error");
        assert_eq!(Exit::of(&with_context), Exit::Configuration);
        assert_eq!(Exit::of(&anyhow::anyhow!("anything else")), Exit::Failure);
    }
}
