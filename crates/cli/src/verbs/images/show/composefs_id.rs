//! The options of `show` for the ids that other programs seal.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::{Args, ValueEnum};
use image::composefs_rs::ComposefsLayout;
use image::verity::{Algorithm, ImageId};
use store::Store;
use transfer::StoredImage;
use transfer::export::{IdFormat, Options, SealedTree, composefs_id};
use transfer::progress::Event;

use crate::session::context::Context;
use crate::session::resources::scratch;
use crate::session::signals::{give_up_when, until_signal};

/// Value of `--composefs-id` without an algorithm.
const OF_STORE: &str = "store";

// The id of an image in composefs.
#[derive(Debug, Args)]
pub(crate) struct ComposefsIdOptions {
    /// Print only the id that `cfsctl oci compute-id` of composefs-rs prints for the image, with this algorithm; by
    /// default that of the store
    #[arg(long, value_name = "ALGORITHM", num_args = 0..=1, require_equals = true, default_missing_value = OF_STORE)]
    composefs_id: Option<IdAlgorithm>,
    /// With --composefs-id, the id of the image as it boots: without the files of /boot and /sysroot, and labelled by
    /// its SELinux policy
    #[arg(long, requires = "composefs_id")]
    bootable: bool,
    /// With --composefs-id, the id of the files as they are, which `mkcomposefs --min-version=1` of composefs writes
    #[arg(long, requires = "composefs_id", conflicts_with = "bootable")]
    unchanged: bool,
    /// With --composefs-id, the layout of the image, as `cfsctl --erofs-version` chooses it: 1, or 2 for a repository
    /// that an early composefs-rs made
    #[arg(long, value_name = "VERSION", requires = "composefs_id", conflicts_with = "unchanged", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2))]
    erofs_version: u8,
}

/// The algorithm of an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum IdAlgorithm {
    /// That of the store
    #[value(hide = true)]
    Store,
    /// SHA-256
    Sha256,
    /// SHA-512, as bootc uses
    Sha512,
}

impl ComposefsIdOptions {
    /// Whether an id is wanted.
    pub(crate) const fn is_set(&self) -> bool {
        self.composefs_id.is_some()
    }

    /// Computes the id, if it is wanted.
    pub(crate) fn compute(
        &self,
        context: &Context,
        store: &Store,
        image: &ImageId,
        documents: Option<&StoredImage>,
    ) -> anyhow::Result<Option<String>> {
        let Some(algorithm) = self.composefs_id else { return Ok(None) };
        let algorithm = match algorithm {
            IdAlgorithm::Store => store.algorithm(),
            IdAlgorithm::Sha256 => Algorithm::Sha256,
            IdAlgorithm::Sha512 => Algorithm::Sha512,
        };
        let tree = match (self.bootable, self.unchanged) {
            (true, _) => SealedTree::Bootable,
            (false, true) => SealedTree::Unchanged,
            (false, false) => SealedTree::Oci,
        };
        let progress = context.progress();
        let cancel = Arc::new(AtomicBool::new(false));
        give_up_when(store, &cancel);
        let scratch = scratch(store);
        let options = Options {
            threads: std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN),
            scratch: &scratch,
            progress: &|event: Event<'_>| progress.tell(event),
            cancel: &cancel,
        };
        let layout =
            if self.erofs_version == 2 { ComposefsLayout::V2 } else { ComposefsLayout::V1 };
        let format = IdFormat { algorithm, layout };
        let work = || composefs_id(store, image, documents, tree, format, &options);
        let id = until_signal(&cancel, work)?;
        progress.finish();
        Ok(Some(id?.to_string()))
    }
}
