//! Resolves the current context of a kubeconfig. Reads the file itself; files that it refers to are read where they are
//! used, because they may change while the agent runs.

use std::io;
use std::path::Path;
use std::path::PathBuf;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::HeaderMap;
use http::Uri;
use kube::config::AuthInfo;
use kube::config::Cluster;
use kube::config::ExecAuthCluster;
use kube::config::ExecConfig;
use kube::config::Kubeconfig;
use secrecy::ExposeSecret as _;
use secrecy::SecretString;

use super::impersonation;
use crate::filesystem;

/// Longest kubeconfig, certificate or key that is read, bytes.
const MAX_FILE: usize = 4 << 20;

/// Access to one API server. Holds secrets; `Debug` does not show them.
#[derive(Clone, Debug)]
pub struct Access {
    /// Scheme, host and port, and a path prefix if any.
    pub server: Uri,
    /// `certificate-authority[-data]`: the authority of the server's certificate; `None` for the system's roots.
    pub authority: Option<Pem>,
    /// `insecure-skip-tls-verify`.
    pub insecure: bool,
    /// `tls-server-name`: the name that the server's certificate must be for, instead of the host of `server`.
    pub server_name: Option<String>,
    /// `proxy-url`.
    pub proxy: Option<Uri>,
    /// Client certificate and key.
    pub certificate: Option<CertificatePair>,
    /// The credentials of every request.
    pub credentials: Credentials,
    /// The headers of every request by which it is executed as another user: those of `as`, `as-uid`, `as-groups` and
    /// `as-user-extra`.
    pub impersonation: HeaderMap,
}

/// PEM text, inline or in a file.
#[derive(Clone)]
pub enum Pem {
    /// Decoded text of a `…-data` field.
    Inline(SecretString),
    /// A file, which is reloaded while the agent runs.
    File(PathBuf),
}

impl std::fmt::Debug for Pem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Inline(_) => f.write_str("Inline"),
            Self::File(path) => write!(f, "File({})", path.display()),
        }
    }
}

impl Pem {
    /// Reads the text. Blocks.
    ///
    /// # Errors
    /// The file cannot be read, or is neither a regular one nor a pipe.
    pub fn read(&self) -> io::Result<SecretString> {
        match self {
            Self::Inline(text) => Ok(text.clone()),
            Self::File(path) => text(path).map(SecretString::from),
        }
    }

    /// The file, if it is one.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Inline(_) => None,
            Self::File(path) => Some(path),
        }
    }
}

/// `client-certificate[-data]` and `client-key[-data]`.
#[derive(Clone, Debug)]
pub struct CertificatePair {
    /// The chain, own certificate first.
    pub certificate: Pem,
    /// Its private key.
    pub key: Pem,
}

impl CertificatePair {
    /// The place of the certificate, for log lines.
    pub fn place(&self) -> String {
        let path = self.certificate.path();
        path.map_or_else(|| "client-certificate-data".to_owned(), |path| path.display().to_string())
    }
}

/// The `Authorization` of requests. The first of these is used: basic, token file, token, plugin; basic together with a
/// token is refused, beside a client certificate no plugin is run, and a server without TLS gets none, as by client-go.
#[derive(Clone, Debug)]
pub enum Credentials {
    /// None: anonymous, or authenticated by the client certificate.
    None,
    /// `username` and `password`.
    Basic(String, SecretString),
    /// `token`, and the kubeconfig that holds it.
    Token(SecretString, PathBuf),
    /// `tokenFile`.
    TokenFile {
        /// The file, which is reloaded while the agent runs.
        file: PathBuf,
        /// `token`: used as long as the file could never be read.
        meanwhile: Option<SecretString>,
    },
    /// `exec`: a plugin that prints an ExecCredential.
    Exec(Box<ExecConfig>),
}

/// Why a kubeconfig cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KubeconfigError {
    /// It cannot be read.
    #[error("{}: {source}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// It is neither YAML nor JSON, or a field has the wrong type.
    #[error("{}: {problem}", file.display())]
    Syntax {
        /// The file.
        file: PathBuf,
        /// Where and what.
        problem: String,
    },
    /// A field is missing or invalid.
    #[error("{}: {field}: {problem}", file.display())]
    Field {
        /// The file.
        file: PathBuf,
        /// Path of the field.
        field: String,
        /// What is wrong with it.
        problem: String,
    },
}

/// Reads `file` and resolves its `current-context`. Relative paths in it are relative to its directory. Blocks.
///
/// # Errors
/// The file cannot be read or parsed, or a field is invalid; the error names both.
pub fn load(file: &Path) -> Result<Access, KubeconfigError> {
    let text = text(file).map_err(|source| KubeconfigError::Read { file: file.to_owned(), source })?;
    parse(file, &text)
}

/// The text of a regular file or a pipe. Blocks, for a pipe at most 10 s.
///
/// # Errors
/// It cannot be read, is another kind of file, is too long, or no text.
pub(super) fn text(file: &Path) -> io::Result<String> {
    let content = filesystem::read_named(file, MAX_FILE)?;
    // The error of the conversion would hold the content.
    String::from_utf8(content).map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "not valid UTF-8"))
}

