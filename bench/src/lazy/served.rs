//! Costs of the service of lazy mounts: for each request, for each mount, and when it dies or is replaced.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rig::inputs::layer::{self, LayerFile, Mtime};
use rig::inputs::layout;
use rig::random::Random;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Advice, fadvise};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use super::mounted::{Mounted, QUIRE, mounts};
use super::quire::{complete as wait_complete, quire, serve};
use super::{Found, Published, Stage, Start};
use crate::command::{cmd, more, run};
use crate::density::percentile;
use crate::measure::{Contestant, Rules, drop_caches, nanoseconds};
use crate::report::{Report, Sizes, Table, Unit};
use crate::samples::SAMPLES;
use crate::service::{Counted, Service, processes};
use crate::{Context, registry};
use rig::process::quiet;

/// Reads most of the image, but not all of it, so that no device is complete.
const READ: &str = r#"find "$1/usr/lib" "$1/usr/share" -xdev -type f -exec cat {} + > /dev/null"#;
const BYTES: &str = r#"find "$1/usr/lib" "$1/usr/share" -xdev -type f -printf '%s\n' | awk '{s += $1} END {print s}'"#;
/// Number of repeated reads.
const ROUNDS: usize = 3;
const IMAGES: usize = 20;
const MOUNTS: usize = 200;
/// Size of the layer that each image has for itself, in bytes.
const OWN: usize = 8 << 20;
const KILLS: usize = 100;
const REPLACEMENTS: usize = 20;
/// Size of each read while the service dies or is replaced, in bytes.
const PAGE: usize = 4096;

pub(crate) fn served(context: &Context<'_>) -> Result<Report> {
    let mut found = Found::default();
    let stage = Stage::new(context, &mut found)?;
    let sample = &SAMPLES[0];
    let published = stage.publish(sample, &[])?;
    let start = Start { sample, host: &published.daemon.host, certificate: None };
    let place = published.containers.place();
    let root = place.join("root");
    let mut filled = Vec::new();
    for mounted in &mounts(&stage, &published) {
        println!("{}: present data is read again", mounted.name);
        mounted.mount(&start)?;
        let read = mounted_root(mounted, &root);
        filled.push((mounted.name, Filled::measure(mounted, &read, context.runs.min(ROUNDS))?));
        if mounted.name == QUIRE {
            println!("the service dies, and is replaced");
            let deaths = deaths(mounted, &read, &mut found)?;
            let pauses = replacements(&stage, &read, &mut found)?;
            found.waits.push((format!("{KILLS} times killed"), deaths));
            found.waits.push((format!("{REPLACEMENTS} times replaced"), pauses));
        }
        mounted.end(&place, true)?;
    }
    context.set_aside("store")?;
    let many = many(&stage, &published)?;
    let (table, requests) = complete(&stage, &published)?;
    Ok(Report {
        name: "served",
        about: about(sample.name),
        tables: vec![table],
        sizes: sizes(&filled, &found, &many, requests),
        findings: found.findings,
    })
}

fn about(sample: &str) -> String {
    format!(
        "**Reads of present data.** The image `{sample}` is mounted lazily, and all files below `/usr/lib` and \
         `/usr/share` are read once, so that they are present. Then caches are dropped and they are read again, \
         {ROUNDS} times. Processor time is that of all threads of the service's processes, as the kernel's scheduler \
         counts it. A request is a call of the service that writes: it has nothing to fetch then, and answers each \
         request of FUSE, or each event of fanotify, by one such call. Quire compares each page with a tag before it \
         gives bytes of it. The registry is on loopback; nothing comes from there. How many \
         requests one start has without a service, by the layout of the image, is in [events](events.md).\n\n\
         **One start.** `postgres --version` in a chroot of the mount, all of it here, after \
         dropping caches.\n\n\
         **Death.** The service is killed by SIGKILL, {KILLS} times. As soon as it is gone, a \
         page is read that is present and in no cache. The time is that from the signal to the page. An I/O error \
         counts as no answer: the page is read again.\n\n\
         **Replacement.** One thread reads such pages without a \
         pause, while `quire serve --lazy --replace` takes over, {REPLACEMENTS} times. The time is the longest read \
         of each.\n\n\
         **Many mounts.** {IMAGES} images, which have a base layer in common and each one of {} MB for \
         itself, are mounted {MOUNTS} times in all, by one service, and a file of each mount is read. Memory is Pss \
         of the process after all mounts, less that before the first.\n\n\
         **A complete image** was completed by \
         `quire mount --lazy --complete`. Beside it is `quire mount` of a store that pulled it whole. All files are \
         read, with cold caches.",
        OWN >> 20
    )
}

