//! The disk that images lie on: a size of nothing means that nobody can say when it is full.

use std::path::Path;

use crate::kernel::usage::DiskUsage;
use crate::recorder::EventType;
use crate::recorder::Recorder;
use crate::runtime::Runtime;

/// Looks at the file system on which the runtime keeps images, and tells an event if it has no size. Asks the runtime
/// once; may be cancelled at any time.
pub async fn check_disk(runtime: &Runtime, recorder: &Recorder) {
    let place = match runtime.image_fs_info().await {
        Ok(info) => info.image_filesystems.into_iter().next().and_then(|images| images.fs_id),
        Err(error) => return tracing::debug!(%error, "the runtime does not tell where images are"),
    };
    let Some(place) = place else { return tracing::debug!("the runtime tells of no image file system") };
    match DiskUsage::of(Path::new(&place.mountpoint)) {
        Ok(disk) if disk.capacity == 0 => {
            let message = "invalid capacity 0 on image filesystem";
            recorder.node_event(EventType::Warning, "InvalidDiskCapacity", message);
        }
        Ok(_) => {}
        Err(error) => tracing::debug!(path = place.mountpoint, %error, "the image file system cannot be looked at"),
    }
}

#[cfg(test)]
mod tests {
    use keblet_proto::cri::v1 as cri;
    use tonic::Status;

    use super::*;
    use crate::recorder::testing::listening;
    use crate::runtime::RuntimeOptions;
    use crate::runtime::tests::server::Socket;
    use crate::runtime::tests::server::say;
    use crate::runtime::tests::server::script;

    async fn told(mountpoint: &str) -> Vec<String> {
        let (socket, mountpoint) = (Socket::default(), mountpoint.to_owned());
        socket.serve(script(move |method, _| match method {
            "ImageFsInfo" => say(&cri::ImageFsInfoResponse {
                image_filesystems: vec![cri::FilesystemUsage {
                    fs_id: Some(cri::FilesystemIdentifier { mountpoint: mountpoint.clone() }),
                    ..Default::default()
                }],
                ..Default::default()
            }),
            _ => Err(Status::unimplemented(method.to_owned())),
        }));
        let runtime =
            Runtime::with_connector("unix:///test.sock", move || socket.clone().connect(), RuntimeOptions::default());
        let (recorder, mut told) = listening();
        check_disk(&runtime, &recorder).await;
        told.take()
    }

    #[tokio::test]
    async fn a_disk_without_size_is_told() {
        let expected = "node W InvalidDiskCapacity: invalid capacity 0 on image filesystem";
        assert_eq!(told("/proc").await, [expected], "proc has no blocks");
        assert!(told("/").await.is_empty() && told("/no/such/folder").await.is_empty());
    }
}
