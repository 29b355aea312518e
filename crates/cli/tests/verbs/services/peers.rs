//! `serve --registry`: stores that fetch images from each other.

#![expect(clippy::print_stderr, reason = "the counted bytes are for people")]

mod five;
pub(crate) mod hostile;
mod incomplete;
mod indexes;
mod lazy;
mod namespaces;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;
use testing::daemon::Daemon;
use testing::fake::{Reply, Request, Server, forward, reply};

use crate::Place;
use crate::registry_verbs::registries;

/// A registry, behind a server that counts the bytes of its bodies and can refuse to send blobs.
struct Origin {
    /// Has the tree that the image was made from.
    from: Place,
    daemon: Daemon,
    server: Server,
    refuses_blobs: Arc<AtomicBool>,
    /// Name of the image.
    image: String,
}

impl Origin {
    /// `None`, with a note, if there is no registry on this machine.
    fn new() -> Option<Self> {
        let from = registries::place(300);
        let daemon = registries::start(&from)?;
        from.out(&format!("push --quiet a:1 {}/team/app:1", daemon.host));
        let refuses_blobs = Arc::new(AtomicBool::new(false));
        let (upstream, refuses) = (daemon.host.clone(), Arc::clone(&refuses_blobs));
        let server = Server::start(move |request, _| {
            if refuses.load(Ordering::SeqCst) && request.path.contains("/blobs/") {
                return reply(403);
            }
            through(&upstream, request)
        });
        let image = format!("{}/team/app:1", server.host());
        Some(Self { from, daemon, server, refuses_blobs, image })
    }

    fn refuse_blobs(&self) {
        self.refuses_blobs.store(true, Ordering::SeqCst);
    }

    /// Returns the number of requests for blobs.
    fn blobs(&self) -> usize {
        self.server.lines().iter().filter(|it| it.contains("/blobs/")).count()
    }

    /// Returns a store without images, whose hosts.toml names these mirrors.
    fn place_with_mirrors(&self, mirrors: &[&str]) -> Place {
        let place = Place::new();
        let host = self.server.host();
        let folder = place.path("certs").join(&host);
        fs::create_dir_all(&folder).unwrap();
        let hosts = mirrors.iter().fold(format!("server = \"http://{host}\"\n"), |text, mirror| {
            text + &format!("[host.\"http://{mirror}\"]\ncapabilities = [\"pull\"]\n")
        });
        fs::write(folder.join("hosts.toml"), hosts).unwrap();
        place
    }

    fn pull(&self, place: &Place, options: &str) {
        let certs = if place.path("certs").exists() { "--certs-dir certs " } else { "" };
        place.out(&format!("pull --quiet {certs}{options}{}", self.image));
    }

    /// Returns image and manifest in a store, after a check of all its data.
    fn shown(&self, place: &Place) -> (String, String) {
        place.out("fsck");
        let shown = place.out(&format!("show --json {}", self.image));
        let shown: Value = serde_json::from_str(&shown).unwrap();
        ["image", "manifestDigest"].map(|it| shown[it].as_str().unwrap().to_owned()).into()
    }
}

fn through(upstream: &str, request: &Request) -> Reply {
    forward(upstream, request, request.body.len()).unwrap_or_else(|_| reply(502))
}

/// A registry over a store.
pub(crate) struct Peer {
    child: Child,
    /// Address and port.
    pub(crate) host: String,
}

impl Peer {
    pub(crate) fn start(place: &Place) -> Self {
        Self::start_with(place, &["--listen", "127.0.0.1:0", "--repository", "**"])
    }

    fn start_with(place: &Place, options: &[&str]) -> Self {
        let mut command = place.command(&["serve", "--registry"]);
        command.args(options);
        Self::of(command)
    }

    fn of(mut command: Command) -> Self {
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let host = line.trim().rsplit_once("http://").expect("it tells its address").1.to_owned();
        Self { child, host }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have ended.
        let _ended = self.child.kill().and_then(|()| self.child.wait());
    }
}

/// In each form of the source, the image is the same as from the registry, and the registry sends no blob.
#[test]
fn an_image_comes_from_a_peer() {
    let Some(origin) = Origin::new() else { return };
    let (plain, native) = (Place::new(), Place::new());
    origin.pull(&plain, "");
    origin.pull(&native, "--form tar ");
    let expected = [origin.shown(&plain), origin.shown(&native)];
    let sources =
        ["", "--keep-layers ", "--form packed ", "--form tar ", "--form tar --keep-layers "].map(
            |options| {
                let place = Place::new();
                origin.pull(&place, options);
                (options, place)
            },
        );
    origin.refuse_blobs();
    let before = origin.blobs();
    for (options, source) in &sources {
        let peer = Peer::start(source);
        for (form, expected) in ["", "--form tar "].iter().zip(&expected) {
            let to = origin.place_with_mirrors(&[&peer.host]);
            origin.pull(&to, form);
            assert_eq!(origin.shown(&to), *expected, "{options}: {form}");
            // The new store is a peer in turn.
            let next = Peer::start(&to);
            let last = origin.place_with_mirrors(&[&next.host]);
            origin.pull(&last, form);
            assert_eq!(origin.shown(&last), *expected, "{options}: {form}: the next");
        }
    }
    assert_eq!(origin.blobs(), before, "the registry was asked for a blob");
    // The blob itself is at the peers that have kept it.
    let (_, kept) = &sources[1];
    let peer = Peer::start(kept);
    let to = origin.place_with_mirrors(&[&peer.host]);
    origin.pull(&to, "--keep-layers ");
    assert_eq!(origin.shown(&to), expected[0]);
    assert_eq!(origin.blobs(), before);
}

