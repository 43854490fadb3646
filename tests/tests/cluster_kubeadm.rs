//! kubeadm with keblet in the place of the kubelet: static control plane, TLS bootstrap, a first Deployment. The same with
//! upstream's kubelet; the times of both are printed and not judged.
//!
//! Everything runs in network and mount namespaces of its own: kubeadm uses fixed ports, and fixed folders below `/etc` and
//! `/var/lib`, which are overlays here. Nothing leaves the loopback interface and the bridge of the pods.
#![expect(clippy::unwrap_used, reason = "a failed assumption is what a test is for")]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::process::Stdio;
use std::time::Duration;
use std::time::Instant;

use keblet_peers::Agent;
use keblet_peers::Cache;
use keblet_peers::KUBEADM_IMAGES;
use keblet_peers::KUBEADM_REPOSITORY;
use keblet_peers::Node;
use keblet_peers::Options;
use keblet_peers::PROBE_IMAGE;
use keblet_peers::PodView;
use keblet_peers::PrivateContainerd;
use keblet_peers::log_tail;
use nix::mount::MsFlags;
use nix::mount::mount;
use nix::sched::CloneFlags;
use serde_json::Value;
use serde_json::json;
use tempfile::TempDir;

/// Deadline of every wait; generous, for a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(50);
/// An address for documentation (RFC 5737) on the loopback interface of the namespace: kubeadm rejects loopback addresses.
const ADDRESS: &str = "192.0.2.1";
const NODE: &str = "kubeadm-node";
/// Checks that a small test machine cannot satisfy.
const IGNORED: [&str; 4] = ["NumCPU", "Mem", "Swap", "SystemVerification"];
const CONTROL_PLANE: [&str; 4] = ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"];
const EVICTION: [&str; 5] =
    ["memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available", "imagefs.inodesFree"];
const KUBELET_CONF: &str = "/etc/kubernetes/kubelet.conf";
const BOOTSTRAP_CONF: &str = "/etc/kubernetes/bootstrap-kubelet.conf";
const KUBELET_ROOT: &str = "/var/lib/kubelet";

/// Seconds from the start of `kubeadm init`.
#[derive(Debug)]
struct Times {
    /// The agent was started; until then kubeadm creates keys, which takes a random time.
    agent: f64,
    /// It has exited.
    initialized: f64,
    /// All pods of the control plane are Ready.
    ready: f64,
}

/// A machine that kubeadm makes a node. Only usable on the thread that has entered the namespaces.
struct Machine {
    containerd: PrivateContainerd,
    node: Node,
    programs: PathBuf,
    /// Contains the agent as `kubelet`.
    bin: PathBuf,
    folder: TempDir,
}

#[test]
#[ignore = "real cluster"]
fn cluster_kubeadm_brings_up_its_control_plane_with_keblet() {
    let programs = keblet_peers::find_programs().unwrap();
    if let Some(missing) =
        ["kubeadm", KUBEADM_IMAGES].map(|name| programs.join(name)).iter().find(|path| !path.exists())
    {
        return keblet_skip::skip(&format!("needs {}: run `cargo xtask peers`", missing.display()));
    }
    let keblet = keblet_tests::standalone::program().unwrap();
    let ours = in_namespaces({
        let programs = programs.clone();
        move || {
            let mut machine = Machine::create(&programs, &keblet);
            let (times, mut agent) = machine.initialize();
            machine.deploy();
            agent = machine.bootstrap_again(agent);
            agent.end(TIMEOUT).unwrap();
            times
        }
    });
    let theirs = in_namespaces(move || {
        let mut machine = Machine::create(&programs, &programs.join("kubelet"));
        let (times, agent) = machine.initialize();
        agent.end(TIMEOUT).unwrap();
        times
    });
    for (agent, times) in [("keblet", &ours), ("kubelet", &theirs)] {
        println!(
            "{agent}: started after {:.1} s, kubeadm init {:.1} s, control plane Ready {:.1} s",
            times.agent, times.initialized, times.ready
        );
    }
}

/// Runs a function on a thread in network and mount namespaces of its own, which its child processes share.
fn in_namespaces<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let thread = std::thread::spawn(move || {
        nix::sched::unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS).unwrap();
        let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
        mount(None::<&str>, "/", None::<&str>, private, None::<&str>).unwrap();
        let busybox = Cache::locate().busybox();
        for arguments in [&["link", "set", "lo", "up"][..], &["addr", "add", &format!("{ADDRESS}/32"), "dev", "lo"]] {
            assert!(Command::new(&busybox).arg("ip").args(arguments).status().unwrap().success(), "{arguments:?}");
        }
        // Of this network namespace only.
        fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
        work()
    });
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

