//! Parts of layers at peers that have not all of a layer.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::Ordering;
use std::time::Duration;

use image::lazy::{Head, UNIT};
use store::{OpenOptions, Store, Who};
use testing::fake::wait_for;

use super::hostile::{Answer, ask};
use super::lazy::{index, read_all};
use super::{Origin, Peer};
use crate::Place;
use crate::services::fuse_devices::can_serve;
use crate::services::served::{end, serve};

/// A store with a lazy image, of which a test fills parts.
struct Incomplete {
    origin: Origin,
    place: Place,
    store: Store,
    head: Head,
    /// All bytes of the device.
    bytes: Vec<u8>,
    /// Path of the layer's tar at a peer.
    path: String,
}

impl Incomplete {
    /// `None`, with a note, if there is no registry, or lazy images are not possible.
    fn new() -> Option<Self> {
        if !can_serve() {
            return None;
        }
        let origin = Origin::new()?;
        index(&origin);
        let (full, place) = (Place::new(), Place::new());
        origin.pull(&full, "--form tar ");
        origin.pull(&place, "--lazy=require ");
        let who = Who::this_process();
        let store = Store::open(&place.path("store"), who, OpenOptions::write()).unwrap();
        let found = store.resolve(&origin.image).unwrap();
        let [device] = store.lazy_devices(&found.image).unwrap()[..] else { panic!("one layer") };
        let head = store.lazy_devices.index_head_for(&device, found.manifest.as_ref());
        let head = head.unwrap().unwrap();
        let bytes = fs::read(full.path("store/data").join(device.to_string())).unwrap();
        assert!(head.tar_bytes < head.device_bytes);
        let ns = origin.server.host().replace(':', "%3A");
        let path = format!("/v2/team/app/blobs/{}?ns={ns}", head.diff_id);
        Some(Self { origin, place, store, head, bytes, path })
    }

    /// Fills these bytes of the device.
    fn fill(&self, range: Range<u64>) {
        let mut filling = None;
        // A child process of another test may hold its lock until its `exec`.
        wait_for("its lock", || {
            filling = self.store.fill_lazy_device(&self.head.device).unwrap();
            filling.is_some()
        });
        filling.unwrap().write_at(&self.bytes[of(&range)], range.start).unwrap();
    }

    fn fill_all(&self) {
        self.fill(0..self.head.device_bytes);
    }

    fn get(&self, peer: &Peer, range: &Range<u64>) -> Answer {
        let header = format!("range: bytes={}-{}\r\n", range.start, range.end - 1);
        ask(&peer.host, "GET", &self.path, &header)
    }

    /// Checks that a peer sends a range, or says that it lacks the layer.
    #[track_caller]
    fn check(&self, peer: &Peer, range: Range<u64>, is_there: bool) {
        let found = self.get(peer, &range);
        assert_eq!(found.header("quire-layers"), Some("diff-id"));
        if !is_there {
            return assert_eq!(found.status, 404, "{range:?}");
        }
        assert_eq!(found.status, 206, "{range:?}");
        let size = self.head.tar_bytes;
        let said = format!("bytes {}-{}/{size}", range.start, range.end.min(size) - 1);
        assert_eq!(found.header("content-range"), Some(&*said));
        assert!(found.body == self.bytes[of(&(range.start..range.end.min(size)))], "{range:?}");
    }

    /// Checks that a peer has no layer, but perhaps parts of it.
    fn check_no_layer(&self, peer: &Peer) {
        for method in ["GET", "HEAD"] {
            assert_eq!(ask(&peer.host, method, &self.path, "").status, 404, "{method}");
        }
        let found = ask(&peer.host, "HEAD", &self.path, "range: bytes=0-9\r\n");
        assert_eq!(found.status, 404);
    }

    fn device_file(&self) -> fs::File {
        let path = self.place.path("store/lazy").join(self.head.device.to_string());
        fs::File::options().write(true).open(path).unwrap()
    }
}

