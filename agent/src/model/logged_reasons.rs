//! Which reasons of lasting failures have been logged. Pure.

use std::collections::HashMap;

/// The last reason of each failure that lasts, so that each change of it is logged once and not each attempt.
#[derive(Clone, Debug, Default)]
pub struct LoggedReasons(HashMap<String, String>);

impl LoggedReasons {
    /// `what` has failed. True if the reason is another than the last time, so that it is to be logged.
    pub fn is_new(&mut self, what: &str, reason: &str) -> bool {
        let is_new = self.0.get(what).map(String::as_str) != Some(reason);
        if is_new {
            self.0.insert(what.to_owned(), reason.to_owned());
        }
        is_new
    }

    /// `what` has succeeded: its next failure is logged.
    pub fn succeeded(&mut self, what: &str) {
        self.0.remove(what);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_change_of_a_reason_is_new_once() {
        let mut logged = LoggedReasons::default();
        let table = [("a", "x", true), ("a", "x", false), ("b", "x", true), ("a", "y", true), ("a", "x", true)];
        for (what, reason, expected) in table {
            assert_eq!(logged.is_new(what, reason), expected, "{what} {reason}");
        }
        logged.succeeded("a");
        assert!(logged.is_new("a", "x"), "again after a success");
        assert!(!logged.is_new("b", "x"));
    }
}
