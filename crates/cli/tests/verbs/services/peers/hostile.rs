//! Requests that no friendly client sends, and images that a client must not get.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, SystemTime};

use image::digest::Digest;
use serde_json::{Value, json};
use store::{OpenOptions, Seconds, Store, Who};
use testing::fake::{Server, content, reply, wait_for};
use transfer::StoredImage;

use super::{Origin, Peer};
use crate::{Place, write};

/// The response to a request: status, head and body.
pub(crate) struct Answer {
    pub(crate) status: u16,
    head: String,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
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

pub(crate) fn ask(host: &str, method: &str, path: &str, headers: &str) -> Answer {
    let text = format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\r\n");
    send(host, text.as_bytes()).unwrap_or_else(|| panic!("no response to {method} {path}"))
}

/// Returns the manifest's digest, the documents and a kept blob of an image.
pub(super) fn documents(place: &Place, name: &str) -> StoredImage {
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
    assert!(Digest::sha256(&whole[0]) == layer.digest);
    assert!(Digest::sha256(&whole[1]) == image.config.diff_ids()[0]);
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
    // A few clients that send nothing, or take nothing, do not keep others from being served.
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
    // A name that the owner of the store adds opens a repository, but the image is private as long as it has others.
    place.out(&format!("tag {} {host}/public/app:1", origin.image));
    check(&start(&format!("{host}/public/*"), &[]), "public/app", 404);
    let both = format!("{host}/team/*");
    check(&start(&format!("{host}/public/*"), &["--repository", &both]), "public/app", 200);
    // The same image also has a name without a registry.
    let all = format!("{host}/**");
    place.out(&format!("tag {} mine:1", origin.image));
    check(&start(&all, &[]), "team/app", 404);
    check(&start("**", &[]), "team/app", 200);
    place.out("rmi mine:1");
    check(&start(&all, &[]), "team/app", 200);
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

/// An attacker who knows the digests of a private image can publish an image with the same ones. The pull takes the bytes from
/// the store, but the peer does not serve them.
#[test]
fn private_bytes_are_not_served_under_another_name() {
    let Some(origin) = Origin::new() else { return };
    let place = Place::new();
    origin.pull(&place, "--keep-layers ");
    let image = documents(&place, &origin.image);
    // This image has the private layer below another layer.
    let own = tar_of_empty_file("evil");
    let own_digest = Digest::sha256(&own);
    let mut config: Value = serde_json::from_slice(&image.config_bytes).unwrap();
    config["rootfs"]["diff_ids"].as_array_mut().unwrap().push(own_digest.to_string().into());
    config.as_object_mut().unwrap().remove("history");
    let config = config.to_string().into_bytes();
    let config_digest = Digest::sha256(&config);
    let mut manifest: Value = serde_json::from_slice(&image.manifest_bytes).unwrap();
    manifest["config"]["digest"] = config_digest.to_string().into();
    manifest["config"]["size"] = config.len().into();
    let media_type = "application/vnd.oci.image.layer.v1.tar";
    let layer =
        json!({"mediaType": media_type, "digest": own_digest.to_string(), "size": own.len()});
    manifest["layers"].as_array_mut().unwrap().push(layer);
    let kind = manifest["mediaType"].as_str().unwrap().to_owned();
    let manifest = manifest.to_string().into_bytes();
    let manifest_digest = Digest::sha256(&manifest);
    let same = image.manifest_bytes.clone();
    // The registry has no byte of the private layer.
    let evil = Server::start(move |request, _| {
        let path = request.path.split('?').next().unwrap_or_default();
        let is_same = path.contains("/evil/same/");
        let last = path.rsplit('/').next().unwrap_or_default();
        let body = match last {
            "1" if is_same => &same,
            "1" => &manifest,
            _ if last == Digest::sha256(&same).to_string() => &same,
            _ if last == manifest_digest.to_string() => &manifest,
            _ if last == config_digest.to_string() => &config,
            _ if last == own_digest.to_string() => &own,
            _ => return reply(404),
        };
        content(request, body).header("content-type", &kind)
    });
    let host = evil.host();
    place.out(&format!("pull --quiet {host}/evil/same:1"));
    place.out(&format!("pull --quiet {host}/evil/layer:1"));

    let ns = host.replace(':', "%3A");
    let blob = |digest: &Digest| format!("blobs/{digest}");
    let (private, tar) = (&image.manifest.layers[0].digest, &image.config.diff_ids()[0]);
    let rows = [
        ("same", format!("manifests/{}", image.digest), 404),
        ("same", blob(&image.manifest.config.digest), 404),
        ("same", blob(private), 404),
        ("same", blob(tar), 404),
        ("layer", format!("manifests/{manifest_digest}"), 200),
        ("layer", blob(&config_digest), 200),
        ("layer", blob(&own_digest), 200),
        ("layer", blob(private), 404),
        ("layer", blob(tar), 404),
    ];
    let check = |pattern: &str, is_public: bool| {
        let peer = Peer::start_with(&place, &["--listen", "127.0.0.1:0", "--repository", pattern]);
        for (name, item, status) in &rows {
            let found = ask(&peer.host, "GET", &format!("/v2/evil/{name}/{item}?ns={ns}"), "");
            let status = if is_public { 200 } else { *status };
            assert_eq!(found.status, status, "{pattern}: {name}: {item}");
        }
    };
    check(&format!("{host}/**"), false);
    // If everything is public, so is the layer. This also shows that the store has it for these images.
    check("**", true);
    // A removed name does not make an image public.
    place.out(&format!("rmi {}", origin.image));
    check(&format!("{host}/**"), false);
    // An interrupted pull leaves no image, only its layers and the record of the pull.
    place.out(&format!("rmi {host}/evil/same:1"));
    let store = Store::open(&place.path("store"), Who::this_process(), OpenOptions::write());
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
    store.unwrap().downloads.pin(&image.digest, Seconds(now.try_into().unwrap())).unwrap();
    place.out("gc");
    check(&format!("{host}/**"), false);
}

/// Returns a tar in the format ustar. Source: POSIX.1-2017, `pax`.
fn tar_of_empty_file(name: &str) -> Vec<u8> {
    let mut tar = vec![0; 512 + 1024];
    let mut set = |at: usize, text: &[u8]| tar[at..at + text.len()].copy_from_slice(text);
    set(0, name.as_bytes());
    set(100, b"0000644\0");
    set(108, b"0000000\0");
    set(116, b"0000000\0");
    set(124, b"00000000000\0");
    set(136, b"00000000000\0");
    set(148, b"        ");
    set(156, b"0");
    set(257, b"ustar\x0000");
    let sum: u32 = tar[..512].iter().map(|it| u32::from(*it)).sum();
    tar[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    tar
}

/// More connections than the limit are closed at once, and later ones are served.
#[test]
fn too_many_connections_are_closed() {
    let place = Place::new();
    place.tree("tree", "x");
    place.out("import --quiet dir:tree docker.io/library/a:1");
    let peer = Peer::start(&place);
    let mut open: Vec<_> = (0..512).map(|_| TcpStream::connect(&peer.host).unwrap()).collect();
    assert!(
        send(&peer.host, b"GET /v2/ HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").is_none()
    );
    open.truncate(500);
    wait_for("free connections", || {
        send(&peer.host, b"GET /v2/ HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            .is_some_and(|it| it.status == 200)
    });
    // The others were accepted, and still are.
    let stream = &mut open[0];
    stream.write_all(b"GET /v2/ HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
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
    let status = |digest: &Digest| {
        ask(&next.host, "GET", &format!("/v2/team/app/blobs/{digest}?ns={ns}"), "").status
    };
    assert_eq!(status(&image.manifest.layers[0].digest), 404);
    assert_eq!(status(&image.config.diff_ids()[0]), 200);
}
