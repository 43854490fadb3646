//! The kubeconfig that is written during TLS bootstrap, and whether there is a usable one already.

use std::path::Path;
use std::time::SystemTime;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use secrecy::ExposeSecret as _;

use super::pair::Pair;
use super::store;
use super::store::StoreError;
use crate::apiserver::kubeconfig;
use crate::apiserver::kubeconfig::Access;
use crate::apiserver::kubeconfig::Pem;

/// Whether a kubeconfig needs no bootstrap: it is valid, holds a client certificate, and no certificate of its chain
/// has expired. Blocks.
///
/// # Errors
/// The file exists but cannot be accessed.
pub(super) fn usable(file: &Path, now: SystemTime) -> Result<bool, StoreError> {
    let there = file.try_exists();
    let there = there.map_err(|source| StoreError::File { verb: "access", path: file.to_owned(), source })?;
    if !there {
        return Ok(false);
    }
    let pair = match kubeconfig::load(file) {
        Ok(Access { certificate: Some(pair), .. }) => pair,
        Ok(_) => {
            tracing::info!(kubeconfig = %file.display(), "it holds no client certificate");
            return Ok(false);
        }
        Err(error) => {
            tracing::warn!("{error}");
            return Ok(false);
        }
    };
    let texts = pair.certificate.read().and_then(|chain| Ok((chain, pair.key.read()?)));
    let good = texts.ok().and_then(|(chain, key)| Pair::parse(chain.expose_secret(), key.expose_secret()).ok());
    let good = good.filter(|pair| !pair.any_expired(now));
    if good.is_none() {
        tracing::info!(kubeconfig = %file.display(), "its client certificate is missing, unusable or has expired");
    }
    Ok(good.is_some())
}

/// Writes a kubeconfig (mode 0600) for the server of `access` with certificate and key in `pair_file`. Blocks.
///
/// # Errors
/// It cannot be written.
pub fn write(file: &Path, access: &Access, pair_file: &Path) -> Result<(), StoreError> {
    if let Some(folder) = file.parent() {
        let made = std::fs::create_dir_all(folder);
        made.map_err(|source| StoreError::File { verb: "create", path: folder.to_owned(), source })?;
    }
    store::write_private(file, &text(access, pair_file))
}

fn text(access: &Access, pair_file: &Path) -> String {
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let server = access.server.to_string();
    let mut cluster = format!("    server: {}\n", quoted(server.trim_end_matches('/')));
    match &access.authority {
        Some(Pem::File(path)) => {
            // A relative path would be one of the folder of this kubeconfig.
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            cluster += &format!("    certificate-authority: {}\n", quoted(&path.to_string_lossy()));
        }
        Some(Pem::Inline(pem)) => {
            cluster += &format!("    certificate-authority-data: {}\n", STANDARD.encode(pem.expose_secret()));
        }
        None => {}
    }
    if access.insecure {
        cluster += "    insecure-skip-tls-verify: true\n";
    }
    if let Some(name) = &access.server_name {
        cluster += &format!("    tls-server-name: {}\n", quoted(name));
    }
    if let Some(proxy) = &access.proxy {
        cluster += &format!("    proxy-url: {}\n", quoted(&proxy.to_string()));
    }
    let pair = quoted(&pair_file.to_string_lossy());
    format!(
        "apiVersion: v1\nkind: Config\nclusters:\n- name: default-cluster\n  cluster:\n{cluster}\
         contexts:\n- name: default-context\n  context:\n    cluster: default-cluster\n    namespace: default\n    user: default-auth\n\
         current-context: default-context\n\
         users:\n- name: default-auth\n  user:\n    client-certificate: {pair}\n    client-key: {pair}\n"
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::time::Duration;

    use super::super::testing::pair;
    use super::*;

    const BOOTSTRAP: &str = "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
        contexts: [{name: c, context: {cluster: k, user: u}}]\n\
        clusters: [{name: k, cluster: {server: 'https://10.0.0.1:6443', certificate-authority-data: aGFsbG8=}}]\n\
        users: [{name: u, user: {token: abc.def}}]\n";

    #[test]
    fn a_written_kubeconfig_is_usable_until_its_certificate_expires() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |second| SystemTime::UNIX_EPOCH + Duration::from_secs(second);
        let (file, pem) = (folder.path().join("etc/kubelet.conf"), folder.path().join("current.pem"));
        assert!(!usable(&file, at(50)).expect("no file is no error"));
        let access = kubeconfig::parse(Path::new("/x/bootstrap"), BOOTSTRAP).expect("access");
        write(&file, &access, &pem).expect("written");
        assert_eq!(std::fs::metadata(&file).expect("a file").permissions().mode() & 0o777, 0o600);
        assert!(!usable(&file, at(50)).expect("readable"), "no certificate yet");
        std::fs::write(&pem, pair("system:node:n", 0, 100).text().expose_secret()).expect("written");
        assert!(usable(&file, at(50)).expect("readable"));
        assert!(!usable(&file, at(101)).expect("readable"), "expired");
        let read = kubeconfig::load(&file).expect("access");
        assert_eq!(read.server, "https://10.0.0.1:6443/");
        assert_eq!(read.authority.expect("an authority").read().expect("text").expose_secret(), "hallo");
        assert_eq!(read.certificate.expect("a pair").key.path(), Some(pem.as_path()));
        std::fs::write(&file, BOOTSTRAP).expect("written");
        assert!(!usable(&file, at(50)).expect("readable"), "a token is no certificate");
        std::fs::write(&file, "{").expect("written");
        assert!(!usable(&file, at(50)).expect("readable"), "nonsense is replaced");
    }

    #[test]
    fn a_written_kubeconfig_reaches_the_server_as_the_bootstrap_kubeconfig_does() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("kubelet.conf");
        let written = |cluster: &str| {
            let bootstrap = BOOTSTRAP.replace("certificate-authority-data: aGFsbG8=", cluster);
            let access = kubeconfig::parse(Path::new("bootstrap.conf"), &bootstrap).expect("access");
            write(&file, &access, &folder.path().join("current.pem")).expect("written");
            kubeconfig::load(&file).expect("access")
        };
        let read =
            written("certificate-authority: pki/ca.crt, tls-server-name: api.test, proxy-url: 'http://10.0.0.9:3128'");
        assert_eq!(read.server_name.as_deref(), Some("api.test"));
        assert_eq!(read.proxy.expect("a proxy"), "http://10.0.0.9:3128/");
        let here = std::env::current_dir().expect("a working directory");
        assert_eq!(read.authority.expect("an authority").path(), Some(here.join("pki/ca.crt").as_path()));
        assert!(!read.insecure);
        let read = written("insecure-skip-tls-verify: true");
        assert!(read.insecure && read.authority.is_none() && read.server_name.is_none() && read.proxy.is_none());
    }
}
