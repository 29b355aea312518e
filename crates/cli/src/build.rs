//! `build`: an image file and, if wanted, a folder of objects, through a store that lives only so long.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use anyhow::Context as _;
use image::tree::{Content, Location, Node};
use oci::source::Source;
use serde_json::json;
use store::{OpenOptions, Store};

use crate::Answer;
use crate::args;
use crate::context::Context;
use crate::import::{Wishes, work};
use crate::report;
use crate::target;

pub(crate) fn build(context: &Context, args: &args::Build) -> anyhow::Result<Answer> {
    let source = Source::parse(&args.source)?;
    // Beside what is written, so that objects need not be copied to another file system.
    let beside = match (&args.digest_store, args.image.parent()) {
        (Some(folder), _) => {
            std::fs::create_dir_all(folder)
                .with_context(|| format!("cannot make {}", folder.display()))?;
            folder.as_path()
        }
        (None, Some(parent)) if !parent.as_os_str().is_empty() => parent,
        (None, _) => Path::new("."),
    };
    let place = tempfile::Builder::new().prefix(".quire-build-").tempdir_in(beside);
    let place = place.with_context(|| format!("cannot write in {}", beside.display()))?;
    let path = std::path::absolute(place.path())?.join("store");
    let store = Store::open(&path, OpenOptions::create())?;
    let wishes =
        Wishes { name: None, tree: &args.tree, platform: None, budget: oci::import::BUDGET };
    let done = work(context, &store, &source, &wishes)?;
    let image = store.open_image(&done.image)?;
    if let Some(folder) = &args.digest_store {
        give_objects(&store, &target::read(&image)?, folder)?;
    }
    let mut bytes = image.image.into_file();
    if args.image == Path::new("-") {
        let mut out = report::standard_output();
        std::io::copy(&mut bytes, &mut out)?;
        out.flush()?;
        return Ok(Answer::Yes);
    }
    write_whole(&mut bytes, &args.image)?;
    if context.json {
        report::json(&json!({"image": done.image.to_string(), "bytes": done.image_bytes}))?;
    } else if !context.is_quiet() {
        let mut out = report::standard_output();
        writeln!(out, "{}", done.image)?;
        out.flush()?;
    }
    Ok(Answer::Yes)
}

/// Gives the image's objects to a folder that may have some of them already. Objects never change, so one file may
/// have both names.
fn give_objects(store: &Store, tree: &image::tree::Tree, folder: &Path) -> anyhow::Result<()> {
    let mut walk = tree.walk();
    while let Some((_, entry)) = walk.next() {
        let Node::Regular(Content::External { object: Some(object), location, .. }) =
            entry.inode.node()
        else {
            continue;
        };
        if location != Location::Object {
            continue;
        }
        let to = folder.join(object.path());
        if to.exists() {
            continue;
        }
        if let Some(parent) = to.parent() {
            std::fs::create_dir_all(parent)
                .with_context(|| format!("cannot make {}", parent.display()))?;
        }
        let mut file = store.object(&object)?;
        write_whole(&mut file, &to)?;
    }
    Ok(())
}

/// Writes a file that is there as a whole or not at all.
fn write_whole(from: &mut File, to: &Path) -> anyhow::Result<()> {
    let failed = || format!("cannot write {}", to.display());
    let parent = match to.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let mut draft = tempfile::Builder::new()
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))
        .tempfile_in(parent)
        .with_context(failed)?;
    std::io::copy(from, draft.as_file_mut()).with_context(failed)?;
    draft.as_file().sync_all().with_context(failed)?;
    draft.persist(to).map_err(|error| error.error).with_context(failed)?;
    Ok(())
}
