//! The clients of the API server, if one is configured, and their client certificate.

use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use anyhow::Context as _;
use http::HeaderMap;
use tokio::sync::oneshot;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::apiserver::ApiServer;
use crate::apiserver::Options;
use crate::apiserver::kubeconfig;
use crate::apiserver::kubeconfig::Access;
use crate::apiserver::kubeconfig::Credentials;
use crate::apiserver::recovery::Recovered;
use crate::apiserver::tls;
use crate::apiserver::tls::Identity;
use crate::certificates;
use crate::certificates::FirstAccess;
use crate::certificates::Pair;
use crate::certificates::Purpose;
use crate::certificates::RequestClients;
use crate::certificates::RotationManager;
use crate::certificates::ServerHealth;
use crate::certificates::Store;
use crate::certificates::Template;
use crate::cli::version;
use crate::config::Settings;
use crate::metrics::Metrics;
use crate::model::Clock;
use crate::model::named;

/// Clients of the API server.
pub(super) struct Connection {
    /// `None` on a standalone node.
    pub api: Option<ApiServer>,
    lost: Option<oneshot::Receiver<()>>,
}

impl Connection {
    /// Returns when only a restart can get a new client certificate; never without rotation.
    pub(super) async fn lost(&mut self) {
        if let Some(lost) = &mut self.lost
            && lost.await.is_ok()
        {
            return;
        }
        // The sender is dropped when the agent ends.
        std::future::pending().await
    }
}

/// Inputs of all steps.
struct Connector<'a> {
    settings: &'a Settings,
    node_name: &'a str,
    metrics: &'a Arc<Metrics>,
    shutdown: &'a CancellationToken,
}

/// The clients of the API server that `--kubeconfig` names, or a bootstrap kubeconfig leads to. A node that bootstraps
/// without rotation waits here until its certificate is signed.
///
/// # Errors
/// The kubeconfig or a file it names is missing or invalid; the first certificate was not signed.
pub(super) async fn connect(
    settings: &Settings,
    node_name: &str,
    metrics: &Arc<Metrics>,
    tasks: &mut JoinSet<()>,
    shutdown: &CancellationToken,
) -> anyhow::Result<Connection> {
    tls::install_crypto();
    if settings.flags.kubeconfig.is_empty() {
        tracing::info!("no --kubeconfig: running standalone");
        return Ok(Connection { api: None, lost: None });
    }
    Connector { settings, node_name, metrics, shutdown }.connect(tasks).await
}

