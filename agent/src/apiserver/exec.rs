//! Credentials from a plugin (`users[].user.exec`): a program that prints an ExecCredential with a token, a client
//! certificate, or both. Run when there are no credentials, when they expire, and when the API server rejects them;
//! after failures with a growing pause.

use std::io;
use std::process::Output;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use http::HeaderValue;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::config::ExecConfig;
use kube::config::ExecInteractiveMode;
use rustls::sign::CertifiedKey;
use serde::Deserialize;
use serde_json::json;
use tokio::io::AsyncReadExt as _;
use tokio::process::Child;
use tokio::process::Command;
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::credentials::CredentialError;
use super::credentials::bearer;
use super::tls;
use crate::metrics::Metrics;
use crate::model::backoff_delay;

/// A plugin that takes longer is killed.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Shortest time between two runs.
const MIN_PERIOD: Duration = Duration::from_secs(5);
/// Longest time between two runs that fail.
const MAX_PERIOD: Duration = Duration::from_secs(60);
/// Longest output that is read, bytes.
const MAX_OUTPUT: u64 = 1 << 20;
/// Characters of a failing plugin's standard error that are quoted.
const MAX_QUOTED: usize = 500;

/// Why a plugin gave no credentials.
#[derive(Clone, Debug, thiserror::Error)]
#[error("credential plugin {command}: {problem}")]
pub struct ExecError {
    command: String,
    problem: String,
}

/// Issued credentials.
#[derive(Clone, Debug, Default)]
pub struct Issued {
    /// The `Authorization` of requests.
    pub header: Option<HeaderValue>,
    /// The client certificate.
    pub key: Option<Arc<CertifiedKey>>,
    /// When they expire; `None`: never.
    pub expires: Option<SystemTime>,
}

#[derive(Default)]
struct Last {
    outcome: Option<Result<Issued, ExecError>>,
    /// When the plugin was run.
    at: Option<Instant>,
    /// The API server rejected what was issued.
    rejected: bool,
    /// Runs that failed in a row.
    failures: u32,
}

impl Last {
    /// Time to wait after a run before the next one.
    fn period(&self) -> Duration {
        backoff_delay(MIN_PERIOD, MAX_PERIOD, self.failures)
    }
}

/// A plugin and the outcome of its last run.
pub struct Plugin {
    config: ExecConfig,
    metrics: Arc<Metrics>,
    last: Mutex<Last>,
}

impl Plugin {
    /// Runs nothing yet.
    pub fn new(config: ExecConfig, metrics: Arc<Metrics>) -> Self {
        Self { config, metrics, last: Mutex::default() }
    }

    /// Valid credentials. Runs the plugin if necessary, once for all concurrent callers; cancelling kills it.
    ///
    /// # Errors
    /// The plugin cannot be run, fails, or prints something else.
    pub async fn issued(&self) -> Result<Issued, CredentialError> {
        let mut last = self.last.lock().await;
        let fresh = last.at.is_some_and(|at| at.elapsed() < last.period());
        if let Some(outcome) = &last.outcome {
            let good = matches!(outcome, Ok(issued) if !last.rejected && !issued.expired(SystemTime::now()));
            if good || fresh {
                return Ok(outcome.clone()?);
            }
        }
        let outcome = self.run().await;
        if let Ok(issued) = &outcome {
            let before = last.outcome.as_ref().and_then(|outcome| outcome.as_ref().ok());
            self.measure(before.and_then(|issued| issued.key.as_ref()), issued.key.as_ref());
        }
        let failures = if outcome.is_ok() { 0 } else { last.failures.saturating_add(1) };
        *last = Last { outcome: Some(outcome.clone()), at: Some(Instant::now()), rejected: false, failures };
        Ok(outcome?)
    }

    /// The API server rejected what was issued.
    pub async fn refused(&self) {
        self.last.lock().await.rejected = true;
    }

