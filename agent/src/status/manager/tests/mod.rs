//! The manager against tables, arbitrary statuses, and an API server that loses answers.

mod actions;
mod merging;
mod patches;
mod sending;
mod server;
mod strategic;

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodCondition;
use k8s_openapi::api::core::v1::PodStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::Value;

use crate::model::testing;

/// A status in the API's own notation.
fn status(value: Value) -> PodStatus {
    serde_json::from_value(value).expect("a status")
}

/// `seconds` after the test's origin.
fn time(seconds: u64) -> Time {
    testing::time(Duration::from_secs(seconds))
}

fn condition<'a>(status: &'a PodStatus, type_: &str) -> Option<&'a PodCondition> {
    status.conditions.iter().flatten().find(|condition| condition.type_ == type_)
}

/// The API's copy of pod `ns/NAME`, at this resource version.
fn copy(name: &str, uid: &str, version: u64, status: PodStatus) -> Pod {
    let mut pod = Pod { status: Some(status), ..Pod::default() };
    pod.metadata.name = Some(name.to_owned());
    pod.metadata.namespace = Some("ns".to_owned());
    pod.metadata.uid = Some(uid.to_owned());
    pod.metadata.resource_version = Some(version.to_string());
    pod
}
