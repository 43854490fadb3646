//! TLS versions, protocols, and reloaded certificates.

use super::*;

async fn handshake(
    port: &crate::server::testing::MainPort,
    versions: &[&'static rustls::SupportedProtocolVersion],
    alpn: &[&[u8]],
) -> Result<(Option<rustls::ProtocolVersion>, Option<Vec<u8>>), String> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(port.authority.der()).expect("an authority");
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider).with_protocol_versions(versions);
    let mut config = builder.expect("versions").with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    let mut stream = port.connect(config).await.map_err(|error| error.to_string())?;
    // With TLS 1.3 the client is done before the server has agreed.
    stream
        .write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .await
        .map_err(|e| e.to_string())?;
    let mut answer = [0; 8];
    stream.read_exact(&mut answer).await.map_err(|error| error.to_string())?;
    let (_, session) = stream.get_ref();
    Ok((session.protocol_version(), session.alpn_protocol().map(<[u8]>::to_vec)))
}

#[tokio::test]
async fn versions() {
    let port = Setup::new(Some(api())).start().await;
    for version in [&TLS12, &TLS13] {
        let found = handshake(&port, &[version], &[]).await.expect("spoken").0;
        assert_eq!(found, Some(version.version));
    }
    let mut setup = Setup::new(Some(api()));
    setup.config.tls_min_version = "VersionTLS13".to_owned();
    let port = setup.start().await;
    assert!(handshake(&port, &[&TLS13], &[]).await.is_ok());
    assert!(handshake(&port, &[&TLS12], &[]).await.is_err());
}

#[tokio::test]
async fn cipher_suites() {
    let mut setup = Setup::new(Some(api()));
    // The pair of the tests has an ECDSA key, which only suites for RSA cannot use.
    setup.config.tls_cipher_suites = vec!["TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256".to_owned()];
    let port = setup.start().await;
    assert!(handshake(&port, &[&TLS12], &[]).await.is_err());
    assert!(handshake(&port, &[&TLS13], &[]).await.is_ok(), "no effect on TLS 1.3");
}

#[tokio::test]
async fn protocols() {
    let offered: [&[u8]; 2] = [b"h2", b"http/1.1"];
    let port = Setup::new(Some(api())).start().await;
    assert_eq!(handshake(&port, &[&TLS13], &offered).await.expect("agreed").1, None, "with a client authority none");
    let mut setup = Setup::new(Some(api()));
    let off = [("ReloadKubeletClientCAFile".to_owned(), false)].into();
    setup.gates = FeatureGates::new(&off).expect("a known gate");
    let port = setup.start().await;
    let agreed = handshake(&port, &[&TLS13], &[b"http/1.1"]).await.expect("agreed").1;
    assert_eq!(agreed.as_deref(), Some(&b"http/1.1"[..]), "unless it stays the same");
    let mut setup = Setup::new(Some(api()));
    setup.config.authentication.x509.client_ca_file.clear();
    let port = setup.start().await;
    assert_eq!(handshake(&port, &[&TLS13], &[b"http/1.1"]).await.expect("agreed").1.as_deref(), Some(&b"http/1.1"[..]));
    let mut config = port.client(None);
    config.alpn_protocols = vec![b"h2".to_vec()];
    let stream = port.connect(config).await.expect("a connection");
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let executor = hyper_util::rt::TokioExecutor::new();
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(executor, TokioIo::new(stream)).await.expect("HTTP/2");
    tokio::spawn(connection);
    for (path, token, status) in [("/pods", "good", 200), ("/pods", "bad", 401), ("/exec/../pods", "good", 307)] {
        let request = hyper::Request::get(format!("https://localhost{path}"))
            .header("authorization", format!("Bearer {token}"))
            .body(axum::body::Body::empty())
            .expect("a request");
        let answer = sender.send_request(request).await.expect("an answer");
        assert_eq!(answer.status(), status, "{path} {token}");
    }
}

#[tokio::test]
async fn a_new_client_authority_counts_from_the_next_request_on() {
    let port = Setup::new(Some(api())).start().await;
    let new = Authority::new("new");
    let (old_root, new_root) = (port.authority.client("root", &[]), new.client("root", &[]));
    let mut old = Session { stream: port.connect(port.client(Some(&old_root))).await.expect("a connection") };
    assert_eq!(old.ask("GET", "/pods", "").await.0, 200);
    let path = port.folder.path().join("ca.crt");
    std::fs::write(path.with_extension("new"), new.pem()).expect("written");
    std::fs::rename(path.with_extension("new"), &path).expect("renamed");
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    while port.ask(Some(&new_root), "GET", "/pods", "").await.status != 200 {
        assert!(tokio::time::Instant::now() < deadline, "the new authority is not loaded");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(old.ask("GET", "/pods", "").await.0, 401, "also on connections that are open");
    std::fs::write(&path, "nonsense").expect("written");
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(port.ask(Some(&new_root), "GET", "/pods", "").await.status, 200, "nonsense keeps what there was");
}

#[tokio::test]
async fn a_new_serving_pair_is_used_for_new_connections() {
    let port = Setup::new(Some(api())).start().await;
    let new = Authority::new("new");
    let pair = new.server("localhost");
    for (name, text) in [("tls.crt", pair.chain_pem()), ("tls.key", pair.key_pem())] {
        std::fs::write(port.folder.path().join(name), text).expect("written");
    }
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    while port.connect(client_of(&[&new], None)).await.is_err() {
        assert!(tokio::time::Instant::now() < deadline, "the new pair is not shown");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(port.connect(port.client(None)).await.is_err(), "the old one no more");
}

#[tokio::test]
async fn a_requested_certificate_is_used_as_soon_as_it_is_issued() {
    let setup = Setup::new(Some(api()));
    let (sender, serving) = tokio::sync::watch::channel(None);
    let port = setup.start_with(ServingSource::Given(serving)).await;
    assert!(port.connect(port.client(None)).await.is_err(), "no certificate yet");
    let pair = port.authority.server("localhost");
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    let key = rustls::sign::CertifiedKey::from_der(pair.chain.clone(), pair.private(), &provider).expect("a pair");
    sender.send_replace(Some(Arc::new(key)));
    assert_eq!(port.ask(None, "GET", "/nope", "").await.status, 404);
}

#[tokio::test]
async fn a_self_signed_pair_serves() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = KubeletConfiguration::default();
    let cert_dir = folder.path().to_owned();
    let source = tokio::task::spawn_blocking(move || {
        serving_files(&config, &FeatureGates::default(), &cert_dir, "localhost").expect("a pair")
    });
    let port = Setup::new(Some(api())).start_with(source.await.expect("made")).await;
    let made = std::fs::read(folder.path().join("kubelet.crt")).expect("readable");
    let mut roots = rustls::RootCertStore::empty();
    use rustls::pki_types::pem::PemObject as _;
    for certificate in rustls::pki_types::CertificateDer::pem_slice_iter(&made) {
        roots.add(certificate.expect("PEM")).expect("an authority");
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = builder.expect("versions").with_root_certificates(roots).with_no_client_auth();
    let name = ServerName::try_from("localhost").expect("a name");
    let stream = TcpStream::connect(port.address).await.expect("connected");
    let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await.expect("trusted");
    let Answer { status, .. } = exchange(stream, "GET", "/nope", "").await;
    assert_eq!(status, 404);
}
