//! Several errors as one text, as upstream's `Aggregate` has it.

use indexmap::IndexSet;

/// A single text as it is, several as `[a, b]`, equal ones once.
pub fn aggregate(texts: impl IntoIterator<Item = String>) -> String {
    let distinct: IndexSet<String> = texts.into_iter().collect();
    let joined = distinct.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
    if distinct.len() > 1 { format!("[{joined}]") } else { joined }
}

#[cfg(test)]
mod tests {
    #[test]
    fn several_texts_are_in_brackets_and_each_is_there_once() {
        for (texts, expected) in [(vec!["a"], "a"), (vec!["a", "b", "a"], "[a, b]"), (vec!["a", "a"], "a")] {
            assert_eq!(super::aggregate(texts.into_iter().map(str::to_owned)), expected);
        }
    }
}
