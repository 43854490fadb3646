//! The iptables chains that other programs of the node rely on (`makeIPTablesUtilChains`).
//!
//! `KUBE-IPTABLES-HINT` shows programs in containers which iptables the host uses. `KUBE-FIREWALL` drops packets to loopback
//! addresses from elsewhere, which kube-proxy lets in by `route_localnet`; kube-proxy makes an identical rule. Chains, rules
//! and arguments are upstream's. As in 1.37 iptables is 1.4.22 or newer, which can wait for its lock. The agent itself needs
//! none of this: without iptables it runs on.

#[cfg(test)]
mod tests;

use std::fmt;
use std::time::Duration;

use crate::host_program;
use crate::host_program::Call;
use crate::host_program::ProgramError;
use crate::host_program::Programs;

const HINT: &str = "KUBE-IPTABLES-HINT";
const FIREWALL: &str = "KUBE-FIREWALL";
/// Missing once another program has flushed the tables.
const CANARY: &str = "KUBE-KUBELET-CANARY";
/// The tables with a canary. The first one is checked.
const WATCHED: [&str; 3] = ["mangle", "nat", "filter"];
const TO_FIREWALL: [&str; 2] = ["-j", FIREWALL];
const DROP_MARTIANS: [&str; 16] = [
    "-m",
    "comment",
    "--comment",
    "block incoming localnet connections",
    "--dst",
    "127.0.0.0/8",
    "!",
    "--src",
    "127.0.0.0/8",
    "-m",
    "conntrack",
    "!",
    "--ctstate",
    "RELATED,ESTABLISHED,DNAT",
    "-j",
    "DROP",
];
/// Time between two checks of the canary, as upstream.
const INTERVAL: Duration = Duration::from_secs(60);
/// How long a flush may go on once it is noticed, and how often its end is looked for, as upstream.
const FLUSH_LIMIT: Duration = Duration::from_secs(5);
const FLUSH_POLL: Duration = Duration::from_millis(100);
/// How long iptables may take: with tens of thousands of rules it is slow. Upstream's limit of a check.
const TIMEOUT: Duration = Duration::from_secs(300);
/// Exit codes of iptables: the chain exists, or the rule or chain does not; it could not look, mostly for lack of the lock.
const REFUSED: i32 = 1;
const RESOURCE_PROBLEM: i32 = 4;
/// In its message if it did not get the lock. For lack of permission it ends with the same code.
const LOCKED: &str = "holding the xtables lock";

/// An IP family. Shown as upstream's protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    Ipv4,
    Ipv6,
}

impl Family {
    fn program(self) -> &'static str {
        match self {
            Self::Ipv4 => "iptables",
            Self::Ipv6 => "ip6tables",
        }
    }

    /// The call for an operation on a chain, with the arguments in upstream's order.
    fn call(self, operation: &str, table: &str, chain: &str, rule: &[&str]) -> Call {
        let begin = ["-w", "5", operation, chain, "-t", table];
        Call::new(self.program(), begin.into_iter().chain(rule.iter().copied())).within(TIMEOUT)
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ipv4 => "IPv4",
            Self::Ipv6 => "IPv6",
        })
    }
}

/// Makes the chains of each IP family that the host's iptables supports, and makes them again when another program has
/// flushed the tables. Ends only where there is no iptables.
pub async fn keep(programs: &dyn Programs) {
    let (mut found, mut lacks) = (Vec::new(), Vec::new());
    for family in [Family::Ipv4, Family::Ipv6] {
        match host_program::succeed(programs, &family.call("-S", "nat", "POSTROUTING", &[])).await {
            Ok(_) => found.push(Chains { programs, family, made: None }),
            Err(error) => match error.to_string() {
                // It is supported, as far as is known: the regular check tries again.
                text if text.contains(LOCKED) => found.push(Chains { programs, family, made: None }),
                text => lacks.push(text),
            },
        }
    }
    if found.is_empty() {
        // No warning: where only nftables is supported no other program can need the chains.
        let reason = lacks.join("; ");
        return tracing::info!(reason, "no iptables support on this system; not creating the chain {HINT}");
    }
    loop {
        for chains in &mut found {
            chains.check().await;
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// The chains of one IP family.
struct Chains<'a> {
    programs: &'a dyn Programs,
    family: Family,
    /// Result of the last attempt to make them.
    made: Option<Result<(), String>>,
}

impl Chains<'_> {
    /// Makes what was not made yet, or was flushed.
    async fn check(&mut self) {
        if self.made == Some(Ok(())) && !self.are_flushed().await {
            return;
        }
        let made = self.make().await.map_err(|error| error.to_string());
        match &made {
            Ok(()) => {
                tracing::info!(protocol = %self.family, "created the iptables chains that other programs rely on")
            }
            Err(_) if self.made.as_ref() == Some(&made) => {}
            Err(error) => {
                tracing::warn!(protocol = %self.family, error, "cannot create the iptables chains; trying again")
            }
        }
        self.made = Some(made);
    }

    /// Makes what is missing.
    async fn make(&self) -> Result<(), ProgramError> {
        self.make_chain("mangle", HINT).await?;
        // IPv6 has only one loopback address.
        if self.family == Family::Ipv4 {
            self.make_chain("filter", FIREWALL).await?;
            for chain in ["OUTPUT", "INPUT"] {
                self.make_rule("-I", chain, &TO_FIREWALL).await?;
            }
            self.make_rule("-A", FIREWALL, &DROP_MARTIANS).await?;
        }
        for table in WATCHED {
            self.make_chain(table, CANARY).await?;
        }
        Ok(())
    }

    async fn make_chain(&self, table: &str, chain: &str) -> Result<(), ProgramError> {
        let call = self.family.call("-N", table, chain, &[]);
        let ended = self.programs.run(&call).await?;
        match ended.code {
            Some(0 | REFUSED) => Ok(()),
            _ => Err(call.failed(ended.describe(&call))),
        }
    }

    /// Makes a rule of the table `filter`; `position` is the flag that inserts or appends it.
    async fn make_rule(&self, position: &str, chain: &str, rule: &[&str]) -> Result<(), ProgramError> {
        let check = self.family.call("-C", "filter", chain, rule);
        let ended = self.programs.run(&check).await?;
        match ended.code {
            Some(0) => return Ok(()),
            Some(REFUSED) => {}
            _ => return Err(check.failed(ended.describe(&check))),
        }
        host_program::succeed(self.programs, &self.family.call(position, "filter", chain, rule)).await?;
        Ok(())
    }

    /// Whether a chain exists; `None` if it could not be looked for.
    async fn exists(&self, table: &str, chain: &str) -> Option<bool> {
        let ended = self.programs.run(&self.family.call("-S", table, chain, &[])).await.ok()?;
        match ended.code? {
            0 => Some(true),
            RESOURCE_PROBLEM => None,
            _ => Some(false),
        }
    }

    /// Whether the tables were flushed. Returns when that has ended, so that what is made is not flushed, too.
    async fn are_flushed(&self) -> bool {
        if self.exists(WATCHED[0], CANARY).await != Some(false) {
            return false;
        }
        let others = async {
            for table in &WATCHED[1..] {
                while self.exists(table, CANARY).await != Some(false) {
                    tokio::time::sleep(FLUSH_POLL).await;
                }
            }
        };
        // Otherwise only some tables were flushed.
        let _ = tokio::time::timeout(FLUSH_LIMIT, others).await;
        true
    }
}
