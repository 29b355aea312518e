//! Tests that errors in a source are reported, and that the store stays unchanged.

use std::fs;

use serde_json::json;
use store::Digest;

use super::{Home, chain, usual_wishes};
use crate::build::{Age, Layout, Pack, Tar, docker_archive, pack};
use quire_transfer::import::{ImportOptions, Limits};

/// Imports a source that must be refused. In the message, `DIR` replaces the temporary directory.
fn refused(home: &Home, kind: &str, name: &str, options: &ImportOptions<'_>, expect: &str) {
    let before = home.files();
    let error = match home.import_with(kind, name, options) {
        Ok(report) => panic!("{expect}: it is image {}", report.image),
        Err(error) => chain(&error).replace(home.folder.path().to_str().unwrap(), "DIR"),
    };
    assert_eq!(error, expect);
    assert_eq!(home.files(), before, "{expect}");
}

fn check_tar(bytes: &[u8], expect: &str) {
    let home = Home::new();
    fs::write(home.path("a.tar"), bytes).unwrap();
    let expect = format!("cannot import layer 1 of 1 (DIR/a.tar): {expect}");
    refused(&home, "tar", "a.tar", &usual_wishes(), &expect);
}

/// A tar with files that pass through every thread, for use before the error.
fn good() -> Tar {
    Tar::from_text("f a 1").file("big", &vec![1; 2 << 20]).file("small", &[2; 1000])
}

#[test]
fn tars() {
    check_tar(
        b"no tar at all",
        "the tar is corrupt at byte 0, entry \"\": the stream ends 499 bytes early",
    );
    let whole = good().bytes();
    let big = &whole[..1 << 20];
    let missing = (2 << 20) + 1024 + 512 - (1 << 20);
    check_tar(
        big,
        &format!(
            "the tar is corrupt at byte {}, entry \"big\": the stream ends {missing} bytes early",
            big.len()
        ),
    );
    let mut flipped = good();
    flipped.entry("later", b'0', "", b"");
    let mut flipped = flipped.bytes();
    let at = flipped.len() - 1024 - 512;
    flipped[at] ^= 1;
    let error = format!("the tar is corrupt at byte {at}, entry \"\": the header's checksum is ");
    let home = Home::new();
    fs::write(home.path("a.tar"), &flipped).unwrap();
    let before = home.files();
    let message = chain(&home.import("tar", "a.tar").unwrap_err());
    assert!(message.contains(&error), "{message}");
    assert_eq!(home.files(), before);
}

#[test]
fn entries() {
    let with = |text: &str| {
        let rest = Tar::from_text(text).bytes();
        [&good().bytes()[..good().bytes().len() - 1024], &rest].concat()
    };
    let name = "has an invalid name: it contains \"..\"";
    check_tar(&with("f ../escape x"), &format!("entry \"../escape\" {name}"));
    check_tar(&with("f a/../../x x"), &format!("entry \"a/../../x\" {name}"));
    check_tar(&with("l x ../../etc/passwd"), &format!("entry \"../../etc/passwd\" {name}"));
    check_tar(&with("l x gone"), "\"x\" is a hard link to \"gone\", which does not exist");
    check_tar(&with("d dir, l x dir"), "\"x\" is a hard link to \"dir\", a directory");
    check_tar(&with("f a/b x"), "a component of the path \"a/b\" is not a directory");
    let mut socket = good();
    socket.entry("socket", b's', "", b"");
    check_tar(&socket.bytes(), "entry \"socket\" is of type 's', which is not supported");
}

