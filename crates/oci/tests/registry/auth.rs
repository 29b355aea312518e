use quire_oci::registry::{Cause, Credential, Keyring, Secret};

use super::*;
use testing::fake::{Reply, Request, Server, content, reply};

const PASSWORD: &str = "open-sesame";

fn with_password(settings: Settings) -> Settings {
    let password = Secret::new(PASSWORD.to_owned());
    let given = Some(Credential::Password { user: "me".to_owned(), password });
    Settings { keyring: Keyring { given, ..settings.keyring }, ..settings }
}

/// Challenges the client to get a token, from the same server.
fn challenge(request: &Request) -> Reply {
    let realm = format!("http://{}/token", request.header("host").unwrap());
    let wanted = format!("Bearer realm=\"{realm}\",service=\"fake\",scope=\"repository:app:pull\"");
    reply(401).header("www-authenticate", &wanted)
}

/// Starts a registry that is also its token server. It issues a new token each time, and accepts those for which
/// `is_good` returns true.
fn guarded(
    bytes: Vec<u8>,
    is_good: impl Fn(usize, usize) -> bool + Send + Sync + 'static,
    fault: impl Fn(usize, Reply) -> Reply + Send + Sync + 'static,
) -> Server {
    let tokens = std::sync::atomic::AtomicUsize::new(0);
    let served = std::sync::atomic::AtomicUsize::new(0);
    Server::start(move |request, _| {
        if request.path.starts_with("/token") {
            let number = tokens.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            return reply(200).body(format!("{{\"token\":\"t{number}\",\"expires_in\":300}}"));
        }
        let token =
            request.header("authorization").and_then(|value| value.strip_prefix("Bearer t"));
        let Some(token) = token else { return challenge(request) };
        let number = served.load(std::sync::atomic::Ordering::SeqCst);
        if !is_good(token.parse().unwrap(), number) {
            return challenge(request);
        }
        served.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        fault(number, content(request, &bytes))
    })
}

fn shape(server: &Server) -> Vec<String> {
    let all = server.seen();
    let shapes = all.iter().map(|request| {
        let what = request.path.split(['/', '?']).nth(1).unwrap_or_default();
        let who = request.header("authorization").unwrap_or("-");
        format!("{} {what} {who}", request.method)
    });
    shapes.collect()
}

#[test]
fn a_token_is_fetched_once() {
    let server = guarded(noise(100), |_, _| true, |_, reply| reply);
    let registry = registry(&server.host(), &settings());
    for _ in 0..3 {
        assert_eq!(registry.manifest("latest").unwrap().bytes, noise(100));
    }
    let expect =
        ["GET v2 -", "GET token -", "GET v2 Bearer t0", "GET v2 Bearer t0", "GET v2 Bearer t0"];
    assert_eq!(shape(&server), expect);
    assert_eq!(server.seen()[1].path, "/token?service=fake&scope=repository%3Aapp%3Apull");
}

#[test]
fn a_token_that_expires_in_mid_blob_is_renewed() {
    let bytes = noise(500_000);
    let server = guarded(
        bytes.clone(),
        |token, served| token >= served,
        |number, reply| if number == 0 { reply.cut(200_000) } else { reply },
    );
    let reader = registry(&server.host(), &settings()).blob(&digest(&bytes), Some(500_000), 0);
    assert_same(&read(reader).unwrap(), &bytes);
    let expect = [
        "GET v2 -",
        "GET token -",
        "GET v2 Bearer t0",
        "GET v2 Bearer t0",
        "GET token -",
        "GET v2 Bearer t1",
    ];
    assert_eq!(shape(&server), expect);
}

#[test]
fn a_token_that_is_never_good_is_not_fetched_for_ever() {
    let server = guarded(Vec::new(), |_, _| false, |_, reply| reply);
    let error = registry(&server.host(), &settings()).manifest("latest").unwrap_err();
    let text = chain(&error).replace(&server.host(), "HOST");
    let expect = "cannot fetch manifest latest of HOST/app at HOST: no credentials for HOST: log in to it, if the \
                  repository exists";
    assert_eq!(text, expect);
    assert_eq!(shape(&server), ["GET v2 -", "GET token -", "GET v2 Bearer t0"]);
}