/// Folder that files are read from: a third-party service's mount is below the root of containers.
fn mounted_root(mounted: &Mounted<'_>, root: &Path) -> PathBuf {
    match mounted.name {
        QUIRE => root.to_owned(),
        _ => mounted.way.tree(),
    }
}

/// Costs of reads of downloaded data.
#[derive(Debug, Clone, Copy)]
struct Filled {
    /// Bytes read in a round.
    bytes: u64,
    /// Processor time of the median round.
    cpu: Duration,
    requests: u64,
    /// Requests of one start.
    start: u64,
    /// Memory of all processes after the reads, in bytes.
    memory: u64,
    descriptors: u64,
}

impl Filled {
    fn measure(mounted: &Mounted<'_>, root: &Path, rounds: usize) -> Result<Self> {
        let shell = |script: &str| cmd!("sh -euc {script} sh {root}");
        let bytes = quiet(&mut shell(BYTES))?.trim().parse().context("find counts no bytes")?;
        quiet(&mut shell(READ))?;
        let mut read = Vec::new();
        for _ in 0..rounds {
            rustix::fs::sync();
            drop_caches()?;
            read.push(spent(mounted, &mut shell(READ))?);
        }
        read.sort_by_key(|it| it.cpu);
        let median = read[read.len() / 2];
        const START: &str = r#"exec chroot "$1" /usr/lib/postgresql/15/bin/postgres --version"#;
        quiet(&mut shell(START))?;
        rustix::fs::sync();
        drop_caches()?;
        let start = spent(mounted, &mut shell(START))?;
        let now = Counted::of(&mounted.processes()?)?;
        Ok(Self {
            bytes,
            cpu: median.cpu,
            requests: median.writes,
            start: start.writes,
            memory: now.memory,
            descriptors: now.descriptors,
        })
    }
}

/// Costs of a command for the service.
fn spent(mounted: &Mounted<'_>, command: &mut Command) -> Result<Counted> {
    let processes = mounted.processes()?;
    let before = Counted::of(&processes)?;
    quiet(command)?;
    Ok(Counted::of(&processes)?.since(before))
}

/// Uncached pages of a large file in a lazy mount, all of which is downloaded.
struct Pages {
    file: File,
    count: u64,
    next: u64,
}

impl Pages {
    fn open(root: &Path) -> Result<Self> {
        let all = run!("find {root}/usr/lib -xdev -type f -printf", ..[r"%s %p\n"])?;
        let sized = all.lines().filter_map(|it| it.split_once(' '));
        let sized = sized.filter_map(|(size, path)| Some((size.parse::<u64>().ok()?, path)));
        let (bytes, path) = sized.max().context("the image has no files")?;
        run!("cat {path}")?;
        Ok(Self { file: File::open(path)?, count: bytes / PAGE as u64, next: 0 })
    }

    /// Reads an uncached page.
    fn read(&mut self) -> Result<(), std::io::Error> {
        fadvise(&self.file, 0, None, Advice::DontNeed)?;
        // The page is far from the last one, so that it was not read ahead.
        self.next = (self.next + 997) % self.count;
        self.file.read_exact_at(&mut [0; PAGE], self.next * PAGE as u64)
    }
}

fn ended(process: &OwnedFd) -> Result<()> {
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    poll(&mut fds, None)?;
    Ok(())
}

/// Times from the death of the service to the next response.
fn deaths(mounted: &Mounted<'_>, root: &Path, found: &mut Found) -> Result<Vec<Duration>> {
    let mut pages = Pages::open(root)?;
    let (mut times, mut errors) = (Vec::new(), 0);
    for _ in 0..KILLS {
        pages.read()?;
        let service = mounted.processes()?[0];
        let process = pidfd_open(service, PidfdFlags::empty())?;
        let killed = Instant::now();
        kill_process(service, Signal::KILL)?;
        ended(&process)?;
        while let Err(error) = pages.read() {
            errors += 1;
            if killed.elapsed() > Duration::from_secs(60) {
                return Err(error).context("no answer after the death of the service");
            }
        }
        times.push(killed.elapsed());
        // Waits until the new service is ready to be killed.
        thread::sleep(Duration::from_millis(100));
    }
    found
        .findings
        .push(format!("{errors} reads got an I/O error after {KILLS} deaths of the service"));
    Ok(times)
}

