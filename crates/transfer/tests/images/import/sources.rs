//! Tests every kind of source, and the contents of the store after an import.

use std::fs;
use std::num::NonZeroUsize;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use image::erofs::{Profile, write};
use image::tree::Timestamp;
use image::verity::{Algorithm, Hasher};
use serde_json::json;
use store::{Digest, Form, RefName, walk};

use super::{Home, chain, usual_wishes};
use crate::build::{Age, Layout, Pack, Tar, docker_archive, pack};
use quire_transfer::import::{ImportContext, ImportError, ImportOptions, LostAcl, Unsupported};
use quire_transfer::progress::Event;

/// File sizes on both sides of each limit: inline, in batches, and in separate pieces.
fn sizes() -> Vec<usize> {
    vec![0, 1, 64, 65, 4096, 4097, 100_000, 512 << 10, (512 << 10) + 1, 3_000_000]
}

fn lower() -> Tar {
    let mut tar =
        Tar::from_text("d ./, d a, f a/gone x, f kept y, d opaque, f opaque/gone z, l link kept");
    for size in sizes() {
        let byte = b'a' + u8::try_from(size % 26).unwrap();
        tar = tar.file(&format!("a/{size}"), &vec![byte; size]);
    }
    tar
}

fn upper() -> Tar {
    Tar::from_text("w a/.wh.gone, d opaque, w opaque/.wh..wh..opq, f opaque/new n, l hard a/65")
        .file("a/4097", &[b'!'; 70])
}

const SHOWN: &str = "a/ a/0= a/1=b a/100000=e*100000 a/3000000=q*3000000 a/4096=o*4096 a/4097=!*70 a/524288=y*524288 a/524289=z*524289 a/64=mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm a/65=n*65 hard=n*65 kept=y link=y opaque/ opaque/new=n";

#[test]
fn layers_of_every_packing() {
    let mut ids = Vec::new();
    for how in [Pack::Plain, Pack::Gzip, Pack::Gzips, Pack::Zstd] {
        let home = Home::new();
        let path = home.path("layout");
        let mut layout = Layout::new(&path);
        let tars = [(lower().bytes(), how), (upper().bytes(), how)];
        let (image, blobs) = layout.image(&tars);
        layout.add(image.clone(), Some("1"), None);
        let report = home.import("oci", "layout").unwrap();
        assert_eq!(home.show(&report.image), SHOWN, "{how:?}");
        assert_eq!(report.layers.len(), 2);
        for (layer, (tar, _)) in report.layers.iter().zip(&tars) {
            assert_eq!(layer.diff_id, Digest::sha256(tar));
            assert_eq!(layer.tar_bytes, tar.len() as u64);
            assert!(!layer.is_reused);
            assert!(home.rebuilt(&layer.diff_id) == *tar, "{how:?}: the layer is another one");
        }
        // The manifest that the name leads to is the original manifest, byte for byte.
        let name = report.name.unwrap();
        assert_eq!(name.as_str(), "layout:1");
        let reference = home.store.refs.get(&name).unwrap().unwrap();
        assert_eq!(reference.image, report.image);
        assert_eq!(reference.manifest, report.manifest);
        let digest: Digest = image["digest"].as_str().unwrap().parse().unwrap();
        assert_eq!(report.manifest, Some(digest));
        let manifest = home.store.manifests.read(&digest).unwrap().unwrap();
        assert_eq!(manifest, fs::read(layout.blob_path(&digest)).unwrap());
        let info = home.store.layers.open(&report.layers[0].diff_id).unwrap().unwrap();
        assert_eq!(info.info().blobs[0].digest, blobs[0]);
        assert_eq!(info.info().size, tars[0].0.len() as u64);
        ids.push(report.image);
    }
    ids.dedup();
    assert_eq!(ids.len(), 1);
}

/// Makes the layout of [`lower`] and [`upper`]. Returns the size of the blobs.
fn two_layers(home: &Home, how: Pack) -> u64 {
    let path = home.path("layout");
    let mut layout = Layout::new(&path);
    let tars = [(lower().bytes(), how), (upper().bytes(), how)];
    let (image, blobs) = layout.image(&tars);
    layout.add(image, None, None);
    blobs.iter().map(|blob| fs::metadata(layout.blob_path(blob)).unwrap().len()).sum()
}

