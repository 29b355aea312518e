//! Tests pushes: which requests and bytes are sent, and registries that make false claims.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read as _;
use std::sync::Mutex;

use image::erofs::read::{Image, Owners, View, to_tree};
use quire_transfer as transfer;

use transfer::commit::{Commit, commit};
use transfer::export::How;
use transfer::import::ImportOptions;
use transfer::pull::{Layers, default_name};
use transfer::push::{PushError, Sent};

use super::pulls::{Served, image, layer, pull_name, push_over, push_to, served};
use super::*;
use crate::home::{Home, usual_wishes};
use testing::fake::{Reply, Request, Server, content, forward, reply};

/// The behavior of a registry.
#[derive(Clone, Copy, PartialEq)]
enum Manner {
    Honest,
    /// Starts an upload instead of mounting a blob.
    NoMounts,
    /// Claims to have every blob, but accepts no manifest without its blobs.
    Liar,
    /// Like [`Self::Liar`], but with the size of another blob.
    OtherSize,
    /// Accepts no manifest.
    Stubborn,
}

/// A registry in memory, for blobs that are sent in one request.
struct Memory {
    manner: Manner,
    blobs: BTreeMap<String, Vec<u8>>,
    /// Pairs of repository and blob.
    has: BTreeSet<(String, String)>,
    manifests: BTreeMap<String, Vec<u8>>,
}

impl Memory {
    fn start(manner: Manner, base: Option<&Served>) -> Server {
        let mut memory = Self {
            manner,
            blobs: BTreeMap::new(),
            has: BTreeSet::new(),
            manifests: BTreeMap::new(),
        };
        if let Some(it) = base {
            for blob in it.layers.iter().map(|it| &it.blob).chain([&it.config]) {
                memory.put("app", &digest(blob).to_string(), blob);
            }
            memory.manifests.insert("app/1".to_owned(), it.manifest.clone());
        }
        let memory = Mutex::new(memory);
        Server::start(move |request, _| memory.lock().unwrap().answer(request))
    }

    fn put(&mut self, repository: &str, digest: &str, blob: &[u8]) {
        self.blobs.insert(digest.to_owned(), blob.to_vec());
        self.has.insert((repository.to_owned(), digest.to_owned()));
    }

    fn answer(&mut self, request: &Request) -> Reply {
        let path =
            request.path.strip_prefix("/v2/").unwrap().replace("%3A", ":").replace("%2F", "/");
        let (path, query) = path.split_once('?').unwrap_or((&path, ""));
        let query: BTreeMap<_, _> = query.split('&').filter_map(|it| it.split_once('=')).collect();
        if let Some((repository, _)) = path.split_once("/blobs/uploads/") {
            return self.upload(request, repository, &query);
        }
        if let Some((repository, digest)) = path.split_once("/blobs/") {
            let is_there = self.has.contains(&(repository.to_owned(), digest.to_owned()));
            return match (request.method.as_str(), self.manner) {
                ("HEAD", Manner::Liar) => reply(200),
                ("HEAD", Manner::OtherSize) => reply(200).header("content-length", "7"),
                _ if is_there => content(request, &self.blobs[digest]),
                _ => reply(404),
            };
        }
        let (repository, name) = path.split_once("/manifests/").unwrap();
        let key = format!("{repository}/{name}");
        match request.method.as_str() {
            "PUT" => {
                let body = String::from_utf8(request.body.clone()).unwrap();
                let named =
                    body.split("\"digest\":\"").skip(1).map(|it| it.split('"').next().unwrap());
                let mut named = named.map(|it| (repository.to_owned(), it.to_owned()));
                if self.manner == Manner::Stubborn || !named.all(|it| self.has.contains(&it)) {
                    let error =
                        r#"{"errors":[{"code":"MANIFEST_BLOB_UNKNOWN","message":"blob unknown"}]}"#;
                    return reply(404).body(error);
                }
                self.manifests.insert(key, request.body.clone());
                reply(201)
            }
            _ => match self.manifests.get(&key) {
                Some(bytes) => {
                    reply(200).header("content-type", super::pulls::MANIFEST).body(bytes)
                }
                None => reply(404),
            },
        }
    }

    fn upload(
        &mut self,
        request: &Request,
        repository: &str,
        query: &BTreeMap<&str, &str>,
    ) -> Reply {
        let digest =
            query.get("mount").or_else(|| query.get("digest")).copied().unwrap_or_default();
        match (request.method.as_str(), query.get("from")) {
            ("POST", Some(from))
                if self.manner != Manner::NoMounts
                    && self.has.contains(&((*from).to_owned(), digest.to_owned())) =>
            {
                self.has.insert((repository.to_owned(), digest.to_owned()));
                reply(201)
            }
            ("POST", _) => {
                reply(202).header("location", &format!("/v2/{repository}/blobs/uploads/1"))
            }
            ("PUT", _) => {
                assert_eq!(super::digest(&request.body).to_string(), digest, "what is sent");
                self.put(repository, digest, &request.body);
                reply(201)
            }
            _ => reply(204),
        }
    }
}

