//! Builds the summary from samples. Pure.

use std::sync::Arc;

use super::error::StatsError;
use super::extras::Extras;
use super::extras::FsUsage;
use super::extras::PodExtras;
use super::extras::RuntimeFs;
use super::extras::VolumeUsage;
use super::sample::ContainerSample;
use super::sample::Measured;
use super::sample::PodSample;
use super::sample::Sample;
use super::summary::*;
use crate::kernel::usage::DiskUsage;
use crate::kernel::usage::InterfaceUsage;

/// Names and times of the node that are not measured.
#[derive(Clone, Debug)]
pub(super) struct NodeIdentity {
    pub(super) node_name: String,
    /// The machine's start, in nanoseconds since the Unix epoch.
    pub(super) booted: i64,
    /// The agent's start.
    pub(super) agent_started: i64,
}

/// What a summary is built from. Building it takes milliseconds on a full node.
#[derive(Clone, Debug)]
pub struct Summary {
    pub(super) identity: Arc<NodeIdentity>,
    pub(super) sample: Arc<Sample>,
    pub(super) extras: Option<Arc<Extras>>,
}

impl Summary {
    /// The summary as JSON, indented by one blank as the kubelet does.
    ///
    /// # Errors
    /// It cannot be encoded.
    pub fn json(&self) -> Result<Vec<u8>, StatsError> {
        let body = summary(&self.identity, &self.sample, self.extras.as_deref());
        let mut json = Vec::new();
        let formatter = serde_json::ser::PrettyFormatter::with_indent(b" ");
        let mut serializer = serde_json::Serializer::with_formatter(&mut json, formatter);
        serde::Serialize::serialize(&body, &mut serializer).map_err(|error| StatsError::Encode(error.to_string()))?;
        Ok(json)
    }
}

/// The summary; CPU and memory only without `extras`.
fn summary(identity: &NodeIdentity, sample: &Sample, extras: Option<&Extras>) -> Body {
    let node = &sample.node;
    let system = sample.system.iter().map(|(name, measured)| {
        let start = if *name == "kubelet" { identity.agent_started } else { identity.booted };
        container(name, start, measured, sample.at, extras.is_some())
    });
    let system: Vec<ContainerStats> = system.collect();
    Body {
        node: NodeStats {
            name: identity.node_name.clone(),
            start_time: Time(identity.booted),
            system_containers: Some(system).filter(|all| !all.is_empty()),
            cpu: cpu(node, sample.at),
            memory: memory(node, sample.at).map(|memory| without(sample.huge_pages, memory)),
            io: extras.map(|_| io(node, sample.at)),
            network: extras.map(|extras| network(extras.at, &extras.interfaces)),
            fs: extras.map(|extras| fs(extras.at, Some(&extras.root_fs), None)),
            runtime: extras.map(|extras| {
                let of = |place: &RuntimeFs| Some(fs(extras.at, place.disk.as_ref(), Some(place.used)));
                let containers = extras.container_fs.as_ref().unwrap_or(&extras.image_fs);
                RuntimeStats { image_fs: of(&extras.image_fs), container_fs: of(containers) }
            }),
            rlimit: extras.map(|extras| Rlimit {
                time: Time(extras.at),
                max_pid: extras.processes.max,
                current: extras.processes.current,
            }),
            swap: swap(node, sample.at),
        },
        pods: sample.pods.iter().map(|pod| of_pod(pod, sample.at, extras)).collect(),
    }
}