#[test]
fn one_thread_and_a_small_budget_give_the_same() {
    let mut ids = Vec::new();
    for (threads, budget) in [(1, 0), (1, 1 << 30), (8, 0), (8, 64 << 20)] {
        let home = Home::new();
        two_layers(&home, Pack::Gzip);
        let threads = NonZeroUsize::new(threads).unwrap();
        let environment = ImportContext { threads, budget, ..home.environment() };
        ids.push(home.import_in("oci", "layout", &environment).unwrap().image);
    }
    ids.dedup();
    assert_eq!(ids.len(), 1);
}

#[test]
fn progress_adds_up() {
    let home = Home::new();
    let size = two_layers(&home, Pack::Zstd);
    let read = AtomicU64::new(0);
    let events = Mutex::new(Vec::new());
    let progress = |event: Event<'_>| match event {
        Event::Read { bytes, .. } => drop(read.fetch_add(bytes, Ordering::Relaxed)),
        Event::Layers(sizes) => {
            let sum: u64 = sizes.iter().map(|size| size.unwrap()).sum();
            events.lock().unwrap().push(format!("{sum} bytes"));
        }
        other => events.lock().unwrap().push(format!("{other:?}")),
    };
    let threads = NonZeroUsize::new(1).unwrap();
    let environment = ImportContext { progress: &progress, threads, ..home.environment() };
    home.import_in("oci", "layout", &environment).unwrap();
    assert_eq!(read.load(Ordering::Relaxed), size);
    let expect = format!(
        "{size} bytes, Started {{ layer: 0 }}, Done {{ layer: 0 }}, Started {{ layer: 1 }}, Done {{ layer: 1 }}, Writing, Committing"
    );
    assert_eq!(events.lock().unwrap().join(", "), expect);
}

#[test]
fn what_is_there_is_not_read_again() {
    let home = Home::new();
    two_layers(&home, Pack::Gzip);
    let first = home.import("oci", "layout").unwrap();
    let before = home.files();
    let read = AtomicU64::new(0);
    let progress = |event: Event<'_>| {
        if let Event::Read { bytes, .. } = event {
            read.fetch_add(bytes, Ordering::Relaxed);
        }
    };
    let environment = ImportContext { progress: &progress, ..home.environment() };
    let again = |expected: u64, added: &[&str]| {
        let second = home.import_in("oci", "layout", &environment).unwrap();
        assert_eq!(second.image, first.image);
        assert!(second.layers.iter().all(|layer| layer.is_reused));
        assert_eq!(read.swap(0, Ordering::Relaxed), expected);
        assert_eq!(second.objects.objects, 0);
        let new = home.files().into_keys().filter(|file| !before.contains_key(file));
        let new: Vec<_> = new.map(|file| file.split('-').next().unwrap().to_owned()).collect();
        assert_eq!(new, added);
    };
    again(0, &[]);
    fs::remove_dir_all(home.path("layout")).unwrap();
    // The same tars are compressed differently. The digests of the blobs are compared once, and only the new manifest
    // is added.
    let size = two_layers(&home, Pack::Zstd);
    again(size, &["/manifests/sha256"]);
    again(0, &["/manifests/sha256"]);
}

