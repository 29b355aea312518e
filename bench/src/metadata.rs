//! Names and inodes of two large trees, as several file systems hold them: their size, listings, and memory.

mod options;

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use image::dump::{Strictness, parse};
use image::erofs::Fingerprints;
use image::tree::{Node, Tree};
use rustix::mount::{UnmountFlags, unmount};

use super::Context;
use super::forms::{Files, Layer, Source, Way, export, import, make_ext4, only_image};
use super::measure::{Contestant, Memory, Pace, Rules, measure};
use super::placed::{self, Blob};
use super::report::{Report, Sizes, Table, Unit, ratio};
use crate::cache::remove;
use crate::inputs::{self, sid, sid::Sid};
use crate::oracle::random::Random;
use crate::process::quiet;
use crate::tree;

const EXT4: &str = "folder on ext4";
const COMPOSEFS: &str = "quire objects: composefs + overlayfs";
const MKFS: &str = "mkfs.erofs";
const STANDALONE: &str = "quire export erofs:";
const PACKED: &str = "quire packed";
const TAR: &str = "quire tar";
/// What a way is called whose image is read ahead as `--warm metadata` does, on the clock.
const AHEAD: &str = "--warm metadata";

/// The trees.
const DEVELOPER: &str = "developer";
const DEBIAN: &str = "debian-large";

/// How many random files are asked for at a time.
const STATS: [usize; 3] = [500, 1000, 1900];

/// Where `tar` reads gigabytes, nobody waits for more runs.
const TAR_RUNS_MAX: usize = 3;

/// A tree in all forms.
struct Input {
    title: &'static str,
    tree: Tree,
    ways: Vec<Way>,
    sizes: Sizes,
    /// Whether the files' bytes are there, and not holes.
    has_bytes: bool,
}

/// What is run in a folder.
type Commands<'a> = dyn Fn(&Path) -> Vec<Command> + 'a;

/// A way, and what is done in it.
struct Entrant<'a> {
    way: &'a Way,
    commands: Box<Commands<'a>>,
}

/// What all entrants of a table have in common.
struct Race<'a> {
    context: &'a Context<'a>,
    title: String,
    layer: Layer,
    is_cold: bool,
    memory: Memory,
    runs: usize,
}

/// Makes an input.
type Maker = fn(&Context<'_>, &Sid) -> Result<Input>;

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let sid = sid::make(context.cache, false)?;
    let (mut tables, mut sizes, mut findings) = (Vec::new(), Vec::new(), Vec::new());
    let makers: [(&str, Maker); 2] = [(DEVELOPER, developer), (DEBIAN, debian)];
    for (title, make) in makers {
        if !context.wants(&format!("{title}: ")) && !context.wants(&format!("{title}, ")) {
            continue;
        }
        let input = make(context, &sid)?;
        let first = tables.len();
        listings(context, &input, &mut tables)?;
        let (table, bytes) = options::native(context, &input)?;
        findings.extend(tables[first..].iter().flat_map(aims));
        tables.extend(table);
        let (table, overlays) = options::overlay(context, &input)?;
        tables.extend(table);
        sizes.extend([input.sizes, bytes, overlays]);
        for entry in fs::read_dir(context.work)? {
            remove(&entry?.path())?;
        }
    }
    Ok(Report {
        name: "metadata",
        about: String::from(
            "Two trees in six forms. *developer*: a root of 64,246 entries, of which only the metadata are there: its files are \
             holes, and its data blobs too. *debian-large*: Debian with compilers, runtimes and headers, 129,000 inodes, \
             3 GB. The ext4 is in a file, on a loop device with direct I/O; every EROFS is mounted from its file, with \
             `directio` for data. *With a writable layer*: overlayfs with an upper folder on a tmpfs is on top. Cold: after \
             dropping all caches, the images' and blobs' too; memory is all that the kernel charges in a run of its own, so \
             with inodes, dentries and cached metadata. Warm: after the same once. `tar` writes into a pipe that `cat` \
             empties, since GNU tar reads no file when it writes to /dev/null itself. *--warm metadata*: the image is read \
             ahead as Quire does it at mount, if the image has at most 32 MiB, by a program of its own that is on the clock. \
             *Options*: images of the same tree with addresses as `quire packed` gives them, written with other options, over \
             blobs that are holes. *Overlay xattrs*: images of the same tree for overlayfs, with redirects and metacopies \
             where `--overlay-xattrs` says.",
        ),
        findings,
        tables,
        sizes,
    })
}

