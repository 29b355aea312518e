//! What two images that are one minor version apart take of memory: when all files of both are read, and with servers of both
//! under load. On the newest kernel, in a virtual machine, with pages shared and not, and against what no sharing can go below.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use sha2::{Digest as _, Sha256};

use super::report::{Report, Sizes, Unit};
use crate::Context;
use rig::Skipped;
use rig::cache::remove;
use rig::inputs::pairs::{self, PAIRS, WHEELS};
use rig::inputs::sid::{self, Sid};
use rig::process::{need, quiet};
use rig::vm::{self, Hardware, Outcome, Step};

/// What runs in the guest.
const SCRIPTS: [(&str, &str); 2] =
    [("pagecache.py", include_str!("pagecache.py")), ("pageload.py", include_str!("pageload.py"))];

/// How the images are mounted in the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Way {
    name: &'static str,
    form: Form,
    share: bool,
    reader: Reader,
}

/// How files are read in the guest, outside the load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reader {
    Read,
    /// As nginx does with its usual settings, and busybox's `cat`: by splice(2), which the kernel does not share.
    Sendfile,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Objects,
    Packed,
    Mkfs,
}

const APART: &str = "packed, apart";
const SHARED: &str = "packed, shared";
const OBJECTS: Way =
    Way { name: "objects", form: Form::Objects, share: false, reader: Reader::Read };
const PACKED: [Way; 2] = [
    Way { name: APART, form: Form::Packed, share: false, reader: Reader::Read },
    Way { name: SHARED, form: Form::Packed, share: true, reader: Reader::Read },
];
const SENT: Way = Way {
    name: "packed, shared, sendfile",
    form: Form::Packed,
    share: true,
    reader: Reader::Sendfile,
};
const WAYS: [Way; 6] = [
    OBJECTS,
    PACKED[0],
    PACKED[1],
    SENT,
    Way { name: "mkfs.erofs, apart", form: Form::Mkfs, share: false, reader: Reader::Read },
    Way { name: "mkfs.erofs, shared", form: Form::Mkfs, share: true, reader: Reader::Read },
];
const LOADED: [Way; 3] = [OBJECTS, PACKED[0], PACKED[1]];

/// Two images, and what their files take at least.
struct Pair {
    name: &'static str,
    versions: [String; 2],
    /// Of each image's files, each content once.
    each: [u64; 2],
    /// Of both images' files together.
    both: u64,
    /// The same in the kernel that runs here, from objects; none where there are no objects, since they would be too large.
    here: Option<u64>,
    /// The files of the guest's disk that are images, by form.
    images: Vec<(Form, Vec<String>)>,
}

/// A pair, and what it took: for reading all in each way, and under load, where it has servers.
struct Row {
    pair: Pair,
    read: Vec<(Way, Vec<u64>)>,
    load: Vec<(Way, Vec<u64>)>,
}

impl Row {
    /// Whether it was measured in all ways.
    fn is_full(&self) -> bool {
        self.read.len() == WAYS.len()
    }
}

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let sid = sid::make(context.cache, false)?;
    let (mut rows, mut findings, mut release) = (Vec::new(), Vec::new(), String::new());
    let names = [WHEELS.0].into_iter().chain(PAIRS.iter().map(|it| it.0));
    for name in names
        .filter(|it| context.only.is_empty() || context.only.split(',').any(|only| only == *it))
    {
        let disk = context.work.join("disk");
        fs::create_dir(&disk)?;
        let pair = match sources(context, name)? {
            Ok(sources) => pair(context, &sid, name, sources, &disk)?,
            Err(why) => {
                remove(&disk)?;
                findings.push(format!("{name} is LEFT OUT: {why}"));
                continue;
            }
        };
        println!("   {name}: {} and {}", pair.versions[0], pair.versions[1]);
        match measure(context, pair, &disk) {
            Ok((kernel, row)) => {
                release = kernel;
                rows.push(row);
            }
            // The others took a quarter of an hour.
            Err(error) => {
                println!("   {name} FAILED: {error:#}");
                findings.push(format!("{name} is LEFT OUT: it FAILED"));
            }
        }
    }
    if rows.is_empty() {
        bail!(Skipped(format!("there is no pair: {}", findings.join("; "))));
    }
    findings.extend(rows.iter().flat_map(self::findings));
    Ok(Report {
        name: "pagecache",
        about: about(&rows, &release),
        tables: Vec::new(),
        sizes: tables(&rows),
        findings,
    })
}

