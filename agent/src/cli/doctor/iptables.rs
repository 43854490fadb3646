//! Whether the node has the program by which the agent creates iptables chains for others.

use super::Finding;
use crate::host_program;
use crate::host_program::Call;
use crate::host_program::Programs;

const TOPIC: &str = "iptables";
const COST: &str = "no chain KUBE-IPTABLES-HINT: programs in containers assume that the host uses nftables";

/// `is_wanted` is `makeIPTablesUtilChains`.
pub(super) async fn finding(is_wanted: bool, programs: &dyn Programs) -> Finding {
    if !is_wanted {
        return Finding::good(TOPIC, "not used: makeIPTablesUtilChains is false");
    }
    match host_program::succeed(programs, &Call::new("iptables", ["--version"])).await {
        Ok(version) => Finding::good(TOPIC, version.trim()),
        Err(error) => Finding::lack(TOPIC, error.to_string(), COST),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_program::testing::ScriptedPrograms;

    #[tokio::test]
    async fn iptables_is_looked_for_if_chains_are_to_be_created() {
        let programs = ScriptedPrograms::new(|_| Some((0, "iptables v1.8.9 (nf_tables)\n".to_owned())));
        assert_eq!(finding(true, &programs).await, Finding::good("iptables", "iptables v1.8.9 (nf_tables)"));
        assert_eq!(programs.take(), ["iptables --version"]);
        let broken = ScriptedPrograms::new(|_| Some((127, String::new())));
        assert!(finding(true, &broken).await.cost.is_some());
        assert_eq!(finding(false, &broken).await.cost, None);
    }
}
