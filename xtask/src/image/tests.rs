use std::collections::BTreeMap;
use std::io::Read as _;
use std::time::Duration;
use std::time::SystemTime;

use serde_json::Value;

use super::*;

/// The files of a tar archive.
fn files(archive: &[u8]) -> BTreeMap<String, Vec<u8>> {
    let mut archive = tar::Archive::new(archive);
    let mut files = BTreeMap::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let path = entry.path().unwrap().to_string_lossy().into_owned();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).unwrap();
        files.insert(path, content);
    }
    files
}

#[test]
fn the_image_runs_without_anything_else() {
    let folder = tempfile::tempdir().unwrap();
    let archive = folder.path().join("image.tar");
    let program = std::env::current_exe().unwrap();
    pack(&program, "example.org/keblet:1", &archive).unwrap();
    let image = files(&fs::read(&archive).unwrap());
    let index: Value = serde_json::from_slice(&image["index.json"]).unwrap();
    let blob = |descriptor: &Value| {
        let digest = descriptor["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
        image[&format!("blobs/sha256/{digest}")].clone()
    };
    assert_eq!(index["manifests"][0]["annotations"]["io.containerd.image.name"], "example.org/keblet:1");
    let manifest: Value = serde_json::from_slice(&blob(&index["manifests"][0])).unwrap();
    let config: Value = serde_json::from_slice(&blob(&manifest["config"])).unwrap();
    assert_eq!(config["config"]["Entrypoint"][0], "/usr/bin/keblet");
    let layer = files(&blob(&manifest["layers"][0]));
    assert_eq!(layer["usr/bin/keblet"], fs::read(&program).unwrap());
    let libraries = libraries::needed(&program).unwrap();
    assert!(libraries.iter().any(|path| path.contains("/libc.so")), "{libraries:?}");
    for library in libraries {
        assert!(!layer[library.trim_start_matches('/')].is_empty(), "{library}");
    }
}

#[test]
fn manifests_name_the_image_that_is_packed() {
    let read = |path: &str| fs::read_to_string(paths::repository().join(path)).unwrap();
    let image = format!("{NAME}:{VERSION}");
    assert!(read("deploy/observe/daemonset.yaml").contains(&format!("image: {image}\n")));
    assert!(read("deploy/helm/keblet-observe/values.yaml").contains(&format!("repository: {NAME}\n")));
    assert!(read("deploy/helm/keblet-observe/Chart.yaml").contains(&format!("appVersion: {VERSION}\n")));
}

#[test]
fn an_image_is_packed_again_when_its_program_has_changed() {
    let folder = tempfile::tempdir().unwrap();
    let (program, archive) = (folder.path().join("program"), folder.path().join("archive"));
    let write = |path: &Path, seconds: u64| {
        let file = fs::File::create(path).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)).unwrap();
    };
    assert!(is_newer(&archive, &program).is_err(), "there is no program");
    write(&program, 10);
    assert!(!is_newer(&archive, &program).unwrap(), "there is no archive");
    write(&archive, 11);
    assert!(is_newer(&archive, &program).unwrap());
    write(&program, 11);
    assert!(!is_newer(&archive, &program).unwrap());
}

#[test]
fn names_need_a_tag() {
    assert!(name_and_tag("a.b/c:1").is_ok());
    for wrong in ["a.b/c", "a:", ":1", "a:5000/c", "a b:1"] {
        assert!(name_and_tag(wrong).is_err(), "{wrong}");
    }
}
