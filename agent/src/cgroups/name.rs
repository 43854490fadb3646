//! Names of cgroups as lists of components, and their paths with both drivers. Pure.

use super::Driver;
use crate::model::QosClass;

/// Suffix of slice units.
const SLICE: &str = ".slice";
/// Root of all pods.
const KUBEPODS: &str = "kubepods";
/// Prefix of a pod's own component.
const POD: &str = "pod";

/// The component of a class below `kubepods`, if it has one.
fn component(class: QosClass) -> Option<&'static str> {
    match class {
        QosClass::Guaranteed => None,
        QosClass::Burstable => Some("burstable"),
        QosClass::BestEffort => Some("besteffort"),
    }
}

/// Paths of the classes that have a cgroup of their own below that of all pods, which is at this path.
pub fn class_paths(kubepods: &str) -> impl Iterator<Item = String> {
    let classes = [QosClass::Burstable, QosClass::BestEffort].into_iter().filter_map(component);
    classes.map(move |class| match kubepods.strip_suffix(SLICE) {
        Some(path) => format!("{kubepods}/{}-{class}{SLICE}", path.rsplit('/').next().unwrap_or(path)),
        None => format!("{kubepods}/{class}"),
    })
}

/// A cgroup's components, outermost first; empty for the root.
#[derive(Clone, PartialEq, Eq, Debug, Hash, Default)]
pub struct CgroupName(Vec<String>);

/// An invalid component of a cgroup name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cgroup component {component:?} must not be empty, \".\" or \"..\" and must not contain \"/\" or \"_\"")]
pub struct CgroupNameError {
    /// What was given.
    pub component: String,
}

impl CgroupName {
    /// Reads a `cgroupRoot` setting, which is always in cgroupfs form. Others have created the cgroup: it may have underscores,
    /// which the systemd driver does not distinguish from dashes.
    ///
    /// # Errors
    /// A component that leads elsewhere.
    pub fn parse(path: &str) -> Result<Self, CgroupNameError> {
        Self::of_others(path.split('/').filter(|part| !part.is_empty()).map(str::to_owned).collect())
    }

    /// One level deeper.
    ///
    /// # Errors
    /// See [`CgroupNameError`].
    pub fn child(&self, component: &str) -> Result<Self, CgroupNameError> {
        if ["", ".", ".."].contains(&component) || component.contains(['/', '_']) {
            return Err(CgroupNameError { component: component.to_owned() });
        }
        Ok(self.known(component))
    }

    /// Reads the name of a cgroup that others create (`systemReservedCgroup`, `kubeReservedCgroup`): a path with the
    /// cgroupfs driver; with the systemd driver a slice, of which only the last component of the path counts.
    ///
    /// # Errors
    /// A component that leads elsewhere.
    pub fn of_setting(path: &str, driver: Driver) -> Result<Self, CgroupNameError> {
        let components: Vec<String> = match driver {
            Driver::Cgroupfs => path.split('/').filter(|part| !part.is_empty()).map(str::to_owned).collect(),
            Driver::Systemd => {
                let last = path.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
                let unit = last.strip_suffix(SLICE).unwrap_or(last);
                unit.split('-').filter(|part| !part.is_empty()).map(|part| part.replace('_', "-")).collect()
            }
        };
        Self::of_others(components)
    }

    /// Components that others have named.
    fn of_others(components: Vec<String>) -> Result<Self, CgroupNameError> {
        match components.iter().find(|component| [".", ".."].contains(&component.as_str())) {
            Some(component) => Err(CgroupNameError { component: component.clone() }),
            None => Ok(Self(components)),
        }
    }

    /// `kubepods` below this root.
    pub fn kubepods(&self) -> Self {
        self.known(KUBEPODS)
    }

    /// The parent of the pods of this class.
    pub fn class(&self, class: QosClass) -> Self {
        let kubepods = self.kubepods();
        component(class).map_or_else(|| kubepods.clone(), |component| kubepods.known(component))
    }

    /// A pod's own cgroup.
    ///
    /// # Errors
    /// The UID is not a valid component.
    pub fn pod(&self, class: QosClass, uid: &str) -> Result<Self, CgroupNameError> {
        self.class(class).child(&format!("{POD}{uid}"))
    }

    /// Appends a component that is valid.
    fn known(&self, component: &str) -> Self {
        let mut components = self.0.clone();
        components.push(component.to_owned());
        Self(components)
    }

    /// The components as the kubelet writes them in messages: `["kubepods" "burstable"]`.
    pub fn quoted(&self) -> String {
        let quoted: Vec<String> = self.0.iter().map(|component| format!("{component:?}")).collect();
        format!("[{}]", quoted.join(" "))
    }

    /// The components, outermost first.
    pub fn components(&self) -> &[String] {
        &self.0
    }

    /// The cgroup this one is in; `None` for the root.
    pub fn parent(&self) -> Option<Self> {
        let (_, parents) = self.0.split_last()?;
        Some(Self(parents.to_vec()))
    }