    async fn run(&self) -> Result<Issued, ExecError> {
        let command = self.config.command.clone().unwrap_or_default();
        let failed = |problem: String| ExecError { command: command.clone(), problem };
        if self.config.interactive_mode == Some(ExecInteractiveMode::Always) {
            return Err(failed("interactiveMode is Always, but the agent has no terminal".to_owned()));
        }
        let child = start(self.command(&command)).await.map_err(|error| {
            self.metrics.rest_client.plugin_ran("plugin_not_found_error", 1);
            let hint = self.config.install_hint.as_deref().unwrap_or_default();
            failed(format!("cannot be run: {error}. {hint}").trim_end().to_owned())
        })?;
        let ended = tokio::time::timeout(TIMEOUT, output(child)).await;
        let ended = ended.unwrap_or_else(|_| Err(io::Error::other(format!("did not end within {TIMEOUT:?}"))));
        let output = ended.map_err(|error| {
            self.metrics.rest_client.plugin_ran("client_internal_error", 1);
            failed(error.to_string())
        })?;
        if !output.status.success() {
            // A plugin that was killed by a signal has no exit code.
            self.metrics.rest_client.plugin_ran("plugin_execution_error", output.status.code().unwrap_or(-1));
            let said = String::from_utf8_lossy(&output.stderr);
            let said: String = said.trim().chars().take(MAX_QUOTED).collect();
            return Err(failed(format!("ended with {}: {}", output.status, said.escape_debug())));
        }
        self.metrics.rest_client.plugin_ran("no_error", 0);
        tracing::debug!(command, "credential plugin was run");
        read(&output.stdout, self.config.api_version.as_deref()).map_err(failed)
    }

    /// Metrics: when the certificate expires, and how old the previous one became.
    fn measure(&self, before: Option<&Arc<CertifiedKey>>, now: Option<&Arc<CertifiedKey>>) {
        let (metrics, today) = (&self.metrics.rest_client, SystemTime::now());
        metrics.plugin_expires(now.and_then(|key| tls::validity(key)).map(|(_, end)| end));
        let other = before.filter(|before| now.is_some_and(|now| before.cert != now.cert));
        if let Some((begin, _)) = other.and_then(|key| tls::validity(key)) {
            metrics.plugin_rotated(today.duration_since(begin).unwrap_or_default());
        }
    }

    fn command(&self, program: &str) -> Command {
        let info = json!({
            "kind": "ExecCredential",
            "apiVersion": self.config.api_version,
            "spec": {"interactive": false, "cluster": self.config.cluster.as_ref().filter(|_| self.config.provide_cluster_info)},
        });
        let mut command = Command::new(program);
        command.args(self.config.args.iter().flatten());
        let pairs = self.config.env.iter().flatten().filter_map(|pair| Some((pair.get("name")?, pair.get("value")?)));
        command.envs(pairs).env("KUBERNETES_EXEC_INFO", info.to_string());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        command
    }
}

/// Starts a plugin on a thread that may block: this waits until the program is read from its disk.
async fn start(mut command: Command) -> io::Result<Child> {
    tokio::task::spawn_blocking(move || command.spawn()).await.map_err(io::Error::other)?
}

/// Waits for the end of a plugin. An output that is too long is an error; of standard error the beginning is kept.
async fn output(mut child: Child) -> io::Result<Output> {
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let printed = async {
        let mut printed = Vec::new();
        if let Some(stdout) = stdout {
            stdout.take(MAX_OUTPUT + 1).read_to_end(&mut printed).await?;
        }
        match printed.len() as u64 > MAX_OUTPUT {
            true => Err(io::Error::other(format!("printed more than {MAX_OUTPUT} bytes"))),
            false => Ok(printed),
        }
    };
    let said = async {
        let mut said = Vec::new();
        if let Some(mut stderr) = stderr {
            (&mut stderr).take(MAX_OUTPUT).read_to_end(&mut said).await?;
            // A plugin whose messages are not read could not end.
            tokio::io::copy(&mut stderr, &mut tokio::io::sink()).await?;
        }
        Ok::<_, io::Error>(said)
    };
    let (stdout, stderr) = tokio::try_join!(printed, said)?;
    Ok(Output { status: child.wait().await?, stdout, stderr })
}