fn of_pod(pod: &PodSample, at: i64, extras: Option<&Extras>) -> PodStats {
    let (own, whole) = (pod.own.as_ref(), pod.whole());
    let of_pod = extras.map(|extras| (extras, extras.pods.get(&pod.pod.uid).cloned().unwrap_or_default()));
    let containers = pod.containers.iter().map(|container| of_container(container, at, of_pod.as_ref()));
    let reference = PodReference {
        name: pod.pod.name.to_string(),
        namespace: pod.pod.namespace.to_string(),
        uid: pod.pod.uid.to_string(),
    };
    PodStats {
        pod: reference,
        start_time: Time(pod.created_at),
        containers: containers.collect(),
        cpu: cpu(&whole, at).map(|cpu| Cpu { psi: cpu.psi.filter(|_| own.is_some()), ..cpu }),
        memory: memory(&whole, at).map(|memory| Memory { psi: memory.psi.filter(|_| own.is_some()), ..memory }),
        io: extras.and(own).map(|own| io(own, at)),
        network: of_pod
            .as_ref()
            .filter(|(_, of_pod)| !of_pod.interfaces.is_empty())
            .map(|(extras, of_pod)| network(extras.at, &of_pod.interfaces)),
        volume: of_pod.as_ref().and_then(|(extras, of_pod)| {
            let volumes =
                of_pod.volumes.as_ref()?.iter().map(|volume| of_volume(extras.at, &pod.pod.namespace, volume));
            Some(volumes.collect()).filter(|all: &Vec<VolumeStats>| !all.is_empty())
        }),
        ephemeral_storage: of_pod.as_ref().map(|(extras, of_pod)| ephemeral_storage(pod, extras, of_pod)),
        process_stats: of_pod
            .as_ref()
            .and_then(|(_, of_pod)| of_pod.processes)
            .map(|count| ProcessStats { process_count: Some(count) }),
        swap: swap(&whole, at),
    }
}

fn of_container(sample: &ContainerSample, at: i64, of_pod: Option<&(&Extras, PodExtras)>) -> ContainerStats {
    let mut stats = container(&sample.name, sample.created_at, &sample.measured, at, of_pod.is_some());
    if let Some((extras, of_pod)) = of_pod {
        let writable = extras.writable.get(sample.id.as_str()).copied();
        let of_layers = extras.container_fs.as_ref().unwrap_or(&extras.image_fs);
        stats.rootfs = Some(fs(extras.at, of_layers.disk.as_ref(), Some(writable.unwrap_or_default())));
        let logs = of_pod.files.logs.get(&sample.name).copied().unwrap_or_default();
        stats.logs = Some(fs(extras.at, Some(&extras.root_fs), Some(logs)));
    }
    stats
}

fn ephemeral_storage(pod: &PodSample, extras: &Extras, of_pod: &PodExtras) -> Fs {
    let writable = pod.containers.iter().filter_map(|container| extras.writable.get(container.id.as_str()));
    // As upstream, and as the check of the pod's limit: without the logs of containers that have ended.
    let logs = pod.containers.iter().filter_map(|container| of_pod.files.logs.get(&container.name));
    let local = of_pod.volumes.iter().flatten().filter(|volume| volume.is_local).map(|volume| &volume.used);
    let used = writable.chain(logs).chain(local);
    let used = used.fold(of_pod.files.other, |sum, used| sum + *used);
    fs(extras.at, Some(&extras.root_fs), Some(used))
}

fn of_volume(at: i64, namespace: &str, volume: &VolumeUsage) -> VolumeStats {
    let VolumeUsage { disk, used, .. } = volume;
    VolumeStats {
        time: Time(at),
        name: volume.name.clone(),
        available_bytes: Some(disk.available),
        capacity_bytes: Some(disk.capacity),
        used_bytes: Some(used.bytes),
        inodes_free: Some(disk.inodes_free),
        inodes: Some(disk.inodes),
        inodes_used: Some(used.inodes),
        claim: volume.claim.as_ref().map(|name| ClaimReference { name: name.clone(), namespace: namespace.to_owned() }),
    }
}

fn container(name: &str, start: i64, measured: &Measured, at: i64, with_io: bool) -> ContainerStats {
    ContainerStats {
        name: name.to_owned(),
        start_time: Time(start),
        cpu: cpu(measured, at),
        memory: memory(measured, at),
        io: with_io.then(|| io(measured, at)),
        rootfs: None,
        logs: None,
        swap: swap(measured, at),
    }
}

fn cpu(measured: &Measured, at: i64) -> Option<Cpu> {
    Some(Cpu {
        time: Time(at),
        usage_nano_cores: measured.nano_cores,
        usage_core_nano_seconds: Some(measured.usage.cpu?),
        psi: Some(measured.usage.cpu_pressure.into()),
    })
}