    /// The path below a hierarchy's mount point, with a leading slash: also what the runtime is given as parent.
    pub fn path(&self, driver: Driver) -> String {
        match driver {
            Driver::Cgroupfs => format!("/{}", self.0.join("/")),
            Driver::Systemd if self.0.is_empty() => "/".to_owned(),
            Driver::Systemd => {
                (1..=self.0.len()).map(|depth| format!("/{}", Self(self.0[..depth].to_vec()).unit())).collect()
            }
        }
    }

    /// The slice unit of this cgroup: dashes inside components become underscores, components are joined by dashes.
    pub fn unit(&self) -> String {
        if self.0.is_empty() {
            return format!("-{SLICE}");
        }
        let escaped: Vec<String> = self.0.iter().map(|component| component.replace('-', "_")).collect();
        format!("{}{SLICE}", escaped.join("-"))
    }
}

/// The UID in the file name of a pod's cgroup, under either driver; `None` for other cgroups.
pub fn pod_uid_of(file_name: &str, driver: Driver) -> Option<String> {
    let uid = |component: &str| Some(component.strip_prefix(POD)?.to_owned()).filter(|uid| !uid.is_empty());
    match driver {
        Driver::Cgroupfs => uid(file_name),
        Driver::Systemd => {
            let unit = file_name.strip_suffix(SLICE)?;
            let (_, last) = unit.rsplit_once('-')?;
            uid(&last.replace('_', "-"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_the_tree() {
        let root = CgroupName::default();
        let pod = |class| root.pod(class, "1234-ab").expect("valid");
        let table = [
            (root.kubepods(), "/kubepods", "/kubepods.slice"),
            (
                pod(QosClass::Burstable),
                "/kubepods/burstable/pod1234-ab",
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1234_ab.slice",
            ),
            (
                pod(QosClass::BestEffort),
                "/kubepods/besteffort/pod1234-ab",
                "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1234_ab.slice",
            ),
            (pod(QosClass::Guaranteed), "/kubepods/pod1234-ab", "/kubepods.slice/kubepods-pod1234_ab.slice"),
            (CgroupName::parse("/x/").expect("valid").kubepods(), "/x/kubepods", "/x.slice/x-kubepods.slice"),
            (CgroupName::parse("/x_y").expect("valid").kubepods(), "/x_y/kubepods", "/x_y.slice/x_y-kubepods.slice"),
            (root.clone(), "/", "/"),
        ];
        for (name, cgroupfs, systemd) in table {
            assert_eq!(name.path(Driver::Cgroupfs), cgroupfs);
            assert_eq!(name.path(Driver::Systemd), systemd);
        }
    }

    #[test]
    fn classes_are_below_all_pods() {
        for root in ["", "/x/y"].map(|path| CgroupName::parse(path).expect("valid")) {
            for driver in [Driver::Cgroupfs, Driver::Systemd] {
                let expected = [QosClass::Burstable, QosClass::BestEffort].map(|class| root.class(class).path(driver));
                assert_eq!(class_paths(&root.kubepods().path(driver)).collect::<Vec<_>>(), expected);
            }
        }
    }

    #[test]
    fn uids_come_back() {
        assert_eq!(pod_uid_of("pod1234-ab", Driver::Cgroupfs).as_deref(), Some("1234-ab"));
        assert_eq!(pod_uid_of("kubepods-burstable-pod1234_ab.slice", Driver::Systemd).as_deref(), Some("1234-ab"));
        for other in ["burstable", "pod", "system.slice"] {
            assert_eq!(pod_uid_of(other, Driver::Cgroupfs), None, "{other}");
        }
        for other in ["kubepods-burstable.slice", "podx.slice", "kubepods-podx"] {
            assert_eq!(pod_uid_of(other, Driver::Systemd), None, "{other}");
        }
    }

    #[test]
    fn cgroups_of_settings() {
        let table = [
            ("/system.slice", "/system.slice", "/system.slice"),
            ("kube-reserved", "/kube-reserved", "/kube.slice/kube-reserved.slice"),
            ("/a.slice/a-b_c.slice", "/a.slice/a-b_c.slice", "/a.slice/a-b_c.slice"),
            ("/", "/", "/"),
        ];
        for (setting, cgroupfs, systemd) in table {
            for (driver, expected) in [(Driver::Cgroupfs, cgroupfs), (Driver::Systemd, systemd)] {
                let name = CgroupName::of_setting(setting, driver).expect("valid");
                assert_eq!(name.path(driver), expected, "{setting}");
            }
        }
        assert_eq!(CgroupName::of_setting("/a/b-c", Driver::Cgroupfs).expect("valid").quoted(), "[\"a\" \"b-c\"]");
        assert!(CgroupName::of_setting("/a/../b", Driver::Cgroupfs).is_err());
    }

    #[test]
    fn bad_components_are_refused() {
        assert!(CgroupName::default().child("a_b").is_err());
        assert!(CgroupName::default().child("").is_err());
        assert!(CgroupName::parse("/../b").is_err());
        assert!(CgroupName::default().pod(QosClass::Burstable, "a/../b").is_err());
        assert_eq!(CgroupName::parse("").expect("valid"), CgroupName::default());
    }
}
