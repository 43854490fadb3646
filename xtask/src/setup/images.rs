//! Packs the test images into one archive of the OCI layout, without a registry.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use keblet_peers::BUSYBOX_IMAGE;
use keblet_peers::Cache;
use keblet_peers::PAUSE_IMAGE;
use keblet_peers::PROBE_IMAGE;
use serde_json::Value;
use serde_json::json;
use sha2::Digest as _;
use sha2::Sha256;
use tar::Builder;
use tar::EntryType;
use tar::Header;

use crate::progress::step;
use crate::system;

/// Raised when the content of an image changes but its programs do not.
const RECIPE: &str = "1";
const PASSWD: &str =
    "root:x:0:0:root:/:/bin/sh\nprobe:x:1000:1000:probe:/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n";
const GROUP: &str = "root:x:0:\nprobe:x:1000:\nnogroup:x:65534:\n";

/// An image of one layer.
pub(crate) struct Image<'a> {
    /// Name and tag.
    pub(crate) name: &'a str,
    pub(crate) layer: Cow<'a, [u8]>,
    pub(crate) entrypoint: &'a [&'a str],
    pub(crate) command: &'a [&'a str],
}

/// Packs the images unless the existing archive was made of the same programs.
///
/// # Errors
/// A program cannot be read, or the archive cannot be written.
pub(super) fn pack(cache: &Cache, probe: &Path) -> Result<()> {
    let read = |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    let (probe, busybox) = (read(probe)?, read(&cache.busybox())?);
    let archive = cache.images();
    let stamp = archive.with_extension("stamp");
    let digest = digest(&[RECIPE.as_bytes(), &probe, &busybox].concat());
    if archive.exists() && fs::read_to_string(&stamp).is_ok_and(|there| there == digest) {
        return Ok(());
    }
    step("packing the test images", || {
        let folder = archive.parent().context("the archive has no folder")?;
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let applets = system::output(Command::new(cache.busybox()).arg("--list"))?;
        let images = [
            Image {
                name: PAUSE_IMAGE,
                layer: pause_layer(&probe)?.into(),
                entrypoint: &["/pause", "run"],
                command: &[],
            },
            Image {
                name: PROBE_IMAGE,
                layer: probe_layer(&probe)?.into(),
                entrypoint: &[],
                command: &["/probe", "run"],
            },
            Image {
                name: BUSYBOX_IMAGE,
                layer: busybox_layer(&busybox, &applets)?.into(),
                entrypoint: &[],
                command: &["sh"],
            },
        ];
        write_archive(&archive, &images)?;
        fs::write(&stamp, &digest).with_context(|| format!("cannot write {}", stamp.display()))
    })
}

fn pause_layer(probe: &[u8]) -> Result<Vec<u8>> {
    let mut layer = Layer::new();
    layer.file("pause", 0o755, probe)?;
    layer.finish()
}

fn probe_layer(probe: &[u8]) -> Result<Vec<u8>> {
    let mut layer = Layer::new();
    layer.base()?;
    layer.file("probe", 0o755, probe)?;
    layer.finish()
}

fn busybox_layer(busybox: &[u8], applets: &str) -> Result<Vec<u8>> {
    let mut layer = Layer::new();
    layer.base()?;
    layer.folder("bin", 0o755)?;
    layer.file("bin/busybox", 0o755, busybox)?;
    for applet in applets.lines().filter(|&applet| applet != "busybox") {
        layer.link(&format!("bin/{applet}"), "busybox")?;
    }
    layer.finish()
}

/// A layer under construction. Times and owners are zero, so that the same content has the same digest.
pub(crate) struct Layer(Builder<Vec<u8>>);

impl Layer {
    pub(crate) fn new() -> Self {
        Self(Builder::new(Vec::new()))
    }

