//! Configuration of credential plugins (`CredentialProviderConfig`): reads a file or a directory of files, and checks them.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;
use sha2::Digest as _;

use super::super::keyring::is_registry;
use crate::config::document;
use crate::config::duration::GoDuration;
use crate::filesystem;
use crate::images::access::lower_hex;

/// Longest file that is read, bytes.
const MAX_FILE: usize = 4 << 20;
const KIND: &str = "CredentialProviderConfig";
/// API versions of plugins, the current one first.
pub(super) const PLUGIN_VERSIONS: [&str; 3] = [
    "credentialprovider.kubelet.k8s.io/v1",
    "credentialprovider.kubelet.k8s.io/v1beta1",
    "credentialprovider.kubelet.k8s.io/v1alpha1",
];

/// The configuration cannot be used; in upstream's words where it has any.
#[derive(Debug, thiserror::Error)]
pub enum ProviderConfigError {
    /// The directory of plugins does not exist.
    #[error("plugin binary directory {} did not exist", .0.display())]
    NoDirectory(PathBuf),
    /// No configuration is named.
    #[error("credential provider config path is empty")]
    NoPath,
    /// File or directory cannot be read.
    #[error("unable to access path {path:?}: {source}")]
    Access {
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The directory has no file with a known extension.
    #[error("no configuration files found in directory {0:?}")]
    NoFiles(PathBuf),
    /// A file has invalid content.
    #[error("error decoding config {path:?}: {problem}")]
    Decode {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// Two plugins have the same name.
    #[error("duplicate provider name {0:?} found in configuration file(s)")]
    Duplicate(String),
    /// A value that is not permitted.
    #[error("failed to validate credential provider config: {0}")]
    Invalid(String),
    /// The program does not exist or is not executable.
    #[error("plugin binary executable {} did not exist", .0.display())]
    NoProgram(PathBuf),
}

/// One plugin.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct ProviderConfig {
    #[serde(default)]
    pub(super) name: String,
    #[serde(default)]
    pub(super) match_images: Vec<String>,
    /// Lifetime of responses that state none.
    pub(super) default_cache_duration: Option<GoDuration>,
    #[serde(default)]
    pub(super) api_version: String,
    #[serde(default)]
    pub(super) args: Vec<String>,
    #[serde(default)]
    pub(super) env: Vec<EnvPair>,
    pub(super) token_attributes: Option<TokenAttributes>,
}

/// A variable of a plugin's environment.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EnvPair {
    #[serde(default)]
    pub(super) name: String,
    #[serde(default)]
    pub(super) value: String,
}

/// The plugin gets a token of the pod's service account (KEP-4412).
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub(super) struct TokenAttributes {
    #[serde(rename = "serviceAccountTokenAudience")]
    pub(super) audience: String,
    /// `Token` or `ServiceAccount`: the scope in which responses are cached.
    pub(super) cache_type: String,
    /// Without a service account the plugin is not run.
    pub(super) require_service_account: Option<bool>,
    #[serde(rename = "requiredServiceAccountAnnotationKeys")]
    pub(super) required_annotations: Vec<String>,
    #[serde(rename = "optionalServiceAccountAnnotationKeys")]
    pub(super) optional_annotations: Vec<String>,
}

/// Checked configuration.
#[derive(Debug)]
pub(super) struct Read {
    pub(super) providers: Vec<ProviderConfig>,
    /// Of all files, for the metric.
    pub(super) hash: String,
}

impl ProviderConfig {
    /// Lifetime of responses that state none.
    pub(super) fn lifetime(&self) -> Duration {
        self.default_cache_duration.map(GoDuration::std).unwrap_or_default()
    }
}

