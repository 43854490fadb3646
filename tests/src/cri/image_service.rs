//! The gRPC ImageService: maps requests to methods and object names for the engine.

use std::sync::Arc;

use keblet_proto::cri::v1;
use tokio_stream::Iter;
use tonic::Request;
use tonic::Response;
use tonic::Status;

use super::engine::Engine;
use super::method::Method;

/// Server side of `runtime.v1.ImageService`.
pub(super) struct ImageApi(pub(super) Arc<Engine>);

fn named(spec: Option<&v1::ImageSpec>) -> String {
    spec.map(|spec| spec.image.clone()).unwrap_or_default()
}

#[tonic::async_trait]
impl v1::image_service_server::ImageService for ImageApi {
    async fn list_images(
        &self,
        request: Request<v1::ListImagesRequest>,
    ) -> Result<Response<v1::ListImagesResponse>, Status> {
        let (engine, filter) = (Arc::clone(&self.0), request.into_inner().filter);
        let work = async move {
            engine.elapse(engine.options.timings.list).await;
            Ok(v1::ListImagesResponse { images: engine.state().images.list(filter.as_ref()) })
        };
        self.0.call(Method::ListImages, String::new(), work).await
    }

    type StreamImagesStream = Iter<std::vec::IntoIter<Result<v1::StreamImagesResponse, Status>>>;

    async fn stream_images(
        &self,
        request: Request<v1::StreamImagesRequest>,
    ) -> Result<Response<Self::StreamImagesStream>, Status> {
        let (engine, filter) = (Arc::clone(&self.0), request.into_inner().filter);
        let work = async move {
            engine.streaming_lists()?;
            let images = engine.state().images.list(filter.as_ref());
            let pages = images.into_iter().map(|image| Ok(v1::StreamImagesResponse { images: vec![image] }));
            Ok(tokio_stream::iter(pages.collect::<Vec<_>>()))
        };
        self.0.call(Method::StreamImages, String::new(), work).await
    }

    async fn image_status(
        &self,
        request: Request<v1::ImageStatusRequest>,
    ) -> Result<Response<v1::ImageStatusResponse>, Status> {
        let (engine, image) = (Arc::clone(&self.0), request.into_inner().image);
        let object = named(image.as_ref());
        self.0.call(Method::ImageStatus, object, async move { Ok(engine.image_status(image).await) }).await
    }

    async fn pull_image(
        &self,
        request: Request<v1::PullImageRequest>,
    ) -> Result<Response<v1::PullImageResponse>, Status> {
        let (engine, image) = (Arc::clone(&self.0), request.into_inner().image);
        let object = named(image.as_ref());
        let work = async move { Ok(v1::PullImageResponse { image_ref: engine.pull_image(image).await? }) };
        self.0.call(Method::PullImage, object, work).await
    }

    async fn remove_image(
        &self,
        request: Request<v1::RemoveImageRequest>,
    ) -> Result<Response<v1::RemoveImageResponse>, Status> {
        let (engine, name) = (Arc::clone(&self.0), named(request.into_inner().image.as_ref()));
        let object = name.clone();
        let work = async move {
            engine.state().images.remove(&name);
            Ok(v1::RemoveImageResponse {})
        };
        self.0.call(Method::RemoveImage, object, work).await
    }

    async fn image_fs_info(
        &self,
        _request: Request<v1::ImageFsInfoRequest>,
    ) -> Result<Response<v1::ImageFsInfoResponse>, Status> {
        let engine = Arc::clone(&self.0);
        self.0.call(Method::ImageFsInfo, String::new(), async move { Ok(engine.image_fs_info()) }).await
    }
}
