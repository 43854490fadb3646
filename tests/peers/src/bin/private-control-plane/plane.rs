//! One control plane: start, control of its components, clean-up.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use keblet_peers::ControlPlaneReady;
use keblet_peers::Credentials;
use keblet_peers::Identity;
use keblet_peers::Part;
use nix::sys::signal::Signal;
use serde_json::Value;
use serde_json::json;
use tokio::time::Instant;
use tokio::time::sleep;

use crate::arguments;
use crate::authority;
use crate::authority::Authority;
use crate::http;
use crate::http::Client;
use crate::http::Request;
use crate::layout::Layout;
use crate::objects;
use crate::objects::Object;
use crate::part;
use crate::part::Process;

/// Generous, as the machine may be busy.
const READY_DEADLINE: Duration = Duration::from_secs(300);
const POLL: Duration = Duration::from_millis(50);
const CREATED: u16 = 201;
const CONFLICT: u16 = 409;

/// A control plane with its resources.
pub(crate) struct Plane {
    layout: Layout,
    api_server_arguments: Vec<String>,
    processes: BTreeMap<Part, Process>,
    /// Authority and administrator's client, once the certificates exist.
    trust: Option<Trust>,
    issued: usize,
}

struct Trust {
    authority: Authority,
    admin: Client,
}

impl Plane {
    /// A control plane that is not started; only its folder exists.
    pub(crate) fn new(layout: Layout, api_server_arguments: Vec<String>) -> Self {
        Self { layout, api_server_arguments, processes: BTreeMap::new(), trust: None, issued: 0 }
    }

    /// Creates certificates, starts the components in order and waits until pods can be created.
    ///
    /// # Errors
    /// A file cannot be written, or a component does not get ready.
    pub(crate) async fn start_new(&mut self) -> Result<ControlPlaneReady> {
        self.trust = Some(self.write_certificates()?);
        self.start(Part::Etcd).await?;
        self.start(Part::ApiServer).await?;
        // Both depend only on the API server, so they are started concurrently.
        for part in [Part::ControllerManager, Part::Scheduler] {
            self.spawn(part)?;
        }
        let (id, secret) = (random_word(6), random_word(16));
        for object in objects::bootstrap(&id, &secret) {
            self.create(&object).await?;
        }
        let bootstrap = self.layout.kubeconfig("bootstrap");
        self.write_kubeconfig(&bootstrap, &json!({ "token": format!("{id}.{secret}") }))?;
        for part in [Part::ControllerManager, Part::Scheduler] {
            self.until_ready(part).await?;
        }
        self.until_default_account().await?;
        Ok(ControlPlaneReady {
            dir: self.layout.dir.clone(),
            programs: self.layout.programs.clone(),
            server: self.layout.server(),
            ca: self.layout.certificate("ca"),
            kubeconfig: self.layout.kubeconfig("admin"),
            bootstrap_kubeconfig: bootstrap,
        })
    }

    /// Starts a component and waits until it is ready.
    ///
    /// # Errors
    /// It runs already, or does not get ready.
    pub(crate) async fn start(&mut self, part: Part) -> Result<()> {
        if part == Part::MetricsServer {
            self.announce_metrics().await?;
        }
        self.spawn(part)?;
        self.until_ready(part).await
    }

    /// Kills a component with SIGKILL.
    ///
    /// # Errors
    /// It does not run.
    pub(crate) async fn kill(&mut self, part: Part) -> Result<()> {
        self.take(part)?.kill().await
    }

    /// Stops a component with SIGTERM and waits until it has exited.
    ///
    /// # Errors
    /// It does not run.
    pub(crate) async fn stop(&mut self, part: Part) -> Result<()> {
        self.take(part)?.stop().await
    }

    /// Suspends a component with SIGSTOP.
    ///
    /// # Errors
    /// It does not run.
    pub(crate) fn freeze(&mut self, part: Part) -> Result<()> {
        self.signal(part, Signal::SIGSTOP)
    }

    /// Resumes a component with SIGCONT.
    ///
    /// # Errors
    /// It does not run.
    pub(crate) fn thaw(&mut self, part: Part) -> Result<()> {
        self.signal(part, Signal::SIGCONT)
    }

