//! The shared libraries that a program needs, and the loader.

use std::path::Path;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use object::Object as _;
use object::ObjectSection as _;

use crate::system;

/// Absolute paths of all libraries, the loader included; none for a static program.
///
/// # Errors
/// The program cannot be read, or a library is not on this machine.
pub(super) fn needed(program: &Path) -> Result<Vec<String>> {
    let bytes = std::fs::read(program).with_context(|| format!("cannot read {}", program.display()))?;
    let file = object::File::parse(&*bytes).with_context(|| format!("{} is not a program", program.display()))?;
    if file.section_by_name(".interp").is_none_or(|section| section.size() == 0) {
        return Ok(Vec::new());
    }
    parse(&system::output(Command::new("ldd").arg(program))?)
}

/// From the output of ldd: `name => path (address)`, `path (address)` for the loader, and a line without a path for what
/// the kernel provides.
fn parse(output: &str) -> Result<Vec<String>> {
    let mut paths = Vec::new();
    for line in output.lines().map(str::trim) {
        let (name, found) = line.split_once(" => ").unwrap_or((line, line));
        if found.starts_with("not found") {
            bail!("the library {name} is not on this machine");
        }
        let path = found.split(" (").next().unwrap_or_default();
        if path.starts_with('/') {
            paths.push(path.to_owned());
        }
    }
    paths.sort();
    paths.dedup();
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_and_loader_are_found() {
        let output = "\tlinux-vdso.so.1 (0x00007ffd)\n\
                      \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                      \tlibgcc_s.so.1 => /lib/x86_64-linux-gnu/libgcc_s.so.1 (0x00007f)\n\
                      \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let found = parse(output).unwrap();
        assert_eq!(
            found,
            ["/lib/x86_64-linux-gnu/libc.so.6", "/lib/x86_64-linux-gnu/libgcc_s.so.1", "/lib64/ld-linux-x86-64.so.2"]
        );
        let missing = parse("\tlibodd.so.1 => not found\n").unwrap_err();
        assert_eq!(missing.to_string(), "the library libodd.so.1 is not on this machine");
    }
}
