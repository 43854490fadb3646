//! The versions of the streaming protocol over SPDY. Pure.

/// A version; older ones are smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in super::super) enum Protocol {
    V1,
    V2,
    V3,
    V4,
    V5,
}

impl Protocol {
    /// Offered to runtimes, the newest first.
    pub(in super::super) const OFFERED: [Self; 5] = [Self::V5, Self::V4, Self::V3, Self::V2, Self::V1];

    pub(in super::super) fn name(self) -> &'static str {
        match self {
            Self::V1 => "channel.k8s.io",
            Self::V2 => "v2.channel.k8s.io",
            Self::V3 => "v3.channel.k8s.io",
            Self::V4 => "v4.channel.k8s.io",
            Self::V5 => "v5.channel.k8s.io",
        }
    }

    /// The version that a runtime chose; the first one if it names none. `None` if it was not offered.
    pub(in super::super) fn chosen(name: &str) -> Option<Self> {
        let name = name.trim();
        if name.is_empty() { Some(Self::V1) } else { Self::OFFERED.into_iter().find(|one| one.name() == name) }
    }

    /// The result is a Status object; before version 4, a text.
    pub(in super::super) fn has_statuses(self) -> bool {
        self >= Self::V4
    }

    /// There is a stream for terminal resizing.
    pub(super) fn has_sizes(self) -> bool {
        self >= Self::V3
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protocols_that_runtimes_choose() {
        for protocol in Protocol::OFFERED {
            assert_eq!(Protocol::chosen(protocol.name()), Some(protocol));
        }
        assert_eq!(Protocol::chosen(""), Some(Protocol::V1));
        assert_eq!(Protocol::chosen("v6.channel.k8s.io"), None);
        let features = |protocol: Protocol| (protocol.has_sizes(), protocol.has_statuses());
        assert_eq!(
            [Protocol::V2, Protocol::V3, Protocol::V4].map(features),
            [(false, false), (true, false), (true, true)]
        );
    }
}