impl Machine {
    fn create(programs: &Path, agent: &Path) -> Self {
        let folder = tempfile::tempdir().unwrap();
        // The lower file system may be an overlay itself, which cannot be the upper one.
        mount(Some("tmpfs"), folder.path(), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        let path = |name: &str| {
            let path = folder.path().join(name);
            fs::create_dir_all(&path).unwrap();
            path
        };
        for (name, target) in [("etc", "/etc"), ("lib", "/var/lib")] {
            let (upper, work) = (path(&format!("{name}-upper")), path(&format!("{name}-work")));
            let options = format!("lowerdir={target},upperdir={},workdir={}", upper.display(), work.display());
            mount(Some("overlay"), target, Some("overlay"), MsFlags::empty(), Some(options.as_str())).unwrap();
        }
        fs::create_dir_all(KUBELET_ROOT).unwrap();
        mount(Some(&path("kubelet")), KUBELET_ROOT, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        let bin = path("bin");
        symlink(agent, bin.join("kubelet")).unwrap();
        let mut containerd = PrivateContainerd::start(&Cache::locate(), &Options::default()).unwrap();
        containerd.import(&programs.join(KUBEADM_IMAGES)).unwrap();
        let node = Node::create(containerd.ready(), &json!({})).unwrap();
        Self { containerd, node, programs: programs.to_owned(), bin, folder }
    }

    /// `kubeadm init`, with the agent started when its files are there, as systemd would have.
    fn initialize(&mut self) -> (Times, Agent) {
        let config = self.folder.path().join("kubeadm.yaml");
        let documents = self.configuration().map(|document| format!("{document:#}"));
        fs::write(&config, documents.join("\n---\n")).unwrap();
        let log = self.folder.path().join("kubeadm.log");
        let output = fs::File::create(&log).unwrap();
        let began = Instant::now();
        let mut kubeadm = self
            .command("kubeadm")
            .args(["init", "--config"])
            .arg(&config)
            .stdout(output.try_clone().unwrap())
            .stderr(output)
            .spawn()
            .unwrap();
        let files = [KUBELET_CONF, "/var/lib/kubelet/config.yaml", "/var/lib/kubelet/kubeadm-flags.env"];
        until("the files of the node", || {
            let ended = kubeadm.try_wait().unwrap();
            assert!(ended.is_none(), "kubeadm: {}", log_tail(&log, 20));
            files.iter().all(|file| Path::new(file).exists())
        });
        let (started, agent) = (began.elapsed().as_secs_f64(), self.start_agent());
        let status = kubeadm.wait().unwrap();
        let initialized = began.elapsed().as_secs_f64();
        assert!(status.success(), "kubeadm: {}\n{}", log_tail(&log, 20), log_tail(&self.node.log, 40));
        until("the control plane is Ready", || self.ready_pods("kube-system") == CONTROL_PLANE.len());
        let times = Times { agent: started, initialized, ready: began.elapsed().as_secs_f64() };
        // kubeadm refers to the certificate that the agent keeps, if the agent keeps one.
        let kubeconfig = fs::read_to_string(KUBELET_CONF).unwrap();
        assert!(kubeconfig.contains("pki/kubelet-client-current.pem"), "{kubeconfig}");
        (times, agent)
    }

    fn configuration(&self) -> [Value; 3] {
        let ready = self.containerd.ready();
        let init = json!({
            "apiVersion": "kubeadm.k8s.io/v1beta4",
            "kind": "InitConfiguration",
            "localAPIEndpoint": { "advertiseAddress": ADDRESS },
            "nodeRegistration": {
                "name": NODE,
                "criSocket": self.containerd.endpoint(),
                "taints": [],
                "imagePullPolicy": "Never",
                "ignorePreflightErrors": IGNORED,
                "kubeletExtraArgs": [{ "name": "node-ip", "value": ADDRESS }],
            },
            // CoreDNS and kube-proxy are not built here.
            "skipPhases": ["addon"],
        });
        let cluster = json!({
            "apiVersion": "kubeadm.k8s.io/v1beta4",
            "kind": "ClusterConfiguration",
            "kubernetesVersion": "v1.36.3",
            "imageRepository": KUBEADM_REPOSITORY,
            // The data need not survive a crash of the machine.
            "etcd": { "local": { "extraArgs": [{ "name": "unsafe-no-fsync", "value": "true" }] } },
        });
        let kubelet = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": ready.cgroup_root,
            "failCgroupV1": false,
            "failSwapOn": false,
            "podLogsDir": self.node.pod_logs,
            "enforceNodeAllocatable": [],
            "makeIPTablesUtilChains": false,
            // A full disk of the test machine must not affect the test.
            "evictionHard": EVICTION.iter().map(|signal| (*signal, "0%")).collect::<BTreeMap<_, _>>(),
            "imageGCHighThresholdPercent": 100,
        });
        [init, cluster, kubelet]
    }

    /// Starts the agent with the flags of kubeadm's drop-in `10-kubeadm.conf`.
    fn start_agent(&mut self) -> Agent {
        let flags = fs::read_to_string("/var/lib/kubelet/kubeadm-flags.env").unwrap();
        let flags = flags.trim().strip_prefix("KUBELET_KUBEADM_ARGS=\"").unwrap().strip_suffix('"').unwrap().to_owned();
        let mut command = Command::new(self.bin.join("kubelet"));
        command
            .arg(format!("--bootstrap-kubeconfig={BOOTSTRAP_CONF}"))
            .arg(format!("--kubeconfig={KUBELET_CONF}"))
            .arg("--config=/var/lib/kubelet/config.yaml")
            .args(flags.split_whitespace());
        Agent::start(&mut command, &self.node, &mut self.containerd).unwrap()
    }