/// A tar of one file in GNU tar's sparse format: no map, a real size of 1 MiB, no data.
pub(crate) fn holes() -> Vec<u8> {
    let mut tar = Tar::default();
    tar.header("holes", b'S', "", 0);
    let mut bytes = tar.bytes();
    bytes[257..265].copy_from_slice(b"ustar  \0");
    bytes[483..495].copy_from_slice(b"00004000000\0");
    bytes[148..156].fill(b' ');
    let sum: u32 = bytes[..512].iter().copied().map(u32::from).sum();
    bytes[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    bytes
}

#[test]
fn a_file_of_holes_is_unpacked_again() {
    let bytes = holes();
    let home = Home::new();
    fs::write(home.path("root.tar"), &bytes).unwrap();
    let first = home.import("tar", "root.tar").unwrap();
    assert_eq!(home.show(&first.image), "holes=\\x00*1048576");
    let path = home.path("layout");
    let mut layout = Layout::new(&path);
    let (image, _) = layout.image(&[(bytes.clone(), Pack::Gzip)]);
    layout.add(image, None, None);
    let second = home.import("oci", "layout").unwrap();
    assert_eq!(second.image, first.image);
    assert!(!second.layers[0].is_reused);
    assert!(home.rebuilt(&second.layers[0].diff_id) == bytes);
}

#[test]
fn tars_of_every_packing() {
    for how in [Pack::Plain, Pack::Gzip, Pack::Gzips, Pack::Zstd] {
        let home = Home::new();
        let tar = lower().bytes();
        let blob = pack(&tar, how);
        fs::write(home.path("root.tar"), &blob).unwrap();
        let report = home.import("tar", "root.tar").unwrap();
        assert_eq!(report.name.unwrap().as_str(), "root:latest");
        assert_eq!(report.layers[0].diff_id, Digest::sha256(&tar));
        assert!(home.rebuilt(&report.layers[0].diff_id) == tar);
        // The import makes a manifest, so that the image can be pushed.
        let manifest = home.store.manifests.read(&report.manifest.unwrap()).unwrap().unwrap();
        let manifest: serde_json::Value = serde_json::from_slice(&manifest).unwrap();
        assert_eq!(manifest["layers"][0]["digest"], Digest::sha256(&blob).to_string());
        assert_eq!(manifest["layers"][0]["size"], blob.len());
        let config = manifest["config"]["digest"].as_str().unwrap().parse().unwrap();
        let config = home.store.manifests.read(&config).unwrap().unwrap();
        assert_eq!(manifest["config"]["size"], config.len());
        let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
        let diff_ids = json!({ "type": "layers", "diff_ids": [Digest::sha256(&tar).to_string()] });
        assert_eq!(config["rootfs"], diff_ids);
        assert_eq!(config["architecture"], "amd64");
    }
}

#[test]
fn docker_archives_of_every_age() {
    let tars = [lower().bytes(), upper().bytes(), upper().bytes()];
    let mut ids = Vec::new();
    for age in [Age::Old, Age::New] {
        for how in [Pack::Plain, Pack::Gzip, Pack::Zstd] {
            let home = Home::new();
            let archive = docker_archive(&tars, &["debian:12", "debian:latest"], age);
            fs::write(home.path("a.tar"), pack(&archive, how)).unwrap();
            let report = home.import("docker-archive", "a.tar").unwrap();
            assert_eq!(home.show(&report.image), SHOWN, "{age:?} {how:?}");
            assert_eq!(report.name.unwrap().as_str(), "debian:12");
            let named = home.import("docker-archive", "a.tar:debian").unwrap();
            assert_eq!(named.name.unwrap().as_str(), "debian:latest");
            assert_eq!(named.manifest, report.manifest);
            for (layer, tar) in report.layers.iter().zip(&tars) {
                assert!(home.rebuilt(&layer.diff_id) == *tar);
            }
            ids.push(report.image);
            let left: Vec<_> = fs::read_dir(home.folder.path()).unwrap().collect();
            assert_eq!(left.len(), 2, "{left:?}");
        }
    }
    ids.dedup();
    assert_eq!(ids.len(), 1);
}

/// Checks which image of a layout a source selects. The images differ in the content of their only file.
fn check_choice(layout: &dyn Fn(&mut Layout<'_>), source: &str, expect: &str) {
    let home = Home::new();
    let path = home.path("layout");
    layout(&mut Layout::new(&path));
    let got = match home.import("oci", source) {
        Ok(report) => format!("{} as {}", home.show(&report.image), report.name.unwrap()),
        Err(error) => chain(&error).replace(path.to_str().unwrap(), "DIR"),
    };
    assert_eq!(got, expect, "{source}");
}

#[test]
fn the_image_that_a_layout_names() {
    let image = |layout: &Layout<'_>, content: &str| {
        layout.image(&[(Tar::from_text(&format!("f a {content}")).bytes(), Pack::Gzip)]).0
    };
    let several = |layout: &mut Layout<'_>| {
        let images = ["1", "2", "3"].map(|content| image(layout, content));
        let [one, two, three] = images;
        layout.add(one, Some("one"), None);
        layout.add(two, Some("two"), Some("linux/amd64"));
        layout.add(three, Some("two"), Some("linux/arm64"));
    };
    check_choice(&several, "layout:one", "a=1 as layout:one");
    check_choice(&several, "layout:two", "a=2 as layout:two");
    let there = "only one, two, two".replace(", two, two", ", two");
    check_choice(
        &several,
        "layout:four",
        &format!("cannot import from the layout: there is no image \"four\" in DIR, {there}"),
    );
    check_choice(
        &several,
        "layout",
        "cannot import from the layout: DIR has several images, name one of them: one, two",
    );
    let nested = |layout: &mut Layout<'_>| {
        let mut entries = Vec::new();
        for (content, os, architecture) in
            [("1", "linux", "s390x"), ("2", "linux", "amd64"), ("3", "windows", "amd64")]
        {
            let mut entry = image(layout, content);
            entry["platform"] = json!({ "os": os, "architecture": architecture });
            entries.push(entry);
        }
        let index = json!({ "schemaVersion": 2, "manifests": entries }).to_string();
        let index_type = "application/vnd.oci.image.index.v1+json";
        let index = layout.descriptor(index_type, index.as_bytes());
        layout.add(index, Some("docker.io/library/debian:12"), None);
    };
    check_choice(&nested, "layout", "a=2 as docker.io/library/debian:12");
    check_choice(
        &nested,
        "layout:docker.io/library/debian:12",
        "a=2 as docker.io/library/debian:12",
    );
    let other = |layout: &mut Layout<'_>| {
        let mut entry = image(layout, "1");
        entry["platform"] = json!({ "os": "linux", "architecture": "s390x" });
        let index = json!({ "schemaVersion": 2, "manifests": [entry] }).to_string();
        let index_type = "application/vnd.oci.image.index.v1+json";
        let index = layout.descriptor(index_type, index.as_bytes());
        layout.add(index, None, None);
    };
    let home = Home::new();
    let path = home.path("layout");
    other(&mut Layout::new(&path));
    let error = chain(&home.import("oci", "layout").unwrap_err());
    assert!(error.ends_with("there is no image for linux/amd64, only for linux/s390x"), "{error}");
    // The image can be selected only by its digest.
    let home = Home::new();
    let path = home.path("layout");
    let mut layout = Layout::new(&path);
    let [one, two] = ["1", "2"].map(|content| image(&layout, content));
    let digest = two["digest"].as_str().unwrap().to_owned();
    layout.add(one, None, None);
    layout.add(two, None, None);
    let report = home.import("oci", &format!("layout@{digest}")).unwrap();
    assert_eq!(home.show(&report.image), "a=2");
}

