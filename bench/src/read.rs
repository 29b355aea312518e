//! Reads of file data: on plain ext4, and through every form of an image.

use std::fs::{self, File};
use std::io::{self, BufWriter, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use kernel::mount::{Io, native_read_ahead};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use super::cgroup::Limited;
use super::command::{cmd, run};
use super::fio::{Advice, Job, Order, What};
use super::forms::{Files, Layer, Source, Through, Way, export, import, only_image};
use super::measure::{Contestant, Rules, upper_median, warmth};
use super::report::{Report, Sizes, Table, Unit};
use crate::Context;
use rig::cache::remove;
use rig::process::{find_program, quiet};
use rig::random::Random;
use rig::{Skipped, inputs};

const EXT4: &str = "ext4";
const FILE_BYTES: u64 = 512 << 20;
/// Number of files in the folder, small enough for a process to keep all of them open.
const FILES: usize = 500;
const EACH_BYTES: u64 = 512 << 10;
/// Bytes of random reads with a cold and with a warm page cache.
const COLD_BYTES: u64 = 32 << 20;
const WARM_BYTES: u64 = 256 << 20;

/// Column title, fio engine, size of a read, and number of processes.
const KINDS: [(&str, &str, &str, u64); 8] = [
    ("psync 4k, 1", "psync", "4k", 1),
    ("psync 4k, 4", "psync", "4k", 4),
    ("psync 128k, 1", "psync", "128k", 1),
    ("psync 128k, 4", "psync", "128k", 4),
    ("mmap 4k, 1", "mmap", "4k", 1),
    ("mmap 4k, 4", "mmap", "4k", 4),
    ("mmap 128k, 1", "mmap", "128k", 1),
    ("mmap 128k, 4", "mmap", "128k", 4),
];
/// A mounted form.
struct Mounted {
    way: Way,
    root: PathBuf,
}
pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    find_program("fio").context(Skipped(String::from("fio is not installed")))?;
    let (tree, tar) = (context.work.join("tree"), context.work.join("tree.tar"));
    fill(&tree)?;
    run!("tar -cf {tar} -C {tree} .")?;
    let ways = ways(context, &format!("tar:{}", tar.display()), &tree)?;
    remove(&tar)?;
    let more = read_ahead(&ways)?;
    let (ways, more) = (attach(context, ways, "root")?, attach(context, more, "more")?);
    let (mut sizes, mut findings) = (Vec::new(), Vec::new());
    let mut add = |title: &str, jobs: &[Job], is_folder| -> Result<()> {
        let table = race(context, title, &ways, jobs, is_folder)?;
        findings.extend(shares(&table));
        sizes.push(table);
        Ok(())
    };
    for is_cold in [true, false] {
        let warmth = warmth(is_cold);
        add(&format!("sequential, {warmth}"), &jobs(Order::Sequential, is_cold), false)?;
        let bytes = if is_cold { COLD_BYTES } else { WARM_BYTES };
        let mut random = jobs(Order::Random(bytes), is_cold);
        add(&format!("random, {warmth}"), &random, false)?;
        random.retain(|it| it.engine == "psync");
        add(&format!("random, {warmth}, a folder of {FILES} files"), &random, true)?;
    }
    let mut jobs = jobs(Order::Sequential, true);
    jobs.retain(|it| it.jobs == 1);
    jobs.push(Job { title: "psync 128k, 1, fadvise", advice: Advice::Given, ..jobs[1] });
    let table = race(context, "sequential, cold, by size of read-ahead", &more, &jobs, false)?;
    sizes.push(table);
    sizes.retain(|it| !it.columns.is_empty());
    for mounted in ways.iter().chain(&more) {
        unmount(&mounted.root, UnmountFlags::empty())?;
    }
    for entry in fs::read_dir(context.work)? {
        remove(&entry?.path())?;
    }
    let tables = compile(context)?;
    findings.extend(tables.iter().flat_map(|table| {
        let rivals = table.outcomes.iter().skip(1);
        rivals.filter_map(|it| table.titled_ratio(&it.name, EXT4))
    }));
    let host = host_read_ahead(context.work).unwrap_or_else(|| String::from("?"));
    Ok(Report {
        name: "read",
        about: format!(
            "fio's bytes a second: a file of 512 MiB, and random reads of a folder, which lie on the host's ext4, and in \
             images and devices that lie on the host's ext4. Columns: engine, size of a read, processes; more than one \
             read parts of the file. Cold: after dropping all caches. Warm: after a read of everything. Medians of {} runs. \
             The kernel reads {host} kB ahead on the host's disk, and by itself 128 kB on an EROFS that is mounted from a \
             file, whatever that lies on. Quire's own forms are mounted as Quire mounts them, with as much as the disk has, at most 512 kB, in the mount's \
             `/sys/class/bdi/…/read_ahead_kb`, unless a row says another number. \
             *fadvise*: the program said that it reads sequentially. *compile*: gcc compiles Lua in a chroot, two files at a time, \
             with sources and compiler in the image and a tmpfs for what comes of it. *In … of memory*: in a cgroup \
             with this limit, which counts the compiler's memory, the tmpfs and the pages of the files. FUSE: \
             `quire mount --via fuse`, whose server's memory and time are not in the tables.",
            context.runs,
        ),
        tables,
        sizes,
        findings,
    })
}

