//! One run of a credential plugin: a request on its standard input, a response on its standard output.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use secrecy::ExposeSecret as _;
use secrecy::SecretString;
use serde::Deserialize;
use serde::Serialize;
use serde_json::Value;
use tokio::io::AsyncRead;
use tokio::io::AsyncReadExt as _;
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

use super::config::ProviderConfig;
use crate::config::duration::GoDuration;
use crate::filesystem;

/// A plugin that takes longer is killed.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Longest output that is read, bytes.
const MAX_OUTPUT: u64 = 1 << 20;
/// Bytes of a failing plugin's standard error that are quoted.
const MAX_QUOTED: u64 = 1 << 10;
const RESPONSE: &str = "CredentialProviderResponse";

/// The content of a request to a plugin.
#[derive(Clone, Debug)]
pub(super) struct CredentialProviderRequest<'a> {
    /// The repository, without tag and digest.
    pub(super) image: &'a str,
    pub(super) token: Option<&'a SecretString>,
    pub(super) annotations: &'a BTreeMap<String, String>,
}

/// What responses are cached by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CacheBy {
    Image,
    Registry,
    Global,
}

/// A valid response.
#[derive(Clone, Debug)]
pub(super) struct CredentialProviderResponse {
    pub(super) cache_by: CacheBy,
    /// `None`: the configured one.
    pub(super) lifetime: Option<Duration>,
    /// User and password by registry.
    pub(super) auth: Vec<(String, String, SecretString)>,
}

/// A run that gave no credentials.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum PluginError {
    #[error("error execing credential provider plugin {plugin} for image {image}: {problem}")]
    Exec { plugin: String, image: String, problem: String },
    #[error(
        "apiVersion from credential plugin response did not match expected apiVersion:{expected}, actual apiVersion:{actual}"
    )]
    Version { expected: String, actual: String },
    #[error("error decoding credential provider plugin response from stdout")]
    Decode,
    #[error("credential provider plugin did not return a valid cacheKeyType: {0}")]
    CacheKeyType(String),
    #[error(
        "credential provider plugin returned the service account token as a password, which cacheType ServiceAccount forbids"
    )]
    Echo,
}

impl PluginError {
    /// The program failed, rather than its response.
    pub(super) fn is_exec(&self) -> bool {
        matches!(self, Self::Exec { .. })
    }
}

/// Runs the program once. Cancelling kills it.
///
/// # Errors
/// It cannot be run, fails, takes longer than a minute, or prints something else.
pub(super) async fn run(
    config: &ProviderConfig,
    program: &Path,
    request: &CredentialProviderRequest<'_>,
) -> Result<CredentialProviderResponse, PluginError> {
    let failed =
        |problem: String| PluginError::Exec { plugin: config.name.clone(), image: request.image.to_owned(), problem };
    let line = encode(config, request);
    let output = tokio::time::timeout(TIMEOUT, exec(config, program, line.expose_secret().as_bytes())).await;
    let output = output.map_err(|_| failed(format!("did not end within {TIMEOUT:?}")))?.map_err(failed)?;
    decode(&output, &config.api_version)
}

/// The request, one line.
fn encode(config: &ProviderConfig, request: &CredentialProviderRequest<'_>) -> SecretString {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Request<'a> {
        kind: &'static str,
        api_version: &'a str,
        image: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        service_account_token: Option<&'a str>,
        #[serde(skip_serializing_if = "BTreeMap::is_empty")]
        service_account_annotations: &'a BTreeMap<String, String>,
    }
    let request = Request {
        kind: "CredentialProviderRequest",
        api_version: &config.api_version,
        image: request.image,
        service_account_token: request.token.map(|token| token.expose_secret()),
        service_account_annotations: request.annotations,
    };
    // Texts can always be written.
    let mut line = serde_json::to_string(&request).unwrap_or_default();
    line.push('\n');
    line.into()
}

/// The program's standard output.
async fn exec(config: &ProviderConfig, program: &Path, request: &[u8]) -> Result<Vec<u8>, String> {
    let mut command = Command::new(program);
    command.args(&config.args).envs(config.env.iter().map(|pair| (&pair.name, &pair.value)));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    // Waits until the program is read from its disk.
    let mut child = filesystem::blocking(move || command.spawn()).await.map_err(|error| error.to_string())?;
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let ask = async {
        if let Some(mut stdin) = stdin {
            // A plugin need not read its request.
            let _ = stdin.write_all(request).await;
        }
    };
    let ((), output, said) = tokio::join!(ask, read(stdout, MAX_OUTPUT), read(stderr, MAX_QUOTED));
    if output.len() as u64 > MAX_OUTPUT {
        return Err(format!("printed more than {MAX_OUTPUT} bytes"));
    }
    let status = child.wait().await.map_err(|error| error.to_string())?;
    if status.success() {
        return Ok(output);
    }
    let said = String::from_utf8_lossy(&said);
    Err(format!("{status}: {}", said.trim().escape_debug()))
}

