//! Calls on images.

use keblet_proto::cri::v1 as cri;

use super::Operation;
use super::Runtime;
use super::RuntimeError;
use super::features::read_all;

impl Runtime {
    /// ImageStatus; `None` if the image is not on the node.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn image_status(&self, image: cri::ImageSpec) -> Result<Option<cri::Image>, RuntimeError> {
        let name = image.image.clone();
        let message = cri::ImageStatusRequest { image: Some(image), verbose: false };
        let call = self.image_call(Operation::ImageStatus, &name);
        Ok(call.send(message, async |r| self.images().image_status(r).await).await?.image)
    }

    /// Images on this node; only what `image` names, if given.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn list_images(&self, image: Option<cri::ImageSpec>) -> Result<Vec<cri::Image>, RuntimeError> {
        let call = self.image_call(Operation::ListImages, "");
        let filter = image.map(|image| cri::ImageFilter { image: Some(image) });
        let streams = &self.inner.streams.images;
        if streams.is_on() {
            let message = cri::StreamImagesRequest { filter: filter.clone() };
            let stream = async |r| read_all(self.images().stream_images(r).await?, |m| m.images).await;
            if let Some(listed) = streams.known("StreamImages", call.send(message, stream).await) {
                return listed;
            }
        }
        let message = cri::ListImagesRequest { filter };
        Ok(call.send(message, async |r| self.images().list_images(r).await).await?.images)
    }

    /// Pulls an image and returns the reference (digest or id) it resolved to. There is no deadline.
    ///
    /// # Errors
    /// The connection breaks, or the runtime answers with an error.
    pub async fn pull_image(
        &self,
        image: cri::ImageSpec,
        auth: Option<cri::AuthConfig>,
        sandbox_config: Option<cri::PodSandboxConfig>,
    ) -> Result<String, RuntimeError> {
        let name = image.image.clone();
        let message = cri::PullImageRequest { image: Some(image), auth, sandbox_config };
        let call = self.image_call(Operation::PullImage, &name).within(None);
        let answer = call.send(message, async |r| self.images().pull_image(r).await).await?;
        call.required_id("image_ref", answer.image_ref)
    }

    /// Removes an image. Succeeds if it is not on the node.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn remove_image(&self, image: cri::ImageSpec) -> Result<(), RuntimeError> {
        let name = image.image.clone();
        let message = cri::RemoveImageRequest { image: Some(image) };
        let call = self.image_call(Operation::RemoveImage, &name);
        call.send(message, async |r| self.images().remove_image(r).await).await.map(drop)
    }

    /// Usage of the file systems of images and writable layers.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error.
    pub async fn image_fs_info(&self) -> Result<cri::ImageFsInfoResponse, RuntimeError> {
        let call = self.image_call(Operation::ImageFsInfo, "");
        call.send(cri::ImageFsInfoRequest {}, async |r| self.images().image_fs_info(r).await).await
    }
}
