//! Handing an image to virtual machines: the time and disk space of `bundle --vm` and of copies, and the page cache of
//! the host and of guests when one and eight guests read all files of one image.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};

use super::command::{cmd, run};
use super::measure::{Contestant, Rules};
use super::pagecache::{files_below, resident};
use super::report::{Report, Sizes, Table, Unit};
use crate::Context;
use rig::process::{is_root, need};
use rig::vm::{Access, Fleet, Server};
use rig::{Skipped, inputs};

const GUESTS: usize = 8;
/// Memory of a guest in MB, which is more than the image, so that a guest keeps all that it caches.
const MEMORY: u32 = 512;

/// Memory in bytes that the host needs: that of the guests and of QEMU, and a copy of the image for each guest. With
/// less, the kernel evicts pages, and ways that cache much seem to cache less.
const AVAILABLE: u64 = 7 << 30;

/// Measurements of one way to give an image to guests.
struct Row {
    name: &'static str,
    /// Size of the files that the guests read from, in bytes.
    files: u64,
    /// The host's page cache of these files, after one guest and after all.
    host: [u64; 2],
    /// Bytes of the files in the image, as a guest adds them up.
    read: u64,
    /// Growth of each guest's page cache, sorted.
    cached: Vec<u64>,
    /// Load average and available memory before the first guest.
    state: String,
}

impl Row {
    fn median(&self) -> u64 {
        self.cached[self.cached.len() / 2]
    }
}

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let (quire, work) = (context.quire, context.work);
    // All of these first, because the last way begins after half an hour.
    if !is_root() {
        bail!(Skipped(String::from("mounts need root")));
    }
    for program in ["qemu-img", "fincore"] {
        need(program)?;
    }
    Server::check()?;
    let available = available()?;
    if available < AVAILABLE {
        bail!(Skipped(format!(
            "{} MB of memory are available, not {}",
            available >> 20,
            AVAILABLE >> 20
        )));
    }
    let layout = inputs::debian_small(context.cache, false)?;
    for form in ["packed", "objects"] {
        run!("{quire} --store {work}/{form} --quiet import --form {form} oci:{layout} a")?;
    }
    // The first one makes the template of the ext4.
    run!("{quire} --store {work}/packed --quiet bundle --vm {work}/kept a")?;
    let table = times(context)?;
    let space = space(context)?;
    let mut rows = Vec::new();
    let mut release = String::new();
    for way in [linked, copied, persistent, shared] {
        let (kernel, row) = way(context)?;
        println!(
            "   {}: host {:?} of {} bytes, guests {:?} of {}",
            row.name, row.host, row.files, row.cached, row.read
        );
        release = kernel;
        rows.push(row);
    }
    let mut sizes = vec![space];
    sizes.extend(self::sizes(&rows));
    let mut findings = table.shares();
    findings.extend(rows.iter().map(finding));
    Ok(Report { name: "machines", about: about(&release), tables: vec![table], sizes, findings })
}

fn about(release: &str) -> String {
    format!(
        "One image for many virtual machines: Debian, 6,900 files, with warm caches. *Handed out* is the time until \
         the new files are on the disk: the file system is synced after each command, because `cp` and `qemu-img` do \
         not sync. The template of the ext4 existed. The disk space is that of new files: hard links take none. \
         *Copies* are those of `quire export`, one for each guest.\n\n\
         Page cache: {GUESTS} guests start one after another in QEMU without KVM, with Linux {release}, one processor \
         and {MEMORY} MB, and with QEMU's default cache mode (writeback). Each reads all files of the image, and stays \
         alive. The host's page cache is that of the files that the guests read from, by fincore(1), after the first \
         guest and after the last, when all guests are alive. For virtiofs, these files are the objects and the image \
         of the mount. A guest's page cache is the growth of `Cached` and `Buffers` in its /proc/meminfo, from dropped \
         caches on, with the names in the cache."
    )
}

/// Bundles and copies, each into a new place.
fn times(context: &Context<'_>) -> Result<Table> {
    let (quire, work) = (context.quire, context.work);
    let bundle = |name: &str, options: &'static [&'static str]| {
        let command = move || {
            cmd!("{quire} --store {work}/packed --quiet bundle --vm {work}/vm", ..options, "a")
        };
        Contestant::new(name, command).before(move || context.set_aside("vm"))
    };
    let export = |name: &str, target: &'static str| {
        let command = move || {
            cmd!(
                "{quire} --store {work}/packed --quiet export a",
                format!("{target}{}/out", work.display())
            )
        };
        Contestant::new(name, command).before(move || context.set_aside("out"))
    };
    let convert = need("qemu-img")?;
    let convert = move || cmd!("{convert} convert -f vmdk -O raw {work}/kept/disk.vmdk {work}/out");
    let copy = move || cmd!("cp -r --reflink=never {work}/kept {work}/vm");
    Rules { sync: Some(work.to_owned()), ..Rules::new(context.runs) }.race(
        "Handed out",
        vec![
            bundle("quire bundle --vm", &[]),
            bundle("quire bundle --vm --writable none", &["--writable", "none"]),
            export("quire export disk:", "disk:"),
            export("quire export erofs:", "erofs:"),
            Contestant::new("qemu-img convert of disk.vmdk", convert)
                .before(move || context.set_aside("out")),
            Contestant::new("cp of the bundle", copy).before(move || context.set_aside("vm")),
        ],
    )
}

