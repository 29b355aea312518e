//! Reads from a lazy mount during a fault, and after it.

use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use super::containers::script;
use super::mounted::{Mounted, mounts};
use super::{Found, Published, Stage, Start};
use crate::Context;
use crate::command::run;
use crate::measure::drop_caches;
use crate::mounts::detach_all;
use crate::pagecache::files_below;
use crate::proxy::{Break, Proxy};
use crate::registry::layers;
use crate::report::{Report, Sizes, Unit};
use crate::samples::{SAMPLES, Sample};

/// Number of files that are read, evenly chosen among those with more than [`SMALL`] bytes.
const FILES: usize = 96;
const SMALL: u64 = 8192;
/// Number of concurrent readers.
const READERS: &str = "12";
/// Timeout of each file's read in seconds, after which the file counts as waiting.
const PATIENCE: &str = "12";
/// Longest time between the end of the fault and correct reads of all files.
const MENDED: Duration = Duration::from_secs(60);

/// A fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outage {
    Way(Break),
    /// The service is killed during the reads.
    Service,
    /// All processes are killed during the reads.
    All,
    /// The service is stopped for three seconds.
    Pause,
    /// The disk of the data folder is full.
    Full,
    /// The service has reached its limit of open files.
    Descriptors,
    /// The data of the previous service has flipped bits.
    Damaged,
    /// The data of the previous service is a copy of its disk that was made during its work.
    PowerCut,
}

const OUTAGES: [(&str, Outage); 14] = [
    ("nothing", Outage::Way(Break::Nothing)),
    ("the registry is gone", Outage::Way(Break::Gone)),
    ("the registry is silent", Outage::Way(Break::Silent)),
    ("each request gets 503", Outage::Way(Break::Refused)),
    ("answers end in their midst", Outage::Way(Break::Cut)),
    ("data has wrong bits", Outage::Way(Break::Flipped)),
    ("ranges are not obeyed", Outage::Way(Break::Whole)),
    ("the service stands still for 3 s", Outage::Pause),
    ("the service is killed", Outage::Service),
    ("all its processes are killed", Outage::All),
    ("the disk is full", Outage::Full),
    ("16 open files at the most", Outage::Descriptors),
    ("its data has wrong bits after an end", Outage::Damaged),
    ("the power is cut", Outage::PowerCut),
];

const COLUMNS: [&str; 8] = [
    "right",
    "I/O error",
    "wrong bytes",
    "still waiting",
    "mended: right",
    "I/O error ",
    "wrong bytes ",
    "still waiting ",
];

/// Number of files by outcome.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Reads {
    right: u64,
    errors: u64,
    wrong: u64,
    waiting: u64,
}

pub(crate) fn outages(context: &Context<'_>) -> Result<Report> {
    let mut found = Found::default();
    let stage = Stage::new(context, &mut found)?;
    let sample = SAMPLES.last().context("there are samples")?;
    let published = stage.publish(sample, &[])?;
    let Published { layout, daemon, containers, .. } = &published;
    let truth = Truth::unpack(context.work, layout)?;
    let all = mounts(&stage, &published);
    let root = containers.place().join("root");
    let mut sizes = Vec::new();
    for mounted in &all {
        let mut rows = Vec::new();
        for (title, outage) in OUTAGES {
            if !context.wants(title) {
                continue;
            }
            println!("{}: {title}", mounted.name);
            let suffered = mounted.suffer(&stage, sample, &daemon.host, &truth, &root, outage);
            let (during, after) = match suffered {
                // A failure of a third-party service does not end the bench, which takes half an hour.
                Err(error) if !mounted.name.starts_with("quire") => {
                    found.findings.push(format!("{}, *{title}*: {error:#}", mounted.name));
                    detach_all(context.work)?;
                    continue;
                }
                suffered => suffered?,
            };
            println!("{during:?}, then {after:?}");
            let of = |it: Reads| [it.right, it.errors, it.wrong, it.waiting];
            rows.push((title.to_owned(), [of(during), of(after)].concat()));
        }
        sizes.push(Sizes::new(mounted.name, Unit::Times, COLUMNS, rows));
    }
    Ok(Report {
        name: "outages",
        about: format!(
            "{} files of the image `{}` are read from a lazy mount that has fetched nothing yet, {READERS} at once, \
             while something is broken, and compared with the same files as GNU tar unpacks them. A file counts as \
             *still waiting* if it is not read within {PATIENCE} s; its reader is killed then. Then all is mended, \
             caches are dropped, and all files are read again, several times if need be, for up to {} s: the last \
             count is shown. No service is started again by hand. The processes that are killed die while the files \
             are read.\n\n\
             The full disk is a separate ext4 that holds all data; the file that fills it is removed \
             afterwards. Wrong bits: the files are read once, the service ends, a bit of each 16 KiB of its data is \
             flipped, and another service begins. The power is cut: while the files are read, the ext4's own disk is \
             copied, and another service begins with the copy. Later writes may be on it without earlier ones. A \
             test shows the cost of an index with wrong contents: `an_index_that_lies_costs_errors…` of `serve`.",
            truth.files.len(),
            sample.name,
            MENDED.as_secs(),
        ),
        sizes,
        findings: found.findings,
        ..Report::default()
    })
}