/// Reads and checks the configuration at `path` for programs in `directory`. `tokens`: plugins may get tokens of service
/// accounts (feature gate). Blocks.
///
/// # Errors
/// What keeps the agent from starting.
pub(super) fn read(path: &Path, directory: &Path, tokens: bool) -> Result<Read, ProviderConfigError> {
    if !directory.exists() {
        return Err(ProviderConfigError::NoDirectory(directory.to_owned()));
    }
    let (mut providers, mut names, mut hasher) = (Vec::new(), BTreeSet::new(), sha2::Sha256::new());
    for file in files(path)? {
        let content = filesystem::read_named(&file, MAX_FILE)
            .map_err(|source| ProviderConfigError::Access { path: file.clone(), source })?;
        hasher.update((content.len() as u64).to_be_bytes());
        hasher.update(&content);
        for provider in decode(&file, &content)? {
            if !names.insert(provider.name.clone()) {
                return Err(ProviderConfigError::Duplicate(provider.name));
            }
            providers.push(provider);
        }
    }
    if providers.is_empty() {
        return Err(ProviderConfigError::Invalid("providers: at least 1 item in plugins is required".to_owned()));
    }
    for provider in &providers {
        if let Some(problem) = problem(provider, tokens) {
            return Err(ProviderConfigError::Invalid(format!("provider {:?}: {problem}", provider.name)));
        }
        let program = directory.join(&provider.name);
        if !fs::metadata(&program).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0) {
            return Err(ProviderConfigError::NoProgram(program));
        }
    }
    Ok(Read { providers, hash: format!("sha256:{}", lower_hex(&hasher.finalize())) })
}

/// The file, or those of the directory with a known extension, in order of their names.
fn files(path: &Path) -> Result<Vec<PathBuf>, ProviderConfigError> {
    if path.as_os_str().is_empty() {
        return Err(ProviderConfigError::NoPath);
    }
    let access = |source| ProviderConfigError::Access { path: path.to_owned(), source };
    if !fs::metadata(path).map_err(access)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let is_config = |file: &PathBuf| {
        let extension = file.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        matches!(extension, "json" | "yaml" | "yml") && !file.is_dir()
    };
    let mut files: Vec<PathBuf> =
        fs::read_dir(path).map_err(access)?.flatten().map(|entry| entry.path()).filter(is_config).collect();
    files.sort();
    if files.is_empty() { Err(ProviderConfigError::NoFiles(path.to_owned())) } else { Ok(files) }
}

fn decode(file: &Path, content: &[u8]) -> Result<Vec<ProviderConfig>, ProviderConfigError> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Written {
        kind: String,
        #[serde(rename = "apiVersion")]
        version: String,
        #[serde(default)]
        providers: Vec<ProviderConfig>,
    }
    let failed = |problem: String| ProviderConfigError::Decode { path: file.to_owned(), problem };
    let text = std::str::from_utf8(content).map_err(|error| failed(error.to_string()))?;
    let mut documents = document::parse(file, text).map_err(|error| failed(error.to_string()))?.into_iter();
    let (Some(document), None) = (documents.next(), documents.next()) else {
        return Err(failed("expected one document".to_owned()));
    };
    let written: Written = serde_path_to_error::deserialize(without_nulls(Value::Object(document.fields)))
        .map_err(|error| failed(format!("{}: {}", error.path(), error.inner())))?;
    let version = written.version.strip_prefix("kubelet.config.k8s.io/").unwrap_or_default();
    if written.kind != KIND || !["v1", "v1beta1", "v1alpha1"].contains(&version) {
        let (kind, version) = (&written.kind, &written.version);
        return Err(failed(format!("no kind {kind:?} is registered for version {version:?}")));
    }
    if version != "v1" && written.providers.iter().any(|provider| provider.token_attributes.is_some()) {
        return Err(failed("unknown field \"tokenAttributes\" before version v1".to_owned()));
    }
    Ok(written.providers)
}

/// Without fields that are `null`, such as `env:` with nothing after it: that says the same as leaving them out.
fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let written = fields.into_iter().filter(|(_, value)| !value.is_null());
            Value::Object(written.map(|(name, value)| (name, without_nulls(value))).collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(without_nulls).collect()),
        plain => plain,
    }
}

