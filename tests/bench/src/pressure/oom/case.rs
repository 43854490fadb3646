//! What is killed, and whose limit does it. Pure.

/// The process that runs out of memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Victim {
    /// The container's main process.
    Main,
    /// A child of it.
    Child,
    /// A process of an exec.
    Exec,
    /// A child, and with it the whole container (`memory.oom.group`).
    Group,
}

/// The limit that is exceeded.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Scope {
    Container,
    Pod,
    QosClass,
    NodeAllocatable,
    /// None: the node's memory.
    Node,
}

impl Victim {
    const ALL: [Self; 4] = [Self::Main, Self::Child, Self::Exec, Self::Group];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Main => "main",
            Self::Child => "child",
            Self::Exec => "exec",
            Self::Group => "group",
        }
    }

    /// Whether the container ends with the kill.
    pub(crate) fn ends_container(self) -> bool {
        matches!(self, Self::Main | Self::Group)
    }
}

impl Scope {
    const ALL: [Self; 5] = [Self::Container, Self::Pod, Self::QosClass, Self::NodeAllocatable, Self::Node];

    /// As agents name it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Container => "container",
            Self::Pod => "pod",
            Self::QosClass => "qos-class",
            Self::NodeAllocatable => "node-allocatable",
            Self::Node => "node",
        }
    }
}

/// Kills in one container that stays alive as long as possible.
const KILLS_PER_POD: u32 = 10;

/// A pod and its kills.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Case {
    /// Unique in the run.
    pub(crate) name: String,
    pub(crate) victim: Victim,
    pub(crate) scope: Scope,
    pub(crate) kills: u32,
}

/// At least this many kills, as evenly as possible over all victims and scopes.
pub(crate) fn cases(kills: u32, with_node: bool, prefix: &str) -> Vec<Case> {
    let scopes: Vec<Scope> = Scope::ALL.into_iter().filter(|scope| with_node || *scope != Scope::Node).collect();
    let kinds: Vec<_> = scopes.iter().flat_map(|scope| Victim::ALL.map(|victim| (victim, *scope))).collect();
    let each = kills.div_ceil(u32::try_from(kinds.len()).unwrap_or(u32::MAX));
    let mut cases = Vec::new();
    for (victim, scope) in kinds {
        let per_pod = if victim.ends_container() { 1 } else { KILLS_PER_POD };
        for first in (0..each).step_by(per_pod as usize) {
            let name = format!("{prefix}-{}", cases.len());
            cases.push(Case { name, victim, scope, kills: per_pod.min(each - first) });
        }
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kills_are_spread_over_all_kinds() {
        let all = cases(1000, true, "p");
        assert_eq!(all.iter().map(|case| case.kills).sum::<u32>(), 1000);
        for victim in Victim::ALL {
            for scope in Scope::ALL {
                let of = all.iter().filter(|case| case.victim == victim && case.scope == scope);
                assert_eq!(of.map(|case| case.kills).sum::<u32>(), 50, "{victim:?} {scope:?}");
            }
        }
        assert!(all.iter().all(|case| !case.victim.ends_container() || case.kills == 1));
        assert!(cases(1, false, "p").iter().all(|case| case.scope != Scope::Node && case.kills == 1));
        assert_eq!(cases(1, false, "p").len(), 16);
    }
}
