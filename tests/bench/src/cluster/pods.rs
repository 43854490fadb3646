//! The pods of the cluster's workloads.

use std::path::Path;

use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use crate::manifest::LABEL;
use crate::workload::STAMPS_IN_CONTAINER;

/// Where pods of the benchmark live.
pub(super) const NAMESPACE: &str = "default";
/// Ends are spread, so that each is measured and not the queue before it.
const BETWEEN_EXITS_MS: u32 = 100;
/// Time for all pods to be up before the first one ends; the slowest agent known needs 0.15 s per pod.
const BEFORE_FIRST_EXIT_MS: u32 = 3000;
const BEFORE_FIRST_EXIT_PER_POD_MS: u32 = 250;

/// What pods are made of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Maker<'a> {
    pub(super) node: &'a str,
    pub(super) image: &'a str,
    /// Host folder of the stamps.
    pub(super) stamps: &'a Path,
}

impl Maker<'_> {
    /// Lives until SIGTERM.
    pub(super) fn lasting(&self, name: &str) -> Pod {
        self.pod(name, "Always", &["run".to_owned()])
    }

    /// The `index`th of `count` pods that end one after the other, once all of them run; each stamps its end.
    pub(super) fn ending(&self, name: &str, index: u32, count: u32) -> Pod {
        let after = BEFORE_FIRST_EXIT_MS + BEFORE_FIRST_EXIT_PER_POD_MS * count + BETWEEN_EXITS_MS * index;
        let stamp = format!("{STAMPS_IN_CONTAINER}/{name}");
        self.pod(name, "Never", &["exit", "--after-ms", &after.to_string(), "--stamp", &stamp].map(str::to_owned))
    }

    /// Ends at once, with success.
    pub(super) fn one_shot(&self, name: &str) -> Pod {
        self.pod(name, "Never", &["exit".to_owned()])
    }

    /// Host network, as in `bench pleg`; the service account's token is mounted, as in any pod.
    fn pod(&self, name: &str, restart_policy: &str, args: &[String]) -> Pod {
        let manifest = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": NAMESPACE, "labels": {LABEL.0: LABEL.1}},
            "spec": {
                "nodeName": self.node,
                "hostNetwork": true,
                "restartPolicy": restart_policy,
                "containers": [{
                    "name": "main",
                    "image": self.image,
                    "imagePullPolicy": "Never",
                    "command": ["/probe"],
                    "args": args,
                    "volumeMounts": [{"name": "stamps", "mountPath": STAMPS_IN_CONTAINER}],
                }],
                "volumes": [{"name": "stamps", "hostPath": {"path": self.stamps, "type": "Directory"}}],
            },
        });
        serde_json::from_value(manifest).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_are_bound_marked_and_spread() {
        let maker = Maker { node: "n", image: "i", stamps: Path::new("/host") };
        let pod = maker.ending("p-2", 2, 10);
        let spec = pod.spec.unwrap();
        assert_eq!(spec.node_name.as_deref(), Some("n"));
        assert_eq!(spec.restart_policy.as_deref(), Some("Never"));
        assert_eq!(
            spec.containers[0].args.as_deref().unwrap(),
            ["exit", "--after-ms", "5700", "--stamp", "/stamps/p-2"]
        );
        assert_eq!(pod.metadata.labels.unwrap()[LABEL.0], LABEL.1);
        assert_eq!(maker.lasting("p").spec.unwrap().containers[0].args.as_deref().unwrap(), ["run"]);
    }
}
