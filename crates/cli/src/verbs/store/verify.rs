//! `verify`: reads every byte of images and checks their digests.

use clap::Args;
use image::verity::DeviceId;
use store::{Damage, FsckReport, OpenOptions, Store};

use crate::Answer;
use crate::session::context::Context;
use crate::verbs::VerbArgs;
use crate::verbs::store::damage::{WAY_OUT, options, tell};
use crate::verbs::store::heal::EngineUses;

#[derive(Debug, Args)]
pub(crate) struct Verify {
    /// Names or ids of images; by default all images
    pub(crate) names: Vec<String>,
}

impl VerbArgs for Verify {
    const NAME: &'static str = "verify";
    const ABOUT: &'static str = "Read every byte of images and check their digests";
    const EXAMPLES: &'static str = "quire verify debian";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        verify(context, self)
    }
}

pub(crate) fn verify(context: &Context, args: &Verify) -> anyhow::Result<Answer> {
    let store = match args.names.as_slice() {
        // The image may be in a shared store.
        [name] => Some(context.open_with(name)?),
        names => context.open_for(OpenOptions::read(), names.is_empty())?,
    };
    let Some(store) = store else {
        return tell(context, &FsckReport::default(), &EngineUses::default(), "");
    };
    let found = if args.names.is_empty() {
        store.images.ids()?.into_iter().map(|it| (it, None)).collect()
    } else {
        let named = args.names.iter().map(|name| crate::session::resolve::resolve(&store, name));
        named.map(|it| it.map(|it| (it.image, it.manifest))).collect::<Result<Vec<_>, _>>()?
    };
    for (image, manifest) in &found {
        if store.downloads.is_unproven_for(image, manifest.as_ref())? {
            // If the image is damaged, this is reported below.
            let devices = store.lazy_devices(image).unwrap_or_default();
            // This is only a remark, because `verify` compares the bytes with the image's id in any case.
            context.remark(&if has_chunks(&store, &devices)? {
                format!(
                    "image {image} is made from its layers' tables of contents, and is not compared with its layers: \
                    `quire pull NAME` downloads and compares them"
                )
            } else {
                format!(
                    "image {image} comes from an index, and is not compared with its layers yet: \
                    `quire mount`, `quire run` or another `quire pull` of its name compares it once \
                    it is completely downloaded"
                )
            });
        }
    }
    let images: Vec<_> = found.into_iter().map(|it| it.0).collect();
    let found = store.verify_all(&images, options())?;
    let lazy = found.damage.iter().map(|it| match it.0 {
        Damage::Lazy(device) => Some(device),
        _ => None,
    });
    let way_out = match lazy.collect::<Option<Vec<_>>>() {
        Some(devices) if has_chunks(&store, &devices)? => LAYERS,
        Some(_) => COMPLETE,
        None => WAY_OUT,
    };
    tell(context, &found, &EngineUses::from_store(&store)?, way_out)
}

/// Whether a layer's table of contents describes one of these devices. Such a device is never complete.
fn has_chunks(store: &Store, devices: &[DeviceId]) -> anyhow::Result<bool> {
    for device in devices {
        if store.lazy_devices.heads(device)?.iter().any(|it| it.kind.is_of_chunks()) {
            return Ok(true);
        }
    }
    Ok(false)
}

const COMPLETE: &str = "`quire mount --lazy --complete NAME DIRECTORY` downloads the rest";

/// Advice for devices of tables of contents. It also works for other lazy devices.
const LAYERS: &str = "`quire pull NAME` downloads the layers of an image that is made from tables of contents, and \
    compares them";
