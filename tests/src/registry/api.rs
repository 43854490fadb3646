//! Pushes images by the registry's HTTP API.

use std::net::SocketAddr;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use reqwest::Client;
use reqwest::Method;
use reqwest::RequestBuilder;
use reqwest::StatusCode;
use reqwest::Url;
use reqwest::header::CONTENT_TYPE;
use reqwest::header::LOCATION;

use super::image::Blob;
use super::image::Image;
use super::image::MANIFEST_TYPE;

/// A client of one registry.
pub(super) struct Api {
    http: Client,
    root: String,
    user: Option<(String, String)>,
}

impl Api {
    pub(super) fn new(http: Client, registry: SocketAddr, user: Option<(&str, &str)>) -> Self {
        let user = user.map(|(name, password)| (name.to_owned(), password.to_owned()));
        Self { http, root: format!("http://{registry}/v2"), user }
    }

    /// Pushes the blobs of an image, then its manifest, which needs them.
    pub(super) async fn push(&self, repository: &str, tag: &str, image: &Image) -> Result<()> {
        for blob in image.blobs() {
            self.push_blob(repository, blob).await.with_context(|| format!("cannot push blob {}", blob.digest))?;
        }
        let url = format!("{}/{repository}/manifests/{tag}", self.root);
        let put = self.request(Method::PUT, url.parse()?).header(CONTENT_TYPE, MANIFEST_TYPE);
        send(put.body(image.manifest().content.clone()), StatusCode::CREATED).await.map(drop)
    }

    async fn push_blob(&self, repository: &str, blob: &Blob) -> Result<()> {
        let begin: Url = format!("{}/{repository}/blobs/uploads/", self.root).parse()?;
        let begun = send(self.request(Method::POST, begin.clone()), StatusCode::ACCEPTED).await?;
        let location = begun.headers().get(LOCATION).context("the upload has no location")?;
        let mut upload = begin.join(location.to_str()?)?;
        upload.query_pairs_mut().append_pair("digest", &blob.digest);
        send(self.request(Method::PUT, upload).body(blob.content.clone()), StatusCode::CREATED).await.map(drop)
    }

    fn request(&self, method: Method, url: Url) -> RequestBuilder {
        let request = self.http.request(method, url);
        match &self.user {
            Some((name, password)) => request.basic_auth(name, Some(password)),
            None => request,
        }
    }
}

async fn send(request: RequestBuilder, expected: StatusCode) -> Result<reqwest::Response> {
    let response = request.send().await?;
    let status = response.status();
    if status == expected {
        return Ok(response);
    }
    let body = response.text().await.unwrap_or_default();
    bail!("the registry answers {status} instead of {expected}: {body}")
}