/// The tree of a dump whose files nobody has.
fn developer(context: &Context<'_>, sid: &Sid) -> Result<Input> {
    let dump = named_by_path(&fs::read(inputs::dump(context.cache, "cs9-developer")?)?);
    let tree = parse(&dump[..], Strictness::Lenient)?;
    let place = |name: &str| context.work.join(name);
    let (text, objects) = (place("dump"), place("objects"));
    fs::write(&text, &dump)?;
    fs::create_dir(&objects)?;
    let (ext4, mkfs) = (place("ext4.img"), place("mkfs.img"));
    make_ext4(&ext4, &place("fill"), EXT4_BYTES, |root| {
        // What ext4 gives its root is what the dump's root gets.
        tree::unpack(&dump, &root.join("root"))?;
        mkfs_erofs(sid, &root.join("root"), &mkfs)
    })?;
    let composefs = place("composefs.img");
    let mut mkcomposefs = Command::new(super::named(context, "mkcomposefs")?);
    quiet(mkcomposefs.arg("--from-file").arg(&text).arg(&composefs))?;
    let standalone = placed::standalone(&tree, context.work, "standalone")?;
    let make =
        |blob, name| placed::native(&tree, blob, Fingerprints::default(), context.work, name);
    let packed = make(Blob::Dense, "packed")?;
    let tar = make(Blob::Tar, "tar")?;
    for image in [&mkfs, &standalone] {
        // Zeros for files' bytes take no place on the disk.
        quiet(Command::new("fallocate").arg("--dig-holes").arg(image))?;
    }
    let ways = ways(sid, &ext4, &composefs, &objects, &mkfs, &standalone, packed, tar)?;
    let sizes = sizes(DEVELOPER, &tree, &ways)?;
    Ok(Input { title: DEVELOPER, tree, ways, sizes, has_bytes: false })
}

/// An image of packages, imported in each form.
fn debian(context: &Context<'_>, sid: &Sid) -> Result<Input> {
    let layout = inputs::debian_large(context.cache, false)?;
    let place = |name: &str| context.work.join(name);
    let source = format!("oci:{}:latest", layout.display());
    let stores = ["objects", "packed", "tar"];
    let [objects, packed, tar] = stores.map(|form| import(context, &source, form));
    let (objects, packed, tar) = (objects?, packed?, tar?);
    let standalone = place("standalone.img");
    export(context, &objects, &standalone)?;
    let mut dump = Command::new(context.quire);
    // Whatever is not ASCII is escaped in there.
    let dump = quiet(dump.arg("--store").arg(&objects).args(["dump", "image"]))?.into_bytes();
    let tree = parse(&dump[..], Strictness::Lenient)?;
    let (ext4, mkfs, source) = (place("ext4.img"), place("mkfs.img"), place("source"));
    Way::new("", Source::Erofs(Files::new(&standalone, Vec::new()))).mount(&source, Layer::None)?;
    make_ext4(&ext4, &place("fill"), EXT4_BYTES, |root| {
        quiet(Command::new("cp").arg("-a").arg(&source).arg(root.join("root")))?;
        mkfs_erofs(sid, &root.join("root"), &mkfs)
    })?;
    unmount(&source, UnmountFlags::empty())?;
    let image = only_image(&objects)?;
    let (packed, tar) = (Files::of_store(&packed)?, Files::of_store(&tar)?);
    let objects = objects.join("objects");
    let ways = ways(sid, &ext4, &image, &objects, &mkfs, &standalone, packed, tar)?;
    let sizes = sizes(DEBIAN, &tree, &ways)?;
    Ok(Input { title: DEBIAN, tree, ways, sizes, has_bytes: true })
}

/// More than either tree needs; it is a sparse file.
const EXT4_BYTES: u64 = 8 << 30;

fn mkfs_erofs(sid: &Sid, tree: &Path, image: &Path) -> Result<()> {
    quiet(sid.command("mkfs.erofs")?.arg("--quiet").arg(image).arg(tree)).map(drop)
}

/// A dump whose files have the object ids that their paths are made of: those of composefs stores, without which there
/// would be nothing in the image that overlayfs checks, and no fingerprint.
fn named_by_path(dump: &[u8]) -> Vec<u8> {
    let mut named = Vec::with_capacity(dump.len());
    for line in dump.split_inclusive(|it| *it == b'\n') {
        let mut fields: Vec<_> = line.split(|it| *it == b' ').map(<[u8]>::to_vec).collect();
        if let [_, _, mode, _, _, _, _, _, payload, _, digest, ..] = &mut fields[..]
            && mode.starts_with(b"10")
            && payload.contains(&b'/')
        {
            let ending = digest.strip_prefix(b"-").unwrap_or(b"").to_vec();
            *digest = payload.iter().copied().filter(u8::is_ascii_hexdigit).take(64).collect();
            digest.extend(ending);
        }
        named.extend(fields.join(&b' '));
    }
    named
}

