//! Five stores in network namespaces, each with a registry over it, and a registry that counts the bytes it sends.

use std::fs;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use image::digest::Digest;
use serde_json::{Value, json};
use testing::daemon::Daemon;
use testing::fake::{Reply, Request, Server, wait_for};

use super::hostile::documents;
use super::namespaces::{HUB, Lan, Namespace, address};
use super::{Peer, through};
use crate::registry_verbs::registries;
use crate::services::fuse_devices::can_serve;
use crate::services::served::{end, serve_with};
use crate::{Place, write};

const NODES: usize = 5;
const PORT: u16 = 5500;

/// The namespaces, and the registry in the hub.
struct Stage {
    lan: Lan,
    origin: Server,
    /// Bytes of the image's layers that the registry has sent.
    layers: Arc<AtomicU64>,
    /// Name of the image.
    image: String,
    /// Bytes that the registry sends to a store without peers.
    bytes: u64,
    /// Image and manifest, as a store without peers gets them.
    expected: (String, String),
    /// Bytes of all layers in the registry.
    layer_bytes: u64,
    _from: Place,
    _daemon: Daemon,
}

/// A store in a namespace.
struct Node<'s> {
    stage: &'s Stage,
    number: usize,
    peer: Option<Peer>,
    place: Place,
}

impl Stage {
    /// Makes a registry with an image of this many MiB that cannot be compressed, in several layers, and pushes its index
    /// if `is_indexed`. `None`, with a note, if that is not possible on this machine.
    fn new(mebibytes: usize, is_indexed: bool) -> Option<Self> {
        let lan = Lan::new(NODES)?;
        let from = Place::new();
        let daemon = lan.hub.within(|| registries::start(&from))?;
        let target = format!("{}/team/app:1", daemon.host);
        lan.hub.within(|| push_image(&from, mebibytes, &target, is_indexed));
        let layers = Arc::new(AtomicU64::new(0));
        let (upstream, counted) = (daemon.host.clone(), Arc::clone(&layers));
        let names = layer_names(&from, &target);
        let origin = lan.hub.within(move || {
            Server::start_at(&format!("{HUB}:0"), move |request, _| {
                let reply = through(&upstream, request);
                if request.method == "GET" && names.iter().any(|it| request.path.contains(&**it)) {
                    counted.fetch_add(reply.body.len() as u64, Ordering::SeqCst);
                }
                reply
            })
        });
        let image = format!("{}/team/app:1", origin.host());
        let mut stage = Self {
            lan,
            origin,
            layers,
            image,
            bytes: 0,
            expected: Default::default(),
            layer_bytes: 0,
            _from: from,
            _daemon: daemon,
        };
        let alone = stage.node(0, |_| Vec::new());
        alone.pull("--form tar ");
        let (expected, bytes) = (alone.shown(), stage.sent());
        let layer_bytes = stage.layers.swap(0, Ordering::SeqCst);
        drop(alone);
        (stage.expected, stage.bytes, stage.layer_bytes) = (expected, bytes, layer_bytes);
        Some(stage)
    }

    /// Returns the number of bytes that the registry has sent.
    fn sent(&self) -> u64 {
        self.origin.sent.load(Ordering::SeqCst)
    }

    /// Makes an empty store whose mirrors are these, in this order: by default, all other nodes.
    fn node(&self, number: usize, mirrors: impl FnOnce(Vec<String>) -> Vec<String>) -> Node<'_> {
        let others = (0..NODES).filter(|it| *it != number);
        let others = others.map(|it| format!("{}:{PORT}", address(it))).collect();
        let place = Place::new();
        let host = self.origin.host();
        let folder = place.path("certs").join(&host);
        fs::create_dir_all(&folder).unwrap();
        let text = mirrors(others).iter().fold(format!("server = \"http://{host}\"\n"), |text, it| {
            text + &format!(
                "[host.\"http://{it}\"]\ncapabilities = [\"pull\", \"resolve\"]\ndial_timeout = \"500ms\"\n"
            )
        });
        fs::write(folder.join("hosts.toml"), text).unwrap();
        Node { stage: self, number, peer: None, place }
    }

    fn nodes(&self) -> Vec<Node<'_>> {
        (0..NODES).map(|it| self.node(it, |others| others)).collect()
    }

    /// Checks that all stores have the same image as a store without peers.
    fn check(&self, nodes: &[Node<'_>]) {
        for node in nodes {
            assert_eq!(node.shown(), self.expected, "node {}", node.number);
        }
    }
}

