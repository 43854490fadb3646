//! How the program is linked.

use std::fs;
use std::path::Path;
use std::process::Command;

/// The first glibc that reads packed relocations.
const GLIBC: (u32, u32) = (2, 36);
/// Functions that a running agent calls, as patterns, in groups under a `#`; made by `cargo xtask layout`.
const CALLED: &str = "layout/called.txt";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={CALLED}");
    // A position-independent program is full of addresses that are set right at each start. Their list, 24 bytes each,
    // is read whole and stays in memory; packed it is a hundredth of that.
    if packed_relocations_are_read() {
        println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
    // A program is mapped in pieces of 16 pages: what is called lies together, else nearly all of it is in memory.
    if target("PROFILE") == "release" && target("CARGO_CFG_TARGET_ENV") == "gnu" {
        println!("cargo::rustc-link-arg-bins=-Wl,-T,{}", called_together());
    }
}

/// Writes a linker script that puts the functions of [`CALLED`] before all others; returns its path.
fn called_together() -> String {
    let list = fs::read_to_string(CALLED).unwrap_or_else(|error| panic!("cannot read {CALLED}: {error}"));
    let mut script = String::from("SECTIONS { .text.called :\n{");
    for group in list.split('#') {
        // What is marked cold lies in sections of its own, and is called all the same, if only once.
        let names = group.lines().skip(1).map(|name| format!(".text.{name} .text.unlikely.{name}"));
        let sections: Vec<String> = names.collect();
        if !sections.is_empty() {
            script.push_str(&format!(" *({})\n", sections.join(" ")));
        }
    }
    script.push_str("} } INSERT BEFORE .text;\n");
    let path = Path::new(&target("OUT_DIR")).join("called.ld");
    fs::write(&path, script).unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
    path.display().to_string()
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
