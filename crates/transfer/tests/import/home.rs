//! A store to import into, and how tests import unless they are about something else.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::sync::atomic::AtomicBool;

use image::erofs::Versions;
use oci::manifest::Platform;
use quire_transfer::import::{Durable, Limits, Options, OtherPlatform, Unsupported};
use quire_transfer::native::Dedup;
use store::{OpenOptions, Seconds, Store, walk};

static AMD64: LazyLock<Platform> = LazyLock::new(|| "linux/amd64".parse().unwrap());
/// Nobody cancels.
pub(crate) static NEVER: AtomicBool = AtomicBool::new(false);

/// A store in a folder that goes away with it.
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

    /// Without a name, and so that every thread has somebody to race with.
    pub(crate) fn import_options(&self) -> Options<'_> {
        Options {
            name: None,
            now: Seconds(1_700_000_000),
            platform: &AMD64,
            other_platform: OtherPlatform::Tell,
            limits: Limits::default(),
            budget: 8 << 20,
            durable: Durable::Together,
            form: store::Form::Objects,
            dedup: Dedup::Store,
            threads: NonZeroUsize::new(3).unwrap(),
            unsupported: Unsupported::Refuse,
            xattrs: walk::Xattrs::All,
            times: walk::Times::Exact,
            versions: Versions::default(),
            objects: None,
            scratch: self.folder.path(),
            progress: &|_| {},
            cancel: &NEVER,
        }
    }
}