/// The longest read of each replacement of the service.
fn replacements(stage: &Stage<'_>, root: &Path, found: &mut Found) -> Result<Vec<Duration>> {
    let mut pages = Pages::open(root)?;
    let (longest, is_over, errors) =
        (Mutex::new(Duration::ZERO), AtomicBool::new(false), Mutex::new(0));
    let lock = |of: &Mutex<Duration>| {
        let mut longest = of.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        std::mem::take(&mut *longest)
    };
    let mut times = Vec::new();
    let mut service: Option<Service> = None;
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let begun = Instant::now();
                if pages.read().is_err()
                    && let Ok(mut errors) = errors.lock()
                {
                    *errors += 1;
                }
                let time = begun.elapsed();
                if let Ok(mut longest) = longest.lock() {
                    *longest = (*longest).max(time);
                }
            }
        });
        let replaced: Result<()> = (0..REPLACEMENTS).try_for_each(|_| {
            lock(&longest);
            let next = serve(stage, &["--replace"])?;
            thread::sleep(Duration::from_millis(200));
            times.push(lock(&longest));
            service = Some(next);
            Ok(())
        });
        is_over.store(true, Ordering::Relaxed);
        replaced
    })?;
    let errors = errors.into_inner().unwrap_or(0);
    found.findings.push(format!("{errors} reads got an I/O error in {REPLACEMENTS} replacements"));
    Ok(times)
}

