use super::*;
use crate::filesystem::testing::InPlace;
use crate::filesystem::testing::in_time;

const FILE: &str = "/etc/kubernetes/kubelet.conf";

fn config(cluster: &str, user: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{{name: c, context: {{cluster: k, user: u}}}}]\n\
         clusters: [{{name: k, cluster: {{{cluster}}}}}]\nusers: [{{name: u, user: {{{user}}}}}]\n"
    )
}

fn read(cluster: &str, user: &str) -> Access {
    parse(Path::new(FILE), &config(cluster, user)).unwrap()
}

fn refused(text: &str) -> String {
    parse(Path::new(FILE), text).unwrap_err().to_string()
}

#[test]
fn paths_start_at_the_folder_of_the_file() {
    let access = read(
        "server: 'https://10.0.0.1:6443', certificate-authority: pki/ca.crt",
        "client-certificate: /var/c.pem, client-key: k.pem",
    );
    assert_eq!(access.server, "https://10.0.0.1:6443/");
    assert_eq!(access.authority.unwrap().path(), Some(Path::new("/etc/kubernetes/pki/ca.crt")));
    let pair = access.certificate.unwrap();
    assert_eq!(pair.certificate.path(), Some(Path::new("/var/c.pem")));
    assert_eq!(pair.key.path(), Some(Path::new("/etc/kubernetes/k.pem")));
}

#[test]
fn inline_data_counts_before_files() {
    let access = read("server: a, certificate-authority: f, certificate-authority-data: aGFsbG8=", "");
    assert_eq!(access.server, "https://a/", "TLS is configured");
    assert_eq!(access.authority.unwrap().read().unwrap().expose_secret(), "hallo");
    assert_eq!(read("server: a", "").server, "http://a/");
    assert_eq!(
        read("server: a", "client-certificate: f, client-key: k").server,
        "https://a/",
        "a certificate needs TLS"
    );
}

#[test]
fn the_first_kind_of_credentials_counts() {
    let kind = |user: &str| match read("server: 'https://a'", user).credentials {
        Credentials::None => "none".to_owned(),
        Credentials::Basic(name, password) => format!("basic {name} {}", password.expose_secret()),
        Credentials::Token(token, _) => format!("token {}", token.expose_secret()),
        Credentials::TokenFile { file, meanwhile: None } => format!("file {}", file.display()),
        Credentials::TokenFile { file, meanwhile: Some(token) } => {
            format!("file {}, until then {}", file.display(), token.expose_secret())
        }
        Credentials::Exec(exec) => format!("exec {}", exec.command.unwrap()),
    };
    assert_eq!(kind(""), "none");
    assert_eq!(kind("username: a, password: b"), "basic a b");
    assert_eq!(kind("username: a"), "basic a ", "an empty password");
    assert_eq!(kind("username: '', password: '', token: t"), "token t");
    assert_eq!(kind("token: t"), "token t");
    assert_eq!(kind("token: t, tokenFile: f"), "file /etc/kubernetes/f, until then t");
    assert_eq!(kind("token: '', tokenFile: f"), "file /etc/kubernetes/f");
    let version = "apiVersion: client.authentication.k8s.io/v1";
    assert_eq!(kind(&format!("exec: {{command: bin/x, {version}}}")), "exec /etc/kubernetes/bin/x");
    assert_eq!(kind(&format!("exec: {{command: x, {version}}}")), "exec x");
    let certificate = "client-certificate: c, client-key: k";
    assert_eq!(kind(&format!("{certificate}, exec: {{command: x, {version}}}")), "none", "the certificate is enough");
    assert_eq!(kind(&format!("{certificate}, token: t, exec: {{command: x, {version}}}")), "token t");
}