/// GNU tar, Go and libarchive accept a tar without an end marker (opencontainers/umoci#436, vbatts/tar-split). An
/// import needs another proof that the tar is complete: the length in the trailer of a gzip file with one member.
#[test]
fn tars_without_an_end() {
    let whole = good().bytes();
    let tar = &whole[..whole.len() - 1024];
    let cut = "the tar has no end marker: it is empty or was cut off";
    check_tar(tar, cut);
    check_tar(&pack(tar, Pack::Gzips), cut);
    check_tar(&pack(tar, Pack::Zstd), cut);
    check_tar(&pack(b"", Pack::Gzip), cut);
    let home = Home::new();
    fs::write(home.path("a.tar"), pack(tar, Pack::Gzip)).unwrap();
    let report = home.import("tar", "a.tar").unwrap();
    assert_eq!(home.show(&report.image), "a=1 big=\\x01*2097152 small=\\x02*1000");
    assert!(home.rebuilt(&report.layers[0].diff_id) == tar);
}

#[test]
fn sizes_that_are_claimed() {
    // A header that claims 8 GiB less one byte, followed by little data, must not cost memory or disk space.
    let mut huge = good();
    huge.header("huge", b'0', "", (8 << 30) - 1);
    let bytes = huge.bytes();
    let missing = (8_u64 << 30) - 1 - 1024;
    let expect = format!(
        "the tar is corrupt at byte {}, entry \"huge\": the stream ends {missing} bytes early",
        bytes.len()
    );
    let home = Home::new();
    fs::write(home.path("a.tar"), &bytes).unwrap();
    let expect = format!("cannot import layer 1 of 1 (DIR/a.tar): {expect}");
    refused(&home, "tar", "a.tar", &usual_wishes(), &expect);
    let limits = Limits { content_bytes: 1 << 30, ..Limits::default() };
    let expect = "cannot import layer 1 of 1 (DIR/a.tar): \"huge\" exceeds a limit: \
                  the image's files have more than 1073741824 bytes";
    refused(&home, "tar", "a.tar", &ImportOptions { limits, ..usual_wishes() }, expect);
}

#[test]
fn limits() {
    let home = Home::new();
    let tar = good().file("last", &[0; 70]).bytes();
    fs::write(home.path("a.tar"), pack(&tar, Pack::Gzip)).unwrap();
    let size = fs::metadata(home.path("a.tar")).unwrap().len();
    let check = |limits: Limits, expect: &str| {
        let expect = format!("cannot import layer 1 of 1 (DIR/a.tar): {expect}");
        refused(&home, "tar", "a.tar", &ImportOptions { limits, ..usual_wishes() }, &expect);
    };
    let limits = Limits::default();
    check(Limits { layer_bytes: 1 << 20, ..limits }, "it unpacks to more than 1048576 bytes");
    check(
        Limits { ratio_from: 1000, ratio: 10, ..limits },
        &format!("it unpacks to more than 10 times its size of {size} bytes"),
    );
    check(
        Limits { entries: 3, ..limits },
        "\"last\" exceeds a limit: the image has more than 3 entries",
    );
    check(
        Limits { metadata_bytes: 12, ..limits },
        "\"last\" exceeds a limit: the image's names and xattrs have more than 12 bytes",
    );
    check(
        Limits { content_bytes: (2 << 20) + 1001, ..limits },
        "\"last\" exceeds a limit: the image's files have more than 2098153 bytes",
    );
    fs::write(home.path("a.tar"), super::sources::holes()).unwrap();
    check(
        Limits { ratio_from: 1000, ratio: 10, ..limits },
        "\"holes\" exceeds a limit: the holes of the layer's files are more than 10 times its size of 1536 bytes",
    );
    fs::write(home.path("a.tar"), pack(&tar, Pack::Gzip)).unwrap();
    // Limits that are just sufficient.
    let exact = Limits {
        layer_bytes: tar.len() as u64,
        content_bytes: (2 << 20) + 1071,
        entries: 4,
        metadata_bytes: 14,
        ..limits
    };
    home.import_with("tar", "a.tar", &ImportOptions { limits: exact, ..usual_wishes() }).unwrap();
}

