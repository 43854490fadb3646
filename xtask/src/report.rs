//! The result of a check of the tree.

use std::process::ExitCode;

/// The result of a check.
#[derive(Debug)]
pub(crate) struct Report {
    /// What was checked.
    pub what: String,
    /// One sentence per problem.
    pub problems: Vec<String>,
}

impl Report {
    /// A report without problems.
    pub(crate) fn new(what: String) -> Self {
        Self { what, problems: Vec::new() }
    }

    /// Prints the report; returns failure if there is a problem.
    pub(crate) fn print(&self) -> ExitCode {
        if self.problems.is_empty() {
            println!("{}: ok", self.what);
            return ExitCode::SUCCESS;
        }
        for problem in &self.problems {
            println!("{problem}");
        }
        println!("{}: {} wrong", self.what, self.problems.len());
        ExitCode::FAILURE
    }
}
