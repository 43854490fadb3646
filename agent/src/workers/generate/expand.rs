//! Expansion of `$(VAR)` references in env values, commands, arguments and `subPathExpr`. Knows nothing of where
//! variables come from.

/// Replaces each `$(NAME)` that `lookup` knows; unknown ones stay as written. `$$` is an escaped `$`, so `$$(NAME)`
/// becomes the text `$(NAME)`. Nothing is expanded twice.
///
/// # Errors
/// The length of what it would become, if that is more than `limit`. References multiply: a few lines can stand for more
/// than any memory holds, so the length is counted first.
pub fn expand<'a>(text: &str, mut lookup: impl FnMut(&str) -> Option<&'a str>, limit: usize) -> Result<String, usize> {
    let mut length = 0_usize;
    pieces(text, &mut lookup, |piece| length = length.saturating_add(piece.len()));
    if length > limit {
        return Err(length);
    }
    let mut out = String::with_capacity(length);
    pieces(text, &mut lookup, |piece| out.push_str(piece));
    Ok(out)
}

/// Hands on what the text becomes, piece by piece.
fn pieces<'a>(text: &str, lookup: &mut impl FnMut(&str) -> Option<&'a str>, mut take: impl FnMut(&str)) {
    let mut rest = text;
    while let Some(dollar) = rest.find('$') {
        take(&rest[..dollar]);
        let after = &rest[dollar + 1..];
        if let Some(tail) = after.strip_prefix('$') {
            take("$");
            rest = tail;
        } else if let Some((name, tail)) = after.strip_prefix('(').and_then(|inner| inner.split_once(')')) {
            take(lookup(name).unwrap_or(&rest[dollar..dollar + name.len() + 3]));
            rest = tail;
        } else {
            take("$");
            rest = after;
        }
    }
    take(rest);
}

#[cfg(test)]
mod tests {
    use super::expand;

    fn lookup(name: &str) -> Option<&'static str> {
        match name {
            "A" => Some("1"),
            "B" => Some("$(A)"),
            "EMPTY" => Some(""),
            _ => None,
        }
    }

    #[test]
    fn expands_as_upstream_does() {
        let table = [
            ("", ""),
            ("plain", "plain"),
            ("$(A)", "1"),
            ("x$(A)y$(A)z", "x1y1z"),
            ("$(B)", "$(A)"),
            ("[$(EMPTY)]", "[]"),
            ("$(NONE)", "$(NONE)"),
            ("$$(A)", "$(A)"),
            ("$$$(A)", "$1"),
            ("$$$$(A)", "$$(A)"),
            ("$(A", "$(A"),
            ("$A", "$A"),
            ("cost: 5$", "cost: 5$"),
            ("$()", "$()"),
            ("$(A)$", "1$"),
            ("$($(A))", "$($(A))"),
            ("ä$(A)ö", "ä1ö"),
        ];
        for (text, expected) in table {
            assert_eq!(expand(text, lookup, expected.len()).as_deref(), Ok(expected), "{text:?}");
        }
    }

    #[test]
    fn what_would_grow_too_long_is_counted_and_not_made() {
        let kilobyte = "x".repeat(1 << 10);
        let huge = |_: &str| Some(kilobyte.as_str());
        assert_eq!(expand(&"$(A)".repeat(1 << 20), huge, 4096), Err(1 << 30));
        assert_eq!(expand("$(A)-", huge, 1025).map(|text| text.len()), Ok(1025));
        assert_eq!(expand("$(A)-", huge, 1024), Err(1025));
    }
}