#[test]
fn what_no_tree_can_hold_is_left_out_when_asked_for() {
    let mut tar = Tar::from_text("f a 1");
    tar.entry("socket", b's', "", b"").entry("b", b'0', "", b"2");
    let home = Home::new();
    fs::write(home.path("root.tar"), tar.bytes()).unwrap();
    let options = ImportOptions { unsupported: Unsupported::Skip, ..usual_wishes() };
    let report = home.import_with("tar", "root.tar", &options).unwrap();
    assert_eq!(home.show(&report.image), "a=1 b=2");
    assert_eq!(report.layers[0].skipped, [b"socket".to_vec()]);
    assert!(home.rebuilt(&report.layers[0].diff_id) == tar.bytes());
}

#[test]
fn times_and_xattrs_are_left_out_when_asked_for() {
    let mut tar = Tar::default();
    let xattrs = [("SCHILY.xattr.user.a", "one"), ("SCHILY.xattr.trusted.b", "two")];
    tar.pax(&[&[("mtime", "1500000000.25")][..], &xattrs].concat()).entry("f", b'0', "", b"");
    let home = Home::new();
    fs::write(home.path("root.tar"), tar.bytes()).unwrap();
    let check = |xattrs: walk::KeptXattrs, times: walk::Times, expect: &str| {
        let options = ImportOptions { xattrs, times, ..usual_wishes() };
        let report = home.import_with("tar", "root.tar", &options).unwrap();
        let dump = home.dump(&report.image);
        assert_eq!(dump.lines().last().unwrap(), format!("/f 0 100644 1 1000 100 0 {expect}"));
        // The layer still contains the data that was left out.
        assert!(home.rebuilt(&report.layers[0].diff_id) == tar.bytes());
    };
    use walk::{KeptXattrs, Times};
    check(KeptXattrs::All, Times::Exact, "1500000000.250000000 - - - trusted.b=two user.a=one");
    check(KeptXattrs::UserOnly, Times::WholeSeconds, "1500000000.0 - - - user.a=one");
    check(KeptXattrs::None, Times::Epoch, "0.0 - - -");
}