/// Boots a guest with what is in the folder `disk`, which is no longer there then.
fn measure(context: &Context<'_>, pair: Pair, disk: &Path) -> Result<(String, Row)> {
    for (name, text) in SCRIPTS {
        fs::write(disk.join(name), text)?;
    }
    let file = context.work.join("disk.ext4");
    let size = quiet(Command::new("du").args(["-sm"]).arg(disk))?;
    let size: u64 = size.split_whitespace().next().context("du says nothing")?.parse()?;
    let mut mkfs = Command::new(need("mkfs.ext4")?);
    mkfs.args(["-q", "-F", "-b", "4096", "-m", "0", "-O", "verity", "-i", "8192"]);
    mkfs.args(["-E", "lazy_itable_init=1,root_owner=0:0"]).arg("-d").arg(disk).arg(&file);
    quiet(mkfs.arg(format!("{}M", size + size / 4 + 256)))?;
    // It is on the guest's disk now, and as large.
    remove(disk)?;
    let reads: Vec<_> = if pair.here.is_some() { WAYS.to_vec() } else { PACKED.to_vec() };
    // Only Debian's packages have servers.
    let loads = if pair.here.is_some() { LOADED.to_vec() } else { Vec::new() };
    let mut steps = vec![step(MOUNT.into(), "mount -t ext4 /dev/vdb /mnt".into())];
    steps.extend(reads.iter().map(|way| read_step(&pair, *way)));
    steps.extend(loads.iter().map(|way| load_step(&pair, *way)));
    let programs =
        [(context.quire.to_owned(), PathBuf::from(QUIRE)), (need("wrk")?, PathBuf::from(WRK))];
    // Twice both images, and what servers take.
    let memory = u32::try_from(pair.each.iter().sum::<u64>() >> 20)? + 3072;
    let hardware = Hardware { memory, data: Some(&file) };
    let (release, outcomes) = vm::measure(context.cache, "newest", &hardware, &programs, &steps)?;
    remove(&file)?;
    let mut measured = Vec::new();
    for (step, outcome) in steps.iter().zip(&outcomes).skip(1) {
        let numbers = result(outcome).with_context(|| {
            let last = &outcome.output[outcome.output.len().saturating_sub(LAST_LINES)..];
            format!("{}: {}\n{}", step.name, outcome.code, last.join("\n"))
        });
        println!("   {}: {numbers:?} in {:.0} s", step.name, outcome.took.as_secs_f64());
        measured.push(numbers);
    }
    let load = measured.split_off(reads.len());
    let read = measured.into_iter().collect::<Result<Vec<_>>>()?;
    // Without its load a pair still says something.
    let load = load.into_iter().collect::<Result<Vec<_>>>().ok();
    let load = load.map_or_else(Vec::new, |load| loads.into_iter().zip(load).collect());
    Ok((release, Row { pair, read: reads.into_iter().zip(read).collect(), load }))
}

const LAST_LINES: usize = 40;

/// The numbers of a step that ended well.
fn result(outcome: &Outcome) -> Option<Vec<u64>> {
    if outcome.code != 0 {
        return None;
    }
    let line = outcome.output.iter().find_map(|it| it.strip_prefix("RESULT "))?;
    line.split(' ').map(|it| it.parse().ok()).collect()
}