#[test]
fn a_server_without_tls_gets_no_credentials() {
    let exec = "exec: {command: x, apiVersion: client.authentication.k8s.io/v1}";
    for user in ["token: t", "tokenFile: f", "username: a, password: b", exec] {
        for server in ["a", "'http://a:8080'"] {
            let access = read(&format!("server: {server}"), user);
            assert!(matches!(access.credentials, Credentials::None), "{server} with {user}");
        }
        let access = read("server: a, insecure-skip-tls-verify: true", user);
        assert!(!matches!(access.credentials, Credentials::None), "{user}");
    }
}

#[test]
fn errors_name_file_and_field() {
    let whole = [
        ("clusters: []", "current-context: is not set"),
        ("current-context: x", "current-context: no context is named \"x\""),
        ("current-context: c\ncontexts: [{name: c}]", "contexts[c].context: is missing"),
        (
            "current-context: c\ncontexts: [{name: c, context: {cluster: k}}]",
            "contexts[c].context.cluster: no cluster is named \"k\"",
        ),
    ];
    for (text, expected) in whole {
        assert_eq!(refused(text), format!("{FILE}: {expected}"));
    }
    let fields = [
        ("", "", "clusters[k].cluster.server: is not set"),
        ("server: 'ftp://x'", "", "clusters[k].cluster.server: \"ftp://x\" is neither https nor http"),
        ("server: a, certificate-authority-data: '%'", "", "clusters[k].cluster.certificate-authority-data: "),
        ("server: a, proxy-url: 'gopher://x'", "", "clusters[k].cluster.proxy-url: "),
        (
            "server: a, certificate-authority: f, insecure-skip-tls-verify: true",
            "",
            "clusters[k].cluster.insecure-skip-tls-verify: ",
        ),
        ("server: a", "client-certificate: f", "users[u].user.client-key: is missing"),
        ("server: a", "client-key: f", "users[u].user.client-certificate: is missing"),
        ("server: a", "username: a, password: b, token: t", "users[u].user.token: cannot be set together"),
        ("server: a", "username: a, password: b, tokenFile: f", "users[u].user.tokenFile: cannot be set together"),
        ("server: a", "auth-provider: {name: gcp}", "users[u].user.auth-provider: "),
        ("server: a", "as-groups: [a]", "users[u].user.as: is required beside "),
        ("server: a", "as-user-extra: {a: [b]}", "users[u].user.as: is required beside "),
        ("server: a", "as: \"a\\n\"", "users[u].user.as: \"a\\n\" has characters"),
        ("server: a", "exec: {apiVersion: client.authentication.k8s.io/v1}", "users[u].user.exec.command: is not set"),
        ("server: a", "exec: {command: x, apiVersion: v9}", "users[u].user.exec.apiVersion: "),
    ];
    for (cluster, user, expected) in fields {
        let error = refused(&config(cluster, user));
        assert!(error.starts_with(&format!("{FILE}: {expected}")), "{error}");
    }
    assert!(refused("clusters: {").starts_with("/etc/kubernetes/kubelet.conf: "));
    assert!(load(Path::new("/nonexistent/x")).unwrap_err().to_string().contains("/nonexistent/x"));
}

#[test]
fn secrets_are_not_shown() {
    let access = read("server: a", "token: sesame, client-certificate-data: aGFsbG8=, client-key-data: aGFsbG8=");
    let shown = format!("{access:?}");
    assert!(!shown.contains("sesame") && !shown.contains("hallo"), "{shown}");
}

#[test]
fn what_lies_in_place_of_a_file_is_named_and_not_waited_for() {
    for found in [InPlace::Garbage, InPlace::Huge, InPlace::Folder, InPlace::Loop] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kubelet.conf");
        found.put(&path).unwrap();
        let of_thread = path.clone();
        let loaded = in_time(move || (load(&of_thread).map(drop), Pem::File(of_thread).read().map(drop)));
        let (kubeconfig, pem) = loaded.expect("it ends");
        let error = kubeconfig.unwrap_err().to_string();
        assert!(error.contains(path.to_str().unwrap()), "{found:?}: {error}");
        pem.unwrap_err();
    }
}
