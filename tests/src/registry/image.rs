//! What is pushed: a test image of the cache with a layer more, which no runtime has yet.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;

use anyhow::Context as _;
use anyhow::Result;
use keblet_peers::Cache;
use serde_json::Value;
use serde_json::json;
use sha2::Digest as _;
use sha2::Sha256;
use tar::Archive;
use tar::Builder;
use tar::Header;

pub(super) const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
const LAYER_TYPE: &str = "application/vnd.oci.image.layer.v1.tar";
/// The file of the layer.
const OWN_FILE: &str = "own";
/// Random bytes at its begin, by which it differs from those of all other images.
const RANDOM: usize = 16;

/// Content and its digest, `sha256:…`.
pub(super) struct Blob {
    pub(super) digest: String,
    pub(super) content: Vec<u8>,
}

/// An image.
pub struct Image {
    /// Layers and configuration; the layer that no other image has is the last one.
    blobs: Vec<Blob>,
    manifest: Blob,
}

impl Image {
    /// The test image `name` of the cache with one more layer, whose file has `size` bytes.
    ///
    /// # Errors
    /// The cache has no such image.
    pub fn new(cache: &Cache, name: &str, size: usize) -> Result<Self> {
        let mut files = read_archive(cache)?;
        let index: Value = serde_json::from_slice(&files.remove("index.json").context("the archive has no index")?)?;
        let named = |entry: &&Value| entry["annotations"]["io.containerd.image.name"] == name;
        let entry = index["manifests"].as_array().and_then(|all| all.iter().find(named));
        let entry = entry.with_context(|| format!("no image {name}"))?;
        let mut manifest: Value = serde_json::from_slice(&take(&mut files, &entry["digest"])?.content)?;
        let mut config: Value = serde_json::from_slice(&take(&mut files, &manifest["config"]["digest"])?.content)?;
        let layers = manifest["layers"].as_array_mut().context("the manifest has no layers")?;
        let mut blobs = Vec::new();
        for layer in layers.iter() {
            blobs.push(take(&mut files, &layer["digest"])?);
        }
        let own = Blob::new(layer(size)?);
        layers.push(json!({ "mediaType": LAYER_TYPE, "digest": own.digest, "size": own.content.len() }));
        let diffs = config["rootfs"]["diff_ids"].as_array_mut().context("the configuration names no layers")?;
        diffs.push(json!(own.digest));
        let config = Blob::new(config.to_string().into_bytes());
        manifest["config"]["digest"] = json!(config.digest);
        manifest["config"]["size"] = json!(config.content.len());
        blobs.extend([config, own]);
        Ok(Self { blobs, manifest: Blob::new(manifest.to_string().into_bytes()) })
    }

    /// Digest of the manifest, by which the image can be pulled too.
    pub fn digest(&self) -> &str {
        &self.manifest.digest
    }

    pub(super) fn manifest(&self) -> &Blob {
        &self.manifest
    }

    pub(super) fn blobs(&self) -> &[Blob] {
        &self.blobs
    }

    /// Digest of the layer that no other image has.
    pub(super) fn own_layer(&self) -> &str {
        self.blobs.last().map_or("", |layer| &layer.digest)
    }
}

impl Blob {
    fn new(content: Vec<u8>) -> Self {
        let hex: String = Sha256::digest(&content).iter().map(|byte| format!("{byte:02x}")).collect();
        Self { digest: format!("sha256:{hex}"), content }
    }
}

/// A layer with one file.
fn layer(size: usize) -> Result<Vec<u8>> {
    let mut content = vec![0; size.max(RANDOM)];
    fastrand::Rng::new().fill(&mut content[..RANDOM]);
    let mut header = Header::new_ustar();
    header.set_mode(0o644);
    header.set_size(content.len() as u64);
    let mut layer = Builder::new(Vec::new());
    layer.append_data(&mut header, OWN_FILE, &content[..]).context("cannot pack a layer")?;
    layer.into_inner().context("cannot pack a layer")
}

/// The files of the cache's archive of images.
fn read_archive(cache: &Cache) -> Result<BTreeMap<String, Vec<u8>>> {
    let path = cache.images();
    let mut archive = Archive::new(File::open(&path).with_context(|| format!("cannot open {}", path.display()))?);
    let mut files = BTreeMap::new();
    for entry in archive.entries().with_context(|| format!("cannot read {}", path.display()))? {
        let mut entry = entry.with_context(|| format!("cannot read {}", path.display()))?;
        let name = entry.path()?.display().to_string();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).with_context(|| format!("cannot read {name} in {}", path.display()))?;
        files.insert(name, content);
    }
    Ok(files)
}

/// Takes a blob of the archive.
fn take(files: &mut BTreeMap<String, Vec<u8>>, digest: &Value) -> Result<Blob> {
    let digest = digest.as_str().context("a descriptor has no digest")?;
    let path = format!("blobs/{}", digest.replace(':', "/"));
    let content = files.remove(&path).with_context(|| format!("the archive has no {path}"))?;
    Ok(Blob { digest: digest.to_owned(), content })
}