fn of(range: &Range<u64>) -> Range<usize> {
    let [start, end] = [range.start, range.end].map(|it| usize::try_from(it).unwrap());
    start..end
}

/// A range is sent if the store has all of it, and each of its units has its digest.
#[test]
fn parts_of_an_incomplete_layer_are_served() {
    let Some(lazy) = Incomplete::new() else { return };
    let (tar, device) = (lazy.head.tar_bytes, lazy.head.device_bytes);
    let peer = Peer::start(&lazy.place);
    let last = tar / UNIT * UNIT;
    lazy.check(&peer, 0..10, false);
    lazy.fill(2 * UNIT..40 * UNIT);
    lazy.fill(last..device);
    for (range, is_there) in [
        (2 * UNIT..40 * UNIT, true),
        (2 * UNIT + 9..2 * UNIT + 10, true),
        (3 * UNIT - 1..3 * UNIT + 1, true),
        (2 * UNIT - 1..3 * UNIT, false),
        (39 * UNIT..40 * UNIT + 1, false),
        (0..tar, false),
        // The tail of the device is not a part of the layer.
        (last..tar, true),
        (tar - 1..device, true),
    ] {
        lazy.check(&peer, range, is_there);
    }
    assert_eq!(lazy.get(&peer, &(tar..device)).status, 416);
    lazy.check_no_layer(&peer);

    // A byte that the disk has changed since it was verified.
    lazy.device_file()
        .write_all_at(&[!lazy.bytes[of(&(5 * UNIT..5 * UNIT + 1))][0]], 5 * UNIT)
        .unwrap();
    lazy.check(&peer, 4 * UNIT..6 * UNIT, false);
    lazy.check(&peer, 5 * UNIT + 9..6 * UNIT, false);
    lazy.check(&peer, 3 * UNIT..5 * UNIT, true);

    lazy.fill_all();
    lazy.check(&peer, 0..tar, true);
    lazy.check_no_layer(&peer);
    // All bytes are right, and the image was not yet compared with its layers.
    lazy.store.fill_lazy_device(&lazy.head.device).unwrap().unwrap().seal().unwrap();
    lazy.check(&peer, 0..tar, true);
    lazy.check_no_layer(&peer);
    // The service imports the layers. Then they are ordinary ones.
    let mut service = serve(&lazy.place);
    wait_for("the layer", || ask(&peer.host, "HEAD", &lazy.path, "").status == 200);
    end(&lazy.place, &mut service);
    lazy.check(&peer, 1..tar, true);
}

#[test]
fn a_condemned_device_is_not_served() {
    let Some(lazy) = Incomplete::new() else { return };
    lazy.fill_all();
    let peer = Peer::start(&lazy.place);
    lazy.check(&peer, 0..UNIT, true);
    lazy.store.fill_lazy_device(&lazy.head.device).unwrap().unwrap().condemn().unwrap();
    lazy.check(&peer, 0..UNIT, false);
}

