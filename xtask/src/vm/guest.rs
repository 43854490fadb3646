//! The files that the machine has besides packages.

/// A file of the machine.
pub(crate) struct GuestFile {
    /// Path in the root file system, without a leading slash.
    pub path: &'static str,
    /// Permissions.
    pub mode: u32,
    /// Content.
    pub content: &'static str,
}

/// All of them.
pub(crate) const FILES: [GuestFile; 11] = [
    GuestFile { path: "vm/init", mode: 0o755, content: include_str!("guest/init") },
    GuestFile { path: "vm/run", mode: 0o755, content: include_str!("guest/run") },
    GuestFile { path: "etc/passwd", mode: 0o644, content: include_str!("guest/passwd") },
    GuestFile { path: "etc/hosts", mode: 0o644, content: include_str!("guest/hosts") },
    GuestFile { path: "etc/resolv.conf", mode: 0o644, content: include_str!("guest/resolv.conf") },
    GuestFile { path: "etc/group", mode: 0o644, content: include_str!("guest/group") },
    GuestFile { path: "vm/units/machine.target", mode: 0o644, content: include_str!("guest/units/machine.target") },
    GuestFile { path: "vm/units/dbus.socket", mode: 0o644, content: include_str!("guest/units/dbus.socket") },
    GuestFile { path: "vm/units/dbus.service", mode: 0o644, content: include_str!("guest/units/dbus.service") },
    GuestFile { path: "vm/units/job.service", mode: 0o644, content: include_str!("guest/units/job.service") },
    // A folder without generators.
    GuestFile { path: "vm/none/README", mode: 0o644, content: "Empty.\n" },
];