impl Node<'_> {
    fn namespace(&self) -> &Namespace {
        &self.stage.lan.nodes[self.number]
    }

    /// Runs a command in the namespace. It must succeed.
    fn out(&self, line: &str) -> String {
        self.namespace().within(|| self.place.out(line))
    }

    fn pull(&self, options: &str) {
        self.out(&format!("pull --quiet --certs-dir certs {options}{}", self.stage.image));
    }

    /// Starts the registry over the store.
    fn serve(&mut self) {
        let listen = format!("{}:{PORT}", address(self.number));
        let options = ["--listen", &listen, "--repository", "**"];
        let peer = self.namespace().within(|| Peer::start_with(&self.place, &options));
        self.peer = Some(peer);
    }

    /// Mounts the lazy image, and lets it become complete.
    fn complete(&self) -> Child {
        let certs = self.place.path("certs");
        let options = ["--certs-dir", certs.to_str().unwrap()];
        let service = self.namespace().within(|| serve_with(&self.place, &options, |it| it));
        fs::create_dir(self.place.path("root")).unwrap();
        self.out(&format!("mount --lazy --complete {} root", self.stage.image));
        service
    }

    /// Waits until the image was compared with its layers, and ends the service.
    fn wait_until_complete(&self, mut service: Child) {
        wait_for("all of the image", || {
            let lazy = fs::read_dir(self.place.path("store/lazy")).unwrap();
            let names = lazy.map(|it| it.unwrap().file_name().into_string().unwrap());
            !names.into_iter().any(|it| it.ends_with(".state"))
        });
        self.place.out("umount root");
        end(&self.place, &mut service);
    }

    /// Returns image and manifest, after a check of all data.
    fn shown(&self) -> (String, String) {
        self.place.out("fsck --deep");
        let shown = self.place.out(&format!("show --json {}", self.stage.image));
        let shown: Value = serde_json::from_str(&shown).unwrap();
        ["image", "manifestDigest"].map(|it| shown[it].as_str().unwrap().to_owned()).into()
    }
}

