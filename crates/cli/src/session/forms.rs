//! Chooses the form in which an image is stored, and the best form for this host.

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd};

use anyhow::Context as _;
use image::verity::Algorithm;
use kernel::features::{Can, direct_io, page_sharing};
use store::{Form, Store};

use crate::args::{FormChoice, FormOptions};

/// Returns the form that `auto` chooses for a store, which may not be made yet, in this directory, and the reason.
pub(crate) fn auto(directory: BorrowedFd<'_>, store: Option<&Store>) -> (Form, &'static str) {
    if store.is_some_and(|store| store.algorithm() != Algorithm::Sha256) {
        return (
            Form::Objects,
            "this store names its objects by SHA-512, and the other forms need SHA-256",
        );
    }
    match page_sharing().can {
        Can::Yes if direct_io(directory).can == Can::Yes => {
            (Form::Packed, "this kernel keeps only one copy of equal files of all images in memory")
        }
        // The page cache would contain both the pages of the files and those of the devices, which only EROFS reads.
        Can::Yes => (
            Form::Objects,
            "the store's disk does not support direct reads of 512-byte blocks, so packed files \
            would be in memory twice",
        ),
        Can::No => (Form::Objects, "this kernel keeps only one copy of equal objects in memory"),
        Can::Unknown => (Form::Objects, "this kernel's page sharing is unknown"),
    }
}

pub(crate) fn choose(options: &FormOptions, store: &Store) -> anyhow::Result<Form> {
    choose_again(options, store, None)
}

/// Like [`choose`], for an image that may already be in the store. With `auto`, the image keeps its form `here`.
pub(crate) fn choose_again(
    options: &FormOptions,
    store: &Store,
    here: Option<Form>,
) -> anyhow::Result<Form> {
    Ok(match options.form {
        FormChoice::Auto => match here {
            Some(form) => form,
            None => {
                let directory = File::open(store.path())
                    .with_context(|| format!("cannot open {}", store.path().display()))?;
                auto(directory.as_fd(), Some(store)).0
            }
        },
        FormChoice::Objects => Form::Objects,
        FormChoice::Packed => Form::Packed,
        FormChoice::Tar => Form::Tar,
    })
}