/// As [`load`], with the text of the file.
///
/// # Errors
/// As those of [`load`].
pub fn parse(file: &Path, text: &str) -> Result<Access, KubeconfigError> {
    let syntax = |problem: String| KubeconfigError::Syntax { file: file.to_owned(), problem };
    let config: Kubeconfig = serde_saphyr::from_str(text).map_err(|error| syntax(error.to_string()))?;
    let reader = Reader { file, folder: file.parent().unwrap_or(Path::new(".")) };
    reader.access(&config)
}

struct Reader<'a> {
    file: &'a Path,
    folder: &'a Path,
}

type Read<T> = Result<T, KubeconfigError>;

impl Reader<'_> {
    fn wrong(&self, field: impl Into<String>, problem: impl Into<String>) -> KubeconfigError {
        KubeconfigError::Field { file: self.file.to_owned(), field: field.into(), problem: problem.into() }
    }

    fn access(&self, config: &Kubeconfig) -> Read<Access> {
        let name = set(&config.current_context).ok_or_else(|| self.wrong("current-context", "is not set"))?;
        let context = config.contexts.iter().find(|context| &context.name == name);
        let context = context.ok_or_else(|| self.wrong("current-context", format!("no context is named {name:?}")))?;
        let field = format!("contexts[{name}].context");
        let context = context.context.as_ref().ok_or_else(|| self.wrong(&field, "is missing"))?;
        let cluster = config.clusters.iter().find(|cluster| cluster.name == context.cluster);
        let unknown = || self.wrong(format!("{field}.cluster"), format!("no cluster is named {:?}", context.cluster));
        let cluster = cluster.ok_or_else(unknown)?;
        let place = format!("clusters[{}].cluster", cluster.name);
        let cluster = cluster.cluster.as_ref().ok_or_else(|| self.wrong(&place, "is missing"))?;
        let anonymous = AuthInfo::default();
        let (user, user_place) = match set(&context.user) {
            None => (&anonymous, String::new()),
            Some(name) => {
                let user = config.auth_infos.iter().find(|user| &user.name == name);
                let unknown = || self.wrong(format!("{field}.user"), format!("no user is named {name:?}"));
                (user.ok_or_else(unknown)?.auth_info.as_ref().unwrap_or(&anonymous), format!("users[{name}].user"))
            }
        };
        self.combine(cluster, &place, user, &user_place)
    }

    fn combine(&self, cluster: &Cluster, place: &str, user: &AuthInfo, user_place: &str) -> Read<Access> {
        let authority = self.pem(
            set(&cluster.certificate_authority_data),
            set(&cluster.certificate_authority),
            &format!("{place}.certificate-authority-data"),
        )?;
        let insecure = cluster.insecure_skip_tls_verify.unwrap_or(false);
        if insecure && authority.is_some() {
            let problem = "cannot be set together with a certificate authority";
            return Err(self.wrong(format!("{place}.insecure-skip-tls-verify"), problem));
        }
        let certificate = self.certificate(user, user_place)?;
        let tls = authority.is_some() || insecure || certificate.is_some();
        let server = set(&cluster.server).ok_or_else(|| self.wrong(format!("{place}.server"), "is not set"))?;
        let server = server_uri(server, tls).map_err(|problem| self.wrong(format!("{place}.server"), problem))?;
        let proxy = set(&cluster.proxy_url)
            .map(|url| proxy_uri(url).map_err(|problem| self.wrong(format!("{place}.proxy-url"), problem)));
        let impersonation = impersonation::headers(user)
            .map_err(|(field, problem)| self.wrong(format!("{user_place}.{field}"), problem))?;
        let credentials = match self.credentials(user, user_place, cluster)? {
            // As in client-go. The certificate of the plugin would replace it.
            Credentials::Exec(_) if certificate.is_some() => Credentials::None,
            // As in client-go: they could be read on the way.
            _ if server.scheme_str() == Some("http") => Credentials::None,
            credentials => credentials,
        };
        Ok(Access {
            server,
            authority,
            insecure,
            server_name: set(&cluster.tls_server_name).cloned(),
            proxy: proxy.transpose()?,
            certificate,
            credentials,
            impersonation,
        })
    }

    fn certificate(&self, user: &AuthInfo, place: &str) -> Read<Option<CertificatePair>> {
        let data = user.client_key_data.as_ref().map(|secret| secret.expose_secret().to_owned());
        let certificate = self.pem(
            set(&user.client_certificate_data),
            set(&user.client_certificate),
            &format!("{place}.client-certificate-data"),
        )?;
        let key = self.pem(set(&data), set(&user.client_key), &format!("{place}.client-key-data"))?;
        match (certificate, key) {
            (None, None) => Ok(None),
            (Some(certificate), Some(key)) => Ok(Some(CertificatePair { certificate, key })),
            (Some(_), None) => Err(self.wrong(format!("{place}.client-key"), "is missing beside a client certificate")),
            (None, Some(_)) => Err(self.wrong(format!("{place}.client-certificate"), "is missing beside a client key")),
        }
    }

    fn credentials(&self, user: &AuthInfo, place: &str, cluster: &Cluster) -> Read<Credentials> {
        if user.auth_provider.is_some() {
            let problem = "authentication providers are no longer supported; use exec";
            return Err(self.wrong(format!("{place}.auth-provider"), problem));
        }
        let token = user.token.as_ref().filter(|token| !token.expose_secret().is_empty());
        let token_file = set(&user.token_file).map(|file| self.folder.join(file));
        if let Some(name) = set(&user.username) {
            if token.is_some() || token_file.is_some() {
                let field = if token.is_some() { "token" } else { "tokenFile" };
                return Err(self.wrong(format!("{place}.{field}"), "cannot be set together with a username"));
            }
            return Ok(Credentials::Basic(name.clone(), user.password.clone().unwrap_or_default()));
        }
        match (token_file, token, &user.exec) {
            (Some(file), meanwhile, _) => Ok(Credentials::TokenFile { file, meanwhile: meanwhile.cloned() }),
            (None, Some(token), _) => Ok(Credentials::Token(token.clone(), self.file.to_owned())),
            (None, None, Some(exec)) => self.plugin(exec, place, cluster).map(|exec| Credentials::Exec(Box::new(exec))),
            (None, None, None) => Ok(Credentials::None),
        }
    }

    /// A command with a slash is relative to the kubeconfig's directory, others are found in PATH.
    fn plugin(&self, exec: &ExecConfig, place: &str, cluster: &Cluster) -> Read<ExecConfig> {
        let missing = || self.wrong(format!("{place}.exec.command"), "is not set");
        let command = set(&exec.command).ok_or_else(missing)?;
        match set(&exec.api_version).map(String::as_str) {
            Some("client.authentication.k8s.io/v1" | "client.authentication.k8s.io/v1beta1") => {}
            Some(other) => {
                return Err(self.wrong(format!("{place}.exec.apiVersion"), format!("{other:?} is not supported")));
            }
            None => return Err(self.wrong(format!("{place}.exec.apiVersion"), "is not set")),
        }
        let command = if command.contains('/') {
            self.folder.join(command).to_string_lossy().into_owned()
        } else {
            command.clone()
        };
        let cluster_info = exec.provide_cluster_info.then(|| {
            let authority = set(&cluster.certificate_authority).map(|file| self.folder.join(file));
            let authority = authority.map(|file| file.to_string_lossy().into_owned());
            ExecAuthCluster::try_from(&Cluster { certificate_authority: authority, ..cluster.clone() })
        });
        let cluster_info = cluster_info
            .transpose()
            .map_err(|error| self.wrong(format!("{place}.exec.provideClusterInfo"), error.to_string()))?;
        Ok(ExecConfig { command: Some(command), cluster: cluster_info, ..exec.clone() })
    }

    /// Inline data takes precedence over a file.
    fn pem(&self, data: Option<&String>, file: Option<&String>, field: &str) -> Read<Option<Pem>> {
        match (data, file) {
            (Some(data), _) => {
                let compact: String = data.split_whitespace().collect();
                let bytes = STANDARD.decode(compact).map_err(|error| self.wrong(field, error.to_string()))?;
                let text = String::from_utf8(bytes).map_err(|_| self.wrong(field, "is not PEM text"))?;
                Ok(Some(Pem::Inline(text.into())))
            }
            (None, Some(file)) => Ok(Some(Pem::File(self.folder.join(file)))),
            (None, None) => Ok(None),
        }
    }
}

