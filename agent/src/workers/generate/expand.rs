//! Expansion of `$(VAR)` references in env values, commands, arguments and `subPathExpr`. Knows nothing of where
//! variables come from.

/// Replaces each `$(NAME)` that `lookup` knows; unknown ones stay as written. `$$` is an escaped `$`, so `$$(NAME)`
/// becomes the text `$(NAME)`. Nothing is expanded twice.
pub fn expand<'a>(text: &str, mut lookup: impl FnMut(&str) -> Option<&'a str>) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(dollar) = rest.find('$') {
        out.push_str(&rest[..dollar]);
        let after = &rest[dollar + 1..];
        if let Some(tail) = after.strip_prefix('$') {
            out.push('$');
            rest = tail;
        } else if let Some((name, tail)) = after.strip_prefix('(').and_then(|inner| inner.split_once(')')) {
            match lookup(name) {
                Some(value) => out.push_str(value),
                None => out.push_str(&rest[dollar..dollar + name.len() + 3]),
            }
            rest = tail;
        } else {
            out.push('$');
            rest = after;
        }
    }
    out.push_str(rest);
    out
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
            assert_eq!(expand(text, lookup), expected, "{text:?}");
        }
    }
}