#[expect(clippy::too_many_arguments, reason = "one for each row of every table")]
fn ways(
    sid: &Sid,
    ext4: &Path,
    composefs: &Path,
    objects: &Path,
    mkfs: &Path,
    standalone: &Path,
    packed: Files,
    tar: Files,
) -> Result<Vec<Way>> {
    let version = quiet(sid.command("mkfs.erofs")?.arg("--version"))?;
    let version = version.split_whitespace().find(|it| it.starts_with(|it: char| it.is_numeric()));
    let version = version.unwrap_or("?");
    let composefs = Source::Composefs { image: composefs.to_owned(), objects: objects.to_owned() };
    let alone = |image: &Path| Source::Erofs(Files::new(image, Vec::new()));
    Ok(vec![
        Way::new(EXT4, Source::Ext4(ext4.to_owned())),
        Way::new(COMPOSEFS, composefs.clone()),
        Way::new(format!("{COMPOSEFS}, {AHEAD}"), composefs),
        Way::new(format!("{MKFS} {version}"), alone(mkfs)),
        Way::new(STANDALONE, alone(standalone)),
        Way::new(PACKED, Source::Erofs(packed.clone())),
        Way::new(format!("{PACKED}, {AHEAD}"), Source::Erofs(packed)),
        Way::new(TAR, Source::Erofs(tar.clone())),
        Way::new(format!("{TAR}, {AHEAD}"), Source::Erofs(tar)),
    ])
}

fn sizes(title: &str, tree: &Tree, ways: &[Way]) -> Result<Sizes> {
    let mut rows = Vec::new();
    for way in ways.iter().filter(|it| !it.name.ends_with(AHEAD)) {
        let length = |path: &PathBuf| anyhow::Ok(fs::metadata(path)?.len());
        let (image, data, index) = match &way.source {
            Source::Folder(_) => continue,
            Source::Ext4(file) => (fs::metadata(file)?.blocks() * 512, 0, 0),
            Source::Composefs { image, .. } => {
                let mut objects = placed::objects(tree);
                objects.sort_unstable();
                objects.dedup();
                let blocks = objects.iter().map(|(_, size)| size.next_multiple_of(4096));
                (length(image)?, blocks.sum(), 0)
            }
            Source::Erofs(files) => {
                let mut index = 0;
                for device in &files.devices {
                    index += length(&device.with_added_extension("index")).unwrap_or(0);
                }
                let data = files.devices.iter().map(length).sum::<Result<u64>>()?;
                (length(&files.image)?, data, index)
            }
        };
        rows.push((way.name.clone(), vec![image, data, image + data, index]));
    }
    Ok(Sizes {
        title: format!("{title}: sizes (ext4: what its file takes; objects: in blocks)"),
        unit: Unit::Megabytes,
        columns: vec!["image", "data", "image and data", "index of the data"],
        rows,
    })
}

/// `ls -lR` of a folder.
fn list(root: &Path) -> Vec<Command> {
    let mut ls = Command::new("ls");
    ls.arg("-lR").arg(root);
    vec![ls]
}

/// `stat` of files below a folder.
fn stat(root: &Path, paths: &[Vec<u8>]) -> Command {
    let mut stat = Command::new("stat");
    stat.arg("--format=%s").current_dir(root);
    stat.args(paths.iter().map(|it| OsStr::from_bytes(it)));
    stat
}

fn listings(context: &Context<'_>, input: &Input, tables: &mut Vec<Table>) -> Result<()> {
    let tree = input.title;
    let plain = Memory::LargestProcess;
    for (layer, with) in [(Layer::None, ""), (Layer::Tmpfs, ", with a writable layer")] {
        let mut table = |what: &str, is_cold, memory, commands: &Commands<'_>| -> Result<()> {
            let runs = match what {
                "tar" => context.runs.min(TAR_RUNS_MAX),
                _ => context.runs,
            };
            let warmth = if is_cold { "cold" } else { "warm" };
            let title = format!("{tree}: {what}, {warmth}{with}");
            if !context.wants(&title) {
                return Ok(());
            }
            let race = Race { context, title, layer, is_cold, memory, runs };
            let entrant = |way| Entrant { way, commands: Box::new(commands) };
            // What is in memory already is not read ahead.
            let ways = input.ways.iter().filter(|it| is_cold || !it.name.ends_with(AHEAD));
            tables.push(race.run(&ways.map(entrant).collect::<Vec<_>>())?);
            Ok(())
        };
        table("ls -lR", true, Memory::WithCache, &list)?;
        table("ls -lR", false, plain, &list)?;
        let random = random_files(&input.tree, STATS[STATS.len() - 1]);
        for count in STATS {
            let stat = |root: &Path| vec![stat(root, &random[..random.len().min(count)])];
            table(&format!("stat of {count} random files"), true, plain, &stat)?;
        }
        let find = |root: &Path| {
            let mut find = Command::new("find");
            find.arg(root).args(["-name", "*.h"]);
            vec![find]
        };
        table("find -name", true, plain, &find)?;
        table("find -name", false, plain, &find)?;
        if input.has_bytes {
            let tar = |root: &Path| {
                let mut shell = Command::new("bash");
                shell.args([
                    "-o",
                    "pipefail",
                    "-c",
                    "tar cf - -C \"$1\" . | cat > /dev/null",
                    "tar",
                ]);
                shell.arg(root);
                vec![shell]
            };
            table("tar", true, plain, &tar)?;
        }
    }
    Ok(())
}

