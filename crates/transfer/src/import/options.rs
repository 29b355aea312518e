//! Options of an import.

use std::path::Path;

use image::erofs::Versions;
use oci::manifest::Platform;
use store::{Form, RefName, Transaction, walk};

use super::{Limits, OtherPlatform};
use crate::config_change::Change;

/// How to handle a tar entry that an image cannot hold, such as a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Unsupported {
    #[default]
    Refuse,
    /// The entry is left out, and reported.
    Skip,
}

/// When imported data becomes durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Durable {
    /// All data at the end: a failed import leaves nothing.
    #[default]
    Together,
    /// Each layer becomes durable as soon as it is complete and verified. A failed import leaves these layers in the
    /// store, so the next import does not read them again. Without a pin, `gc` removes them after the import.
    EachLayer,
}

#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of imports")]
pub struct ImportOptions<'a> {
    /// Name for the image. An image without a name is garbage at once, unless `kept_unnamed` is set.
    pub name: Option<&'a RefName>,
    /// Whether the image gets no name if `name` is `None`. Otherwise it gets the source's name.
    pub unnamed: bool,
    /// Whether an image without a name gets the ref [`RefName::unnamed`], so that `gc` keeps it.
    pub kept_unnamed: bool,
    /// Platform to choose among several images; by default Linux on this machine's processor.
    pub platform: &'a Platform,
    /// Whether to accept an image whose config names another platform.
    pub other_platform: OtherPlatform,
    /// Limits on the size of the source.
    pub limits: Limits,
    /// When layers become durable.
    pub durable: Durable,
    /// A transaction that protects what this import publishes from `gc` until that transaction ends.
    pub keeper: Option<&'a Transaction<'a>>,
    /// Whether to make indexes of layers in the same pass over their blobs. Requires the form `tar`.
    pub index: bool,
    /// Whether a layer that the store has is read again if it lacks an index. Only counts with `index`.
    pub index_again: bool,
    /// Form in which the data is stored.
    pub form: Form,
    /// How to handle entries that an image cannot hold.
    pub unsupported: Unsupported,
    /// Which xattrs of directories, tars and EROFS images are kept. Those of dumps are all kept.
    pub xattrs: walk::KeptXattrs,
    /// Which times of directories, tars and EROFS images are kept. Those of dumps are all kept.
    pub times: walk::Times,
    /// Versions of the composefs format that the image may have.
    pub versions: Versions,
    /// Directory with the objects of a dump or a composefs image, such as one filled by `mkcomposefs --digest-store`.
    /// Objects of the store are preferred.
    pub objects: Option<&'a Path>,
    /// Changes to the config that an import of a tar makes. Configs of sources are never changed.
    pub changes: &'a [Change],
}

impl Default for ImportOptions<'_> {
    fn default() -> Self {
        Self {
            name: None,
            unnamed: false,
            kept_unnamed: false,
            platform: Platform::of_this_machine(),
            other_platform: OtherPlatform::default(),
            limits: Limits::default(),
            durable: Durable::default(),
            keeper: None,
            index: false,
            index_again: true,
            form: Form::Objects,
            unsupported: Unsupported::default(),
            xattrs: walk::KeptXattrs::All,
            times: walk::Times::Exact,
            versions: Versions::default(),
            objects: None,
            changes: &[],
        }
    }
}
