//! Which entries of a configuration serve an image: matching of registries and paths. Pure.
//!
//! As upstream's `BasicDockerKeyring` and `URLsMatch`.

use std::cmp::Reverse;
use std::collections::BTreeMap;

/// The key that serves images of Docker Hub if no other does.
const DOCKER_HUB: &str = "index.docker.io";
/// Longest name of a host, in bytes.
const MAX_HOST: usize = 253;
/// Longest pattern of a host, in bytes: the steps of a comparison are the product of both lengths.
const MAX_PATTERN: usize = 1024;

/// Entries by the key that they match with; the order of entries with the same key is that of their addition.
#[derive(Clone, Debug)]
pub(super) struct Keyring<T>(BTreeMap<Reverse<String>, Vec<T>>);

impl<T> Default for Keyring<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T> Keyring<T> {
    /// Adds an entry for a registry as it is written; one that is no URL is left out.
    pub(super) fn add(&mut self, registry: &str, entry: T) {
        if let Some(key) = key(registry) {
            self.0.entry(Reverse(key)).or_default().push(entry);
        }
    }

    /// The entries for a repository, in the order in which they are tried.
    pub(super) fn matching(&self, repository: &str) -> Vec<&T> {
        let found = self.0.iter().filter(|(Reverse(key), _)| matches(key, repository));
        let found: Vec<&T> = found.flat_map(|(_, entries)| entries).collect();
        if found.is_empty() && is_docker_hub(repository) {
            return self.0.get(&Reverse(DOCKER_HUB.to_owned())).into_iter().flatten().collect();
        }
        found
    }
}

/// The key of a registry: without scheme, and without `/v1` or `/v2` in front of a path. `None` if it is no URL.
fn key(registry: &str) -> Option<String> {
    let rest = registry.strip_prefix("https://").or_else(|| registry.strip_prefix("http://")).unwrap_or(registry);
    let rest = rest.split(['?', '#']).next().unwrap_or(rest);
    let (host, path) = rest.find('/').map_or((rest, ""), |slash| rest.split_at(slash));
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    let port_is_fine = split_port(host).1.bytes().all(|byte| byte.is_ascii_digit());
    if !port_is_fine || rest.bytes().any(|byte| byte <= b' ' || byte == 0x7f) {
        return None;
    }
    let path = if path.starts_with("/v1/") || path.starts_with("/v2/") { &path[3..] } else { path };
    Some(if path == "/" { host.to_owned() } else { format!("{host}{path}") })
}

/// True if a text can be the key of a registry: its port is a number, and it has no spaces.
pub(super) fn is_registry(text: &str) -> bool {
    key(text).is_some()
}

/// True if an entry for a registry as it is written is among those for a repository, at least if there is no other.
pub(super) fn may_serve(registry: &str, repository: &str) -> bool {
    let serves = |key: String| matches(&key, repository) || (key == DOCKER_HUB && is_docker_hub(repository));
    key(registry).is_some_and(serves)
}

/// True if a key, or a pattern of `matchImages`, matches a repository: the same port, as many labels of the host, each by
/// its pattern, and a path that begins with the key's. False if the host is longer than one can be, or its pattern much
/// longer.
pub(super) fn matches(key: &str, repository: &str) -> bool {
    let ((key_host, key_path), (host, path)) = (split_path(key), split_path(repository));
    let ((key_host, key_port), (host, port)) = (split_port(key_host), split_port(host));
    if host.len() > MAX_HOST || key_host.len() > MAX_PATTERN {
        return false;
    }
    let (patterns, labels) = (key_host.split('.'), host.split('.'));
    key_port == port
        && path.starts_with(key_path)
        && patterns.clone().count() == labels.clone().count()
        && patterns.zip(labels).all(|(pattern, label)| is_glob_match(pattern, label))
}

/// Host with port, and path with its slash.
fn split_path(text: &str) -> (&str, &str) {
    text.find('/').map_or((text, ""), |slash| text.split_at(slash))
}

/// Host and port. As upstream, an IPv6 address has its brackets only without a port; they are a class of the pattern then.
fn split_port(host: &str) -> (&str, &str) {
    match host.rsplit_once(':') {
        Some((name, port)) if !port.contains(']') => {
            let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
            (address.unwrap_or(name), port)
        }
        _ => (host, ""),
    }
}

fn is_docker_hub(repository: &str) -> bool {
    let (first, _) = split_path(repository);
    !first.is_empty() && (matches!(first, "docker.io" | DOCKER_HUB) || !first.contains(['.', ':']))
}

/// Shell patterns of one label: `*`, `?`, `[a-z]`, `[^a]`, and `\` before a literal letter. An invalid pattern matches
/// nothing.
fn is_glob_match(pattern: &str, label: &str) -> bool {
    let (pattern, label): (Vec<char>, Vec<char>) = (pattern.chars().collect(), label.chars().collect());
    let (mut at, mut from) = (0, 0);
    // Where to continue if the text after the last star does not match: one letter more belongs to the star.
    let mut retry: Option<(usize, usize)> = None;
    loop {
        if pattern.get(at) == Some(&'*') {
            retry = Some((at + 1, from));
            at += 1;
            continue;
        }
        let end = at == pattern.len();
        if end && from == label.len() {
            return true;
        }
        let step = label.get(from).filter(|_| !end).and_then(|letter| match_one(&pattern[at..], *letter));
        match (step, retry) {
            (Some(length), _) => (at, from) = (at + length, from + 1),
            (None, Some((after, taken))) if taken < label.len() => {
                retry = Some((after, taken + 1));
                (at, from) = (after, taken + 1);
            }
            _ => return false,
        }
    }
}