impl Mounted<'_> {
    fn suffer(
        &self,
        stage: &Stage<'_>,
        sample: &Sample,
        server: &str,
        truth: &Truth,
        root: &Path,
        outage: Outage,
    ) -> Result<(Reads, Reads)> {
        let proxy = Proxy::to(server)?;
        let start = Start { sample, host: &proxy.host, certificate: None };
        let disk = match outage {
            Outage::Full | Outage::PowerCut => Some(Disk::make(stage.context.work)?),
            _ => None,
        };
        self.mount_with(&start, &|data| disk.as_ref().map_or(Ok(()), |it| it.mount(data)))?;
        let mut processes = self.processes()?;
        let mut service = processes[0];
        let place = root.parent().context("it has a parent")?;
        match outage {
            Outage::Way(how) => proxy.set(how),
            Outage::Full => fill(&self.way.data())?,
            Outage::Descriptors => limit(service, "16:")?,
            Outage::Damaged | Outage::PowerCut => {
                let reading = truth.begin(root)?;
                match &disk {
                    None => drop(truth.end(reading)?),
                    Some(disk) => {
                        thread::sleep(Duration::from_millis(500));
                        disk.cut()?;
                        truth.end(reading)?;
                    }
                }
                self.end(place, false)?;
                match &disk {
                    None => flip(&self.way.data())?,
                    Some(disk) => disk.mount(&self.way.data())?,
                }
                self.way.again(&start)?;
                processes = self.processes()?;
                service = processes[0];
            }
            _ => {}
        }
        drop_caches()?;
        let reading = truth.begin(root)?;
        thread::sleep(Duration::from_millis(100));
        match outage {
            Outage::Service => kill_process(service, Signal::KILL)?,
            Outage::All => {
                // All are stopped first, so that none of them can start a new process before it is killed.
                for signal in [Signal::STOP, Signal::KILL] {
                    processes.iter().try_for_each(|it| kill_process(*it, signal))?;
                }
            }
            Outage::Pause => {
                kill_process(service, Signal::STOP)?;
                thread::sleep(Duration::from_secs(3));
                kill_process(service, Signal::CONT)?;
            }
            _ => {}
        }
        let during = truth.end(reading)?;
        proxy.set(Break::Nothing);
        match outage {
            Outage::Full => rig::cache::remove(&self.way.data().join(FILLER))?,
            // If the service has exited, its successor does not have this limit.
            Outage::Descriptors => drop(limit(service, "1024:")),
            _ => {}
        }
        let mended = Instant::now();
        let after = loop {
            drop_caches()?;
            let after = truth.end(truth.begin(root)?)?;
            if after.right == truth.files.len() as u64 || mended.elapsed() > MENDED {
                break after;
            }
            thread::sleep(Duration::from_secs(1));
        };
        // A service that cannot open files may have exited.
        let may_be_dead = matches!(outage, Outage::Service | Outage::All | Outage::Descriptors);
        self.end(place, may_be_dead)?;
        Ok((during, after))
    }
}

/// Name of the file that fills the disk.
const FILLER: &str = "filler";

fn fill(data: &Path) -> Result<()> {
    rustix::fs::sync();
    let filler = File::create(data.join(FILLER))?;
    let mut step = 64 << 20;
    let mut length = 0;
    while step >= 4096 {
        match rustix::fs::fallocate(&filler, rustix::fs::FallocateFlags::empty(), length, step) {
            Ok(()) => length += step,
            Err(_full) => step /= 2,
        }
    }
    Ok(())
}

/// Sets the soft limit of open files, because root without `CAP_SYS_RESOURCE` cannot raise the hard limit again.
fn limit(process: Pid, limits: &str) -> Result<()> {
    let process = process.as_raw_nonzero().to_string();
    run!("prlimit --pid={process} --nofile={limits}").map(drop)
}