impl Connector<'_> {
    async fn connect(&self, tasks: &mut JoinSet<()>) -> anyhow::Result<Connection> {
        let file = PathBuf::from(&self.settings.flags.kubeconfig);
        let rotate = self.settings.kubelet.rotate_certificates;
        match self.first_access(&file).await? {
            FirstAccess::Bootstrap(access) if rotate => {
                // As upstream: a certificate of the bootstrap kubeconfig is used for certificate requests only.
                let bootstrap = self.plain(&access).await?;
                let store = self.store(None);
                write_kubeconfig(&file, &access, &store).await?;
                tracing::info!(kubeconfig = %file.display(), "written; the client certificate is being requested");
                let without = Access { certificate: None, ..Access::clone(&access) };
                return self.rotate(&without, bootstrap, store, tasks).await;
            }
            FirstAccess::Bootstrap(access) => self.bootstrap(&access, &file).await?,
            FirstAccess::Kubeconfig => {}
        }
        let loaded = file.clone();
        let access = blocking(move || kubeconfig::load(&loaded)).await.context("unable to load kubeconfig")?;
        tracing::info!(server = %access.server, kubeconfig = %file.display(), "using the API server");
        if rotate {
            let pair = access.certificate.as_ref();
            let files = pair.and_then(|pair| pair.certificate.path().zip(pair.key.path()));
            let store = self.store(files.map(|(certificate, key)| (certificate.to_owned(), key.to_owned())));
            let bootstrap = self.plain(&Access { certificate: None, ..access.clone() }).await?;
            return self.rotate(&access, bootstrap, store, tasks).await;
        }
        Ok(Connection { api: Some(self.plain(&access).await?), lost: None })
    }

    async fn first_access(&self, file: &Path) -> anyhow::Result<FirstAccess> {
        let (file, bootstrap) = (file.to_owned(), &self.settings.flags.bootstrap_kubeconfig);
        let bootstrap = (!bootstrap.is_empty()).then(|| PathBuf::from(bootstrap));
        blocking(move || certificates::first_access(&file, bootstrap.as_deref(), SystemTime::now())).await
    }

    fn store(&self, configured: Option<(PathBuf, PathBuf)>) -> Store {
        Store::new(&self.settings.flags.cert_dir, Purpose::Client, configured)
    }

    /// Clients with these credentials only, without a rotated certificate.
    async fn plain(&self, access: &Access) -> anyhow::Result<ApiServer> {
        let (access, options) = (access.clone(), self.options());
        let (metrics, shutdown) = (self.metrics.clone(), self.shutdown.clone());
        blocking(move || ApiServer::connect(&access, &options, metrics, shutdown)).await
    }

    async fn bootstrap(&self, access: &Access, file: &Path) -> anyhow::Result<()> {
        let (store, folder) = (self.store(None), &self.settings.flags.cert_dir);
        let client = self.plain(access).await?.main;
        let getting = certificates::bootstrap(&client, self.node_name, &store, folder, SystemTime::now());
        match self.shutdown.run_until_cancelled(getting).await {
            Some(outcome) => outcome.context("cannot get the first client certificate")?,
            None => anyhow::bail!("stopped before the first client certificate was signed"),
        }
        write_kubeconfig(file, access, &store).await
    }

    /// Clients with a rotated certificate. Tokens and passwords are used for certificate requests only, by `bootstrap`, which
    /// sends them as long as there is no certificate.
    async fn rotate(
        &self,
        access: &Access,
        bootstrap: ApiServer,
        store: Store,
        tasks: &mut JoinSet<()>,
    ) -> anyhow::Result<Connection> {
        let (read, from) = (access.clone(), store.clone());
        let (first, at_once) = blocking(move || first_pair(&read, &from)).await?;
        // Anonymous until there is one, as upstream: requests that the server allows without credentials work meanwhile.
        let identity = Identity::default();
        identity.set(first.as_ref().map(|pair| pair.certified.clone()));
        // As upstream, nor are its requests executed as another user.
        let (credentials, impersonation) = (Credentials::None, HeaderMap::new());
        let certified = Access { certificate: None, credentials, impersonation, ..access.clone() };
        let (options, metrics, shutdown) = (self.options(), self.metrics.clone(), self.shutdown.clone());
        let connect = move || ApiServer::with_identity(&certified, identity, &options, metrics, shutdown);
        let api = blocking(connect).await?;
        let (current, seen) = watch::channel(first.map(Arc::new));
        let server_health = ServerHealth::default();
        let manager = RotationManager {
            store,
            template: watch::channel(Some(Template::client(self.node_name))).1,
            clients: Box::new(BootstrapClients { certified: api.clone(), bootstrap }),
            clock: Clock::System,
            metrics: self.metrics.clone(),
            server_health: server_health.clone(),
            at_once,
        };
        let rotation = manager.run(current, self.shutdown.clone());
        tasks.spawn(named("rotation of the client certificate", rotation));
        tasks.spawn(named("client certificate", show(api.clone(), seen.clone(), self.shutdown.clone())));
        let (sender, lost) = oneshot::channel();
        let watching = certificates::wait_until_missing_too_long(seen, server_health);
        let shutdown = self.shutdown.clone();
        let watching = async move {
            if shutdown.run_until_cancelled(watching).await.is_some() {
                // The receiver is dropped if the agent is ending.
                let _ = sender.send(());
            }
        };
        tasks.spawn(named("lack of a client certificate", watching));
        Ok(Connection { api: Some(api), lost: Some(lost) })
    }

    fn options(&self) -> Options {
        let kubelet = &self.settings.kubelet;
        let lease = Duration::from_secs(u64::try_from(kubelet.node_lease_duration_seconds).unwrap_or(0));
        Options {
            per_second: kubelet.kube_api_qps,
            burst: kubelet.kube_api_burst,
            events_per_second: kubelet.event_record_qps,
            events_burst: kubelet.event_burst,
            heartbeat_timeout: kubelet.node_status_update_frequency.std().min(lease),
            versions: (version::KEBLET, version::KUBERNETES),
        }
    }
}