/// An empty text counts as unset.
fn set(text: &Option<String>) -> Option<&String> {
    text.as_ref().filter(|text| !text.is_empty())
}

/// A server without a scheme is https where TLS is configured.
fn server_uri(text: &str, tls: bool) -> Result<Uri, String> {
    let whole = match (text.contains("://"), tls) {
        (true, _) => text.to_owned(),
        (false, true) => format!("https://{text}"),
        (false, false) => format!("http://{text}"),
    };
    let uri: Uri = whole.parse().map_err(|error| format!("{text:?} is not a URL: {error}"))?;
    match uri.scheme_str() {
        _ if uri.host().is_none_or(str::is_empty) => Err(format!("{text:?} names no host")),
        Some("https" | "http") => Ok(uri),
        _ => Err(format!("{text:?} is neither https nor http")),
    }
}

fn proxy_uri(text: &str) -> Result<Uri, String> {
    let uri: Uri = text.parse().map_err(|error| format!("{text:?} is not a URL: {error}"))?;
    match uri.scheme_str() {
        _ if uri.host().is_none_or(str::is_empty) => Err(format!("{text:?} names no host")),
        Some("http" | "socks5") => Ok(uri),
        _ => Err(format!("{text:?} is neither http nor socks5")),
    }
}

#[cfg(test)]
#[path = "kubeconfig_tests.rs"]
mod tests;
