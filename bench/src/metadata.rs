//! Names and inodes of two large trees in several file systems: their size, listings, and memory.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use rustix::mount::{UnmountFlags, unmount};

use super::forms::{Files, Layer, Source, Way, export, import, make_ext4, only_image};
use super::measure::{Contestant, Memory, Pace, Rules, measure};
use super::report::{Report, Sizes, Table, Unit, ratio};
use crate::Context;
use crate::tree;
use rig::cache::remove;
use rig::dump::unescaped;
use rig::inputs::{self, sid, sid::Sid};
use rig::process::quiet;
use rig::random::Random;

const EXT4: &str = "folder on ext4";
const COMPOSEFS: &str = "quire objects: composefs + overlayfs";
const MKFS: &str = "mkfs.erofs";
const STANDALONE: &str = "quire export erofs:";
const PACKED: &str = "quire packed";
const TAR: &str = "quire tar";
/// Suffix of a way whose image is read ahead as `--warm metadata` does, on the clock.
const AHEAD: &str = "--warm metadata";

/// Names of the trees.
const DEVELOPER: &str = "developer";
const DEBIAN: &str = "debian-large";

/// Numbers of random files per `stat` call.
const STATS: [usize; 3] = [500, 1000, 1900];

/// Largest number of runs of `tar`, which reads gigabytes.
const TAR_RUNS_MAX: usize = 3;

/// A tree in all forms.
struct Input {
    title: &'static str,
    /// Paths of the tree's regular files, without the leading slash.
    files: Vec<Vec<u8>>,
    ways: Vec<Way>,
    sizes: Sizes,
    /// Whether the files have their contents; otherwise they are holes.
    has_bytes: bool,
}

/// Returns the commands that run in a folder.
type Commands<'a> = dyn Fn(&Path) -> Vec<Command> + 'a;

/// A way and its commands.
struct Entrant<'a> {
    way: &'a Way,
    commands: Box<Commands<'a>>,
}

/// The settings that all contestants of a table share.
struct Race<'a> {
    context: &'a Context<'a>,
    title: String,
    layer: Layer,
    is_cold: bool,
    memory: Memory,
    runs: usize,
}

/// A function that makes an input.
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
        findings.extend(tables[first..].iter().flat_map(aims));
        sizes.push(input.sizes);
        for entry in fs::read_dir(context.work)? {
            remove(&entry?.path())?;
        }
    }
    Ok(Report {
        name: "metadata",
        about: String::from(
            "Two trees in six forms. *developer*: a root of 64,246 entries, whose files are full of zeros, so that files of one \
             length are one object. *debian-large*: Debian with compilers, runtimes and headers, 129,000 inodes, \
             3 GB. The ext4 is in a file, on a loop device with direct I/O; every EROFS is mounted from its file, with \
             `directio` for data. *With a writable layer*: overlayfs with an upper folder on a tmpfs is on top. Cold: after \
             dropping all caches, the images' and devices' too; memory is all that the kernel charges in a run of its own, so \
             with inodes, dentries and cached metadata. Warm: after the same once. `tar` writes into a pipe that `cat` \
             empties, since GNU tar reads no file when it writes to /dev/null itself. *--warm metadata*: the image is read \
             ahead as Quire does it at mount, if the image has at most 32 MiB, by a program of its own that is on the clock.",
        ),
        findings,
        tables,
        sizes,
    })
}

/// The tree of a dump, with zeros in place of its files' contents, which the dump does not have.
fn developer(context: &Context<'_>, sid: &Sid) -> Result<Input> {
    let tree = context.work.join("tree");
    tree::unpack(&fs::read(inputs::dump(context.cache, "cs9-developer")?)?, &tree)?;
    // Only a source with layers can be imported in the form `tar`.
    let layer = context.work.join("tree.tar");
    let mut tar = Command::new("tar");
    tar.args(["--xattrs", "--xattrs-include=*", "-cf"]).arg(&layer).arg("-C").arg(&tree);
    quiet(tar.arg("."))?;
    remove(&tree)?;
    input(context, sid, DEVELOPER, &format!("tar:{}", layer.display()))
}

/// An image of Debian packages.
fn debian(context: &Context<'_>, sid: &Sid) -> Result<Input> {
    let layout = inputs::debian_large(context.cache, false)?;
    input(context, sid, DEBIAN, &format!("oci:{}:latest", layout.display()))
}

