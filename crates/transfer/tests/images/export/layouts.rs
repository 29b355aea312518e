//! Tests exports to layouts and Docker archives.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use serde_json::Value;
use store::{Digest, RefName};

use super::{Home, chain, damage, files};
use crate::build::{Layout, Pack, Tar};
use quire_transfer::export::{
    ArchivedImage, Compression, ExportError, How, LayoutReport, Options, plan, plan_for_layout,
    to_docker_archive, to_layout,
};
use quire_transfer::import::Report;

/// Imports an image of two layers, of which one occurs twice.
fn image(home: &Home, name: &str) -> Report {
    let path = home.path(name);
    let mut layout = Layout::new(&path);
    let content = [name.as_bytes(), &[b'x'; 100_000]].concat();
    let one = Tar::from_text("d a,f a/b short").file("a/c", &content).bytes();
    let two = Tar::from_text("s link a/c,w a/.wh.b").bytes();
    let layers = [(one.clone(), Pack::Gzip), (two, Pack::Plain), (one, Pack::Gzip)];
    let (image, _) = layout.image(&layers);
    layout.add(image, None, None);
    home.import_path("oci", &path)
}

fn export(
    home: &Home,
    image: &Report,
    to: &Path,
    tag: Option<&str>,
) -> Result<LayoutReport, ExportError> {
    export_with(home, image, to, tag, &home.options())
}

fn export_with(
    home: &Home,
    image: &Report,
    to: &Path,
    tag: Option<&str>,
    options: &Options<'_>,
) -> Result<LayoutReport, ExportError> {
    let plan = plan(&home.store, &image.manifest.unwrap(), Compression::AsItWas, options)?;
    to_layout(&home.store, &plan, None, to, tag, options)
}

/// Returns the tags of a layout, with their digests.
fn tags(layout: &Path) -> BTreeMap<String, String> {
    let index: Value =
        serde_json::from_slice(&fs::read(layout.join("index.json")).unwrap()).unwrap();
    let entries = index["manifests"].as_array().unwrap().iter().map(|entry| {
        let tag = entry["annotations"]["org.opencontainers.image.ref.name"].as_str();
        (tag.unwrap_or("-").to_owned(), entry["digest"].as_str().unwrap().to_owned())
    });
    entries.collect()
}

#[test]
fn a_layout_gives_the_same_image() {
    let (home, other) = (Home::new(), Home::new());
    let image = image(&home, "a");
    let to = home.path("new/er");
    let report = export(&home, &image, &to, Some("1")).unwrap();
    // Two layers, the config and the manifest.
    assert_eq!((report.blobs, report.reused), (4, 0));
    assert_eq!(other.import_path("oci", &to).image, image.image);
    for blob in files(&to.join("blobs/sha256")) {
        let bytes = fs::read(to.join("blobs/sha256").join(&blob)).unwrap();
        assert_eq!(Digest::sha256(&bytes).to_string(), format!("sha256:{}", blob.display()));
    }
    let before = files(&to);
    assert_eq!(before.len(), 2 + 2 + 4, "{before:?}");
    let report = export(&home, &image, &to, Some("1")).unwrap();
    assert_eq!((report.blobs, report.reused, report.bytes), (0, 4, 0));
    assert_eq!(files(&to), before);
    // Existing blobs are verified.
    damage(&to.join("blobs/sha256").join(&files(&to.join("blobs/sha256"))[0]));
    assert_eq!(export(&home, &image, &to, Some("1")).unwrap().blobs, 1);
    assert_eq!(Home::new().import_path("oci", &to).image, image.image);
}