// What the numbers of a reading step are.
const CACHE: usize = 0;
const SLAB: usize = 1;
const IMAGES: usize = 2;
const FOLDERS: usize = 3;
const DISK: usize = 4;

// And those of a step with load.
const FILES: usize = 0;
const CHARGED: usize = 2;

const QUIRE: &str = "/vm/quire";
const WRK: &str = "/vm/wrk";
const MOUNT: &str = "mount";

fn step(name: String, command: String) -> Step {
    Step { name, limit: Duration::from_secs(1200), command, harness: false }
}

/// How the scripts are told to mount a pair.
fn mounting(pair: &Pair, way: Way) -> String {
    let name = pair.name;
    let (how, place, images) = match way.form {
        Form::Objects => ("quire", "objects", "first second"),
        Form::Packed => ("quire", "packed", "first second"),
        Form::Mkfs => ("erofs", "mkfs", "1.erofs 2.erofs"),
    };
    let share = if way.share { "on" } else { "off" };
    format!("{how} {share} /mnt/{name}/{place} {images}")
}

fn read_step(pair: &Pair, way: Way) -> Step {
    let own = pair.images.iter().find(|(form, _)| *form == way.form);
    let own: Vec<_> = own.iter().flat_map(|(_, files)| files).map(String::as_str).collect();
    let (mounting, own) = (mounting(pair, way), own.join(" "));
    let reader = match way.reader {
        Reader::Read => "read",
        Reader::Sendfile => "sendfile",
    };
    step(
        format!("{}:{}", pair.name, way.name.replace(", ", "-")),
        format!("QUIRE={QUIRE} python3 /mnt/pagecache.py {reader} {mounting} {own}"),
    )
}

fn load_step(pair: &Pair, way: Way) -> Step {
    let (name, mounting) = (pair.name, mounting(pair, way));
    step(
        format!("{name}:load-{}", way.name.replace(", ", "-")),
        format!("QUIRE={QUIRE} python3 /mnt/pageload.py {name} {mounting}"),
    )
}

/// One image of a pair.
struct Source {
    version: String,
    /// For `quire import`.
    import: String,
    /// The same files.
    tree: PathBuf,
    /// The archive that has the files of the tree, when that is to be made and removed.
    wheel: Option<PathBuf>,
}

/// The two images of this name, or why there are none.
fn sources(context: &Context<'_>, name: &str) -> Result<std::result::Result<[Source; 2], String>> {
    let Some((_, packages)) = PAIRS.iter().find(|it| it.0 == name) else {
        let wheels = match pairs::wheels(context.cache, false) {
            Ok(wheels) => wheels,
            Err(error) => return Ok(Err(format!("{error:#}"))),
        };
        let tree = context.work.join("tree");
        let [first, second] = wheels;
        let source = |version: &str, wheel| Source {
            version: version.to_owned(),
            import: format!("dir:{}", tree.display()),
            tree: tree.clone(),
            wheel: Some(wheel),
        };
        return Ok(Ok([source(WHEELS.1[0], first), source(WHEELS.1[1], second)]));
    };
    let versions = pairs::make(context.cache, name, packages, false)?;
    if versions[0].version == versions[1].version {
        return Ok(Err(format!("the mirror has {} only", versions[0].version)));
    }
    Ok(Ok(versions.map(|it| Source {
        version: it.version,
        import: format!("oci:{}:latest", it.layout.display()),
        tree: it.tree,
        wheel: None,
    })))
}