impl Issued {
    fn expired(&self, now: SystemTime) -> bool {
        self.expires.is_some_and(|expires| expires <= now)
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ExecCredential {
    #[serde(default)]
    kind: String,
    #[serde(default)]
    api_version: String,
    status: Option<ExecStatus>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ExecStatus {
    expiration_timestamp: Option<Time>,
    token: Option<String>,
    client_certificate_data: Option<String>,
    client_key_data: Option<String>,
}

/// Parses the output, JSON or YAML.
fn read(stdout: &[u8], version: Option<&str>) -> Result<Issued, String> {
    let text = std::str::from_utf8(stdout).map_err(|_| "prints no text".to_owned())?;
    let credential: ExecCredential =
        serde_saphyr::from_str(text).map_err(|error| format!("prints no ExecCredential: {error}"))?;
    if credential.kind != "ExecCredential" {
        return Err(format!("prints kind {:?} instead of ExecCredential", credential.kind));
    }
    if Some(credential.api_version.as_str()) != version {
        return Err(format!(
            "prints apiVersion {:?} instead of {:?}",
            credential.api_version,
            version.unwrap_or_default()
        ));
    }
    let status = credential.status.ok_or("prints an ExecCredential without status")?;
    let key = match (&status.client_certificate_data, &status.client_key_data) {
        (None, None) => None,
        (Some(certificate), Some(key)) => {
            let pair = tls::certified_key(certificate, key);
            Some(Arc::new(pair.map_err(|error| format!("status.clientCertificateData: {error}"))?))
        }
        _ => return Err("status.clientCertificateData and status.clientKeyData go together".to_owned()),
    };
    let token = status.token.as_ref().map(|token| bearer("status.token", token)).transpose();
    let header = token.map_err(|error| error.to_string())?;
    if header.is_none() && key.is_none() {
        return Err("status holds neither token nor client certificate".to_owned());
    }
    Ok(Issued { header, key, expires: status.expiration_timestamp.map(|time| SystemTime::from(time.0)) })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const VERSION: &str = "client.authentication.k8s.io/v1";

    fn plugin(script: &str) -> (tempfile::TempDir, Plugin) {
        let folder = tempfile::tempdir().expect("a folder");
        let program = folder.path().join("plugin");
        std::fs::write(&program, format!("#!/bin/sh\ncd {}\n{script}", folder.path().display())).expect("a script");
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).expect("executable");
        let config = ExecConfig {
            command: Some(program.to_string_lossy().into_owned()),
            api_version: Some(VERSION.to_owned()),
            install_hint: Some("install it".to_owned()),
            env: Some(vec![[("name".into(), "ANSWER".into()), ("value".into(), "42".into())].into()]),
            ..ExecConfig::default()
        };
        (folder, Plugin::new(config, Metrics::new()))
    }

    /// Prints a token that counts the runs, valid until then.
    fn counting(expires: &str) -> String {
        format!(
            "echo x >> runs\nN=$(wc -l < runs)\necho '{{\"kind\":\"ExecCredential\",\"apiVersion\":\"{VERSION}\",\
             \"status\":{{\"token\":\"t-'$ANSWER-$N'\",\"expirationTimestamp\":\"{expires}\"}}}}'\n"
        )
    }

    async fn token(plugin: &Plugin) -> String {
        let issued = plugin.issued().await.expect("credentials");
        issued.header.expect("a header").to_str().expect("text").to_owned()
    }

    #[tokio::test]
    async fn credentials_are_kept_until_they_expire() {
        let (_folder, plugin) = plugin(&counting("2099-01-01T00:00:00+02:00"));
        assert_eq!(token(&plugin).await, "Bearer t-42-1");
        assert_eq!(token(&plugin).await, "Bearer t-42-1");
    }

    #[tokio::test]
    async fn expired_and_rejected_credentials_are_renewed_after_a_pause() {
        for expires in ["2020-01-01T00:00:00Z", "2099-01-01T00:00:00Z"] {
            let (_folder, plugin) = plugin(&counting(expires));
            assert_eq!(token(&plugin).await, "Bearer t-42-1");
            plugin.refused().await;
            assert_eq!(token(&plugin).await, "Bearer t-42-1", "the plugin has just run");
            plugin.last.lock().await.at = Instant::now().checked_sub(MIN_PERIOD);
            assert_eq!(token(&plugin).await, "Bearer t-42-2");
        }
    }

    #[tokio::test]
    async fn errors_name_the_cause() {
        let (_folder, failing) = plugin("echo 'no \x1b[31mway' >&2; exit 3");
        let error = failing.issued().await.expect_err("a failure").to_string();
        assert!(error.contains("exit status: 3") && error.contains("no \\u{1b}[31mway"), "{error}");
        let missing = ExecConfig { command: Some("/nonexistent/x".into()), ..failing.config.clone() };
        let error = Plugin::new(missing, failing.metrics.clone()).issued().await.expect_err("a failure").to_string();
        assert!(error.contains("/nonexistent/x") && error.ends_with("install it"), "{error}");
        let always = ExecConfig { interactive_mode: Some(ExecInteractiveMode::Always), ..failing.config.clone() };
        assert!(Plugin::new(always, failing.metrics.clone()).issued().await.is_err());
        let text = failing.metrics.render().expect("metrics");
        for labels in
            [r#"call_status="plugin_execution_error",code="3""#, r#"call_status="plugin_not_found_error",code="1""#]
        {
            assert!(
                text.contains(&format!("rest_client_exec_plugin_call_total{{{labels}}} 1\n")),
                "{labels} in {text}"
            );
        }
        assert!(text.contains("rest_client_exec_plugin_ttl_seconds inf\n"), "{text}");
    }

    #[tokio::test]
    async fn outputs_are_read_up_to_a_bound() {
        let (_folder, endless) = plugin("exec cat /dev/zero");
        let error = endless.issued().await.expect_err("too much").to_string();
        assert!(error.ends_with("printed more than 1048576 bytes"), "{error}");
        let text = endless.metrics.render().expect("metrics");
        assert!(text.contains("call_status=\"client_internal_error\",code=\"1\"} 1\n"), "{text}");
        let loud = format!("head -c 3000000 /dev/zero >&2\n{}", counting("2099-01-01T00:00:00Z"));
        let (_folder, loud) = plugin(&loud);
        assert_eq!(token(&loud).await, "Bearer t-42-1");
    }

    #[tokio::test]
    async fn rotations_are_measured() {
        let authority = super::super::test_server::Authority::new();
        let (folder, plugin) = plugin("echo x >> runs\ncat credential-$(wc -l < runs)\n");
        for run in 1..=2 {
            let (certificate, key) = authority.issue("from-plugin");
            let credential = json!({
                "kind": "ExecCredential", "apiVersion": VERSION,
                "status": {"clientCertificateData": certificate, "clientKeyData": key},
            });
            std::fs::write(folder.path().join(format!("credential-{run}")), credential.to_string()).expect("written");
        }
        let text = async || {
            plugin.issued().await.expect("a certificate");
            plugin.metrics.render().expect("metrics")
        };
        let first = text().await;
        assert!(first.contains("rest_client_exec_plugin_certificate_rotation_age_count 0\n"), "{first}");
        let line =
            first.lines().find(|line| line.starts_with("rest_client_exec_plugin_ttl_seconds ")).expect("a gauge");
        let left: f64 = line.rsplit_once(' ').expect("a value").1.parse().expect("a number");
        assert!(left > 1e6 && left.is_finite(), "{left}");
        plugin.refused().await;
        plugin.last.lock().await.at = Instant::now().checked_sub(MIN_PERIOD);
        let second = text().await;
        assert!(second.contains("rest_client_exec_plugin_certificate_rotation_age_count 1\n"), "{second}");
        assert!(
            second.contains("rest_client_exec_plugin_call_total{call_status=\"no_error\",code=\"0\"} 2\n"),
            "{second}"
        );
    }

    #[tokio::test]
    async fn a_plugin_that_fails_is_run_with_growing_pauses() {
        let (folder, plugin) = plugin("echo x >> runs; exit 1");
        let runs = || std::fs::read_to_string(folder.path().join("runs")).expect("a log").lines().count();
        for (wait, expected) in
            [(0, 1), (4, 1), (5, 2), (9, 2), (10, 3), (19, 3), (20, 4), (39, 4), (40, 5), (60, 6), (60, 7)]
        {
            plugin.last.lock().await.at = Instant::now().checked_sub(Duration::from_secs(wait));
            plugin.issued().await.expect_err("it fails");
            assert_eq!(runs(), expected, "after {wait} s");
        }
    }

    #[test]
    fn malformed_answers_are_refused() {
        let answer = |status: &str| format!("{{kind: ExecCredential, apiVersion: {VERSION}, status: {status}}}");
        let error = |text: &str| read(text.as_bytes(), Some(VERSION)).expect_err(text);
        assert!(error("{kind: Pod}").contains("\"Pod\""));
        assert!(error("{kind: ExecCredential, apiVersion: v0, status: {token: x}}").contains("\"v0\""));
        assert!(error(&answer("{}")).contains("neither token"));
        assert!(error(&answer("{clientKeyData: x}")).contains("go together"));
        assert!(error(&answer("{clientKeyData: x, clientCertificateData: y}")).contains("clientCertificateData"));
        assert!(read(answer("{token: x}").as_bytes(), Some(VERSION)).is_ok());
    }
}
