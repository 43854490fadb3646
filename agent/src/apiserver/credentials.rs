//! The `Authorization` header of requests: fixed, from a file that may be replaced, or from a plugin.
//!
//! A token in the kubeconfig itself is treated like one in a file: after the API server has rejected it, the file is
//! read again. Beside a token file it is used as long as that file could never be read, as in client-go.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::HeaderValue;
use kube::config::ExecConfig;
use secrecy::ExposeSecret as _;
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::exec::ExecError;
use super::exec::Issued;
use super::exec::Plugin;
use super::kubeconfig;
use super::kubeconfig::Credentials;
use super::kubeconfig::KubeconfigError;
use crate::filesystem;
use crate::metrics::Metrics;

/// A token file is read again when what was read is older than this.
const FILE_PERIOD: Duration = Duration::from_secs(60);
/// The same after the API server has rejected the token.
const REJECTED_PERIOD: Duration = Duration::from_secs(10);

/// Why a request has no credentials.
#[derive(Debug, thiserror::Error)]
pub enum CredentialError {
    /// The token file cannot be read, and never could.
    #[error("cannot read token file {}: {source}", file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The kubeconfig can no longer be read.
    #[error(transparent)]
    Kubeconfig(#[from] KubeconfigError),
    /// The token file is empty.
    #[error("token file {} is empty", .0.display())]
    Empty(PathBuf),
    /// The kubeconfig no longer holds a token.
    #[error("{} no longer holds a token", .0.display())]
    NoToken(PathBuf),
    /// Characters that are not allowed in a header.
    #[error("{0} holds characters that are not allowed in a request header")]
    Characters(String),
    /// The credential plugin failed.
    #[error(transparent)]
    Exec(#[from] ExecError),
}

/// The source of the `Authorization` header.
pub enum Authorizer {
    /// Fixed, or none at all.
    Fixed(Option<HeaderValue>),
    /// From a file.
    File(TokenFile),
    /// From a plugin.
    Plugin(Box<Plugin>),
}

impl Authorizer {
    /// Reads nothing and runs nothing yet.
    ///
    /// # Errors
    /// Fixed credentials that cannot be sent.
    pub fn new(credentials: &Credentials, metrics: &Arc<Metrics>) -> Result<Self, CredentialError> {
        Ok(match credentials {
            Credentials::None => Self::Fixed(None),
            Credentials::Basic(name, password) => {
                let pair = STANDARD.encode(format!("{name}:{}", password.expose_secret()));
                Self::Fixed(Some(header("username", &format!("Basic {pair}"))?))
            }
            Credentials::Token(token, kubeconfig) => {
                let read = (bearer("token", token.expose_secret())?, Instant::now());
                let read = Mutex::new(Read { last: Some(read), ..Read::default() });
                Self::File(TokenFile { file: kubeconfig.clone(), is_kubeconfig: true, meanwhile: None, read })
            }
            Credentials::TokenFile { file, meanwhile } => {
                let meanwhile = meanwhile.as_ref().map(|token| bearer("token", token.expose_secret())).transpose()?;
                Self::File(TokenFile { file: file.clone(), is_kubeconfig: false, meanwhile, read: Mutex::default() })
            }
            Credentials::Exec(exec) => Self::Plugin(Box::new(Plugin::new(ExecConfig::clone(exec), metrics.clone()))),
        })
    }

    /// The source of the credentials, for log lines.
    pub fn source(&self) -> Option<String> {
        match self {
            Self::Fixed(None) => None,
            Self::Fixed(Some(_)) => Some("name and password of the kubeconfig".to_owned()),
            Self::File(file) if file.is_kubeconfig => Some(format!("token of {}", file.file.display())),
            Self::File(file) => Some(format!("token file {}", file.file.display())),
            Self::Plugin(_) => Some("the output of the credential plugin of the kubeconfig".to_owned()),
        }
    }

    /// The header of the next request, and the client certificate of its connection if a plugin issues one.
    ///
    /// # Errors
    /// No file could ever be read, or the plugin failed.
    pub async fn issue(&self) -> Result<Issued, CredentialError> {
        match self {
            Self::Fixed(header) => Ok(Issued { header: header.clone(), ..Issued::default() }),
            Self::File(file) => Ok(Issued { header: Some(file.header().await?), ..Issued::default() }),
            Self::Plugin(plugin) => plugin.issued().await,
        }
    }

    /// The API server rejected the credentials: newer ones are looked for before the next request.
    pub async fn refused(&self) {
        match self {
            Self::Fixed(_) => {}
            Self::File(file) => file.read_again().await,
            Self::Plugin(plugin) => plugin.refused().await,
        }
    }
}

/// A file with a bearer token. While it cannot be read, the token that was read last stays in use.
pub struct TokenFile {
    file: PathBuf,
    /// It is a kubeconfig that holds the token, and need not be read before the token is rejected.
    is_kubeconfig: bool,
    /// The token of the kubeconfig, used as long as the file could never be read.
    meanwhile: Option<HeaderValue>,
    read: Mutex<Read>,
}

/// The state of reading a file.
#[derive(Default)]
struct Read {
    /// What was read last, and when reading was last tried.
    last: Option<(HeaderValue, Instant)>,
    /// The error that was logged last; empty after a success.
    logged: String,
}

impl Read {
    /// Logs an error, unless it is the one that was logged last.
    fn log_once(&mut self, error: &str, consequence: &str) {
        if self.logged != error {
            tracing::warn!("{error}; {consequence}");
            error.clone_into(&mut self.logged);
        }
    }
}

impl TokenFile {
    /// Rate-limited: an invalid token must not cause a read for each request.
    async fn read_again(&self) {
        if let Some((_, at)) = &mut self.read.lock().await.last
            && at.elapsed() >= REJECTED_PERIOD
        {
            *at = at.checked_sub(FILE_PERIOD).unwrap_or(*at);
        }
    }

    /// Makes what was read older.
    #[cfg(test)]
    pub(super) async fn age(&self, by: Duration) {
        if let Some((_, at)) = &mut self.read.lock().await.last {
            *at = at.checked_sub(by).expect("a clock that runs for some minutes");
        }
    }

    async fn header(&self) -> Result<HeaderValue, CredentialError> {
        let mut read = self.read.lock().await;
        if let Some((value, at)) = &read.last
            && at.elapsed() < FILE_PERIOD
        {
            return Ok(value.clone());
        }
        let value = match self.fresh().await {
            Ok(value) => value,
            Err(error) => match &read.last {
                Some((last, _)) => {
                    let (value, error) = (last.clone(), error.to_string());
                    read.log_once(&error, "the previous token stays in use");
                    read.last = Some((value.clone(), Instant::now()));
                    return Ok(value);
                }
                None => return self.fall_back(error, &mut read),
            },
        };
        *read = Read { last: Some((value.clone(), Instant::now())), logged: String::new() };
        Ok(value)
    }

    /// What is sent as long as the file could never be read; the next request reads it again.
    fn fall_back(&self, error: CredentialError, read: &mut Read) -> Result<HeaderValue, CredentialError> {
        let Some(meanwhile) = &self.meanwhile else { return Err(error) };
        read.log_once(&error.to_string(), "the token of the kubeconfig is used until the file can be read");
        Ok(meanwhile.clone())
    }

    /// Reads the file.
    async fn fresh(&self) -> Result<HeaderValue, CredentialError> {
        let file = &self.file;
        let path = file.clone();
        let text = filesystem::blocking(move || kubeconfig::text(&path)).await;
        let text = text.map_err(|source| CredentialError::File { file: file.clone(), source })?;
        if !self.is_kubeconfig {
            let token = Some(text.trim()).filter(|token| !token.is_empty());
            let token = token.ok_or_else(|| CredentialError::Empty(file.clone()))?;
            return bearer(&file.display().to_string(), token);
        }
        match kubeconfig::parse(file, &text)?.credentials {
            Credentials::Token(token, _) => bearer("token", token.expose_secret()),
            _ => Err(CredentialError::NoToken(file.clone())),
        }
    }
}

/// # Errors
/// The token holds characters that are not allowed in a header.
pub(super) fn bearer(what: &str, token: &str) -> Result<HeaderValue, CredentialError> {
    header(what, &format!("Bearer {token}"))
}

fn header(what: &str, text: &str) -> Result<HeaderValue, CredentialError> {
    let mut value = HeaderValue::try_from(text).map_err(|_| CredentialError::Characters(what.to_owned()))?;
    value.set_sensitive(true);
    Ok(value)
}
