//! `du --memory`: shows the memory that images take, with each page counted once.

use std::io::{self, Write};
use std::os::fd::{AsFd as _, OwnedFd};

use container::root::share::Superblock;
use image::verity::ImageId;
use kernel::features::{Can, page_sharing};
use kernel::mount::{Reach, bind};
use rustix::fs::{Mode, OFlags};
use serde::Serialize;
use store::{ImageMemory, Memory, MemoryUse, Store};

use crate::Answer;
use crate::output::report::{self, Bytes, bytes_alone, label};
use crate::output::table;
use crate::session::context::Context;
use crate::verbs::mounts::own_mounts::{OwnMount, OwnMounts};

/// Numbers of mounts that could not be examined.
#[derive(Debug, Default)]
struct Hidden {
    /// Mounts of containers.
    containers: usize,
    /// Mounts with a writable layer, or with another mount on top.
    covered: usize,
    /// Mounts of an unknown image.
    unknown: usize,
}

/// Report of `du --memory --json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct MemoryReport {
    /// The images that were named, or all that are in memory.
    images: Vec<ImageMemoryReport>,
    /// Memory of these images, with each page counted once.
    in_memory: Bytes,
    /// Part of `inMemory` that several images share.
    shared: Bytes,
    /// Part of `inMemory` that is in memory a second time.
    twice: Bytes,
    /// Parts that the numbers do not include.
    not_seen: NotSeenReport,
    /// Parts that could not be counted, with the reason.
    unreadable: Vec<String>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct ImageMemoryReport {
    /// Image id.
    image: String,
    /// Names of the image.
    names: Vec<String>,
    /// Pages of the image and its files.
    in_memory: Bytes,
    /// Part of `inMemory` that belongs to the image file.
    metadata: Bytes,
    /// Part of `inMemory` that the image shares with other images.
    shared: Bytes,
    /// Part of `inMemory` that is in memory a second time.
    twice: Bytes,
    /// Number of mounts that were examined.
    mounts: usize,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct NotSeenReport {
    /// Files of other users.
    files: u64,
    /// Containers that cannot be examined.
    containers: usize,
    /// Mounts with another mount above.
    covered_mounts: usize,
    /// Mounts of an unknown image.
    unknown_mounts: usize,
    /// Whether mounts of several domains were counted as one.
    domains: bool,
}

pub(crate) fn du(
    context: &Context,
    store: &Store,
    wanted: &[ImageId],
    in_bytes: bool,
) -> anyhow::Result<Answer> {
    let mut memory = store.memory()?;
    let mut hidden = Hidden::default();
    let shares = page_sharing().can == Can::Yes;
    look_at_containers(store, &mut memory, &mut hidden, shares)?;
    for mount in OwnMounts::for_user(context.who()).all()? {
        look_at_mount(store, &mut memory, &mut hidden, &mount, shares);
    }
    let used = memory.finish()?;
    for why in &used.unreadable {
        report::error_line(&format!("quire: {why}"));
    }
    let answer = if used.unreadable.is_empty() { Answer::Yes } else { Answer::No };
    let report = MemoryReport::new(&used, wanted, &hidden);
    report::answer(
        answer,
        report::print(context.json, &report, |it, out| it.write(in_bytes, wanted.is_empty(), out)),
    )
}

/// Examines mounts of containers. They are in other mount namespaces, but a container's monitor hands out the
/// image's mount.
fn look_at_containers(
    store: &Store,
    memory: &mut Memory<'_>,
    hidden: &mut Hidden,
    shares: bool,
) -> anyhow::Result<()> {
    let (living, _) = store.containers.living_and_dead()?;
    for id in living {
        let image = store.containers.image_of(&id).filter(|image| memory.is_native(image));
        let Some(image) = image else { continue };
        let taken = Superblock::take(&container::folder::path(store, &id));
        match taken.map(|it| memory.look(Some(&image), it.mount.as_fd(), shares)) {
            Some(Ok(true)) => {}
            // The container may have ended in the meantime.
            _ if store.containers.is_alive(&id).unwrap_or(false) => hidden.containers += 1,
            _ => {}
        }
    }
    Ok(())
}

fn look_at_mount(
    store: &Store,
    memory: &mut Memory<'_>,
    hidden: &mut Hidden,
    own: &OwnMount,
    shares: bool,
) {
    let mount = &own.mount;
    if mount.kind != "erofs" {
        // The EROFS mount below an overlay is not attached, so it cannot be examined. For an image of the form
        // `objects`, this does not matter, because its data is in the pages of the store's objects.
        let image =
            own.image_text().and_then(|text| crate::session::resolve::resolve(store, text).ok());
        if image.is_some_and(|found| memory.is_native(&found.image)) {
            hidden.covered += 1;
        }
        return;
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let Ok(root) = rustix::fs::open(&mount.point, flags, Mode::empty()) else {
        hidden.covered += 1;
        return;
    };
    let device = rustix::fs::fstat(&root).map(|it| it.st_dev);
    let device = device.map(|it| (rustix::fs::major(it), rustix::fs::minor(it)));
    if device.map(|(major, minor)| format!("{major}:{minor}")).as_ref() != Ok(&mount.device) {
        hidden.covered += 1;
        return;
    }
    // A clone of the mount contains no other mounts. If the caller may not clone it, the mount itself is examined.
    let root = bind(root.as_fd(), Reach::One).map_or(root, OwnedFd::from);
    match memory.look(None, root.as_fd(), shares) {
        Ok(true) => {}
        Ok(false) => hidden.unknown += 1,
        Err(_) => hidden.covered += 1,
    }
}

impl MemoryReport {
    /// Makes the report about the `wanted` images, or about all if none is named.
    fn new(used: &MemoryUse, wanted: &[ImageId], hidden: &Hidden) -> Self {
        let chosen = |it: &&ImageMemory| wanted.is_empty() || wanted.contains(&it.image);
        let images = used.images.iter().filter(chosen).map(|it| ImageMemoryReport {
            image: it.image.to_string(),
            names: report::texts(&it.refs),
            in_memory: Bytes(it.bytes),
            metadata: Bytes(it.metadata),
            shared: Bytes(it.shared),
            twice: Bytes(it.twice),
            mounts: it.mounts,
        });
        Self {
            images: images.collect(),
            in_memory: Bytes(used.total),
            shared: Bytes(used.shared),
            twice: Bytes(used.twice),
            not_seen: NotSeenReport {
                files: used.unseen,
                containers: hidden.containers,
                covered_mounts: hidden.covered,
                unknown_mounts: hidden.unknown,
                domains: used.has_domains,
            },
            unreadable: used.unreadable.clone(),
        }
    }

    /// Prints the report for people. The sums are printed only if no image is named.
    fn write(&self, in_bytes: bool, is_all: bool, out: &mut dyn Write) -> io::Result<()> {
        let size = |Bytes(it): Bytes| if in_bytes { bytes_alone(it) } else { report::size(it) };
        let rows = self.images.iter().map(|it| {
            vec![label(&it.names, &it.image), size(it.in_memory), size(it.shared), size(it.twice)]
        });
        let rows: Vec<_> = rows.collect();
        table::print(out, &["IMAGE", "IN MEMORY", "SHARED", "TWICE"], &rows, &[1, 2, 3])?;
        if is_all {
            let [total, shared, twice] = [self.in_memory, self.shared, self.twice].map(size);
            writeln!(
                out,
                "\n{total} in all: {shared} of it in several images, {twice} of it twice"
            )?;
        }
        self.not_seen.write(out)
    }
}

impl NotSeenReport {
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let counts = [
            (
                self.files,
                "files of another user: only that user or root can see their pages in memory",
            ),
            (
                self.containers as u64,
                "containers whose image is not accessible (Linux 6.15 and root can access it)",
            ),
            (self.covered_mounts as u64, "mounts below a writable layer, --df, or another mount"),
            (
                self.unknown_mounts as u64,
                "mounts of images of other stores, or of images that look alike",
            ),
        ];
        for (count, what) in counts.iter().filter(|it| it.0 > 0) {
            writeln!(out, "not counted: {count} {what}")?;
        }
        if self.domains {
            writeln!(
                out,
                "pages of domains (--domain) are counted as if all mounts were in one domain"
            )?;
        }
        Ok(())
    }
}
