//! Requests as another user.

use super::*;

/// As by client-go.
#[tokio::test]
async fn requests_impersonate_the_user_that_the_kubeconfig_names() {
    let (authority, folder) = (Authority::new(), tempfile::tempdir().expect("a folder"));
    let server = TestServer::start(&authority, |_| Reply::json(200, object("a"))).await;
    let extra = "as-user-extra: {'example.com/Scopes': [x, y], 'p%': [z]}";
    let user = format!("token: t, as: jane, as-uid: '7', as-groups: [a, b], {extra}");
    for user in [user.as_str(), "token: t, as: ''"] {
        let api = connect(&server.kubeconfig(folder.path(), &authority, user));
        objects(&api.main).get("a").await.expect("an answer");
    }
    let seen = server.seen();
    for (name, expected) in [
        ("authorization", vec!["Bearer t"]),
        ("impersonate-user", vec!["jane"]),
        ("impersonate-uid", vec!["7"]),
        ("impersonate-group", vec!["a", "b"]),
        ("impersonate-extra-example.com%2fscopes", vec!["x", "y"]),
        ("impersonate-extra-p%25", vec!["z"]),
    ] {
        let sent: Vec<_> = seen[0].headers.get_all(name).iter().map(|value| value.to_str().expect("text")).collect();
        assert_eq!(sent, expected, "{name}");
    }
    let names = || seen[1].headers.keys().map(http::HeaderName::as_str);
    assert!(names().all(|name| !name.starts_with("impersonate")), "{:?}", names().collect::<Vec<_>>());
}