/// Runs work on the files of the clients on a thread that may block: their file system may be slow to respond.
async fn blocking<T, E>(work: impl FnOnce() -> Result<T, E> + Send + 'static) -> anyhow::Result<T>
where
    T: Send + 'static,
    E: Into<anyhow::Error> + Send + 'static,
{
    let done = tokio::task::spawn_blocking(work).await.context("reading the files of the API client")?;
    done.map_err(Into::into)
}

/// Writes a kubeconfig that names the current pair of `store`.
async fn write_kubeconfig(file: &Path, access: &Access, store: &Store) -> anyhow::Result<()> {
    let (file, access, pair) = (file.to_owned(), access.clone(), store.current_path());
    blocking(move || certificates::write_kubeconfig(&file, &access, &pair)).await
}

/// Requests with the certificate while it is valid, else with the credentials of the kubeconfig, or of the bootstrap one.
struct BootstrapClients {
    certified: ApiServer,
    bootstrap: ApiServer,
}

impl RequestClients for BootstrapClients {
    fn next(&self, is_certified: bool) -> (kube::Client, Recovered) {
        let client = if is_certified { &self.certified.main } else { &self.bootstrap.main };
        // The bootstrap client sends nothing else: the other clients notice when the server is available again.
        (client.clone(), self.certified.recovered())
    }
}

/// The first pair, and whether it is to be rotated at once because it is embedded in the kubeconfig. Blocks.
fn first_pair(access: &Access, store: &Store) -> anyhow::Result<(Option<Pair>, bool)> {
    let now = SystemTime::now();
    let stored = store.load().context("client certificate")?;
    let inline =
        access.certificate.as_ref().filter(|pair| pair.certificate.path().is_none() && pair.key.path().is_none());
    match (stored, inline) {
        (Some(pair), _) if !pair.leaf.expired(now) => Ok((Some(pair), false)),
        (_, Some(inline)) => {
            let pair = Pair::read(&inline.certificate, &inline.key).context("client certificate of the kubeconfig")?;
            // As upstream: a full disk does not keep the node from joining.
            if let Err(error) = store.replace(&pair, now) {
                tracing::warn!(%error, "cannot store the client certificate of the kubeconfig, using it from memory");
            }
            Ok((Some(pair), true))
        }
        (stored, None) => Ok((stored, false)),
    }
}

/// Uses the current certificate for all clients.
async fn show(api: ApiServer, mut pairs: watch::Receiver<Option<Arc<Pair>>>, shutdown: CancellationToken) {
    let showing = async {
        loop {
            match &*pairs.borrow_and_update() {
                Some(pair) => drop(api.identify(pair.certified.clone())),
                None => api.forget_identity(),
            }
            if pairs.changed().await.is_err() {
                return;
            }
        }
    };
    shutdown.run_until_cancelled(showing).await;
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;

    use super::*;
    use crate::apiserver::test_server::Authority;
    use crate::apiserver::test_server::Reply;
    use crate::apiserver::test_server::Seen;
    use crate::apiserver::test_server::TestServer;

    /// Settings of a node without a certificate that uses `bootstrap`, with its files in `folder`.
    fn settings(folder: &Path, bootstrap: &Path) -> Settings {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let (kubeconfig, pairs) = (text(&folder.join("made.kubeconfig")), text(&folder.join("pki")));
        let bootstrap = text(bootstrap);
        let flags = [
            ("kubeconfig", kubeconfig.as_str()),
            ("bootstrap-kubeconfig", bootstrap.as_str()),
            ("cert-dir", pairs.as_str()),
            ("rotate-certificates", "true"),
        ];
        crate::config::load(&flags.into_iter().collect()).expect("valid settings")
    }

    fn is_request(seen: &Seen) -> bool {
        seen.path.contains("/certificatesigningrequests")
    }

    #[test]
    fn a_certificate_of_the_kubeconfig_that_cannot_be_stored_is_used_from_memory() {
        let (certificate, key) = Authority::new().issue("n");
        let (certificate, key) = (STANDARD.encode(certificate), STANDARD.encode(key));
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
             contexts: [{{name: c, context: {{cluster: k, user: u}}}}]\n\
             clusters: [{{name: k, cluster: {{server: 'https://10.0.0.1:6443'}}}}]\n\
             users: [{{name: u, user: {{client-certificate-data: {certificate}, client-key-data: {key}}}}}]\n"
        );
        let access = kubeconfig::parse(Path::new("/x/kubelet.conf"), &text).expect("access");
        let folder = tempfile::tempdir().expect("a folder");
        let place = folder.path().join("pki");
        std::os::unix::fs::symlink("/no/such/folder", &place).expect("a link");
        let store = Store::new(&place, Purpose::Client, None);
        let (pair, at_once) = first_pair(&access, &store).expect("the start goes on");
        assert!(pair.is_some_and(|pair| pair.leaf.common_name == "n") && at_once);
    }

    /// In real time, as a call that hangs stops a paused clock: a pipe is read until its writer has closed it.
    #[tokio::test]
    async fn a_kubeconfig_that_is_slow_to_read_keeps_no_worker_thread() {
        let folder = tempfile::tempdir().expect("a folder");
        let (pipe, pairs) = (folder.path().join("kubeconfig"), folder.path().join("pki"));
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        let flags = [
            ("kubeconfig", pipe.to_str().expect("text")),
            ("cert-dir", pairs.to_str().expect("text")),
            ("rotate-certificates", "false"),
        ];
        let settings = crate::config::load(&flags.into_iter().collect()).expect("valid settings");
        let text = "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
                    contexts: [{name: c, context: {cluster: k, user: u}}]\n\
                    clusters: [{name: k, cluster: {server: 'https://10.0.0.1', insecure-skip-tls-verify: true}}]\n\
                    users: [{name: u, user: {token: secret}}]\n";
        let (wake, woken) = std::sync::mpsc::channel::<()>();
        let writer = std::thread::spawn(move || {
            // Writes in any case, so that a test that fails ends.
            let _ = woken.recv_timeout(Duration::from_secs(10));
            std::fs::write(&pipe, text)
        });
        let (metrics, mut tasks, shutdown) = (Metrics::new(), JoinSet::new(), CancellationToken::new());
        let mut connecting = Box::pin(connect(&settings, "n", &metrics, &mut tasks, &shutdown));
        let early = tokio::time::timeout(Duration::from_millis(20), &mut connecting).await;
        drop(wake);
        assert!(early.is_err(), "a timer runs meanwhile");
        assert!(connecting.await.expect("clients").api.is_some());
        writer.join().expect("no panic").expect("written");
    }

    #[tokio::test]
    async fn a_bootstrap_certificate_is_used_for_certificate_requests_only() {
        let authority = Authority::new();
        let (certificate, key) = authority.issue("joiner");
        let data = |text: &str| STANDARD.encode(text);
        for user in [
            "client-certificate: joiner.crt, client-key: joiner.key".to_owned(),
            format!("client-certificate-data: {}, client-key-data: {}", data(&certificate), data(&key)),
        ] {
            let folder = tempfile::tempdir().expect("a folder");
            for (name, text) in [("joiner.crt", &certificate), ("joiner.key", &key)] {
                std::fs::write(folder.path().join(name), text).expect("written");
            }
            let refuse = |_: &Seen| Reply::json(403, serde_json::json!({ "kind": "Status", "code": 403 }));
            let server = TestServer::start(&authority, refuse).await;
            let impersonating = format!("{user}, as: jane");
            let settings = settings(folder.path(), &server.kubeconfig(folder.path(), &authority, &impersonating));
            let (metrics, mut tasks, shutdown) = (Metrics::new(), JoinSet::new(), CancellationToken::new());
            let connection = connect(&settings, "n", &metrics, &mut tasks, &shutdown).await.expect("clients");
            let seen = server.until(|seen| seen.iter().any(is_request)).await;
            assert_eq!(seen[0].client.as_deref(), Some("joiner"), "{user}");
            assert_eq!(seen[0].headers["impersonate-user"], "jane", "{user}");
            assert_eq!(tasks.len(), 3, "the caller watches them");
            let request = http::Request::get("/version").body(Vec::new()).expect("a request");
            connection.api.expect("clients").main.request_text(request).await.expect_err("refused");
            let others: Vec<Seen> = server.seen().into_iter().filter(|seen| !is_request(seen)).collect();
            assert!(others.iter().all(|seen| seen.client.is_none()) && others.len() == 1, "{others:?}");
            assert!(!others[0].headers.contains_key("impersonate-user"), "{user}");
            let store = Store::new(&folder.path().join("pki"), Purpose::Client, None);
            assert!(store.load().expect("readable").is_none(), "it is not the node's own: {user}");
            shutdown.cancel();
        }
    }
}
