//! Checking credentials with a registry.

use quire_oci::registry::{Checked, Login, Secret};

use super::*;
use testing::fake::{Server, reply};

fn check(server: &Server, settings: &Settings, password: &str) -> Result<Checked, String> {
    let login = Login::new(&server.host(), settings).unwrap();
    login.check("me", &Secret::new(password.to_owned())).map_err(|error| chain(&error))
}

#[test]
fn a_token_server_is_asked() {
    // `printf me:open-sesame | base64`
    let good = "Basic bWU6b3Blbi1zZXNhbWU=";
    let server = Server::start(move |request, _| {
        if request.path.starts_with("/token") {
            return match request.header("authorization") {
                Some(value) if value == good => reply(200).body(r#"{"token":"t"}"#),
                _ => reply(401),
            };
        }
        match request.header("authorization") {
            Some("Bearer t") => reply(200),
            _ => {
                let realm = format!("http://{}/token", request.header("host").unwrap());
                reply(401)
                    .header("www-authenticate", &format!("Bearer realm=\"{realm}\",service=\"s\""))
            }
        }
    });
    // A mirror must not get the credentials.
    let mirror = Server::start(|_, _| reply(200));
    let hosts = Hosts::new(
        &server.host(),
        &format!(
            "[host.\"http://{}\"]\ncapabilities = [\"pull\", \"resolve\", \"push\"]",
            mirror.host()
        ),
    );
    assert_eq!(check(&server, &hosts.settings(), "open-sesame"), Ok(Checked::Known));
    let paths: Vec<_> = server.seen().into_iter().map(|it| it.path).collect();
    assert_eq!(paths, ["/v2/", "/token?service=s&account=me", "/v2/"]);
    let refused = check(&server, &hosts.settings(), "wrong").unwrap_err();
    assert!(refused.contains("refuses the credentials") && !refused.contains("wrong"), "{refused}");
    assert!(mirror.seen().is_empty());
}

#[test]
fn who_does_not_ask_knows_nobody() {
    let open = Server::start(|_, _| reply(200));
    assert_eq!(check(&open, &settings(), "x"), Ok(Checked::Unasked));
    let none = Server::start(|_, _| reply(404));
    assert!(check(&none, &settings(), "x").unwrap_err().contains("not found"));
}

#[test]
fn what_is_a_registry() {
    for (host, expect) in [
        ("ghcr.io", Some("ghcr.io")),
        ("https://ghcr.io/", Some("ghcr.io")),
        ("localhost:5000", Some("localhost:5000")),
        ("docker.io", Some("docker.io")),
        ("index.docker.io", Some("docker.io")),
        ("ghcr", None),
        ("ghcr.io/owner", None),
        ("http://ghcr.io", None),
        ("", None),
        ("a b.io", None),
    ] {
        let login = Login::new(host, &settings());
        assert_eq!(login.as_ref().map(Login::registry), expect, "{host}");
    }
}
