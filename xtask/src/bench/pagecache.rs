//! What two images that are one minor version apart take of memory when all files of both are read: on the newest kernel, in
//! a virtual machine, with pages shared and not, and against what no sharing can go below.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use sha2::{Digest as _, Sha256};

use super::Context;
use super::report::{Report, Sizes, Unit};
use crate::Skipped;
use crate::cache::remove;
use crate::inputs::pairs::{self, PAIRS, Version};
use crate::inputs::sid::{self, Sid};
use crate::process::{need, quiet};
use crate::vm::{self, Hardware, Outcome, Step};

/// What others published for the same question.
const PUBLISHED: &str = "published for reading all of two versions, less than apart: with the kernel's patches nginx 44 %, redis \
    33 %, postgres 28 %, tomcat 49 %, mysql 21 %, tensorflow 16 %; for Debian pairs such as these with mkfs.erofs nginx 40 %, \
    redis 40 %, postgresql 40 %, tomcat 21 %, mariadb 20 %";

const READER: &str = include_str!("pagecache.py");

/// How the images are mounted in the guest.
struct Way {
    name: &'static str,
    form: Form,
    share: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Objects,
    Packed,
    Mkfs,
}

const WAYS: [Way; 5] = [
    Way { name: "objects", form: Form::Objects, share: false },
    Way { name: "packed, apart", form: Form::Packed, share: false },
    Way { name: "packed, shared", form: Form::Packed, share: true },
    Way { name: "mkfs.erofs, apart", form: Form::Mkfs, share: false },
    Way { name: "mkfs.erofs, shared", form: Form::Mkfs, share: true },
];

/// Two images, and what their files take at least.
struct Pair {
    name: &'static str,
    versions: [String; 2],
    /// Of each image's files, each content once.
    each: [u64; 2],
    /// Of both images' files together.
    both: u64,
    /// The same in the kernel that runs here, from objects.
    here: u64,
    /// The files of the guest's disk that are images, by form.
    images: [(Form, Vec<String>); 3],
}

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let sid = sid::make(context.cache, false)?;
    let disk = context.work.join("disk");
    fs::create_dir(&disk)?;
    fs::write(disk.join("pagecache.py"), READER)?;
    let (mut made, mut findings) = (Vec::new(), Vec::new());
    for (name, packages) in PAIRS {
        let versions = pairs::make(context.cache, name, packages, false)?;
        if versions[0].version == versions[1].version {
            let version = &versions[0].version;
            findings.push(format!("{name} is LEFT OUT: the mirror has {version} only"));
            continue;
        }
        made.push(pair(context, &sid, name, &versions, &disk)?);
        println!("   {name}: {} and {}", versions[0].version, versions[1].version);
    }
    if made.is_empty() {
        bail!(Skipped(String::from("the mirror has one version of everything")));
    }
    let file = context.work.join("disk.ext4");
    let size = quiet(Command::new("du").args(["-sm"]).arg(&disk))?;
    let size: u64 = size.split_whitespace().next().context("du says nothing")?.parse()?;
    let mut mkfs = Command::new(need("mkfs.ext4")?);
    mkfs.args(["-q", "-F", "-b", "4096", "-m", "0", "-O", "verity", "-i", "8192"]);
    mkfs.args(["-E", "lazy_itable_init=1,root_owner=0:0"]).arg("-d").arg(&disk).arg(&file);
    quiet(mkfs.arg(format!("{}M", size + size / 4 + 256)))?;
    // It is on the guest's disk now, and as large.
    remove(&disk)?;
    let steps = steps(&made);
    let programs = [(context.quire.to_owned(), PathBuf::from(QUIRE))];
    let hardware = Hardware { memory: 4096, data: Some(&file) };
    let (release, outcomes) = vm::measure(context.cache, "newest", &hardware, &programs, &steps)?;
    let mut measured = Vec::new();
    for (step, outcome) in steps.iter().zip(&outcomes) {
        match result(outcome) {
            Some(numbers) => measured.push(numbers),
            None if step.name == MOUNT && outcome.code == 0 => {}
            None => bail!("{}: {}\n{}", step.name, outcome.code, outcome.output.join("\n")),
        }
    }
    let rows: Vec<_> = made.iter().zip(measured.chunks(WAYS.len())).collect();
    findings.extend(rows.iter().flat_map(|(pair, row)| self::findings(pair, row)));
    findings.push(PUBLISHED.to_owned());
    Ok(Report {
        name: "pagecache",
        about: about(&made, &release),
        tables: Vec::new(),
        sizes: tables(&rows),
        findings,
    })
}

