//! Formats of names and values, each as "what is wrong with this text": an empty list means nothing.

use keblet_proto::cri::v1::Signal;

const DNS_LABEL: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and \
    must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is \
    '[a-z0-9]([-a-z0-9]*[a-z0-9])?')";
const DNS_SUBDOMAIN: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' \
    or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is \
    '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";
const QUALIFIED_NAME: &str = "must consist of alphanumeric characters, '-', '_' or '.', and must start and end with \
    an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is \
    '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";
const LABEL_VALUE: &str = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or \
    '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex \
    used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')";
const CONFIG_KEY: &str = "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. \
    'key.name',  or 'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')";
const ENV_NAME: &str =
    "a valid environment variable name must consist only of printable ASCII characters other than '='";

type Problems = Vec<String>;

fn longer_than(text: &str, limit: usize) -> Option<String> {
    (text.len() > limit).then(|| format!("must be no more than {limit} bytes"))
}

/// Alphanumeric at both ends (by `edge`), `inner` characters between.
fn bounded_by(text: &str, edge: fn(u8) -> bool, inner: fn(u8) -> bool) -> bool {
    let bytes = text.as_bytes();
    match (bytes.first(), bytes.last()) {
        (Some(&first), Some(&last)) => edge(first) && edge(last) && bytes.iter().all(|&b| inner(b)),
        _ => false,
    }
}

fn lower_alnum(b: u8) -> bool {
    b.is_ascii_lowercase() || b.is_ascii_digit()
}

fn label_shaped(text: &str) -> bool {
    bounded_by(text, lower_alnum, |b| lower_alnum(b) || b == b'-')
}

fn name_shaped(text: &str) -> bool {
    bounded_by(text, |b| b.is_ascii_alphanumeric(), |b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
}

/// RFC 1123 label: names of containers, volumes, namespaces, host names.
pub fn dns_label(text: &str) -> Problems {
    let shape = (!label_shaped(text)).then(|| DNS_LABEL.to_owned());
    longer_than(text, 63).into_iter().chain(shape).collect()
}

/// RFC 1123 subdomain: names of pods and nodes.
pub fn dns_subdomain(text: &str) -> Problems {
    let shape = (!text.split('.').all(label_shaped)).then(|| DNS_SUBDOMAIN.to_owned());
    longer_than(text, 253).into_iter().chain(shape).collect()
}

/// A DNS search path: like a subdomain, but underscores, a single dot and one trailing dot are allowed.
pub fn dns_search(text: &str) -> Problems {
    if text == "." {
        return Vec::new();
    }
    let plain = text.strip_suffix('.').unwrap_or(text);
    let inner = |b| lower_alnum(b) || b == b'-' || b == b'_';
    let label = |part: &str| bounded_by(part.strip_prefix('_').unwrap_or(part), lower_alnum, inner);
    let shape = (!plain.split('.').all(label)).then(|| DNS_SUBDOMAIN.to_owned());
    longer_than(text, 253).into_iter().chain(shape).collect()
}

/// `[prefix/]name`: keys of labels and annotations, types of conditions.
pub fn qualified_name(text: &str) -> Problems {
    let mut problems = Vec::new();
    let name = match text.split_once('/') {
        Some((_, rest)) if rest.contains('/') => {
            return vec![format!(
                "a qualified name {QUALIFIED_NAME} with an optional DNS subdomain prefix and '/' (e.g. \
                 'example.com/MyName')"
            )];
        }
        Some(("", rest)) => {
            problems.push("prefix part must be non-empty".to_owned());
            rest
        }
        Some((prefix, rest)) => {
            problems.extend(dns_subdomain(prefix).into_iter().map(|c| format!("prefix part {c}")));
            rest
        }
        None => text,
    };
    if name.is_empty() {
        problems.push("name part must be non-empty".to_owned());
    }
    problems.extend(longer_than(name, 63).map(|c| format!("name part {c}")));
    if !name_shaped(name) {
        problems.push(format!("name part {QUALIFIED_NAME}"));
    }
    problems
}

/// The value of a label.
pub fn label_value(text: &str) -> Problems {
    let shape = (!text.is_empty() && !name_shaped(text)).then(|| LABEL_VALUE.to_owned());
    longer_than(text, 63).into_iter().chain(shape).collect()
}

/// The name of an environment variable: printable ASCII without `=`.
pub fn env_name(text: &str) -> Problems {
    let good = !text.is_empty() && text.bytes().all(|b| (0x20..0x7f).contains(&b) && b != b'=');
    (!good).then(|| ENV_NAME.to_owned()).into_iter().collect()
}

/// A key of a config map or secret, which becomes a file name.
pub fn config_key(text: &str) -> Problems {
    let mut problems: Problems = longer_than(text, 253).into_iter().collect();
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b)) {
        problems.push(CONFIG_KEY.to_owned());
    }
    match text {
        "." => problems.push("must not be '.'".to_owned()),
        ".." => problems.push("must not be '..'".to_owned()),
        _ if text.starts_with("..") => problems.push("must not start with '..'".to_owned()),
        _ => {}
    }
    problems
}

