//! Tests exports of images, and imports of the results.

mod flat;
mod layers;
mod layouts;
mod plans;

use std::ffi::OsStr;
use std::fs;
use std::io::Read;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use quire_transfer as transfer;

use crate::home::{Home, NEVER, usual_wishes};
use oci::source::ImageSource;
use store::Digest;
use testing::chain;
use transfer::export::Options;
use transfer::import::Report;

impl Home {
    fn options(&self) -> Options<'_> {
        Options {
            threads: NonZeroUsize::new(3).unwrap(),
            scratch: self.folder.path(),
            progress: &|_| {},
            cancel: &NEVER,
        }
    }

    /// Imports `KIND:PATH`.
    fn import_path(&self, kind: &str, path: &Path) -> Report {
        let text = format!("{kind}:{}", path.display());
        let source = ImageSource::parse(OsStr::new(&text)).unwrap();
        transfer::import::import(&self.store, &source, &self.environment(), &usual_wishes())
            .unwrap()
    }

    /// Adds a blob to the store, as a pull with `--keep-layers` does.
    fn keep(&self, bytes: &[u8]) -> Digest {
        let digest = Digest::sha256(bytes);
        let mut blob = self.store.downloads.partial(&digest).unwrap().unwrap();
        blob.append(bytes).unwrap();
        blob.finish().unwrap();
        digest
    }

    /// Returns the paths of all objects in the store, the largest first.
    fn objects(&self) -> Vec<PathBuf> {
        let shards = fs::read_dir(self.path("store/objects")).unwrap();
        let files = shards.flat_map(|it| fs::read_dir(it.unwrap().path()).unwrap());
        let mut files: Vec<_> = files.map(|it| it.unwrap().path()).collect();
        files.sort_by_key(|it| std::cmp::Reverse(it.metadata().unwrap().len()));
        files
    }
}

/// Replaces a file by one of the same length with a flipped bit, because sealed files cannot be changed in place.
fn damage(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::remove_file(path).unwrap();
    fs::write(path, bytes).unwrap();
}

fn all(mut from: impl Read) -> Vec<u8> {
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes).unwrap();
    bytes
}

/// Returns all paths in a directory, relative to it.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    let mut open = vec![folder.to_owned()];
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(&directory).into_iter().flatten() {
            let path = entry.unwrap().path();
            all.push(path.strip_prefix(folder).unwrap().to_owned());
            if path.is_dir() {
                open.push(path);
            }
        }
    }
    all.sort();
    all
}