/// The layout has blobs of the layers, which are verified and not compressed again.
#[test]
fn layers_are_compressed_once_for_a_layout() {
    use How::{Compressed, Plain, There};
    let home = Home::new();
    let image = image(&home, "a");
    let manifest = image.manifest.unwrap();
    let check = |to: &Path, expect: [How; 3]| {
        let options = home.options();
        let plan = plan_for_layout(&home.store, &manifest, Compression::AsItWas, to, &options);
        let plan = plan.unwrap();
        let hows: Vec<_> = plan.layers.iter().map(|it| it.how).collect();
        assert_eq!(hows, expect);
        let report = to_layout(&home.store, &plan, None, to, Some("1"), &options).unwrap();
        assert_eq!(Home::new().import_path("oci", to).image, image.image);
        (plan, report)
    };
    let to = home.path("out");
    let (first, _) = check(&to, [Compressed, Plain, Compressed]);
    let (again, report) = check(&to, [There, Plain, There]);
    assert_eq!((again.digest, report.blobs, report.bytes), (first.digest, 0, 0));
    // A damaged blob is no layer.
    let hex = first.layers[0].descriptor.digest.to_string().replace("sha256:", "");
    damage(&to.join("blobs/sha256").join(hex));
    let (repaired, report) = check(&to, [Compressed, Plain, Compressed]);
    assert_eq!((repaired.digest, report.blobs), (first.digest, 1));
    // The layout that the image came from has the original blobs, so the manifest stays as it was.
    fs::remove_file(home.path("a/index.json")).unwrap();
    fs::write(home.path("a/index.json"), r#"{"schemaVersion":2,"manifests":[]}"#).unwrap();
    let (original, _) = check(&home.path("a"), [There, Plain, There]);
    assert!(original.is_unchanged && original.digest == manifest);
}

#[test]
fn other_images_of_a_layout_stay() {
    let home = Home::new();
    let (a, b) = (image(&home, "a"), image(&home, "b"));
    let to = home.path("out");
    export(&home, &a, &to, Some("a")).unwrap();
    let index_path = to.join("index.json");
    let mut index: Value = serde_json::from_slice(&fs::read(&index_path).unwrap()).unwrap();
    index["annotations"] = serde_json::json!({ "kept": "yes" });
    fs::write(&index_path, index.to_string()).unwrap();
    export(&home, &b, &to, Some("b")).unwrap();
    assert_eq!(tags(&to).keys().collect::<Vec<_>>(), ["a", "b"]);
    assert!(fs::read_to_string(&index_path).unwrap().contains(r#"{"kept":"yes"}"#));
    let of_b = tags(&to)["b"].clone();
    export(&home, &b, &to, Some("a")).unwrap();
    assert_eq!(
        tags(&to),
        [("a", &of_b), ("b", &of_b)].map(|(a, b)| (a.to_owned(), b.clone())).into()
    );
    export(&home, &a, &to, None).unwrap();
    export(&home, &a, &to, None).unwrap();
    assert_eq!(tags(&to).len(), 3);
    let error = export(&home, &b, &to, None).unwrap_err();
    assert!(matches!(error, ExportError::Untagged(_)), "{error}");
}

/// The index of a layout is limited like every index. An entry that would make it too long is not added either.
#[test]
fn a_long_index_is_refused() {
    let home = Home::new();
    let (a, b) = (image(&home, "a"), image(&home, "b"));
    let to = home.path("out");
    export(&home, &a, &to, Some("a")).unwrap();
    let index_path = to.join("index.json");
    let most = usize::try_from(oci::manifest::MANIFEST_MAX).unwrap();
    let before = fs::read(&index_path).unwrap();
    for (length, is_read) in [(most, true), (most + 1, false)] {
        let mut index: Value = serde_json::from_slice(&before).unwrap();
        let fill =
            |index: &mut Value, count| index["annotations"]["fill"] = "x".repeat(count).into();
        fill(&mut index, 0);
        let rest = length - index.to_string().len();
        fill(&mut index, rest);
        fs::write(&index_path, index.to_string()).unwrap();
        assert_eq!(fs::metadata(&index_path).unwrap().len(), length as u64);
        // Blobs of a layout that cannot be read are not used.
        let manifest = a.manifest.unwrap();
        let options = home.options();
        let plan = plan_for_layout(&home.store, &manifest, Compression::AsItWas, &to, &options);
        assert_eq!(plan.unwrap().layers[0].how == How::There, is_read, "{length}");
        // Replacing the only entry by itself leaves the length as it is.
        assert_eq!(export(&home, &a, &to, Some("a")).is_ok(), is_read, "{length}");
        let files_before = files(&to);
        let error = chain(&export(&home, &b, &to, Some("b")).unwrap_err());
        assert!(error.contains(&format!("more than {most}")), "{error}");
        assert_eq!(files(&to), files_before);
    }
}

#[test]
fn a_failure_leaves_nothing_behind() {
    let home = Home::new();
    let (a, b) = (image(&home, "a"), image(&home, "b"));
    let (new, old) = (home.path("some/new"), home.path("old"));
    export(&home, &a, &old, Some("a")).unwrap();
    let before = files(&old);
    let attempt = |to: &Path, options: &Options<'_>| {
        chain(&export_with(&home, &b, to, Some("b"), options).unwrap_err())
    };
    // Cancels after the plan is made.
    let cancel = AtomicBool::new(false);
    let progress = |_: quire_transfer::progress::Event<'_>| {
        cancel.store(true, std::sync::atomic::Ordering::Relaxed);
    };
    for to in [&new, &old] {
        cancel.store(false, std::sync::atomic::Ordering::Relaxed);
        let never = home.options();
        let plan = plan(&home.store, &b.manifest.unwrap(), Compression::None, &never).unwrap();
        let options = Options { cancel: &cancel, progress: &progress, ..never };
        let error = to_layout(&home.store, &plan, None, to, Some("b"), &options).unwrap_err();
        assert!(matches!(error, ExportError::Cancelled), "{error}");
    }
    assert!(!home.path("some").exists());
    assert_eq!(files(&old), before);

    for object in home.objects() {
        damage(&object);
    }
    for to in [&new, &old] {
        let plan = plan(&home.store, &b.manifest.unwrap(), Compression::None, &home.options());
        let plan = plan.unwrap();
        let error =
            to_layout(&home.store, &plan, None, to, Some("b"), &home.options()).unwrap_err();
        assert!(error.is_damage(), "{}", chain(&error));
    }
    assert!(attempt(&new, &home.options()).contains("the bytes have the digest"));
    assert!(!home.path("some").exists());
    assert_eq!(files(&old), before);
    assert_eq!(tags(&old).len(), 1);
}

#[test]
fn what_is_no_layout_is_refused() {
    let home = Home::new();
    let image = image(&home, "a");
    let refused = |to: &Path| chain(&export(&home, &image, to, Some("1")).unwrap_err());
    let folder = home.path("folder");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("mine"), "").unwrap();
    assert!(refused(&folder).contains("is not an OCI layout"));
    fs::write(folder.join("oci-layout"), r#"{"imageLayoutVersion":"2.0.0"}"#).unwrap();
    assert!(refused(&folder).contains("of version 2.0.0"));
    assert!(refused(&folder.join("mine")).contains("cannot write"));
    let busy = home.path("busy");
    fs::create_dir(&busy).unwrap();
    let lock = fs::File::open(&busy).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    assert!(refused(&busy).contains("another export is writing to"));
    drop(lock);
    // An empty directory is accepted.
    export(&home, &image, &busy, Some("1")).unwrap();
}

#[test]
fn what_a_killed_export_left_is_used() {
    let home = Home::new();
    let image = image(&home, "a");
    let whole = home.path("whole");
    export(&home, &image, &whole, Some("1")).unwrap();
    let expect = files(&whole).len();
    // Goes backwards through the steps of an export.
    let to = home.path("left");
    for (marker, blobs) in
        [("{\"imageLayoutVersion\":\"1.0.0\"}", 9), ("{\"ima", 9), ("", 2), ("none", 1)]
    {
        let _new = fs::remove_dir_all(&to);
        export(&home, &image, &to, Some("1")).unwrap();
        fs::copy(to.join("index.json"), to.join(".quire-layout-1")).unwrap();
        fs::remove_file(to.join("index.json")).unwrap();
        if marker == "none" {
            fs::remove_file(to.join("oci-layout")).unwrap();
        } else {
            fs::write(to.join("oci-layout"), marker).unwrap();
        }
        let there = fs::read_dir(to.join("blobs/sha256")).unwrap().map(|it| it.unwrap().path());
        for blob in there.skip(blobs).collect::<Vec<_>>() {
            fs::copy(&blob, blob.with_file_name(".quire-layout-2")).unwrap();
            fs::remove_file(blob).unwrap();
        }
        export(&home, &image, &to, Some("1")).unwrap();
        assert_eq!(files(&to).len(), expect, "{marker} {blobs}");
        assert_eq!(tags(&to), tags(&whole));
        home.import_path("oci", &to);
    }
}

#[test]
fn what_is_somebodys_stays() {
    let home = Home::new();
    let image = image(&home, "a");
    let to = home.path("theirs");
    fs::create_dir(&to).unwrap();
    for name in ["mine", ".quire-notes", ".quire-layout-1"] {
        fs::write(to.join(name), "text").unwrap();
    }
    let before = files(&to);
    let error = export(&home, &image, &to, Some("1")).unwrap_err();
    assert!(matches!(error, ExportError::NotEmpty(_)), "{error}");
    assert_eq!(files(&to), before);
    // An export neither follows a marker that is a symbolic link, nor waits for one that is a FIFO.
    let victim = home.path("victim");
    fs::write(&victim, "").unwrap();
    let linked = home.path("linked");
    fs::create_dir(&linked).unwrap();
    std::os::unix::fs::symlink(&victim, linked.join("oci-layout")).unwrap();
    assert!(export(&home, &image, &linked, Some("1")).is_err());
    assert_eq!(fs::read(&victim).unwrap(), b"");
    let waits = home.path("waits");
    fs::create_dir(&waits).unwrap();
    let mode = rustix::fs::Mode::RWXU;
    rustix::fs::mkfifoat(rustix::fs::CWD, waits.join("oci-layout"), mode).unwrap();
    assert!(export(&home, &image, &waits, Some("1")).is_err());
    // An export does not follow a symbolic link to a directory of blobs.
    let elsewhere = home.path("elsewhere");
    fs::create_dir_all(elsewhere.join("sha256")).unwrap();
    let before = files(&elsewhere);
    for (link, target) in [("blobs", ""), ("blobs/sha256", "sha256")] {
        let linked = home.path(&link.replace('/', "-"));
        let link = linked.join(link);
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(elsewhere.join(target), link).unwrap();
        let error = export(&home, &image, &linked, Some("1")).unwrap_err();
        assert!(matches!(error, ExportError::NotEmpty(_)), "{error}");
        assert_eq!(files(&elsewhere), before);
    }
}

#[test]
fn a_docker_archive_gives_the_same_image() {
    let (home, other) = (Home::new(), Home::new());
    let image = image(&home, "a");
    let names: Vec<RefName> = vec!["x/y:1".parse().unwrap(), "z".parse().unwrap()];
    let images = [ArchivedImage { manifest: image.manifest.unwrap(), names }];
    let write = || {
        let mut bytes = Vec::new();
        let reports = to_docker_archive(&home.store, &images, &mut bytes, &home.options()).unwrap();
        let [report] = &reports[..] else { panic!("{reports:?}") };
        assert_eq!(report.bytes, bytes.len() as u64);
        bytes
    };
    let bytes = write();
    assert_eq!(write(), bytes);
    let path = home.path("a.tar");
    fs::write(&path, bytes).unwrap();
    let report = other.import_path("docker-archive", &path);
    assert_eq!(report.image, image.image);
    assert_eq!(report.name.unwrap().as_str(), "x/y:1");
    let ids = |report: &Report| report.layers.iter().map(|it| it.diff_id).collect::<Vec<_>>();
    assert_eq!(report.layers.len(), 3);
    assert_eq!(report.layers[0].diff_id, ids(&image)[0]);
    damage(&home.objects()[0]);
    let error = to_docker_archive(&home.store, &images, &mut Vec::new(), &home.options());
    assert!(error.is_err_and(|it| it.is_damage()));
}

#[test]
fn a_docker_archive_has_each_layer_of_several_images_once() {
    let (home, other) = (Home::new(), Home::new());
    let image = image(&home, "a");
    let manifest = image.manifest.unwrap();
    let named = |name: &str| ArchivedImage { manifest, names: vec![name.parse().unwrap()] };
    let mut one = Vec::new();
    let options = home.options();
    to_docker_archive(&home.store, &[named("one:1")], &mut one, &options).unwrap();
    let mut both = Vec::new();
    let images = [named("one:1"), named("two:2")];
    let reports = to_docker_archive(&home.store, &images, &mut both, &options).unwrap();
    assert_eq!((reports.len(), &reports[0].layers), (2, &reports[1].layers));
    // The second image adds only its entry in the list.
    assert!(both.len() < one.len() + 2048, "{} {}", one.len(), both.len());
    let path = home.path("both.tar");
    fs::write(&path, both).unwrap();
    let archive = oci::docker::Archive::open(fs::File::open(&path).unwrap()).unwrap();
    assert_eq!(archive.images().unwrap(), [["one:1"], ["two:2"]]);
    assert!(archive.has("manifest.json") && !archive.has("oci-layout"));
    for name in ["one:1", "two:2"] {
        let file = format!("{}:{name}", path.display());
        let report = other.import_path("docker-archive", std::path::Path::new(&file));
        assert_eq!((report.image, report.name.unwrap().as_str()), (image.image, name));
    }
}