/// What one way took: bytes of page cache, of slab, and of the page cache what is the images' own.
#[derive(Debug, Clone, Copy)]
struct Measured {
    cache: u64,
    slab: u64,
    images: u64,
}

fn result(outcome: &Outcome) -> Option<Measured> {
    if outcome.code != 0 {
        return None;
    }
    let line = outcome.output.iter().find_map(|it| it.strip_prefix("RESULT "))?;
    let mut numbers = line.split(' ').map(str::parse);
    let mut next = || numbers.next()?.ok();
    Some(Measured { cache: next()?, slab: next()?, images: next()? })
}

const QUIRE: &str = "/vm/quire";
const MOUNT: &str = "mount";

fn steps(pairs: &[Pair]) -> Vec<Step> {
    let step = |name: String, command: String| Step {
        name,
        limit: Duration::from_secs(1200),
        command,
        harness: false,
    };
    let mut steps = vec![step(MOUNT.into(), "mount -t ext4 /dev/vdb /mnt".into())];
    for pair in pairs {
        for way in WAYS {
            let name = pair.name;
            let (how, place, images) = match way.form {
                Form::Objects => ("quire", "objects", "first second"),
                Form::Packed => ("quire", "packed", "first second"),
                Form::Mkfs => ("erofs", "mkfs", "1.erofs 2.erofs"),
            };
            let share = if way.share { "on" } else { "off" };
            let own = pair.images.iter().find(|(form, _)| *form == way.form);
            let own: Vec<_> = own.iter().flat_map(|(_, files)| files).map(String::as_str).collect();
            let command = format!(
                "QUIRE={QUIRE} python3 /mnt/pagecache.py {how} {share} /mnt/{name}/{place} {images} {}",
                own.join(" ")
            );
            steps.push(step(format!("{name}:{}", way.name.replace(", ", "-")), command));
        }
    }
    steps
}

