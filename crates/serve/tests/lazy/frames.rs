//! A layer of many zstd frames, with a table of contents as large as that of a layer in the format zstd:chunked.

use std::fs;
use std::sync::atomic::Ordering;

use image::lazy::BlobKind;
use quire_serve::lazy::Cause;
use testing::{programs, skipped};

use super::{Lie, Stage, compare, store, through_the_kernel};

/// Bytes of tar in a frame.
const FRAME: usize = 100_000;
/// Bytes in the skippable frame at the end.
const TABLE: usize = 2 << 20;

/// Returns a skippable frame. Source: RFC 8878, 3.1.2.
fn skippable(length: usize) -> Vec<u8> {
    let length_field = u32::try_from(length).unwrap().to_le_bytes();
    [&[0x50, 0x2a, 0x4d, 0x18][..], &length_field, &vec![0xaa; length]].concat()
}

fn stage() -> Option<Stage> {
    if !rustix::process::geteuid().is_root() {
        skipped("needs root");
        return None;
    }
    if !programs(&["tar"]) {
        return None;
    }
    Some(Stage::with_layer(|folder| {
        let tar = fs::read(folder.join("layer.tar")).unwrap();
        let mut blob = skippable(3);
        for part in tar.chunks(FRAME) {
            blob.extend(zstd::encode_all(part, 3).unwrap());
            blob.extend(skippable(7));
        }
        blob.extend(skippable(TABLE));
        let path = folder.join("layer.tar.zst");
        fs::write(&path, blob).unwrap();
        path
    }))
}

#[test]
fn files_of_zstd_frames_are_fetched_when_they_are_read() {
    let Some(stage) = stage() else { return };
    let head = &stage.index.head;
    assert!(matches!(head.kind, BlobKind::Zstd { .. }));
    assert!(head.spans.len() > 20, "{} spans", head.spans.len());
    through_the_kernel(&stage, |root| {
        let before = stage.blob.asked.load(Ordering::Relaxed);
        let asked = || stage.blob.asked.load(Ordering::Relaxed) - before;
        let small = |root: &std::path::Path| fs::read(root.join("usr/lib/511")).unwrap();
        assert_eq!(small(root), small(&stage.tree));
        let one = asked();
        assert!(one > 0 && one < head.data_end() / 2, "{one} bytes");
        // Wrong bytes never reach a reader.
        *stage.blob.lie.lock().unwrap() = Lie::Always;
        fs::read(root.join("words")).unwrap_err();
        *stage.blob.lie.lock().unwrap() = Lie::None;
        compare(&stage.tree, root);
        let all = asked();
        compare(&stage.tree, root);
        assert_eq!(asked(), all);
    });
}

/// The table of contents is not fetched.
#[test]
fn a_device_of_zstd_frames_that_is_completed_fetches_its_data_once() {
    let Some(stage) = stage() else { return };
    let spans = stage.index.head.spans.len();
    for (number, order) in
        [(0..spans).collect::<Vec<_>>(), (0..spans).rev().collect()].into_iter().enumerate()
    {
        let lazy = store(&stage.folder.path().join(format!("lazy-{number}")));
        let filler = stage.filler(&lazy);
        let before = stage.blob.asked.load(Ordering::Relaxed);
        for span in order {
            filler.bring_ahead(span..span + 1, Cause::Completion).unwrap();
        }
        assert!(filler.is_full());
        let asked = stage.blob.asked.load(Ordering::Relaxed) - before;
        // Each byte once, and no byte of the table.
        assert_eq!(asked, stage.index.head.data_end());
        assert!(asked + TABLE as u64 <= stage.blob.bytes.len() as u64);
        drop(filler);
        stage.device_again(&lazy).seal().unwrap();
    }
}
