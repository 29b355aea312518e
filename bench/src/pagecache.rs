//! Memory of two images that are one minor version apart: when all files of both are read, and with servers of both
//! under load. The newest kernel runs in a virtual machine, with and without sharing of pages. The results are
//! compared with the lower bound of any sharing.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use sha2::{Digest as _, Sha256};

use super::report::{Report, Sizes, Unit};
use crate::Context;
use crate::command::{more, run};
use rig::Skipped;
use rig::cache::remove;
use rig::inputs::pairs::{self, PAIRS, WHEELS};
use rig::inputs::sid::{self, Sid};
use rig::process::{need, quiet};
use rig::vm::{self, Hardware, Outcome, Step};

/// Scripts that run in the guest.
const SCRIPTS: [(&str, &str); 4] = [
    ("pagecache.py", include_str!("pagecache.py")),
    ("pageload.py", include_str!("pageload.py")),
    ("pageget.py", include_str!("pageget.py")),
    ("tensorload.py", include_str!("tensorload.py")),
];

/// A way to mount and read the images in the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Way {
    name: &'static str,
    /// Folder of the images: `objects`, `packed` or `mkfs`.
    form: &'static str,
    share: bool,
    /// System call by which files are read, except under load.
    reader: &'static str,
}

const fn way(name: &'static str, form: &'static str, share: bool) -> Way {
    Way { name, form, share, reader: "read" }
}

const APART: &str = "packed, apart";
const SHARED: &str = "packed, shared";
const OBJECTS: Way = way("objects", "objects", false);
const PACKED: [Way; 2] = [way(APART, "packed", false), way(SHARED, "packed", true)];
/// Read by splice(2), as by nginx with its usual settings and by busybox's `cat`. The kernel does not share pages for
/// it.
const SENT: Way = Way { reader: "sendfile", ..way("packed, shared, sendfile", "packed", true) };
const WAYS: [Way; 6] = [
    OBJECTS,
    PACKED[0],
    PACKED[1],
    SENT,
    way("mkfs.erofs, apart", "mkfs", false),
    way("mkfs.erofs, shared", "mkfs", true),
];
const LOADED: [Way; 3] = [OBJECTS, PACKED[0], PACKED[1]];

/// Two images, and the lower bounds of their files' memory.
struct Pair {
    name: &'static str,
    versions: [String; 2],
    /// Bytes in the pages of each image's files, counting each different content once.
    each: [u64; 2],
    /// Bytes in the pages of both images' files together, counting each different content once.
    both: u64,
    /// Page cache of both images in the host's kernel, read from objects, in bytes; none for images that are too
    /// large to be imported as objects.
    here: Option<u64>,
    /// Image files on the guest's disk, by form.
    images: Vec<(&'static str, Vec<String>)>,
}

/// Numbers that a step in the guest printed, for each way.
type ByWay = Vec<(Way, Vec<u64>)>;

/// Measurements of a pair: for reading all files in each way, and under load if the images have servers.
struct Row {
    pair: Pair,
    read: ByWay,
    /// By load. Loads that failed are missing.
    load: Vec<(&'static str, ByWay)>,
    failed: Vec<&'static str>,
}

impl Row {
    /// Whether the pair was measured in all ways.
    fn is_full(&self) -> bool {
        self.read.len() == WAYS.len()
    }
}

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let sid = sid::make(context.cache, false)?;
    let (mut rows, mut findings, mut release) = (Vec::new(), Vec::new(), String::new());
    let names = [WHEELS.0].into_iter().chain(PAIRS.iter().map(|it| it.0));
    for name in
        names.filter(|it| context.only.is_empty() || context.only.iter().any(|only| only == *it))
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
            // One failed pair does not end the bench, because the other pairs took a quarter of an hour.
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
        sizes: tables(&rows),
        findings,
        ..Report::default()
    })
}

