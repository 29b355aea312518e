//! Images without layers, and images whose data is not the tars of their layers: what a user can do about that.

use image::digest::Digest;
use image::verity::ImageId;
use store::{Form, Store};

/// For an error: an image has no layers, and how to make one that has some. `form` is an option of that import.
pub(crate) fn none(name: &str, form: &str) -> String {
    format!(
        "{name} has no layers, since it came from a directory or a dump, or was merged or filtered: `quire \
         export {name} tar:FILE` and `quire import {form}tar:FILE NEW` make an image of one layer of it"
    )
}

/// Whether an image has its data as the form `tar` has it. If all files are so short that they are in the EROFS image, there
/// is no device, and the form `packed` is as good.
pub(crate) fn is_tar(form: Form, devices: usize) -> bool {
    form == Form::Tar || form == Form::Packed && devices == 0
}

/// For an error: how to have the layers of an image indexed, whose manifest is that.
pub(crate) fn way_to_index(store: &Store, name: &str, image: &ImageId, manifest: Digest) -> String {
    match origin(store, image, manifest) {
        Some(origin) => {
            format!("`quire pull --form tar --keep-layers --index {origin} {name}` makes one")
        }
        None => "import the image again, with `--form tar --index`".to_owned(),
    }
}

/// The registry's name for an image with that manifest, by digest.
pub(crate) fn origin(store: &Store, image: &ImageId, manifest: Digest) -> Option<String> {
    let origins = store.downloads.origins(image).ok()?;
    let mut pulled = origins.into_iter().filter(|it| it.manifest == Some(manifest));
    let repository = pulled.find_map(|it| it.repository)?;
    Some(format!("{repository}@{manifest}"))
}
