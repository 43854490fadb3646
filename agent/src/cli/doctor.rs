//! `keblet doctor`: the features of this node, the effect of each missing one, and whether the agent can run here at all.
//!
//! Changes nothing. `kernel::facts` assesses the kernel; this adds the runtime, the configuration and what another kubelet
//! has left.

mod iptables;
mod takeover;

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use serde::Serialize;

use super::endpoints::Endpoints;
use super::host;
use super::output;
use super::output::Format;
use super::run_args::RunArgs;
use crate::cgroups::Hierarchies;
use crate::config::ConfigError;
use crate::config::Feature;
use crate::config::HostFacts;
use crate::config::Settings;
use crate::config::keblet::MemoryAvailable;
use crate::config::load;
use crate::exit::Exit;
use crate::host_program::HostPrograms;
use crate::kernel::facts::Capabilities;
use crate::kernel::facts::Fact;
use crate::kernel::facts::NodeFacts;
use crate::kernel::project_quota;
use crate::kernel::project_quota::NoProjectQuotas;
use crate::kernel::usage::AvailableMemory;
use crate::runtime::Features;
use crate::runtime::Runtime;
use crate::runtime::RuntimeEndpoint;
use crate::runtime::RuntimeOptions;
use crate::server::secure;

/// How long the runtime may take to answer.
const RUNTIME_TIMEOUT: Duration = Duration::from_secs(5);
const RUNTIME: &str = "container runtime";
/// Has volumes counted by their file system.
const QUOTA_GATE: Feature = Feature::LocalStorageCapacityIsolationFSQuotaMonitoring;

/// `keblet doctor`
#[derive(Debug, clap::Args)]
pub struct Args {
    /// How to write the answer
    #[arg(long, short, value_enum, default_value_t)]
    output: Format,
    #[command(flatten)]
    run: RunArgs,
}

/// One thing this node has or lacks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The property or component.
    pub topic: String,
    /// What was found.
    pub found: String,
    /// What a lack costs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost: Option<String>,
    /// The agent cannot run like this.
    pub fatal: bool,
}

impl Finding {
    fn good(topic: &str, found: impl Into<String>) -> Self {
        Self { topic: topic.to_owned(), found: found.into(), cost: None, fatal: false }
    }

    fn lack(topic: &str, found: impl Into<String>, cost: &str) -> Self {
        Self { cost: Some(cost.to_owned()), ..Self::good(topic, found) }
    }

    fn fatal(topic: &str, found: impl Into<String>, cost: &str) -> Self {
        Self { fatal: true, ..Self::lack(topic, found, cost) }
    }
}

impl From<Fact> for Finding {
    fn from(fact: Fact) -> Self {
        Self { cost: fact.cost, ..Self::good(fact.topic, fact.found) }
    }
}

/// Reports what this node offers. The exit is a failure only if the agent could not run here.
///
/// # Errors
/// The report cannot be written.
pub async fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let mut findings: Vec<Finding> = NodeFacts::observe().assess().into_iter().map(Finding::from).collect();
    match load(&args.run.flags) {
        Ok(settings) => {
            findings.push(configuration(&settings, &host::facts()));
            findings.push(iptables::finding(settings.kubelet.make_iptables_util_chains, &HostPrograms).await);
            findings.push(node_allocatable(&settings));
            findings.push(oom_score(settings.kubelet.oom_score_adj, Capabilities::of_this_process()));
            findings.extend(available_memory(&settings));
            findings.push(project_quotas(&settings));
            findings.extend(takeover::findings(&settings.flags.root_dir));
            findings.extend(runtime(&settings).await);
        }
        Err(error) => findings.push(Finding::fatal("configuration", error.to_string(), "the agent does not start")),
    }
    report(&findings, args.output, out).context("cannot print the findings")
}

fn configuration(settings: &Settings, facts: &HostFacts) -> Finding {
    let checks = [
        settings.check_supported(),
        settings.check_host(facts),
        host::check_tunables(settings),
        host::check_reservations(settings),
        secure::check_tls(settings),
    ];
    match ConfigError::together(checks) {
        Ok(()) => Finding::good("configuration", "acceptable"),
        Err(error) => Finding::fatal("configuration", error.to_string(), "the agent refuses to start"),
    }
}