/// New disk space of each way.
fn space(context: &Context<'_>) -> Result<Sizes> {
    let (quire, work) = (context.quire, context.work);
    let mut rows = Vec::new();
    for (name, options) in [
        ("quire bundle --vm", &[][..]),
        ("quire bundle --vm --writable none", &["--writable", "none"]),
    ] {
        context.set_aside("vm")?;
        run!("{quire} --store {work}/packed --quiet bundle --vm {work}/vm", ..options, "a")?;
        rows.push((name.to_owned(), vec![new_bytes(&work.join("vm"))?]));
    }
    for target in ["disk", "erofs"] {
        context.set_aside("out")?;
        run!("{quire} --store {work}/packed --quiet export a {target}:{work}/out")?;
        rows.push((format!("quire export {target}:"), vec![new_bytes(&work.join("out"))?]));
    }
    Ok(Sizes::new("New disk space", Unit::Kilobytes, ["allocated"], rows))
}

/// Bytes on disk of a file or of the files in a folder, without those that have another name.
fn new_bytes(path: &Path) -> Result<u64> {
    let files = if path.is_dir() { files_below(path)? } else { vec![path.to_owned()] };
    let stats = files.iter().map(fs::metadata).collect::<Result<Vec<_>, _>>()?;
    Ok(stats.iter().filter(|it| it.nlink() == 1).map(|it| it.blocks() * 512).sum())
}

/// The VMDK of a separate bundle for each guest.
fn linked(context: &Context<'_>) -> Result<(String, Row)> {
    let (quire, work) = (context.quire, context.work);
    let mut drives = Vec::new();
    for number in 0..GUESTS {
        let folder = format!("vm-{number}");
        let told = run!(
            "{quire} --store {work}/packed bundle --json --writable none --vm {work}/{folder} a"
        )?;
        let told: serde_json::Value = serde_json::from_str(&told)?;
        drives.push(told["qemu"][1].as_str().context("the bundle has no VMDK")?.to_owned());
    }
    let all = files_below(&work.join("vm-0"))?;
    let links: Vec<_> =
        all.into_iter().filter(|it| it.metadata().is_ok_and(|it| it.nlink() > 1)).collect();
    let accesses: Vec<_> = drives.iter().map(|it| Access::Disk(it)).collect();
    measure(context, "bundle --vm, VMDK", &links, &accesses)
}

/// A copy for each guest.
fn copied(context: &Context<'_>) -> Result<(String, Row)> {
    let (quire, work) = (context.quire, context.work);
    let files: Vec<_> = (0..GUESTS).map(|it| work.join(format!("copy-{it}.erofs"))).collect();
    for file in &files {
        run!("{quire} --store {work}/packed --quiet export a erofs:{file}")?;
    }
    let drive = |it: &PathBuf| format!("if=virtio,format=raw,read-only=on,file={}", it.display());
    let drives: Vec<_> = files.iter().map(drive).collect();
    let accesses: Vec<_> = drives.iter().map(|it| Access::Disk(it)).collect();
    measure(context, "a copy for each guest", &files, &accesses)
}

/// One export for DAX.
fn persistent(context: &Context<'_>) -> Result<(String, Row)> {
    let (quire, work) = (context.quire, context.work);
    let file = work.join("dax.erofs");
    run!("{quire} --store {work}/packed --quiet export --dax a erofs:{file}")?;
    measure(
        context,
        "export --dax, pmem",
        std::slice::from_ref(&file),
        &[Access::Memory(&file); GUESTS],
    )
}

/// One mount for all guests, each with a virtiofsd.
fn shared(context: &Context<'_>) -> Result<(String, Row)> {
    let (quire, work) = (context.quire, context.work);
    let point = work.join("point");
    fs::create_dir(&point)?;
    run!("{quire} --store {work}/objects --quiet mount a {point}")?;
    let measured = shared_mount(context, &point);
    run!("umount {point}")?;
    measured
}

