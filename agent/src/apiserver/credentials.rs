//! The `Authorization` of requests: fixed, from a file that may be replaced, or from a program that is asked again.
//!
//! A token that stands in the kubeconfig itself counts as one in a file: once it has been refused, the file is looked at
//! again. Beside a token file it is only what is sent while that file has never been readable, as client-go has it.

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

use super::exec::{ExecError, Issued, Plugin};
use super::kubeconfig::{self, Credentials, KubeconfigError};
use crate::metrics::Metrics;

/// A token file is read again when what was read is older than this.
const FILE_PERIOD: Duration = Duration::from_secs(60);
/// The same once it has been refused.
const REFUSED_PERIOD: Duration = Duration::from_secs(10);

/// Why a request cannot be given its credentials.
#[derive(Debug, thiserror::Error)]
pub enum CredentialError {
    /// The token file cannot be read, and never could.
    #[error("cannot read token file {}: {source}", file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The kubeconfig cannot be read any more.
    #[error(transparent)]
    Kubeconfig(#[from] KubeconfigError),
    /// The token file holds white space at most.
    #[error("token file {} is empty", .0.display())]
    Empty(PathBuf),
    /// There was one when the agent started.
    #[error("there is no token in {} any more", .0.display())]
    NoToken(PathBuf),
    /// Characters that no header may hold.
    #[error("{0} holds characters that no request header may hold")]
    Characters(String),
    /// The credential plugin gave none.
    #[error(transparent)]
    Exec(#[from] ExecError),
}

/// Credentials ready for use.
pub enum Authorizer {
    /// Always the same, or none at all.
    Fixed(Option<HeaderValue>),
    /// From a file.
    File(TokenFile),
    /// From a program.
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

    /// Where what requests carry comes from, for people.
    pub fn source(&self) -> Option<String> {
        match self {
            Self::Fixed(None) => None,
            Self::Fixed(Some(_)) => Some("name and password of the kubeconfig".to_owned()),
            Self::File(file) if file.is_kubeconfig => Some(format!("token of {}", file.file.display())),
            Self::File(file) => Some(format!("token file {}", file.file.display())),
            Self::Plugin(_) => Some("what the credential plugin of the kubeconfig gave".to_owned()),
        }
    }

    /// What the next request carries, and the client certificate its connection shows if that comes from here too.
    ///
    /// # Errors
    /// There is nothing to send: no file could ever be read, no program gave anything.
    pub async fn issue(&self) -> Result<Issued, CredentialError> {
        match self {
            Self::Fixed(header) => Ok(Issued { header: header.clone(), ..Issued::default() }),
            Self::File(file) => Ok(Issued { header: Some(file.header().await?), ..Issued::default() }),
            Self::Plugin(plugin) => plugin.issued().await,
        }
    }

    /// The server does not accept what a request carried: looks for something newer before the next one.
    pub async fn refused(&self) {
        match self {
            Self::Fixed(_) => {}
            Self::File(file) => file.read_again().await,
            Self::Plugin(plugin) => plugin.refused().await,
        }
    }
}

/// A file with a bearer token. What was read last is used while the file cannot be read.
pub struct TokenFile {
    file: PathBuf,
    /// It is a kubeconfig that holds the token, which need not be read before there is doubt.
    is_kubeconfig: bool,
    /// The token of the kubeconfig, for as long as the file could never be read.
    meanwhile: Option<HeaderValue>,
    read: Mutex<Read>,
}

/// What has become of reading a file so far.
#[derive(Default)]
struct Read {
    /// What it said, and when that was last looked at.
    last: Option<(HeaderValue, Instant)>,
    /// That it could never be read has been said.
    told: bool,
}

impl TokenFile {
    /// Not at every refusal: a wrong token would have the file read with each request.
    async fn read_again(&self) {
        if let Some((_, at)) = &mut self.read.lock().await.last
            && at.elapsed() >= REFUSED_PERIOD
        {
            *at = at.checked_sub(FILE_PERIOD).unwrap_or(*at);
        }
    }

    /// Lets what was read be so much older.
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
                    tracing::warn!("{error}; the last token is used on");
                    last.clone()
                }
                None => return self.instead(error, &mut read.told),
            },
        };
        read.last = Some((value.clone(), Instant::now()));
        Ok(value)
    }

    /// What is sent while the file could never be read; the next request looks again.
    fn instead(&self, error: CredentialError, told: &mut bool) -> Result<HeaderValue, CredentialError> {
        let Some(meanwhile) = &self.meanwhile else { return Err(error) };
        if !std::mem::replace(told, true) {
            tracing::warn!("{error}; the token of the kubeconfig is used until it can be read");
        }
        Ok(meanwhile.clone())
    }

    /// What the file says now.
    async fn fresh(&self) -> Result<HeaderValue, CredentialError> {
        let file = &self.file;
        let text = tokio::fs::read_to_string(file).await;
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

pub(super) fn bearer(what: &str, token: &str) -> Result<HeaderValue, CredentialError> {
    header(what, &format!("Bearer {token}"))
}

fn header(what: &str, text: &str) -> Result<HeaderValue, CredentialError> {
    let mut value = HeaderValue::try_from(text).map_err(|_| CredentialError::Characters(what.to_owned()))?;
    value.set_sensitive(true);
    Ok(value)
}
