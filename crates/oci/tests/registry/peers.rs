//! Layers from mirrors that announce that they have uncompressed tars.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use quire_oci::blobs::{AskedPeers, BlobSource as _};
use quire_oci::registry::{PEER_HEADER, PEER_LAYERS};

use super::*;
use testing::fake::{Reply, Request, Server, content, reply};

/// Time that a silent peer takes to respond, which is longer than the client waits.
const SILENCE: Duration = Duration::from_secs(12);

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
    let part = |registry: &Registry| {
        registry.tar_part(&digest(&blob), &digest(&tar), 70_000..200_000, AskedPeers::All)
    };
    let found = part(&registry).unwrap();
    assert_same(&found.bytes, &tar[70_000..200_000]);
    let before = peer.lines().len();
    part(&registry).unwrap();
    assert_eq!(peer.lines().len(), before + 1, "the place was not remembered");
    // A part says nothing about the hosts of the blob.
    assert!(!registry.distrust(&digest(&blob)));
    assert!(part(&registry).is_some());
    // Once bytes were wrong, the peer is not asked again for this layer.
    registry.distrust_peer(&digest(&blob), &found.host);
    assert!(part(&registry).is_none());
    assert!(registry.peer_tar(&digest(&blob), &digest(&tar)).is_none());
    assert!(!asked(&origin, &tar));
}

/// A server may send the whole blob with status 200 if a range has all of it.
#[test]
fn a_part_can_be_the_whole_tar() {
    let (blob, tar) = (noise(1000), noise(300_000));
    let origin = host(vec![blob.clone()], false);
    let whole = tar.clone();
    let peer = Server::start(move |request: &Request, _| {
        let has = request.path.contains(&digest(&whole).to_string());
        let reply = if has { reply(200).body(&whole) } else { reply(404) };
        reply.header(PEER_HEADER, PEER_LAYERS)
    });
    let part = |range| {
        let (_hosts, registry) = client(&origin, &[&peer]);
        registry.tar_part(&digest(&blob), &digest(&tar), range, AskedPeers::All)
    };
    assert_same(&part(0..300_000).unwrap().bytes, &tar);
    // It would be sent again for each part.
    assert!(part(0..200_000).is_none());
}