/// Makes the images of a pair in a folder of the disk, in every form; wheels, which are large, in one.
fn pair(
    context: &Context<'_>,
    sid: &Sid,
    name: &'static str,
    sources: [Source; 2],
    disk: &Path,
) -> Result<Pair> {
    let folder = disk.join(name);
    fs::create_dir_all(folder.join("mkfs"))?;
    let is_large = sources.iter().any(|it| it.wheel.is_some());
    let stores = if is_large { &["packed"][..] } else { &["objects", "packed"] };
    let mut contents = [BTreeSet::new(), BTreeSet::new()];
    let images = [("first", "1.erofs"), ("second", "2.erofs")];
    for ((source, (image, own)), contents) in sources.iter().zip(images).zip(&mut contents) {
        if let Some(wheel) = &source.wheel {
            let mut python = Command::new(need("python3")?);
            quiet(python.args(["-m", "zipfile", "-e"]).arg(wheel).arg(&source.tree))?;
        }
        for form in stores {
            let mut quire = Command::new(context.quire);
            quire.arg("--store").arg(folder.join(form)).args(["--quiet", "import", "--form", form]);
            quiet(quire.arg(&source.import).arg(image))?;
        }
        if !is_large {
            let mut mkfs = sid.command("mkfs.erofs")?;
            mkfs.args(["--quiet", "--xattr-inode-digest=erofs.fingerprint.v1"]);
            quiet(mkfs.arg(folder.join("mkfs").join(own)).arg(&source.tree))?;
        }
        contents_below(&source.tree, contents)?;
        if source.wheel.is_some() {
            remove(&source.tree)?;
        }
    }
    let files = |store: &str| -> Result<Vec<String>> {
        let guest = Path::new("/mnt").join(name).join(store);
        let images = files_below(&folder.join(store))?.into_iter();
        let images =
            images.filter_map(|it| Some(it.strip_prefix(folder.join(store)).ok()?.to_owned()));
        let images = images.filter(|it| {
            it.starts_with("images") || it.extension().is_some_and(|it| it == "erofs")
        });
        Ok(images.map(|it| guest.join(it).display().to_string()).collect())
    };
    let mut images = vec![(Form::Packed, files("packed")?)];
    if !is_large {
        images.extend([(Form::Objects, files("objects")?), (Form::Mkfs, files("mkfs")?)]);
    }
    Ok(Pair {
        name,
        each: [0, 1].map(|at: usize| pages(&contents[at])),
        both: pages(&(&contents[0] | &contents[1])),
        here: if is_large { None } else { Some(here(context, &folder.join("objects"))?) },
        images,
        versions: sources.map(|it| it.version),
    })
}

/// The bytes of the pages that these contents take.
fn pages(contents: &BTreeSet<([u8; 32], u64)>) -> u64 {
    contents.iter().map(|(_, length)| length.next_multiple_of(4096)).sum()
}

fn files_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let (mut open, mut files) = (vec![folder.to_owned()], Vec::new());
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                open.push(entry.path());
            } else if kind.is_file() {
                files.push(entry.path());
            }
        }
    }
    Ok(files)
}

fn contents_below(tree: &Path, contents: &mut BTreeSet<([u8; 32], u64)>) -> Result<()> {
    for file in files_below(tree)? {
        let bytes = fs::read(&file)?;
        contents.insert((Sha256::digest(&bytes).into(), u64::try_from(bytes.len())?));
    }
    Ok(())
}

/// What both images take in this kernel's page cache, when all files of both are read: objects and images are files, which
/// are asked one by one, since others use this machine too.
fn here(context: &Context<'_>, store: &Path) -> Result<u64> {
    quiet(Command::new("sync").arg("--file-system").arg(store))?;
    let files: Vec<_> = ["objects", "images"]
        .iter()
        .map(|it| files_below(&store.join(it)))
        .collect::<Result<Vec<_>>>()?
        .concat();
    for file in &files {
        let file = fs::File::open(file)?;
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    }
    let before = resident(&files)?;
    let points = ["first", "second"].map(|it| context.work.join(it));
    for (point, image) in points.iter().zip(["first", "second"]) {
        fs::create_dir_all(point)?;
        let mut quire = Command::new(context.quire);
        quire.arg("--store").arg(store).args(["--quiet", "mount", image]);
        quiet(quire.arg(point))?;
    }
    for point in &points {
        contents_below(point, &mut BTreeSet::new())?;
    }
    let after = resident(&files)?;
    for point in &points {
        quiet(Command::new("umount").arg(point))?;
    }
    Ok(after - before)
}