/// Which cgroups are limited to what is not, or what is, reserved.
fn node_allocatable(settings: &Settings) -> Finding {
    const TOPIC: &str = "node allocatable";
    let kubelet = &settings.kubelet;
    let enforced: Vec<&str> = kubelet.enforce_node_allocatable.iter().map(String::as_str).collect();
    if enforced.contains(&"pods") {
        return Finding::good(TOPIC, format!("enforced on {}", enforced.join(", ")));
    }
    let found = if enforced.is_empty() { "none".to_owned() } else { enforced.join(", ") };
    Finding::lack(TOPIC, format!("enforced on {found}"), "pods together are not kept from what is reserved for daemons")
}

/// Whether this process, and so the agent, may have its `oomScoreAdj`.
fn oom_score(wanted: i32, capabilities: Capabilities) -> Finding {
    const TOPIC: &str = "oomScoreAdj";
    if wanted >= 0 || capabilities.has("CAP_SYS_RESOURCE") {
        return Finding::good(TOPIC, wanted.to_string());
    }
    let found = format!("{wanted}, without CAP_SYS_RESOURCE");
    Finding::lack(TOPIC, found, "unless its parent set it, the kernel may kill the agent before pods")
}

/// The memory that this node has left, by both definitions, and how far they lie apart.
fn available_memory(settings: &Settings) -> Option<Finding> {
    let layout = Hierarchies::detect().ok()?.layout;
    let memory = AvailableMemory::read(&layout)?;
    Some(memory_finding(memory, settings.keblet.eviction.memory_available))
}

fn memory_finding(memory: AvailableMemory, by: MemoryAvailable) -> Finding {
    const TOPIC: &str = "memory.available";
    let mebibytes = |bytes: u64| format!("{} MiB", bytes >> 20);
    let AvailableMemory { working_set, mem_available, .. } = memory;
    let Some((kernel, difference)) = mem_available.zip(memory.difference()) else {
        return Finding::good(TOPIC, format!("{} by the working set; no MemAvailable", mebibytes(working_set)));
    };
    let apart = mebibytes(difference.unsigned_abs());
    let relation = if difference < 0 { "less" } else { "more" };
    let used = match by {
        MemoryAvailable::WorkingSet => "the working set",
        MemoryAvailable::MemAvailable => "MemAvailable",
    };
    let found = format!(
        "{} by the working set, {} by MemAvailable ({apart} {relation}); evictions use {used}",
        mebibytes(working_set),
        mebibytes(kernel),
    );
    // The kernel kills processes by its own numbers: what the kubelet counts as available beyond them is not there.
    let misleads = by == MemoryAvailable::WorkingSet && difference < 0;
    let cost = "the kernel may kill processes before memory.available falls below its threshold";
    if misleads && difference.unsigned_abs() > memory.capacity / 20 {
        return Finding::lack(TOPIC, found, cost);
    }
    Finding::good(TOPIC, found)
}

/// Whether the file system of the root directory can count volumes, as far as the directory is there.
fn project_quotas(settings: &Settings) -> Finding {
    let is_on = settings.gates.enabled(QUOTA_GATE);
    let root = &settings.flags.root_dir;
    let there = root.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/"));
    quota_finding(is_on, root, project_quota::check(there))
}

fn quota_finding(is_on: bool, root: &Path, checked: Result<(), NoProjectQuotas>) -> Finding {
    const TOPIC: &str = "project quotas";
    let root = root.display();
    match (checked, is_on) {
        (Ok(()), true) => {
            Finding::good(TOPIC, format!("the file system of {root} counts emptyDirs of user namespaces"))
        }
        (Ok(()), false) => {
            Finding::good(TOPIC, format!("the file system of {root} has them; the gate {QUOTA_GATE} is off"))
        }
        (Err(error), true) => {
            let found = format!("not on the file system of {root}: {error}");
            Finding::lack(TOPIC, found, "the gate has no effect: volumes are counted by walking them")
        }
        (Err(error), false) => {
            Finding::good(TOPIC, format!("not on the file system of {root}, nor asked for: {error}"))
        }
    }
}