/// At most one byte more than `limit`; the rest is discarded up to the same length again, so that a program with a few more
/// messages can end.
async fn read(pipe: Option<impl AsyncRead + Unpin>, limit: u64) -> Vec<u8> {
    let mut content = Vec::new();
    if let Some(mut pipe) = pipe {
        let _ = (&mut pipe).take(limit + 1).read_to_end(&mut content).await;
        let _ = tokio::io::copy(&mut pipe.take(MAX_OUTPUT), &mut tokio::io::sink()).await;
    }
    content
}

/// Reads a response strictly. Errors do not quote it, for it holds secrets.
fn decode(output: &[u8], expected: &str) -> Result<CredentialProviderResponse, PluginError> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Login {
        username: Option<String>,
        password: Option<String>,
    }
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields, rename_all = "camelCase")]
    struct Written {
        #[serde(rename = "kind")]
        _kind: String,
        #[serde(rename = "apiVersion")]
        _version: String,
        #[serde(default)]
        cache_key_type: String,
        cache_duration: Option<GoDuration>,
        #[serde(default)]
        auth: Option<BTreeMap<String, Option<Login>>>,
    }
    let value: Value = serde_json::from_slice(output).map_err(|_| PluginError::Decode)?;
    let text = |field: &str| value.get(field).and_then(Value::as_str).unwrap_or_default().to_owned();
    if text("kind") != RESPONSE {
        return Err(PluginError::Decode);
    }
    let actual = text("apiVersion");
    if actual != expected {
        return Err(PluginError::Version { expected: expected.to_owned(), actual });
    }
    let written: Written = serde_json::from_slice(output).map_err(|_| PluginError::Decode)?;
    let cache_by = match written.cache_key_type.as_str() {
        "Image" => CacheBy::Image,
        "Registry" => CacheBy::Registry,
        "Global" => CacheBy::Global,
        other => return Err(PluginError::CacheKeyType(other.to_owned())),
    };
    let auth = written.auth.unwrap_or_default().into_iter();
    // What is null is empty, as upstream.
    let entry = |(registry, login): (String, Option<Login>)| {
        let (username, password) = login.map_or((None, None), |login| (login.username, login.password));
        (registry, username.unwrap_or_default(), SecretString::from(password.unwrap_or_default()))
    };
    let auth = auth.map(entry).collect();
    Ok(CredentialProviderResponse { cache_by, lifetime: written.cache_duration.map(GoDuration::std), auth })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::config::PLUGIN_VERSIONS;
    use super::*;

    fn response(changes: Value) -> Result<CredentialProviderResponse, String> {
        let mut all = json!({"kind": RESPONSE, "apiVersion": PLUGIN_VERSIONS[0], "cacheKeyType": "Image",
            "auth": {"r.io": {"username": "u", "password": "hunter2"}}});
        all.as_object_mut().expect("an object").extend(changes.as_object().expect("an object").clone());
        decode(all.to_string().as_bytes(), PLUGIN_VERSIONS[0]).map_err(|error| error.to_string())
    }

    #[test]
    fn responses_are_read_strictly() {
        let read = response(json!({"cacheDuration": "5m0s"})).expect("valid");
        assert_eq!((read.cache_by, read.lifetime), (CacheBy::Image, Some(Duration::from_secs(300))));
        assert_eq!((read.auth[0].0.as_str(), read.auth[0].2.expose_secret()), ("r.io", "hunter2"));
        let none = response(json!({"auth": null, "cacheKeyType": "Global"})).expect("valid");
        assert!(none.auth.is_empty() && none.lifetime.is_none());
        let entries = json!({"a.io": {"username": null, "password": "token"}, "b.io": null});
        let read = response(json!({"auth": entries, "cacheDuration": null})).expect("valid").auth;
        let entries: Vec<_> =
            read.iter().map(|(at, user, password)| (&**at, &**user, password.expose_secret())).collect();
        assert_eq!(entries, [("a.io", "", "token"), ("b.io", "", "")]);
        for (bad, expected) in [
            (
                json!({"apiVersion": PLUGIN_VERSIONS[1]}),
                "apiVersion from credential plugin response did not match expected \
                 apiVersion:credentialprovider.kubelet.k8s.io/v1, actual apiVersion:credentialprovider.kubelet.k8s.io/v1beta1",
            ),
            (json!({"cacheKeyType": "T"}), "credential provider plugin did not return a valid cacheKeyType: T"),
            (json!({"kind": "x"}), "error decoding credential provider plugin response from stdout"),
            (json!({"more": 1}), "error decoding credential provider plugin response from stdout"),
            (json!({"auth": {"r.io": "hunter2"}}), "error decoding credential provider plugin response from stdout"),
            (json!({"cacheDuration": "x"}), "error decoding credential provider plugin response from stdout"),
        ] {
            assert_eq!(response(bad).expect_err("invalid"), expected);
        }
    }
}
