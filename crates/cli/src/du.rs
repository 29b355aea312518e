//! `du`: what images take, each byte counted once, and what they share.

use std::io::Write as _;

use image::verity::ImageId;
use serde::Serialize;
use store::{DiskUse, ImageUse, OpenOptions};

use crate::Answer;
use crate::args;
use crate::context::Context;
use crate::report::{self, Bytes, bytes_alone, short};

/// What `du --json` prints. Sizes are of blocks on the disk.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct DuReport {
    /// The images asked for, or all.
    images: Vec<ImageDuReport>,
    /// Files of images.
    objects: Bytes,
    /// Data blobs.
    data: Bytes,
    /// EROFS images.
    image_files: Bytes,
    /// Recipes of layers.
    layers: Bytes,
    /// Manifests and configurations.
    manifests: Bytes,
    /// Layers as they came, and records.
    blobs: Bytes,
    /// Containers.
    containers: Bytes,
    /// Imports under way or dead.
    tmp: Bytes,
    /// What containers have written.
    written: Bytes,
    /// Part of `objects` that no image has.
    unused_objects: Bytes,
    /// Part of `data` that no image has.
    unused_data: Bytes,
    /// Part of `blobs` that interrupted or running pulls left.
    unfinished: Bytes,
    /// The whole store.
    total: Bytes,
    /// What could not be counted, and why.
    unreadable: Vec<String>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct ImageDuReport {
    /// Image id.
    image: String,
    /// Its names.
    names: Vec<String>,
    /// What it alone has.
    own: Bytes,
    /// What other images have too.
    shared: Bytes,
    /// Each image that it shares with, most first.
    shared_with: Vec<SharedReport>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct SharedReport {
    /// Id of the other image.
    image: String,
    /// What both have.
    bytes: Bytes,
}

pub(crate) fn du(context: &Context, args: &args::Du) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::read())?;
    let wanted = args.names.iter().map(|name| Ok(crate::resolve::resolve(&store, name)?.image));
    let wanted = wanted.collect::<anyhow::Result<Vec<_>>>()?;
    if args.memory {
        return crate::memory::du(context, args, &store, &wanted);
    }
    let all = store.du()?;
    for why in &all.unreadable {
        report::error_line(&format!("quire: {why}"));
    }
    let answer = if all.unreadable.is_empty() { Answer::Yes } else { Answer::No };
    let written = container::life::known::all_written(&store)?;
    report::answer(answer, print(context, args, &all, written, &wanted))
}

fn print(
    context: &Context,
    args: &args::Du,
    all: &DiskUse,
    written: u64,
    wanted: &[ImageId],
) -> anyhow::Result<()> {
    let chosen = |it: &&ImageUse| wanted.is_empty() || wanted.contains(&it.image);
    let total = all.objects
        + all.data
        + all.image_files
        + all.layers
        + all.manifests
        + all.blobs
        + all.containers
        + all.tmp;
    if context.json {
        let images = all.images.iter().filter(chosen).map(|it| {
            let with = it.shared_with.iter();
            ImageDuReport {
                image: it.image.to_string(),
                names: names(it),
                own: Bytes(it.own),
                shared: Bytes(it.shared),
                shared_with: with
                    .map(|it| SharedReport { image: it.image.to_string(), bytes: Bytes(it.bytes) })
                    .collect(),
            }
        });
        return report::json(&DuReport {
            images: images.collect(),
            objects: Bytes(all.objects),
            data: Bytes(all.data),
            image_files: Bytes(all.image_files),
            layers: Bytes(all.layers),
            manifests: Bytes(all.manifests),
            blobs: Bytes(all.blobs),
            containers: Bytes(all.containers),
            tmp: Bytes(all.tmp),
            written: Bytes(written),
            unused_objects: Bytes(all.unused_objects),
            unused_data: Bytes(all.unused_data),
            unfinished: Bytes(all.unfinished),
            total: Bytes(total),
            unreadable: all.unreadable.clone(),
        });
    }
    let size = |bytes| if args.bytes { bytes_alone(bytes) } else { report::size(bytes) };
    let rows = all.images.iter().filter(chosen).map(|it| {
        let most = it.shared_with.first().map_or_else(String::new, |other| {
            let name = all.images.iter().find(|it| it.image == other.image);
            let name = name.map_or_else(|| short(&other.image), label);
            format!("{name} ({})", size(other.bytes))
        });
        vec![label(it), size(it.own), size(it.shared), most]
    });
    let rows: Vec<_> = rows.collect();
    let mut out = report::standard_output();
    report::table(&mut out, &["IMAGE", "OWN", "SHARED", "MOST WITH"], &rows, &[1, 2])?;
    if wanted.is_empty() {
        let parts = [
            (all.objects, "files"),
            (all.data, "data blobs"),
            (all.image_files, "images"),
            (all.layers, "layers"),
            (all.manifests, "manifests"),
            (all.blobs, "layers as they came and records"),
            (all.containers, "containers"),
            (all.tmp, "imports under way or dead"),
        ];
        let parts = parts.iter().filter(|it| it.0 > 0);
        let parts: Vec<_> = parts.map(|(bytes, what)| format!("{} {what}", size(*bytes))).collect();
        let parts =
            if parts.is_empty() { String::new() } else { format!(": {}", parts.join(", ")) };
        writeln!(out, "\n{} in all{parts}", size(total))?;
        if all.unused_objects > 0 {
            writeln!(
                out,
                "of the files, {} are seen in no image: layers have them, or `quire gc` frees them",
                size(all.unused_objects)
            )?;
        }
        if all.unused_data > 0 {
            writeln!(out, "of the data blobs, {} are in no image", size(all.unused_data))?;
        }
        if all.unfinished > 0 {
            writeln!(
                out,
                "of the layers as they came, {} are of interrupted or running pulls: the next pull goes on with them, \
                 `quire gc --unfinished` frees them",
                size(all.unfinished)
            )?;
        }
        if all.containers > 0 {
            writeln!(out, "containers have written {}", size(written))?;
        }
    }
    out.flush()?;
    Ok(())
}

fn names(image: &ImageUse) -> Vec<String> {
    image.refs.iter().map(ToString::to_string).collect()
}

fn label(image: &ImageUse) -> String {
    if image.refs.is_empty() { short(&image.image) } else { names(image).join(" ") }
}
