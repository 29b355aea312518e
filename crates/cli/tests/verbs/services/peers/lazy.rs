//! A lazy image whose data comes from a peer.

use std::fs;
use std::sync::atomic::Ordering;

use store::{OpenOptions, Store, Who};
use testing::fake::{Request, Server};
use transfer::StoredImage;

use super::{Origin, Peer, through};
use crate::Place;
use crate::services::fuse_devices::can_serve;
use crate::services::served::{end, serve_with};

/// Makes an index of the image at the registry.
pub(super) fn index(origin: &Origin) {
    let target = format!("{}/team/app:1", origin.daemon.host);
    origin.from.out(&format!("pull --quiet --form tar --keep-layers {target}"));
    origin.from.out(&format!("index --quiet --no-start --push {target} {target}"));
}

/// Returns the digest of the tar of the image's layer.
fn diff_id(place: &Place, name: &str) -> String {
    let store =
        Store::open(&place.path("store"), Who::this_process(), OpenOptions::read()).unwrap();
    let manifest = store.resolve(name).unwrap().manifest.unwrap();
    StoredImage::load(&store, &manifest).unwrap().config.diff_ids()[0].to_string()
}

/// Mounts the image lazily with these mirrors, and reads all of its files.
pub(super) fn read_all(origin: &Origin, mirrors: &[&str], after_pull: impl FnOnce()) {
    let to = origin.place_with_mirrors(mirrors);
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
    read_all(&origin, &[&peer.host], || {
        origin.refuse_blobs();
        before = refused();
    });
    assert_eq!(refused(), before, "the registry was asked for data");
    origin.refuses_blobs.store(false, Ordering::SeqCst);

    // Wrong data is not used, even if two peers send it.
    let tar = diff_id(&full, &origin.image);
    let liar = || {
        let upstream = peer.host.clone();
        Server::start(move |request, _| {
            let mut reply = through(&upstream, request);
            if request.path.contains("/blobs/") && request.method == "GET" {
                reply.body.iter_mut().for_each(|it| *it ^= 1);
            }
            reply
        })
    };
    let liars = [liar(), liar()];
    let hosts = liars.each_ref().map(Server::host);
    read_all(&origin, &[&hosts[0], &hosts[1]], || ());
    for liar in &liars {
        let requests = liar.seen();
        let of_tar = |it: &&Request| {
            it.method == "GET" && it.path.contains(&tar) && it.header("range").is_some()
        };
        assert!(requests.iter().any(|it| of_tar(&it)), "{:?}", liar.lines());
    }
    // The registry itself never gets such a request.
    assert!(!origin.server.lines().iter().any(|it| it.contains(&tar)));
}
