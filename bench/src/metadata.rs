//! Names and inodes of two large trees in several file systems: their size, listings, and memory.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use rustix::mount::{UnmountFlags, unmount};

use super::command::{cmd, more, run, run_all};
use super::forms::{
    Files, Layer, Source, Through, Way, export, import, make_ext4, make_xfs, only_image,
};
use super::measure::{Contestant, Rules, warmth};
use super::report::{Report, Sizes, Table, Unit};
use crate::{Context, tree};
use rig::cache::remove;
use rig::dump::unescaped;
use rig::inputs;
use rig::inputs::sid::{self, Sid};
use rig::process::quiet;
use rig::random::Random;

const EXT4: &str = "folder on ext4";
const XFS: &str = "folder on XFS";
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
type Commands<'a> = dyn Fn(&Path) -> Command + 'a;

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let sid = sid::make(context.cache, false)?;
    let (mut tables, mut sizes, mut findings) = (Vec::new(), Vec::new(), Vec::new());
    for title in [DEVELOPER, DEBIAN] {
        if !context.wants(&format!("{title}: ")) && !context.wants(&format!("{title}, ")) {
            continue;
        }
        let source = if title == DEVELOPER {
            let tar = tree::pack(context)?;
            remove(&context.work.join("tree"))?;
            format!("tar:{}", tar.display())
        } else {
            format!("oci:{}:latest", inputs::debian_large(context.cache, false)?.display())
        };
        let input = input(context, &sid, title, &source)?;
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
            "Two trees in seven forms. *developer*: a root of 64,246 entries, whose files are full of zeros, so that \
             files of one length are one object. *debian-large*: Debian with compilers, runtimes and headers, \
             129,000 inodes, 3 GB. The ext4 and the XFS are in files, on loop devices with direct I/O; every EROFS \
             is mounted from its file, with `directio` for data, unless its row names a loop device. *With a writable layer*: overlayfs with an upper folder on a \
             tmpfs is on top. Cold: after dropping all caches, including those of images and devices; memory is all \
             that the kernel charges in a separate run, including inodes, dentries and cached metadata. Warm: after \
             the same once. `tar` writes into a pipe that `cat` empties, since GNU tar reads no file when it writes \
             to /dev/null itself. *--warm metadata*: the image is read ahead as Quire does it at mount, if the image \
             has at most 32 MiB, by a separate program whose time counts.",
        ),
        findings,
        tables,
        sizes,
    })
}

/// Converts a source's image into every form.
fn input(context: &Context<'_>, sid: &Sid, title: &'static str, source: &str) -> Result<Input> {
    let (quire, work) = (context.quire, context.work);
    let [objects, packed, tar] = import(context, source)?;
    let standalone = work.join("standalone.img");
    export(context, &objects, &standalone)?;
    let dump = run!("{quire} --store {objects} dump image")?;
    let [ext4, mkfs, source] = ["ext4.img", "mkfs.img", "source"].map(|it| work.join(it));
    Way::new("", Source::Erofs(Files::new(&standalone, Vec::new()))).mount(&source, Layer::None)?;
    let xfs = work.join("xfs.img");
    make_xfs(&xfs, &work.join("fill"), DISK_BYTES, |root| {
        run!("cp -a --sparse=always {source} {root}/root").map(drop)
    })?;
    make_ext4(&ext4, &work.join("fill"), DISK_BYTES, |root| {
        // The tree is one folder below the root of the ext4, so that the root's own inode and entries are not part of
        // it.
        let root = root.join("root");
        let sid = sid.command("mkfs.erofs")?;
        run_all([
            cmd!("cp -a --sparse=always {source} {root}"),
            more!(sid, "--quiet {mkfs} {root}"),
        ])
    })?;
    unmount(&source, UnmountFlags::empty())?;
    for image in [&mkfs, &standalone] {
        // Punches out zeros, so that files without contents take no disk space.
        run!("fallocate --dig-holes {image}")?;
    }
    let version = quiet(sid.command("mkfs.erofs")?.arg("--version"))?;
    let version = version.split_whitespace().find(|it| it.starts_with(|it: char| it.is_numeric()));
    let composefs =
        Source::Composefs { image: only_image(&objects)?, objects: objects.join("objects") };
    let alone = |image: &Path| Source::Erofs(Files::new(image, Vec::new()));
    let [packed, tar] = [&packed, &tar].map(|it| Files::of_store(it).map(Source::Erofs));
    let (packed, tar) = (packed?, tar?);
    let through = |through| match &packed {
        Source::Erofs(files) => Source::Erofs(Files { through, ..files.clone() }),
        other => other.clone(),
    };
    let [direct, buffered] = [Through::Loop, Through::BufferedLoop].map(through);
    let ways = vec![
        Way::new(EXT4, Source::Ext4(ext4)),
        Way::new(XFS, Source::Xfs(xfs)),
        Way::new(COMPOSEFS, composefs.clone()),
        Way::new(format!("{COMPOSEFS}, {AHEAD}"), composefs),
        Way::new(format!("{MKFS} {}", version.unwrap_or("?")), alone(&mkfs)),
        Way::new(STANDALONE, alone(&standalone)),
        Way::new(PACKED, packed.clone()),
        Way::new(format!("{PACKED}, {AHEAD}"), packed),
        Way::new(format!("{PACKED}, loop devices with direct I/O"), direct),
        Way::new(format!("{PACKED}, loop devices"), buffered),
        Way::new(TAR, tar.clone()),
        Way::new(format!("{TAR}, {AHEAD}"), tar),
    ];
    let (sizes, files) = (sizes(title, &ways)?, files(dump.as_bytes()));
    Ok(Input { title, files, ways, sizes, has_bytes: title == DEBIAN })
}