/// Mirrors that lie or die cost time. The image is right.
#[test]
fn a_peer_that_fails_costs_only_time() {
    let Some(origin) = Origin::new() else { return };
    let (tars, kept) = (Place::new(), Place::new());
    origin.pull(&tars, "");
    origin.pull(&kept, "--keep-layers ");
    let expected = origin.shown(&tars);
    let peers = [Peer::start(&tars), Peer::start(&kept)];
    type Change = fn(Reply) -> Reply;
    let ways: [(&str, Change); 5] = [
        ("a flipped bit", |mut it| {
            if let Some(byte) = it.body.last_mut() {
                *byte ^= 1;
            }
            it
        }),
        ("a cut connection", |it| {
            let half = it.body.len() / 2;
            it.cut(half)
        }),
        ("a reset connection", |it| {
            let half = it.body.len() / 2;
            it.reset(Some(half))
        }),
        ("too many bytes", |mut it| {
            it.body.push(0);
            it
        }),
        ("no bytes", |it| it.body("")),
    ];
    for (way, change) in ways {
        let liars = peers.each_ref().map(|peer| {
            let upstream = peer.host.clone();
            Server::start(move |request, _| {
                let reply = through(&upstream, request);
                if request.path.contains("/blobs/") && request.method == "GET" {
                    change(reply)
                } else {
                    reply
                }
            })
        });
        let [of_tars, of_blobs] = liars.each_ref().map(Server::host);
        let [of_tars, of_blobs] = [&of_tars, &of_blobs].map(String::as_str);
        for mirrors in [&[of_tars][..], &[of_blobs], &[of_tars, of_blobs], &[of_blobs, of_tars]] {
            let to = origin.place_with_mirrors(mirrors);
            origin.pull(&to, "");
            assert_eq!(origin.shown(&to), expected, "{way}: {mirrors:?}");
        }
        assert!(liars.iter().all(|it| it.sent.load(Ordering::SeqCst) > 0 || way == "no bytes"));
        // A peer after the mirrors that fail is used.
        let to = origin.place_with_mirrors(&[of_blobs, &peers[1].host]);
        let before = origin.blobs();
        origin.pull(&to, "");
        assert_eq!(origin.shown(&to), expected, "{way}");
        assert_eq!(origin.blobs(), before, "{way}: the registry was asked");
    }
    let gone = Peer::start(&tars);
    let host = gone.host.clone();
    drop(gone);
    let to = origin.place_with_mirrors(&[&host]);
    origin.pull(&to, "");
    assert_eq!(origin.shown(&to), expected, "a peer that does not run");
}

/// A peer does not send what its disk has damaged.
#[test]
fn a_damaged_store_sends_no_wrong_bytes() {
    let Some(origin) = Origin::new() else { return };
    let (tars, kept) = (Place::new(), Place::new());
    origin.pull(&tars, "");
    origin.pull(&kept, "--keep-layers ");
    let expected = origin.shown(&tars);
    for (source, folder) in [(&tars, "objects"), (&kept, "blobs")] {
        let image = hostile::documents(source, &origin.image);
        registries::heals::flip_largest(&source.path("store").join(folder));
        let peer = Peer::start(source);
        // The pull below would also take the right bytes elsewhere, so look at the bytes themselves.
        let digest = match folder {
            "blobs" => image.manifest.layers[0].digest,
            _ => image.config.diff_ids()[0],
        };
        let ns = origin.server.host().replace(':', "%3A");
        let path = format!("/v2/team/app/blobs/{digest}?ns={ns}");
        let found = hostile::ask(&peer.host, "GET", &path, "");
        let length: usize = found.header("content-length").unwrap().parse().unwrap();
        assert_eq!(found.status, 200, "{folder}");
        assert!(found.body.len() < length, "{folder}: {length} bytes, all of them");
        let part = hostile::ask(&peer.host, "GET", &path, "range: bytes=1-\r\n");
        assert_eq!(part.status, 500, "{folder}");
        let to = origin.place_with_mirrors(&[&peer.host]);
        origin.pull(&to, "");
        assert_eq!(origin.shown(&to), expected, "{folder}");
    }
}

/// With five stores, the registry sends the image once.
#[test]
fn five_stores_take_one_image_from_the_registry() {
    let Some(origin) = Origin::new() else { return };
    let first = Place::new();
    let sent = || origin.server.sent.load(Ordering::SeqCst);
    origin.pull(&first, "");
    let expected = origin.shown(&first);
    let image = sent();
    let listen = |at: usize| format!("127.0.0.{}:0", at + 2);
    let peer = |place: &Place, at: usize| {
        Peer::start_with(place, &["--listen", &listen(at), "--repository", "**"])
    };
    let mut peers = vec![peer(&first, 0)];
    let second = origin.place_with_mirrors(&[&peers[0].host]);
    origin.pull(&second, "");
    peers.push(peer(&second, 1));
    let hosts: Vec<_> = peers.iter().map(|it| it.host.as_str()).collect();
    let rest: Vec<_> = (0..3).map(|_| origin.place_with_mirrors(&hosts)).collect();
    std::thread::scope(|scope| {
        for place in &rest {
            scope.spawn(|| origin.pull(place, ""));
        }
    });
    for place in rest.iter().chain([&second]) {
        assert_eq!(origin.shown(place), expected);
    }
    let all = sent();
    eprintln!("five stores: the registry sent {all} bytes; one store alone gets {image}");
    assert!(image > 8 << 20, "{image}");
    assert!(all * 100 <= image * 105, "{all} of {image}");
}
