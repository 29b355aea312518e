//! Images that came with an index, and must be compared with their layers before they are used.

use std::fs;

use image::digest::Digest;
use store::{IndexWindows, OpenOptions, Origin, Store, Who};
use testing::fake::wait_for;
use testing::images::{patch, set_checksum};
use transfer::lazy::{LayerIndex, LazyImage, LazyPublishError, LazyPublished, publish};

use crate::Place;
use crate::services::served::{Lazy, end, serve};

fn open(place: &Place) -> Store {
    Store::open(&place.path("store"), Who::this_process(), OpenOptions::read()).unwrap()
}

/// Another import stores the missing layer, so that only the index describes the image's contents.
#[test]
fn an_image_whose_last_layer_another_import_brings_is_compared_before_it_is_mounted() {
    for (lie, is_false) in [(b"words", false), (b"wordy", true)] {
        let lazy = Lazy::with_image(|image| {
            patch(image, b"words", lie);
            set_checksum(image);
        });
        let Some(lazy) = lazy else { return };
        let place = &lazy.place;
        let id = || open(place).resolve("lazy").unwrap().image.to_string();
        let before = id();
        let is_unproven = || {
            let shown = place.out("show --json lazy");
            serde_json::from_str::<serde_json::Value>(&shown).unwrap()["unproven"]
                .as_bool()
                .unwrap()
        };
        assert!(is_unproven());
        // The import has another config, so it does not prove the image for its original manifest.
        fs::copy(place.path("layer.tar.gz"), place.path("again.tar.gz")).unwrap();
        place.out("import --quiet --form tar --platform linux/arm64 tar:again.tar.gz other");
        let right = open(place).resolve("other").unwrap().image.to_string();
        assert_eq!(right == before, !is_false);
        let shown = place.out("show lazy");
        assert!(shown.contains("verified  not yet"), "{shown}");
        let cat = format!("cat lazy:/{}", std::str::from_utf8(lie).unwrap());
        for verb in ["export lazy tar:out.tar", "convert lazy new", &cat] {
            let refused = place.run(verb);
            assert_eq!((refused.code, &refused.out[..]), (Some(2), ""), "{verb}");
            assert!(refused.err.contains("`quire mount`"), "{verb}: {}", refused.err);
        }
        let verified = place.run("verify lazy");
        assert!(verified.err.contains("is not compared with its layers"), "{}", verified.err);
        assert!(place.out("fsck").starts_with("sound"));

        fs::create_dir(place.path("root")).unwrap();
        let ran = place.run("mount lazy root");
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        assert!(ran.err.contains("comparing it"), "{}", ran.err);
        assert_eq!(ran.err.contains("is wrong, or"), is_false, "{}", ran.err);
        assert!(fs::read(place.path("root/words")).unwrap() == lazy.words());
        assert!(!place.path("root/wordy").exists());
        place.out("umount root");
        assert_eq!(id(), right);
        assert!(!is_unproven());
        // One comparison is enough.
        let ran = place.run("mount lazy root");
        assert_eq!((ran.code, &ran.err[..]), (Some(0), ""));
        place.out("umount root");
        place.out("gc");
        assert!(place.out("fsck --deep").starts_with("sound"));
    }
}

fn is_unproven(place: &Place, name: &str) -> bool {
    let shown = place.out(&format!("show --json {name}"));
    serde_json::from_str::<serde_json::Value>(&shown).unwrap()["unproven"].as_bool().unwrap()
}

/// Makes a lazy image in a store that already has an image, named `liar`, whose index was changed. The manifest of the
/// honest image claims to have the same image. Also returns the result of publishing the honest image.
fn beside(
    lie: impl FnOnce(&mut LayerIndex),
) -> Option<(Lazy, Result<LazyPublished, LazyPublishError>)> {
    Lazy::make(
        |_| (),
        |_| (),
        |store, honest| {
            let LazyImage { documents, indexes: [index], .. } = honest else {
                panic!("one layer, and one index")
            };
            let mut index = index.clone();
            lie(&mut index);
            let [(_, manifest), config] = documents else { panic!("manifest and config") };
            let bytes = [manifest, &b"\n"[..]].concat();
            let digest = Digest::sha256(&bytes);
            let liar = LazyImage {
                manifest: &digest,
                documents: &[(&digest, &bytes), *config],
                indexes: &[index],
                name: &"liar:latest".parse().unwrap(),
                origin: &Origin { manifest: Some(digest), repository: None },
                ..*honest
            };
            publish(store, &liar).unwrap();
        },
    )
}