fn memory(measured: &Measured, at: i64) -> Option<Memory> {
    let memory = measured.usage.memory?;
    Some(Memory {
        time: Time(at),
        available_bytes: memory.available(),
        usage_bytes: Some(memory.usage),
        working_set_bytes: Some(memory.working_set),
        rss_bytes: Some(memory.rss),
        page_faults: Some(memory.page_faults),
        major_page_faults: Some(memory.major_page_faults),
        psi: Some(measured.usage.memory_pressure.into()),
    })
}

/// Memory of which so many bytes are huge pages: they are available to nothing else, though no cgroup uses them. As upstream
/// since 1.37, and as evictions count.
fn without(huge_pages: u64, memory: Memory) -> Memory {
    Memory { available_bytes: memory.available_bytes.map(|bytes| bytes.saturating_sub(huge_pages)), ..memory }
}

fn io(measured: &Measured, at: i64) -> Io {
    Io { time: Time(at), psi: Some(measured.usage.io_pressure.into()) }
}

fn swap(measured: &Measured, at: i64) -> Option<Swap> {
    let memory = measured.usage.memory?;
    let used = memory.swap?;
    let available_bytes = memory.swap_limit.map(|limit| limit.saturating_sub(used));
    Some(Swap { time: Time(at), available_bytes, usage_bytes: Some(used) })
}

/// A file system, or the usage of `part` of it; without a size if the file system is not visible.
fn fs(at: i64, disk: Option<&DiskUsage>, part: Option<FsUsage>) -> Fs {
    let whole = disk.map(|disk| FsUsage { bytes: disk.used, inodes: disk.inodes_used });
    let part = part.or(whole).unwrap_or_default();
    Fs {
        time: Time(at),
        available_bytes: disk.map(|disk| disk.available),
        capacity_bytes: disk.map(|disk| disk.capacity),
        used_bytes: Some(part.bytes),
        inodes_free: disk.map(|disk| disk.inodes_free),
        inodes: disk.map(|disk| disk.inodes),
        inodes_used: Some(part.inodes),
    }
}