/// Tars of macOS, NFS and GNU tar have xattrs that mounts of EROFS do not show, and ACLs with names. Neither is lost
/// silently.
#[test]
fn xattrs_without_a_namespace_are_kept_and_acls_by_name_are_reported() {
    let mut tar = Tar::default();
    let records = [
        ("SCHILY.xattr.com.apple.provenance", "1"),
        ("SCHILY.xattr.system.nfs4_acl", "2"),
        ("SCHILY.xattr.lustre.lov", "3"),
        ("SCHILY.xattr.user.ok", "5"),
        ("SCHILY.acl.access", "user::rw-,user:lisa:rw-,group::r--,mask::rw-,other::r--"),
    ];
    tar.pax(&records).entry("f", b'0', "", &[7; 5000]);
    let home = Home::new();
    fs::write(home.path("root.tar"), tar.bytes()).unwrap();
    let hidden: [&[u8]; 3] = [b"com.apple.provenance", b"lustre.lov", b"system.nfs4_acl"];
    for form in [Form::Objects, Form::Packed, Form::Tar] {
        let options = ImportOptions { form, ..usual_wishes() };
        let report = home.import_with("tar", "root.tar", &options).unwrap();
        let dump = home.dump(&report.image);
        let expect = "com.apple.provenance=1 lustre.lov=3 system.nfs4_acl=2 user.ok=5";
        assert!(dump.lines().last().unwrap().ends_with(expect), "{form}: {dump}");
        assert_eq!(report.hidden_xattrs, hidden, "{form}");
        let lost = LostAcl { path: b"f".to_vec(), line: b"user:lisa:rw-".to_vec() };
        assert_eq!(report.layers[0].lost_acls, [lost], "{form}");
        let without = ImportOptions { xattrs: walk::KeptXattrs::None, ..options };
        let report = home.import_with("tar", "root.tar", &without).unwrap();
        assert!(report.hidden_xattrs.is_empty() && report.layers[0].lost_acls.is_empty());
    }
}

#[test]
fn a_dump_needs_its_objects() {
    let home = Home::new();
    fs::write(home.path("root.tar"), lower().bytes()).unwrap();
    let first = home.import("tar", "root.tar").unwrap();
    let dump = home.dump(&first.image);
    fs::write(home.path("root.dump"), &dump).unwrap();
    let second = home.import("dump", "root.dump").unwrap();
    assert_eq!((second.image, second.objects.objects), (first.image, 0));

    let other = Home::new();
    fs::write(other.path("root.dump"), &dump).unwrap();
    let before = other.files();
    let error = chain(&other.import("dump", "root.dump").unwrap_err());
    assert!(
        error.ends_with("is not in the store: name a directory that has it with --objects"),
        "{error}"
    );
    assert_eq!(other.files(), before);
    let objects = home.path("store").join("objects");
    let options = ImportOptions { objects: Some(&objects), ..usual_wishes() };
    let third = other.import_with("dump", "root.dump", &options).unwrap();
    assert_eq!((third.image, third.manifest), (first.image, None));
    assert_eq!(other.show(&third.image), home.show(&first.image));
}