/// What is wrong with a plugin's configuration.
fn problem(provider: &ProviderConfig, tokens: bool) -> Option<String> {
    let ProviderConfig { name, match_images, default_cache_duration, api_version, env, .. } = provider;
    if name.is_empty() || name.contains(['/', ' ']) || matches!(name.as_str(), "." | "..") {
        return Some("name: must be a file name without '/' and spaces, and not '.' or '..'".to_owned());
    }
    if !PLUGIN_VERSIONS.contains(&api_version.as_str()) {
        return Some(format!("apiVersion: {api_version:?} is none of {}", PLUGIN_VERSIONS.join(", ")));
    }
    if match_images.is_empty() {
        return Some("matchImages: at least 1 item in matchImages is required".to_owned());
    }
    if let Some(image) = match_images.iter().find(|image| !is_pattern(image)) {
        return Some(format!("matchImages: match image is invalid: {image:?}"));
    }
    match default_cache_duration {
        None => return Some("defaultCacheDuration: is required".to_owned()),
        Some(duration) if *duration < GoDuration::default() => {
            return Some("defaultCacheDuration: must be greater than or equal to 0".to_owned());
        }
        Some(_) => {}
    }
    if env.iter().any(|pair| pair.name.is_empty() || pair.name.contains(['=', '\0']) || pair.value.contains('\0')) {
        return Some("env: names must not be empty or contain '='".to_owned());
    }
    token_problem(provider.token_attributes.as_ref()?, api_version, tokens)
}

/// A registry or a path of one, with wildcards in the host. Upstream parses it as a URL behind a scheme of its own: a scheme
/// in front is a host with an empty port, and a path may have spaces. Such a pattern, or an empty one, matches nothing.
fn is_pattern(image: &str) -> bool {
    let is_escape = |rest: &str| rest.len() >= 2 && rest.bytes().take(2).all(|byte| byte.is_ascii_hexdigit());
    let host = image.split('/').next().unwrap_or(image);
    !image.bytes().any(|byte| byte.is_ascii_control()) && image.split('%').skip(1).all(is_escape) && is_registry(host)
}

fn token_problem(attributes: &TokenAttributes, api_version: &str, tokens: bool) -> Option<String> {
    let field = |name: &str, problem: &str| Some(format!("tokenAttributes{name}: {problem}"));
    let TokenAttributes { audience, cache_type, require_service_account, .. } = attributes;
    let (required, optional) = (&attributes.required_annotations, &attributes.optional_annotations);
    if !tokens {
        return field("", "needs the feature gate KubeletServiceAccountTokenForCredentialProviders");
    }
    if api_version != PLUGIN_VERSIONS[0] {
        return field("", "tokenAttributes is only supported for credentialprovider.kubelet.k8s.io/v1 API version");
    }
    if audience.is_empty() {
        return field(".serviceAccountTokenAudience", "is required");
    }
    if !matches!(cache_type.as_str(), "Token" | "ServiceAccount") {
        return field(".cacheType", "must be Token or ServiceAccount");
    }
    let Some(requires) = require_service_account else { return field(".requireServiceAccount", "is required") };
    if !requires && !required.is_empty() {
        return field(".requiredServiceAccountAnnotationKeys", "need requireServiceAccount: true");
    }
    let keys = || required.iter().chain(optional);
    if keys().collect::<BTreeSet<_>>().len() < keys().count() {
        return field("", "annotation keys must not be named twice, as required and as optional");
    }
    keys().find(|key| !is_annotation_key(key)).and_then(|key| field("", &format!("{key:?} is no annotation key")))
}

