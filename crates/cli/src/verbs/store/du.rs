//! `du`: shows the disk space of images, with each byte counted once, and the space that they share.

use std::io::{self, Write};

use clap::Args;
use image::verity::ImageId;
use serde::Serialize;
use store::{DiskUse, ImageUse, OpenOptions};

use crate::Answer;
use crate::output::report::{self, Bytes, bytes_alone, label};
use crate::output::table;
use crate::session::context::Context;
use crate::verbs::VerbArgs;

#[derive(Debug, Args)]
pub(crate) struct Du {
    /// Show only these images
    pub(crate) names: Vec<String>,
    /// Print sizes in bytes
    #[arg(short, long)]
    pub(crate) bytes: bool,
    /// Show memory instead of disk space: the pages of image files, of the store's files, and of all mounts that
    /// Quire can reach (those in this mount namespace, and those of containers). TWICE is the upper bound of memory
    /// beyond one copy of each file; in the total it includes equal files that several images hold. The command
    /// reads nothing into memory
    #[arg(long)]
    pub(crate) memory: bool,
}

impl VerbArgs for Du {
    const NAME: &'static str = "du";
    const ABOUT: &'static str = "Show the disk space of images, and the space they share";
    const EXAMPLES: &'static str = "quire du\n  quire du --memory";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        du(context, self)
    }
}

