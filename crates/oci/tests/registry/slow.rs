//! Servers that send too few bytes per second, and the callback for pauses.

use std::sync::{Arc, Mutex};

use quire_oci::registry::Pauses;

use super::*;
use testing::fake::{Reply, Server, content, reply};

/// Settings with practically unlimited attempts, so that only the time budget can end a request. The other timeouts
/// are much longer.
fn endless() -> Settings {
    Settings {
        retries: 1000,
        backoff: Duration::from_millis(1),
        stall: Duration::from_secs(15),
        patience: Duration::from_millis(400),
        ..settings()
    }
}

/// Sends one byte every 10 ms, and ends after five.
fn drops(body: impl AsRef<[u8]>) -> Reply {
    reply(200).body(body).drip(Duration::from_millis(10)).cut(5)
}

const MANIFEST: &[u8] = br#"{"schemaVersion":2}"#;
const OVERDUE: &str = "bytes within 0.4 s";

#[test]
fn small_documents_have_one_time_for_all_attempts() {
    let server = Server::start(|_, _| drops(MANIFEST));
    let there = registry(&server.host(), &endless());
    for text in [
        chain(&there.manifest("1").unwrap_err()),
        chain(&there.tags().unwrap_err()),
        chain(&there.referrers(&digest(b"x"), None).unwrap_err()),
        read(there.blob(&digest(MANIFEST), Some(MANIFEST.len() as u64), 0).as_document())
            .unwrap_err(),
    ] {
        assert!(text.contains(OVERDUE), "{text}");
    }
    // A server that never responds.
    let server = Server::start(|_, _| reply(200).delay(Duration::from_secs(5)));
    let text = chain(&registry(&server.host(), &endless()).manifest("1").unwrap_err());
    assert!(text.contains(OVERDUE), "{text}");
}

#[test]
fn tokens_are_small_documents_too() {
    let tokens = Server::start(|_, _| drops(br#"{"token":"abc"}"#));
    let realm = format!("Bearer realm=\"http://{}/token\",service=\"x\"", tokens.host());
    let server = Server::start(move |_, _| reply(401).header("www-authenticate", &realm));
    let there = registry(&server.host(), &endless());
    let text = chain(&there.manifest("1").unwrap_err());
    assert!(text.contains("cannot get an access token") && text.contains(OVERDUE), "{text}");
    let text = read(there.blob(&digest(b"x"), Some(1), 0)).unwrap_err();
    assert!(text.contains("cannot get an access token") && text.contains(OVERDUE), "{text}");
}

#[test]
fn a_slow_mirror_is_passed_over() {
    let own = Server::start(|_, _| reply(200).body(MANIFEST));
    let mirror = Server::start(|_, _| drops(MANIFEST));
    let hosts = Hosts::new(&own.host(), &format!("[host.\"http://{}\"]", mirror.host()));
    let settings = Settings { hosts: hosts.settings().hosts, ..endless() };
    let fetched = registry(&own.host(), &settings).manifest("1").unwrap();
    assert_eq!(fetched.bytes, MANIFEST);
    assert!(!mirror.seen().is_empty(), "the mirror is asked first");
}

#[test]
fn a_layer_of_single_bytes_ends() {
    let body = noise(100_000);
    let kept = body.clone();
    let server =
        Server::start(move |request, _| content(request, &kept).drip(Duration::from_millis(10)));
    let settings = Settings { retries: 2, ..endless() };
    let size = body.len() as u64;
    let text = read(registry(&server.host(), &settings).blob(&digest(&body), Some(size), 0));
    let text = text.unwrap_err();
    assert!(text.contains("(3 attempts)") && text.contains("the connection is too slow"), "{text}");
    // Each attempt continues where the last attempt stopped. This progress does not allow more attempts.
    assert_eq!(server.seen().len(), 3);
}

#[test]
fn a_layer_may_take_long_if_it_comes() {
    let body = noise(40 * (16 << 10));
    let kept = body.clone();
    // The transfer takes more than twice the time budget, but each piece extends the budget.
    let server =
        Server::start(move |request, _| content(request, &kept).pace(Duration::from_millis(25)));
    let settings = Settings { retries: 0, ..endless() };
    let size = body.len() as u64;
    let there = registry(&server.host(), &settings);
    assert_same(&read(there.blob(&digest(&body), Some(size), 0)).unwrap(), &body);
    assert_eq!(server.seen().len(), 1);
    // The time between the caller's reads does not count.
    let kept = body.clone();
    let server = Server::start(move |request, _| content(request, &kept));
    let mut reader = registry(&server.host(), &settings).blob(&digest(&body), Some(size), 0);
    let mut first = [0; 1000];
    reader.read_exact(&mut first).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    assert_same(&read(reader).unwrap(), &body[1000..]);
    assert_eq!(server.seen().len(), 1);
}

#[test]
fn each_pause_is_told() {
    let server = Server::start(|_, number| match number {
        0 | 1 => reply(503),
        _ => reply(200).body(MANIFEST),
    });
    let told = Arc::new(Mutex::new(Vec::new()));
    let list = Arc::clone(&told);
    let pauses = Pauses::to(move |pause| list.lock().unwrap().push(pause.to_string()));
    let there = registry(&server.host(), &Settings { pauses, ..settings() });
    there.manifest("1").unwrap();
    let told = told.lock().unwrap();
    let host = server.host();
    for (line, attempt) in told.iter().zip(2..) {
        let start = format!(
            "cannot fetch manifest 1 of {host}/app at {host}: the server returned status 503; \
             attempt {attempt} of 4 in "
        );
        assert!(line.starts_with(&start), "{line}");
    }
    assert_eq!(told.len(), 2);
}

#[test]
fn a_page_for_people_is_named() {
    let page = "<!DOCTYPE html><html>Sign in</html>";
    let server = Server::start(move |_, _| {
        reply(200).header("content-type", "text/html; charset=utf-8").body(page)
    });
    let there = registry(&server.host(), &settings());
    let text = chain(&there.manifest("1").unwrap_err());
    assert!(text.ends_with("the server sent text/html, not a manifest"), "{text}");
    let text = chain(&there.manifest(&digest(b"x").to_string()).unwrap_err());
    assert!(text.ends_with("the server sent text/html, not a manifest"), "{text}");
    let text = chain(&there.tags().unwrap_err());
    assert!(text.ends_with("the server sent text/html, not a list"), "{text}");
    let server = Server::start(|_, _| reply(200).body("  <html>"));
    let text = chain(&registry(&server.host(), &settings()).manifest("1").unwrap_err());
    assert!(text.ends_with("the server sent content without a type, not a manifest"), "{text}");
}
