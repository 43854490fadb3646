//! Keys and values that labels can have, as the API checks them. Pure.

/// `name` or `domain/name`, as keys of labels and taints are.
pub fn is_key(key: &str) -> bool {
    let (domain, name) = match key.split_once('/') {
        Some((domain, name)) => (Some(domain), name),
        None => (None, key),
    };
    domain.is_none_or(is_subdomain) && !name.is_empty() && is_value(name)
}

/// RFC 1123: labels of lower-case letters, digits and inner hyphens, 253 bytes in all.
pub fn is_subdomain(domain: &str) -> bool {
    let edge = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    !domain.is_empty()
        && domain.len() <= 253
        && domain.split('.').all(|part| {
            part.bytes().all(|c| edge(c) || c == b'-')
                && part.bytes().next().is_some_and(edge)
                && part.bytes().last().is_some_and(edge)
        })
}

/// Empty, or up to 63 letters, digits, `-`, `_` and `.`, with a letter or digit at both ends.
pub fn is_value(value: &str) -> bool {
    let edge = |c: u8| c.is_ascii_alphanumeric();
    value.is_empty()
        || (value.len() <= 63
            && value.bytes().all(|c| edge(c) || matches!(c, b'-' | b'_' | b'.'))
            && value.bytes().next().is_some_and(edge)
            && value.bytes().last().is_some_and(edge))
}