/// Queries the runtime at the agent's endpoint, and its image service, if that has another one.
async fn runtime(settings: &Settings) -> Vec<Finding> {
    let endpoints = match Endpoints::choose(settings, Path::new("/")) {
        Ok(endpoints) => endpoints,
        Err(error) => return vec![Finding::fatal(RUNTIME, format!("{error:#}"), "the agent does not start")],
    };
    let options = RuntimeOptions { request_timeout: RUNTIME_TIMEOUT, ..Default::default() };
    let runtime = Runtime::new(&endpoints.runtime, endpoints.images.as_ref(), options);
    let mut findings = runtime_service(&runtime, &endpoints.runtime).await;
    if let Some(endpoint) = &endpoints.images {
        findings.push(image_service(&runtime, endpoint).await);
    }
    findings
}

/// Queries identity and features of the runtime.
async fn runtime_service(runtime: &Runtime, endpoint: &RuntimeEndpoint) -> Vec<Finding> {
    let unreachable = "the node stays not ready and no pod is started";
    match tokio::time::timeout(RUNTIME_TIMEOUT, runtime.features()).await {
        Ok(Ok(features)) => runtime_findings(endpoint, &features),
        Ok(Err(error)) => {
            let hint = RuntimeEndpoint::discover(Path::new("/")).filter(|found| found != endpoint);
            let hint = hint.map(|found| format!("; there is one at {found}")).unwrap_or_default();
            vec![Finding::fatal(RUNTIME, format!("{error}{hint}"), unreachable)]
        }
        Err(_) => {
            vec![Finding::fatal(RUNTIME, format!("{endpoint} does not answer within {RUNTIME_TIMEOUT:?}"), unreachable)]
        }
    }
}

async fn image_service(runtime: &Runtime, endpoint: &RuntimeEndpoint) -> Finding {
    const TOPIC: &str = "image service";
    match runtime.image_fs_info().await {
        Ok(_) => Finding::good(TOPIC, format!("answers at {endpoint}")),
        Err(error) => {
            let cost = "no image is found or pulled, so no container is started";
            Finding::fatal(TOPIC, format!("imageServiceEndpoint {endpoint}: {error}"), cost)
        }
    }
}

fn runtime_findings(endpoint: &RuntimeEndpoint, features: &Features) -> Vec<Finding> {
    let name = format!("{} {} at {endpoint}", features.runtime_name, features.runtime_version);
    let streams = if features.streaming_lists { "yes" } else { "no" };
    let driver = match features.cgroup_driver {
        Some(driver) => Finding::good("cgroup driver", format!("{driver:?}, reported by the runtime").to_lowercase()),
        None => Finding::lack(
            "cgroup driver",
            "the runtime does not report it",
            "cgroupDriver in the configuration must match",
        ),
    };
    vec![Finding::good(RUNTIME, name), events(features), driver, Finding::good("streamed lists", streams)]
}

/// By name and version. Subscribing would take an event away from the agent that runs: containerd before 2.0 has one queue
/// for all readers.
fn events(features: &Features) -> Finding {
    const TOPIC: &str = "runtime events";
    let cost = "relisting every second instead of every 5 minutes";
    let (name, version) = (features.runtime_name.as_str(), &features.runtime_version);
    match name {
        _ if too_old(name, version) => Finding::lack(TOPIC, "no, this version is too old", cost),
        "containerd" => Finding::good(TOPIC, "yes, as of this version"),
        // By default CRI-O ends the stream at once.
        "cri-o" => Finding::lack(TOPIC, "not known: needs enable_pod_events = true in crio.conf", cost),
        _ => Finding::lack(TOPIC, "not known", cost),
    }
}

/// Events came with containerd 1.7 and CRI-O 1.26.
fn too_old(name: &str, version: &str) -> bool {
    let mut numbers = version.trim_start_matches('v').split(['.', '-', '~', '+']).map_while(|n| n.parse::<u32>().ok());
    let found = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    match name {
        "containerd" => found < (1, 7),
        "cri-o" => found < (1, 26),
        _ => false,
    }
}

fn report(findings: &[Finding], format: Format, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let fatal = findings.iter().any(|finding| finding.fatal);
    match format {
        Format::Json => output::json(out, &serde_json::json!({ "canRun": !fatal, "findings": findings }))?,
        Format::Text => {
            let width = findings.iter().map(|finding| finding.topic.chars().count()).max().unwrap_or(0);
            for finding in findings {
                write!(out, "{}", lines(finding, width))?;
            }
            let lacks = findings.iter().filter(|finding| finding.cost.is_some()).count();
            let summary = match (fatal, lacks) {
                (true, _) => "keblet cannot run here.".to_owned(),
                (false, 0) => "keblet can run here without restrictions.".to_owned(),
                (false, lacks) => format!("keblet can run here, with restrictions ({lacks})."),
            };
            writeln!(out, "\n{summary}")?;
        }
    }
    Ok(if fatal { Exit::Failure } else { Exit::Success })
}

