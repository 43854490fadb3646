//! Sums up the results of the test runner.

use anyhow::Result;

/// How many tests passed and failed.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Tally {
    /// Passed.
    pub passed: usize,
    /// Failed.
    pub failed: usize,
}

impl Tally {
    /// Adds the result of one part, such as of one half of a tier. One that could not be run counts as a failed test, and
    /// what the others have shown stays.
    pub(crate) fn add(&mut self, part: Result<Self>) {
        let part = part.unwrap_or_else(|error| {
            println!("error: {error:#}");
            Self { passed: 0, failed: 1 }
        });
        self.passed += part.passed;
        self.failed += part.failed;
    }

    /// Adds a line of the runner's output if it is a result.
    pub(crate) fn read(&mut self, line: &str) {
        let plain = without_colours(line);
        let Some(result) = plain.strip_prefix("test result: ") else { return };
        for part in result.split([';', '.']) {
            let mut words = part.split_whitespace();
            if let (Some(count), Some(what)) = (words.next().and_then(|word| word.parse::<usize>().ok()), words.next())
            {
                match what {
                    "passed" => self.passed += count,
                    "failed" => self.failed += count,
                    _ => {}
                }
            }
        }
    }
}

fn without_colours(line: &str) -> String {
    let mut plain = String::new();
    let mut characters = line.chars();
    while let Some(character) = characters.next() {
        if character == '\u{1b}' {
            // A colour's escape sequence ends with its first letter.
            characters.by_ref().find(char::is_ascii_alphabetic);
        } else {
            plain.push(character);
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn a_part_that_could_not_be_run_is_one_failure_and_keeps_the_results_of_the_others() {
        let mut tally = Tally::default();
        tally.add(Ok(Tally { passed: 5, failed: 2 }));
        tally.add(Err(anyhow!("a download failed")));
        tally.add(Ok(Tally { passed: 1, failed: 0 }));
        assert_eq!(tally, Tally { passed: 6, failed: 3 });
    }

    #[test]
    fn tally_sums_only_result_lines() {
        let mut tally = Tally::default();
        for line in [
            "running 3 tests",
            "test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 1.00s",
            "test a::b ... ok",
            "test result: \u{1b}[31mFAILED\u{1b}[m. 5 passed; 3 failed; 0 ignored; 0 measured; 7 filtered out; finished in 0.02s",
            "I said: test result: ok. 9 passed; 9 failed",
        ] {
            tally.read(line);
        }
        assert_eq!(tally, Tally { passed: 7, failed: 3 });
    }
}
