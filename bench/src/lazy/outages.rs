//! What readers of a lazy mount get while something is broken, and after that.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use super::broken::{Break, BrokenProxy};
use super::containers::{Containers, layers, script, unmount_all};
use super::nydus::Nydus;
use super::samples::{SAMPLES, Sample};
use super::stargz::Stargz;
use super::{Found, Stage, Start, Way, nydus, quire, stargz};
use crate::report::{Report, Sizes, Unit};
use crate::{Context, registry};
use rig::process::{find, quiet};
use rig::{Skipped, tools};
use testing::daemon::{Daemon, PROGRAM};

/// So many files are read, evenly chosen among those with more than [`SMALL`] bytes.
const FILES: usize = 96;
const SMALL: u64 = 8192;
/// So many at once.
const READERS: &str = "12";
/// A file that is not read by then counts as one that is waited for, in seconds.
const PATIENCE: &str = "12";
/// How long files may take to be right again after all is mended.
const MENDED: Duration = Duration::from_secs(60);

/// What breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outage {
    Way(Break),
    /// The service is killed while files are read.
    Service,
    /// All processes are.
    All,
    /// The service stands still for some seconds.
    Pause,
}

const OUTAGES: [(&str, Outage); 10] = [
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

/// How many files were so.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Reads {
    right: u64,
    errors: u64,
    wrong: u64,
    waiting: u64,
}

/// A lazy mount of an image.
struct Mounted<'a> {
    name: &'static str,
    /// What its service is executed as.
    program: PathBuf,
    way: Box<dyn Way + 'a>,
    /// How many of the way's commands mount the image.
    commands: usize,
}

pub(in crate::lazy) fn outages(context: &Context<'_>) -> Result<Report> {
    let runtime = find("runc").or_else(|| find("crun"));
    let runtime = runtime.ok_or_else(|| Skipped("neither runc nor crun is installed".into()))?;
    let mut found = Found::default();
    let nydus = found.rival("Nydus v3", tools::nydus(context.cache))?;
    let stargz = found.rival("stargz-snapshotter", tools::stargz(context.cache))?;
    let stage = Stage { context, runtime, nydus, stargz };
    let sample = SAMPLES.last().context("there are samples")?;
    let layout = sample.layout(context.cache)?;
    let daemon = Daemon::start(context.work, "").context("cannot start docker-registry")?;
    let daemon = daemon.ok_or_else(|| Skipped(format!("{PROGRAM} is not installed")))?;
    let image = format!("{}/{}:1", daemon.host, sample.name);
    registry::copy(&layout, &image)?;
    let maker = context.work.join("maker");
    quire::publish(&stage, sample, &image, &maker)?;
    let containers = Containers::learn(&stage, &maker, &image, sample.programs)?;
    context.set_aside("maker")?;
    let near = Start { sample, host: &daemon.host };
    let nydus = stage.nydus.clone();
    let nydus = nydus.map(|it| {
        Ok::<_, anyhow::Error>((
            it.clone(),
            nydus::publish(&stage, &containers, &near, &layout, it)?,
        ))
    });
    let nydus = nydus.transpose()?;
    let stargz = stage.stargz.clone();
    let stargz = stargz.map(|it| {
        Ok::<_, anyhow::Error>((
            it.clone(),
            stargz::publish(&stage, &containers, &near, &layout, it)?,
        ))
    });
    let stargz = stargz.transpose()?;
    let truth = Truth::unpack(context.work, &layout)?;
    let mut all = vec![Mounted {
        name: "quire",
        program: context.quire.to_owned(),
        way: Box::new(quire::LazyMount::new(&stage, &containers)),
        commands: 2,
    }];
    if let Some((program, converted)) = &nydus {
        let (name, containers) = ("Nydus v3, fanotify", &containers);
        let way = Box::new(Nydus { name, containers, converted, is_optimized: false });
        all.push(Mounted { name, program: program.clone(), way, commands: 2 });
    }
    if let Some((program, converted)) = &stargz {
        let name = "stargz";
        let way = Box::new(Stargz::new(name, &containers, converted, false));
        all.push(Mounted { name, program: program.clone(), way, commands: 2 });
    }
    let root = containers.place().join("root");
    let mut sizes = Vec::new();
    for mounted in &all {
        let mut rows = Vec::new();
        for (title, outage) in OUTAGES {
            if !context.wants(title) {
                continue;
            }
            println!("{}: {title}", mounted.name);
            let (during, after) =
                mounted.suffer(&stage, sample, &daemon.host, &truth, &root, outage)?;
            println!("{during:?}, then {after:?}");
            let of = |it: Reads| [it.right, it.errors, it.wrong, it.waiting];
            rows.push((title.to_owned(), [of(during), of(after)].concat()));
        }
        let (title, columns) = (mounted.name.to_owned(), COLUMNS.to_vec());
        sizes.push(Sizes { title, unit: Unit::Times, columns, rows });
    }
    Ok(Report {
        name: "outages",
        about: format!(
            "{} files of the image `{}` are read from a lazy mount that has fetched nothing yet, {READERS} at once, while \
             something is broken, and compared with the same files as GNU tar unpacks them. A file counts as *still waiting* \
             if it is not read within {PATIENCE} s; its reader is killed then. Then all is mended, caches are dropped, and all \
             files are read again, several times if need be, for up to {} s: the last count is shown. No service is \
             started again by hand. The processes that are killed die while the files are read.",
            truth.files.len(),
            sample.name,
            MENDED.as_secs(),
        ),
        tables: Vec::new(),
        sizes,
        findings: found.findings,
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
        let proxy = BrokenProxy::to(server)?;
        let start = Start { sample, host: &proxy.host };
        self.way.before(&start)?;
        let program = &sample.programs[0];
        for command in self.way.run(&start, program)?.iter_mut().take(self.commands) {
            quiet(command)?;
        }
        let processes = processes(&self.program, stage.context.work)?;
        let service = *processes.first().context("its service does not run")?;
        if let Outage::Way(how) = outage {
            proxy.set(how);
        }
        drop_caches()?;
        let reading = truth.begin(root)?;
        thread::sleep(Duration::from_millis(100));
        match outage {
            Outage::Way(_) => {}
            Outage::Service => kill_process(service, Signal::KILL)?,
            Outage::All => {
                // None may start another one meanwhile.
                for signal in [Signal::STOP, Signal::KILL] {
                    processes.iter().try_for_each(|it| kill_process(*it, signal))?;
                }
            }
            Outage::Pause => {
                kill_process(service, Signal::STOP)?;
                thread::sleep(Duration::from_secs(3));
                kill_process(service, Signal::CONT)?;
            }
        }
        let during = truth.end(reading)?;
        proxy.set(Break::Nothing);
        let mended = Instant::now();
        let after = loop {
            drop_caches()?;
            let after = truth.end(truth.begin(root)?)?;
            if after.right == truth.files.len() as u64 || mended.elapsed() > MENDED {
                break after;
            }
            thread::sleep(Duration::from_secs(1));
        };
        // Of a service that is dead, mounts are left.
        let left = self.way.after();
        for pid in self::processes(&self.program, stage.context.work)? {
            let _gone = kill_process(pid, Signal::KILL);
        }
        unmount_all(root.parent().context("it has a parent")?)?;
        if !matches!(outage, Outage::Service | Outage::All) {
            left?;
        }
        Ok((during, after))
    }
}

/// The processes of a program that were started for a folder, the service first.
fn processes(program: &Path, work: &Path) -> Result<Vec<Pid>> {
    let program = program.canonicalize()?;
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let path = entry?.path();
        let name = path.file_name().and_then(|it| it.to_str());
        let Some(pid) = name.and_then(|it| it.parse().ok()).and_then(Pid::from_raw) else {
            continue;
        };
        let is_it = fs::read_link(path.join("exe")).is_ok_and(|it| it == program);
        let words = fs::read(path.join("cmdline")).unwrap_or_default();
        let has = |part: &[u8]| words.windows(part.len()).any(|it| it == part);
        if is_it && has(work.as_os_str().as_bytes()) {
            found.push((has(b"--keeper"), pid));
        }
    }
    found.sort_by_key(|it| (it.0, it.1.as_raw_nonzero()));
    Ok(found.into_iter().map(|it| it.1).collect())
}