    /// Compacts etcd up to its current revision, and returns the revision.
    ///
    /// # Errors
    /// etcd does not response.
    pub(crate) async fn compact(&self) -> Result<i64> {
        // The header of any range response has the revision. 64-bit numbers are strings in this API.
        let range = self.etcd("/v3/kv/range", json!({ "key": "AA==" })).await?;
        let revision = range["header"]["revision"].as_str().context("etcd returned no revision")?;
        self.etcd("/v3/kv/compaction", json!({ "revision": revision, "physical": true })).await?;
        revision.parse().with_context(|| format!("{revision:?} is not a revision"))
    }

    /// Issues a certificate and writes a kubeconfig that refers to it.
    ///
    /// # Errors
    /// The control plane is not started, a name is invalid, or a file cannot be written.
    pub(crate) fn issue(&mut self, identity: &Identity) -> Result<Credentials> {
        self.issued += 1;
        let name = format!("issued-{}", self.issued);
        let trust = self.trust.as_ref().context("there are no certificates yet")?;
        let credentials = self.credentials(&name);
        trust.authority.issue(identity, &credentials.certificate, &credentials.key)?;
        self.write_client_kubeconfig(&name)?;
        Ok(credentials)
    }

    /// Stops all components, removes the folder and returns what remains.
    pub(crate) async fn clean_up(&mut self) -> Vec<String> {
        let mut remaining = Vec::new();
        for (part, mut process) in std::mem::take(&mut self.processes) {
            // No state has to be saved, so SIGKILL is enough.
            if let Err(error) = process.kill().await {
                remaining.push(format!("{}: {error:#}", part.program()));
            }
        }
        if let Err(error) = fs::remove_dir_all(&self.layout.dir)
            && error.kind() != ErrorKind::NotFound
        {
            remaining.push(format!("folder {}: {error}", self.layout.dir.display()));
        }
        remaining
    }

    fn write_certificates(&self) -> Result<Trust> {
        let layout = &self.layout;
        let authority = Authority::create("keblet-test-ca", &layout.certificate("ca"), &layout.key("ca"))?;
        let front =
            Authority::create("front-proxy-ca", &layout.certificate("front-proxy-ca"), &layout.key("front-proxy-ca"))?;
        let masters = "system:masters";
        let clients = [
            ("admin", "kubernetes-admin", Some(masters)),
            ("kubelet-client", "kube-apiserver-kubelet-client", Some(masters)),
            ("controller-manager", "system:kube-controller-manager", None),
            ("scheduler", "system:kube-scheduler", None),
            ("metrics-server", "metrics-server", Some(masters)),
        ];
        for (name, user, group) in clients {
            let identity =
                Identity { common_name: user.to_owned(), group: group.map(str::to_owned), ..Identity::default() };
            authority.issue(&identity, &layout.certificate(name), &layout.key(name))?;
            self.write_client_kubeconfig(name)?;
        }
        let proxy = Identity { common_name: "front-proxy".to_owned(), ..Identity::default() };
        front.issue(&proxy, &layout.certificate("front-proxy"), &layout.key("front-proxy"))?;
        // One for all components, as they share the address.
        let names = [
            &layout.address.to_string(),
            arguments::API_SERVICE,
            "localhost",
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
            "kubernetes.default.svc.cluster.local",
            "metrics-server.kube-system.svc",
        ];
        let serving = Identity {
            common_name: "kube-apiserver".to_owned(),
            names: names.map(str::to_owned).into(),
            ..Identity::default()
        };
        authority.issue(&serving, &layout.certificate("serving"), &layout.key("serving"))?;
        authority::write_token_keys(&layout.path("certificates/tokens.pub"), &layout.key("tokens"))?;
        let admin = Client::new(&layout.certificate("ca"), &layout.certificate("admin"), &layout.key("admin"))?;
        Ok(Trust { authority, admin })
    }

    fn credentials(&self, name: &str) -> Credentials {
        Credentials {
            certificate: self.layout.certificate(name),
            key: self.layout.key(name),
            kubeconfig: self.layout.kubeconfig(name),
        }
    }

    fn write_client_kubeconfig(&self, name: &str) -> Result<()> {
        let Credentials { certificate, key, kubeconfig } = self.credentials(name);
        self.write_kubeconfig(&kubeconfig, &json!({ "client-certificate": certificate, "client-key": key }))
    }

