//! Hints for images without layers, and for images whose data is not stored as the tars of their layers.

use image::digest::Digest;
use image::verity::ImageId;
use store::{Form, Store};

/// Returns the text of an error: the image has no layers. The text also explains how to import an image that has
/// layers; `form` is an option of that import.
pub(crate) fn none(name: &str, form: &str) -> String {
    format!(
        "{name} has no layers, because it came from a directory or a dump, or was merged or \
        filtered: `quire export {name} tar:FILE` and `quire import {form}tar:FILE NEW` make an \
        image of one layer of it"
    )
}

/// Returns whether an image's data is stored as in the form `tar`. If all files are so short that they are in the
/// EROFS image, there is no device, so the form `packed` is equivalent.
pub(crate) fn is_tar(form: Form, devices: usize) -> bool {
    form == Form::Tar || form == Form::Packed && devices == 0
}

/// Returns the text of an error: how to index the layers of an image with this manifest.
pub(crate) fn way_to_index(store: &Store, name: &str, image: &ImageId, manifest: Digest) -> String {
    match origin(store, image, manifest) {
        Some(origin) => format!("`{}` makes an index", pull_with_index(&origin, name)),
        None => IMPORT_WITH_INDEX.to_owned(),
    }
}

/// As [`way_to_index`], as the second step after another one.
pub(crate) fn remedy_for_index(
    store: &Store,
    name: &str,
    image: &ImageId,
    manifest: Digest,
) -> String {
    match origin(store, image, manifest) {
        Some(origin) => format!("`{}`", pull_with_index(&origin, name)),
        None => IMPORT_WITH_INDEX.to_owned(),
    }
}

const IMPORT_WITH_INDEX: &str = "import the image again, with `--form tar --index`";

fn pull_with_index(origin: &str, name: &str) -> String {
    format!("quire pull --form tar --keep-layers --index {origin} {name}")
}

/// Returns a registry's name for an image with this manifest, by digest.
pub(crate) fn origin(store: &Store, image: &ImageId, manifest: Digest) -> Option<String> {
    let origins = store.downloads.origins(image).ok()?;
    let mut pulled = origins.into_iter().filter(|it| it.manifest == Some(manifest));
    let repository = pulled.find_map(|it| it.repository)?;
    Some(format!("{repository}@{manifest}"))
}
