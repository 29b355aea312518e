//! Layers from mirrors that announce that they have uncompressed tars.

use quire_oci::blobs::BlobSource as _;
use quire_oci::registry::{PEER_HEADER, PEER_LAYERS};

use super::*;
use testing::fake::{Request, Server, content, reply};

/// Starts a host that has these blobs, and is a peer or not.
fn host(blobs: Vec<Vec<u8>>, is_peer: bool) -> Server {
    Server::start(move |request: &Request, _| {
        let has = |bytes: &&Vec<u8>| request.path.contains(&digest(bytes).to_string());
        let reply = match blobs.iter().find(has) {
            Some(bytes) => content(request, bytes),
            None => reply(404),
        };
        match is_peer {
            true => reply.header(PEER_HEADER, PEER_LAYERS),
            false => reply,
        }
    })
}

/// Makes a client for `app` at `origin` with these mirrors.
fn client(origin: &Server, mirrors: &[&Server]) -> (Hosts, Registry) {
    let name = origin.host();
    let text = mirrors.iter().fold(format!("server = \"http://{name}\"\n"), |text, mirror| {
        text + &format!("[host.\"http://{}\"]\ncapabilities = [\"pull\"]\n", mirror.host())
    });
    let hosts = Hosts::new(&name, &text);
    let registry = registry(&name, &hosts.settings());
    (hosts, registry)
}

fn asked(server: &Server, bytes: &[u8]) -> bool {
    server.lines().iter().any(|it| it.contains(&digest(bytes).to_string()))
}

#[test]
fn only_peers_are_asked_for_a_tar() {
    let (blob, tar) = (noise(1000), noise(300_000));
    let find = |registry: &Registry| {
        let found = registry.peer_tar(&digest(&blob), &digest(&tar));
        found.map(|it| (it.size, read(it.reader).unwrap()))
    };
    let both = vec![blob.clone(), tar.clone()];
    // The registry is not a mirror, even if it announces tars.
    let origin = host(both.clone(), true);
    let (_hosts, registry) = client(&origin, &[]);
    assert!(find(&registry).is_none());
    assert!(origin.lines().is_empty());
    let has_tar = host(vec![tar.clone()], true);
    let has_none = host(Vec::new(), true);
    let has_both = host(both.clone(), true);
    let other = host(both, false);
    for (mirrors, expect) in [
        (&[&has_tar][..], true),
        (&[&has_none, &has_tar], true),
        (&[&has_none], false),
        // These have the blob itself.
        (&[&has_both, &has_tar], false),
        (&[&other, &has_tar], false),
    ] {
        let (_hosts, registry) = client(&origin, mirrors);
        let found = find(&registry);
        assert_eq!(found.is_some(), expect);
        if let Some((size, bytes)) = found {
            assert_eq!(size, 300_000);
            assert_same(&bytes, &tar);
        }
    }
    assert!(!asked(&other, &tar) && !asked(&has_both, &tar) && !asked(&origin, &tar));
}

#[test]
fn parts_of_a_tar_come_from_a_peer() {
    let (blob, tar) = (noise(1000), noise(300_000));
    let origin = host(vec![blob.clone()], false);
    let peer = host(vec![tar.clone()], true);
    let (_hosts, registry) = client(&origin, &[&peer]);
    let part =
        |registry: &Registry| registry.tar_part(&digest(&blob), &digest(&tar), 70_000..200_000);
    assert_same(&part(&registry).unwrap(), &tar[70_000..200_000]);
    let before = peer.lines().len();
    part(&registry).unwrap();
    assert_eq!(peer.lines().len(), before + 1, "the place was not remembered");
    // Once bytes were wrong, the peer is not asked again for this layer.
    assert!(registry.distrust(&digest(&blob)));
    assert!(part(&registry).is_none());
    assert!(registry.peer_tar(&digest(&blob), &digest(&tar)).is_none());
    assert!(!asked(&origin, &tar));
}

#[test]
fn a_tar_continues_at_another_peer() {
    let (blob, tar) = (noise(1000), noise(900_000));
    let origin = host(vec![blob.clone()], false);
    let whole = tar.clone();
    let dying = Server::start(move |request: &Request, _| {
        let has = request.path.contains(&digest(&whole).to_string());
        let reply = if has { content(request, &whole) } else { reply(404) };
        let reply = if request.method == "GET" { reply.cut(400_000) } else { reply };
        reply.header(PEER_HEADER, PEER_LAYERS)
    });
    let peer = host(vec![tar.clone()], true);
    let (_hosts, registry) = client(&origin, &[&dying, &peer]);
    // After this, both mirrors are known as peers.
    assert!(registry.manifest(&digest(b"nothing").to_string()).is_err());
    let found = registry.peer_tar(&digest(&blob), &digest(&tar)).unwrap();
    assert_same(&read(found.reader).unwrap(), &tar);
    assert!(peer.sent.load(std::sync::atomic::Ordering::SeqCst) <= 500_000);
    let (_hosts, alone) = client(&origin, &[&dying]);
    let found = alone.peer_tar(&digest(&blob), &digest(&tar)).unwrap();
    assert!(read(found.reader).is_err(), "the caller reads the blob then");
    assert!(!asked(&origin, &tar));
}
