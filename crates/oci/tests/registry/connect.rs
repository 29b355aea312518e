//! Connections that exist before the first reader.

use std::thread::sleep;

use super::*;
use testing::fake::{Reply, Request, Server, content, reply, wait_for};

const LIMIT: Duration = Duration::from_secs(60);
/// Time in which a client has read a response that the server has sent.
const ARRIVAL: Duration = Duration::from_millis(300);

fn body() -> Vec<u8> {
    noise(1000)
}

fn answer(request: &Request) -> Reply {
    content(request, &body())
}

/// A registry that needs a token and redirects, so that its first request needs three connections.
struct Stage {
    registry: Server,
    tokens: Server,
    storage: Server,
}

impl Stage {
    fn new() -> Self {
        let storage = Server::start(|request, _| answer(request));
        let tokens = Server::start(|_, _| reply(200).body(br#"{"token":"abc"}"#));
        let realm = format!("Bearer realm=\"http://{}/token\",service=\"x\"", tokens.host());
        let target = format!("http://{}/x", storage.host());
        let registry = Server::start(move |request, _| match request.header("authorization") {
            None => reply(401).header("www-authenticate", &realm),
            Some(_) => reply(307).header("location", &target),
        });
        Self { registry, tokens, storage }
    }
}

#[test]
fn the_first_reader_needs_one_round_trip_to_each_host() {
    let path = format!("/v2/app/blobs/{}", digest(&body()));
    // On a busy machine, a response may arrive late.
    let is_reused = (0..5).any(|_| {
        let Stage { registry: server, tokens, storage } = Stage::new();
        let there = registry(&server.host(), &settings());
        // As for an image with many layers.
        for _ in 0..42 {
            there.connect_ahead(&digest(&body()), LIMIT);
        }
        wait_for("the request", || storage.lines() == ["HEAD /x"]);
        assert_eq!(server.lines(), [format!("HEAD {path}"), format!("HEAD {path}")]);
        sleep(ARRIVAL);
        assert_same(&there.range(&digest(&body()), 0..9).unwrap(), &body()[..9]);
        assert_eq!(server.lines()[2..], [format!("GET {path}")]);
        assert_eq!(storage.lines()[1..], ["GET /x"]);
        assert_eq!(tokens.seen().len(), 1);
        let mut all = server.seen().into_iter().chain(storage.seen());
        all.all(|it| it.connection == 0)
    });
    assert!(is_reused);
}

#[test]
fn a_connection_in_use_needs_no_request() {
    let server = Server::start(|request, _| answer(request));
    let there = registry(&server.host(), &settings());
    there.range(&digest(&body()), 0..9).unwrap();
    there.connect_ahead(&digest(&body()), LIMIT);
    there.range(&digest(&body()), 0..9).unwrap();
    drop(there);
    server.settle();
    assert!(server.lines().iter().all(|it| it.starts_with("GET")), "{:?}", server.lines());
}

#[test]
fn only_the_first_host_is_connected() {
    let own = Server::start(|request, _| answer(request));
    let mirrors = [(); 2].map(|()| Server::start(|request, _| answer(request)));
    let text = mirrors.iter().map(|it| format!("[host.\"http://{}\"]\n", it.host()));
    let hosts = Hosts::new(&own.host(), &text.collect::<String>());
    let there = registry(&own.host(), &hosts.settings());
    there.connect_ahead(&digest(&body()), LIMIT);
    wait_for("the request", || mirrors[0].lines().len() == 1);
    there.range(&digest(&body()), 0..9).unwrap();
    let lines = mirrors[0].lines();
    assert!(lines[0].starts_with("HEAD") && lines[1].starts_with("GET"), "{lines:?}");
    drop(there);
    assert_eq!((own.seen().len(), mirrors[1].seen().len()), (0, 0));
}

/// An error is that of the first reader, who makes all of his attempts.
#[test]
fn errors_are_for_the_reader() {
    let server = Server::start(|request, number| match number {
        0..3 => reply(500),
        _ => answer(request),
    });
    let there = registry(&server.host(), &Settings { retries: 2, ..settings() });
    there.connect_ahead(&digest(&body()), LIMIT);
    wait_for("the request", || server.lines().len() == 1);
    assert_same(&there.range(&digest(&body()), 0..9).unwrap(), &body()[..9]);
    // A host that is silent ends the attempt, and nothing waits for it.
    let server = Server::start(|_, _| reply(200).delay(Duration::from_secs(5)));
    let there = registry(&server.host(), &Settings { retries: 0, ..settings() });
    there.connect_ahead(&digest(&body()), Duration::from_secs(1));
    wait_for("the request", || server.lines().len() == 1);
    let text = chain(&there.range(&digest(&body()), 0..9).unwrap_err());
    assert!(text.contains("received nothing"), "{text}");
}