/// IANA service name: the name of a port.
pub fn port_name(text: &str) -> Problems {
    let mut problems = Vec::new();
    if text.len() > 15 {
        problems.push("must be no more than 15 characters".to_owned());
    }
    if text.is_empty() || !text.bytes().all(|b| lower_alnum(b) || b == b'-') {
        problems.push("must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)".to_owned());
    }
    if !text.bytes().any(|b| b.is_ascii_lowercase()) {
        problems.push("must contain at least one letter (a-z)".to_owned());
    }
    if text.contains("--") {
        problems.push("must not contain consecutive hyphens".to_owned());
    }
    if text.starts_with('-') || text.ends_with('-') {
        problems.push("must not begin or end with a hyphen".to_owned());
    }
    problems
}

/// A port number.
pub fn port(number: i32) -> Problems {
    let good = (1..=65_535).contains(&number);
    (!good).then(|| "must be between 1 and 65535, inclusive".to_owned()).into_iter().collect()
}

/// An IP address of either family.
pub fn ip(text: &str) -> Problems {
    let good = text.parse::<std::net::IpAddr>().is_ok();
    (!good).then(|| "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)".to_owned()).into_iter().collect()
}

/// A kernel parameter, its parts separated by dots or slashes.
pub fn sysctl(text: &str) -> bool {
    let part = |part: &str| bounded_by(part, lower_alnum, |b| lower_alnum(b) || b == b'-' || b == b'_');
    text.len() <= 253 && text.split(['.', '/']).all(part)
}

/// The name of a signal: SIGTERM, SIGRTMIN+1, SIGRTMAX-1. The runtime interface has the same ones, with the signs spelt out.
pub fn signal(text: &str) -> bool {
    let spelt_out = text.contains("PLUS") || text.contains("MINUS");
    let name = text.replace('+', "PLUS").replace('-', "MINUS");
    text.starts_with("SIG") && !spelt_out && Signal::from_str_name(&name).is_some()
}

/// Something that is safe as one component of a path: what UIDs become on the node.
pub fn path_component(text: &str) -> Problems {
    let good = !text.is_empty()
        && text.len() <= 128
        && text != "."
        && text != ".."
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
    (!good)
        .then(|| "must be at most 128 alphanumeric characters, '-', '_' or '.', and not '.' or '..'".to_owned())
        .into_iter()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(format: fn(&str) -> Problems, good: &[&str], bad: &[&str]) {
        for text in good {
            assert_eq!(format(text), Vec::<String>::new(), "{text:?} is good");
        }
        for text in bad {
            assert!(!format(text).is_empty(), "{text:?} is bad");
        }
    }

    #[test]
    fn labels_and_subdomains() {
        let long = "a".repeat(64);
        check(
            dns_label,
            &["a", "a-b", "0", &long[..63]],
            &["", "-a", "a-", "a.b", "A", "a_b", "a/b", "ä", &long, "a\n"],
        );
        let very_long = ["a"; 128].join(".");
        check(dns_subdomain, &["a.b", "a-b.c", &very_long[..253]], &["", ".", "a..b", "../a", "a.", "A.b", &very_long]);
        check(dns_search, &[".", "a.b.", "_tcp.example.com", "a_b"], &["", "..", "a b", "-", "a..b"]);
    }

    #[test]
    fn keys_and_values() {
        check(
            qualified_name,
            &["a", "A_b.c-d", "example.com/name", "a/0"],
            &["", "/a", "a/", "a/b/c", "-a", "Example.com/x", "a b"],
        );
        check(label_value, &["", "a", "A-1_.b"], &["-", "a b", "a/b", "a\u{0}"]);
        check(config_key, &["a", "A.b_c", ".a"], &["", ".", "..", "..a", "a/b", "a b"]);
        check(env_name, &["A", "a b", "1x", "-", "a.b"], &["", "A=B", "a\n", "ä"]);
    }

    #[test]
    fn ports_addresses_and_sysctls() {
        check(port_name, &["http", "a-1"], &["", "80", "a--b", "-a", "a-", "HTTP", "sixteen-letters-"]);
        check(ip, &["10.0.0.1", "::1"], &["", "10.0.0", "host", "10.0.0.1/8"]);
        assert!(port(1).is_empty() && port(65_535).is_empty() && !port(0).is_empty() && !port(65_536).is_empty());
        for good in ["kernel.shm_rmid_forced", "net/ipv4/tcp_syncookies", "a-b.c"] {
            assert!(sysctl(good), "{good}");
        }
        for bad in ["", ".a", "a..b", "a b", "A", "a.*", "_a"] {
            assert!(!sysctl(bad), "{bad:?}");
        }
        check(path_component, &["a", "0f-1_2.3"], &["", ".", "..", "a/b", "../x", "a b", "\u{0}"]);
    }
}