/// Creates a large file and a folder of smaller ones, all with incompressible and unique contents.
fn fill(tree: &Path) -> Result<()> {
    fs::create_dir_all(tree.join("many"))?;
    let mut random = Random::new(0xF10);
    let mut write = |path: &Path, bytes: u64| -> Result<()> {
        let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
        for _ in 0..bytes / 8 {
            out.write_all(&random.draw().to_le_bytes())?;
        }
        Ok(out.flush()?)
    };
    write(&tree.join("large"), FILE_BYTES)?;
    for number in 0..FILES {
        write(&tree.join(format!("many/{number}")), EACH_BYTES)?;
    }
    Ok(())
}
/// A folder on ext4, and the same tree in every form.
fn ways(context: &Context<'_>, source: &str, folder: &Path) -> Result<Vec<Way>> {
    let [objects, packed, tar] = import(context, source)?;
    let alone = context.work.join("standalone.img");
    export(context, &objects, &alone)?;
    let composefs =
        Source::Composefs { image: only_image(&objects)?, objects: objects.join("objects") };
    let fuse = Source::Fuse { quire: context.quire.to_owned(), store: objects.clone() };
    let mut ways = vec![
        Way::new(EXT4, Source::Folder(folder.to_owned())),
        Way::new("quire objects: composefs + overlayfs", composefs),
    ];
    for (name, files) in [
        ("quire export erofs:", Files::new(&alone, Vec::new())),
        ("quire packed", Files::of_store(&packed)?),
        ("quire tar", Files::of_store(&tar)?),
    ] {
        let read_ahead = native_read_ahead(File::open(&files.image)?.as_fd());
        let files = Files { read_ahead, ..files };
        let buffered = Files { io: Io::Buffered, ..files.clone() };
        ways.push(Way::new(name, Source::Erofs(files)));
        ways.push(Way::new(format!("{name}, buffered"), Source::Erofs(buffered)));
    }
    ways.push(Way::new("quire objects: FUSE, as users without root mount", fuse));
    Ok(ways)
}

/// The packed form with other read settings, and ext4.
fn read_ahead(ways: &[Way]) -> Result<Vec<Way>> {
    let packed = ways.iter().find_map(|it| match &it.source {
        Source::Erofs(files) if it.name == "quire packed" => Some(files.clone()),
        _ => None,
    });
    let packed = packed.context("it is among the ways")?;
    let mut more = vec![ways[0].clone()];
    for io in [Io::Direct, Io::Buffered] {
        for kilobytes in [128, 512, 1024, 2048, 4096, 8192] {
            let files = Files { io, read_ahead: Some(kilobytes), ..packed.clone() };
            let kind = if io == Io::Direct { "" } else { ", buffered" };
            let name = format!("quire packed{kind}, read ahead {kilobytes} kB");
            more.push(Way::new(name, Source::Erofs(files)));
        }
    }
    let through_loop = Files { through: Through::Loop, read_ahead: None, ..packed };
    more.push(Way::new("quire packed, loop devices with direct I/O", Source::Erofs(through_loop)));
    Ok(more)
}
fn attach(context: &Context<'_>, ways: Vec<Way>, prefix: &str) -> Result<Vec<Mounted>> {
    let mut mounted = Vec::new();
    for (number, way) in ways.into_iter().enumerate() {
        let root = context.work.join(format!("{prefix}-{number}"));
        way.mount(&root, Layer::None).with_context(|| way.name.clone())?;
        mounted.push(Mounted { way, root });
    }
    Ok(mounted)
}
fn jobs(order: Order, is_cold: bool) -> Vec<Job> {
    let advice = Advice::None;
    let job =
        |(title, engine, block, jobs)| Job { title, engine, block, jobs, order, is_cold, advice };
    KINDS.map(job).into()
}
/// Runs every job on every mount, in rounds, and returns the medians.
fn race(
    context: &Context<'_>,
    title: &str,
    ways: &[Mounted],
    jobs: &[Job],
    is_folder: bool,
) -> Result<Sizes> {
    let jobs = if context.wants(title) { jobs } else { &[] };
    let mut found = vec![vec![Vec::new(); jobs.len()]; ways.len()];
    for _ in 0..context.runs {
        for (number, job) in jobs.iter().enumerate() {
            for (Mounted { way, root }, found) in ways.iter().zip(&mut found) {
                let (large, many) = (root.join("large"), root.join("many"));
                let what = match is_folder {
                    true => What::Folder(&many),
                    false => What::File(&large, FILE_BYTES),
                };
                if !job.is_cold {
                    read_all(if is_folder { &many } else { &large })?;
                }
                let rate = job.run(what, context.work).with_context(|| way.name.clone())?;
                found[number].push(rate);
            }
        }
    }
    let rows = ways.iter().zip(found).map(|(it, row)| {
        (it.way.name.clone(), row.into_iter().map(upper_median).collect::<Vec<_>>())
    });
    let columns: Vec<_> = jobs.iter().map(|it| it.title).collect();
    Ok(Sizes::new(title, Unit::MegabytesPerSecond, columns, rows.collect()))
}

