//! Linker arguments of the agent's binary: packed relocations where the target's glibc reads them.

use std::process::Command;

/// The first glibc that reads packed relocations (`DT_RELR`).
const GLIBC: (u32, u32) = (2, 36);

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // A position-independent binary has an entry of 24 bytes for each address that the loader must relocate; the list is
    // read at every start and stays resident. Packed it takes about a hundredth of that.
    if reads_packed_relocations() {
        println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
}

/// Whether the target is this machine's own and its glibc is new enough; other targets may have an older one.
fn reads_packed_relocations() -> bool {
    let native = target("TARGET") == target("HOST");
    native && target("CARGO_CFG_TARGET_ENV") == "gnu" && glibc().is_some_and(|version| version >= GLIBC)
}

/// A variable that Cargo sets for build scripts.
fn target(variable: &str) -> String {
    std::env::var(variable).unwrap_or_default()
}

/// The version of this machine's glibc.
fn glibc() -> Option<(u32, u32)> {
    let output = Command::new("getconf").arg("GNU_LIBC_VERSION").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let mut numbers = text.trim().strip_prefix("glibc ")?.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}
