//! Converts an image of the store to another form.

use std::io::{Read, Write as _};
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::Instant;

use image::erofs::read::Owners;
use image::tree::Tree;
use image::verity::{ImageId, ObjectId};
use store::{Form, ObjectReader, OperationError, RefName, Store};

use crate::import::layers::{LayerBlob, LayerProof, LayerSource, SourceImage};
use crate::import::native::each_object;
use crate::import::{
    ImportContext, ImportError, ImportOptions, ImportRun, LayerFailure, Origins, Report,
    UncommittedImage,
};
use crate::native::PackError;
use crate::progress::Event;
use crate::stored::StoredImage;
use image::digest::Digest;

/// Bytes copied at once.
const PIECE: usize = 256 << 10;

/// An image of the store to convert.
#[derive(Debug, Clone, Copy)]
pub struct Stored<'a> {
    pub image: &'a ImageId,
    /// Digest of the manifest that the image was made from, if known. With a manifest, the layers keep their exact
    /// bytes.
    pub manifest: Option<&'a Digest>,
    /// The name by which the image was found, if any. If the result gets this name, the conversion fails if the name
    /// has moved to another image.
    pub name: Option<&'a RefName>,
}

/// Makes the image in another form, from data in the store. Every byte is verified. The old image, and the data that
/// only this image needs, becomes garbage when it loses its last name.
///
/// # Errors
/// [`ImportError`]; the store is unchanged then.
pub fn convert(
    store: &Store,
    image: &Stored<'_>,
    environment: &ImportContext<'_>,
    options: &ImportOptions<'_>,
) -> Result<Report, ImportError> {
    let start = Instant::now();
    let origins = store.downloads.origins(image.image).map_err(ImportError::origin)?;
    let run = ImportRun::begin(store, environment, options)?.from(Origins::Same(origins));
    if let Some(name) = image.name.filter(|name| options.name == Some(*name)) {
        run.transaction.expect_ref(name.clone(), *image.image);
    }
    let made = match image.manifest {
        Some(manifest) => run.layers(&from_store(store, manifest)?)?,
        None => run.tree(image.image)?,
    };
    run.finish(made, options.name.cloned(), start)
}

/// Finds the layers of a manifest in the store.
fn from_store<'s>(store: &'s Store, digest: &Digest) -> Result<SourceImage<'s>, ImportError> {
    let StoredImage { digest, manifest_bytes, manifest, config_bytes, config } =
        StoredImage::load(store, digest)?;
    let layers = manifest.layers.iter();
    let layers = layers.zip(config.diff_ids()).map(|(layer, diff_id)| LayerSource {
        name: layer.digest.to_string(),
        source: Mutex::new(Box::new(Tar { store, diff_id: *diff_id })),
        media_type: layer.media_type.clone(),
        digest: None,
        size: None,
        diff_id: Some(*diff_id),
        title: LayerProof::Own,
        is_wanted: false,
    });
    Ok(SourceImage {
        layers: layers.collect(),
        manifest: Some((digest, manifest_bytes)),
        config: Some((manifest.config.digest, config_bytes)),
        name: None,
    })
}

/// The tar of a layer of the store, used if the layer's recipe is incomplete.
struct Tar<'s> {
    store: &'s Store,
    diff_id: Digest,
}

impl LayerBlob for Tar<'_> {
    fn open(&mut self, failure: Option<&LayerFailure>) -> Option<Box<dyn Read + Send + '_>> {
        if failure.is_some() {
            return None;
        }
        Some(match self.store.layer_tar(&self.diff_id) {
            Ok(tar) => Box::new(tar),
            Err(error) => Box::new(Failing(Some(std::io::Error::other(error)))),
        })
    }
}

/// A reader that returns an error, which explains why there is no data.
struct Failing(Option<std::io::Error>);

impl Read for Failing {
    fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
        Err(self.0.take().unwrap_or_else(|| std::io::ErrorKind::UnexpectedEof.into()))
    }
}

impl ImportRun<'_> {
    /// Converts an image that was not made from layers.
    fn tree(&self, image: &ImageId) -> Result<UncommittedImage, ImportError> {
        (self.environment.progress)(Event::Walking);
        let store = self.transaction.store();
        let opened = store.open_image(image).map_err(|it| ImportError::OpenImage(Box::new(it)))?;
        let tree = store.tree(&opened, Owners::AsWritten);
        let tree =
            tree.map_err(|it| ImportError::failed("read", format!("image {image}"), it))?.tree;
        if self.options.form == Form::Objects {
            self.objects(&tree)?;
        }
        self.made(tree)
    }
}

impl ImportRun<'_> {
    /// Makes sure that each object of a tree is stored as a separate file.
    fn objects(&self, tree: &Tree) -> Result<(), ImportError> {
        let mut buffer = vec![0; PIECE];
        each_object(tree, |object, size| {
            self.go_on()?;
            if self.transaction.reuse(object, size).map_err(ImportError::Object)? {
                return Ok(());
            }
            let failed = |error| {
                ImportError::from(PackError::from(OperationError::of("read object", object)(error)))
            };
            let mut reader = self.open(object)?;
            let mut draft = self.transaction.draft().map_err(ImportError::Object)?;
            loop {
                let count = reader.read(&mut buffer).map_err(failed)?;
                if count == 0 {
                    break;
                }
                self.has_read(u64::try_from(count).unwrap_or(0));
                draft.write_all(&buffer[..count]).map_err(ImportError::write)?;
            }
            let actual = Box::new(draft.finish().map_err(ImportError::Object)?);
            if *actual != *object {
                return Err(ImportError::from(PackError::Damaged { expected: *object, actual }));
            }
            Ok(())
        })
    }

    fn open(&self, object: &ObjectId) -> Result<ObjectReader, ImportError> {
        let opened = self.transaction.store().object(object);
        opened.map_err(|it| ImportError::failed("open", format!("object {object}"), it))
    }

    pub(in crate::import) fn go_on(&self) -> Result<(), ImportError> {
        match self.environment.cancel.load(Ordering::Relaxed) {
            true => Err(ImportError::Cancelled),
            false => Ok(()),
        }
    }
}