/// Reads a file, or the files of a folder, into the page cache.
fn read_all(path: &Path) -> Result<()> {
    if path.is_dir() {
        for entry in fs::read_dir(path)? {
            read_all(&entry?.path())?;
        }
        return Ok(());
    }
    let mut file = File::open(path)?;
    let mut buffer = vec![0; 1 << 18];
    while io::Read::by_ref(&mut file).read(&mut buffer)? > 0 {}
    Ok(())
}
/// Lowest and highest ratio to ext4 over all columns.
fn shares(table: &Sizes) -> Vec<String> {
    let (_, ext4) = &table.rows[0];
    if ext4.is_empty() {
        return Vec::new();
    }
    let mut findings = Vec::new();
    for (name, row) in &table.rows[1..] {
        let share = |(ours, theirs): (&u64, &u64)| {
            // Thousandths are exact enough.
            let thousandths = u32::try_from(ours.saturating_mul(1000) / (*theirs).max(1));
            f64::from(thousandths.unwrap_or(u32::MAX)) / 1000.0
        };
        let shares: Vec<_> = row.iter().zip(ext4).map(share).collect();
        let low = shares.iter().copied().fold(f64::INFINITY, f64::min);
        let high = shares.iter().copied().fold(0.0, f64::max);
        let at = shares.iter().position(|it| *it <= low).map_or("", |at| table.columns[at]);
        findings.push(format!(
            "{}: {name}: {low:.2} ({at}) to {high:.2} of {EXT4}'s bytes a second",
            table.title
        ));
    }
    findings
}
/// The kernel's read-ahead on the disk of a folder, in kB.
fn host_read_ahead(folder: &Path) -> Option<String> {
    let number = run!("stat --format=%Hd:%Ld {folder}").ok()?;
    let file = Path::new("/sys/class/bdi").join(number.trim()).join("read_ahead_kb");
    Some(fs::read_to_string(file).ok()?.trim().to_owned())
}

/// Limits of memory, page cache included, with which the compiler runs as well.
const LIMITS: [u64; 2] = [128 << 20, 96 << 20];

/// Runs in a chroot: compiles each source in place, links, and runs the result.
const COMPILE: &str = "
cd /srv/lua/src
ls *.c | grep -v luac.c | xargs -P 2 -I % gcc -O0 -DLUA_USE_POSIX -c -o /tmp/%.o %
gcc -o /tmp/lua /tmp/*.o -lm
[ \"$(/tmp/lua -e 'print(6 * 7)')\" = 42 ]
";
fn compile(context: &Context<'_>) -> Result<Vec<Table>> {
    if !context.wants("compile, ") {
        return Ok(Vec::new());
    }
    let layout = inputs::jobs::make(context.cache, false)?;
    let (folder, source) = (context.work.join("tree"), context.work.join("source"));
    let ways = ways(context, &format!("oci:{}:latest", layout.display()), &folder)?;
    ways[2].mount(&source, Layer::None)?;
    run!("cp -a {source} {folder}")?;
    unmount(&source, UnmountFlags::empty())?;
    let chroot = |root: &Path| {
        let mut chroot = cmd!("chroot {root} sh -euc {COMPILE}");
        chroot.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("LC_ALL", "C");
        chroot
    };
    let mut tables = Vec::new();
    // Memory of the compiler and of the files that it reads.
    let limits = LIMITS.map(|bytes| (true, Some(bytes)));
    for (is_cold, limit) in [(true, None), (false, None)].into_iter().chain(limits) {
        let limited = limit.map(Limited::new).transpose()?.flatten();
        if limit.is_some() && limited.is_none() {
            continue;
        }
        let limited = limited.as_ref();
        let chroot = |root: &Path| match limited {
            Some(limited) => limited.around(&chroot(root)),
            None => chroot(root),
        };
        let contestants = ways.iter().enumerate().map(|(number, way)| {
            let root = context.work.join(format!("compile-{number}"));
            let (mounted, left) = (root.clone(), root.clone());
            let before = move || -> Result<()> {
                way.mount(&mounted, Layer::None)?;
                mount("tmpfs", mounted.join("tmp"), "tmpfs", MountFlags::empty(), None)?;
                if is_cold { Ok(()) } else { quiet(&mut chroot(&mounted)).map(drop) }
            };
            let after = move || {
                unmount(left.join("tmp"), UnmountFlags::empty())?;
                Ok(unmount(&left, UnmountFlags::empty())?)
            };
            Contestant::new(&way.name, move || chroot(&root)).before(before).after(after)
        });
        let (title, rules) = match limit {
            None => (String::new(), Rules::reads(context.runs, is_cold)),
            // A second cgroup would have no limit.
            Some(bytes) => (
                format!(", in {} MiB of memory", bytes >> 20),
                Rules { cold: true, ..Rules::new(context.runs) },
            ),
        };
        let title = format!("compile, {}{title}", warmth(is_cold));
        tables.push(rules.race(title, contestants.collect())?);
    }
    Ok(tables)
}
