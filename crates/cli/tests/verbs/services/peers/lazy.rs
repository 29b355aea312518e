//! A lazy image whose data comes from a peer.

use std::fs;
use std::sync::atomic::Ordering;

use testing::fake::{Server, wait_for};

use super::{Origin, Peer, through};
use crate::Place;
use crate::services::doors::can_serve;
use crate::services::served::{end, serve_with};

/// Makes an index of the image at the registry.
fn index(origin: &Origin) {
    let target = format!("{}/team/app:1", origin.daemon.host);
    origin.from.out(&format!("pull --quiet --form tar --keep-layers {target}"));
    origin.from.out(&format!("index --quiet --no-start --push {target} {target}"));
}

/// Mounts the image lazily with this mirror, and reads all of its files.
fn read_all(origin: &Origin, mirror: &str, after_pull: impl FnOnce()) {
    let to = origin.place_with_mirrors(&[mirror]);
    origin.pull(&to, "--lazy=require ");
    after_pull();
    let certs = to.path("certs");
    let mut service = serve_with(&to, &["--certs-dir", certs.to_str().unwrap()], |it| it);
    fs::create_dir(to.path("root")).unwrap();
    to.out(&format!("mount --lazy {} root", origin.image));
    let noise = fs::read(to.path("root/noise")).unwrap();
    assert!(noise == fs::read(origin.from.path("tree/noise")).unwrap());
    for at in 0..300 {
        let text = fs::read_to_string(to.path(&format!("root/file-{at}"))).unwrap();
        assert_eq!(text, format!("{at} ").repeat(99));
    }
    to.out("umount root");
    end(&to, &mut service);
}

#[test]
fn data_of_a_lazy_image_comes_from_a_peer() {
    if !can_serve() {
        return;
    }
    let Some(origin) = Origin::new() else { return };
    index(&origin);
    let full = Place::new();
    origin.pull(&full, "");
    let peer = Peer::start(&full);
    let refused = || origin.server.lines().iter().filter(|it| it.contains("/blobs/")).count();
    let mut before = 0;
    read_all(&origin, &peer.host, || {
        origin.refuse_blobs();
        before = refused();
    });
    assert_eq!(refused(), before, "the registry was asked for data");
    origin.refuses_blobs.store(false, Ordering::SeqCst);

    // Wrong data is not used.
    let upstream = peer.host.clone();
    let liar = Server::start(move |request, _| {
        let mut reply = through(&upstream, request);
        if request.path.contains("/blobs/") && request.method == "GET" {
            reply.body.iter_mut().for_each(|it| *it ^= 1);
        }
        reply
    });
    read_all(&origin, &liar.host(), || ());
    wait_for("the peer was asked", || liar.sent.load(Ordering::SeqCst) > 0);
}
