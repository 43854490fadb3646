//! In-place resizes through the API server's subresource (KEP-1287): cgroups of pod and containers, the process that goes on,
//! conditions and statuses.

use std::time::Duration;
use std::time::Instant;

use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::core::v1::Pod;
use keblet_tests::cgroups::CgroupFiles;
use keblet_tests::cluster::Tenant;
use kube::api::ListParams;
use kube::api::Patch;
use kube::api::PatchParams;
use serde_json::Value;
use serde_json::json;
