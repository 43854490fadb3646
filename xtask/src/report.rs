//! The result of a check of the tree.

use std::process::ExitCode;

/// What a check looked at and what it found.
#[derive(Debug)]
pub struct Report {
    /// What was looked at, for people.
    pub what: String,
    /// One sentence for each thing that is wrong.
    pub problems: Vec<String>,
}

impl Report {
    /// A report without problems yet.
    pub fn new(what: String) -> Self {
        Self { what, problems: Vec::new() }
    }

    /// Prints it; a failure if there is a problem.
    pub fn tell(&self) -> ExitCode {
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