#[test]
fn passwords_go_to_the_token_server() {
    let server = guarded(noise(9), |_, _| true, |_, reply| reply);
    registry(&server.host(), &with_password(settings())).manifest("latest").unwrap();
    // `printf me:open-sesame | base64`
    let basic = "Basic bWU6b3Blbi1zZXNhbWU=";
    assert_eq!(shape(&server), ["GET v2 -", &format!("GET token {basic}"), "GET v2 Bearer t0"]);
    assert!(server.seen()[1].path.ends_with("&account=me"));
}

#[test]
fn identity_tokens_are_changed_by_post() {
    let server = guarded(noise(9), |_, _| true, |_, reply| reply);
    let given = Some(Credential::Identity(Secret::new("refresh/me".to_owned())));
    let settings = Settings { keyring: Keyring { given, ..settings().keyring }, ..settings() };
    registry(&server.host(), &settings).manifest("latest").unwrap();
    assert_eq!(shape(&server), ["GET v2 -", "POST token -", "GET v2 Bearer t0"]);
    let form = "grant_type=refresh_token&service=fake&client_id=quire&scope=repository%3Aapp%3Apull&refresh_token=refresh%2Fme";
    assert_eq!(String::from_utf8(server.seen()[1].body.clone()).unwrap(), form);
    assert_eq!(server.seen()[1].path, "/token");
}

