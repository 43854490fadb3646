//! `/metrics/cadvisor`: cAdvisor's families of the cgroups in a sample.
//!
//! A row is one cgroup: the root, system cgroups, QoS classes, pods, containers, and the sandbox of each pod, which carries
//! the pod's network. Rows have cAdvisor's six labels, empty where they do not apply.
//!
//! A scrape of a full node has thousands of samples: the text format is written directly, with the labels of a row escaped
//! once. For other formats families are built. In both cases only one family at a time is in memory beside the page.
//!
//! Not reported, unlike by cAdvisor: `container_cpu_load_*` and `container_tasks_state`, which it always reports as 0, and
//! the file systems of containers, which it does not measure on containerd either.

mod table;
mod text;

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::collections::HashSet;
use std::io;
use std::path::Path;

use prometheus::proto::MetricFamily;

use self::table::FAMILIES;
use self::text::Text;
use self::text::escaped;
use super::descriptors;
use super::descriptors::ContainerProcesses;
use super::descriptors::Descriptors;
use super::descriptors::OpenFiles;
use super::family::Family;
use super::filesystems::FileSystem;
use super::sample::ContainerSample;
use super::sample::Measured;
use super::sample::PodSample;
use super::sample::Sample;
use crate::cgroups::Layout;
use crate::cgroups::class_paths;
use crate::cgroups::usage::CgroupDetail;
use crate::cgroups::usage::CgroupPlace;
use crate::cgroups::usage::CgroupUsage;
use crate::kernel::usage::InterfaceUsage;
use crate::kernel::usage::Machine;
use crate::kernel::usage::interfaces_of;
use crate::model::ContainerId;
use crate::model::PodRef;
use crate::oom::OomCounts;
use crate::oom::OomEvents;

/// The name of the container that a sandbox is to CRI-O.
const CRIO_SANDBOX: &str = "POD";

/// One scrape. The default one reports that usage was not measured.
#[derive(Clone, Debug, Default)]
pub struct Scrape {
    rows: Vec<Row>,
    /// Nanoseconds since the Unix epoch; `None` if nothing was measured.
    at: Option<i64>,
    /// Device files by number.
    devices: BTreeMap<(u32, u32), String>,
    kernel: String,
    system: String,
}

/// One cgroup.
#[derive(Clone, Debug, Default)]
struct Row {
    id: String,
    name: String,
    image: String,
    namespace: String,
    pod: String,
    container: String,
    /// Of a container that is measured; else empty.
    container_id: ContainerId,
    /// Nanoseconds since the Unix epoch; absent if unknown.
    started_at: Option<i64>,
    /// Those of the above that [`Self::base`] has, as the text format has them.
    labels: String,
    usage: CgroupUsage,
    detail: CgroupDetail,
    interfaces: Vec<InterfaceUsage>,
    /// The machine's, on the row of the root.
    file_systems: Vec<FileSystem>,
    /// Of a container, once counted.
    open: Option<OpenFiles>,
    /// OOM events beyond the life of the cgroup; absent if there were none.
    oom_events: Option<u64>,
    /// The kernel has pressure files for it.
    has_pressure: bool,
}

/// Reads what the sample does not contain. Blocks.
pub(super) fn take(
    reader: &Reader<'_>,
    file_systems: Vec<FileSystem>,
    sample: &Sample,
    descriptors: &mut Descriptors,
) -> Scrape {
    let mut events = reader.ooms.all();
    let mut rows: Vec<Row> = reader.root(&sample.node, file_systems).into_iter().collect();
    rows.extend(reader.system(sample));
    for pod in &sample.pods {
        rows.extend(reader.pod(pod, &mut events));
    }
    rows.extend(events.into_iter().map(of_gone));
    count_open_files(reader.proc, &mut rows, &sample.pods, descriptors);
    for row in &mut rows {
        row.labels = row.base().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).join(",");
    }
    let mut devices = BTreeMap::new();
    for disk in rows.iter().flat_map(|row| &row.detail.disks) {
        devices.entry((disk.major, disk.minor)).or_insert_with(|| disk.device().unwrap_or_default());
    }
    Scrape { rows, at: Some(sample.at), devices, kernel: kernel(), system: system(Path::new("/")) }
}

/// Makes rows of a sample and of what it does not contain.
pub(super) struct Reader<'a> {
    layout: &'a Layout,
    proc: &'a Path,
    sandbox_image: &'a str,
    ooms: &'a OomCounts,
    limit_writes: u64,
    /// The kernel has pressure files for the machine.
    machine_has_pressure: bool,
}

