//! Reads the files that the flags name and merges them in upstream's order.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::path::PathBuf;

use super::document;
use super::document::Document;
use super::document::Place;
use super::draft::Draft;
use super::draft::gate_map;
use super::explain;
use super::feature_gates::FeatureGateError;
use super::feature_gates::FeatureGates;
use super::flags::FlagValues;
use super::flags::Target;
use super::keblet;
use super::kubelet;
use super::settings::ConfigError;
use super::settings::Origin;
use super::settings::Origins;
use super::settings::Settings;
use super::settings::Violation;
use super::settings::lookup;
use super::validate;

/// Loads everything: defaults < `--config` < `--config-dir` in order < flags.
///
/// Checks all that can be checked without looking at the machine; [`Settings::check_host`] does the rest.
///
/// # Errors
/// A file that cannot be read or decoded, a flag with an invalid value, and all values that are not acceptable.
pub fn load(flags: &FlagValues) -> Result<Settings, ConfigError> {
    let own = flags.own()?;
    let values = flags.values()?;
    let flag_gates = gate_map(values.iter().find(|(flag, _)| flag.name == "feature-gates").map(|(_, value)| value));
    check_gates(&flag_gates, |_| Origin::Flag("feature-gates"))?;

    let mut keblet_documents = Vec::new();
    let mut draft = match &own.config {
        Some(file) => {
            let document = main_document(file, &mut keblet_documents)?;
            Draft::from_file(&document, flag_gates)?
        }
        None => Draft::legacy(flag_gates),
    };
    if let Some(folder) = &own.config_dir {
        for file in drop_ins(folder)? {
            draft.patch(&drop_in_document(&file)?)?;
        }
    }
    let mut flag_origins = BTreeMap::new();
    for (flag, value) in values {
        match flag.target {
            Target::Field(path) => draft.set(flag, path, value)?,
            Target::Own => {
                flag_origins.insert(flag.name.to_owned(), Origin::Flag(flag.name));
            }
            Target::Nothing => {}
        }
    }
    if let Some(file) = &own.keblet_config {
        keblet_documents.extend(own_documents(file)?);
    }
    let (keblet, keblet_origins) = keblet_document(&keblet_documents)?;
    let mut kubelet = draft.typed()?;
    kubelet.seccomp_default |= own.seccomp_default;
    let gates = check_gates(&kubelet.feature_gates, |field| lookup(&draft.origins, field))?;

    let origins = Origins { kubelet: draft.origins, keblet: keblet_origins, flags: flag_origins };
    let mut settings = Settings { kubelet, keblet, flags: own, gates, origins, notices: Vec::new() };
    check(&settings)?;
    settings.notices = explain::notices(&settings, flags);
    Ok(settings)
}

fn check(settings: &Settings) -> Result<(), ConfigError> {
    let located = |origins: &BTreeMap<String, Origin>, problem: document::Problem| Violation {
        origin: lookup(origins, &problem.field),
        field: problem.field,
        message: problem.message,
    };
    let mut violations: Vec<Violation> = validate::kubelet(&settings.kubelet, &settings.gates)
        .into_iter()
        .map(|problem| located(&settings.origins.kubelet, problem))
        .collect();
    violations.extend(
        validate::keblet(&settings.keblet).into_iter().map(|problem| located(&settings.origins.keblet, problem)),
    );
    violations
        .extend(validate::flags(&settings.flags).into_iter().map(|problem| located(&settings.origins.flags, problem)));
    if violations.is_empty() { Ok(()) } else { Err(ConfigError::Invalid { violations }) }
}

fn check_gates(asked: &BTreeMap<String, bool>, origin: impl Fn(&str) -> Origin) -> Result<FeatureGates, ConfigError> {
    FeatureGates::new(asked).map_err(|errors| {
        let violation = |error: FeatureGateError| {
            let field = format!("featureGates.{}", error.name());
            Violation { origin: origin(&field), field, message: error.to_string() }
        };
        ConfigError::Gates { violations: errors.into_iter().map(violation).collect() }
    })
}

