//! Requests that no friendly client sends, and images that a client must not get.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::Value;
use store::{OpenOptions, Store, Who};
use transfer::StoredImage;

use super::{Origin, Peer};
use crate::{Place, write};

/// The response to a request: status, head and body.
struct Answer {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines().filter_map(|it| it.split_once(": "));
        lines.find(|it| it.0.eq_ignore_ascii_case(name)).map(|it| it.1)
    }
}

/// Sends bytes, and returns the response, or `None` if the server closes the connection without one.
fn send(host: &str, request: &[u8]) -> Option<Answer> {
    let mut stream = TcpStream::connect(host).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    // The server may close the connection before it has read everything.
    let _sent = stream.write_all(request);
    let mut bytes = Vec::new();
    // A connection that is reset has sent its response before that.
    let _read = stream.read_to_end(&mut bytes);
    let end = bytes.windows(4).position(|it| it == b"\r\n\r\n")?;
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(Answer { status, head, body: bytes[end + 4..].to_vec() })
}

fn ask(host: &str, method: &str, path: &str, headers: &str) -> Answer {
    let text = format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\r\n");
    send(host, text.as_bytes()).unwrap_or_else(|| panic!("no response to {method} {path}"))
}

/// Returns the manifest's digest, the documents and a kept blob of an image.
fn documents(place: &Place, name: &str) -> StoredImage {
    let store =
        Store::open(&place.path("store"), Who::this_process(), OpenOptions::read()).unwrap();
    StoredImage::load(&store, &store.resolve(name).unwrap().manifest.unwrap()).unwrap()
}