/// A finding, and below it what a lack costs.
fn lines(finding: &Finding, width: usize) -> String {
    let mark = match (finding.fatal, &finding.cost) {
        (true, _) => '✗',
        (false, Some(_)) => '!',
        (false, None) => '✓',
    };
    let Finding { topic, found, cost, .. } = finding;
    let indent = width + 4;
    let cost = cost.as_deref().map(|cost| format!("{:indent$}→ {cost}\n", "")).unwrap_or_default();
    format!("{mark} {topic:width$}  {found}\n{cost}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(findings: &[Finding], format: Format) -> (String, Exit) {
        let mut out = Vec::new();
        let exit = report(findings, format, &mut out).unwrap();
        (String::from_utf8(out).unwrap(), exit)
    }

    #[test]
    fn only_what_is_fatal_fails() {
        let lack = Finding::lack("pidfd", "no", "later");
        let (text, exit) = printed(&[Finding::good("kernel", "6.12"), lack.clone()], Format::Text);
        assert_eq!(exit, Exit::Success);
        assert_eq!(
            text,
            "✓ kernel  6.12\n! pidfd   no\n          → later\n\nkeblet can run here, with restrictions (1).\n"
        );
        let (text, exit) = printed(&[lack, Finding::fatal("container runtime", "none", "waits")], Format::Text);
        assert_eq!(exit, Exit::Failure);
        assert!(text.ends_with("keblet cannot run here.\n"), "{text}");
    }

    #[test]
    fn json_has_the_same_findings() {
        let (text, _) =
            printed(&[Finding::good("kernel", "6.12"), Finding::lack("pidfd", "no", "later")], Format::Json);
        let answer: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(answer["canRun"], true);
        assert_eq!(answer["findings"][1]["cost"], "later");
        assert_eq!(answer["findings"][0].get("cost"), None);
        let (text, exit) = printed(&[Finding::fatal("container runtime", "none", "waits")], Format::Json);
        let answer: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&answer["canRun"], &answer["findings"][0]["fatal"]), (&false.into(), &true.into()));
        assert_eq!(exit, Exit::Failure);
    }

    #[test]
    fn cgroup_settings_are_reported_with_what_they_lack() {
        let lowered = oom_score(-999, Capabilities::default());
        assert!(lowered.cost.is_some() && !lowered.fatal, "{lowered:?}");
        let all = Capabilities::parse("CapEff:\t000001ffffffffff\n").unwrap();
        assert_eq!((oom_score(-999, all).cost, oom_score(500, Capabilities::default()).cost), (None, None));
        let settings = |pods: &str| load(&[("enforce-node-allocatable", pods)].into_iter().collect()).unwrap();
        assert_eq!(node_allocatable(&settings("pods")).cost, None);
        assert!(node_allocatable(&settings("none")).cost.is_some());
    }

    #[test]
    fn both_definitions_of_available_memory_are_compared() {
        let memory = |working_set: u64, mem_available: Option<u64>| AvailableMemory {
            capacity: 1000 << 20,
            working_set: working_set << 20,
            mem_available: mem_available.map(|mebibytes| mebibytes << 20),
        };
        let both = memory_finding(memory(600, Some(650)), MemoryAvailable::WorkingSet);
        let text = "600 MiB by the working set, 650 MiB by MemAvailable (50 MiB more); evictions use the working set";
        assert_eq!(both, Finding::good("memory.available", text));
        let less = memory_finding(memory(600, Some(500)), MemoryAvailable::WorkingSet);
        assert!(less.cost.is_some() && less.found.contains("(100 MiB less)"), "{less:?}");
        assert_eq!(memory_finding(memory(600, Some(500)), MemoryAvailable::MemAvailable).cost, None);
        assert_eq!(memory_finding(memory(600, Some(570)), MemoryAvailable::WorkingSet).cost, None, "about the same");
        assert!(memory_finding(memory(600, None), MemoryAvailable::WorkingSet).found.contains("no MemAvailable"));
    }

    #[test]
    fn missing_project_quotas_are_a_finding_if_they_are_configured() {
        let root = Path::new("/var/lib/kubelet");
        let lack = quota_finding(true, root, Err(NoProjectQuotas::FileSystem));
        assert_eq!(lack.found, "not on the file system of /var/lib/kubelet: it is neither ext4 nor XFS");
        assert!(lack.cost.is_some() && !lack.fatal);
        for (is_on, checked) in [(false, Err(NoProjectQuotas::NotCounted)), (false, Ok(())), (true, Ok(()))] {
            let found = quota_finding(is_on, root, checked);
            assert!(found.cost.is_none() && found.found.contains("/var/lib/kubelet"), "{found:?}");
        }
        let settings =
            |gates: &str| load(&[("feature-gates", gates), ("root-dir", "/proc/none")].into_iter().collect());
        assert!(
            project_quotas(&settings(&format!("{QUOTA_GATE}=true")).unwrap()).cost.is_some(),
            "the nearest directory is procfs"
        );
        assert!(project_quotas(&settings("").unwrap()).cost.is_none());
    }

    #[test]
    fn versions_with_events() {
        for (name, version, old) in [
            ("containerd", "1.6.20~ds1", true),
            ("containerd", "v1.7.24", false),
            ("containerd", "2.1.9-k3s1", false),
            ("cri-o", "1.25.1", true),
            ("cri-o", "1.32.0", false),
            ("other", "0.1", false),
        ] {
            assert_eq!(too_old(name, version), old, "{name} {version}");
        }
    }

    #[test]
    fn events_are_known_by_name_and_version() {
        let found = |name: &str, version: &str| {
            events(&Features {
                runtime_name: name.to_owned(),
                runtime_version: version.to_owned(),
                cgroup_driver: None,
                streaming_lists: false,
            })
        };
        assert_eq!(found("containerd", "1.7.24").cost, None);
        for (name, version, begin) in [
            ("cri-o", "1.32.0", "not known: needs enable_pod_events"),
            ("cri-o", "1.25.1", "no, this version is too old"),
            ("other", "0.1", "not known"),
        ] {
            let finding = found(name, version);
            assert!(finding.cost.is_some() && finding.found.starts_with(begin), "{name} {version}: {finding:?}");
        }
    }

    #[test]
    fn all_that_keeps_the_agent_from_starting_is_named() {
        let flags = [
            ("topology-manager-policy", "restricted"),
            ("system-reserved", "memory=1Ei"),
            ("tls-cipher-suites", "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384"),
        ];
        let settings = load(&flags.into_iter().collect()).unwrap();
        let facts = HostFacts { cgroup_v1: true, swap_active: true, ..HostFacts::default() };
        let finding = configuration(&settings, &facts);
        assert!(finding.fatal);
        for field in ["topologyManagerPolicy", "failCgroupV1", "failSwapOn", "systemReserved.memory", "tlsCipherSuites"]
        {
            assert!(finding.found.contains(&format!(" {field}: ")), "{field}: {}", finding.found);
        }
    }

    #[tokio::test]
    async fn a_missing_image_service_is_fatal() {
        let settings = |images: &str| {
            let flags = [
                ("container-runtime-endpoint", "unix:///nonexistent/runtime.sock"),
                ("image-service-endpoint", images),
            ];
            load(&flags.into_iter().collect()).unwrap()
        };
        let missing = runtime(&settings("unix:///nonexistent/images.sock")).await;
        let finding = missing.iter().find(|finding| finding.topic == "image service").expect("a finding");
        assert!(finding.fatal && finding.found.contains("/nonexistent/images.sock"), "{finding:?}");
        let malformed = runtime(&settings("tcp://127.0.0.1:1")).await;
        assert!(malformed[0].fatal && malformed[0].found.contains("imageServiceEndpoint"), "{malformed:?}");
    }

    #[tokio::test]
    async fn a_missing_runtime_is_fatal() {
        let flags = [("container-runtime-endpoint", "unix:///nonexistent/runtime.sock")].into_iter().collect();
        let findings = runtime(&load(&flags).unwrap()).await;
        assert!(findings[0].fatal && findings[0].found.contains("/nonexistent/runtime.sock"), "{findings:?}");
    }
}
