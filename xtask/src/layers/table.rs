//! The table of permitted imports, `agent/layers.toml`. Pure.

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use serde::Deserialize;

/// What a pure file may not use: clocks, tasks, input and output.
const IMPURE: [&[&str]; 11] = [
    &["tokio"],
    &["tonic"],
    &["std", "fs"],
    &["std", "net", "TcpListener"],
    &["std", "net", "TcpStream"],
    &["std", "net", "UdpSocket"],
    &["std", "process"],
    &["std", "thread"],
    &["std", "env"],
    &["Instant", "now"],
    &["SystemTime", "now"],
];

/// Types without effects in modules that have some.
const VALUES: [&[&str]; 6] = [
    &["tokio", "time", "Instant"],
    &["std", "net", "IpAddr"],
    &["std", "net", "Ipv4Addr"],
    &["std", "net", "Ipv6Addr"],
    &["std", "net", "SocketAddr"],
    &["std", "net", "AddrParseError"],
];

/// `agent/layers.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Table {
    everywhere: Vec<String>,
    pure: Vec<String>,
    pure_may: Vec<String>,
    all: Vec<String>,
    module: Vec<Row>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    name: String,
    duty: String,
    may: Vec<String>,
}

impl Table {
    /// Parses the table and checks that it has no cycles.
    ///
    /// # Errors
    /// The table is malformed, a module has no duty or two rows, or a row names a module that is not above it.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let table: Self = toml::from_str(text).context("it cannot be read")?;
        for (rank, row) in table.module.iter().enumerate() {
            if row.duty.is_empty() {
                bail!("module {} has no duty", row.name);
            }
            let above = &table.module[..rank];
            if above.iter().any(|other| other.name == row.name) {
                bail!("module {} has two rows", row.name);
            }
            if let Some(wrong) = row.may.iter().find(|name| !above.iter().any(|other| other.name == **name)) {
                bail!("module {} may use {wrong}, which is not above it", row.name);
            }
        }
        Ok(table)
    }

    /// Checks that a file's module has a row.
    ///
    /// # Errors
    /// The module has no row.
    pub(super) fn known(&self, module: &[String]) -> Result<(), String> {
        let Some(top) = module.first() else { return Ok(()) };
        if self.all.contains(top) || self.row(top).is_some() {
            return Ok(());
        }
        Err(format!("module {top} has no row in the table"))
    }

    /// Checks that a module may use a path. Paths in the crate start with `crate`, others with the name of a crate or
    /// type.
    ///
    /// # Errors
    /// The table does not permit it; the error is one sentence.
    pub(super) fn allows(&self, module: &[String], path: &[String]) -> Result<(), String> {
        let Some(top) = module.first() else { return Ok(()) };
        let own = match path.split_first() {
            Some((first, rest)) if first == "crate" => rest,
            _ => return self.outside(module, path),
        };
        let Some(target) = own.first() else { return Ok(()) };
        // Items of the crate that are no module, such as `crate::Result`, are defined in lib.rs, which has no row.
        let is_module = self.row(target).is_some() || self.all.contains(target);
        if !is_module {
            return Ok(());
        }
        if self.pure_root(module).is_some() {
            // A pure part may be spread over several files of a module, all of which are pure.
            let decides = target == top && own.iter().any(|name| self.pure.contains(name));
            if self.pure_may.contains(target) || decides {
                return Ok(());
            }
            let shown = if target == top { own[..own.len().min(2)].join("::") } else { target.clone() };
            return Err(format!("a pure file may not use {shown}"));
        }
        if self.all.contains(top) || target == top || self.everywhere.contains(target) {
            return Ok(());
        }
        match self.row(top) {
            Some(row) if row.may.contains(target) => Ok(()),
            _ => Err(format!("{top} may not use {target}")),
        }
    }

    fn outside(&self, module: &[String], path: &[String]) -> Result<(), String> {
        if self.pure_root(module).is_none() {
            return Ok(());
        }
        effect(path).map_or(Ok(()), |effect| Err(format!("a pure file may not use {effect}")))
    }

    /// All modules that the table names.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        let rows = self.module.iter().map(|row| row.name.as_str());
        rows.chain(self.all.iter().chain(&self.everywhere).chain(&self.pure_may).map(String::as_str))
    }

    /// Names that make a file or folder pure.
    pub(super) fn pure_names(&self) -> impl Iterator<Item = &String> {
        self.pure.iter()
    }

    /// Each module with each module that its row permits.
    pub(super) fn permissions(&self) -> impl Iterator<Item = (&str, &str)> {
        self.module.iter().flat_map(|row| row.may.iter().map(|target| (row.name.as_str(), target.as_str())))
    }

    /// The module whose name makes a file pure: the file's own or a parent's.
    fn pure_root<'a>(&self, module: &'a [String]) -> Option<&'a [String]> {
        let depth = module.iter().position(|name| self.pure.contains(name))?;
        Some(&module[..=depth])
    }

    fn row(&self, name: &str) -> Option<&Row> {
        self.module.iter().find(|row| row.name == name)
    }
}

/// Checks that a file that calls itself pure may use a path: any type, but no effect.
///
/// # Errors
/// The path has an effect; the error is one sentence.
pub(super) fn is_pure(path: &[String]) -> Result<(), String> {
    if VALUES.iter().any(|value| path.iter().take(value.len()).eq(value.iter())) {
        return Ok(());
    }
    effect(path).map_or(Ok(()), |effect| Err(format!("a file that calls itself pure may not use {effect}")))
}

/// The effect of a path, if it has one. A path may begin at the type: `Instant::now`.
fn effect(path: &[String]) -> Option<String> {
    let tail = &path[path.len().saturating_sub(2)..];
    let leads = |impure: &&&[&str]| path.iter().take(impure.len()).eq(impure.iter()) || tail.iter().eq(impure.iter());
    IMPURE.iter().find(leads).map(|impure| impure.join("::"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cycles_in_the_table_are_rejected() {
        let row = |name: &str, may: &str| format!("[[module]]\nname = \"{name}\"\nduty = \"d\"\nmay = [{may}]\n");
        let head = "everywhere = []\npure = []\npure_may = []\nall = []\n";
        let cycle = format!("{head}{}{}", row("a", "\"b\""), row("b", "\"a\""));
        assert_eq!(Table::parse(&cycle).unwrap_err().to_string(), "module a may use b, which is not above it");
        let twice = format!("{head}{}{}", row("a", ""), row("a", ""));
        assert_eq!(Table::parse(&twice).unwrap_err().to_string(), "module a has two rows");
    }
}