/// Size of the sparse ext4 and XFS files, which is larger than either tree needs.
const DISK_BYTES: u64 = 8 << 30;

/// Paths of a dump's regular files, without the leading slash and without additional hard links.
fn files(dump: &[u8]) -> Vec<Vec<u8>> {
    let lines = dump.split(|it| *it == b'\n').filter_map(|line| {
        let mut fields = line.split(|it| *it == b' ');
        let (path, mode) = (fields.next()?, fields.nth(1)?);
        mode.starts_with(b"100").then(|| unescaped(path.strip_prefix(b"/").unwrap_or(path)))
    });
    lines.collect()
}
fn sizes(title: &str, ways: &[Way]) -> Result<Sizes> {
    let mut rows = Vec::new();
    // Other ways to mount the same files.
    let is_again = |way: &Way| {
        way.name.ends_with(AHEAD)
            || matches!(&way.source, Source::Erofs(it) if it.through != Through::File)
    };
    for way in ways.iter().filter(|it| !is_again(it)) {
        let length = |path: &PathBuf| anyhow::Ok(fs::metadata(path)?.len());
        let (image, data, index) = match &way.source {
            Source::Folder(_) | Source::Fuse { .. } => continue,
            Source::Ext4(file) | Source::Xfs(file) => (fs::metadata(file)?.blocks() * 512, 0, 0),
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
                let indexes = files.devices.iter().map(|it| it.with_added_extension("index"));
                let index = indexes.map(|it| length(&it).unwrap_or(0)).sum();
                let data = files.devices.iter().map(length).sum::<Result<u64>>()?;
                (length(&files.image)?, data, index)
            }
        };
        rows.push((way.name.clone(), vec![image, data, image + data, index]));
    }
    let title = format!("{title}: sizes (ext4 and XFS: blocks of their files; objects: in blocks)");
    let columns = ["image", "data", "image and data", "index of the data"];
    Ok(Sizes::new(title, Unit::Megabytes, columns, rows))
}

/// $1 the folder. GNU tar reads no file when it writes to /dev/null itself.
const PACK: &str = r#"tar cf - -C "$1" . | cat > /dev/null"#;