#[test]
fn identity_tokens_go_to_no_other_host() {
    let other = Server::start(|_, _| reply(200).body(r#"{"token":"t"}"#));
    let target = format!("http://{}/token", other.host());
    let server = Server::start(move |request, _| match request.path.as_str() {
        "/token" => reply(307).header("location", &target),
        _ => {
            let host = request.header("host").unwrap();
            reply(401).header("www-authenticate", &format!("Bearer realm=\"http://{host}/token\""))
        }
    });
    let given = Some(Credential::Identity(Secret::new("refresh/me".to_owned())));
    let keyring = Keyring { given, ..settings().keyring };
    let settings = Settings { keyring, retries: 0, ..settings() };
    let error = registry(&server.host(), &settings).manifest("latest").unwrap_err();
    assert!(chain(&error).contains("it redirects credentials to"), "{}", chain(&error));
    assert_eq!(other.seen().len(), 0);
}

#[test]
fn basic_authentication() {
    let good = "Basic bWU6b3Blbi1zZXNhbWU=";
    let server = Server::start(move |request, _| match request.header("authorization") {
        Some(value) if value == good => reply(200).body("x"),
        _ => reply(401).header("www-authenticate", "Basic realm=\"x\""),
    });
    let registry_ = registry(&server.host(), &with_password(settings()));
    registry_.manifest("a").unwrap();
    registry_.manifest("b").unwrap();
    let good = format!("GET v2 {good}");
    assert_eq!(shape(&server), ["GET v2 -", &good, &good]);
    let error = registry(&server.host(), &settings()).manifest("a").unwrap_err();
    assert!(matches!(error.cause(), Cause::NoCredentials { .. }), "{error:?}");
}

#[test]
fn refused_credentials_are_not_shown() {
    let body = r#"{"errors":[{"code":"UNAUTHORIZED","message":"who are you"}]}"#;
    let basic = Server::start(move |_, _| {
        reply(401).header("www-authenticate", "Basic realm=\"x\"").body(body)
    });
    let token = Server::start(move |request, _| match request.path.starts_with("/token") {
        true => reply(401).body(body),
        false => challenge(request),
    });
    for server in [basic, token] {
        let registry = registry(&server.host(), &with_password(settings()));
        let error = registry.manifest("a").unwrap_err();
        let text = chain(&error).replace(&server.host(), "HOST");
        let expect = "cannot fetch manifest a of HOST/app at HOST: the registry refuses the \
            credentials for HOST (the server says: \"who are you\")";
        assert_eq!(text, expect);
        let everything = format!("{error:?} {:?} {registry:?}", with_password(settings()));
        assert!(!everything.contains(PASSWORD) && !everything.contains("bWU6"), "{everything}");
    }
}

#[test]
fn token_servers_have_bad_days() {
    let server =
        Server::start(|request, number| match (request.path.starts_with("/token"), number) {
            (true, 1 | 3) => reply(503),
            (true, _) => reply(200).body(r#"{"access_token":"t"}"#),
            (false, _) if request.header("authorization") == Some("Bearer t") => {
                reply(200).body("x")
            }
            (false, _) => challenge(request),
        });
    registry(&server.host(), &settings()).manifest("a").unwrap();
    let server = Server::start(|request, _| match request.path.starts_with("/token") {
        true => reply(200).body("<html>"),
        false => challenge(request),
    });
    let error = registry(&server.host(), &settings()).manifest("a").unwrap_err();
    let text = chain(&error).replace(&server.host(), "HOST");
    let end = "from HOST: the server sent content without a type, not a token";
    assert!(text.ends_with(end), "{text}");
}

#[test]
fn nobody_else_is_told_who_we_are() {
    let bytes = noise(5000);
    let blob = bytes.clone();
    let storage = Server::start(move |request, number| match number {
        0 => content(request, &blob).cut(1000),
        _ => content(request, &blob),
    });
    let target = format!("http://{}/signed?secret=1", storage.host());
    let server =
        guarded(bytes.clone(), |_, _| true, move |_, _| reply(307).header("location", &target));
    let text = format!("server = \"http://{}\"\n[header]\nx-team = \"us\"", server.host());
    let hosts = Hosts::new(&server.host(), &text);
    let registry = registry(&server.host(), &with_password(hosts.settings()));
    assert_same(&read(registry.blob(&digest(&bytes), Some(5000), 0)).unwrap(), &bytes);
    // For the remaining bytes, the client requests a new signature from the registry.
    assert_eq!(server.seen().iter().filter(|request| request.path.starts_with("/v2")).count(), 3);
    assert!(
        server
            .seen()
            .iter()
            .filter(|request| request.path.starts_with("/v2"))
            .all(|request| { request.header("x-team") == Some("us") })
    );
    assert_eq!(storage.lines(), ["GET /signed?secret=1", "GET /signed?secret=1"]);
    // A further part is requested from the storage directly.
    registry.range(&digest(&bytes), 0..10).unwrap();
    assert_eq!(storage.lines().len(), 3);
    assert_eq!(server.seen().iter().filter(|request| request.path.starts_with("/v2")).count(), 3);
    for request in storage.seen() {
        assert_eq!((request.header("authorization"), request.header("x-team")), (None, None));
    }
    assert_eq!(storage.seen()[1].header("range"), Some("bytes=1000-"));
    assert!(storage.seen()[0].header("user-agent").unwrap().starts_with("quire/"));
}

#[test]
fn addresses_with_signatures_are_not_shown() {
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let target = format!("http://{nobody}/signed?secret=1");
    let server = Server::start(move |_, _| reply(307).header("location", &target));
    let reader = registry(&server.host(), &settings()).blob(&digest(b"x"), Some(1), 0);
    let text = read(reader).unwrap_err();
    let whose = format!("the registry redirects to {nobody}: the connection is refused");
    assert!(text.contains(&whose) && !text.contains("secret"), "{text}");
    let round = Server::start(|_, _| reply(302).header("location", "/again"));
    let error = registry(&round.host(), &settings()).manifest("a").unwrap_err();
    assert!(chain(&error).ends_with("more than 5 redirects"), "{error:?}");
}

/// Without this, each of several parallel requests would wait for the helper, one after the other.
#[test]
fn a_helper_that_hangs_is_waited_for_once() {
    let folder = tempfile::tempdir().unwrap();
    let asked = folder.path().join("asked");
    let script = format!("#!/bin/sh\necho >> {}\nexec sleep 86400\n", asked.display());
    testing::script(&folder.path().join("docker-credential-hung"), &script);
    let config = folder.path().join("config.json");
    std::fs::write(&config, r#"{"credsStore":"hung"}"#).unwrap();
    let settings = settings();
    let keyring = Keyring {
        files: vec![config],
        helpers: vec![folder.path().to_owned()],
        helper_timeout: Duration::from_millis(300),
        ..settings.keyring.clone()
    };
    let server = Server::start(|request, _| challenge(request));
    let registry = registry(&server.host(), &Settings { keyring, ..settings });
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let error = chain(&registry.has_blob(&digest(b"x"), None).unwrap_err());
                assert!(error.contains("docker-credential-hung did not finish within"), "{error}");
            });
        }
    });
    assert_eq!(std::fs::read_to_string(asked).unwrap().lines().count(), 1);
}
