//! Names of functions as they will be next time: without the hashes that compilers and versions change.

/// A pattern, as linkers match sections, for a symbol's name. In Rust's mangled names (RFC 2603) crates carry a hash,
/// `Cs…_`, and back references, `B…_`, count its characters. The last part may be the crate that made an instance; which
/// of many equal ones stays is decided by their hashes. What LLVM made its own carries a number.
pub fn pattern(name: &str) -> String {
    let (name, own) = match name.split_once(".llvm.") {
        Some((name, _)) => (name, "*"),
        None => (name, ""),
    };
    let Some(mangled) = name.strip_prefix("_R") else { return format!("{name}{own}") };
    let mut pattern = String::from("_R");
    let mut rest = mangled;
    while let Some(first) = rest.chars().next() {
        match hashed(rest) {
            Some((kept, after)) => {
                pattern.push_str(kept);
                pattern.push_str("*_");
                rest = after;
            }
            None => {
                pattern.push(first);
                rest = &rest[first.len_utf8()..];
            }
        }
    }
    match maker(&pattern) {
        Some(made) => format!("{made}*"),
        None => pattern + own,
    }
}

/// What precedes the crate that made an instance: a reference, or a hash and a name with its length.
fn maker(pattern: &str) -> Option<&str> {
    if let Some(made) = pattern.strip_suffix("B*_") {
        return Some(made);
    }
    let (made, name) = pattern.rsplit_once("Cs*_")?;
    let digits = name.len() - name.trim_start_matches(|digit: char| digit.is_ascii_digit()).len();
    let (length, name) = name.split_at(digits);
    // A name that would begin with a digit or an underscore is set apart by one.
    let whole = length.parse() == Ok(name.strip_prefix('_').unwrap_or(name).len()) || length.parse() == Ok(name.len());
    (whole && made != "_R").then_some(made)
}

/// The fixed start of a part that changes, and what follows the part.
fn hashed(text: &str) -> Option<(&str, &str)> {
    let kept = ["Cs", "B"].into_iter().find(|start| text.starts_with(start))?;
    let (digits, after) = text[kept.len()..].split_once('_')?;
    (!digits.is_empty() && digits.len() <= 12 && digits.bytes().all(|byte| byte.is_ascii_alphanumeric()))
        .then(|| (&text[..kept.len()], after))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_go_and_names_stay() {
        assert_eq!(pattern("_RNvNtCsjrHSEGnQ3l9_3std2io4read"), "_RNvNtCs*_3std2io4read");
        let dropped = "_RINvNtCs1_4core3ptr13drop_in_placeNtCsabc_1p3PodE";
        for maker in ["Cs9Z_6keblet", "CsZ9_11kube_client", "B2_", "Cs1_3_9a"] {
            let name = format!("{dropped}{maker}");
            assert_eq!(pattern(&name), "_RINvNtCs*_4core3ptr13drop_in_placeNtCs*_1p3PodE*", "{name}");
        }
        assert_eq!(pattern("_RNvXsR_NtCs1_4core3fmtNtB7_5Debug3fmt"), "_RNvXsR_NtCs*_4core3fmtNtB*_5Debug3fmt");
        assert_eq!(pattern("_RNvCsa_1a1b.llvm.123"), "_RNvCs*_1a1b*");
        assert_eq!(pattern("aws_lc_0_47_0_EVP_sha256"), "aws_lc_0_47_0_EVP_sha256");
        assert_eq!(pattern("_RNvC6mycrate_1x"), "_RNvC6mycrate_1x", "no hash, and an underscore of its own");
    }
}