#[test]
fn hostile_requests_get_errors() {
    let Some(origin) = Origin::new() else { return };
    let place = Place::new();
    origin.pull(&place, "--keep-layers ");
    let image = documents(&place, &origin.image);
    let (host, name) = (origin.server.host(), "team/app");
    let peer = Peer::start(&place);
    let get = |path: &str, headers: &str| ask(&peer.host, "GET", path, headers);
    let ns = host.replace(':', "%3A");
    let layer = &image.manifest.layers[0];
    let [blob, tar] = [layer.digest, image.config.diff_ids()[0]]
        .map(|it| format!("/v2/{name}/blobs/{it}?ns={ns}"));
    let manifest = format!("/v2/{name}/manifests/{}?ns={ns}", image.digest);

    let found = get(&manifest, "");
    assert_eq!((found.status, &found.body), (200, &image.manifest_bytes));
    assert_eq!(found.header("docker-content-digest"), Some(&*image.digest.to_string()));
    assert!(found.header("content-type").unwrap().contains("manifest"), "{}", found.head);
    assert_eq!(get(&format!("/v2/{host}/{name}/manifests/{}", image.digest), "").status, 200);
    let whole = [&blob, &tar].map(|it| get(it, "").body);
    assert_eq!(whole[0].len() as u64, layer.size);
    assert!(image::digest::Digest::sha256(&whole[0]) == layer.digest);
    assert!(image::digest::Digest::sha256(&whole[1]) == image.config.diff_ids()[0]);
    for (path, whole) in [&blob, &tar].into_iter().zip(&whole) {
        let size = whole.len();
        let head = ask(&peer.host, "HEAD", path, "");
        assert_eq!((head.status, head.body.len()), (200, 0));
        assert_eq!(head.header("content-length"), Some(&*size.to_string()));
        assert_eq!(head.header("quire-layers"), Some("diff-id"));
        for (range, part) in [
            ("0-0", 0..1),
            ("70000-5000000", 70_000..5_000_001),
            ("5000000-", 5_000_000..size),
            ("-3", size - 3..size),
        ] {
            let found = get(path, &format!("range: bytes={range}\r\n"));
            assert_eq!(found.status, 206, "{range}");
            let said = format!("bytes {}-{}/{size}", part.start, part.end - 1);
            assert_eq!(found.header("content-range"), Some(&*said));
            assert!(found.body == whole[part], "{range}");
        }
        for range in ["99999999-", "-0", "0-1,4-5", "99999999999999999999999-"] {
            let found = get(path, &format!("range: bytes={range}\r\n"));
            assert_eq!(found.status, 416, "{range}");
            assert_eq!(found.header("content-range"), Some(&*format!("bytes */{size}")));
        }
        assert_eq!(get(path, "range: bytes=5-4\r\n").status, 200);
    }

    let digest = image.digest;
    for (path, status) in [
        ("/v2/", 200),
        ("/v2", 200),
        ("/", 404),
        ("/etc/passwd", 404),
        ("/v2/_catalog", 404),
        (&format!("/v2/{name}/tags/list?ns={ns}"), 404),
        (&format!("/v2/{name}/manifests/1?ns={ns}"), 404),
        (&format!("/v2/{name}/referrers/{digest}?ns={ns}"), 404),
        (&format!("/v2/{name}/blobs/{digest}?ns={ns}"), 404),
        (&format!("/v2/{name}/manifests/{}?ns={ns}", layer.digest), 404),
        (&format!("/v2/{name}/manifests/{digest}"), 404),
        (&format!("/v2/{name}/manifests/{digest}?ns=ghcr.io"), 404),
        (&format!("/v2/team/other/manifests/{digest}?ns={ns}"), 404),
        (&format!("/v2/../../../etc/passwd/blobs/{digest}?ns={ns}"), 400),
        (&format!("/v2/team/%2e%2e/app/blobs/{digest}?ns={ns}"), 400),
        (&format!("/v2/{name}/blobs/../../../../meta?ns={ns}"), 404),
        (&format!("/v2/{name}/blobs/sha256:..%2f..%2fmeta?ns={ns}"), 400),
        (&format!("/v2/{name}/blobs/{}?ns={ns}", digest.to_string().to_uppercase()), 400),
        (&format!("/v2/{name}/blobs/{digest}?ns=../.."), 400),
        (&format!("/v2/{}/blobs/{digest}", "a/".repeat(2000)), 404),
    ] {
        for method in ["GET", "HEAD"] {
            let found = ask(&peer.host, method, path, "");
            assert_eq!(found.status, status, "{method} {path}");
            if status >= 400 && method == "GET" {
                let said: Value = serde_json::from_slice(&found.body).unwrap();
                assert!(said["errors"][0]["code"].is_string(), "{path}: {said}");
            }
        }
    }
    for method in ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"] {
        assert_eq!(ask(&peer.host, method, &blob, "content-length: 0\r\n").status, 405, "{method}");
    }
    assert_eq!(get("/v2/", &format!("x: {}\r\n", "a".repeat(20_000))).status, 431);
    assert_eq!(get("/v2/", &"x: y\r\n".repeat(200)).status, 431);
    for bytes in [
        &b"\x16\x03\x01\x02\x00"[..],
        b"GET\r\n\r\n",
        b"\0\0\0\0\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    ] {
        let found = send(&peer.host, &[bytes, &[b'\n'; 64]].concat());
        assert!(found.is_none_or(|it| it.status >= 400), "{}", bytes.escape_ascii());
    }
    // Clients that send nothing, or take nothing, do not keep others from being served.
    let silent: Vec<_> = (0..40).map(|_| TcpStream::connect(&peer.host).unwrap()).collect();
    let idle: Vec<_> = (0..8)
        .map(|_| {
            let mut stream = TcpStream::connect(&peer.host).unwrap();
            write!(stream, "GET {tar} HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
            stream
        })
        .collect();
    assert!(get(&blob, "").body == whole[0]);
    drop((silent, idle));

    let with_tags = Peer::start_with(
        &place,
        &["--listen", "127.0.0.1:0", "--repository", &format!("{host}/team/*"), "--tags"],
    );
    let found = ask(&with_tags.host, "GET", &format!("/v2/{name}/manifests/1?ns={ns}"), "");
    assert_eq!((found.status, &found.body), (200, &image.manifest_bytes));
}