/// Boots a guest with the contents of the folder `disk`, and removes the folder.
fn measure(context: &Context<'_>, pair: Pair, disk: &Path) -> Result<(String, Row)> {
    for (name, text) in SCRIPTS {
        fs::write(disk.join(name), text)?;
    }
    let file = context.work.join("disk.ext4");
    let size = run!("du -sm {disk}")?;
    let size: u64 = size.split_whitespace().next().context("du says nothing")?.parse()?;
    run!(
        need("mkfs.ext4")?,
        "-q -F -b 4096 -m 0 -O verity -i 8192 -E lazy_itable_init=1,root_owner=0:0 -d {disk} {file}",
        format!("{}M", size + size / 4 + 256)
    )?;
    // The contents are on the guest's disk now and take the same space there.
    remove(disk)?;
    let reads: Vec<_> = if pair.here.is_some() { WAYS.to_vec() } else { PACKED.to_vec() };
    let ways = if pair.here.is_some() { LOADED.to_vec() } else { PACKED.to_vec() };
    let loads = loads(pair.name);
    let mut steps = vec![step(MOUNT.into(), "mount -t ext4 /dev/vdb /mnt".into())];
    steps.extend(reads.iter().map(|way| read_step(&pair, *way)));
    steps.extend(loads.iter().flat_map(|it| ways.iter().map(|way| load_step(&pair, it, *way))));
    let programs =
        [(context.quire.to_owned(), PathBuf::from(QUIRE)), (need("wrk")?, PathBuf::from(WRK))];
    // Twice the size of both images, plus 3 GiB for the servers.
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
    let mut loaded = measured.split_off(reads.len()).into_iter();
    let read = measured.into_iter().collect::<Result<Vec<_>>>()?;
    let read = reads.into_iter().zip(read).collect();
    let mut row = Row { pair, read, load: Vec::new(), failed: Vec::new() };
    for name in loads {
        let load: Result<Vec<_>> = loaded.by_ref().take(ways.len()).collect();
        // If a load failed, the other results are still reported.
        match load {
            Ok(load) => row.load.push((*name, ways.iter().copied().zip(load).collect())),
            Err(error) => {
                println!("   {error:#}");
                row.failed.push(name);
            }
        }
    }
    Ok((release, row))
}

const LAST_LINES: usize = 40;

/// Numbers in a successful step's output.
fn result(outcome: &Outcome) -> Option<Vec<u64>> {
    if outcome.code != 0 {
        return None;
    }
    let line = outcome.output.iter().find_map(|it| it.strip_prefix("RESULT "))?;
    line.split(' ').map(|it| it.parse().ok()).collect()
}

// Indexes of the numbers of a reading step.
const CACHE: usize = 0;
const SLAB: usize = 1;
const IMAGES: usize = 2;
const FOLDERS: usize = 3;
const DISK: usize = 4;

// Indexes of the numbers of a step with load.
const FILES: usize = 0;
const CHARGED: usize = 2;

const QUIRE: &str = "/vm/quire";
const WRK: &str = "/vm/wrk";
const MOUNT: &str = "mount";

fn step(name: String, command: String) -> Step {
    Step { name, limit: Duration::from_secs(1200), command, harness: false }
}

/// Arguments by which the scripts mount a pair.
fn mounting(pair: &Pair, Way { form, share, .. }: Way) -> String {
    let (how, images) =
        if form == "mkfs" { ("erofs", "1.erofs 2.erofs") } else { ("quire", "first second") };
    let share = if share { "on" } else { "off" };
    format!("{how} {share} /mnt/{}/{form} {images}", pair.name)
}

fn read_step(pair: &Pair, way: Way) -> Step {
    let own = pair.images.iter().find(|(form, _)| *form == way.form);
    let own: Vec<_> = own.iter().flat_map(|(_, files)| files).map(String::as_str).collect();
    let (mounting, own, reader) = (mounting(pair, way), own.join(" "), way.reader);
    step(
        format!("{}:{}", pair.name, way.name.replace(", ", "-")),
        format!("QUIRE={QUIRE} python3 /mnt/pagecache.py {reader} {mounting} {own}"),
    )
}

