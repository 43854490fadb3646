//! Whether the runtime's event stream may be read beside the kubelet. Pure.
//!
//! Runtimes that have one queue for all readers give each event to one of them: an observer that subscribes takes events
//! from the kubelet. containerd gives every reader all events since 2.0 (containerd #8916), CRI-O since 1.28
//! (cri-o #6838). Of other runtimes nothing is known.

/// Why the stream must not be read; `None` if it may.
pub(super) fn refused(name: &str, version: &str) -> Option<String> {
    let first = match name {
        "containerd" => (2, 0),
        "cri-o" => (1, 28),
        _ => return Some(format!("it is not known whether {name} gives each event to one reader only")),
    };
    let one_reader = || {
        let (major, minor) = first;
        format!("{name} {version} gives each event to one reader, which is the kubelet; {major}.{minor} to all")
    };
    (number(version) < first).then(one_reader)
}

fn number(version: &str) -> (u32, u32) {
    let mut parts = version.trim_start_matches('v').split(['.', '-', '~', '+']).map_while(|part| part.parse().ok());
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_runtimes_that_broadcast_are_subscribed_to() {
        for (name, version, may) in [
            ("containerd", "1.7.24~ds1", false),
            ("containerd", "v1.7.0", false),
            ("containerd", "2.0.0", true),
            ("containerd", "v2.1.9-k3s1", true),
            ("containerd", "unknown", false),
            ("cri-o", "1.27.4", false),
            ("cri-o", "1.28.0", true),
            ("cri-dockerd", "0.4.0", false),
        ] {
            assert_eq!(refused(name, version).is_none(), may, "{name} {version}");
        }
    }
}