/// Converts a source's image into every form.
fn input(context: &Context<'_>, sid: &Sid, title: &'static str, source: &str) -> Result<Input> {
    let place = |name: &str| context.work.join(name);
    let stores = ["objects", "packed", "tar"];
    let [objects, packed, tar] = stores.map(|form| import(context, source, form));
    let (objects, packed, tar) = (objects?, packed?, tar?);
    let standalone = place("standalone.img");
    export(context, &objects, &standalone)?;
    let mut dump = Command::new(context.quire);
    let dump = quiet(dump.arg("--store").arg(&objects).args(["dump", "image"]))?;
    let (ext4, mkfs, source) = (place("ext4.img"), place("mkfs.img"), place("source"));
    Way::new("", Source::Erofs(Files::new(&standalone, Vec::new()))).mount(&source, Layer::None)?;
    make_ext4(&ext4, &place("fill"), EXT4_BYTES, |root| {
        // The tree is one folder below the root of the ext4, so that the root's own inode and entries are not part of
        // it.
        let root = root.join("root");
        quiet(Command::new("cp").args(["-a", "--sparse=always"]).args([&source, &root]))?;
        quiet(sid.command("mkfs.erofs")?.arg("--quiet").args([&mkfs, &root])).map(drop)
    })?;
    unmount(&source, UnmountFlags::empty())?;
    for image in [&mkfs, &standalone] {
        // Punches out zeros, so that files without contents take no disk space.
        quiet(Command::new("fallocate").arg("--dig-holes").arg(image))?;
    }
    let image = only_image(&objects)?;
    let (packed, tar) = (Files::of_store(&packed)?, Files::of_store(&tar)?);
    let objects = objects.join("objects");
    let ways = ways(sid, &ext4, &image, &objects, &mkfs, &standalone, packed, tar)?;
    let (sizes, files) = (sizes(title, &ways)?, files(dump.as_bytes()));
    Ok(Input { title, files, ways, sizes, has_bytes: title == DEBIAN })
}

/// Size of the sparse ext4 file, which is larger than either tree needs.
const EXT4_BYTES: u64 = 8 << 30;

/// Paths of a dump's regular files, without the leading slash and without additional hard links.
fn files(dump: &[u8]) -> Vec<Vec<u8>> {
    let lines = dump.split(|it| *it == b'\n').filter_map(|line| {
        let mut fields = line.split(|it| *it == b' ');
        let (path, mode) = (fields.next()?, fields.nth(1)?);
        mode.starts_with(b"100").then(|| unescaped(path.strip_prefix(b"/").unwrap_or(path)))
    });
    lines.collect()
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

fn sizes(title: &str, ways: &[Way]) -> Result<Sizes> {
    let mut rows = Vec::new();
    for way in ways.iter().filter(|it| !it.name.ends_with(AHEAD)) {
        let length = |path: &PathBuf| anyhow::Ok(fs::metadata(path)?.len());
        let (image, data, index) = match &way.source {
            Source::Folder(_) => continue,
            Source::Ext4(file) => (fs::metadata(file)?.blocks() * 512, 0, 0),
            Source::Composefs { image, objects } => {
                let mut blocks = 0;
                for folder in fs::read_dir(objects)? {
                    for object in fs::read_dir(folder?.path())? {
                        blocks += object?.metadata()?.len().next_multiple_of(4096);
                    }
                }
                (length(image)?, blocks, 0)
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
            // With a warm cache, the image is in memory already, so the ways that read it ahead are left out.
            let ways = input.ways.iter().filter(|it| is_cold || !it.name.ends_with(AHEAD));
            tables.push(race.run(&ways.map(entrant).collect::<Vec<_>>())?);
            Ok(())
        };
        table("ls -lR", true, Memory::WithCache, &list)?;
        table("ls -lR", false, plain, &list)?;
        let random = random_files(&input.files, STATS[STATS.len() - 1]);
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

/// A selection of `count` different files, the same on every machine.
fn random_files(files: &[Vec<u8>], count: usize) -> Vec<Vec<u8>> {
    let mut paths = files.to_vec();
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
            // The tree is one folder below the root of the ext4, because the root's inode belongs to the ext4.
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

/// Command that reads the image of a way ahead, if the way's name ends with [`AHEAD`].
fn read_ahead(way: &Way) -> Result<Option<Command>> {
    let (true, Source::Erofs(Files { image, .. }) | Source::Composefs { image, .. }) =
        (way.name.ends_with(AHEAD), &way.source)
    else {
        return Ok(None);
    };
    let mut bench = Command::new(std::env::current_exe().context("which program is this?")?);
    bench.arg("--read-ahead").arg(image);
    Ok(Some(bench))
}

/// Ratios for the targets: packed images against those of composefs and of mkfs.erofs.
fn aims(table: &Table) -> Vec<String> {
    // Compares Quire's default and its read-ahead mount with the other ways' defaults.
    let ours = [String::from(PACKED), format!("{PACKED}, {AHEAD}")];
    let pairs = ours.iter().flat_map(|ours| [(ours, COMPOSEFS), (ours, MKFS)]);
    let found = pairs.filter_map(|(ours, other)| ratio(&table.outcomes, ours, other));
    found.map(|it| format!("{}: {it}", table.title)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regular_files_of_a_dump_are_found_once() {
        let dump = b"/ 0 40755 2 0 0 0 0.0 - - -\n/a\\x20b 1 100644 1 0 0 0 0.0 - - -\n\
            /c 1 @100644 1 0 0 0 0.0 /a\\x20b - -\n/d 1 120777 1 0 0 0 0.0 c - -\n";
        assert_eq!(files(dump), [b"a b"]);
    }
}