/// Flips a bit of each 16 KiB of data. Files with a dot in their names are skipped, because they record which data is
/// downloaded.
fn flip(folder: &Path) -> Result<()> {
    for file in files_below(folder)? {
        let name = file.file_name().unwrap_or_default();
        let is_data =
            file.components().any(|it| IS_DATA.iter().any(|name| it.as_os_str() == *name));
        if !is_data || name.as_bytes().contains(&b'.') {
            continue;
        }
        let file = File::options().read(true).write(true).open(file)?;
        let mut byte = [0];
        for at in (100..file.metadata()?.len()).step_by(16 << 10) {
            file.read_exact_at(&mut byte, at)?;
            byte[0] ^= 0x10;
            file.write_all_at(&byte, at)?;
        }
    }
    rustix::fs::sync();
    Ok(())
}

/// Names of the data folders of Quire, Nydus and stargz.
const IS_DATA: [&str; 3] = ["lazy", "cache", "service"];

/// A small ext4 file system in a file.
struct Disk {
    file: PathBuf,
    copy: PathBuf,
}

impl Disk {
    fn make(work: &Path) -> Result<Self> {
        let [file, copy] = ["disk", "disk-cut"].map(|it| work.join(it));
        rig::cache::remove(&copy)?;
        File::create(&file)?.set_len(512 << 20)?;
        run!("mkfs.ext4 -q -F -m 0 {file}")?;
        Ok(Self { file, copy })
    }

    /// Mounts the disk, or the copy that [`Disk::cut`] made of it.
    fn mount(&self, target: &Path) -> Result<()> {
        fs::create_dir_all(target)?;
        let file = if self.copy.exists() { &self.copy } else { &self.file };
        run!("mount -o loop {file} {target}")?;
        // A store can only be created in an empty folder.
        rig::cache::remove(&target.join("lost+found"))
    }

    /// Copies the present contents of the disk.
    fn cut(&self) -> Result<()> {
        {
            let Self { file, copy } = self;
            run!("cp --sparse=always {file} {copy}").map(drop)
        }
    }
}

/// The expected contents of the files.
struct Truth {
    folder: PathBuf,
    files: Vec<Vec<u8>>,
    /// A file with their names, each terminated by a NUL.
    list: PathBuf,
}

/// $1 folder of the correct files, $2 mount point, $3 list of names, $4 number of readers, $5 timeout in seconds.
const READ: &str = r#"
xargs -0 -a "$3" -n 1 -P "$4" sh -c 'timeout -s KILL "$3" cmp -s "$1/$4" "$2/$4"; echo $?' sh "$1" "$2" "$5" 2> /dev/null
"#;

impl Truth {
    fn unpack(work: &Path, layout: &Path) -> Result<Self> {
        let folder = work.join("truth");
        fs::create_dir(&folder)?;
        for blob in layers(layout)? {
            run!("tar --extract --gzip --numeric-owner --file {blob} --directory {folder}")?;
        }
        let (size, names) = (format!("+{SMALL}c"), "%P\\n");
        let said = run!("find {folder} -type f -size {size} -printf {names}")?;
        let mut all: Vec<_> = said.lines().map(|it| it.as_bytes().to_vec()).collect();
        all.sort();
        if all.len() < FILES {
            bail!("the image has {} files", all.len());
        }
        let files: Vec<_> = (0..FILES).map(|it| all[it * all.len() / FILES].clone()).collect();
        let list = work.join("files");
        fs::write(&list, [files.join(&0), vec![0]].concat())?;
        Ok(Self { folder, files, list })
    }

    fn begin(&self, root: &Path) -> Result<Child> {
        let words = [self.folder.as_os_str(), root.as_os_str(), self.list.as_os_str()];
        let mut command =
            script(READ, &[words[0], words[1], words[2], READERS.as_ref(), PATIENCE.as_ref()]);
        Ok(command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?)
    }

    fn end(&self, reading: Child) -> Result<Reads> {
        let said = reading.wait_with_output()?.stdout;
        let mut reads = Reads::default();
        for line in String::from_utf8_lossy(&said).lines() {
            // Exit codes of cmp(1) and timeout(1).
            let counter = match line {
                "0" => &mut reads.right,
                "1" => &mut reads.wrong,
                "2" => &mut reads.errors,
                "137" => &mut reads.waiting,
                other => bail!("cmp ended with {other}"),
            };
            *counter += 1;
        }
        if reads.right + reads.wrong + reads.errors + reads.waiting != self.files.len() as u64 {
            bail!("not all files were read: {reads:?}");
        }
        Ok(reads)
    }
}