    /// Files that programs expect in any root file system.
    fn base(&mut self) -> Result<()> {
        self.folder("etc", 0o755)?;
        self.file("etc/passwd", 0o644, PASSWD.as_bytes())?;
        self.file("etc/group", 0o644, GROUP.as_bytes())?;
        self.folder("tmp", 0o1777)
    }

    pub(crate) fn file(&mut self, path: &str, mode: u32, content: &[u8]) -> Result<()> {
        append(&mut self.0, path, mode, EntryType::Regular, content)
    }

    pub(crate) fn folder(&mut self, path: &str, mode: u32) -> Result<()> {
        append(&mut self.0, path, mode, EntryType::Directory, &[])
    }

    pub(crate) fn link(&mut self, path: &str, target: &str) -> Result<()> {
        let mut header = header(0o777, EntryType::Symlink, 0);
        self.0.append_link(&mut header, path, target).with_context(|| format!("cannot pack {path}"))
    }

    pub(crate) fn finish(self) -> Result<Vec<u8>> {
        self.0.into_inner().context("cannot pack a layer")
    }
}

fn header(mode: u32, kind: EntryType, size: usize) -> Header {
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(size as u64);
    header
}

fn append<W: Write>(archive: &mut Builder<W>, path: &str, mode: u32, kind: EntryType, content: &[u8]) -> Result<()> {
    let mut header = header(mode, kind, content.len());
    archive.append_data(&mut header, path, content).with_context(|| format!("cannot pack {path}"))
}

/// Writes the OCI layout: an index of manifests, each of a configuration and a layer, all named by their digest.
///
/// # Errors
/// The archive cannot be written.
pub(crate) fn write_archive(path: &Path, images: &[Image<'_>]) -> Result<()> {
    let partial = path.with_extension("partial");
    let file = File::create(&partial).with_context(|| format!("cannot create {}", partial.display()))?;
    let mut archive = Builder::new(file);
    append(&mut archive, "oci-layout", 0o644, EntryType::Regular, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    let (mut manifests, mut written) = (Vec::new(), BTreeSet::new());
    let mut blob = |kind: &str, content: &[u8]| add_blob(&mut archive, &mut written, kind, content);
    for image in images {
        let layer = blob("application/vnd.oci.image.layer.v1.tar", &image.layer)?;
        let config = json!({
            "architecture": architecture(),
            "os": "linux",
            "config": {
                "Entrypoint": image.entrypoint,
                "Cmd": image.command,
                "Env": ["PATH=/bin"],
                "WorkingDir": "/",
            },
            "rootfs": { "type": "layers", "diff_ids": [layer["digest"]] },
        });
        let config = blob("application/vnd.oci.image.config.v1+json", config.to_string().as_bytes())?;
        let kind = "application/vnd.oci.image.manifest.v1+json";
        let manifest = json!({ "schemaVersion": 2, "mediaType": kind, "config": config, "layers": [layer] });
        let mut entry = blob(kind, manifest.to_string().as_bytes())?;
        entry["annotations"] = json!({ "io.containerd.image.name": image.name });
        entry["platform"] = json!({ "architecture": architecture(), "os": "linux" });
        manifests.push(entry);
    }
    let index = json!({ "schemaVersion": 2, "manifests": manifests });
    append(&mut archive, "index.json", 0o644, EntryType::Regular, index.to_string().as_bytes())?;
    archive.finish().context("cannot finish the archive")?;
    fs::rename(&partial, path).with_context(|| format!("cannot rename {} to {}", partial.display(), path.display()))
}

/// Adds a blob unless it is written already, and returns its descriptor.
fn add_blob(archive: &mut Builder<File>, written: &mut BTreeSet<String>, kind: &str, content: &[u8]) -> Result<Value> {
    let digest = digest(content);
    if written.insert(digest.clone()) {
        append(archive, &format!("blobs/sha256/{digest}"), 0o644, EntryType::Regular, content)?;
    }
    Ok(json!({ "mediaType": kind, "digest": format!("sha256:{digest}"), "size": content.len() }))
}

fn digest(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The platform's name in image manifests.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}