/// An optional DNS subdomain and a name. Upstream checks it in lower case.
fn is_annotation_key(key: &str) -> bool {
    let (domain, name) = key.split_once('/').map_or((None, key), |(domain, name)| (Some(domain), name));
    let is_plain = |text: &str, more: &str| {
        let edge = |letter: Option<char>| letter.is_some_and(|letter| letter.is_ascii_alphanumeric());
        edge(text.chars().next())
            && edge(text.chars().last())
            && text.chars().all(|letter| letter.is_ascii_alphanumeric() || more.contains(letter))
    };
    name.len() <= 63
        && is_plain(name, "-_.")
        && domain.is_none_or(|domain| domain.len() <= 253 && domain.split('.').all(|label| is_plain(label, "-")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    struct Place(tempfile::TempDir);

    impl Place {
        fn new() -> Self {
            let dir = tempfile::tempdir().expect("a folder");
            fs::create_dir(dir.path().join("bin")).expect("made");
            fs::create_dir(dir.path().join("conf")).expect("made");
            let place = Self(dir);
            place.program("p", 0o755);
            place
        }

        fn program(&self, name: &str, mode: u32) {
            let path = self.0.path().join("bin").join(name);
            fs::write(&path, "").expect("written");
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("set");
        }

        fn write(&self, name: &str, version: &str, providers: &[Value]) {
            let config =
                json!({"kind": KIND, "apiVersion": format!("kubelet.config.k8s.io/{version}"), "providers": providers});
            fs::write(self.0.path().join("conf").join(name), config.to_string()).expect("written");
        }

        fn read(&self, name: &str) -> Result<Read, String> {
            let path = self.0.path().join("conf").join(name);
            read(&path, &self.0.path().join("bin"), true).map_err(|error| error.to_string())
        }
    }

    fn provider(changes: Value) -> Value {
        let mut all = json!({"name": "p", "apiVersion": PLUGIN_VERSIONS[0], "matchImages": ["*.io"], "defaultCacheDuration": "10m"});
        all.as_object_mut().expect("an object").extend(changes.as_object().expect("an object").clone());
        all
    }

    #[test]
    fn a_file_and_a_directory_of_files() {
        let place = Place::new();
        place.program("q", 0o755);
        place.write("one", "v1beta1", &[provider(json!({}))]);
        let read = place.read("one").expect("valid");
        assert_eq!((read.providers.len(), read.providers[0].lifetime()), (1, Duration::from_secs(600)));
        assert_eq!(read.hash.len(), "sha256:".len() + 64);
        assert!(place.read("").expect_err("no extension").starts_with("no configuration files found in directory"));
        place.write("b.json", "v1", &[provider(json!({}))]);
        place.write("a.yml", "v1", &[provider(json!({"name": "q"}))]);
        let names: Vec<_> = place.read("").expect("valid").providers.into_iter().map(|one| one.name).collect();
        assert_eq!(names, ["q", "p"]);
        place.write("c.yaml", "v1", &[provider(json!({}))]);
        assert_eq!(place.read("").expect_err("twice"), r#"duplicate provider name "p" found in configuration file(s)"#);
        assert!(place.read("none").expect_err("absent").starts_with("unable to access path"));
        let nowhere = read_at(&place, "/no/such/folder");
        assert_eq!(nowhere, "plugin binary directory /no/such/folder did not exist");
    }

    fn read_at(place: &Place, directory: &str) -> String {
        read(&place.0.path().join("conf/one"), Path::new(directory), true).expect_err("no directory").to_string()
    }

    #[test]
    fn tokens_need_the_feature_gate_and_the_current_api_of_plugins() {
        let place = Place::new();
        let token = json!({"serviceAccountTokenAudience": "a", "cacheType": "Token", "requireServiceAccount": true});
        place.write("c", "v1", &[provider(json!({"tokenAttributes": token}))]);
        place.read("c").expect("valid");
        let [config, programs] = ["conf/c", "bin"].map(|path| place.0.path().join(path));
        let error = read(&config, &programs, false).expect_err("without the gate").to_string();
        assert!(error.ends_with("needs the feature gate KubeletServiceAccountTokenForCredentialProviders"), "{error}");
        place.write("c", "v1", &[provider(json!({"tokenAttributes": token, "apiVersion": PLUGIN_VERSIONS[1]}))]);
        let error = place.read("c").expect_err("an older API");
        assert!(error.contains("only supported for credentialprovider.kubelet.k8s.io/v1 API version"), "{error}");
    }

    #[test]
    fn invalid_values_are_named() {
        let token = |changes: Value| {
            let mut all =
                json!({"serviceAccountTokenAudience": "a", "cacheType": "Token", "requireServiceAccount": true});
            all.as_object_mut().expect("an object").extend(changes.as_object().expect("an object").clone());
            json!({"tokenAttributes": all})
        };
        let place = Place::new();
        for good in [
            token(json!({})),
            token(
                json!({"requiredServiceAccountAnnotationKeys": ["Example.com/Key"], "optionalServiceAccountAnnotationKeys": ["x"]}),
            ),
            json!({"env": [{"name": "A", "value": ""}], "args": ["x"], "defaultCacheDuration": "0s"}),
            json!({"env": [{"name": "A", "value": null}, {"name": "B"}], "args": null, "tokenAttributes": null}),
            json!({"env": null}),
            json!({"matchImages": ["https://r.io", "https://r.io:port/a", "r.io/a b", ""]}),
        ] {
            place.write("c", "v1", &[provider(good.clone())]);
            place.read("c").unwrap_or_else(|error| panic!("{good}: {error}"));
        }
        for (bad, part) in [
            (json!({"name": "a/b"}), "name: "),
            (json!({"name": ".."}), "name: "),
            (json!({"name": "absent"}), "plugin binary executable "),
            (json!({"apiVersion": "v1"}), "apiVersion: "),
            (json!({"matchImages": []}), "matchImages: "),
            (json!({"matchImages": ["r .io/a"]}), "matchImages: "),
            (json!({"matchImages": ["r.io/\t"]}), "matchImages: "),
            (json!({"matchImages": ["*.io", "%invalid%"]}), "matchImages: match image is invalid: \"%invalid%\""),
            (json!({"matchImages": ["r.io:port/a"]}), "matchImages: "),
            (json!({"defaultCacheDuration": null}), "defaultCacheDuration: is required"),
            (json!({"defaultCacheDuration": "-1s"}), "defaultCacheDuration: must be"),
            (json!({"more": 1}), "error decoding config "),
            (token(json!({"serviceAccountTokenAudience": ""})), "serviceAccountTokenAudience: is required"),
            (token(json!({"cacheType": ""})), "cacheType: "),
            (token(json!({"requireServiceAccount": null})), "requireServiceAccount: "),
            (
                token(json!({"requireServiceAccount": false, "requiredServiceAccountAnnotationKeys": ["a"]})),
                "need requireServiceAccount",
            ),
            (
                token(
                    json!({"requiredServiceAccountAnnotationKeys": ["a"], "optionalServiceAccountAnnotationKeys": ["a"]}),
                ),
                "named twice",
            ),
            (token(json!({"optionalServiceAccountAnnotationKeys": ["a b"]})), "no annotation key"),
        ] {
            place.write("c", "v1", &[provider(bad.clone())]);
            let error = place.read("c").expect_err("invalid");
            assert!(error.contains(part), "{bad}: {error}");
        }
        place.write("c", "v1", &[]);
        assert!(place.read("c").expect_err("none").contains("at least 1 item"));
        place.write("c", "v1beta1", &[provider(token(json!({})))]);
        assert!(place.read("c").expect_err("too old").contains("tokenAttributes"));
        place.write("c", "v2", &[provider(json!({}))]);
        assert!(place.read("c").expect_err("unknown").contains("no kind"));
        place.program("p", 0o644);
        place.write("c", "v1", &[provider(json!({}))]);
        assert!(place.read("c").expect_err("not executable").starts_with("plugin binary executable "));
    }
}