/// Pushes an image of three layers.
fn push_image(from: &Place, mebibytes: usize, target: &str, is_indexed: bool) {
    let noise = testing::noise(mebibytes << 20);
    let mut rest = &noise[..];
    let (mut layers, mut diff_ids) = (Vec::new(), Vec::new());
    let blobs = from.path("layout/blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    let add = |media_type: &str, bytes: &[u8]| {
        let digest = Digest::sha256(bytes);
        fs::write(blobs.join(digest.to_string().trim_start_matches("sha256:")), bytes).unwrap();
        json!({"mediaType": media_type, "digest": digest.to_string(), "size": bytes.len()})
    };
    for (number, eighths) in [1, 3, 4].into_iter().enumerate() {
        let tree = from.path(&format!("tree-{number}"));
        fs::create_dir(&tree).unwrap();
        let (these, behind) = rest.split_at((mebibytes << 20) / 8 * eighths);
        rest = behind;
        write(&tree.join(format!("noise-{number}")), these, 0o644);
        for at in 0..100 {
            let text = format!("{number} {at} ").repeat(99);
            write(&tree.join(format!("file-{number}-{at}")), text.as_bytes(), 0o644);
        }
        let tar = from.path("layer.tar");
        let mut command = Command::new("tar");
        command.args(["--format=posix", "-cf"]).arg(&tar).arg("-C").arg(&tree).arg(".");
        assert!(command.status().unwrap().success());
        let tar = fs::read(tar).unwrap();
        diff_ids.push(Digest::sha256(&tar).to_string());
        layers.push(add("application/vnd.oci.image.layer.v1.tar", &tar));
    }
    let config = json!({
        "architecture": "amd64",
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    });
    let config = add("application/vnd.oci.image.config.v1+json", config.to_string().as_bytes());
    let kind = "application/vnd.oci.image.manifest.v1+json";
    let manifest =
        json!({"schemaVersion": 2, "mediaType": kind, "config": config, "layers": layers});
    let manifest = add(kind, manifest.to_string().as_bytes());
    let index = json!({"schemaVersion": 2, "manifests": [manifest]});
    fs::write(from.path("layout/index.json"), index.to_string()).unwrap();
    fs::write(from.path("layout/oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    from.out("import --quiet oci:layout a:1");
    from.out(&format!("push --quiet a:1 {target}"));
    from.out(&format!("pull --quiet --form tar --keep-layers {target}"));
    if is_indexed {
        from.out(&format!("index --quiet --no-start --push {target} {target}"));
    }
}

/// Returns the digests of the image's layers in the registry.
fn layer_names(from: &Place, target: &str) -> Vec<String> {
    let layers = documents(from, target).manifest.layers;
    assert_eq!(layers.len(), 3);
    layers.iter().map(|it| it.digest.to_string()).collect()
}

/// Pulls one after the other, and three at the same time. The registry sends the image once.
#[test]
fn five_nodes_pull_an_image_one_after_the_other() {
    let Some(stage) = Stage::new(8, false) else { return };
    let mut nodes = stage.nodes();
    let before = stage.sent();
    nodes[0].pull("--keep-index ");
    nodes[0].serve();
    nodes[1].pull("--form tar ");
    nodes[1].serve();
    thread::scope(|scope| {
        for node in &nodes[2..] {
            scope.spawn(move || node.pull("--form tar "));
        }
    });
    let sent = stage.sent() - before;
    stage.check(&nodes);
    eprintln!("five nodes: the registry sent {sent} bytes; one node alone gets {}", stage.bytes);
    assert!(stage.bytes > 8 << 20, "{}", stage.bytes);
    assert!(sent * 100 <= stage.bytes * 105, "{sent} of {}", stage.bytes);
}

/// A peer that ends during a pull, or flips bits, costs time. The images are right.
#[test]
fn five_nodes_pull_an_image_from_peers_that_fail() {
    let Some(stage) = Stage::new(8, false) else { return };
    let mut first = stage.node(0, |others| others);
    first.pull("--form tar ");
    first.serve();
    let real = format!("{}:{PORT}", address(0));
    let upstream = real.clone();
    let liar = stage.lan.hub.within(|| {
        Server::start_at(&format!("{HUB}:0"), move |request, _| flipped(&upstream, request))
    });
    // The peer ends after it has sent half of the first layer.
    let peer = Mutex::new(first.peer.take());
    let upstream = real.clone();
    let dying = stage.lan.hub.within(|| {
        Server::start_at(&format!("{HUB}:0"), move |request, _| {
            let reply = through(&upstream, request);
            if request.method == "GET" && reply.body.len() > 1 << 20 {
                drop(peer.lock().unwrap().take());
                let half = reply.body.len() / 2;
                return reply.cut(half);
            }
            reply
        })
    });
    let mut nodes = vec![first];
    nodes.extend((1..3).map(|it| stage.node(it, |_| vec![liar.host()])));
    nodes[1..].iter().for_each(|it| it.pull("--form tar "));
    assert!(liar.sent.load(Ordering::SeqCst) > 1 << 20, "nothing came from the peer that lies");
    nodes.extend((3..5).map(|it| stage.node(it, |_| vec![dying.host(), real.clone()])));
    nodes[3..].iter().for_each(|it| it.pull("--form tar "));
    assert!(dying.sent.load(Ordering::SeqCst) > 1 << 18, "nothing came from the peer that ended");
    stage.check(&nodes);
}

/// Forwards a request, and flips a bit of each layer and of each part.
fn flipped(upstream: &str, request: &Request) -> Reply {
    let mut reply = through(upstream, request);
    if request.method == "GET"
        && request.path.contains("/blobs/")
        && let Some(byte) = reply.body.last_mut()
    {
        *byte ^= 1;
    }
    reply
}

/// All nodes fetch the whole image at the same time, and exchange what they have. Returns the bytes of layers that the
/// registry has sent.
fn complete_together(
    stage: &Stage,
    nodes: &mut [Node<'_>],
    meanwhile: impl FnOnce(&mut [Node<'_>]),
) -> u64 {
    nodes.iter().for_each(|it| it.pull("--lazy=require "));
    nodes.iter_mut().for_each(Node::serve);
    let before = stage.layers.load(Ordering::SeqCst);
    let services = thread::scope(|scope| {
        let started: Vec<_> = nodes.iter().map(|it| scope.spawn(move || it.complete())).collect();
        started.into_iter().map(|it| it.join().unwrap()).collect::<Vec<_>>()
    });
    meanwhile(nodes);
    nodes.iter().zip(services).for_each(|(node, service)| node.wait_until_complete(service));
    let sent = stage.layers.load(Ordering::SeqCst) - before;
    eprintln!(
        "five nodes at once: {sent} bytes of layers from the registry, which has {}",
        stage.layer_bytes
    );
    stage.check(nodes);
    sent
}

/// Each node fetches a part from the registry only if no other node has it at that moment.
#[test]
fn five_nodes_complete_a_lazy_image_at_the_same_time() {
    if !can_serve() {
        return;
    }
    let Some(stage) = Stage::new(64, true) else { return };
    let mut nodes = stage.nodes();
    let sent = complete_together(&stage, &mut nodes, |_| ());
    // Without an exchange, it would be five times the layers. It is usually 1.3 times: twenty requests run at the same
    // time, for 64 parts.
    assert!(sent <= stage.layer_bytes * 3, "{sent} of {}", stage.layer_bytes);
    assert!(sent >= stage.layer_bytes, "{sent} of {}", stage.layer_bytes);
}

#[test]
fn five_nodes_complete_a_lazy_image_although_one_ends_and_one_lies() {
    if !can_serve() {
        return;
    }
    let Some(stage) = Stage::new(16, true) else { return };
    let real = format!("{}:{PORT}", address(0));
    let liar = stage.lan.hub.within(|| {
        Server::start_at(&format!("{HUB}:0"), move |request, _| flipped(&real, request))
    });
    // To these nodes, the first one lies.
    let lied_to = |others: Vec<String>| {
        let rest = others.into_iter().filter(|it| *it != format!("{}:{PORT}", address(0)));
        [liar.host()].into_iter().chain(rest).collect::<Vec<_>>()
    };
    let mut nodes = vec![stage.node(0, |others| others)];
    nodes.extend((1..3).map(|it| stage.node(it, lied_to)));
    nodes.extend((3..5).map(|it| stage.node(it, |others| others)));
    let sent = complete_together(&stage, &mut nodes, |nodes| {
        // It may be complete by now, on a fast machine.
        wait_for("some bytes", || stage.layers.load(Ordering::SeqCst) > stage.layer_bytes / 4);
        drop(nodes[4].peer.take());
    });
    assert!(sent < stage.layer_bytes * 5, "{sent} of {}", stage.layer_bytes);
    assert!(liar.sent.load(Ordering::SeqCst) > 0, "no node asked the peer that lies");
}