fn read(file: &Path) -> Result<Vec<Document>, ConfigError> {
    let text = fs::read_to_string(file).map_err(|cause| ConfigError::Read { file: file.to_owned(), cause })?;
    let documents = document::parse(file, &text)?;
    if documents.is_empty() {
        let place = Place { file: file.to_owned(), line: 0 };
        return Err(ConfigError::Kind { place, problem: "the file is empty".to_owned() });
    }
    Ok(documents)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DocumentKind {
    Kubelet,
    Keblet,
}

/// Takes apiVersion and kind out of the document and returns which of the two kinds it is.
fn kind_of(document: &mut Document) -> Result<DocumentKind, ConfigError> {
    let wrong = |document: &Document, field: &str, problem: String| {
        Err(ConfigError::Kind { place: document.place_of(field), problem })
    };
    let (version, kind) = match (document.text("apiVersion"), document.text("kind")) {
        (Some(version), Some(kind)) => (version.to_owned(), kind.to_owned()),
        (None, _) => return wrong(document, "apiVersion", "apiVersion: required, and a string".to_owned()),
        (_, None) => return wrong(document, "kind", "kind: required, and a string".to_owned()),
    };
    let found = match (version.as_str(), kind.as_str()) {
        (kubelet::API_VERSION, kubelet::KIND) => DocumentKind::Kubelet,
        (keblet::API_VERSION, keblet::KIND) => DocumentKind::Keblet,
        (_, kubelet::KIND) => {
            let problem =
                format!("apiVersion: {version:?} of {kind} is not supported; expected {}", kubelet::API_VERSION);
            return wrong(document, "apiVersion", problem);
        }
        (_, keblet::KIND) => {
            let problem =
                format!("apiVersion: {version:?} of {kind} is not supported; expected {}", keblet::API_VERSION);
            return wrong(document, "apiVersion", problem);
        }
        _ => {
            let problem = format!("kind: {kind:?} is not supported; expected {} or {}", kubelet::KIND, keblet::KIND);
            return wrong(document, "kind", problem);
        }
    };
    for field in ["apiVersion", "kind"] {
        document.fields.remove(field);
        document.lines.remove(field);
    }
    Ok(found)
}

/// The one KubeletConfiguration of the main file; keblet's own documents are put aside.
fn main_document(file: &Path, others: &mut Vec<Document>) -> Result<Document, ConfigError> {
    let mut main: Option<Document> = None;
    for mut document in read(file)? {
        match (kind_of(&mut document)?, &main) {
            (DocumentKind::Keblet, _) => others.push(document),
            (DocumentKind::Kubelet, None) => main = Some(document),
            (DocumentKind::Kubelet, Some(first)) => {
                let problem = format!("a second {}; the first begins in line {}", kubelet::KIND, first.place.line);
                return Err(ConfigError::Kind { place: document.place, problem });
            }
        }
    }
    main.ok_or_else(|| ConfigError::Kind {
        place: Place { file: file.to_owned(), line: 0 },
        problem: format!("holds no {}; for a {} alone use --keblet-config", kubelet::KIND, keblet::KIND),
    })
}

fn drop_in_document(file: &Path) -> Result<Document, ConfigError> {
    let reject = |place| {
        Err(ConfigError::Kind { place, problem: format!("a drop-in holds one {} and nothing else", kubelet::KIND) })
    };
    let mut documents = read(file)?;
    if let Some(second) = documents.get(1) {
        return reject(second.place.clone());
    }
    let mut document = documents.remove(0);
    match kind_of(&mut document)? {
        DocumentKind::Kubelet => Ok(document),
        DocumentKind::Keblet => reject(document.place),
    }
}

fn own_documents(file: &Path) -> Result<Vec<Document>, ConfigError> {
    let mut documents = read(file)?;
    for document in &mut documents {
        if kind_of(document)? == DocumentKind::Kubelet {
            let problem = format!("expected {}; {} belongs into the file of --config", keblet::KIND, kubelet::KIND);
            return Err(ConfigError::Kind { place: document.place.clone(), problem });
        }
    }
    Ok(documents)
}

fn keblet_document(
    documents: &[Document],
) -> Result<(keblet::KebletConfiguration, BTreeMap<String, Origin>), ConfigError> {
    match documents {
        [] => Ok(Default::default()),
        [document] => {
            let mut stripped = document.clone();
            super::settings::strip_nulls(&mut stripped.fields);
            let origin = |line: &u64| Origin::File(Place { file: document.place.file.clone(), line: *line });
            let origins = document.lines.iter().map(|(path, line)| (path.clone(), origin(line))).collect();
            Ok((stripped.decode()?, origins))
        }
        [first, second, ..] => {
            let problem = format!("a second {}; the first is at {}", keblet::KIND, first.place);
            Err(ConfigError::Kind { place: second.place.clone(), problem })
        }
    }
}

/// The drop-ins at a path, which may be one itself, in the order they apply: by name, a subdirectory in the place of
/// its name. A directory that is a symbolic link is not entered, neither at the top nor below.
fn drop_ins(path: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    let failed = |cause| ConfigError::Read { file: path.to_owned(), cause };
    if !fs::symlink_metadata(path).map_err(failed)?.is_dir() {
        // Not `Path::extension`, for which `.conf` has none.
        let is_named = path.file_name().is_some_and(|name| name.as_encoded_bytes().ends_with(b".conf"));
        let is_drop_in = is_named && fs::metadata(path).map_err(failed)?.is_file();
        return Ok(if is_drop_in { vec![path.to_owned()] } else { Vec::new() });
    }
    let entries = fs::read_dir(path).and_then(Iterator::collect::<Result<Vec<_>, _>>).map_err(failed)?;
    let mut below: Vec<PathBuf> = entries.iter().map(fs::DirEntry::path).collect();
    below.sort();
    let mut found = Vec::new();
    for path in below {
        found.extend(drop_ins(&path)?);
    }
    Ok(found)
}

#[cfg(test)]
mod tests;
