//! `/metrics/cadvisor`: cAdvisor's families of the cgroups in a sample.
//!
//! A row is one cgroup: the root, system cgroups, pods, containers, and the sandbox of each pod, which carries the pod's
//! network. Rows have cAdvisor's six labels, empty where they do not apply. Families are built one at a time, so that a
//! scrape of a full node holds only one of them in memory.

mod table;

use std::collections::BTreeMap;
use std::path::Path;

use prometheus::proto::MetricFamily;

use self::table::FAMILIES;
use super::family::Family;
use super::sample::Measured;
use super::sample::PodSample;
use super::sample::Sample;
use crate::cgroups::Layout;
use crate::cgroups::usage::CgroupDetail;
use crate::cgroups::usage::CgroupPlace;
use crate::cgroups::usage::CgroupUsage;
use crate::kernel::usage::InterfaceUsage;
use crate::kernel::usage::interfaces_of;

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
    /// Nanoseconds since the Unix epoch; absent if unknown.
    started_at: Option<i64>,
    usage: CgroupUsage,
    detail: CgroupDetail,
    interfaces: Vec<InterfaceUsage>,
    /// The kernel has pressure files for it.
    has_pressure: bool,
}

/// Reads what the sample does not contain. Blocks.
pub(super) fn take(layout: &Layout, sample: &Sample) -> Scrape {
    let has_pressure = layout.is_v2() && Path::new("/proc/pressure/cpu").exists();
    let row = |measured: &Measured| measured.path.as_ref().map(|path| read(layout, path, measured, has_pressure));
    let mut rows = Vec::new();
    rows.extend(
        row(&sample.node).map(|row| Row { interfaces: interfaces_of(std::process::id()).unwrap_or_default(), ..row }),
    );
    rows.extend(sample.system.iter().filter_map(|(_, measured)| row(measured)));
    for pod in &sample.pods {
        let of_pod = |row: Row| Row { namespace: pod.pod.namespace.to_string(), pod: pod.pod.name.to_string(), ..row };
        let own = pod.own.as_ref().and_then(row).map(|row| Row { started_at: Some(pod.created_at), ..row });
        rows.extend(own.map(of_pod));
        rows.extend(sandbox(layout, pod).map(of_pod));
        for container in &pod.containers {
            let found = row(&container.measured).or_else(|| reported_by_runtime(&container.measured)).map(|row| Row {
                name: container.id.to_string(),
                image: container.image.clone(),
                container: container.name.clone(),
                started_at: Some(container.created_at),
                ..row
            });
            rows.extend(found.map(of_pod));
        }
    }
    let disks = rows.iter().flat_map(|row| &row.detail.disks);
    let devices = disks.map(|disk| ((disk.major, disk.minor), disk.device().unwrap_or_default())).collect();
    Scrape { rows, at: Some(sample.at), devices, kernel: kernel(), system: system() }
}

fn read(layout: &Layout, path: &str, measured: &Measured, has_pressure: bool) -> Row {
    let detail = CgroupPlace::at(layout, path).detail();
    Row { id: path.to_owned(), usage: measured.usage, detail, has_pressure, ..Row::default() }
}

/// Usage by the runtime of a container whose cgroup is unknown.
fn reported_by_runtime(measured: &Measured) -> Option<Row> {
    let usage = measured.usage;
    (usage.cpu.is_some() || usage.memory.is_some()).then(|| Row { usage, ..Row::default() })
}

/// The sandbox's cgroup is a sibling of those of the containers. Only its network is reported.
fn sandbox(layout: &Layout, pod: &PodSample) -> Option<Row> {
    let (sandbox, process) = (pod.sandbox.as_ref()?, pod.network_of?);
    let beside = pod.containers.iter().find_map(|container| {
        let path = container.measured.path.as_ref()?;
        path.contains(container.id.as_str()).then(|| path.replace(container.id.as_str(), sandbox.as_str()))
    });
    let id = beside.filter(|path| CgroupPlace::at(layout, path).exists())?;
    // Fails for a process that has just ended.
    let interfaces = interfaces_of(process).ok()?;
    Some(Row { id, name: sandbox.to_string(), started_at: Some(pod.created_at), interfaces, ..Row::default() })
}

fn kernel() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned()
}

/// `PRETTY_NAME` of the distribution.
fn system() -> String {
    let text = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    name.unwrap_or_default().trim_matches('"').to_owned()
}

impl Scrape {
    /// The families, each built on demand; those without a value are omitted.
    pub fn families(&self) -> impl Iterator<Item = MetricFamily> + '_ {
        std::iter::once(self.version())
            .chain(FAMILIES.iter().map(|family| self.family(family)))
            .chain([self.error()])
            .filter(|family| !family.is_empty())
            .map(Family::finish)
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
            (of.values)(row, &mut Values { scrape: self, row, family: &mut family });
        }
        family
    }
}

/// Adds the values of one row to one family.
struct Values<'a> {
    scrape: &'a Scrape,
    row: &'a Row,
    family: &'a mut Family,
}

impl Values<'_> {
    /// A value with no labels of its own.
    fn one(&mut self, value: Option<f64>) {
        self.with(&[], value);
    }

    /// A value with more labels than the row has.
    fn with(&mut self, more: &[(&str, &str)], value: Option<f64>) {
        let row = self.row;
        let base = [
            ("container", row.container.as_str()),
            ("id", row.id.as_str()),
            ("image", row.image.as_str()),
            ("name", row.name.as_str()),
            ("namespace", row.namespace.as_str()),
            ("pod", row.pod.as_str()),
        ];
        let mut labels: Vec<(&str, &str)> = base.into_iter().chain(more.iter().copied()).collect();
        labels.sort_unstable();
        self.family.add(&labels, value, self.scrape.at);
    }

    /// A device's file.
    fn device(&self, number: (u32, u32)) -> String {
        self.scrape.devices.get(&number).cloned().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