/// Loads of the servers of a pair, as `pageload.py` names them.
fn loads(pair: &'static str) -> &'static [&'static str] {
    match pair {
        "nginx" => &["nginx", "nginx-sendfile", "nginx-read"],
        "redis" => &["redis"],
        "postgresql" => &["postgresql"],
        "tomcat" => &["tomcat"],
        "mariadb" => &["mariadb"],
        "tensorflow" => &["tensorflow"],
        _ => &[],
    }
}

fn load_step(pair: &Pair, name: &str, way: Way) -> Step {
    let mounting = mounting(pair, way);
    step(
        format!("{name}:load-{}", way.name.replace(", ", "-")),
        format!("QUIRE={QUIRE} python3 /mnt/pageload.py {name} {mounting}"),
    )
}

/// One image of a pair.
struct Source {
    version: String,
    /// Source argument of `quire import`.
    import: String,
    /// Folder of the same files.
    tree: PathBuf,
    /// Archive from which the tree is made and later removed; none if the tree exists already.
    wheel: Option<PathBuf>,
}

/// The two images of this name, or the reason why they are missing.
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

/// Makes the images of a pair in a folder, in every form; wheels, which are large, in one form.
fn pair(
    context: &Context<'_>,
    sid: &Sid,
    name: &'static str,
    sources: [Source; 2],
    disk: &Path,
) -> Result<Pair> {
    let quire = context.quire;
    let folder = disk.join(name);
    fs::create_dir_all(folder.join("mkfs"))?;
    let is_large = sources.iter().any(|it| it.wheel.is_some());
    let stores = if is_large { &["packed"][..] } else { &["objects", "packed"] };
    let mut contents = [BTreeSet::new(), BTreeSet::new()];
    let images = [("first", "1.erofs"), ("second", "2.erofs")];
    for ((source, (image, own)), contents) in sources.iter().zip(images).zip(&mut contents) {
        if let Some(wheel) = &source.wheel {
            run!(need("python3")?, "-m zipfile -e {wheel}", &source.tree)?;
        }
        for form in stores {
            run!(
                "{quire} --store",
                folder.join(form),
                "--quiet import --form {form}",
                &source.import,
                "{image}"
            )?;
        }
        if !is_large {
            quiet(&mut more!(
                sid.command("mkfs.erofs")?,
                "--quiet --xattr-inode-digest=erofs.fingerprint.v1",
                folder.join("mkfs").join(own),
                &source.tree
            ))?;
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
    let mut images = vec![("packed", files("packed")?)];
    if !is_large {
        images.extend([("objects", files("objects")?), ("mkfs", files("mkfs")?)]);
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

/// Size of the pages that these contents take, in bytes.
fn pages(contents: &BTreeSet<([u8; 32], u64)>) -> u64 {
    contents.iter().map(|(_, length)| length.next_multiple_of(4096)).sum()
}

pub(super) fn files_below(folder: &Path) -> Result<Vec<PathBuf>> {
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

/// Page cache of both images in the host's kernel after all files of both were read, in bytes. Only the objects and
/// image files are counted, because other programs also use this machine.
fn here(context: &Context<'_>, store: &Path) -> Result<u64> {
    let quire = context.quire;
    run!("sync --file-system {store}")?;
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
        run!("{quire} --store {store} --quiet mount {image} {point}")?;
    }
    for point in &points {
        contents_below(point, &mut BTreeSet::new())?;
    }
    let after = resident(&files)?;
    for point in &points {
        run!("umount {point}")?;
    }
    Ok(after - before)
}

/// Bytes of the files that are in the page cache, from fincore(1).
pub(super) fn resident(files: &[PathBuf]) -> Result<u64> {
    let mut sum = 0;
    for files in files.chunks(1000) {
        let sizes = run!(need("fincore")?, "--noheadings --bytes --output RES {files...}")?;
        sum += sizes.split_whitespace().map(str::parse::<u64>).sum::<Result<u64, _>>()?;
    }
    Ok(sum)
}

fn about(rows: &[Row], release: &str) -> String {
    let versions = rows.iter().map(|Row { pair, .. }| {
        let [first, second] = &pair.versions;
        format!("{} {first} and {second}", pair.name)
    });
    format!(
        "Memory of two images that are a minor version apart: Debian with a package, from the release and from its \
         security updates, or one unpacked wheel each ({}). In a virtual machine with Linux {release} and one \
         processor. *Apart* is each mount for itself, *shared* is one domain for both. `objects` are composefs \
         images, whose data is in files of the store; `packed` images were imported into one store; `mkfs.erofs` 1.9 \
         with `--xattr-inode-digest` made an image from each tree, mounted with `directio`, as `packed` \
         is.\n\n\
         Reading: all files of both images, one after the other; `Cached` and `Buffers` of /proc/meminfo, \
         from dropped caches on, without what the reading program takes for itself: it has run before, over nothing. \
         *sendfile* is sendfile(2) to /dev/null instead of read(2), as nginx does by default. The bound is what no \
         sharing of whole files goes below: each content of both trees once (by SHA-256), in whole pages, and no \
         metadata.\n\n\
         Load: the server of each image in a separate container (an overlay with changes on tmpfs), \
         both at once, from dropped caches on, with 128 kB read ahead everywhere: wrk for 4 s against nginx's page \
         and for 5 s against tomcat's, redis-benchmark with 300 of each request, pgbench for 5 s, mariadb-slap with \
         400 queries. *nginx-sendfile* and *nginx-read* send all files of the image's `/usr`, with `sendfile on` and \
         `off`. *tensorflow* loads the libraries of the wheel, and multiplies two matrices. The measure is taken when both have had their load and still run. The figure is the memory \
         that the kernel charges to both containers' cgroups: pages of files (without tmpfs and shared memory), and \
         all of it, with the processes' own memory.",
        versions.collect::<Vec<_>>().join(", ")
    )
}

/// A pair's name, and its numbers in each way.
type Measured<'a> = (&'a str, &'a [(Way, Vec<u64>)]);

/// A table of one number for each way; all rows have the same ways.
fn table(title: String, rows: &[Measured<'_>], of: usize) -> Sizes {
    let columns: Vec<_> = rows[0].1.iter().map(|(way, _)| way.name).collect();
    let rows = rows.iter().map(|(name, row)| {
        ((*name).to_owned(), row.iter().map(|(_, it)| it[of]).collect::<Vec<_>>())
    });
    Sizes::new(title, Unit::Megabytes, columns, rows.collect())
}

/// Titles of the parts of a page cache, and the slab.
const PARTS: [(&str, usize); 4] = [
    (
        "The images' own pages of it: metadata, and ends of files where they are kept behind it",
        IMAGES,
    ),
    ("Pages of folders of it, which EROFS keeps for each image by itself", FOLDERS),
    ("The disk's own metadata of it: tables of inodes, and where files are", DISK),
    ("Slab: inodes, directory entries, and what holds pages", SLAB),
];

fn tables(rows: &[Row]) -> Vec<Sizes> {
    let mut tables = Vec::new();
    for (full, of) in [(true, ""), (false, ", of wheels")] {
        let rows: Vec<_> = rows.iter().filter(|it| it.is_full() == full).collect();
        if rows.is_empty() {
            continue;
        }
        let read: Vec<_> = rows.iter().map(|it| (it.pair.name, &it.read[..])).collect();
        let title = format!("Page cache after reading all of both images{of}");
        let mut all = table(title, &read, CACHE);
        all.columns.splice(0..0, ["each image's bound, added", "bound of both"]);
        for (row, values) in rows.iter().zip(&mut all.rows) {
            values.1.splice(0..0, [row.pair.each.iter().sum(), row.pair.both]);
        }
        tables.push(all);
        tables.extend(PARTS.map(|(text, at)| table(format!("{text}{of}"), &read, at)));
    }
    for (full, of) in [(true, ""), (false, ", of wheels")] {
        let rows = rows.iter().filter(|it| it.is_full() == full);
        let load: Vec<_> =
            rows.flat_map(|it| it.load.iter().map(|(name, load)| (*name, &load[..]))).collect();
        if !load.is_empty() {
            let charged = "all that both containers are charged with";
            for (what, at) in [("pages of files", FILES), (charged, CHARGED)] {
                tables.push(table(format!("Under load: {what}{of}"), &load, at));
            }
        }
    }
    tables
}

/// Change from `whole` to `part` in percent, with one decimal.
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
        // With less than nine tenths of the expected size, the kernel has reclaimed pages for other programs, and the
        // sum is meaningless.
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
    for (load, numbers_of) in &row.load {
        for ours in [SHARED, OBJECTS.name] {
            let numbers = [(ours, FILES), (APART, FILES), (ours, CHARGED), (APART, CHARGED)];
            let [Some(files), Some(files_apart), Some(all), Some(all_apart)] =
                numbers.map(|(way, at)| of(numbers_of, way, at))
            else {
                continue;
            };
            let (files, all) = (percent(files, files_apart), percent(all, all_apart));
            findings.push(format!(
                "{load}: {ours}, under load: pages of files {files} against apart, all that is charged {all}"
            ));
        }
    }
    findings.extend(row.failed.iter().map(|it| format!("{it}: its load FAILED")));
    findings
}