impl<'a> Reader<'a> {
    /// `sandbox_image` is empty if it is not known; `limit_writes`: how often the agent has written limits. Blocks.
    pub(super) fn new(
        layout: &'a Layout,
        proc: &'a Path,
        sandbox_image: &'a str,
        ooms: &'a OomCounts,
        limit_writes: u64,
    ) -> Self {
        Self { layout, proc, sandbox_image, ooms, limit_writes, machine_has_pressure: Machine::has_pressure(proc) }
    }

    /// The row of a measured cgroup; `None` if that is not known.
    fn row(&self, measured: &Measured) -> Option<Row> {
        let path = measured.path.as_ref()?;
        Some(self.with_detail(path, measured, CgroupPlace::at(self.layout, path).open().detail(&measured.usage)))
    }

    /// The row of a pod's own cgroup, likewise.
    fn pod_row(&self, own: &Measured) -> Option<Row> {
        let (Some(path), Some(open)) = (&own.path, &own.open) else { return self.row(own) };
        Some(self.with_detail(path, own, open.pod_detail(own, self.limit_writes)))
    }

    /// The row of a measured container's cgroup, likewise.
    fn container_row(&self, container: &ContainerSample) -> Option<Row> {
        let measured = &container.measured;
        let (Some(path), Some(open)) = (&measured.path, &measured.open) else { return self.row(measured) };
        Some(self.with_detail(path, measured, open.container_detail(container)))
    }

    fn with_detail(&self, path: &str, measured: &Measured, detail: CgroupDetail) -> Row {
        let has_pressure = self.layout.is_v2() && self.machine_has_pressure;
        Row { id: path.to_owned(), usage: measured.usage, detail, has_pressure, ..Row::default() }
    }

    /// The row of the root, which has what is the machine's.
    fn root(&self, node: &Measured, file_systems: Vec<FileSystem>) -> Option<Row> {
        let row = self.row(node)?;
        Some(Row {
            interfaces: interfaces_of(&self.proc.join("self")).unwrap_or_default(),
            file_systems,
            has_pressure: self.machine_has_pressure,
            started_at: Machine::boot_time(self.proc).map(|seconds| seconds.saturating_mul(1_000_000_000)),
            oom_events: Some(self.ooms.of_node()),
            ..row
        })
    }

    /// The rows of system cgroups and QoS classes.
    fn system(&self, sample: &Sample) -> Vec<Row> {
        // One cgroup has one row, also if it has several names.
        let mut paths = HashSet::from([&sample.node.path]);
        let named = sample.system.iter().map(|(_, measured)| measured).filter(|measured| paths.insert(&measured.path));
        let named: Vec<Row> = named.filter_map(|measured| self.row(measured)).collect();
        let of_pods = sample.system.iter().filter(|(name, _)| *name == "pods");
        let classes = of_pods.filter_map(|(_, measured)| measured.path.as_deref()).flat_map(class_paths);
        named.into_iter().chain(classes.filter_map(|path| self.class(&path))).collect()
    }

    /// The row of a QoS class, which samples do not contain; `None` if it has no cgroup.
    fn class(&self, path: &str) -> Option<Row> {
        let open = CgroupPlace::at(self.layout, path).open();
        let measured = Measured::new(path, open.read());
        measured.usage.is_there().then(|| self.with_detail(path, &measured, open.detail(&measured.usage)))
    }

    /// The rows of a pod, its sandbox and its containers. Takes their OOM events.
    fn pod(&self, pod: &PodSample, events: &mut Vec<OomEvents>) -> Vec<Row> {
        let own = pod.own.as_ref().and_then(|own| self.pod_row(own));
        let own = own.map(|row| Row { started_at: Some(pod.created_at), ..row });
        let sandbox = self.sandbox(pod).map(|row| Row { image: self.sandbox_image.to_owned(), ..row });
        let containers = pod.containers.iter().filter_map(|container| self.container(pod, container, events));
        let rows = own.into_iter().chain(sandbox).chain(containers);
        let (namespace, name) = (pod.pod.namespace.to_string(), pod.pod.name.to_string());
        rows.map(|row| Row { namespace: namespace.clone(), pod: name.clone(), ..row }).collect()
    }