/// So many different files' paths, the same on every machine.
fn random_files(tree: &Tree, count: usize) -> Vec<Vec<u8>> {
    let mut paths = Vec::new();
    let mut walk = tree.walk();
    while let Some((path, entry)) = walk.next() {
        if matches!(entry.inode.node(), Node::Regular(_)) {
            paths.push(path.strip_prefix(b"/").unwrap_or(path).to_vec());
        }
    }
    let mut random = Random::new(8);
    for at in 0..count.min(paths.len()) {
        let other = random.size(at..=paths.len() - 1);
        paths.swap(at, other);
    }
    paths.truncate(count);
    paths
}

impl Race<'_> {
    fn run(&self, entrants: &[Entrant<'_>]) -> Result<Table> {
        let mut contestants = Vec::new();
        for (number, entrant) in entrants.iter().enumerate() {
            let target = self.context.work.join(format!("root-{number}"));
            let way = entrant.way;
            // The tree is one folder below the root of an ext4, whose own inode is ext4's.
            let root = match way.source {
                Source::Ext4(_) => target.join("root"),
                _ => target.clone(),
            };
            let commands = {
                let root = root.clone();
                move || {
                    let ahead = if self.is_cold { read_ahead(way)? } else { None };
                    Ok(ahead.into_iter().chain((entrant.commands)(&root)).collect())
                }
            };
            let mount = {
                let target = target.clone();
                move || {
                    way.mount(&target, self.layer).with_context(|| way.name.clone())?;
                    if !self.is_cold {
                        for mut command in (entrant.commands)(&root) {
                            quiet(&mut command)?;
                        }
                    }
                    Ok(())
                }
            };
            let away = move || Ok(unmount(&target, UnmountFlags::empty())?);
            contestants.push(Contestant::new(&way.name, commands).before(mount).after(away));
        }
        let (memory, runs) = (self.memory, self.runs);
        let rules = Rules { runs, sync: None, cold: self.is_cold, pace: Pace::Turns, memory };
        let outcomes = measure(&rules, &mut contestants)?;
        Ok(Table { title: self.title.clone(), memory, runs, outcomes })
    }
}

/// Has the kernel begin to read the image of a way that says so.
fn read_ahead(way: &Way) -> Result<Option<Command>> {
    let (true, Source::Erofs(Files { image, .. }) | Source::Composefs { image, .. }) =
        (way.name.ends_with(AHEAD), &way.source)
    else {
        return Ok(None);
    };
    let mut xtask = Command::new(std::env::current_exe().context("which program is this?")?);
    xtask.arg("read-ahead").arg(image);
    Ok(Some(xtask))
}

/// What the aims are about: packed images against those of composefs and of mkfs.erofs.
fn aims(table: &Table) -> Vec<String> {
    // As Quire mounts it, unless told otherwise, against what rivals do.
    let ours = [String::from(PACKED), format!("{PACKED}, {AHEAD}")];
    let pairs = ours.iter().flat_map(|ours| [(ours, COMPOSEFS), (ours, MKFS)]);
    let found = pairs.filter_map(|(ours, other)| ratio(&table.outcomes, ours, other));
    found.map(|it| format!("{}: {it}", table.title)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_a_dump_are_named_by_their_paths() {
        let rest = "0123456789abcdef".repeat(4);
        let line = |payload: &str, digest: &str, more: &str| {
            format!("/a 7 100644 1 0 0 0 0.0 {payload} - {digest}{more}\n")
        };
        let path = format!("{}/{}.file", &rest[..2], &rest[2..]);
        for more in ["", " user.x=y"] {
            let (given, expect) = (line(&path, "-", more), line(&path, &rest, more));
            assert_eq!(String::from_utf8(named_by_path(given.as_bytes())).unwrap(), expect);
        }
        for same in [line("-", "-", ""), String::from("/d 0 40755 2 0 0 0 0.0 - - -\n")] {
            assert_eq!(named_by_path(same.as_bytes()), same.as_bytes());
        }
    }
}
