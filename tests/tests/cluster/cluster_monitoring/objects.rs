//! The objects of the monitoring stack: workloads of every kind, as such stacks are published, with test programs.

use keblet_peers::BUSYBOX_IMAGE;
use keblet_tests::cluster::Tenant;
use keblet_tests::registry::Registry;
use serde_json::Value;
use serde_json::json;

/// The registry's user and password.
pub(super) const USER: (&str, &str) = ("node", "secret");
/// The same as `Authorization`, from the pull secret.
pub(super) const LOGIN: &str = "Basic bm9kZTpzZWNyZXQ=";
/// Repositories whose images are pulled.
pub(super) const REPOSITORIES: [&str; 2] = ["grafana", "prometheus"];
/// Label of the stack's nodes; its value is the namespace.
pub(super) const NODE_LABEL: &str = "keblet.dev/stack";
/// Headless and other services of the stack.
pub(super) const SERVICES: [&str; 3] = ["grafana", "prometheus", "node-exporter"];
/// Replicas of the Deployment and of the StatefulSet.
pub(super) const REPLICAS: (i32, i32) = (3, 2);
/// How long pods serve after their deletion; longer than a proxy takes to follow.
const DRAIN_SECONDS: u32 = 6;
/// A container that ends with SIGTERM.
const STAY: &str = "trap 'exit 0' TERM; while :; do sleep 1 & wait $!; done";

/// The stack in one namespace.
pub(super) struct Stack<'a> {
    pub(super) tenant: &'a Tenant,
    pub(super) registry: &'a Registry,
}

impl Stack<'_> {
    /// All objects as one list, the workloads' images with this tag. Services are last, so that they are deleted last.
    pub(super) fn list(&self, tag: &str) -> String {
        let mut items = vec![self.pull_secret(), account(), rules()];
        items.extend([self.deployment(tag), self.stateful_set(tag), self.daemon_set(tag), self.job(), self.cron_job()]);
        items.extend(REPOSITORIES.map(budget));
        items.extend(SERVICES.map(service));
        json!({ "apiVersion": "v1", "kind": "List", "items": items }).to_string()
    }

    fn image(&self, repository: &str, tag: &str) -> String {
        format!("{}:{tag}", self.registry.repository(repository))
    }

    fn pull_secret(&self) -> Value {
        let login = json!({ "auth": LOGIN.trim_start_matches("Basic ") });
        let auths = REPOSITORIES.map(|repository| (self.registry.repository(repository), login.clone()));
        let auths: serde_json::Map<_, _> = auths.into_iter().collect();
        json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "pull" },
            "type": "kubernetes.io/dockerconfigjson",
            "stringData": { ".dockerconfigjson": json!({ "auths": auths }).to_string() },
        })
    }

    /// A pod of a workload, spread over the stack's nodes.
    fn template(&self, app: &str, spec: Value) -> Value {
        let labels = json!({ "app": app });
        let mut spec = spec;
        spec["nodeSelector"] = json!({ NODE_LABEL: self.tenant.namespace });
        spec["terminationGracePeriodSeconds"] = json!(30);
        spec["topologySpreadConstraints"] = json!([{
            "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": { "matchLabels": labels },
        }]);
        json!({ "metadata": { "labels": labels }, "spec": spec })
    }

    /// Probes of all types, a pull secret, an init container that prepares a volume, no privileges.
    fn deployment(&self, tag: &str) -> Value {
        let mut web = served(&self.image("grafana", tag), &["/probe", "web", "--port", "3000"], 3000);
        web["volumeMounts"] = json!([{ "name": "storage", "mountPath": "/var/lib/grafana", "readOnly": true }]);
        web["resources"] = json!({ "requests": { "cpu": "10m", "memory": "16Mi" }, "limits": { "memory": "64Mi" } });
        web["securityContext"] = json!({
            "allowPrivilegeEscalation": false, "capabilities": { "drop": ["ALL"] }, "readOnlyRootFilesystem": true,
            "seccompProfile": { "type": "RuntimeDefault" },
        });
        let mut provision = busybox("provision", "echo provisioned > /storage/dashboards");
        provision["volumeMounts"] = json!([{ "name": "storage", "mountPath": "/storage" }]);
        let spec = json!({
            "imagePullSecrets": [{ "name": "pull" }],
            "automountServiceAccountToken": false,
            "securityContext": { "runAsNonRoot": true, "runAsUser": 65534, "fsGroup": 65534 },
            "initContainers": [provision],
            "containers": [web],
            "volumes": [{ "name": "storage", "emptyDir": {} }],
        });
        workload(
            "Deployment",
            "grafana",
            json!({
                "replicas": REPLICAS.0,
                "strategy": { "rollingUpdate": { "maxSurge": 1, "maxUnavailable": 0 } },
                "template": self.template("grafana", spec),
            }),
        )
    }

    /// A sidecar with a configuration, the pull secret of a service account.
    fn stateful_set(&self, tag: &str) -> Value {
        let mut web = served(&self.image("prometheus", tag), &["/probe", "web", "--port", "9090"], 9090);
        web["volumeMounts"] = json!([{ "name": "db", "mountPath": "/prometheus" }]);
        let mut reloader = busybox("config-reloader", STAY);
        reloader["restartPolicy"] = json!("Always");
        reloader["startupProbe"] = json!({ "exec": { "command": ["test", "-s", "/rules/alerts.yml"] },
            "periodSeconds": 1, "timeoutSeconds": 10 });
        reloader["volumeMounts"] = json!([{ "name": "rules", "mountPath": "/rules" }]);
        let spec = json!({
            "serviceAccountName": "prometheus",
            "initContainers": [reloader],
            "containers": [web],
            "volumes": [{ "name": "db", "emptyDir": {} }, { "name": "rules", "configMap": { "name": "rules" } }],
        });
        let template = self.template("prometheus", spec);
        let spec = json!({ "serviceName": "prometheus", "replicas": REPLICAS.1, "template": template });
        workload("StatefulSet", "prometheus", spec)
    }

    /// On the node's network, with folders of the node, on every node whatever its taints.
    fn daemon_set(&self, tag: &str) -> Value {
        // Both nodes are on the same machine, so each pod listens on the address of its node.
        let script = format!("echo {tag} > /tmp/index.html; exec httpd -f -p $HOST_IP:9100 -h /tmp");
        let mut web = served(BUSYBOX_IMAGE, &["sh", "-c", &script], 9100);
        web["env"] = json!([{ "name": "HOST_IP", "valueFrom": { "fieldRef": { "fieldPath": "status.hostIP" } } }]);
        web["ports"][0]["hostPort"] = json!(9100);
        web["livenessProbe"] = json!({ "exec": { "command": ["test", "-e", "/host/proc/1/stat", "-a", "-d", "/host/sys/class"] },
            "periodSeconds": 2, "timeoutSeconds": 10 });
        let (proc, sys) = (("proc", "/proc"), ("sys", "/sys"));
        web["volumeMounts"] = [proc, sys]
            .map(|(name, path)| json!({ "name": name, "mountPath": format!("/host{path}"), "readOnly": true }))
            .to_vec()
            .into();
        let folder =
            |(name, path): (&str, &str)| json!({ "name": name, "hostPath": { "path": path, "type": "Directory" } });
        let spec = json!({
            "hostNetwork": true,
            "hostPID": true,
            "automountServiceAccountToken": false,
            "tolerations": [{ "operator": "Exists" }],
            "containers": [web],
            "volumes": [folder(proc), folder(sys)],
        });
        let mut template = self.template("node-exporter", spec);
        template["spec"].as_object_mut().unwrap().remove("topologySpreadConstraints");
        workload("DaemonSet", "node-exporter", json!({ "template": template }))
    }

    /// Its sidecar ends after it.
    fn job(&self) -> Value {
        let mut side = busybox("log-shipper", STAY);
        side["restartPolicy"] = json!("Always");
        let spec = json!({
            "restartPolicy": "Never",
            "initContainers": [side, busybox("check", "true")],
            "containers": [busybox("migrate", "echo migrated")],
        });
        let spec = json!({ "completions": 2, "parallelism": 2, "template": self.template("migrate", spec) });
        json!({ "apiVersion": "batch/v1", "kind": "Job", "metadata": { "name": "migrate" }, "spec": spec })
    }

    fn cron_job(&self) -> Value {
        let spec = json!({ "restartPolicy": "OnFailure", "containers": [busybox("backup", "echo saved")] });
        let job = json!({ "spec": { "template": self.template("backup", spec) } });
        json!({
            "apiVersion": "batch/v1", "kind": "CronJob", "metadata": { "name": "backup" },
            "spec": { "schedule": "* * * * *", "concurrencyPolicy": "Forbid", "jobTemplate": job },
        })
    }
}