/// A manifest describes only its own layers: their blobs, and where data is in a blob (OCI image-spec, manifest.md:
/// a descriptor names the blob by its digest). A wrong index must not change where another image's layer is
/// fetched.
#[test]
fn an_index_that_names_another_blob_takes_nothing_from_an_honest_image() {
    let lies: [fn(&mut LayerIndex); 3] = [
        |index| index.head.blob = Digest::sha256(b"another blob"),
        |index| index.head.spans[1..].iter_mut().for_each(|it| it.packed += 3),
        |index| {
            let wrong = index.windows.groups().unwrap().iter().map(|it| it ^ 1).collect();
            index.windows = IndexWindows::Groups(wrong);
        },
    ];
    for (number, lie) in (1..).zip(lies) {
        let Some((lazy, published)) = beside(lie) else { return };
        published.unwrap();
        let place = &lazy.place;
        let mut service = serve(place);
        for root in ["false", "root"] {
            fs::create_dir(place.path(root)).unwrap();
        }
        let read = |root: &str| fs::read(place.path(root).join("words"));
        // Both images are mounted at the same time. The image of the liar is mounted first.
        place.out("mount --lazy --prefetch none liar false");
        let error = read("false").map(|it| it.len()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()), "{number}");
        place.out("mount --lazy --prefetch none lazy root");
        assert!(read("root").unwrap() == lazy.words(), "{number}");
        // The fetched bytes are right, so the other image may use them as well.
        wait_for("the end of a pause", || read("false").is_ok_and(|it| it == lazy.words()));
        // The next service knows the image of each mount.
        service.kill().unwrap();
        service.wait().unwrap();
        let unread = fs::read(place.path("root/unread")).unwrap();
        assert!(unread == fs::read(lazy.tree.join("unread")).unwrap(), "{number}");
        for root in ["false", "root"] {
            place.out(&format!("umount {root}"));
        }
        let mut service =
            crate::services::served::serve_with(place, &["--replace"], |command| command);
        end(place, &mut service);
        assert!(place.out("fsck").starts_with("sound"));
    }
}

#[test]
fn an_index_with_false_digests_takes_nothing_from_an_honest_image() {
    let Some((lazy, published)) = beside(|index| index.head.units[0][0] ^= 1) else { return };
    let place = &lazy.place;
    // It is unknown which of the two indexes is wrong, so this image is not published as lazy, and a pull fetches its
    // layers.
    assert!(published.unwrap_err().is_contradiction());
    place.out("import --quiet --form tar tar:layer.tar.gz honest");
    let id = |name: &str| open(place).resolve(name).unwrap().image;
    assert_eq!(id("honest"), id("liar"), "both manifests say that it is theirs");
    assert_eq!((is_unproven(place, "honest"), is_unproven(place, "liar")), (false, true));
    fs::create_dir(place.path("root")).unwrap();
    let ran = place.run("mount honest root");
    assert_eq!((ran.code, &ran.err[..]), (Some(0), ""));
    assert!(fs::read(place.path("root/words")).unwrap() == lazy.words());
    place.out("umount root");
    let by_id = place.run(&format!("mount {} root", id("honest")));
    assert_eq!((by_id.code, &by_id.err[..]), (Some(0), ""));
    place.out("umount root");
    let out = place.out("cat honest:/words");
    assert!(out.as_bytes() == lazy.words());
    // The liar's layers are compared when the image is used. The layers contain the right bytes, so the image gets
    // them.
    assert!(place.run("mount liar root").err.contains("comparing it"));
    assert!(fs::read(place.path("root/words")).unwrap() == lazy.words());
    place.out("umount root");
    place.out("gc");
    assert!(place.out("fsck --deep").starts_with("sound"));
}
