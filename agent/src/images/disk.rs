//! Check of the image file system: a capacity of 0 makes disk usage incalculable.

use std::path::Path;

use crate::kernel::usage::DiskUsage;
use crate::recorder::EventType;
use crate::recorder::Recorder;
use crate::runtime::Runtime;

/// Records event `InvalidDiskCapacity` on the node if the file system of the runtime's images has capacity 0. One
/// ImageFsInfo call; may be cancelled.
pub async fn check_disk(runtime: &Runtime, recorder: &Recorder) {
    let filesystem = match runtime.image_fs_info().await {
        Ok(info) => info.image_filesystems.into_iter().next().and_then(|images| images.fs_id),
        Err(error) => return tracing::debug!(%error, "cannot get the image file system from the runtime"),
    };
    let Some(filesystem) = filesystem else { return tracing::debug!("the runtime reports no image file system") };
    let mountpoint = filesystem.mountpoint;
    // statvfs blocks while a network file system does not answer.
    let path = mountpoint.clone();
    let usage = match tokio::task::spawn_blocking(move || DiskUsage::of(Path::new(&path))).await {
        Ok(usage) => usage,
        Err(error) => return tracing::debug!(path = mountpoint, %error, "check of the image file system failed"),
    };
    match usage {
        Ok(disk) if disk.capacity == 0 => {
            let message = "invalid capacity 0 on image filesystem";
            recorder.node_event(EventType::Warning, "InvalidDiskCapacity", message);
        }
        Ok(_) => {}
        Err(error) => tracing::debug!(path = mountpoint, %error, "cannot get the usage of the image file system"),
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

    async fn events(mountpoint: &str) -> Vec<String> {
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
        let (recorder, mut recorded) = listening();
        check_disk(&runtime, &recorder).await;
        recorded.take()
    }

    #[tokio::test]
    async fn a_file_system_without_capacity_is_reported() {
        let expected = "node W InvalidDiskCapacity: invalid capacity 0 on image filesystem";
        assert_eq!(events("/proc").await, [expected], "proc has no blocks");
        assert!(events("/").await.is_empty() && events("/no/such/folder").await.is_empty());
    }
}