/// What of the files is in memory, as fincore(1) says it.
fn resident(files: &[PathBuf]) -> Result<u64> {
    let mut sum = 0;
    for files in files.chunks(1000) {
        let mut fincore = Command::new(need("fincore")?);
        fincore.args(["--noheadings", "--bytes", "--output", "RES"]).args(files);
        for line in quiet(&mut fincore)?.split_whitespace() {
            sum += line.parse::<u64>()?;
        }
    }
    Ok(sum)
}

fn about(rows: &[Row], release: &str) -> String {
    let versions = rows.iter().map(|Row { pair, .. }| {
        let [first, second] = &pair.versions;
        format!("{} {first} and {second}", pair.name)
    });
    format!(
        "What two images take of memory that are a minor version apart: Debian with a package, from the release and from its \
         security updates, or one unpacked wheel each ({}). In a virtual machine with Linux {release} and one processor. \
         *Apart* is each mount for itself, *shared* is one domain for both. `objects` are composefs images, whose data is in \
         files of the store; `packed` images were imported into one store; `mkfs.erofs` 1.9 with `--xattr-inode-digest` made \
         an image from each tree, mounted with `directio`, as `packed` is.\n\n\
         Reading: all files of both images, one after the other; `Cached` and `Buffers` of /proc/meminfo, from dropped caches \
         on, without what the reading program takes for itself: it has run before, over nothing. *sendfile* is sendfile(2) to /dev/null instead of read(2), as nginx does by default. The bound is what no sharing of whole files goes \
         below: each content of both trees once (by SHA-256), in whole pages, and no metadata.\n\n\
         Load: the server of each image in a container of its own (an overlay with changes on tmpfs), both at once, from \
         dropped caches on, with 128 kB read ahead everywhere: wrk for 4 s against nginx's page and for 5 s against tomcat's, redis-benchmark with 300 of each request, pgbench for 5 s, \
         mariadb-slap with 400 queries; the measure is taken when both have had their load and still run. What is counted is what the kernel \
         charges both containers' memory cgroups with: pages of files (without tmpfs and shared memory), and all of it, with the processes' own memory.",
        versions.collect::<Vec<_>>().join(", ")
    )
}

/// A table of one number of each way; all rows have the same ways.
fn table(title: &str, rows: &[&[(Way, Vec<u64>)]], names: &[&str], of: usize) -> Sizes {
    Sizes {
        title: title.to_owned(),
        unit: Unit::Megabytes,
        columns: rows[0].iter().map(|(way, _)| way.name).collect(),
        rows: names
            .iter()
            .zip(rows)
            .map(|(name, row)| ((*name).to_owned(), row.iter().map(|(_, it)| it[of]).collect()))
            .collect(),
    }
}

fn tables(rows: &[Row]) -> Vec<Sizes> {
    let mut tables = Vec::new();
    for (full, of) in [(true, ""), (false, ", of wheels")] {
        let rows: Vec<_> = rows.iter().filter(|it| it.is_full() == full).collect();
        if rows.is_empty() {
            continue;
        }
        let names: Vec<_> = rows.iter().map(|it| it.pair.name).collect();
        let read: Vec<_> = rows.iter().map(|it| &it.read[..]).collect();
        let title = |text: &str| format!("{text}{of}");
        let mut all =
            table(&title("Page cache after reading all of both images"), &read, &names, CACHE);
        all.columns.splice(0..0, ["each image's bound, added", "bound of both"]);
        for (row, values) in rows.iter().zip(&mut all.rows) {
            values.1.splice(0..0, [row.pair.each.iter().sum(), row.pair.both]);
        }
        tables.push(all);
        let parts = [
            (
                "Of it the images' own pages: metadata, and ends of files where they are kept behind it",
                IMAGES,
            ),
            ("Of it pages of folders, which EROFS keeps for each image by itself", FOLDERS),
            ("Of it the disk's own metadata: tables of inodes, and where files are", DISK),
        ];
        tables.extend(parts.map(|(text, of)| table(&title(text), &read, &names, of)));
        let slab = "Slab: inodes, directory entries, and what holds pages";
        tables.push(table(&title(slab), &read, &names, SLAB));
    }
    let rows: Vec<_> = rows.iter().filter(|it| !it.load.is_empty()).collect();
    if !rows.is_empty() {
        let names: Vec<_> = rows.iter().map(|it| it.pair.name).collect();
        let load: Vec<_> = rows.iter().map(|it| &it.load[..]).collect();
        tables.push(table("Under load: pages of files", &load, &names, FILES));
        tables.push(table(
            "Under load: all that both containers are charged with",
            &load,
            &names,
            CHARGED,
        ));
    }
    tables
}