/// In dumps by ostree, objects have other paths than in the store.
#[test]
fn a_dump_whose_objects_are_elsewhere() {
    let home = Home::new();
    let bytes = vec![b'o'; 5000];
    let object = image::verity::ObjectId::new(image::verity::digest(Algorithm::Sha256, &bytes));
    fs::create_dir_all(home.path("repo/ab")).unwrap();
    fs::write(home.path("repo/ab/cd.file"), &bytes).unwrap();
    let dump = |digest: &str| {
        format!(
            "/ 0 40755 2 0 0 0 1.0 - - -\n/a 5000 100644 2 0 0 0 1.5 ab/cd.file - {digest} user.x=y\n\
             /b 0 @100644 2 0 0 0 1.5 /a - -\n/c 5000 100600 1 0 0 0 1.5 /ab/cd.file - {digest}\n"
        )
    };
    let folder = home.path("repo");
    let options = ImportOptions { objects: Some(&folder), ..usual_wishes() };
    let mut ids = Vec::new();
    for digest in [object.to_string(), "-".to_owned()] {
        fs::write(home.path("a.dump"), dump(&digest)).unwrap();
        ids.push(home.import_with("dump", "a.dump", &options).unwrap().image);
    }
    assert_eq!(ids[0], ids[1]);
    assert_eq!(home.show(&ids[0]), "a=o*5000 b=o*5000 c=o*5000");
    // The image equals that of a dump with the object at its path in the store.
    let in_place = dump(&object.to_string()).replace("/ab/cd.file", "ab/cd.file");
    let in_place = in_place.replace("ab/cd.file", &object.path());
    let tree = image::dump::parse(in_place.as_bytes(), image::dump::Strictness::Strict).unwrap();
    let mut hasher = Hasher::new(Algorithm::Sha256);
    write(&tree, &Profile::Composefs(usual_wishes().versions), &mut hasher).unwrap();
    assert_eq!(ids[0], hasher.finish().into());

    let refused = |text: &str, expect: &str| {
        fs::write(home.path("a.dump"), text).unwrap();
        let before = home.files();
        let error = chain(&home.import_with("dump", "a.dump", &options).unwrap_err());
        assert!(error.contains(expect), "{error}");
        assert_eq!(home.files(), before);
    };
    let wrong = "11".repeat(32);
    refused(&dump(&wrong), &format!("ab/cd.file should be object {wrong}, but is object {object}"));
    let text = dump(&object.to_string());
    let missing = object.to_string().replace(|digit: char| digit.is_ascii_digit(), "a");
    let gone = text.replace("cd.file", "gone").replace(&object.to_string(), &missing);
    refused(&gone, "is not in the store, nor in the directory of --objects");
    refused(&dump("-").replace("cd.file", "gone"), "cannot read");
    refused(&dump("-").replace("ab/cd.file", "../x"), "leads out of the directory of objects");
    refused(&dump("-").replace("5000", "5001"), "the size of its object file is not");
}

#[test]
fn directories() {
    let home = Home::new();
    let root = home.path("root");
    fs::create_dir_all(root.join("a")).unwrap();
    for size in sizes() {
        fs::write(root.join(format!("a/{size}")), vec![b'x'; size]).unwrap();
    }
    fs::hard_link(root.join("a/65"), root.join("b")).unwrap();
    let report = home.import("dir", "root").unwrap();
    assert_eq!((report.manifest, report.layers.len()), (None, 0));
    assert_eq!(report.name.unwrap().as_str(), "root:latest");
    let tree = home.tree(&report.image);
    assert_eq!(tree.resolve(b"b").unwrap().nlink(), 2);
    let exact = tree.resolve(b"b").unwrap().metadata().mtime;
    let options = ImportOptions { times: walk::Times::Epoch, ..usual_wishes() };
    let epoch = home.import_with("dir", "root", &options).unwrap();
    let mtime = home.tree(&epoch.image).resolve(b"b").unwrap().metadata().mtime;
    assert_eq!(mtime, Timestamp::default());
    assert_ne!(mtime, exact);
    let gone = home.import("dir", "gone").unwrap_err();
    assert!(chain(&gone).contains("gone: No such file or directory"), "{}", chain(&gone));
}

#[test]
fn a_name_given_is_the_name() {
    let home = Home::new();
    fs::write(home.path("root.tar"), lower().bytes()).unwrap();
    let name: RefName = "my/own:1".parse().unwrap();
    let options = ImportOptions { name: Some(&name), ..usual_wishes() };
    assert_eq!(home.import_with("tar", "root.tar", &options).unwrap().name, Some(name.clone()));
    let names: Vec<_> = home.store.refs.all().unwrap().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, [name]);
}

#[test]
fn cancelled_at_any_time_leaves_nothing() {
    for kind in ["oci", "dir"] {
        // Number of events before the cancellation.
        for after in [0, 1, 2, 5] {
            let home = Home::new();
            two_layers(&home, Pack::Gzip);
            let before = home.files();
            let cancel = AtomicBool::new(false);
            let events = AtomicU64::new(0);
            let progress = |event: Event<'_>| {
                let count = events.fetch_add(1, Ordering::Relaxed);
                // An import that is being committed is no longer cancelled.
                if count == after && !matches!(event, Event::Committing) {
                    cancel.store(true, Ordering::Relaxed);
                }
            };
            let environment =
                ImportContext { progress: &progress, cancel: &cancel, ..home.environment() };
            match home.import_in(kind, "layout", &environment) {
                Err(ImportError::Cancelled) => assert_eq!(home.files(), before),
                Err(error) => panic!("{}", chain(&error)),
                Ok(_) => assert!(!cancel.load(Ordering::Relaxed), "{kind} {after}"),
            }
        }
    }
}