fn shared_mount(context: &Context<'_>, point: &Path) -> Result<(String, Row)> {
    let sockets: Vec<_> = (0..GUESTS).map(|it| context.work.join(format!("s{it}"))).collect();
    let servers = sockets.iter().map(|it| Server::share(point, it)).collect::<Result<Vec<_>>>()?;
    let mut files = Vec::new();
    for folder in ["objects/objects", "objects/images"] {
        files.extend(files_below(&context.work.join(folder))?);
    }
    let accesses: Vec<_> = sockets.iter().map(|it| Access::Share(it)).collect();
    let measured = measure(context, "mount, virtiofs", &files, &accesses);
    drop(servers);
    measured
}

/// Boots guests one after another, which read all of the image from these files.
fn measure(
    context: &Context<'_>,
    name: &'static str,
    files: &[PathBuf],
    accesses: &[Access<'_>],
) -> Result<(String, Row)> {
    run!("sync --file-system", context.work)?;
    for file in files {
        rustix::fs::fadvise(fs::File::open(file)?, 0, None, rustix::fs::Advice::DontNeed)?;
    }
    let before = resident(files)?;
    let sizes = files.iter().map(|it| Ok(it.metadata()?.len())).collect::<Result<Vec<_>>>()?;
    let sizes = sizes.iter().sum::<u64>();
    ensure!(before < sizes / 100, "{name}: {before} of {sizes} bytes stay in the page cache");
    let load = fs::read_to_string("/proc/loadavg")?;
    let load = load.split(' ').next().unwrap_or_default();
    let state = format!("load average {load}, {} MB of memory available", available()? >> 20);
    let fleet = Fleet::new(context.cache, "newest", accesses[0], MEMORY)?;
    let (mut alive, mut reads, mut first) = (Vec::new(), Vec::new(), None);
    for (number, access) in accesses.iter().enumerate() {
        let (guest, read) = fleet.start(number, *access)?;
        alive.push(guest);
        reads.push(read);
        if first.is_none() {
            first = Some(resident(files)?.saturating_sub(before));
        }
    }
    let last = resident(files)?.saturating_sub(before);
    for (number, guest) in alive.iter_mut().enumerate() {
        ensure!(guest.is_alive()?, "{name}: guest {number} has ended");
    }
    drop(alive);
    let mut cached: Vec<_> = reads.iter().map(|it| it.cached).collect();
    cached.sort_unstable();
    let row = Row {
        name,
        files: sizes,
        host: [first.unwrap_or_default(), last],
        read: reads.iter().map(|it| it.bytes).max().unwrap_or_default(),
        cached,
        state,
    };
    Ok((fleet.release().to_owned(), row))
}

/// Bytes of memory that new programs can use.
fn available() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|it| it.strip_prefix("MemAvailable:"));
    let kilobytes = line.and_then(|it| it.split_whitespace().next()?.parse::<u64>().ok());
    Ok(kilobytes.context("/proc/meminfo has no MemAvailable")? << 10)
}

fn sizes(rows: &[Row]) -> Vec<Sizes> {
    let host = rows.iter().map(|it| (it.name.to_owned(), vec![it.files, it.host[0], it.host[1]]));
    let guest = rows.iter().map(|it| {
        let [least, most] = [it.cached[0], it.cached[it.cached.len() - 1]];
        (it.name.to_owned(), vec![it.read, least, it.median(), most])
    });
    vec![
        Sizes::new(
            "The host's page cache",
            Unit::Megabytes,
            ["all files of the guests", "one guest", "eight guests"],
            host.collect(),
        ),
        Sizes::new(
            "A guest's page cache",
            Unit::Megabytes,
            ["bytes read", "least", "median", "most"],
            guest.collect(),
        ),
    ]
}

fn finding(row: &Row) -> String {
    let hundredths = |part: u64, whole: u64| {
        let hundredths = part * 100 / whole.max(1);
        format!("{}.{:02}", hundredths / 100, hundredths % 100)
    };
    format!(
        "{}: the host's page cache for {GUESTS} guests is {} of that for one; the median of the guests' own is {} of \
         the bytes read; before: {}",
        row.name,
        hundredths(row.host[1], row.host[0]),
        hundredths(row.median(), row.read),
        row.state
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_of_one_guest_and_of_the_bytes_read() {
        let row = Row {
            name: "way",
            files: 1000,
            host: [200, 1610],
            read: 4000,
            cached: vec![10, 90, 100, 110, 5000],
            state: "load average 0.50".to_owned(),
        };
        assert_eq!(
            finding(&row),
            "way: the host's page cache for 8 guests is 8.05 of that for one; the median of the guests' own is 0.02 \
             of the bytes read; before: load average 0.50"
        );
    }
}
