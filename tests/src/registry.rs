//! A registry on loopback for tests: serves one of the test images under every name, demands a user and a password for some
//! repositories, and fails as a test says.
//!
//! Speaks plain HTTP, one request per connection. Runtimes use HTTP for registries on loopback.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufRead as _;
use std::io::BufReader;
use std::io::Read as _;
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::net::SocketAddr;
use std::net::TcpListener;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use keblet_peers::Cache;
use serde_json::Value;
use serde_json::json;
use sha2::Digest as _;
use sha2::Sha256;

const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// Size of the parts of a tar archive, bytes.
const TAR_BLOCK: usize = 512;

/// The first byte of a TLS handshake.
const TLS_HANDSHAKE: u8 = 22;

/// What goes wrong with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The answer has this status, and `Retry-After` if it is 429.
    Status(u16),
    /// The connection ends in the middle of a blob.
    HalfBlob,
    /// A blob is not what its digest says.
    WrongContent,
}

/// One request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Its path.
    pub path: String,
    /// Its `Authorization`.
    pub authorization: Option<String>,
    /// Status of the answer.
    pub status: u16,
}

#[derive(Default)]
struct State {
    /// `Authorization` that a repository demands.
    logins: BTreeMap<String, String>,
    /// Faults of the next requests for blobs or, for [`Fault::Status`], for manifests.
    faults: Vec<Fault>,
    requests: Vec<Request>,
}

struct Shared {
    blobs: BTreeMap<String, Vec<u8>>,
    /// Digest of the image's manifest.
    manifest: String,
    state: Mutex<State>,
}

/// A registry. Its thread ends with the process.
#[derive(Clone)]
pub struct Registry {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
    /// Bytes of the body that are sent.
    sent: usize,
}

impl Registry {
    /// Serves the test image `image` of the cache.
    ///
    /// # Errors
    /// The cache has no such image, or no port is free.
    pub fn start(cache: &Cache, image: &str) -> Result<Self> {
        let mut files = read_archive(cache)?;
        let index: Value = serde_json::from_slice(&files.remove("index.json").context("the archive has no index")?)?;
        let named = |entry: &&Value| entry["annotations"]["io.containerd.image.name"] == image;
        let entry = index["manifests"].as_array().and_then(|all| all.iter().find(named));
        let digest = entry.and_then(|entry| entry["digest"].as_str()).with_context(|| format!("no image {image}"))?;
        let blobs = files
            .into_iter()
            .filter_map(|(path, content)| Some((format!("sha256:{}", path.strip_prefix("blobs/sha256/")?), content)));
        let mut blobs: BTreeMap<String, Vec<u8>> = blobs.collect();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("no port for a registry")?;
        let address = listener.local_addr()?;
        let manifest = with_own_config(&mut blobs, digest, &address.to_string())?;
        let shared = Arc::new(Shared { blobs, manifest, state: Mutex::default() });
        let serving = shared.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = serving.clone();
                // A client that goes away is no error of the registry.
                thread::spawn(move || drop(shared.serve(stream)));
            }
        });
        Ok(Self { address, shared })
    }

    /// The full name of an image: `127.0.0.1:port/repository:1`.
    pub fn image(&self, repository: &str) -> String {
        format!("{}/{repository}:1", self.address)
    }

    /// The name of a repository in configurations of credentials.
    pub fn repository(&self, repository: &str) -> String {
        format!("{}/{repository}", self.address)
    }

    /// From now on the repository demands this `Authorization`.
    pub fn demand(&self, repository: &str, authorization: &str) {
        self.shared.lock().logins.insert(repository.to_owned(), authorization.to_owned());
    }

    /// The next request for a blob, or for a manifest, fails so.
    pub fn fail(&self, fault: Fault) {
        self.shared.lock().faults.push(fault);
    }

    /// The requests since the last call.
    pub fn take_requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.shared.lock().requests)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, mut stream: TcpStream) -> Result<()> {
        stream.set_read_timeout(Some(READ_TIMEOUT))?;
        let mut first = [0];
        if stream.peek(&mut first)? == 1 && first[0] == TLS_HANDSHAKE {
            // containerd 2 tries TLS first and takes this for a server without it.
            return Ok(write!(stream, "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")?);
        }
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let first = lines.next().context("no request")??;
        let mut words = first.split(' ');
        let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let mut authorization = None;
        for line in lines {
            let line = line?;
            let Some((name, value)) = line.split_once(':') else { break };
            if name.eq_ignore_ascii_case("authorization") {
                authorization = Some(value.trim().to_owned());
            }
        }
        let answer = self.answer(path, authorization.as_deref());
        let request = Request { path: path.to_owned(), authorization, status: answer.status };
        self.lock().requests.push(request);
        let mut head = format!("HTTP/1.1 {} .\r\nConnection: close\r\n", answer.status);
        for (name, value) in &answer.headers {
            head += &format!("{name}: {value}\r\n");
        }
        write!(stream, "{head}Content-Length: {}\r\n\r\n", answer.body.len())?;
        if method != "HEAD" {
            stream.write_all(&answer.body[..answer.sent])?;
        }
        Ok(())
    }

    fn answer(&self, path: &str, authorization: Option<&str>) -> Answer {
        let rest = path.strip_prefix("/v2/").unwrap_or_default();
        let (repository, object) = match (rest.rsplit_once("/manifests/"), rest.rsplit_once("/blobs/")) {
            (Some((repository, _)), _) => (repository, self.manifest.as_str()),
            (_, Some((repository, digest))) => (repository, digest),
            _ => return Answer::empty(404),
        };
        let is_manifest = rest.contains("/manifests/");
        let mut state = self.lock();
        if state.logins.get(repository).is_some_and(|login| authorization != Some(login)) {
            let mut denied = Answer::empty(401);
            denied.headers.push(("WWW-Authenticate", "Basic realm=\"test\"".to_owned()));
            return denied;
        }
        let concerned = |fault: &Fault| matches!(fault, Fault::Status(_)) == is_manifest;
        let fault = state.faults.iter().position(concerned).map(|at| state.faults.remove(at));
        let Some(content) = self.blobs.get(object) else { return Answer::empty(404) };
        let kind = match is_manifest {
            true => "application/vnd.oci.image.manifest.v1+json",
            false => "application/octet-stream",
        };
        let headers = vec![("Content-Type", kind.to_owned()), ("Docker-Content-Digest", object.to_owned())];
        let whole = Answer { status: 200, headers, body: content.clone(), sent: content.len() };
        match fault {
            None => whole,
            Some(Fault::HalfBlob) => Answer { sent: content.len() / 2, ..whole },
            Some(Fault::WrongContent) => Answer { body: content.iter().map(|byte| !byte).collect(), ..whole },
            Some(Fault::Status(status)) => {
                let mut answer = Answer::empty(status);
                if status == 429 {
                    answer.headers.push(("Retry-After", "1".to_owned()));
                }
                answer
            }
        }
    }
}