#[test]
fn a_tar_continues_at_another_peer() {
    let (blob, tar) = (noise(1000), noise(900_000));
    let origin = host(vec![blob.clone()], false);
    let whole = tar.clone();
    let dying = Server::start(move |request: &Request, _| {
        let has = request.path.contains(&digest(&whole).to_string());
        let reply = if has { content(request, &whole) } else { reply(404) };
        let reply = if has && request.method == "GET" { reply.cut(400_000) } else { reply };
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

/// Starts a peer that has only these bytes of a tar.
fn with_part(tar: &[u8], has: std::ops::Range<usize>) -> Server {
    let tar = tar.to_vec();
    Server::start(move |request: &Request, _| {
        let is_it = request.path.contains(&digest(&tar).to_string());
        let range = request.header("range").filter(|_| is_it && request.method == "GET");
        let part = range.and_then(|it| it.strip_prefix("bytes=")?.split_once('-'));
        let part = part.map(|it| (it.0.parse::<usize>().unwrap(), it.1.parse::<usize>().unwrap()));
        let reply = match part {
            Some((first, last)) if has.contains(&first) && has.contains(&last) => {
                content(request, &tar)
            }
            _ => reply(404),
        };
        reply.header(PEER_HEADER, PEER_LAYERS)
    })
}

/// Each part comes from the peer that has it, and other parts from none.
#[test]
fn peers_with_parts_of_a_tar_are_asked_for_parts() {
    let (blob, tar) = (noise(1000), noise(300_000));
    let origin = host(vec![blob.clone()], false);
    let (first, second) = (with_part(&tar, 0..100_000), with_part(&tar, 100_000..200_000));
    let (_hosts, registry) = client(&origin, &[&first, &second]);
    assert!(registry.may_have_peers(&digest(&blob)));
    assert!(registry.peer_tar(&digest(&blob), &digest(&tar)).is_none(), "none has all of it");
    let part = |range: std::ops::Range<u64>, asked| {
        registry.tar_part(&digest(&blob), &digest(&tar), range, asked)
    };
    for start in [0, 150_000, 50_000] {
        let end = start + 50_000;
        let [from, to] = [start, end].map(|it| usize::try_from(it).unwrap());
        assert_same(&part(start..end, AskedPeers::All).unwrap().bytes, &tar[from..to]);
    }
    assert!(part(90_000..110_000, AskedPeers::All).is_none(), "no peer has all of this part");
    assert!(part(200_000..210_000, AskedPeers::All).is_none());
    // That a part was missing does not end the use of others.
    assert_same(&part(0..10, AskedPeers::All).unwrap().bytes, &tar[..10]);
    assert_same(&part(10..20, AskedPeers::Likely).unwrap().bytes, &tar[10..20]);
    // A part that is missing costs one request.
    let before = second.seen().len();
    assert!(part(250_000..260_000, AskedPeers::All).is_none());
    assert_eq!(second.seen().len(), before + 1);
    // Wrong bytes end the trust in the host that sent them, and in no other one.
    let wrong = part(0..10, AskedPeers::All).unwrap();
    registry.distrust_peer(&digest(&blob), &wrong.host);
    let before = first.seen().len();
    assert!(part(0..10, AskedPeers::All).is_none());
    assert_same(&part(150_000..150_010, AskedPeers::All).unwrap().bytes, &tar[150_000..150_010]);
    assert_eq!(first.seen().len(), before, "the host that lied was asked again");
    // A client that asks all mirrors again does not ask it either.
    assert!(registry.peer_tar(&digest(&blob), &digest(&tar)).is_none());
    assert_eq!(first.seen().len(), before);
    let other = part(150_000..150_010, AskedPeers::All).unwrap();
    registry.distrust_peer(&digest(&blob), &other.host);
    registry.distrust_peer(&digest(&blob), "http://nobody.example/v2");
    assert!(!registry.may_have_peers(&digest(&blob)));
    assert!(!asked(&origin, &tar));
}

/// A mirror that had not responded before the wrong part is found by the next search.
#[test]
fn after_a_wrong_part_all_mirrors_are_searched_again() {
    let (blob, tar) = (noise(1000), noise(300_000));
    let origin = host(vec![blob.clone()], false);
    let (liar, honest) = (host(vec![tar.clone()], true), host(vec![tar.clone()], true));
    let (_hosts, registry) = client(&origin, &[&liar, &honest]);
    let part =
        || registry.tar_part(&digest(&blob), &digest(&tar), 0..1000, AskedPeers::All).unwrap();
    let wrong = part();
    assert!(wrong.host.contains(&liar.host()) && honest.lines().is_empty());
    registry.distrust_peer(&digest(&blob), &wrong.host);
    assert!(part().host.contains(&honest.host()));
}

/// Starts a peer that has a tar, and answers GET requests in another way.
fn peer(tar: &[u8], get: impl Fn(Reply) -> Reply + Send + Sync + 'static) -> Server {
    let tar = tar.to_vec();
    Server::start(move |request: &Request, _| {
        let reply = match request.path.contains(&digest(&tar).to_string()) {
            true if request.method == "GET" => get(reply(200).body(&tar)),
            true => reply(200).header("content-length", &tar.len().to_string()),
            false => reply(404),
        };
        reply.header(PEER_HEADER, PEER_LAYERS)
    })
}

#[test]
fn a_peer_that_ignores_ranges_is_not_read() {
    let (blob, tar) = (noise(1000), noise(300_000));
    let origin = host(vec![blob.clone()], false);
    let whole = peer(&tar, |it| it);
    let (_hosts, registry) = client(&origin, &[&whole]);
    for _ in 0..3 {
        assert!(
            registry
                .tar_part(&digest(&blob), &digest(&tar), 70_000..200_000, AskedPeers::All)
                .is_none()
        );
    }
    let fetched = whole.lines().iter().filter(|it| it.starts_with("GET ")).count();
    assert_eq!(fetched, 1, "the whole tar was requested for each part");
    assert!(!asked(&origin, &tar));
}

#[test]
fn a_tar_is_not_read_beyond_its_announced_size() {
    let (blob, tar) = (noise(1000), noise(300_000));
    let origin = host(vec![blob.clone()], false);
    for endless in [peer(&tar, Reply::endless), peer(&tar, |it| it.body(noise(300_001)))] {
        let (_hosts, registry) = client(&origin, &[&endless]);
        let found = registry.peer_tar(&digest(&blob), &digest(&tar)).unwrap();
        assert_eq!(found.size, 300_000);
        let mut reader = found.reader;
        let mut bytes = Vec::new();
        assert!(reader.read_to_end(&mut bytes).is_err());
        assert!(bytes.len() <= 300_000, "{}", bytes.len());
    }
}

#[test]
fn peers_that_do_not_respond_are_not_asked_again() {
    let (blob, tar) = (noise(1000), noise(300_000));
    let origin = host(vec![blob.clone()], false);
    let silent =
        || Server::start(|_, _| reply(404).header(PEER_HEADER, PEER_LAYERS).delay(SILENCE));
    let (first, second) = (silent(), silent());
    let good = peer(&tar, |it| it);
    let (_hosts, registry) = client(&origin, &[&first, &good]);
    assert!(registry.peer_tar(&digest(&blob), &digest(&tar)).is_some());
    let before = first.seen().len();
    assert!(registry.peer_tar(&digest(&noise(999)), &digest(&tar)).is_some());
    assert_eq!(first.seen().len(), before, "the silent peer was asked for another layer");

    // The search ends even if the client may wait longer for a response.
    let (hosts, _) = client(&origin, &[&first, &second, &good]);
    let settings = Settings { stall: SILENCE * 2, ..hosts.settings() };
    let patient = super::registry(&origin.host(), &settings);
    assert!(patient.tar_part(&digest(&blob), &digest(&tar), 0..10, AskedPeers::All).is_none());
    assert!(second.seen().is_empty() && !asked(&origin, &tar));
}

/// A host that sent nothing has not lied.
#[test]
fn nobody_is_distrusted_for_a_blob_that_nobody_sent() {
    let empty = noise(0);
    let origin = host(vec![empty.clone()], false);
    let mirror = host(vec![empty], false);
    let (_hosts, registry) = client(&origin, &[&mirror]);
    let name = digest(b"x");
    assert!(!registry.distrust(&name));
    assert!(read(registry.blob(&name, Some(0), 0)).unwrap().is_empty());
    assert!(!registry.distrust(&name));
    assert!(mirror.seen().is_empty() && origin.seen().is_empty());
}

/// A peer knows only some of the referrers, but the registry knows all of them.
#[test]
fn a_registry_that_is_a_peer_has_no_referrers() {
    let list = r#"{"schemaVersion":2,"manifests":[]}"#;
    let start =
        || Server::start(move |_, _| reply(200).body(list).header(PEER_HEADER, PEER_LAYERS));
    let origin = start();
    let (_hosts, registry) = client(&origin, &[]);
    assert!(registry.referrers(&digest(b"{}"), None).unwrap().is_empty());
    let mirror = start();
    let text = format!(
        "server = \"http://{}\"\n[host.\"http://{}\"]\ncapabilities = [\"pull\", \"resolve\"]\n",
        origin.host(),
        mirror.host()
    );
    let hosts = Hosts::new(&origin.host(), &text);
    let registry = super::registry(&origin.host(), &hosts.settings());
    let before = origin.seen().len();
    assert!(registry.referrers(&digest(b"{}"), None).unwrap().is_empty());
    assert!(!mirror.seen().is_empty() && origin.seen().len() > before);
}

/// A program makes a client for each image.
#[test]
fn clients_with_the_same_settings_ask_a_mirror_once_what_it_is() {
    let (blob, tar) = (noise(1000), noise(300_000));
    let origin = host(vec![blob.clone()], false);
    let is_peer = Arc::new(AtomicBool::new(false));
    let (blobs, announces) = ([blob.clone(), tar.clone()], Arc::clone(&is_peer));
    let mirror = Server::start(move |request: &Request, _| {
        let is_peer = announces.load(Ordering::SeqCst);
        // As a peer, it has only the tar.
        let mut blobs = blobs.iter().skip(usize::from(is_peer));
        let has = |bytes: &&Vec<u8>| request.path.contains(&digest(bytes).to_string());
        let reply = blobs.find(has).map_or_else(|| reply(404), |it| content(request, it));
        if is_peer { reply.header(PEER_HEADER, PEER_LAYERS) } else { reply }
    });
    let (hosts, _) = client(&origin, &[&mirror]);
    let settings = hosts.settings();
    let part = || {
        let registry = super::registry(&origin.host(), &settings);
        registry.tar_part(&digest(&blob), &digest(&tar), 0..10, AskedPeers::All)
    };
    for _ in 0..3 {
        assert!(part().is_none());
    }
    assert_eq!(mirror.lines().len(), 1, "{:?}", mirror.lines());
    // The next response of the mirror shows that it has become a peer.
    is_peer.store(true, Ordering::SeqCst);
    assert!(part().is_none());
    let registry = super::registry(&origin.host(), &settings);
    assert_same(&read(registry.blob(&digest(&blob), Some(1000), 0)).unwrap(), &blob);
    assert_same(&part().unwrap().bytes, &tar[..10]);
    // A client with other settings asks again.
    assert!(
        super::registry(&origin.host(), &hosts.settings())
            .peer_tar(&digest(&blob), &digest(&tar))
            .is_some()
    );
}