/// Makes the images of a pair in a folder of the disk, in every form.
fn pair(
    context: &Context<'_>,
    sid: &Sid,
    name: &'static str,
    versions: &[Version; 2],
    disk: &Path,
) -> Result<Pair> {
    let folder = disk.join(name);
    fs::create_dir_all(folder.join("mkfs"))?;
    for form in ["objects", "packed"] {
        for (version, image) in versions.iter().zip(["first", "second"]) {
            let mut quire = Command::new(context.quire);
            quire.arg("--store").arg(folder.join(form)).args(["--quiet", "import", "--form", form]);
            quiet(quire.arg(format!("oci:{}:latest", version.layout.display())).arg(image))?;
        }
    }
    for (version, image) in versions.iter().zip(["1.erofs", "2.erofs"]) {
        let mut mkfs = sid.command("mkfs.erofs")?;
        mkfs.args(["--quiet", "--xattr-inode-digest=erofs.fingerprint.v1"]);
        quiet(mkfs.arg(folder.join("mkfs").join(image)).arg(&version.tree))?;
    }
    let mut contents = [BTreeSet::new(), BTreeSet::new()];
    for (version, contents) in versions.iter().zip(&mut contents) {
        contents_below(&version.tree, contents)?;
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
    Ok(Pair {
        name,
        versions: [0, 1].map(|at: usize| versions[at].version.clone()),
        each: [0, 1].map(|at: usize| pages(&contents[at])),
        both: pages(&(&contents[0] | &contents[1])),
        here: here(context, &folder.join("objects"))?,
        images: [
            (Form::Objects, files("objects")?),
            (Form::Packed, files("packed")?),
            (Form::Mkfs, files("mkfs")?),
        ],
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

fn about(pairs: &[Pair], release: &str) -> String {
    let versions = pairs.iter().map(|it| {
        let [first, second] = &it.versions;
        format!("{} {first} and {second}", it.name)
    });
    format!(
        "What the page cache has when all files of two images have been read that are a minor version apart: Debian with a \
         package, from the release and from its security updates ({}). In a virtual machine with Linux {release} and one \
         processor; `Cached` and `Buffers` of /proc/meminfo, from dropped caches on. *Apart* is each mount for itself, *shared* is \
         one domain for both. `objects` are composefs images, whose data is in files of the store; `packed` images were imported into one \
         store; `mkfs.erofs` 1.9 with `--xattr-inode-digest` made an image from each tree, mounted with `directio`, as \
         `packed` is. The bound is what no sharing of whole files goes below: each content of both trees once (by SHA-256), in whole pages, and \
         no metadata.",
        versions.collect::<Vec<_>>().join(", ")
    )
}

fn tables(rows: &[(&Pair, &[Measured])]) -> Vec<Sizes> {
    let names = || WAYS.iter().map(|it| it.name);
    let values = |of: fn(&Measured) -> u64| {
        let row = move |row: &[Measured]| row.iter().map(of).collect::<Vec<_>>();
        rows.iter().map(|(pair, it)| (pair.name.to_owned(), row(it))).collect::<Vec<_>>()
    };
    let cache = rows.iter().map(|(pair, row)| {
        let values = row.iter().map(|it| it.cache);
        let values = [pair.each.iter().sum(), pair.both].into_iter().chain(values);
        (pair.name.to_owned(), values.collect())
    });
    let ends = ["each image's bound, added", "bound of both"];
    vec![
        Sizes {
            title: String::from("Page cache after reading all of both images"),
            unit: Unit::Megabytes,
            columns: ends.into_iter().chain(names()).collect(),
            rows: cache.collect(),
        },
        Sizes {
            title: String::from(
                "Of it the images' own pages: metadata, and ends of files where they are kept behind it",
            ),
            unit: Unit::Megabytes,
            columns: names().collect(),
            rows: values(|it| it.images),
        },
        Sizes {
            title: String::from("Slab: inodes, directory entries, and what holds pages"),
            unit: Unit::Megabytes,
            columns: names().collect(),
            rows: values(|it| it.slab),
        },
    ]
}

fn findings(pair: &Pair, row: &[Measured]) -> Vec<String> {
    let of = |name: &str| {
        let at = WAYS.iter().position(|it| it.name == name).expect("one of the ways");
        row[at]
    };
    let percent = |part: u64, whole: u64| {
        // Tenths of a percent.
        let tenths = i64::try_from(part * 1000 / whole.max(1)).unwrap_or(i64::MAX) - 1000;
        format!("{:+.1} %", f64::from(i32::try_from(tenths).unwrap_or(i32::MAX)) / 10.0)
    };
    let line = |ours: &str, apart: &str| {
        let (shared, apart) = (of(ours), of(apart));
        format!(
            "{}: {ours}: {} against apart, {} against the bound ({} without the images' own pages); slab {}",
            pair.name,
            percent(shared.cache, apart.cache),
            percent(shared.cache, pair.both),
            percent(shared.cache.saturating_sub(shared.images), pair.both),
            percent(shared.slab, apart.slab),
        )
    };
    // A kernel that reclaims while others use the machine has taken pages away; then the sum says nothing.
    let here = if pair.here >= of("objects").cache / 10 * 9 {
        let tenths = pair.here / 100_000;
        format!("objects in the host's own kernel: {}.{} MB", tenths / 10, tenths % 10)
    } else {
        String::from("objects in the host's own kernel: NOT MEASURED, it took pages away meanwhile")
    };
    vec![
        format!("{}: {here}", pair.name),
        line("packed, shared", "packed, apart"),
        line("mkfs.erofs, shared", "mkfs.erofs, apart"),
        line("objects", "packed, apart"),
        format!(
            "{}: of the files' pages alone, sharing could save {} at best",
            pair.name,
            percent(pair.both, pair.each.iter().sum())
        ),
    ]
}
