//! What options of the writer and of mounts do.

use std::fs;
use std::path::Path;

use anyhow::{Result, bail};
use image::erofs::{Fingerprints, OverlayXattrs};
use kernel::mount::Acl;

use super::super::Context;
use super::super::forms::{Files, Layer, Source, Way};
use super::super::measure::Memory;
use super::super::placed::{self, Blob};
use super::super::report::{Sizes, Table};
use super::{
    AHEAD, COMPOSEFS, Commands, Entrant, Input, Race, STATS, list, random_files, sizes, stat,
};

/// The same tree in images of other options, of which `quire packed` has the first.
pub(super) fn native(context: &Context<'_>, input: &Input) -> Result<(Vec<Table>, Sizes)> {
    let mut ways = Vec::new();
    let fingerprints = [Fingerprints::Shared, Fingerprints::Inline, Fingerprints::Omitted];
    let ends = [0, 512, 1024, 2048, 3400].map(|it| (Blob::Packed(it), Fingerprints::Shared));
    for (blob, fingerprints) in fingerprints.map(|it| (Blob::Dense, it)).into_iter().chain(ends) {
        let file = format!("option-{}", ways.len());
        let files = placed::native(&input.tree, blob, fingerprints, context.work, &file)?;
        let blob = match blob {
            Blob::Packed(max) => format!("blocks of 4096, ends up to {max} in the image"),
            _ => String::from("blocks of 512"),
        };
        let name = format!("{blob}, fingerprints {fingerprints:?}").to_lowercase();
        ways.push(Way::new(name, Source::Erofs(files)));
    }
    let sizes = sizes(&format!("{}, options", input.title), &input.tree, &ways)?;
    let Source::Erofs(first) = ways[0].source.clone() else { unreachable!("made above") };
    let without_acls = Files { acl: Acl::Ignore, ..first.clone() };
    ways.push(Way::new("as the first, noacl", Source::Erofs(without_acls)));
    ways.push(Way::new(format!("as the first, {AHEAD}"), Source::Erofs(first)));
    let tables = races(context, input, "options", &ways)?;
    Ok((tables, sizes))
}

/// The same tree for overlayfs, with the xattrs by which it finds files' data in other places.
pub(super) fn overlay(context: &Context<'_>, input: &Input) -> Result<(Vec<Table>, Sizes)> {
    let composefs = input.ways.iter().find(|way| way.name == COMPOSEFS);
    let Some(Source::Composefs { image, objects }) = composefs.map(|way| &way.source) else {
        bail!("no way is {COMPOSEFS}");
    };
    let choices = [OverlayXattrs::Composefs, OverlayXattrs::Inline, OverlayXattrs::Shared];
    let mut ways = Vec::new();
    for choice in choices {
        let name = format!("overlay xattrs {choice:?}").to_lowercase();
        let file = placed::composefs(&input.tree, choice, context.work, &format!("{choice:?}"))?;
        if choice == OverlayXattrs::Composefs && fs::read(&file)? != fs::read(image)? {
            bail!("{} is not the image of its own tree", image.display());
        }
        ways.push(Way::new(name, Source::Composefs { image: file, objects: objects.clone() }));
    }
    let sizes = sizes(&format!("{}, overlay xattrs", input.title), &input.tree, &ways)?;
    let tables = races(context, input, "overlay xattrs", &ways)?;
    Ok((tables, sizes))
}

/// A full walk, and random files, cold.
fn races(context: &Context<'_>, input: &Input, what: &str, ways: &[Way]) -> Result<Vec<Table>> {
    let random = random_files(&input.tree, STATS[STATS.len() - 1]);
    let stats = STATS.map(|count| {
        let paths = &random[..random.len().min(count)];
        move |root: &Path| vec![stat(root, paths)]
    });
    let mut all = vec![(String::from("ls -lR"), &list as &Commands<'_>)];
    for (count, commands) in STATS.iter().zip(&stats) {
        all.push((format!("stat of {count} random files"), commands));
    }
    let mut tables = Vec::new();
    for (job, commands) in all {
        let title = format!("{}, {what}: {job}, cold", input.title);
        if !context.wants(&title) {
            continue;
        }
        let memory = Memory::WithCache;
        let (layer, is_cold, runs) = (Layer::None, true, context.runs);
        let race = Race { context, title, layer, is_cold, memory, runs };
        let entrant = |way| Entrant { way, commands: Box::new(commands) };
        tables.push(race.run(&ways.iter().map(entrant).collect::<Vec<_>>())?);
    }
    Ok(tables)
}
