//! `du --memory`: what of images is in memory, each page counted once.

use std::io::Write as _;
use std::os::fd::{AsFd as _, OwnedFd};

use container::root::share::Superblock;
use image::verity::ObjectId;
use kernel::features::{Can, page_sharing};
use kernel::mount::{Reach, bind};
use rustix::fs::{Mode, OFlags};
use serde_json::{Value, json};
use store::{ImageMemory, Memory, MemoryUse, Store};

use crate::Answer;
use crate::args;
use crate::context::Context;
use crate::du::{bytes_alone, short};
use crate::mount::{Mounted, all_mounted};
use crate::report;

/// Mounts that could not be looked into.
#[derive(Debug, Default)]
struct Hidden {
    /// Of containers.
    containers: usize,
    /// Of mounts with a writable layer, or with something else mounted above.
    covered: usize,
    /// Of which nobody can tell whose they are.
    unknown: usize,
}

pub(crate) fn du(
    context: &Context,
    args: &args::Du,
    store: &Store,
    wanted: &[ObjectId],
) -> anyhow::Result<Answer> {
    let mut memory = store.memory()?;
    let mut hidden = Hidden::default();
    let shares = page_sharing().can == Can::Yes;
    look_at_containers(store, &mut memory, &mut hidden, shares)?;
    for mount in all_mounted()?.iter().filter(|it| it.is_ours()) {
        look_at_mount(store, &mut memory, &mut hidden, mount, shares);
    }
    let used = memory.finish()?;
    for why in &used.unreadable {
        report::error_line(&format!("quire: {why}"));
    }
    let answer = if used.unreadable.is_empty() { Answer::Yes } else { Answer::No };
    report::answer(answer, print(context, args, &used, wanted, &hidden))
}

/// Those of containers are in mount namespaces of their own, but who watches them lends the image's.
fn look_at_containers(
    store: &Store,
    memory: &mut Memory<'_>,
    hidden: &mut Hidden,
    shares: bool,
) -> anyhow::Result<()> {
    let (living, _) = store.living_and_dead()?;
    for id in living {
        let image = store.image_of_container(&id).filter(|image| memory.is_native(image));
        let Some(image) = image else { continue };
        let taken = Superblock::take(&container::folder::path(store, &id));
        match taken.map(|it| memory.look(Some(&image), it.mount.as_fd(), shares)) {
            Some(Ok(true)) => {}
            // It may have ended meanwhile.
            _ if store.is_container_alive(&id).unwrap_or(false) => hidden.containers += 1,
            _ => {}
        }
    }
    Ok(())
}

fn look_at_mount(
    store: &Store,
    memory: &mut Memory<'_>,
    hidden: &mut Hidden,
    mount: &Mounted,
    shares: bool,
) {
    if mount.kind != "erofs" {
        // The image below an overlay is mounted nowhere that one could go to. Of composefs images it has no files.
        let image = mount.image().and_then(|name| crate::names::resolve(store, name).ok());
        if image.is_some_and(|found| memory.is_native(&found.image)) {
            hidden.covered += 1;
        }
        return;
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let Ok(root) = rustix::fs::open(mount.point(), flags, Mode::empty()) else {
        hidden.covered += 1;
        return;
    };
    let device = rustix::fs::fstat(&root).map(|it| it.st_dev);
    let device = device.map(|it| (rustix::fs::major(it), rustix::fs::minor(it)));
    if device.map(|(major, minor)| format!("{major}:{minor}")).as_ref() != Ok(&mount.device) {
        hidden.covered += 1;
        return;
    }
    // A copy of the mount has nothing mounted inside. Who may not have one looks through what there is.
    let root = bind(root.as_fd(), Reach::One).map_or(root, OwnedFd::from);
    match memory.look(None, root.as_fd(), shares) {
        Ok(true) => {}
        Ok(false) => hidden.unknown += 1,
        Err(_) => hidden.covered += 1,
    }
}

fn print(
    context: &Context,
    args: &args::Du,
    used: &MemoryUse,
    wanted: &[ObjectId],
    hidden: &Hidden,
) -> anyhow::Result<()> {
    let chosen = |it: &&ImageMemory| wanted.is_empty() || wanted.contains(&it.image);
    let images = used.images.iter().filter(chosen);
    if context.json {
        let images = images.map(|it| {
            json!({
                "image": it.image.to_string(),
                "names": it.refs.iter().map(ToString::to_string).collect::<Vec<_>>(),
                "inMemory": it.bytes, "metadata": it.metadata, "shared": it.shared, "twice": it.twice,
                "mounts": it.mounts,
            })
        });
        return report::json(&json!({
            "images": images.collect::<Vec<Value>>(),
            "inMemory": used.total, "shared": used.shared, "twice": used.twice,
            "notSeen": {
                "files": used.unseen, "containers": hidden.containers, "coveredMounts": hidden.covered,
                "unknownMounts": hidden.unknown, "domains": used.has_domains,
            },
            "unreadable": used.unreadable,
        }));
    }
    let size = |bytes| if args.bytes { bytes_alone(bytes) } else { report::size(bytes) };
    let rows = images.map(|it| {
        let names: Vec<_> = it.refs.iter().map(ToString::to_string).collect();
        let label = if names.is_empty() { short(&it.image) } else { names.join(" ") };
        vec![label, size(it.bytes), size(it.shared), size(it.twice)]
    });
    let rows: Vec<_> = rows.collect();
    let mut out = report::standard_output();
    report::table(&mut out, &["IMAGE", "IN MEMORY", "SHARED", "TWICE"], &rows, &[1, 2, 3])?;
    if wanted.is_empty() {
        let (total, shared, twice) = (size(used.total), size(used.shared), size(used.twice));
        writeln!(out, "\n{total} in all: {shared} of it in several images, {twice} of it twice")?;
    }
    for line in not_seen(used, hidden) {
        writeln!(out, "{line}")?;
    }
    out.flush()?;
    Ok(())
}

/// What the numbers lack.
fn not_seen(used: &MemoryUse, hidden: &Hidden) -> Vec<String> {
    let Hidden { containers, covered, unknown } = hidden;
    let mut lines = Vec::new();
    let mut say = |count: u64, what: &str| {
        if count > 0 {
            lines.push(format!("not counted: {count} {what}"));
        }
    };
    say(
        used.unseen,
        "files of another user, who alone (or root) can see what of them is in memory",
    );
    say(
        *containers as u64,
        "containers whose image cannot be looked into (Linux 6.15, and root, can)",
    );
    say(
        *covered as u64,
        "mounts that have something above them: a writable layer, --df, or another mount",
    );
    say(
        *unknown as u64,
        "mounts that are of no image of this store, or of one that looks like another",
    );
    if used.has_domains {
        lines.push(
            "pages of domains (--domain) are counted as if all mounts were of one".to_owned(),
        );
    }
    lines
}