fn listings(context: &Context<'_>, input: &Input, tables: &mut Vec<Table>) -> Result<()> {
    let random = random_files(&input.files, STATS[STATS.len() - 1]);
    let list = |root: &Path| cmd!("ls -lR {root}");
    // Asks for the label of each file, also where the kernel has no SELinux.
    let labels = |root: &Path| cmd!("ls -lZR {root}");
    let find = |root: &Path| cmd!("find {root} -name *.h");
    let tar = |root: &Path| cmd!("bash -o pipefail -c {PACK} tar {root}");
    let plain = |cold| Rules { cold, ..Rules::new(context.runs) };
    for (layer, with) in [(Layer::None, ""), (Layer::Tmpfs, ", with a writable layer")] {
        let mut table = |what: &str, rules: Rules, command: &Commands<'_>| -> Result<()> {
            let title = format!("{}: {what}, {}{with}", input.title, warmth(rules.cold));
            if context.wants(&title) {
                let contestants = contestants(context, &input.ways, layer, rules.cold, command);
                tables.push(rules.race(title, contestants)?);
            }
            Ok(())
        };
        table("ls -lR", Rules::reads(context.runs, true), &list)?;
        table("ls -lR", Rules::reads(context.runs, false), &list)?;
        table("ls -lZR", Rules::reads(context.runs, true), &labels)?;
        for count in STATS {
            let stat = |root: &Path| {
                let files = random.iter().take(count).map(|it| OsStr::from_bytes(it));
                let mut stat = cmd!("stat --format=%s {files...}");
                stat.current_dir(root);
                stat
            };
            table(&format!("stat of {count} random files"), plain(true), &stat)?;
        }
        table("find -name", plain(true), &find)?;
        table("find -name", plain(false), &find)?;
        if input.has_bytes {
            let runs = context.runs.min(TAR_RUNS_MAX);
            table("tar", Rules { runs, ..plain(true) }, &tar)?;
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
fn contestants<'a>(
    context: &Context<'_>,
    ways: &'a [Way],
    layer: Layer,
    is_cold: bool,
    command: &'a Commands<'a>,
) -> Vec<Contestant<'a>> {
    // With a warm cache, the image is in memory already, so the ways that read it ahead are left out.
    let ways = ways.iter().filter(|it| is_cold || !it.name.ends_with(AHEAD));
    let contestant = |(number, way): (usize, &'a Way)| {
        let target = context.work.join(format!("root-{number}"));
        // The tree is one folder below the root of an ext4 or XFS, because the root's inode belongs to that.
        let root = match way.source {
            Source::Ext4(_) | Source::Xfs(_) => target.join("root"),
            _ => target.clone(),
        };
        let (point, listed) = (target.clone(), root.clone());
        let commands = move || -> Result<Vec<Command>> {
            let ahead = if is_cold { read_ahead(way)? } else { None };
            Ok(ahead.into_iter().chain([command(&root)]).collect())
        };
        let mount = move || -> Result<()> {
            way.mount(&point, layer).with_context(|| way.name.clone())?;
            if is_cold { Ok(()) } else { quiet(&mut command(&listed)).map(drop) }
        };
        let away = move || Ok(unmount(&target, UnmountFlags::empty())?);
        Contestant::new(&way.name, commands).before(mount).after(away)
    };
    ways.enumerate().map(contestant).collect()
}

/// Command that reads the image of a way ahead, if the way's name ends with [`AHEAD`].
fn read_ahead(way: &Way) -> Result<Option<Command>> {
    let (true, Source::Erofs(Files { image, .. }) | Source::Composefs { image, .. }) =
        (way.name.ends_with(AHEAD), &way.source)
    else {
        return Ok(None);
    };
    let bench = std::env::current_exe().context("which program is this?")?;
    Ok(Some(cmd!("{bench} --read-ahead {image}")))
}

/// Ratios for the targets: packed images against those of composefs and of mkfs.erofs.
fn aims(table: &Table) -> Vec<String> {
    // Compares Quire's default and its read-ahead mount with the other ways' defaults.
    let ours = [String::from(PACKED), format!("{PACKED}, {AHEAD}")];
    let pairs = ours.iter().flat_map(|ours| [(ours, COMPOSEFS), (ours, MKFS)]);
    pairs.filter_map(|(ours, other)| table.titled_ratio(ours, other)).collect()
}

#[cfg(test)]
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