/// Adds the image with a configuration of its own, which no runtime has yet, and returns the digest of its manifest.
fn with_own_config(blobs: &mut BTreeMap<String, Vec<u8>>, manifest: &str, author: &str) -> Result<String> {
    let read = |digest: &str| -> Result<Value> {
        let blob = blobs.get(digest).with_context(|| format!("the archive has no blob {digest}"))?;
        Ok(serde_json::from_slice(blob)?)
    };
    let mut manifest = read(manifest)?;
    let mut config = read(manifest["config"]["digest"].as_str().context("the manifest has no configuration")?)?;
    config["author"] = json!(author);
    let config = config.to_string().into_bytes();
    manifest["config"]["size"] = json!(config.len());
    manifest["config"]["digest"] = json!(digest(&config));
    let manifest = manifest.to_string().into_bytes();
    let of_manifest = digest(&manifest);
    blobs.insert(digest(&config), config);
    blobs.insert(of_manifest.clone(), manifest);
    Ok(of_manifest)
}

fn digest(blob: &[u8]) -> String {
    let hex: String = Sha256::digest(blob).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

impl Answer {
    fn empty(status: u16) -> Self {
        Self { status, headers: Vec::new(), body: Vec::new(), sent: 0 }
    }
}

/// The regular files of the cache's archive of images: a tar archive with short names.
fn read_archive(cache: &Cache) -> Result<BTreeMap<String, Vec<u8>>> {
    let path = cache.images();
    let mut archive = BufReader::new(File::open(&path).with_context(|| format!("cannot open {}", path.display()))?);
    let mut files = BTreeMap::new();
    let mut header = [0; TAR_BLOCK];
    loop {
        archive.read_exact(&mut header).context("the archive of images ends early")?;
        if header[0] == 0 {
            return Ok(files);
        }
        let text = |range: std::ops::Range<usize>| {
            let field = &header[range];
            let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
            String::from_utf8_lossy(&field[..end]).trim().to_owned()
        };
        let (name, size) = (text(0..100), usize::from_str_radix(&text(124..136), 8)?);
        ensure!(size < 1 << 30, "{name} is too long");
        let mut content = vec![0; size.next_multiple_of(TAR_BLOCK)];
        archive.read_exact(&mut content).with_context(|| format!("{name} ends early"))?;
        content.truncate(size);
        files.insert(name, content);
    }
}