    /// A first Deployment.
    fn deploy(&self) {
        let web = json!({
            "name": "web",
            "image": PROBE_IMAGE,
            "command": ["/probe", "web"],
            "readinessProbe": { "httpGet": { "port": 8080 }, "periodSeconds": 1 },
        });
        let spec = json!({ "terminationGracePeriodSeconds": 1, "containers": [web] });
        let deployment = json!({
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": { "name": "web" },
            "spec": {
                "replicas": 2,
                "selector": { "matchLabels": { "app": "web" } },
                "template": { "metadata": { "labels": { "app": "web" } }, "spec": spec },
            },
        });
        let file = self.folder.path().join("deployment.json");
        fs::write(&file, deployment.to_string()).unwrap();
        self.kubectl(&["apply", "-f", file.to_str().unwrap()]);
        self.kubectl(&["rollout", "status", "deployment/web", "--timeout=90s"]);
        assert_eq!(self.ready_pods("default"), 2);
    }

    /// The node loses its certificate and joins again with a token, as `kubeadm join` has it do. No container is touched.
    fn bootstrap_again(&mut self, agent: Agent) -> Agent {
        let before = self.running();
        agent.end(TIMEOUT).unwrap();
        fs::remove_file(KUBELET_CONF).unwrap();
        fs::remove_dir_all("/var/lib/kubelet/pki").unwrap();
        let token = self.output(self.command("kubeadm").args(["token", "create"]).env("KUBECONFIG", admin()));
        let kubeconfig = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "c", "cluster": {
                "server": format!("https://{ADDRESS}:6443"),
                "certificate-authority": "/etc/kubernetes/pki/ca.crt",
            } }],
            "users": [{ "name": "tls-bootstrap-token-user", "user": { "token": token.trim() } }],
            "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "tls-bootstrap-token-user" } }],
            "current-context": "c",
        });
        fs::write(BOOTSTRAP_CONF, kubeconfig.to_string()).unwrap();
        let agent = self.start_agent();
        until("a certificate", || Path::new(KUBELET_CONF).exists());
        let renewed = || {
            let requests = self.kubectl(&["get", "csr", "-o", "json"]);
            let requests: Value = serde_json::from_str(&requests).unwrap();
            requests["items"].as_array().unwrap().iter().any(|one| {
                one["spec"]["username"].as_str().is_some_and(|user| user.starts_with("system:bootstrap:"))
                    && one["status"]["certificate"].is_string()
            })
        };
        assert!(renewed(), "the certificate was not signed for the token");
        // A pod that the new identity has to start.
        self.kubectl(&["scale", "deployment/web", "--replicas=3"]);
        until("a third pod", || self.ready_pods("default") == 3);
        let after = self.running();
        assert!(before.iter().all(|one| after.contains(one)), "{before:?}\n{after:?}");
        agent
    }

    /// Ids of running containers.
    fn running(&mut self) -> Vec<String> {
        let of = |pod: PodView| pod.containers.into_iter().filter(|one| one.state == "running").map(|one| one.id);
        self.containerd.pods().unwrap().into_iter().flat_map(of).collect()
    }

    fn ready_pods(&self, namespace: &str) -> usize {
        let mut command = self.command("kubectl");
        command.args(["get", "pods", "-o", "json", "-n", namespace]).env("KUBECONFIG", admin());
        let output = command.output().unwrap();
        let Ok(pods) = serde_json::from_slice::<Value>(&output.stdout) else { return 0 };
        let ready = |pod: &&Value| {
            let conditions = pod["status"]["conditions"].as_array();
            conditions.is_some_and(|all| all.iter().any(|one| one["type"] == "Ready" && one["status"] == "True"))
        };
        pods["items"].as_array().map_or(0, |pods| pods.iter().filter(ready).count())
    }

    fn kubectl(&self, arguments: &[&str]) -> String {
        self.output(self.command("kubectl").args(arguments).env("KUBECONFIG", admin()))
    }

    fn output(&self, command: &mut Command) -> String {
        let output = command.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{command:?}: {out}{err}\n{}", log_tail(&self.node.log, 40));
        out
    }

    /// An upstream program that finds the agent as `kubelet`.
    fn command(&self, program: &str) -> Command {
        let mut path = self.bin.clone().into_os_string();
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        let mut command = Command::new(self.programs.join(program));
        command.env("PATH", path).env("HOME", self.folder.path()).stdin(Stdio::null());
        command
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Its folder can be removed only without the mount; the namespace is about to end anyway.
        let _ = nix::mount::umount2(self.folder.path(), nix::mount::MntFlags::MNT_DETACH);
    }
}

fn admin() -> &'static str {
    "/etc/kubernetes/admin.conf"
}

fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !condition() {
        assert!(Instant::now() < deadline, "timed out waiting for: {what}");
        std::thread::sleep(POLL);
    }
}