/// Adds a layer to the image `below`. Returns the layer as a tar of one file.
fn derive(home: &Home, below: &str, name: &str) -> Vec<u8> {
    let named = |name: &str| default_name(&name.parse().unwrap()).unwrap();
    let reference = home.store.refs.get(&named(below)).unwrap().unwrap();
    let opened = Image::open(home.store.open_image(&reference.image).unwrap().image).unwrap();
    let tree = to_tree(&opened, View::Composefs(Owners::AsWritten)).unwrap().tree;
    let manifest = reference.manifest.unwrap();
    let made = Commit {
        manifest: &manifest,
        tree: &tree,
        created: "2026-01-02T03:04:05Z",
        author: None,
        message: None,
        command: "",
        changes: &[],
    };
    let tar = layer("mine", 50_000).tar;
    let name = named(name);
    let options = ImportOptions { name: Some(&name), ..usual_wishes() };
    commit(&home.store, &made, &tar[..], &home.environment(), &options).unwrap();
    tar
}

/// Returns the kinds of the requests that send data.
fn sent(lines: &[String]) -> Vec<String> {
    let lines = lines.iter().filter(|it| it.starts_with("PUT") || it.starts_with("PATCH"));
    let kind = |line: &String| match (line.starts_with("PATCH"), line.contains("/manifests/")) {
        (true, _) => "part".to_owned(),
        (false, true) => "manifest".to_owned(),
        (false, false) => "blob".to_owned(),
    };
    lines.map(kind).collect()
}

fn base() -> Served {
    served(vec![layer("a", 300_000), layer("b", 20_000)])
}

/// Pushes a derived image to the repository of its base, and to another one.
fn derived_images(server: &Server) {
    let host = server.host();
    let [from, own, other] = ["app:1", "app:2", "team/other:1"].map(|it| format!("{host}/{it}"));
    let home = Home::new();
    let first = image(home.pull(&host));
    let tar = derive(&home, &from, &own);
    let before = server.lines().len();
    let pushed = push_to(&home, &own, &own);
    let lines = server.lines().split_off(before);
    assert_eq!(sent(&lines), ["blob", "blob", "manifest"], "its layer and its config: {lines:?}");
    let (there, mounted) = ((How::There, Sent::Not), (How::There, Sent::Mounted));
    assert_eq!(pushed.layers[..2], [there, there]);
    let (How::New, Sent::Bytes(bytes)) = pushed.layers[2] else { panic!("{pushed:?}") };
    assert!(!pushed.is_unchanged);
    // The layer is compressed, as its media type says.
    let manifest = registry(&host, &settings()).manifest("2").unwrap();
    assert_eq!(manifest.digest, pushed.digest);
    let manifest: serde_json::Value = serde_json::from_slice(&manifest.bytes).unwrap();
    let layer = &manifest["layers"][2];
    assert_eq!(layer["mediaType"], "application/vnd.oci.image.layer.v1.tar+gzip");
    assert_eq!(layer["size"], bytes);
    let blob = layer["digest"].as_str().unwrap().parse().unwrap();
    let blob = read(registry(&host, &settings()).blob(&blob, Some(bytes), 0)).unwrap();
    let mut unpacked = Vec::new();
    flate2::read::GzDecoder::new(&blob[..]).read_to_end(&mut unpacked).unwrap();
    assert_same(&unpacked, &tar);
    // The second push does not even send that layer.
    let before = server.lines().len();
    assert_eq!(push_to(&home, &own, &own).digest, pushed.digest);
    assert_eq!(sent(&server.lines()[before..]), ["manifest"]);
    // In another repository, the registry mounts all its blobs, including the new layer.
    let before = server.lines().len();
    let digest = pushed.digest;
    let pushed = push_to(&home, &own, &other);
    assert_eq!((pushed.digest, &pushed.layers[..]), (digest, &[mounted; 3][..]));
    assert_eq!(sent(&server.lines()[before..]), ["blob", "manifest"], "its config");
    // The unchanged base layers keep their digests, even if the store has no name of this registry for the base image.
    home.call(&from, "mine:1");
    let name = default_name(&from.parse().unwrap()).unwrap();
    home.store.remove_ref(&name).unwrap();
    let pushed = push_to(&home, "mine:1", &format!("{host}/team/third:1"));
    assert!(pushed.is_unchanged);
    assert_eq!(pushed.layers, [mounted, mounted]);
    // Other stores pull exactly the pushed image.
    let image_of = |name: &str| image(pull_name(&Home::new(), name, Layers::Forget, &settings()));
    assert_eq!(image_of(&format!("{host}/team/third:1")), first);
    let committed = home.store.refs.get(&default_name(&own.parse().unwrap()).unwrap());
    let committed = committed.unwrap().unwrap().image;
    assert_eq!([image_of(&own), image_of(&other)], [committed; 2]);
}

