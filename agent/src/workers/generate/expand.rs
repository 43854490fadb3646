//! Expansion of `$(VAR)` references in env values, commands, arguments and `subPathExpr`. Values are bytes: those of
//! Secrets need not be UTF-8.

/// Replaces each `$(NAME)` that `lookup` resolves; unknown ones stay as written. `$$` is an escaped `$`, so `$$(NAME)`
/// becomes the text `$(NAME)`. Nothing is expanded twice.
///
/// # Errors
/// The length of the result, if it exceeds `limit` bytes. Nested references multiply, so the length is counted before
/// anything is allocated.
pub fn expand<'a>(
    text: &str,
    mut lookup: impl FnMut(&str) -> Option<&'a [u8]>,
    limit: usize,
) -> Result<Vec<u8>, usize> {
    let mut length = 0_usize;
    pieces(text, &mut lookup, |piece| length = length.saturating_add(piece.len()));
    if length > limit {
        return Err(length);
    }
    let mut out = Vec::with_capacity(length);
    pieces(text, &mut lookup, |piece| out.extend_from_slice(piece));
    Ok(out)
}

/// Passes the expanded text to `take`, piece by piece.
fn pieces<'a>(text: &str, lookup: &mut impl FnMut(&str) -> Option<&'a [u8]>, mut take: impl FnMut(&[u8])) {
    // No reference begins behind the last parenthesis: looking for its end would read the rest once for each `$(`.
    let last = text.rfind(')').unwrap_or_default();
    let mut rest = text;
    while let Some(dollar) = rest.find('$') {
        take(&rest.as_bytes()[..dollar]);
        let after = &rest[dollar + 1..];
        let reference = after.strip_prefix('(').filter(|inner| text.len() - inner.len() <= last);
        if let Some(tail) = after.strip_prefix('$') {
            take(b"$");
            rest = tail;
        } else if let Some((name, tail)) = reference.and_then(|inner| inner.split_once(')')) {
            take(lookup(name).unwrap_or(&rest.as_bytes()[dollar..dollar + name.len() + 3]));
            rest = tail;
        } else {
            take(b"$");
            rest = after;
        }
    }
    take(rest.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::expand;

    fn lookup(name: &str) -> Option<&'static [u8]> {
        match name {
            "A" => Some(b"1"),
            "B" => Some(b"$(A)"),
            "EMPTY" => Some(b""),
            "BINARY" => Some(b"\xff\x00\xfe"),
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
            assert_eq!(expand(text, lookup, expected.len()).as_deref(), Ok(expected.as_bytes()), "{text:?}");
        }
    }

    #[test]
    fn references_without_an_end_are_read_once() {
        let text = "$(".repeat(1 << 22);
        assert_eq!(expand(&text, lookup, text.len()).as_deref(), Ok(text.as_bytes()), "quadratic: some hours");
    }

    #[test]
    fn bytes_that_are_not_utf8_stay_unchanged() {
        assert_eq!(expand("<$(BINARY)>", lookup, 5).as_deref(), Ok(b"<\xff\x00\xfe>".as_slice()));
    }

    #[test]
    fn results_over_the_limit_are_counted_but_not_built() {
        let kilobyte = "x".repeat(1 << 10);
        let huge = |_: &str| Some(kilobyte.as_bytes());
        assert_eq!(expand(&"$(A)".repeat(1 << 20), huge, 4096), Err(1 << 30));
        assert_eq!(expand("$(A)-", huge, 1025).map(|text| text.len()), Ok(1025));
        assert_eq!(expand("$(A)-", huge, 1024), Err(1025));
    }
}
