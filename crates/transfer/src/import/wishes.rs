//! What is wanted of an import.

use std::path::Path;

use image::erofs::Versions;
use oci::manifest::Platform;
use store::{Form, RefName, walk};

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

/// When what was imported becomes durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Durable {
    /// All of it at the end: a failed import leaves nothing.
    #[default]
    Together,
    /// Each layer as soon as it is complete and was compared: a failed import leaves those, which the next one need not
    /// read again. Pin them, or `gc` takes them.
    EachLayer,
}

/// How to import.
#[derive(Debug, Clone, Copy)]
pub struct ImportWishes<'a> {
    /// What the image is to be called. Without a name it is garbage as soon as it is there.
    pub name: Option<&'a RefName>,
    /// Which of several images. By default one for this machine's processor.
    pub platform: &'a Platform,
    /// What is done with one whose config names another.
    pub other_platform: OtherPlatform,
    /// Bounds on what the source may make of itself.
    pub limits: Limits,
    /// When layers become durable.
    pub durable: Durable,
    /// Where the data goes.
    pub form: Form,
    /// What packed devices leave out.
    pub dedup: Dedup,
    /// Entries that no tree can hold.
    pub unsupported: Unsupported,
    /// Which xattrs of directories and tars are kept. Dumps have what they have.
    pub xattrs: walk::Xattrs,
    /// Which times of directories and tars are kept. Dumps have what they have.
    pub times: walk::Times,
    /// The versions of the composefs format that the image may have.
    pub versions: Versions,
    /// Where a dump's objects may be found besides the store: a folder of them, as `mkcomposefs --digest-store` fills.
    pub objects: Option<&'a Path>,
}

impl Default for ImportWishes<'_> {
    fn default() -> Self {
        Self {
            name: None,
            platform: Platform::of_this_machine(),
            other_platform: OtherPlatform::default(),
            limits: Limits::default(),
            durable: Durable::default(),
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