fn account() -> Value {
    let metadata = json!({ "name": "prometheus" });
    json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata, "imagePullSecrets": [{ "name": "pull" }] })
}

fn rules() -> Value {
    json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "rules" }, "data": { "alerts.yml": "groups: []\n" },
    })
}

/// Evictions take one pod of the app at a time.
fn budget(app: &str) -> Value {
    json!({
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": { "name": app },
        "spec": { "maxUnavailable": 1, "selector": { "matchLabels": { "app": app } } },
    })
}

fn service(app: &str) -> Value {
    let mut spec =
        json!({ "selector": { "app": app }, "ports": [{ "name": "http", "port": 80, "targetPort": "http" }] });
    if app != "grafana" {
        spec["clusterIP"] = json!("None");
    }
    json!({ "apiVersion": "v1", "kind": "Service", "metadata": { "name": app }, "spec": spec })
}

fn workload(kind: &str, app: &str, spec: Value) -> Value {
    let mut spec = spec;
    spec["selector"] = json!({ "matchLabels": { "app": app } });
    json!({ "apiVersion": "apps/v1", "kind": kind, "metadata": { "name": app }, "spec": spec })
}

/// A container that serves HTTP, is probed, and goes on serving for some time after it is to end.
fn served(image: &str, command: &[&str], port: u16) -> Value {
    let get = json!({ "path": "/", "port": "http" });
    let probe = |period: u32, threshold: u32| json!({ "httpGet": get, "periodSeconds": period, "failureThreshold": threshold, "timeoutSeconds": 10 });
    json!({
        "name": "web", "image": image, "imagePullPolicy": "IfNotPresent", "command": command,
        "ports": [{ "name": "http", "containerPort": port }],
        "startupProbe": probe(1, 60),
        "readinessProbe": probe(1, 3),
        "livenessProbe": probe(2, 3),
        "lifecycle": { "preStop": { "sleep": { "seconds": DRAIN_SECONDS } } },
    })
}

fn busybox(name: &str, script: &str) -> Value {
    json!({ "name": name, "image": BUSYBOX_IMAGE, "imagePullPolicy": "IfNotPresent", "command": ["sh", "-c", script] })
}