    /// The row of a container; `None` if it is not measured.
    fn container(&self, pod: &PodSample, container: &ContainerSample, events: &mut Vec<OomEvents>) -> Option<Row> {
        let measured = self.container_row(container).map(|row| self.with_processes_below(row));
        let row = measured.or_else(|| reported_by_runtime(&container.measured))?;
        Some(Row {
            oom_events: take_events(events, pod, container, &row),
            name: name_of(&row.id, container.id.as_str(), &container.name, container.attempt, &pod.pod),
            image: container.image.clone(),
            container: container.name.clone(),
            container_id: container.id.clone(),
            started_at: Some(container.created_at),
            ..row
        })
    }

    /// The row of a container. One that has divided its cgroup has its processes in the parts.
    fn with_processes_below(&self, mut row: Row) -> Row {
        if row.detail.processes.as_ref().is_some_and(Vec::is_empty) {
            row.detail.processes = Some(CgroupPlace::at(self.layout, &row.id).processes());
        }
        row
    }

    /// The sandbox's cgroup is a sibling of those of the containers. Only its network is reported.
    fn sandbox(&self, pod: &PodSample) -> Option<Row> {
        let (sandbox, process) = (pod.sandbox.as_ref()?, pod.network_of?);
        let beside = pod.containers.iter().find_map(|container| {
            let path = container.measured.path.as_ref()?;
            path.contains(container.id.as_str()).then(|| path.replace(container.id.as_str(), sandbox.as_str()))
        });
        // The sandbox of CRI-O without a process has a cgroup that is no scope of systemd.
        let no_scope = beside.as_deref().and_then(|path| path.strip_suffix(".scope")).map(str::to_owned);
        let id = beside.into_iter().chain(no_scope).find(|path| CgroupPlace::at(self.layout, path).exists())?;
        // Fails for a process that has just ended.
        let interfaces = interfaces_of(&self.proc.join(process.to_string())).ok()?;
        let name = name_of(&id, sandbox.as_str(), CRIO_SANDBOX, pod.sandbox_attempt, &pod.pod);
        let container = if is_of_crio(&id) { CRIO_SANDBOX.to_owned() } else { String::new() };
        Some(Row { id, name, container, started_at: Some(pod.created_at), interfaces, ..Row::default() })
    }
}

/// Open files of the containers whose init process is known.
fn count_open_files(proc: &Path, rows: &mut [Row], pods: &[PodSample], descriptors: &mut Descriptors) {
    let containers = pods.iter().flat_map(|pod| &pod.containers);
    let inits: HashMap<&ContainerId, u32> =
        containers.filter_map(|container| Some((&container.id, container.init?))).collect();
    let wanted = rows.iter().filter_map(|row| {
        let init = *inits.get(&row.container_id)?;
        let processes = row.detail.processes.clone()?;
        Some(ContainerProcesses { id: row.container_id.clone(), init, processes })
    });
    let open = descriptors.count(proc, wanted.collect(), descriptors::LIMIT);
    for row in rows {
        row.open = open.get(&row.container_id).copied();
    }
}

/// Usage by the runtime of a container whose cgroup is unknown.
fn reported_by_runtime(measured: &Measured) -> Option<Row> {
    let usage = measured.usage;
    (usage.cpu.is_some() || usage.memory.is_some()).then(|| Row { usage, ..Row::default() })
}

/// OOM events of a running container, the former instances' included.
fn take_events(events: &mut Vec<OomEvents>, pod: &PodSample, container: &ContainerSample, row: &Row) -> Option<u64> {
    let is_own = |of: &OomEvents| of.pod.uid == pod.pod.uid && of.container == container.name;
    let own = events.swap_remove(events.iter().position(is_own)?);
    Some(own.with_counter(&container.id, row.detail.memory.as_ref().and_then(|memory| memory.oom_kills)))
}

/// A container of which no instance is measured: its cgroup is gone, its OOM events are not.
fn of_gone(events: OomEvents) -> Row {
    Row {
        name: events.last.as_ref().map(ToString::to_string).unwrap_or_default(),
        namespace: events.pod.namespace.to_string(),
        pod: events.pod.name.to_string(),
        container: events.container,
        oom_events: Some(events.events),
        ..Row::default()
    }
}