fn drop_caches() -> Result<()> {
    rustix::fs::sync();
    Ok(fs::write("/proc/sys/vm/drop_caches", "3")?)
}

/// What the files have.
struct Truth {
    folder: PathBuf,
    files: Vec<Vec<u8>>,
    /// Their names, each with a zero behind it.
    list: PathBuf,
}

/// $1 where they are right, $2 the mount, $3 their names, $4 readers at once, $5 seconds for each.
const READ: &str = r#"
xargs -0 -a "$3" -n 1 -P "$4" sh -c 'timeout -s KILL "$3" cmp -s "$1/$4" "$2/$4"; echo $?' sh "$1" "$2" "$5" 2> /dev/null
"#;

impl Truth {
    fn unpack(work: &Path, layout: &Path) -> Result<Self> {
        let folder = work.join("truth");
        fs::create_dir(&folder)?;
        for blob in layers(layout)? {
            let mut tar = Command::new("tar");
            tar.args(["--extract", "--gzip", "--numeric-owner", "--file"]).arg(blob);
            quiet(tar.arg("--directory").arg(&folder))?;
        }
        let said = quiet(Command::new("find").arg(&folder).args([
            "-type",
            "f",
            "-size",
            &format!("+{SMALL}c"),
            "-printf",
            r"%P\n",
        ]))?;
        let mut all: Vec<_> = said.lines().map(|it| it.as_bytes().to_vec()).collect();
        all.sort();
        if all.len() < FILES {
            bail!("the image has {} files", all.len());
        }
        let files: Vec<_> = (0..FILES).map(|it| all[it * all.len() / FILES].clone()).collect();
        let list = work.join("files");
        let mut out = File::create(&list)?;
        for file in &files {
            out.write_all(file)?;
            out.write_all(&[0])?;
        }
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
            // cmp(1) and timeout(1).
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