/// Imports a layout with two layers, after `harm` has damaged it. In most cases the second layer is damaged, so that
/// storing the first layer has already begun.
fn check_layout(harm: &dyn Fn(&mut Layout<'_>, &[Digest]), expect: &str) {
    let home = Home::new();
    let path = home.path("layout");
    let mut layout = Layout::new(&path);
    let tars =
        [(good().bytes(), Pack::Gzip), (good().file("other", &[3; 900]).bytes(), Pack::Zstd)];
    let (image, blobs) = layout.image(&tars);
    layout.add(image, None, None);
    harm(&mut layout, &blobs);
    let expect = expect.replace("BLOB", &blobs[1].to_string());
    let expect = expect
        .replace("FILE", &format!("DIR/layout/blobs/{}", blobs[1]).replace("sha256:", "sha256/"));
    refused(&home, "oci", "layout", &usual_wishes(), &expect);
}

#[test]
fn layouts() {
    check_layout(
        &|layout, blobs| fs::remove_file(layout.blob_path(&blobs[1])).unwrap(),
        "cannot import from the layout: cannot read FILE: No such file or directory (os error 2)",
    );
    check_layout(
        &|layout, blobs| {
            let path = layout.blob_path(&blobs[1]);
            let bytes = fs::read(&path).unwrap();
            fs::write(path, &bytes[..100]).unwrap();
        },
        "cannot import from the layout: FILE has 100 bytes, not SIZE"
            .replace(
                "SIZE",
                &pack(&good().file("other", &[3; 900]).bytes(), Pack::Zstd).len().to_string(),
            )
            .as_str(),
    );
    let mut bytes = pack(&good().file("other", &[3; 900]).bytes(), Pack::Zstd);
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    check_layout(
        &|layout, blobs| fs::write(layout.blob_path(&blobs[1]), &bytes).unwrap(),
        &format!(
            "cannot import layer 2 of 2 (BLOB): it has the digest {}, not BLOB",
            Digest::sha256(&bytes)
        ),
    );
    check_layout(
        &|layout, _| fs::remove_file(layout.directory.join("oci-layout")).unwrap(),
        "cannot import from the layout: DIR/layout is not an OCI layout: No such file or directory (os error 2)",
    );
    check_layout(
        &|layout, _| {
            fs::write(layout.directory.join("oci-layout"), r#"{"imageLayoutVersion":"2.0"}"#)
                .unwrap();
        },
        "cannot import from the layout: DIR/layout is an OCI layout of version 2.0, not 1",
    );
    check_layout(
        &|layout, _| {
            fs::write(layout.directory.join("index.json"), r#"{"schemaVersion":2,"manifests":[]}"#)
                .unwrap();
        },
        "cannot import from the layout: DIR/layout has no images: its index is empty",
    );
    let index = |bytes: &'static [u8], expect: &str| {
        check_layout(
            &|layout, _| fs::write(layout.directory.join("index.json"), bytes).unwrap(),
            &format!("cannot import from the layout: cannot use DIR/layout/index.json: {expect}"),
        );
    };
    index(b"{", "the index is malformed: EOF while parsing an object at line 1 column 1");
    index(
        br#"{"schemaVersion":2,"manifests":[],"layers":[]}"#,
        "the index has both \"manifests\" and \"layers\"",
    );
    index(
        br#"{"schemaVersion":2,"mediaType":"x","manifests":[]}"#,
        "the index states the media type \"x\"",
    );
    let config = format!("sha256:{}", "0".repeat(64));
    let image =
        format!(r#"{{"schemaVersion":2,"config":{{"digest":"{config}","size":1}},"layers":[]}}"#);
    index(image.leak().as_bytes(), "it is a manifest, but an index was expected");
}

/// Imports a layout whose manifest and config do not match each other.
fn check_documents(config: &serde_json::Value, expect: &str) {
    let home = Home::new();
    let path = home.path("layout");
    let mut layout = Layout::new(&path);
    let (image, _) = layout.image_with(&[(good().bytes(), Pack::Gzip)], config);
    layout.add(image, None, None);
    let before = home.files();
    let error = chain(&home.import("oci", "layout").unwrap_err());
    assert!(error.ends_with(expect), "{error}");
    assert_eq!(home.files(), before);
}

#[test]
fn documents() {
    let other = Digest::sha256(b"other").to_string();
    let config =
        |diff_ids: &[&str]| json!({ "rootfs": { "type": "layers", "diff_ids": diff_ids } });
    let actual = Digest::sha256(&good().bytes());
    check_documents(
        &config(&[&other]),
        &format!("its uncompressed tar has the digest {actual}, not {other} as in the config"),
    );
    check_documents(
        &config(&[&other, &other]),
        "the config has 2 diff ids, but the manifest has 1 layers",
    );
    check_documents(
        &json!({}),
        "the config is malformed: missing field `rootfs` at line 1 column 2",
    );
    // A blob that does not match its name.
    let home = Home::new();
    let path = home.path("layout");
    let mut layout = Layout::new(&path);
    let (image, _) = layout.image(&[(good().bytes(), Pack::Gzip)]);
    let digest: Digest = image["digest"].as_str().unwrap().parse().unwrap();
    layout.add(image, None, None);
    let manifest = fs::read_to_string(layout.blob_path(&digest)).unwrap();
    let changed = manifest.replace("schemaVersion\":2", "schemaVersion\":3");
    fs::write(layout.blob_path(&digest), &changed).unwrap();
    let error = chain(&home.import("oci", "layout").unwrap_err());
    let actual = Digest::sha256(changed.as_bytes());
    assert!(error.ends_with(&format!("has the digest {actual}")), "{error}");
}

#[test]
fn archives() {
    let check = |bytes: &[u8], name: &str, expect: &str| {
        let home = Home::new();
        fs::write(home.path("a.tar"), bytes).unwrap();
        let expect = format!("cannot import from the archive DIR/a.tar: {expect}");
        refused(&home, "docker-archive", name, &usual_wishes(), &expect);
    };
    let tars = [good().bytes()];
    let archive = docker_archive(&tars, &["debian:12"], Age::Old);
    check(&archive, "a.tar:sid", "there is no image \"sid\" in it, only debian:12");
    check(&good().bytes(), "a.tar", "it has no \"manifest.json\"");
    check(
        &archive[..archive.len() / 2],
        "a.tar",
        &format!(
            "it is not an archive: the tar is corrupt at byte {}, entry \"layer0/layer.tar\": the stream ends {} bytes early",
            archive.len() / 2,
            tars[0].len() - (archive.len() / 2 - 512 - 512 - 512),
        ),
    );
    let text = String::from_utf8_lossy(&archive);
    let config = text.find("{\"architecture").unwrap();
    let home = Home::new();
    // In older archives, `docker load` and skopeo ignore the name of the config.
    let mut changed = archive.clone();
    changed[config + 17] = b'X';
    fs::write(home.path("a.tar"), &changed).unwrap();
    home.import("docker-archive", "a.tar").unwrap();
    let mut newer = docker_archive(&tars, &["debian:12"], Age::New);
    let at = String::from_utf8_lossy(&newer).find("{\"architecture").unwrap();
    newer[at + 17] = b'X';
    fs::write(home.path("a.tar"), &newer).unwrap();
    let error = chain(&home.import("docker-archive", "a.tar").unwrap_err());
    assert!(
        error.contains("\"blobs/sha256/") && error.contains("\" has the digest sha256:"),
        "{error}"
    );
    // A layer that does not match the config.
    let mut changed = archive.clone();
    let content = config + 512 + 512 + 512;
    changed[content..content + (3 << 10)].iter_mut().for_each(|byte| {
        if *byte == 1 {
            *byte = 2;
        }
    });
    fs::write(home.path("a.tar"), &changed).unwrap();
    let before = home.files();
    let error = chain(&home.import("docker-archive", "a.tar").unwrap_err());
    assert!(error.contains(": its uncompressed tar has the digest sha256:"), "{error}");
    assert_eq!(home.files(), before);
}