/// The rules for private images are the same as for complete layers.
#[test]
fn parts_of_private_images_are_not_served() {
    let Some(lazy) = Incomplete::new() else { return };
    lazy.fill_all();
    let start = |pattern: &str| {
        Peer::start_with(&lazy.place, &["--listen", "127.0.0.1:0", "--repository", pattern])
    };
    let (own, part) = (format!("{}/team/*", lazy.origin.server.host()), 0..UNIT);
    lazy.check(&start(&own), part.clone(), true);
    lazy.check(&start("docker.io/library/*"), part.clone(), false);
    // The same image has a private name.
    lazy.place.out(&format!("tag {} corp.example/secret/app:1", lazy.origin.image));
    lazy.check(&start(&own), part.clone(), false);
    lazy.check(&start("**"), part.clone(), true);
    lazy.place.out("rmi corp.example/secret/app:1");
    lazy.check(&start(&own), part.clone(), true);
    // A policy that refuses the image.
    fs::write(lazy.place.path("none.toml"), "default = \"none\"\n").unwrap();
    let mut command = lazy.place.command(&["serve", "--registry", "--listen", "127.0.0.1:0"]);
    command.args(["--repository", &own, "--policy", "none.toml"]);
    lazy.check(&Peer::of(command), part.clone(), false);
    let peer = start(&own);
    lazy.check(&peer, part.clone(), true);
    // An image that the peer does not know yet, or does not serve, has claimed the device.
    let folder = lazy.place.path("store/lazy");
    let names = fs::read_dir(&folder).unwrap().map(|it| it.unwrap().file_name());
    let claim = names.map(|it| it.into_string().unwrap()).find(|it| it.ends_with(".index"));
    let claim = folder.join(claim.unwrap());
    let (device, _) = claim.to_str().unwrap().split_once(".sha256-").unwrap();
    let other = format!("{device}.sha256-{}.index", "a".repeat(64));
    fs::copy(&claim, &other).unwrap();
    lazy.check(&peer, part.clone(), false);
    fs::remove_file(&other).unwrap();
    lazy.check(&peer, part.clone(), true);
    // The whole device may have been copied from an image that is private.
    let whole = lazy.place.path("store/data").join(lazy.head.device.to_string());
    fs::create_dir_all(whole.parent().unwrap()).unwrap();
    fs::write(&whole, &lazy.bytes).unwrap();
    lazy.check(&peer, part.clone(), false);
    fs::remove_file(&whole).unwrap();
    wait_for("the device", || lazy.get(&peer, &part).status == 206);
    lazy.place.out(&format!("rmi {}", lazy.origin.image));
    lazy.place.out("gc");
    wait_for("the end of the image", || lazy.get(&peer, &part).status == 404);
}

/// The device is removed while a client reads it slowly.
#[test]
fn a_device_that_is_removed_ends_the_connection() {
    let Some(lazy) = Incomplete::new() else { return };
    lazy.fill_all();
    let peer = Peer::start(&lazy.place);
    let mut stream = TcpStream::connect(&peer.host).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let tar = lazy.head.tar_bytes;
    write!(
        stream,
        "GET {} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nrange: bytes=0-{}\r\n\r\n",
        lazy.path,
        tar - 1
    )
    .unwrap();
    let mut found = vec![0; 12];
    stream.read_exact(&mut found).unwrap();
    assert_eq!(found, b"HTTP/1.1 206");
    lazy.place.out(&format!("rmi {}", lazy.origin.image));
    lazy.place.out("gc");
    // The connection may have been reset.
    let _read = stream.read_to_end(&mut found);
    let end = found.windows(4).position(|it| it == b"\r\n\r\n").unwrap();
    let body = &found[end + 4..];
    assert!(body == &lazy.bytes[..body.len()] && body.len() as u64 <= tar);
}

/// The data of a lazy image comes from a host that has it only lazily as well, as far as that host has it.
#[test]
fn data_of_a_lazy_image_comes_from_an_incomplete_peer() {
    let Some(lazy) = Incomplete::new() else { return };
    let origin = &lazy.origin;
    let peer = Peer::start(&lazy.place);
    let layer = lazy.head.blob.to_string();
    let of_layer = || {
        origin
            .server
            .lines()
            .iter()
            .filter(|it| it.starts_with("GET ") && it.contains(&layer))
            .count()
    };
    // The peer has the first half.
    lazy.fill(0..lazy.head.tar_bytes / 2 / UNIT * UNIT);
    let before = origin.server.sent.load(Ordering::SeqCst);
    read_all(origin, &[&peer.host], || ());
    let sent = origin.server.sent.load(Ordering::SeqCst) - before;
    assert!(sent < lazy.head.blob_bytes * 3 / 4, "{sent} of {}", lazy.head.blob_bytes);
    lazy.fill_all();
    let mut before = 0;
    read_all(origin, &[&peer.host], || {
        origin.refuse_blobs();
        before = of_layer();
    });
    assert_eq!(of_layer(), before, "the registry was asked for data");
}
