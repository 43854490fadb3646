//! How the program is linked.

use std::process::Command;

/// The first glibc that reads packed relocations.
const GLIBC: (u32, u32) = (2, 36);

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // A position-independent program is full of addresses that are set right at each start. Their list, 24 bytes each,
    // is read whole and stays in memory; packed it is a hundredth of that.
    if packed_relocations_are_read() {
        println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
}

/// Whether the machine the program is for surely starts such a program: it is like this one, and this one does.
fn packed_relocations_are_read() -> bool {
    let here = target("TARGET") == target("HOST");
    here && target("CARGO_CFG_TARGET_ENV") == "gnu" && glibc().is_some_and(|version| version >= GLIBC)
}

fn target(what: &str) -> String {
    std::env::var(what).unwrap_or_default()
}

/// The version of this machine's glibc.
fn glibc() -> Option<(u32, u32)> {
    let said = Command::new("getconf").arg("GNU_LIBC_VERSION").output().ok()?;
    let text = String::from_utf8(said.stdout).ok()?;
    let mut numbers = text.trim().strip_prefix("glibc ")?.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}