/// The change from the second to the first, in tenths of a percent.
fn percent(part: u64, whole: u64) -> String {
    let tenths = i64::try_from(part * 1000 / whole.max(1)).unwrap_or(i64::MAX) - 1000;
    format!("{:+.1} %", f64::from(i32::try_from(tenths).unwrap_or(i32::MAX)) / 10.0)
}

fn findings(row: &Row) -> Vec<String> {
    let pair = &row.pair;
    let name = pair.name;
    let of = |ways: &[(Way, Vec<u64>)], name: &str, at: usize| {
        ways.iter().find(|(way, _)| way.name == name).map(|(_, numbers)| numbers[at])
    };
    let mut findings = Vec::new();
    if let (Some(here), Some(objects)) = (pair.here, of(&row.read, OBJECTS.name, CACHE)) {
        // A kernel that reclaims while others use the machine has taken pages away; then the sum says nothing.
        findings.push(if here >= objects / 10 * 9 {
            let tenths = here / 100_000;
            format!("{name}: objects in the host's own kernel: {}.{} MB", tenths / 10, tenths % 10)
        } else {
            format!("{name}: objects in the host's own kernel: NOT MEASURED, it took pages away meanwhile")
        });
    }
    for (ours, other) in [
        (SHARED, APART),
        (SENT.name, APART),
        ("mkfs.erofs, shared", "mkfs.erofs, apart"),
        (OBJECTS.name, APART),
    ] {
        let all = |way: &str, at| of(&row.read, way, at);
        let numbers = [CACHE, IMAGES, FOLDERS, DISK, SLAB].map(|at| all(ours, at));
        let [Some(cache), Some(images), Some(folders), Some(disk), Some(slab)] = numbers else {
            continue;
        };
        let (Some(apart), Some(slab_apart)) = (all(other, CACHE), all(other, SLAB)) else {
            continue;
        };
        findings.push(format!(
            "{name}: {ours}: {} against apart, {} against the bound ({} without metadata: the images' own pages, folders, the disk's); slab {}",
            percent(cache, apart),
            percent(cache, pair.both),
            percent(cache.saturating_sub(images + folders + disk), pair.both),
            percent(slab, slab_apart),
        ));
    }
    findings.push(format!(
        "{name}: of the files' pages alone, sharing could save {} at best",
        percent(pair.both, pair.each.iter().sum())
    ));
    for ours in [SHARED, OBJECTS.name] {
        let numbers = [(ours, FILES), (APART, FILES), (ours, CHARGED), (APART, CHARGED)];
        let [Some(files), Some(files_apart), Some(all), Some(all_apart)] =
            numbers.map(|(way, at)| of(&row.load, way, at))
        else {
            continue;
        };
        let (files, all) = (percent(files, files_apart), percent(all, all_apart));
        findings.push(format!(
            "{name}: {ours}, under load: pages of files {files} against apart, all that is charged {all}"
        ));
    }
    if pair.here.is_some() && row.load.is_empty() {
        findings.push(format!("{name}: its load FAILED"));
    }
    findings
}
