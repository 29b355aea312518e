//! Images that came with an index, and have to be compared with their layers before they are used.

use std::fs;

use store::{OpenOptions, Store, Who};
use testing::images::{patch, set_checksum};

use crate::Place;
use crate::served::Lazy;

fn open(place: &Place) -> Store {
    Store::open(&place.path("store"), Who::this_process(), OpenOptions::read()).unwrap()
}

/// Another import brings what is missing of it. Only its index says then what is in it.
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
        // Of other documents, so that it says nothing of the image's own.
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
        assert!(verified.err.contains("has not been compared"), "{}", verified.err);
        assert!(place.out("fsck").starts_with("sound"));

        fs::create_dir(place.path("root")).unwrap();
        let ran = place.run("mount lazy root");
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        assert!(ran.err.contains("comparing it"), "{}", ran.err);
        assert_eq!(ran.err.contains("was wrong"), is_false, "{}", ran.err);
        assert!(fs::read(place.path("root/words")).unwrap() == lazy.words());
        assert!(!place.path("root/wordy").exists());
        place.out("umount root");
        assert_eq!(id(), right);
        assert!(!is_unproven());
        // Once is enough.
        let ran = place.run("mount lazy root");
        assert_eq!((ran.code, &ran.err[..]), (Some(0), ""));
        place.out("umount root");
        place.out("gc");
        assert!(place.out("fsck --deep").starts_with("sound"));
    }
}
