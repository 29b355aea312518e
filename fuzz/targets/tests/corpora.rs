//! Runs the fuzz targets' corpora as plain tests, so that fixed findings do not recur.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "tests fail by panicking")]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use quire_fuzz_targets as targets;

fn fuzz() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn run_corpus(name: &str, target: fn(&[u8])) {
    let mut count = 0;
    for file in fs::read_dir(fuzz().join("corpus").join(name)).unwrap() {
        let path = file.unwrap().path();
        // The path is shown if the target panics.
        println!("{}", path.display());
        target(&fs::read(&path).unwrap());
        count += 1;
    }
    assert!(count > 0, "the corpus {name} is empty");
}

#[test]
fn chunked() {
    run_corpus("chunked", targets::chunked);
}

/// The seeds have loaders.
#[test]
fn elf() {
    run_corpus("elf", |bytes| assert!(targets::elf(bytes)));
}

#[test]
fn fuse_request() {
    run_corpus("fuse_request", targets::fuse_request);
}

#[test]
fn fuse_tree() {
    run_corpus("fuse_tree", targets::fuse_tree);
}

#[test]
fn mounts_request() {
    run_corpus("mounts_request", targets::mounts_request);
}

/// The service copies every dump in the corpus that it can read as an image.
#[test]
fn mounts_image() {
    run_corpus("erofs", targets::mounts_image);
    run_corpus("mounts_image", |bytes| assert!(targets::is_copied(bytes)));
}

#[test]
fn gzip_span() {
    run_corpus("gzip_span", targets::gzip_span);
}

/// The seeds are accepted.
#[test]
fn hot_pack() {
    run_corpus("hot_pack", |bytes| {
        image::lazy::hot::HotHead::decode(bytes).unwrap();
        targets::hot_pack(bytes);
    });
}

#[test]
fn lazy_index() {
    run_corpus("lazy_index", targets::lazy_index);
}

#[test]
fn lazy_artifact() {
    run_corpus("lazy_artifact", targets::lazy_artifact);
}

#[test]
fn lazy_image() {
    run_corpus("lazy_image", targets::lazy_image);
}

/// Without an accepted image, a fuzzer would never reach the code after the check.
#[test]
fn a_lazy_image_of_the_corpus_is_accepted() {
    let files = fs::read_dir(fuzz().join("corpus/lazy_image")).unwrap();
    let images = files.map(|it| fs::read(it.unwrap().path()).unwrap());
    let accepted = images.filter(|it| targets::is_lazy_image(it));
    assert!(accepted.count() > 0);
}

#[test]
fn lazy_recipe() {
    run_corpus("lazy_recipe", targets::lazy_recipe);
}

#[test]
fn data_index() {
    run_corpus("data_index", targets::data_index);
}

#[test]
fn dump() {
    run_corpus("dump", targets::dump);
}

#[test]
fn erofs() {
    run_corpus("erofs", targets::erofs);
}

#[test]
fn manifest() {
    run_corpus("manifest", targets::manifest);
}

#[test]
fn store_ops() {
    run_corpus("store_ops", targets::store_ops);
}

#[test]
fn tar_layer() {
    run_corpus("tar_layer", targets::tar_layer);
}

#[test]
fn traces() {
    run_corpus("traces", targets::traces);
}

#[test]
fn zstd_span() {
    run_corpus("zstd_span", |bytes| assert!(targets::zstd_span(bytes)));
}

#[test]
fn every_target_has_a_corpus_and_a_test() {
    let names = |folder: &str| -> BTreeSet<String> {
        let files = fs::read_dir(fuzz().join(folder)).unwrap();
        let names = files.map(|it| it.unwrap().file_name().into_string().unwrap());
        names
            .filter(|it| it != "README.md")
            .map(|it| it.trim_end_matches(".rs").to_owned())
            .collect()
    };
    let tested = [
        "chunked",
        "data_index",
        "dump",
        "elf",
        "erofs",
        "fuse_request",
        "fuse_tree",
        "gzip_span",
        "lazy_artifact",
        "lazy_image",
        "hot_pack",
        "lazy_index",
        "lazy_recipe",
        "manifest",
        "mounts_image",
        "mounts_request",
        "signing",
        "store_ops",
        "tar_layer",
        "traces",
        "zstd_span",
    ]
    .map(String::from);
    assert_eq!(names("fuzz_targets"), BTreeSet::from(tested));
    assert_eq!(names("corpus"), names("fuzz_targets"));
}

#[test]
fn signing() {
    run_corpus("signing", targets::signing);
}