#[test]
fn a_derived_image_sends_its_own_layer_alone() {
    derived_images(&Memory::start(Manner::Honest, Some(&base())));
}

#[test]
fn a_derived_image_sends_its_own_layer_alone_to_docker_registry() {
    let Some(daemon) = super::real::start("") else { return };
    base().put(&daemon.host);
    let host = daemon.host.clone();
    let through = move |request: &Request, _| {
        let mut request = request.clone();
        // The header is needed so that URLs in the registry's responses refer to this proxy.
        request.headers.entry("host".to_owned()).or_default();
        forward(&host, &request, request.body.len()).unwrap()
    };
    derived_images(&Server::start(through));
}

#[test]
fn a_registry_without_mounts_gets_the_bytes() {
    let base = base();
    let server = Memory::start(Manner::NoMounts, Some(&base));
    let (home, host) = (Home::new(), server.host());
    let first = image(home.pull_as(&host, Layers::Keep));
    let (from, to) = (format!("{host}/app:1"), format!("{host}/other:1"));
    let pushed = push_to(&home, &from, &to);
    let bytes = |at: usize| (How::Kept, Sent::Bytes(base.layers[at].blob.len() as u64));
    assert_eq!(
        (pushed.digest, &pushed.layers[..]),
        (digest(&base.manifest), &[bytes(0), bytes(1)][..])
    );
    assert!(server.lines().iter().any(|it| it.starts_with("DELETE")), "the upload that began");
    // Without mounts, the blob that the first push has recorded cannot be reused in another repository.
    let own = format!("{host}/app:2");
    derive(&home, &from, &own);
    let second = push_to(&home, &own, &format!("{host}/second:1"));
    let third = push_to(&home, &own, &format!("{host}/third:1"));
    assert!(matches!(third.layers[2], (How::New, Sent::Bytes(_))), "{third:?}");
    assert_eq!((second.digest, second.layers), (third.digest, third.layers));
    assert_eq!(image(pull_name(&Home::new(), &to, Layers::Forget, &settings())), first);
}

#[test]
fn a_registry_that_has_not_what_it_says_gets_all_of_it() {
    let base = base();
    let from = Memory::start(Manner::Honest, Some(&base));
    let pulled = format!("{}/app:1", from.host());
    let home = Home::new();
    let first = image(home.pull(&from.host()));
    for manner in [Manner::Liar, Manner::OtherSize] {
        let server = Memory::start(manner, None);
        let to = format!("{}/app:1", server.host());
        let pushed = push_to(&home, &pulled, &to);
        assert!(pushed.layers.iter().all(|(how, _)| *how == How::Compressed), "{pushed:?}");
        let manifests = sent(&server.lines()).iter().filter(|it| *it == "manifest").count();
        assert_eq!(manifests, if manner == Manner::Liar { 2 } else { 1 });
        assert_eq!(image(pull_name(&Home::new(), &to, Layers::Forget, &settings())), first);
    }
    let server = Memory::start(Manner::Stubborn, None);
    let to = format!("{}/app:1", server.host());
    let error = push_over(&home, &pulled, &to, &settings()).unwrap_err();
    assert!(matches!(error, PushError::Registry { .. }), "{error:?}");
    let text = chain(&error);
    assert!(text.contains("the registry lacks a blob that the manifest names"), "{text}");
    let manifests = sent(&server.lines()).iter().filter(|it| *it == "manifest").count();
    assert_eq!(manifests, 2, "it is tried twice");
}

#[test]
fn a_registry_that_has_nothing_gets_everything() {
    let server = Memory::start(Manner::Honest, Some(&base()));
    let home = Home::new();
    home.pull(&server.host()).unwrap();
    let from = format!("{}/app:1", server.host());
    let own = format!("{}/app:2", server.host());
    derive(&home, &from, &own);
    let target = Memory::start(Manner::Honest, None);
    let to = format!("{}/app:1", target.host());
    let pushed = push_to(&home, &own, &to);
    let hows: Vec<_> = pushed.layers.iter().map(|it| it.0).collect();
    assert_eq!(hows, [How::Compressed, How::Compressed, How::New]);
    let committed = home.store.refs.get(&default_name(&own.parse().unwrap()).unwrap());
    let committed = committed.unwrap().unwrap().image;
    assert_eq!(image(pull_name(&Home::new(), &to, Layers::Forget, &settings())), committed);
}