    fn write_kubeconfig(&self, path: &Path, user: &Value) -> Result<()> {
        let cluster = json!({ "server": self.layout.server(), "certificate-authority": self.layout.certificate("ca") });
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "keblet", "cluster": cluster }],
            "users": [{ "name": "user", "user": user }],
            "contexts": [{ "name": "keblet", "context": { "cluster": "keblet", "user": "user" } }],
            "current-context": "keblet",
        });
        fs::write(path, format!("{config:#}\n")).with_context(|| format!("cannot write {}", path.display()))
    }

    fn spawn(&mut self, part: Part) -> Result<()> {
        if self.processes.contains_key(&part) {
            bail!("{} is already running", part.program());
        }
        let program: PathBuf = self.layout.programs.join(part.program());
        let mut arguments = arguments::of(part, &self.layout);
        if part == Part::ApiServer {
            arguments.extend(self.api_server_arguments.iter().cloned());
        }
        let process = Process::start(&program, &arguments, &self.layout.path("home"), &self.layout.log(part))?;
        self.processes.insert(part, process);
        Ok(())
    }

    async fn until_ready(&mut self, part: Part) -> Result<()> {
        let (address, path) = self.layout.health(part);
        let deadline = Instant::now() + READY_DEADLINE;
        loop {
            let request = Request { method: "GET", path, body: Value::Null };
            let response = match part {
                Part::Etcd => http::send(address, &request).await,
                _ => self.admin()?.send(address, &request).await,
            };
            let problem = match response {
                Ok(response) if response.status == 200 => return Ok(()),
                Ok(response) => format!("{path} returned {} {}", response.status, response.body.trim()),
                Err(error) => format!("{error:#}"),
            };
            let program = part.program();
            let log_end = || format!("end of its log:\n{}", part::log_tail(&self.layout.log(part)));
            let process = self.processes.get_mut(&part).with_context(|| format!("{program} was not started"))?;
            if let Some(status) = process.ended()? {
                let log_end = log_end();
                self.processes.remove(&part);
                bail!("{program} exited with {status}; {log_end}");
            }
            if Instant::now() > deadline {
                bail!("{program} is not ready: {problem}; {}", log_end());
            }
            sleep(POLL).await;
        }
    }

    /// Waits for the default service account, without which no pod can be created.
    async fn until_default_account(&self) -> Result<()> {
        let path = "/api/v1/namespaces/default/serviceaccounts/default";
        let deadline = Instant::now() + READY_DEADLINE;
        loop {
            let response = self.api("GET", path, Value::Null).await?;
            if response.status == 200 {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("no default service account: {} {}", response.status, response.body.trim());
            }
            sleep(POLL).await;
        }
    }

    async fn announce_metrics(&self) -> Result<()> {
        use base64::Engine as _;
        let ca = self.layout.certificate("ca");
        let ca = fs::read(&ca).with_context(|| format!("cannot read {}", ca.display()))?;
        let ca = base64::engine::general_purpose::STANDARD.encode(ca);
        for object in objects::metrics(&self.layout, &ca) {
            self.create(&object).await?;
        }
        Ok(())
    }

    /// Creates an object unless it exists.
    async fn create(&self, object: &Object) -> Result<()> {
        let response = self.api("POST", object.path, object.body.clone()).await?;
        match response.status {
            CREATED | CONFLICT => Ok(()),
            status => bail!("cannot create {}: {status} {}", object.body["metadata"]["name"], response.body.trim()),
        }
    }

    async fn api(&self, method: &str, path: &str, body: Value) -> Result<http::Response> {
        let (address, _) = self.layout.health(Part::ApiServer);
        self.admin()?.send(address, &Request { method, path, body }).await.with_context(|| format!("{method} {path}"))
    }

    async fn etcd(&self, path: &str, body: Value) -> Result<Value> {
        let (address, _) = self.layout.health(Part::Etcd);
        let response =
            http::send(address, &Request { method: "POST", path, body }).await.with_context(|| path.to_owned())?;
        if response.status != 200 {
            bail!("{path}: etcd returned {} {}", response.status, response.body.trim());
        }
        serde_json::from_str(&response.body).with_context(|| format!("{path}: etcd's response is not JSON"))
    }

    fn admin(&self) -> Result<&Client> {
        Ok(&self.trust.as_ref().context("there are no certificates yet")?.admin)
    }

    fn signal(&self, part: Part, signal: Signal) -> Result<()> {
        self.processes.get(&part).context("it is not running")?.signal(signal);
        Ok(())
    }

    fn take(&mut self, part: Part) -> Result<Process> {
        self.processes.remove(&part).context("it is not running")
    }
}

/// Lower-case letters and digits, the characters of a bootstrap token.
fn random_word(length: usize) -> String {
    std::iter::repeat_with(fastrand::alphanumeric).take(length).map(|letter| letter.to_ascii_lowercase()).collect()
}