/// Report of `du --json`. Sizes count blocks on the disk.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct DuReport {
    /// The images that were named, or all.
    images: Vec<ImageDuReport>,
    /// Objects, which are the contents of files of images.
    objects: Bytes,
    /// Devices.
    data: Bytes,
    /// EROFS images.
    image_files: Bytes,
    /// Recipes of layers.
    layers: Bytes,
    /// Manifests and configurations.
    manifests: Bytes,
    /// Compressed layers that were kept, and records.
    blobs: Bytes,
    /// Containers.
    containers: Bytes,
    /// Snapshots of containers.
    container_snapshots: Bytes,
    /// Volumes.
    volumes: Bytes,
    /// Snapshots of engines: the files written in their roots, and records.
    snapshots: Bytes,
    /// Running and interrupted imports.
    tmp: Bytes,
    /// Writable layers of containers.
    written: Bytes,
    /// Part of `objects` that no image uses.
    unused_objects: Bytes,
    /// Part of `data` that no image uses.
    unused_data: Bytes,
    /// Part of `blobs` that interrupted or running pulls left.
    unfinished: Bytes,
    /// The whole store.
    total: Bytes,
    /// Parts that could not be counted, with the reason.
    unreadable: Vec<String>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct ImageDuReport {
    /// Image id.
    image: String,
    /// Names of the image.
    names: Vec<String>,
    /// Space that only this image uses.
    own: Bytes,
    /// Space that other images also use.
    shared: Bytes,
    /// Images with which the image shares space, the largest share first.
    shared_with: Vec<SharedReport>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct SharedReport {
    /// Id of the other image.
    image: String,
    /// Names of the other image.
    names: Vec<String>,
    /// Space that both images use.
    bytes: Bytes,
}

pub(crate) fn du(context: &Context, args: &Du) -> anyhow::Result<Answer> {
    let Some(store) =
        context.open_for(OpenOptions::read(), args.names.is_empty() && !args.memory)?
    else {
        let report = DuReport::new(&DiskUse::default(), 0, &[]);
        report::print(context.json, &report, |it, out| it.write(args, out))?;
        return Ok(Answer::Yes);
    };
    let wanted =
        args.names.iter().map(|name| Ok(crate::session::resolve::resolve(&store, name)?.image));
    let wanted = wanted.collect::<anyhow::Result<Vec<_>>>()?;
    if args.memory {
        return crate::verbs::store::memory::du(context, &store, &wanted, args.bytes);
    }
    let all = store.du()?;
    for why in &all.unreadable {
        report::error_line(&format!("quire: {why}"));
    }
    let answer = if all.unreadable.is_empty() { Answer::Yes } else { Answer::No };
    let written = container::life::lookup::all_written(&store)?;
    let report = DuReport::new(&all, written, &wanted);
    report::answer(answer, report::print(context.json, &report, |it, out| it.write(args, out)))
}

impl DuReport {
    /// Makes the report about the `wanted` images, or about all if none is named.
    fn new(all: &DiskUse, written: u64, wanted: &[ImageId]) -> Self {
        let total = all.objects
            + all.data
            + all.image_files
            + all.layers
            + all.manifests
            + all.blobs
            + all.containers
            + all.container_snapshots
            + all.volumes
            + all.snapshots
            + all.tmp;
        let names = |id: &ImageId| {
            let image = all.images.iter().find(|it| it.image == *id);
            image.map_or_else(Vec::new, |it| report::texts(&it.refs))
        };
        let chosen = |it: &&ImageUse| wanted.is_empty() || wanted.contains(&it.image);
        let images = all.images.iter().filter(chosen).map(|it| ImageDuReport {
            image: it.image.to_string(),
            names: report::texts(&it.refs),
            own: Bytes(it.own),
            shared: Bytes(it.shared),
            shared_with: it
                .shared_with
                .iter()
                .map(|it| SharedReport {
                    image: it.image.to_string(),
                    names: names(&it.image),
                    bytes: Bytes(it.bytes),
                })
                .collect(),
        });
        Self {
            images: images.collect(),
            objects: Bytes(all.objects),
            data: Bytes(all.data),
            image_files: Bytes(all.image_files),
            layers: Bytes(all.layers),
            manifests: Bytes(all.manifests),
            blobs: Bytes(all.blobs),
            containers: Bytes(all.containers),
            container_snapshots: Bytes(all.container_snapshots),
            volumes: Bytes(all.volumes),
            snapshots: Bytes(all.snapshots),
            tmp: Bytes(all.tmp),
            written: Bytes(written),
            unused_objects: Bytes(all.unused_objects),
            unused_data: Bytes(all.unused_data),
            unfinished: Bytes(all.unfinished),
            total: Bytes(total),
            unreadable: all.unreadable.clone(),
        }
    }

    /// Prints the report for people. The totals of the store are printed only if no image is named.
    fn write(&self, args: &Du, out: &mut dyn Write) -> io::Result<()> {
        let size = |Bytes(it): Bytes| if args.bytes { bytes_alone(it) } else { report::size(it) };
        let rows = self.images.iter().map(|it| {
            let most = it.shared_with.first().map_or_else(String::new, |it| {
                format!("{} ({})", label(&it.names, &it.image), size(it.bytes))
            });
            vec![label(&it.names, &it.image), size(it.own), size(it.shared), most]
        });
        let rows: Vec<_> = rows.collect();
        table::print(out, &["IMAGE", "OWN", "SHARED", "MOST WITH"], &rows, &[1, 2])?;
        if !args.names.is_empty() {
            return Ok(());
        }
        let parts = [
            (self.objects, "files"),
            (self.data, "devices"),
            (self.image_files, "images"),
            (self.layers, "layers"),
            (self.manifests, "manifests"),
            (self.blobs, "kept compressed layers and records"),
            (self.containers, "containers"),
            (self.container_snapshots, "container snapshots"),
            (self.volumes, "volumes"),
            (self.snapshots, "snapshots of engines"),
            (self.tmp, "running or killed imports, exports and removals"),
        ];
        let parts = parts.iter().filter(|it| it.0.0 > 0);
        let parts: Vec<_> = parts.map(|(bytes, what)| format!("{} {what}", size(*bytes))).collect();
        let parts =
            if parts.is_empty() { String::new() } else { format!(": {}", parts.join(", ")) };
        writeln!(out, "\n{} in all{parts}", size(self.total))?;
        if self.unused_objects.0 > 0 {
            writeln!(
                out,
                "{} of the files belong to no image: layers use them, or `quire gc` frees them",
                size(self.unused_objects)
            )?;
        }
        if self.unused_data.0 > 0 {
            writeln!(out, "{} of the devices belong to no image", size(self.unused_data))?;
        }
        if self.unfinished.0 > 0 {
            writeln!(
                out,
                "{} of the compressed layers belong to interrupted or running pulls: the next pull continues with \
                 them, `quire gc --unfinished` frees them",
                size(self.unfinished)
            )?;
        }
        if self.containers.0 > 0 {
            writeln!(out, "containers wrote {}", size(self.written))?;
        }
        Ok(())
    }
}
