//! Content of a probe object: programs, maps and the layout of its records.

use std::collections::BTreeMap;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use keblet_ebpf_common::LAYOUT;
use keblet_ebpf_common::names;
use object::Object as _;
use object::ObjectSection as _;
use object::ObjectSymbol as _;
use object::SymbolKind;

/// Section of the map definitions.
const MAPS: &str = "maps";

/// The interface of an object.
#[derive(Debug, PartialEq)]
pub(super) struct Contents {
    /// Bytes of instructions, by section (which names the hook) and name.
    pub programs: BTreeMap<(String, String), u64>,
    /// Definition (type, sizes, flags) by name.
    pub maps: BTreeMap<String, Vec<u8>>,
    /// Sizes and offsets of the records.
    pub layout: Vec<u8>,
}

impl Contents {
    /// Parses an object.
    ///
    /// # Errors
    /// The bytes are not an ELF object, or have no programs, maps or layout.
    pub(super) fn read(bytes: &[u8]) -> Result<Self> {
        let file = object::File::parse(bytes).context("the probe object is not an ELF file")?;
        let mut contents = Self { programs: BTreeMap::new(), maps: BTreeMap::new(), layout: Vec::new() };
        for symbol in file.symbols() {
            let (Ok(name), Some(index)) = (symbol.name(), symbol.section_index()) else { continue };
            let section = file.section_by_index(index).context("a symbol is in no section")?;
            let section_name = section.name().context("a section has no name")?;
            let data = || -> Result<Vec<u8>> {
                let data = section.data_range(symbol.address(), symbol.size())?;
                Ok(data.context("a symbol reaches beyond its section")?.to_vec())
            };
            match symbol.kind() {
                // Functions shared by programs are in `.text`.
                SymbolKind::Text if section_name != ".text" => {
                    contents.programs.insert((section_name.to_owned(), name.to_owned()), symbol.size());
                }
                SymbolKind::Data if section_name == MAPS => {
                    contents.maps.insert(name.to_owned(), data()?);
                }
                SymbolKind::Data if name == names::LAYOUT => contents.layout = data()?,
                _ => {}
            }
        }
        if contents.programs.is_empty() || contents.maps.is_empty() || contents.layout.is_empty() {
            bail!("the probe object lacks programs, maps or its layout");
        }
        Ok(contents)
    }
}

/// The layout that the agent of this tree reads.
pub(super) fn layout_of_this_build() -> Vec<u8> {
    let words = [
        LAYOUT.exit,
        LAYOUT.oom,
        LAYOUT.cgroup,
        LAYOUT.watched,
        LAYOUT.config,
        LAYOUT.offsets,
        LAYOUT.exit_comm,
        LAYOUT.oom_comm,
        LAYOUT.cgroup_path,
        LAYOUT.revision,
    ];
    // The probes are built for little-endian machines.
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_files_are_rejected() {
        assert!(Contents::read(b"").is_err());
        assert!(Contents::read(b"\x7fELF and nothing else").is_err());
    }
}
