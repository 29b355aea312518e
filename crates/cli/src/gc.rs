//! `gc`: frees what nobody needs.

use std::io::Write as _;

use serde::Serialize;
use store::{BlobFile, Dead, Freeing, Garbage, GcPlan, Kept, OpenOptions, PIN_SECONDS, Seconds};

use crate::Answer;
use crate::args;
use crate::context::{Context, now};
use crate::report::{self, Bytes};

pub(crate) fn gc(context: &Context, args: &args::Gc) -> anyhow::Result<Answer> {
    // At a time when nothing is kept any more. A pull that runs is an import like any other: it loses nothing it has found.
    let later = if args.unfinished { PIN_SECONDS + 1 } else { 0 };
    let when = Seconds(now().0.saturating_add(later));
    let store =
        context.open(if args.dry_run { OpenOptions::read() } else { OpenOptions::write() })?;
    let (plan, swept) = if args.dry_run {
        (store.plan_gc(when)?, None)
    } else {
        let (cleared, _) = container::life::reap::clear_dead(&store, &|| crate::context::now().0);
        let (plan, mut swept) = store.gc(when)?;
        swept.removed += cleared;
        (plan, Some(swept))
    };
    if args.wait {
        container::life::known::settle(&store)?;
    }
    let unfinished = store.unfinished()?;
    if context.json {
        let garbage = plan.garbage.iter().map(|(it, bytes)| {
            let (kind, name) = words(it);
            GarbageReport { kind, name, bytes: Bytes(*bytes) }
        });
        let unneeded = plan.dead.iter().map(|it| UnneededReport {
            data_blob: it.blob.to_string(),
            bytes: Bytes(it.bytes),
            now: it.freeing == Freeing::Now,
        });
        report::json(&GcReport {
            garbage: garbage.collect(),
            unneeded: unneeded.collect(),
            trimmed: swept.map(|it| Bytes(it.trimmed)),
            kept: plan.kept.iter().map(KeptReport::of).collect(),
            removed: swept.map(|it| it.removed),
            freed: swept.map(|it| Bytes(it.freed)),
            set_aside: swept.map(|it| Bytes(it.set_aside)),
            unfinished: Bytes(unfinished),
        })?;
        return Ok(Answer::Yes);
    }
    let mut out = report::standard_output();
    for it in &plan.kept {
        writeln!(out, "kept: {}", kept(it))?;
    }
    match swept {
        None => dry(&mut out, &plan)?,
        Some(swept) => {
            for dead in plan.dead.iter().filter(|it| it.freeing != Freeing::Now) {
                writeln!(out, "{}", unneeded(dead))?;
            }
            writeln!(out, "{} removed, {} freed", swept.removed, report::size(swept.freed))?;
            if swept.set_aside > 0 {
                let bytes = report::size(swept.set_aside);
                writeln!(
                    out,
                    "{bytes} more when the running imports have ended: run gc again then"
                )?;
            }
        }
    }
    if unfinished > 0 && !args.unfinished {
        let bytes = report::size(unfinished);
        writeln!(
            out,
            "{bytes} of interrupted or running pulls stay, so that the next pull goes on with them: `quire gc --unfinished` \
             frees them"
        )?;
    }
    out.flush()?;
    Ok(Answer::Yes)
}

fn dry(out: &mut impl std::io::Write, plan: &GcPlan) -> std::io::Result<()> {
    let mut total = 0;
    for (garbage, bytes) in &plan.garbage {
        let (kind, name) = words(garbage);
        writeln!(out, "{kind} {name} ({})", report::size(*bytes))?;
        total += bytes;
    }
    for dead in &plan.dead {
        writeln!(out, "{}", unneeded(dead))?;
        if dead.freeing == Freeing::Now {
            total += dead.bytes;
        }
    }
    writeln!(out, "{} would be removed, {} freed", plan.garbage.len(), report::size(total))
}