/// cAdvisor's name of a container or sandbox: the one that CRI-O gave it; with other runtimes its id.
fn name_of(cgroup: &str, id: &str, container: &str, attempt: u32, pod: &PodRef) -> String {
    if !is_of_crio(cgroup) {
        return id.to_owned();
    }
    format!("k8s_{container}_{}_{}_{}_{attempt}", pod.name, pod.namespace, pod.uid)
}

/// cAdvisor too recognizes containers of CRI-O by their cgroups: `crio-<id>`, with systemd `crio-<id>.scope`.
fn is_of_crio(cgroup: &str) -> bool {
    cgroup.rsplit('/').next().is_some_and(|name| name.starts_with("crio-"))
}

fn kernel() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned()
}

/// `PRETTY_NAME` of the distribution, as in the Node's status.
fn system(root: &Path) -> String {
    let places = ["etc/os-release", "usr/lib/os-release"];
    let Some(text) = places.iter().find_map(|place| std::fs::read_to_string(root.join(place)).ok()) else {
        return "Unknown".to_owned();
    };
    let name = text.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    name.map_or("Linux", |name| name.trim().trim_matches(['"', '\''])).to_owned()
}

impl Row {
    /// cAdvisor's labels.
    fn base(&self) -> [(&'static str, &str); 6] {
        [
            ("container", self.container.as_str()),
            ("id", self.id.as_str()),
            ("image", self.image.as_str()),
            ("name", self.name.as_str()),
            ("namespace", self.namespace.as_str()),
            ("pod", self.pod.as_str()),
        ]
    }
}

impl Scrape {
    /// Writes the text format, version 0.0.4: the same as that of [`Self::families`]. Only one family at a time is in memory.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn write_text(&self, out: &mut impl io::Write) -> io::Result<()> {
        let mut text = Text::default();
        text.family(&self.version());
        for family in FAMILIES {
            text.begin(family.name, family.help, family.kind);
            for row in &self.rows {
                (family.values)(row, &mut Values { scrape: self, row, out: Out::Text(&mut text) });
            }
            text.move_to(out)?;
        }
        text.family(&self.error());
        text.move_to(out)
    }

    /// The families, each built on demand; those without a value are omitted.
    pub fn families(&self) -> impl Iterator<Item = MetricFamily> + '_ {
        std::iter::once(self.version())
            .chain(FAMILIES.iter().map(|family| self.family(family)))
            .chain([self.error()])
            .filter(|family| !family.is_empty())
            .map(Family::into_family)
    }

    fn version(&self) -> Family {
        let mut family = Family::gauge("cadvisor_version_info", "Kernel and distribution, as labels; always 1.");
        let labels = [
            ("cadvisorRevision", ""),
            ("cadvisorVersion", ""),
            ("dockerVersion", ""),
            ("kernelVersion", self.kernel.as_str()),
            ("osVersion", self.system.as_str()),
        ];
        family.add(&labels, self.at.map(|_| 1.0), None);
        family
    }

    fn error(&self) -> Family {
        let mut family = Family::gauge("container_scrape_error", "1 if cgroups could not be measured, else 0.");
        family.add(&[], Some(if self.at.is_some() { 0.0 } else { 1.0 }), None);
        family
    }

    fn family(&self, of: &table::Of) -> Family {
        let mut family = Family::new(of.name, of.help, of.kind);
        for row in &self.rows {
            (of.values)(row, &mut Values { scrape: self, row, out: Out::Family(&mut family) });
        }
        family
    }
}

/// Where values go.
enum Out<'a> {
    Family(&'a mut Family),
    Text(&'a mut Text),
}

/// Adds the values of one row to one family.
struct Values<'a> {
    scrape: &'a Scrape,
    row: &'a Row,
    out: Out<'a>,
}

impl Values<'_> {
    /// A value with no labels of its own.
    fn one(&mut self, value: Option<f64>) {
        self.with(&[], value);
    }

    /// A value with more labels than the row has.
    fn with(&mut self, more: &[(&str, &str)], value: Option<f64>) {
        let Some(value) = value else { return };
        match &mut self.out {
            Out::Text(text) => text.sample(&self.row.labels, more, value, self.scrape.at),
            Out::Family(family) => {
                let mut labels: Vec<(&str, &str)> = self.row.base().into_iter().chain(more.iter().copied()).collect();
                labels.sort_unstable();
                family.add(&labels, Some(value), self.scrape.at);
            }
        }
    }

    /// A device's file.
    fn device(&self, number: (u32, u32)) -> String {
        self.scrape.devices.get(&number).cloned().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
