//! Builds static pods whose containers run simulated programs.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Pod as ApiPod;
use k8s_openapi::api::core::v1::PodSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use keblet::model::Pod;

/// A pod builder: static, on the host network, `restartPolicy: Always`, a grace period of 5 s.
#[derive(Clone, Debug)]
pub struct PodOf(ApiPod);

/// A static pod `default/NAME` with UID `NAME-uid`.
pub fn pod(name: &str) -> PodOf {
    let source = ("kubernetes.io/config.source".to_owned(), "file".to_owned());
    PodOf(ApiPod {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: Some("default".to_owned()),
            uid: Some(format!("{name}-uid")),
            annotations: Some([source].into()),
            ..ObjectMeta::default()
        },
        spec: Some(PodSpec {
            host_network: Some(true),
            dns_policy: Some("Default".to_owned()),
            restart_policy: Some("Always".to_owned()),
            termination_grace_period_seconds: Some(5),
            enable_service_links: Some(false),
            ..PodSpec::default()
        }),
        status: None,
    })
}

impl PodOf {
    /// Adds a container that runs this program.
    pub fn running(mut self, container: &str, program: &str) -> Self {
        self.spec().containers.push(container_of(container, program));
        self
    }

    /// Adds an init container that runs this program.
    pub fn after(mut self, container: &str, program: &str) -> Self {
        self.spec().init_containers.get_or_insert_default().push(container_of(container, program));
        self
    }

    /// Adds a sidecar that runs this program.
    pub fn sidecar(mut self, container: &str, program: &str) -> Self {
        let sidecar = Container { restart_policy: Some("Always".to_owned()), ..container_of(container, program) };
        self.spec().init_containers.get_or_insert_default().push(sidecar);
        self
    }

    /// Sets the restart policy.
    pub fn restarted(mut self, policy: &str) -> Self {
        self.spec().restart_policy = Some(policy.to_owned());
        self
    }

    /// Uses the host's PID namespace.
    pub fn host_pid(mut self) -> Self {
        self.spec().host_pid = Some(true);
        self
    }

    /// Uses a network namespace of its own.
    pub fn own_network(mut self) -> Self {
        self.spec().host_network = None;
        self
    }

    /// Makes the pod one of the API server instead of a file.
    pub fn from_api(mut self) -> Self {
        self.0.metadata.annotations = Some([("kubernetes.io/config.source".to_owned(), "api".to_owned())].into());
        self
    }

    /// Marks the pod as deleted.
    pub fn deleting(mut self) -> Self {
        self.0.metadata.deletion_timestamp = Some(Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH));
        self.0.metadata.deletion_grace_period_seconds = Some(5);
        self
    }

    /// Sets another UID.
    pub fn uid(mut self, uid: &str) -> Self {
        self.0.metadata.uid = Some(uid.to_owned());
        self
    }

    /// Builds the pod.
    pub fn build(self) -> Pod {
        Arc::new(self.0)
    }

    fn spec(&mut self) -> &mut PodSpec {
        self.0.spec.get_or_insert_default()
    }
}

fn container_of(name: &str, program: &str) -> Container {
    Container {
        name: name.to_owned(),
        image: Some("busybox".to_owned()),
        image_pull_policy: Some("IfNotPresent".to_owned()),
        command: Some(program.split_whitespace().map(str::to_owned).collect()),
        termination_message_path: Some("/dev/termination-log".to_owned()),
        termination_message_policy: Some("File".to_owned()),
        ..Container::default()
    }
}