/// What nobody needs of a data blob that is kept.
fn unneeded(dead: &Dead) -> String {
    let when = match dead.freeing {
        Freeing::Now => "can be freed",
        Freeing::InUse => "can be freed when nobody has it mounted or open",
        Freeing::Imports => "can be freed when the imports that run have ended",
        Freeing::Sealed => {
            "cannot be freed since the blob is sealed: `quire convert --form packed --dedup layer` packs an image anew"
        }
        Freeing::Unsupported => {
            "cannot be freed since the file system frees no parts of files: it goes with the last image that needs the blob"
        }
        _ => "cannot be freed now",
    };
    format!("{} of data blob {} {when}", report::size(dead.bytes), dead.blob)
}

fn words(garbage: &Garbage) -> (&'static str, String) {
    match garbage {
        Garbage::Object(id) => ("object", id.to_string()),
        Garbage::Image(id) => ("image", id.to_string()),
        Garbage::Layer(id) => ("layer", id.to_string()),
        Garbage::Manifest(id) => ("manifest", id.to_string()),
        Garbage::Blob(BlobFile::Whole(id)) => ("blob", id.to_string()),
        Garbage::Blob(BlobFile::Partial(id)) => ("part of a blob", id.to_string()),
        Garbage::Blob(BlobFile::Pin(id)) => ("unfinished pull", id.to_string()),
        Garbage::Blob(BlobFile::Chunks(id)) => ("table of chunks", id.to_string()),
        Garbage::Blob(BlobFile::Signatures(id)) => ("signatures", id.to_string()),
        Garbage::Blob(BlobFile::Origins(id)) => ("record of origins", id.to_string()),
        Garbage::DataBlob(id) => ("data blob", id.to_string()),
        Garbage::DataIndex(id) => ("index of a data blob", id.to_string()),
        Garbage::Container(id) => ("container", id.clone()),
        Garbage::Leftover(name) => ("leftover", name.clone()),
    }
}

/// What `gc --json` prints.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct GcReport {
    /// What nobody needs, as a whole.
    garbage: Vec<GarbageReport>,
    /// What nobody needs of data blobs that stay.
    unneeded: Vec<UnneededReport>,
    /// Part of `freed` that is of data blobs that stay. Null with `--dry-run`.
    trimmed: Option<Bytes>,
    /// What is garbage but in use.
    kept: Vec<KeptReport>,
    /// Things that were removed. Null with `--dry-run`.
    removed: Option<u64>,
    /// Room on the disk that was freed. Null with `--dry-run`.
    freed: Option<Bytes>,
    /// Room that is freed when the imports that run have ended. Null with `--dry-run`.
    set_aside: Option<Bytes>,
    /// What interrupted or running pulls left.
    unfinished: Bytes,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct GarbageReport {
    /// `object`, `image`, `layer`, `manifest`, `blob`, `data blob`, `container`, `leftover` and so on.
    kind: &'static str,
    /// Its id, digest or name.
    name: String,
    /// Its size on the disk.
    bytes: Bytes,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct UnneededReport {
    /// Id of the data blob.
    data_blob: String,
    /// What nobody needs of it.
    bytes: Bytes,
    /// Whether it can be freed now.
    now: bool,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct KeptReport {
    /// Image id. Null if it is a data blob.
    image: Option<String>,
    /// Container that has the image. Null if it is mounted or open otherwise.
    container: Option<String>,
    /// Id of the data blob. Null if it is an image.
    data_blob: Option<String>,
    /// The same for people.
    text: String,
}

impl KeptReport {
    fn of(it: &Kept) -> Self {
        let (image, container, blob) = match it {
            Kept::InUse(image) => (Some(image), None, None),
            Kept::Container(image, id) => (Some(image), Some(id), None),
            Kept::Blob(blob) => (None, None, Some(blob)),
            _ => (None, None, None),
        };
        Self {
            image: image.map(ToString::to_string),
            container: container.cloned(),
            data_blob: blob.map(ToString::to_string),
            text: kept(it),
        }
    }
}

fn kept(kept: &Kept) -> String {
    match kept {
        Kept::InUse(image) => format!("image {image} is mounted or open"),
        Kept::Blob(blob) => format!("data blob {blob} is mounted or open"),
        Kept::Container(image, id) => format!("image {image} is container {id}'s"),
        _ => "an image in use".to_owned(),
    }
}