/// Only repositories that were named are served, and only images that the policies accept.
#[test]
fn private_images_are_not_served() {
    let Some(origin) = Origin::new() else { return };
    let place = Place::new();
    origin.pull(&place, "--keep-layers ");
    let image = documents(&place, &origin.image);
    let host = origin.server.host();
    let path = |repository: &str| {
        let ns = host.replace(':', "%3A");
        let layer = image.manifest.layers[0].digest;
        [
            format!("/v2/{repository}/manifests/{}?ns={ns}", image.digest),
            format!("/v2/{repository}/blobs/{}?ns={ns}", image.manifest.config.digest),
            format!("/v2/{repository}/blobs/{layer}?ns={ns}"),
            format!("/v2/{repository}/blobs/{}?ns={ns}", image.config.diff_ids()[0]),
        ]
    };
    let check = |peer: &Peer, repository: &str, status: u16| {
        for path in path(repository) {
            let found = ask(&peer.host, "GET", &path, "");
            assert_eq!(found.status, status, "{path}");
        }
    };
    let start = |pattern: &str, more: &[&str]| {
        let options = ["--listen", "127.0.0.1:0", "--repository", pattern];
        Peer::start_with(&place, &[&options[..], more].concat())
    };
    // Another image is public, but not this one.
    place.tree("tree", "x");
    place.out(&format!("import --quiet dir:tree {host}/public/thing:1"));
    let public = start(&format!("{host}/public/*"), &[]);
    check(&public, "team/app", 404);
    check(&public, "public/thing", 404);
    check(&start(&format!("{host}/team/*"), &[]), "team/app", 200);
    // A name that the owner of the store adds opens a repository.
    place.out(&format!("tag {} {host}/public/app:1", origin.image));
    check(&start(&format!("{host}/public/*"), &[]), "public/app", 200);
    place.out(&format!("rmi {host}/public/app:1"));

    let policy = place.path("policy.toml");
    write(&policy, b"default = \"none\"\n", 0o644);
    let mut command = place.command(&["--policy", policy.to_str().unwrap(), "serve", "--registry"]);
    command.args(["--listen", "127.0.0.1:0", "--repository", "**"]);
    check(&Peer::of(command), "team/app", 404);

    for (options, said) in [
        ("", "--repository"),
        ("--repository local", "local"),
        ("--repository alpine", "has no registry"),
        ("--repository ** --listen nowhere", "--listen"),
        ("--repository ** --lazy", "--lazy"),
        ("--repository ** --socket x", "--socket"),
    ] {
        let line = format!("serve --registry {options}");
        let ran = place.run(line.trim());
        assert_ne!(ran.code, Some(0), "{line}");
        assert!(ran.err.contains(said), "{line}: {}", ran.err);
    }
}

/// A manifest can name any blob of the store. Only a blob that the store has unpacked to the image's layer is served.
#[test]
fn a_blob_that_a_manifest_only_names_is_not_served() {
    let Some(origin) = Origin::new() else { return };
    let kept = Place::new();
    origin.pull(&kept, "--keep-layers ");
    let image = documents(&kept, &origin.image);
    let peer = Peer::start(&kept);
    // This store gets the layer as a tar, because the other one has lost the blob.
    let file = image.manifest.layers[0].digest.file_name();
    let blob = kept.path("blob");
    std::fs::rename(kept.path("store/blobs").join(&file), &blob).unwrap();
    let to = origin.place_with_mirrors(&[&peer.host]);
    origin.refuse_blobs();
    origin.pull(&to, "");
    // The blob is in the store, but not because of this image.
    std::fs::copy(&blob, to.path("store/blobs").join(&file)).unwrap();
    let next = Peer::start(&to);
    let ns = origin.server.host().replace(':', "%3A");
    let status = |digest: &image::digest::Digest| {
        ask(&next.host, "GET", &format!("/v2/team/app/blobs/{digest}?ns={ns}"), "").status
    };
    assert_eq!(status(&image.manifest.layers[0].digest), 404);
    assert_eq!(status(&image.config.diff_ids()[0]), 200);
}