/// The length of the pattern's first element if it matches the letter.
fn match_one(pattern: &[char], letter: char) -> Option<usize> {
    match pattern {
        ['?', ..] => Some(1),
        ['\\', escaped, ..] => (*escaped == letter).then_some(2),
        ['\\'] => None,
        ['[', class @ ..] => match_class(class, letter).map(|length| length + 1),
        [literal, ..] => (*literal == letter).then_some(1),
        [] => None,
    }
}

/// The length of a class after its `[`, the closing bracket included, if the letter is in it.
fn match_class(class: &[char], letter: char) -> Option<usize> {
    let negated = class.first() == Some(&'^');
    let mut at = usize::from(negated);
    let mut found = false;
    let begin = at;
    let element = |at: usize| match class.get(at)? {
        '\\' => class.get(at + 1).map(|escaped| (*escaped, at + 2)),
        '-' | ']' => None,
        plain => Some((*plain, at + 1)),
    };
    loop {
        if class.get(at) == Some(&']') && at > begin {
            return (found != negated).then_some(at + 1);
        }
        let (low, next) = element(at)?;
        let (high, next) = if class.get(next) == Some(&'-') { element(next + 1)? } else { (low, next) };
        found |= (low..=high).contains(&letter);
        at = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registries_match_by_host_port_and_path() {
        for (registry, repository, expected) in [
            ("*.k.io", "x.k.io/a", true),
            ("*.k.io", "k.io/x", false),
            ("*k.io", "k.io/x", true),
            ("p.*.io/foo", "p.k.io:1111/foo/b", false),
            ("p.*.io:1111/foo", "p.k.io:1111/foo/b", true),
            ("b.io/pong", "b.io/pongz", true),
            ("b.io/pong/x", "b.io/pong", false),
            ("https://b.io/v2/", "b.io/a", true),
            ("https://b.io/v1", "b.io/a", false),
            ("http://user@b.io/v1/a", "b.io/a/b", true),
            ("B.io", "b.io/a", false),
            ("k[a-c]x.io", "kbx.io/a", true),
            ("k[^a-c].io", "kb.io/a", false),
            ("k[.io", "k[.io/a", false),
            ("*a*b.io", "xaab.io/a", true),
            ("[::1]:5000", "[::1]:5000/a", true),
            ("http://[fd00::a]:5000/v2/", "[fd00::a]:5000/a", true),
            ("[::1]:5000", "[::2]:5000/a", false),
            ("[::1]:5000", "[::1]:5001/a", false),
            ("[::1]", "[::1]/a", false),
            ("b.io:x", "b.io:x/a", false),
            ("b io", "b io/a", false),
        ] {
            let mut keyring = Keyring::default();
            keyring.add(registry, ());
            assert_eq!(!keyring.matching(repository).is_empty(), expected, "{registry} for {repository}");
            assert_eq!(may_serve(registry, repository), expected, "{registry} for {repository}");
        }
    }

    #[test]
    fn patterns_of_labels() {
        for (pattern, label, expected) in [
            ("", "", true),
            ("*", "", true),
            ("a*c?e", "abcde", true),
            ("a*b*c", "axbxbxc", true),
            ("a*b", "axbx", false),
            ("\\*", "*", true),
            ("\\*", "a", false),
            ("[a\\]]", "]", true),
            ("[]a]", "a", false),
            ("[a-", "a", false),
            ("\\", "\\", false),
        ] {
            assert_eq!(is_glob_match(pattern, label), expected, "{pattern} for {label}");
        }
        assert!(!is_glob_match(&"*a".repeat(60), &"b".repeat(250)), "in no more than pattern times label steps");
    }

    #[test]
    fn hosts_and_patterns_that_are_too_long_do_not_match() {
        let host = |length: usize| format!("{}.b/x", "a".repeat(length - 2));
        assert!(matches("*.b", &host(253)) && !matches("*.b", &host(254)) && !matches("*.b", &host(300)));
        assert!(matches(&format!("{}.b", "*".repeat(1022)), "a.b/x"));
        for pattern in ["*".repeat(1023), format!("[{}]", "a".repeat(1021))] {
            assert!(!matches(&format!("{pattern}.b"), "a.b/x"));
        }
        let began = std::time::Instant::now();
        assert!(!matches(&format!("*{}c.b", "a".repeat(500_000)), &host(1_000_000)), "quadratic: minutes");
        assert!(began.elapsed() < std::time::Duration::from_secs(5), "{:?}", began.elapsed());
    }

    #[test]
    fn docker_hub_is_served_by_its_old_name() {
        let mut keyring = Keyring::default();
        keyring.add("https://index.docker.io/v1/", "hub");
        for repository in ["docker.io/library/busybox", "localhost/x"] {
            assert_eq!(keyring.matching(repository), [&"hub"], "{repository}");
            assert!(may_serve("https://index.docker.io/v1/", repository), "{repository}");
        }
        for repository in ["quay.io/x", "localhost:5000/x"] {
            assert!(
                keyring.matching(repository).is_empty() && !may_serve("index.docker.io", repository),
                "{repository}"
            );
        }
        keyring.add("docker.io", "exact");
        assert_eq!(keyring.matching("docker.io/library/busybox"), [&"exact"]);
    }

    #[test]
    fn longer_keys_come_first_and_equal_ones_in_order_of_addition() {
        let mut keyring = Keyring::default();
        for (registry, name) in
            [("quay.io", "s1"), ("quay.io/coreos", "s2 path"), ("https://quay.io/v1/", "s2"), ("*.io", "glob")]
        {
            keyring.add(registry, name);
        }
        assert_eq!(keyring.matching("quay.io/coreos/etcd"), [&"s2 path", &"s1", &"s2", &"glob"]);
    }
}