/// Costs of many mounts to the service and the keeper.
struct Many {
    /// Memory in bytes and file descriptors of each process, for all mounts.
    processes: Vec<(&'static str, Counted)>,
}

fn many(stage: &Stage<'_>, published: &Published<'_>) -> Result<Many> {
    let context = stage.context;
    println!("{MOUNTS} mounts of {IMAGES} images");
    let images = images(stage, published)?;
    let service = serve(stage, &[""; 0])?;
    let work = context.work.join("mounts");
    for image in &images {
        quiet(&mut more!(quire(stage, "store"), "pull --lazy=require {image}"))?;
    }
    let counted = || -> Result<Vec<Counted>> {
        let all = processes(context.quire, context.work)?;
        all.into_iter().map(|it| Counted::of(&[it])).collect()
    };
    let before = counted()?;
    let targets: Vec<_> = (0..MOUNTS).map(|it| work.join(it.to_string())).collect();
    for (number, target) in targets.iter().enumerate() {
        fs::create_dir_all(target)?;
        quiet(&mut more!(
            quire(stage, "store"),
            "mount --lazy --prefetch none",
            &images[number % IMAGES],
            "{target}"
        ))?;
        fs::read(target.join("own/0"))?;
    }
    let after = counted()?;
    for target in &targets {
        quiet(quire(stage, "store").arg("umount").arg(target))?;
    }
    drop(service);
    context.set_aside("store")?;
    if before.len() != 2 || after.len() != 2 {
        bail!("a service and a keeper are two processes, not {} and {}", before.len(), after.len());
    }
    let both = after.into_iter().zip(before).map(|(after, before)| after.since(before));
    Ok(Many { processes: ["service", "keeper"].into_iter().zip(both).collect() })
}

/// Pushes the images to the registry, each with its index.
fn images(stage: &Stage<'_>, published: &Published<'_>) -> Result<Vec<String>> {
    let context = stage.context;
    let base = base(&published.layout)?;
    let mut random = Random::new(1);
    let mut images = Vec::new();
    for number in 0..IMAGES {
        let folder = context.work.join("own");
        fs::create_dir_all(folder.join("root/own"))?;
        for file in 0..8 {
            // The contents compress like text.
            let words = random.bytes(OWN / 8 / 4);
            let text: String = words.iter().map(|it| format!("{it:03} ")).collect();
            fs::write(folder.join("root/own").join(file.to_string()), text)?;
        }
        let layout = folder.join("layout");
        fs::create_dir_all(&layout)?;
        let own = layer::write(&folder.join("root"), &folder, Mtime::WholeSeconds)?;
        let below = LayerFile {
            file: base.file.clone(),
            digest: base.digest.clone(),
            diff_id: base.diff_id.clone(),
            ..base
        };
        layout::write(&layout, &layout::Config::default(), &[below, own])?;
        let image = format!("{}/many:{number}", published.daemon.host);
        registry::copy(&layout, &image)?;
        rig::cache::remove(&folder)?;
        registry::publish_index(context, &image)?;
        images.push(image);
    }
    context.set_aside("maker")?;
    Ok(images)
}

/// The lowest layer of a layout.
fn base(layout: &Path) -> Result<LayerFile> {
    let manifest = registry::manifest(layout)?;
    let config = registry::document(layout, &manifest["config"])?;
    let hex = |text: &serde_json::Value| {
        let hex = text.as_str().and_then(|it| it.strip_prefix("sha256:"));
        hex.map(str::to_owned).context("a layer has a digest")
    };
    let digest = hex(&manifest["layers"][0]["digest"])?;
    let diff_id = hex(&config["rootfs"]["diff_ids"][0])?;
    let file = layout.join("blobs/sha256").join(&digest);
    Ok(LayerFile { file, digest, diff_id, media: layout::GZIP })
}

const READ_ALL: &str = r#"find "$1" -xdev -type f -exec cat {} + > /dev/null"#;

/// Compares a completed lazy image with one that was never lazy, and counts the requests of the lazy image's reads.
fn complete(stage: &Stage<'_>, published: &Published<'_>) -> Result<(Table, u64)> {
    let context = stage.context;
    println!("a complete image");
    let image = format!("{}/many:0", published.daemon.host);
    let roots = ["complete", "whole"].map(|it| context.work.join(it));
    roots.iter().try_for_each(fs::create_dir_all)?;
    let service = serve(stage, &[""; 0])?;
    quiet(quire(stage, "store").args(["pull", "--lazy=require"]).arg(&image))?;
    let mut mount = more!(quire(stage, "store"), "mount --lazy --prefetch none --complete {image}");
    quiet(mount.arg(&roots[0]))?;
    wait_complete(stage, &image, Duration::from_millis(50))?;
    let [one, two] = &roots;
    quiet(&mut more!(quire(stage, "whole-store"), "pull --form tar {image}"))?;
    quiet(&mut more!(quire(stage, "whole-store"), "mount {image} {two}"))?;
    let read = |root: &Path| cmd!("sh -euc {READ_ALL} sh {root}");
    let contestants = vec![
        Contestant::new("quire mount --lazy, complete", || read(one)),
        Contestant::new("quire mount", || read(two)),
    ];
    let rules = Rules { cold: true, ..Rules::new(context.runs) };
    let all: Vec<Pid> = processes(context.quire, context.work)?;
    let before = Counted::of(&all)?;
    let table = rules.race("A complete image, everything read cold", contestants)?;
    let requests = Counted::of(&all)?.since(before).writes;
    quiet(&mut more!(quire(stage, "store"), "umount {one}"))?;
    quiet(&mut more!(quire(stage, "whole-store"), "umount {two}"))?;
    drop(service);
    Ok((table, requests))
}

fn sizes(filled: &[(&str, Filled)], found: &Found, many: &Many, requests: u64) -> Vec<Sizes> {
    let rows = |of: &dyn Fn(&Filled) -> Vec<u64>| -> Vec<(String, Vec<u64>)> {
        filled.iter().map(|(name, it)| ((*name).to_owned(), of(it))).collect()
    };
    let cpu = |it: &Filled| {
        let (cpu, megabytes) = (nanoseconds(it.cpu), (it.bytes / 1_000_000).max(1));
        vec![cpu / it.requests.max(1), cpu / megabytes]
    };
    let counts = |it: &Filled| vec![it.requests, it.start];
    let waits = found.waits.iter().map(|(name, times)| {
        let mut times = times.clone();
        times.sort_unstable();
        let of = |percent| nanoseconds(percentile(&times, percent));
        (name.clone(), vec![of(50), of(99), of(100)])
    });
    let each = |of: fn(&Counted) -> u64| -> Vec<u64> {
        many.processes.iter().map(|(_, it)| of(it)).collect()
    };
    let per_mount: Vec<u64> = each(|it| it.memory).iter().map(|it| it / MOUNTS as u64).collect();
    let names: Vec<&'static str> = many.processes.iter().map(|(name, _)| *name).collect();
    let descriptors = each(|it| it.descriptors);
    let (times, kilobytes, megabytes) = (Unit::Times, Unit::Kilobytes, Unit::Megabytes);
    let both = format!("{MOUNTS} mounts of {IMAGES} images");
    vec![
        Sizes::new(
            "Processor time of the service for reads of present data",
            Unit::Microseconds,
            ["a request", "a MB read"],
            rows(&cpu),
        ),
        Sizes::new(
            "Requests to the service for present data",
            times,
            ["all files below /usr/lib and /usr/share", "postgres --version"],
            rows(&counts),
        ),
        Sizes::new(
            "Memory for one mount, then",
            megabytes,
            ["all processes"],
            rows(&|it| vec![it.memory]),
        ),
        Sizes::new(
            "Descriptors for one mount, then",
            times,
            ["all processes"],
            rows(&|it| vec![it.descriptors]),
        ),
        Sizes::new(
            "Until readers go on",
            Unit::Milliseconds,
            ["p50", "p99", "longest"],
            waits.collect(),
        ),
        Sizes::one(
            format!("{both}: memory for each"),
            kilobytes,
            names.clone(),
            "a mount",
            per_mount,
        ),
        Sizes::one(format!("{both}: descriptors for all"), times, names, "all mounts", descriptors),
        Sizes::one(
            "Requests to the service while a complete image is read",
            times,
            ["all runs"],
            "quire",
            vec![requests],
        ),
    ]
}
