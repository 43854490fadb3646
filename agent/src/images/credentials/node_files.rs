//! Docker's configuration on the node, in the places in which upstream looks for it.

use std::env;
use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;

use super::Credential;
use super::CredentialSource;
use super::docker_config::ConfigProblem;
use super::docker_config::Entries;
use super::docker_config::parse_config_json;
use super::docker_config::parse_dockercfg;
use super::keyring::Keyring;
use crate::filesystem;

/// How long the outcome of a search is used, that there is no file as well.
const LIFETIME: Duration = Duration::from_secs(300);
/// Longest file that is read, bytes.
const MAX_FILE: usize = 4 << 20;

type Parse = fn(&[u8]) -> Result<Entries, ConfigProblem>;

/// The files that are looked for, and what the last search found.
#[derive(Debug)]
pub(super) struct NodeFiles {
    places: Arc<[(PathBuf, Parse)]>,
    last: Mutex<Option<(Instant, Arc<Keyring<Credential>>)>>,
}

impl NodeFiles {
    /// In the agent's root directory, the working directory, the home directory and `/`.
    pub(super) fn new(root: &Path) -> Self {
        let home = PathBuf::from(env::var_os("HOME").unwrap_or_default());
        let json = [root, Path::new(""), &home.join(".docker"), Path::new("/.docker")];
        let old = [root, Path::new(""), &home, Path::new("/")];
        let json = json.map(|folder| (folder.join("config.json"), parse_config_json as Parse));
        let old = old.map(|folder| (folder.join(".dockercfg"), parse_dockercfg as Parse));
        Self { places: json.into_iter().chain(old).collect(), last: Mutex::default() }
    }

    /// The entries for a repository. Reads files at most once in five minutes.
    pub(super) async fn matching(&self, repository: &str) -> Vec<Credential> {
        let mut last = self.last.lock().await;
        let known = last.as_ref().filter(|(at, _)| at.elapsed() < LIFETIME).map(|(_, known)| known.clone());
        let keyring = match known {
            Some(known) => known,
            None => {
                let places = self.places.clone();
                let found = filesystem::blocking(move || Ok(search(&places))).await.unwrap_or_default();
                last.insert((Instant::now(), Arc::new(found))).1.clone()
            }
        };
        drop(last);
        keyring.matching(repository).into_iter().cloned().collect()
    }
}

/// The first file that can be parsed, even if it has no entries.
fn search(places: &[(PathBuf, Parse)]) -> Keyring<Credential> {
    let read = |(path, parse): &(PathBuf, Parse)| match filesystem::read_bounded(path, MAX_FILE) {
        Ok(content) => match parse(&content) {
            Ok(entries) => Some(entries),
            Err(error) => {
                tracing::warn!(file = %path.display(), %error, "credentials of this file are not used");
                None
            }
        },
        Err(error) => {
            if !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) {
                tracing::warn!(file = %path.display(), %error, "cannot read credentials of registries");
            }
            None
        }
    };
    let mut keyring = Keyring::default();
    for (registry, login) in places.iter().find_map(read).unwrap_or_default() {
        keyring.add(&registry, Credential { login, source: CredentialSource::Node });
    }
    keyring
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn files(dir: &Path) -> NodeFiles {
        let places: [(PathBuf, Parse); 3] = [
            (dir.join("a/config.json"), parse_config_json),
            (dir.join("b/config.json"), parse_config_json),
            (dir.join(".dockercfg"), parse_dockercfg),
        ];
        NodeFiles { places: places.into(), last: Mutex::default() }
    }

    async fn user(files: &NodeFiles) -> Option<String> {
        files.matching("r.io/a").await.pop().map(|credential| credential.login.username)
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_valid_file_counts_for_five_minutes() {
        let dir = tempfile::tempdir().expect("a folder");
        for name in ["a", "b"] {
            fs::create_dir(dir.path().join(name)).expect("a folder");
        }
        let write = |name: &str, content: &str| fs::write(dir.path().join(name), content).expect("a file");
        let files = files(dir.path());
        assert_eq!(user(&files).await, None);
        write(".dockercfg", r#"{"r.io": {"username": "old"}}"#);
        assert_eq!(user(&files).await, None, "nothing is remembered too");
        tokio::time::advance(LIFETIME).await;
        assert_eq!(user(&files).await.as_deref(), Some("old"));
        write("a/config.json", r#"{"auths": {"r.io": {"auth": "Zm9vOmJhcg== "}}}"#);
        write("b/config.json", r#"{"auths": {"r.io": {"auth": "Zm9vOmJhcg"}}}"#);
        tokio::time::advance(LIFETIME).await;
        assert_eq!(user(&files).await.as_deref(), Some("foo"), "an invalid file is skipped");
        write("a/config.json", "{}");
        tokio::time::advance(LIFETIME).await;
        assert_eq!(user(&files).await, None, "an empty one hides the others");
    }

    #[test]
    fn the_places_are_upstreams() {
        let places: Vec<PathBuf> =
            NodeFiles::new(Path::new("/root")).places.iter().map(|(path, _)| path.clone()).collect();
        assert_eq!(places[0], Path::new("/root/config.json"));
        assert_eq!(places[1], Path::new("config.json"), "in the working directory");
        assert_eq!(places[3], Path::new("/.docker/config.json"));
        let home = PathBuf::from(env::var_os("HOME").unwrap_or_default());
        assert_eq!((&places[2], &places[6]), (&home.join(".docker/config.json"), &home.join(".dockercfg")));
        assert_eq!(places[5], Path::new(".dockercfg"), "in the working directory");
        assert_eq!((&*places[4], &*places[7]), (Path::new("/root/.dockercfg"), Path::new("/.dockercfg")));
    }
}