fn network(at: i64, interfaces: &[InterfaceUsage]) -> Network {
    let default = interfaces.iter().find(|interface| interface.name == "eth0");
    let all = interfaces.iter().map(|interface| Interface {
        name: interface.name.clone(),
        rx_bytes: Some(interface.rx_bytes),
        rx_errors: Some(interface.rx_errors),
        tx_bytes: Some(interface.tx_bytes),
        tx_errors: Some(interface.tx_errors),
    });
    Network {
        time: Time(at),
        name: default.map(|interface| interface.name.clone()).unwrap_or_default(),
        rx_bytes: default.map(|interface| interface.rx_bytes),
        rx_errors: default.map(|interface| interface.rx_errors),
        tx_bytes: default.map(|interface| interface.tx_bytes),
        tx_errors: default.map(|interface| interface.tx_errors),
        interfaces: Some(all.collect()).filter(|all: &Vec<Interface>| !all.is_empty()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use serde_json::json;
    use tokio::time::Instant;

    use super::super::files::PodFiles;
    use super::super::sample::tests::sample;
    use super::*;
    use crate::cgroups::usage::PressureLine;
    use crate::kernel::usage::ProcessCounts;

    fn identity() -> NodeIdentity {
        NodeIdentity { node_name: "node".to_owned(), booted: 1_767_000_000_000_000_000, agent_started: 0 }
    }

    #[tokio::test]
    async fn cpu_and_memory_only() {
        let shown: Value = serde_json::to_value(summary(&identity(), &sample(Instant::now(), 5), None)).unwrap();
        let zero = json!({"total": 0, "avg10": 0.0, "avg60": 0.0, "avg300": 0.0});
        let time = "2026-01-01T00:01:40Z";
        let cpu = json!({"time": time, "usageCoreNanoSeconds": 5, "psi": {"full": zero, "some": zero}});
        let memory = json!({"time": time, "availableBytes": 400, "usageBytes": 900, "workingSetBytes": 600, "rssBytes": 0,
            "pageFaults": 0, "majorPageFaults": 0, "psi": {"full": zero, "some": zero}});
        let swap = json!({"time": time, "swapUsageBytes": 7});
        assert_eq!(
            shown["pods"],
            json!([{
                "podRef": {"name": "pod", "namespace": "ns", "uid": "uid"}, "startTime": "2025-12-31T23:59:59Z",
                "cpu": cpu, "memory": memory, "swap": swap,
                "containers": [{"name": "main", "startTime": "2026-01-01T00:00:00Z", "cpu": cpu, "memory": memory, "swap": swap}],
            }])
        );
        let node = shown["node"].as_object().unwrap();
        let names: Vec<&str> = node.keys().map(String::as_str).collect();
        assert_eq!(names, ["cpu", "memory", "nodeName", "startTime", "swap", "systemContainers"]);
    }

    #[tokio::test]
    async fn huge_pages_of_the_node_are_not_available() {
        let mut sample = sample(Instant::now(), 5);
        for (huge_pages, available) in [(0, 400), (150, 250), (500, 0)] {
            sample.huge_pages = huge_pages;
            let shown: Value = serde_json::to_value(summary(&identity(), &sample, None)).unwrap();
            assert_eq!(shown["node"]["memory"]["availableBytes"], available);
            assert_eq!(shown["node"]["memory"]["workingSetBytes"], 600, "as it was measured");
            assert_eq!(shown["pods"][0]["memory"]["availableBytes"], 400, "a pod has a limit of its own");
        }
    }

    #[tokio::test]
    async fn each_number_has_its_own_name() {
        let mut sample = sample(Instant::now(), 5);
        let own = sample.pods[0].own.as_mut().unwrap();
        own.nano_cores = Some(1);
        let memory = own.usage.memory.as_mut().unwrap();
        (memory.rss, memory.page_faults, memory.major_page_faults, memory.swap_limit) = (2, 3, 4, Some(10));
        own.usage.cpu_pressure.some.total = 11;
        own.usage.memory_pressure.some.total = 12;
        own.usage.io_pressure.some.total = 13;
        own.usage.io_pressure.full = PressureLine { total: 14, avg10: 1.0, avg60: 2.0, avg300: 3.0 };
        let extras = Extras { pods: [("uid".into(), PodExtras::default())].into(), ..Extras::default() };
        let shown: Value = serde_json::to_value(summary(&identity(), &sample, Some(&extras))).unwrap();
        let pod = &shown["pods"][0];
        assert_eq!(pod["cpu"]["usageNanoCores"], 1);
        let memory = ["rssBytes", "pageFaults", "majorPageFaults"].map(|name| pod["memory"][name].clone());
        assert_eq!(memory, [json!(2), json!(3), json!(4)]);
        assert_eq!(pod["swap"]["swapAvailableBytes"], 3, "7 of 10 are used");
        let waited = ["cpu", "memory", "io"].map(|of| pod[of]["psi"]["some"]["total"].clone());
        assert_eq!(waited, [json!(11), json!(12), json!(13)]);
        assert_eq!(pod["io"]["psi"]["full"], json!({"total": 14, "avg10": 1.0, "avg60": 2.0, "avg300": 3.0}));
    }

    #[tokio::test]
    async fn a_pod_without_a_cgroup_has_the_usage_of_its_containers() {
        let mut sample = sample(Instant::now(), 5);
        sample.pods[0].own = None;
        let shown: Value = serde_json::to_value(summary(&identity(), &sample, None)).unwrap();
        let pod = &shown["pods"][0];
        assert_eq!((&pod["cpu"]["usageCoreNanoSeconds"], &pod["memory"]["workingSetBytes"]), (&json!(5), &json!(600)));
        assert_eq!(pod["swap"]["swapUsageBytes"], 7);
        assert_eq!((pod["cpu"].get("psi"), pod["memory"].get("psi")), (None, None), "pressure cannot be added");
    }

    #[tokio::test]
    async fn everything() {
        let used = |bytes| FsUsage { bytes, inodes: 1 };
        let (rx_bytes, rx_errors, tx_bytes, tx_errors) = (1, 2, 3, 4);
        let eth0 =
            InterfaceUsage { name: "eth0".to_owned(), rx_bytes, rx_errors, tx_bytes, tx_errors, ..Default::default() };
        let disk = DiskUsage { capacity: 100, available: 50, used: 40, inodes: 10, inodes_free: 4, inodes_used: 6 };
        let volume = |name: &str, claim: Option<&str>, is_local| VolumeUsage {
            name: name.to_owned(),
            claim: claim.map(str::to_owned),
            is_local,
            disk,
            used: used(1000),
        };
        let of_pod = PodExtras {
            interfaces: vec![eth0.clone()],
            files: PodFiles {
                logs: [("main".to_owned(), used(20)), ("has-ended".to_owned(), used(7000))].into(),
                other: used(3),
            },
            processes: Some(2),
            volumes: Some(vec![volume("scratch", None, true), volume("data", Some("claim"), false)]),
        };
        let extras = Extras {
            at: 1_767_225_700_000_000_000,
            root_fs: disk,
            image_fs: RuntimeFs { disk: Some(disk), used: used(77) },
            container_fs: None,
            processes: ProcessCounts { max: Some(99), current: Some(7) },
            interfaces: vec![InterfaceUsage { name: "wlan0".to_owned(), ..Default::default() }],
            pods: [("uid".into(), of_pod)].into(),
            writable: [("main-0".to_owned(), used(100))].into(),
        };
        let shown: Value =
            serde_json::to_value(summary(&identity(), &sample(Instant::now(), 5), Some(&extras))).unwrap();
        let (node, pod) = (&shown["node"], &shown["pods"][0]);
        assert_eq!(node["rlimit"], json!({"time": "2026-01-01T00:01:40Z", "maxpid": 99, "curproc": 7}));
        assert_eq!(
            (&node["network"]["name"], &node["network"]["interfaces"][0]["name"]),
            (&json!(""), &json!("wlan0"))
        );
        let eth0 = json!({"name": "eth0", "rxBytes": 1, "rxErrors": 2, "txBytes": 3, "txErrors": 4});
        let mut inline = eth0.clone();
        inline["time"] = json!("2026-01-01T00:01:40Z");
        inline["interfaces"] = json!([eth0]);
        assert_eq!(pod["network"], inline);
        let storage = &pod["ephemeral-storage"];
        assert_eq!(
            (&storage["usedBytes"], &storage["inodesUsed"], &storage["capacityBytes"]),
            (&json!(1123), &json!(4), &json!(100)),
            "without the logs of a container that has ended"
        );
        assert_eq!(pod["process_stats"], json!({"process_count": 2}), "processes, without threads");
        let volume = json!({"time": "2026-01-01T00:01:40Z", "name": "data", "availableBytes": 50, "capacityBytes": 100,
            "usedBytes": 1000, "inodesFree": 4, "inodes": 10, "inodesUsed": 1,
            "pvcRef": {"name": "claim", "namespace": "ns"}});
        assert_eq!((&pod["volume"][1], pod["volume"][0].get("pvcRef")), (&volume, None));
        let container = &pod["containers"][0];
        assert_eq!((&container["rootfs"]["usedBytes"], &container["logs"]["usedBytes"]), (&json!(100), &json!(20)));
        assert_eq!(node["runtime"]["imageFs"], node["runtime"]["containerFs"]);
        assert_eq!(node["runtime"]["imageFs"]["usedBytes"], 77);
        let layers = RuntimeFs { disk: Some(DiskUsage { capacity: 300, ..disk }), used: used(55) };
        let split = Extras { container_fs: Some(layers), ..extras.clone() };
        let shown = serde_json::to_value(summary(&identity(), &sample(Instant::now(), 5), Some(&split))).unwrap();
        let of = |name: &str| shown["node"]["runtime"][name].clone();
        let sizes = |fs: Value| (fs["capacityBytes"].clone(), fs["usedBytes"].clone());
        assert_eq!(sizes(of("imageFs")), (json!(100), json!(77)));
        assert_eq!(sizes(of("containerFs")), (json!(300), json!(55)), "writable layers have a disk of their own");
        let rootfs = shown["pods"][0]["containers"][0]["rootfs"].clone();
        assert_eq!(sizes(rootfs), (json!(300), json!(100)), "a container's layer is on that disk");
        let invisible = Extras { image_fs: RuntimeFs { disk: None, used: used(77) }, ..extras };
        let shown = serde_json::to_value(summary(&identity(), &sample(Instant::now(), 5), Some(&invisible))).unwrap();
        let images = json!({"time": "2026-01-01T00:01:40Z", "usedBytes": 77, "inodesUsed": 1});
        assert_eq!(shown["node"]["runtime"]["imageFs"], images);
    }
}
