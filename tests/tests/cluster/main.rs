//! The agent as a node of a real cluster: controllers, kubectl, and faults of the control plane.
//!
//! Most tests share one control plane; those that break it have one of their own. With `KEBLET_TEST_AGENT` they run
//! against another kubelet, which has to pass them as well.
#![expect(clippy::unwrap_used, reason = "a failed assumption is what a test is for")]

mod cluster_access;
mod cluster_admission;
mod cluster_block_volumes;
mod cluster_credentials;
mod cluster_daemonset;
mod cluster_events;
mod cluster_eviction;
mod cluster_faults;
mod cluster_iscsi;
mod cluster_join;
mod cluster_kubectl;
mod cluster_log_floods;
mod cluster_malicious_pods;
mod cluster_metrics;
mod cluster_monitoring;
mod cluster_node;
mod cluster_objects;
mod cluster_observe;
mod cluster_pod_fields;
mod cluster_pod_lifecycle;
mod cluster_pod_volumes;
mod cluster_pods;
mod cluster_probes;
mod cluster_resize;
mod cluster_runtime_classes;
mod cluster_server;
mod cluster_streams;
mod cluster_takeover;
mod cluster_trust;
mod cluster_websockets;
mod cluster_workloads;
