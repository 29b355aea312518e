//! Pulls from hostile mirrors that announce the uncompressed tars of layers.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use oci::registry::{PEER_HEADER, PEER_LAYERS};
use quire_transfer::import::{ImportOptions, Limits};
use quire_transfer::pull::{Layers, PullError};

use super::pulls::{Served, image, layer, pull_name, pull_with, served};
use super::*;
use crate::build::{Pack, Tar, pack};
use crate::home::{Home, usual_wishes};
use testing::fake::{Request, Server, content, reply};

fn start(served: &Arc<Served>) -> Server {
    let truth = Arc::clone(served);
    Server::start(move |request, _| truth.answer(request))
}

/// Starts a peer that has the tar of the layer, and announces this number of bytes.
fn peer(served: &Arc<Served>, announced: u64, is_endless: bool) -> Server {
    let truth = Arc::clone(served);
    Server::start(move |request: &Request, _| {
        let tar = &truth.layers[0].tar;
        let reply = match request.path.contains(&digest(tar).to_string()) {
            true if request.method == "HEAD" => {
                reply(200).header("content-length", &announced.to_string())
            }
            true if is_endless => reply(200).body(tar).endless(),
            true => reply(200).body(tar),
            false => reply(404),
        };
        reply.header(PEER_HEADER, PEER_LAYERS)
    })
}

/// Pulls past a peer. Returns whether it was asked to send the tar.
fn is_read(served: &Arc<Served>, announced: u64, is_endless: bool) -> bool {
    let (origin, peer) = (start(served), peer(served, announced, is_endless));
    let text = format!(
        "server = \"http://{}\"\n[host.\"http://{}\"]\ncapabilities = [\"pull\"]\n",
        origin.host(),
        peer.host()
    );
    let hosts = Hosts::new(&origin.host(), &text);
    let home = Home::new();
    let name = format!("{}/app:1", origin.host());
    let pulled = pull_name(&home, &name, Layers::Forget, &hosts.settings());
    assert_eq!(image(pulled), home.imported(served), "{announced}");
    assert!(home.is_sound());
    let tar = digest(&served.layers[0].tar).to_string();
    assert!(!origin.lines().iter().any(|it| it.contains(&tar)), "{announced}");
    let lines = peer.lines();
    assert!(lines.iter().any(|it| it.starts_with("HEAD ") && it.contains(&tar)), "{lines:?}");
    // Much less than an endless body, but more than the tar, because of the buffers of sockets.
    assert!(peer.sent.load(Ordering::SeqCst) < 64 << 20, "{announced}");
    lines.iter().any(|it| it.starts_with("GET ") && it.contains(&tar))
}

#[test]
fn a_tar_beyond_the_limits_is_not_requested() {
    let served = Arc::new(served(vec![layer("a", 100_000)]));
    let tar = served.layers[0].tar.len() as u64;
    assert!(is_read(&served, tar, false));
    assert!(is_read(&served, tar, true), "more than announced");
    assert!(is_read(&served, tar - 1, false), "less than announced");
    for announced in [(1 << 30) + 1, (64 << 30) + 1, u64::MAX] {
        assert!(!is_read(&served, announced, false), "{announced}");
    }
}

#[test]
fn a_config_without_bytes_is_an_error() {
    let truth = served(vec![layer("a", 10_000)]);
    let manifest = String::from_utf8(truth.manifest.clone()).unwrap();
    let size = format!("\"size\":{}}},\"layers\"", truth.config.len());
    assert!(manifest.contains(&size), "{manifest}");
    let manifest = manifest.replace(&size, "\"size\":0},\"layers\"").into_bytes();
    let hostile = Arc::new(Served { manifest, ..truth });
    let server = start(&hostile);
    for mirror in [None, Some(start(&hostile))] {
        let text =
            mirror.iter().fold(format!("server = \"http://{}\"\n", server.host()), |text, it| {
                text + &format!("[host.\"http://{}\"]\ncapabilities = [\"pull\"]\n", it.host())
            });
        let hosts = Hosts::new(&server.host(), &text);
        let name = format!("{}/app:1", server.host());
        let pulled = pull_name(&Home::new(), &name, Layers::Forget, &hosts.settings());
        assert!(matches!(pulled, Err(PullError::Mismatch { .. })), "{pulled:?}");
    }
}

/// A tar with this number of empty files.
fn files(count: usize) -> Vec<u8> {
    (0..count).fold(Tar::default(), |tar, at| tar.file(&format!("f{at}"), b"")).bytes()
}

/// Pulls two layers, of three entries each, past a server that sends wrong bytes for one of them.
fn pull_past(served: &Arc<Served>, liar: &Server, limits: Limits) {
    let origin = start(served);
    let text = format!(
        "server = \"http://{}\"\n[host.\"http://{}\"]\ncapabilities = [\"pull\"]\n",
        origin.host(),
        liar.host()
    );
    let hosts = Hosts::new(&origin.host(), &text);
    let home = Home::new();
    let options = ImportOptions { limits, ..usual_wishes() };
    let name = format!("{}/app:1", origin.host());
    let pulled = pull_with(&home, &name, Layers::Forget, options, &hosts.settings());
    assert_eq!(image(pulled), home.imported(served));
    assert!(home.is_sound());
    assert!(liar.lines().iter().any(|it| it.starts_with("GET ")), "{:?}", liar.lines());
}

#[test]
fn what_a_liar_sent_does_not_count_against_the_limits() {
    let served = Arc::new(served(vec![layer("a", 100_000), layer("b", 100_000)]));
    let limits = Limits { entries: 8, ..Limits::default() };
    // Together with the true layers, or alone, more than the limit.
    for count in [7, 100] {
        let (truth, lie) = (digest(&served.layers[0].tar).to_string(), files(count));
        let peer = Server::start(move |request: &Request, _| {
            let reply = match request.path.contains(&truth) {
                true if request.method == "HEAD" => {
                    reply(200).header("content-length", &lie.len().to_string())
                }
                true => reply(200).body(&lie),
                false => reply(404),
            };
            reply.header(PEER_HEADER, PEER_LAYERS)
        });
        pull_past(&served, &peer, limits);
    }
    // A mirror's blob has the announced size.
    let size = served.layers[0].blob.len();
    let zeros = Tar::default().file("zeros", &vec![0; 3 << 20]).bytes();
    let few = Limits { ratio_from: 200_000, ratio: 10, ..limits };
    let short = Limits { layer_bytes: 1 << 20, ..limits };
    for (lie, limits) in [
        (pack(&files(7), Pack::Gzip), limits),
        (pack(&files(100), Pack::Gzip), limits),
        (pack(&zeros, Pack::Gzip), few),
        (pack(&zeros, Pack::Zstd), short),
        (b"\xfd7zXZ\0".to_vec(), limits),
    ] {
        assert!(lie.len() < size);
        let mut lie = lie;
        lie.resize(size, 0x99);
        let path = served.path(0);
        let mirror =
            Server::start(move |request: &Request, _| match request.path.contains(&path) {
                true => content(request, &lie),
                false => reply(404),
            });
        pull_past(&served, &mirror, limits);
    }
}
