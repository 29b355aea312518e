//! Options of an import.

use std::path::Path;

use image::erofs::Versions;
use oci::manifest::Platform;
use store::{Form, RefName, Transaction, walk};

use super::{Limits, OtherPlatform};
use crate::native::Dedup;

/// What to do with an entry of a tar that no tree can hold, such as a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Unsupported {
    /// Refuse the layer.
    #[default]
    Refuse,
    /// Leave the entry out, and report it.
    Skip,
}

/// When imported data becomes durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Durable {
    /// All of it at the end: a failed import leaves nothing.
    #[default]
    Together,
    /// Each layer as soon as it is complete and verified. A failed import leaves those layers, and the next one does
    /// not read them again. Pin them, or `gc` removes them after the import.
    EachLayer,
}

/// Options of an import.
#[derive(Debug, Clone, Copy)]
pub struct ImportOptions<'a> {
    /// Name for the image. Without a name it is garbage at once.
    pub name: Option<&'a RefName>,
    /// Platform to choose among several images; by default Linux on this machine's processor.
    pub platform: &'a Platform,
    /// Whether to take an image whose config names another platform.
    pub other_platform: OtherPlatform,
    /// Limits on the size of the source.
    pub limits: Limits,
    /// When layers become durable.
    pub durable: Durable,
    /// An import that keeps from `gc` what this one publishes, until it ends itself.
    pub keeper: Option<&'a Transaction<'a>>,
    /// Whether layers get an index from the same pass over their blobs. Only with the form `tar`.
    pub index: bool,
    /// Form in which the data is stored.
    pub form: Form,
    /// Data that packed devices leave out.
    pub dedup: Dedup,
    /// What to do with entries that no tree can hold.
    pub unsupported: Unsupported,
    /// Which xattrs of directories and tars are kept. Dumps have what they have.
    pub xattrs: walk::Xattrs,
    /// Which times of directories and tars are kept. Dumps have what they have.
    pub times: walk::Times,
    /// The versions of the composefs format that the image may have.
    pub versions: Versions,
    /// Directory with a dump's objects, such as `mkcomposefs --digest-store` fills. The store comes first.
    pub objects: Option<&'a Path>,
}

impl Default for ImportOptions<'_> {
    fn default() -> Self {
        Self {
            name: None,
            platform: Platform::of_this_machine(),
            other_platform: OtherPlatform::default(),
            limits: Limits::default(),
            durable: Durable::default(),
            keeper: None,
            index: false,
            form: Form::Objects,
            dedup: Dedup::default(),
            unsupported: Unsupported::default(),
            xattrs: walk::Xattrs::All,
            times: walk::Times::Exact,
            versions: Versions::default(),
            objects: None,
        }
    }
}
