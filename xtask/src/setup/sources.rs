//! Reads the system's package sources, in both formats of apt's source lists.

use std::fs;
use std::path::Path;
use std::path::PathBuf;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;

/// A mirror of the distribution.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Mirror {
    /// Base address.
    pub uri: String,
    /// The suite of this system.
    pub suite: String,
    /// The key file that signs it, if the source names one.
    pub signed_by: Option<String>,
}

/// The system's own mirror of its suite.
///
/// # Errors
/// The system is not Debian, or has no source of its suite.
pub(crate) fn mirror() -> Result<Mirror> {
    let release = fs::read_to_string("/etc/os-release").context("cannot read /etc/os-release")?;
    let field = |name: &str| {
        let prefix = format!("{name}=");
        release.lines().find_map(|line| line.strip_prefix(&prefix)).map(|value| value.trim_matches('"').to_owned())
    };
    let suite = match (field("ID").as_deref(), field("VERSION_CODENAME")) {
        (Some("debian"), Some(suite)) => suite,
        (other, _) => bail!(
            "setup takes containerd, runc, CNI plugins and busybox from Debian's archive, but this system is {}",
            other.unwrap_or("unknown")
        ),
    };
    let mut read_files = Vec::new();
    for file in source_files() {
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let deb822 = file.extension().is_some_and(|extension| extension == "sources");
        if let Some(mirror) = find(&text, deb822, &suite) {
            return Ok(mirror);
        }
        read_files.push(file.display().to_string());
    }
    bail!("no source of {suite}/main in {}", read_files.join(", "))
}

fn source_files() -> Vec<PathBuf> {
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    if let Ok(entries) = fs::read_dir("/etc/apt/sources.list.d") {
        files.extend(entries.flatten().map(|entry| entry.path()));
    }
    files.retain(|file| file.is_file() && has_source_extension(file));
    files.sort();
    files
}

fn has_source_extension(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension == "list" || extension == "sources")
}

fn find(text: &str, deb822: bool, suite: &str) -> Option<Mirror> {
    if deb822 { text.split("\n\n").find_map(|stanza| deb822_stanza(stanza, suite)) } else { one_line(text, suite) }
}

/// `deb [option=value …] URI SUITE COMPONENT…`
fn one_line(text: &str, suite: &str) -> Option<Mirror> {
    text.lines().find_map(|line| {
        let rest = line.trim().strip_prefix("deb ")?.trim_start();
        let (options, rest) = match rest.strip_prefix('[') {
            Some(bracketed) => bracketed.split_once(']')?,
            None => ("", rest),
        };
        let mut words = rest.split_whitespace();
        let (uri, own) = (words.next()?, words.next()?);
        let signed_by = options.split_whitespace().find_map(|option| option.strip_prefix("signed-by="));
        (own == suite && words.any(|component| component == "main")).then(|| Mirror {
            uri: uri.to_owned(),
            suite: suite.to_owned(),
            signed_by: signed_by.map(str::to_owned),
        })
    })
}

fn deb822_stanza(stanza: &str, suite: &str) -> Option<Mirror> {
    let field = |name: &str| {
        stanza.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    };
    let has =
        |name: &str, wanted: &str| field(name).is_some_and(|value| value.split_whitespace().any(|word| word == wanted));
    let enabled = !field("Enabled").is_some_and(|value| value.eq_ignore_ascii_case("no"));
    if !(enabled && has("Types", "deb") && has("Suites", suite) && has("Components", "main")) {
        return None;
    }
    Some(Mirror {
        uri: field("URIs")?.split_whitespace().next()?.to_owned(),
        suite: suite.to_owned(),
        // The field may contain a key instead of a path; apt then uses its trusted keys, or reports that the key is
        // missing.
        signed_by: field("Signed-By").filter(|value| value.starts_with('/')).map(str::to_owned),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirror_is_found_in_both_source_formats() {
        let stanzas = "\
Types: deb-src
URIs: http://sources.example
Suites: bookworm
Components: main

# comment
Types: deb
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /keys/debian.gpg
";
        let lines = "\
# deb http://old.example bookworm main
deb http://security.example bookworm-security main
deb [arch=amd64 signed-by=/keys/debian.gpg] http://mirror.example/debian bookworm main
";
        let expected = Mirror {
            uri: "http://mirror.example/debian".to_owned(),
            suite: "bookworm".to_owned(),
            signed_by: Some("/keys/debian.gpg".to_owned()),
        };
        assert_eq!(find(stanzas, true, "bookworm"), Some(expected.clone()));
        assert_eq!(find(lines, false, "bookworm"), Some(expected));
    }

    #[test]
    fn unusable_sources_are_skipped() {
        let disabled = "Types: deb\nURIs: http://m\nSuites: bookworm\nComponents: main\nEnabled: no\n";
        assert_eq!(find(disabled, true, "bookworm"), None);
        assert_eq!(find("deb http://m trixie main\n", false, "bookworm"), None);
        assert_eq!(find("deb http://m bookworm contrib\n", false, "bookworm"), None);
    }
}
