//! Which resources of the node are under pressure.

/// Resources under pressure.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Pressures {
    /// Memory.
    pub memory: bool,
    /// Disk space or inodes.
    pub disk: bool,
    /// Process ids.
    pub pid: bool,
}

impl Pressures {
    /// The types of the conditions that are True.
    pub fn conditions(self) -> Vec<&'static str> {
        let all = [(self.memory, "MemoryPressure"), (self.disk, "DiskPressure"), (self.pid, "PIDPressure")];
        all.into_iter().filter(|(under, _)| *under).map(|(_, condition)| condition).collect()
    }
}
