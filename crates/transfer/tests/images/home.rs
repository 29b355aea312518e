//! A store for tests, and their default options.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::sync::atomic::AtomicBool;

use image::erofs::read::Owners;
use image::tree::Tree;
use image::verity::ImageId;
use oci::manifest::Platform;
use quire_transfer::import::{ImportContext, ImportOptions};
use store::{OpenOptions, Seconds, Store};

static AMD64: LazyLock<Platform> = LazyLock::new(|| "linux/amd64".parse().unwrap());
/// A cancellation flag that is never set.
pub(crate) static NEVER: AtomicBool = AtomicBool::new(false);

/// A store in a temporary directory, which is removed on drop.
pub(crate) struct Home {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) store: Store,
}

impl Home {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(
            &folder.path().join("store"),
            store::Who::this_process(),
            OpenOptions::create(),
        )
        .unwrap();
        Self { folder, store }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the tree of an image.
    pub(crate) fn tree(&self, id: &ImageId) -> Tree {
        let image = self.store.open_image(id).unwrap();
        self.store.tree(&image, Owners::AsWritten).unwrap().tree
    }

    /// Returns resources with several threads, so that races can occur.
    pub(crate) fn environment(&self) -> ImportContext<'_> {
        ImportContext {
            now: Seconds(1_700_000_000),
            threads: NonZeroUsize::new(3).unwrap(),
            budget: 8 << 20,
            scratch: self.folder.path(),
            progress: &|_| {},
            cancel: &NEVER,
        }
    }
}

/// Returns options that give the same result on every machine.
pub(crate) fn usual_wishes() -> ImportOptions<'static> {
    ImportOptions { platform: &AMD64, ..ImportOptions::default() }
}
