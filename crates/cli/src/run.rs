//! `run`: a command in a container whose root is an image.

mod attached;

use std::cell::Cell;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::num::NonZeroU64;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use container::Refusal;
use container::bundle::{Process, Terminal, configure};
use container::folder::{self, FILESTORE, LOG};
use container::life::detached::{Last, Stop};
use container::life::monitor::{RunError, Start};
use container::life::stage::Stage;
use container::life::state::Reason;
use container::life::{detached, kept};
use container::root::filestore;
use container::root::headroom::Headroom;
use container::root::{Root, Shape, WritablePlace, WritableWish, make, may_have_acl, warm};
use container::runtime::{Kind, Runtime};
use kernel::process::{Exit, Signal, Signals, finish_behind, start_behind};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::Value;
use store::{ContainerDir, ContainerRecord, OpenOptions, PermittedImage};

use self::attached::Seat;
use crate::Answer;
use crate::args::{self, When};
use crate::containers::signal_number;
use crate::context::{Context, now};
use crate::dead::{clear_dead, share};
use crate::report;
use crate::volumes::{Files, volumes};
use crate::wanted::{add_init, has_init, image_config, terminal, wish, wishes, writable_wish};

/// What a user's Ctrl-C, a service manager or a terminal may send. `SIGKILL` and `SIGSTOP` cannot be passed on.
pub(crate) const FORWARDED: [Signal; 9] = [
    Signal::HUP,
    Signal::INT,
    Signal::QUIT,
    Signal::TERM,
    Signal::USR1,
    Signal::USR2,
    Signal::WINCH,
    Signal::CONT,
    Signal::ALARM,
];

/// Quire, or the runtime, could not do it.
pub(crate) const FAILED: u8 = 125;

/// The exit code for a container that did not run. Source: Docker, "Exit status"; POSIX `env` for 126 and 127.
pub(crate) fn exit_code(error: &anyhow::Error) -> u8 {
    if let Some(NotStarted { code, .. }) = error.downcast_ref() {
        return *code;
    }
    match error.downcast_ref::<RunError>() {
        Some(RunError::Program(error)) if error.is_absent() => 127,
        Some(RunError::Program(_)) => 126,
        Some(RunError::NotExecuted { why: Refusal::Absent, .. }) => 127,
        Some(RunError::NotExecuted { why: Refusal::Unusable, .. }) => 126,
        _ => FAILED,
    }
}

pub(crate) fn run(context: &Context, args: &args::Run) -> anyhow::Result<Answer> {
    // Before anything else: no signal may end us between the container's folder and its removal.
    let signals = Arc::new(Signals::block(&FORWARDED)?);
    let mut ready = prepare(context, args, signals)?;
    if args.detach {
        let (id, path) = (ready.id.clone(), ready.path.clone());
        let signals = Arc::clone(&ready.signals);
        let (report, monitor) = start_behind(|report| ready.watch(report, None))?;
        return started(&id, &path, report, &monitor, &signals);
    }
    if ready.terminal == Terminal::New && ready.runtime.kind != Kind::Runsc {
        return attached::run(context, ready);
    }
    ready.offer();
    let remark = |text: &str| context.remark(text);
    let config = ready.config.take();
    let result = container::life::monitor::run(&ready.start(config, None), &remark);
    let has_lost = ready.has_lost();
    let ended = ready.end(Runs::Perhaps, || {});
    // What went wrong with the program comes before what goes wrong after it.
    let end = result?;
    ended?;
    if let Some(reason) = end.reason {
        context.remark(reason.sentence());
    }
    let code = end.exit.shell_code();
    if has_lost {
        bail!(LOST);
    }
    Ok(Answer::Program(u8::try_from(code).unwrap_or(u8::MAX)))
}

/// A container whose root and folder are there, and of which nothing runs yet.
struct Ready {
    id: String,
    folder: ContainerDir,
    path: PathBuf,
    root: Root,
    stage: Stage,
    headrooms: Vec<Headroom>,
    process: Process,
    owner: Option<(u32, u32)>,
    config: Value,
    terminal: Terminal,
    runtime: Runtime,
    signals: Arc<Signals>,
    stop: Stop,
    timeout: Option<Duration>,
    notes: Option<PathBuf>,
    log_size: Option<NonZeroU64>,
    keep: bool,
    /// Held as long as the container lives, as the next is.
    _image: PermittedImage,
    _directory: Option<OwnedFd>,
}

fn prepare(context: &Context, args: &args::Run, signals: Arc<Signals>) -> anyhow::Result<Ready> {
    if args.detach && args.tty.when() == When::Always {
        bail!("-t: a container of --detach outlives the terminal; `quire exec -t` gives one later");
    }
    if args.detach && args.tty.interactive {
        bail!("-i: a container of --detach has no standard input: leave -i out");
    }
    if let Some(signal) = &args.stop_signal {
        signal_number(signal)?;
    }
    let terminal = if args.detach { Terminal::None } else { terminal(args.tty.when())? };
    let search = std::env::var_os("PATH").unwrap_or_default();
    let notes = notes();
    let runtime = Runtime::find(&search, args.runtime.as_deref(), notes.as_deref())?;
    let store = context.open(OpenOptions::write())?;
    let asked = Arc::clone(&signals);
    store.give_up_when(move || is_asked_to_end(&asked));
    let (_, living) = clear_dead(&store);
    let found = crate::names::resolve(&store, &args.image)?;
    let image_id = found.image;
    let opened = crate::policy::permit(context, &store, found)?.open(&store)?;
    let found = opened.found();
    container::owner::check_image(&store, opened.image())?;
    let image = image_config(&store, found)?;
    let wish = writable_wish(context, &args.wanted);
    let place = wish.make(&store, filestore::Backing::Ahead, &search)?;
    let access = place.access();
    let files = Files::make(&store, &args.wanted)?;
    let space = crate::mount::space(args.wanted.df, access)?;
    let id = args.name.clone().map_or_else(new_id, Ok)?;
    store::check_id(&id)?;
    let claim = args.wanted.ids.claim(&store, &|| is_asked_to_end(&signals))?;
    let map = claim.as_ref().map(|it| &it.map);
    let shared = share(&store, &living, image_id);
    let mut wishes = wishes(&args.wanted, &args.command, terminal, &id, access)?;
    let name_files = crate::hosts::name_files(&args.wanted.names, &wishes)?;
    let mut places: Vec<_> = name_files.iter().map(|it| it.place).collect();
    if runtime.kind == Kind::Runsc && has_init(&args.wanted) {
        // It looks for a place in the root, below the /dev that it makes.
        places.push(container::runtime::init::PLACE);
    }
    let shape = Shape { writable: place.writable(), map, space, places: &places };
    let root = make(&store, &opened, &args.wanted.trust.wish()?, &shape, shared)?;
    warm(opened.image(), &root, args.wanted.warm.into(), &|text| context.remark(text));
    if runtime.kind == Kind::Runsc && may_have_acl(opened.image())? {
        context.remark(NO_ACLS);
    }
    let user = args.wanted.program.user.as_deref().unwrap_or(&image.user);
    let user = container::bundle::user::find(root.mount.as_fd(), user)?;
    map.map_or(Ok(()), |map| map.check(&user))?;
    let owner = map.and_then(|map| map.user(user.uid).zip(map.group(user.gid)));
    let mut stage = Stage::new(&folder::path(&store, &id), map);
    wishes.volumes = volumes(&args.wanted, &files, map, &mut stage)?;
    wishes.security.fit(runtime.kind)?;
    wishes.map = map.cloned();
    wishes.cgroup = Some(container::life::teardown::cgroup(&id, &new_id()?));
    wishes.names = stage.set_names(name_files);
    let (process, mut config) =
        configure(root.mount.as_fd(), &stage.root(), &image, &wishes, &user)?;
    add_init(&args.wanted, &mut config)?;
    if terminal == Terminal::New {
        container::life::terminal::note_size(&mut config["process"], std::io::stdin().as_fd());
    }
    let record = ContainerRecord {
        image: image_id,
        manifest: found.manifest,
        name: found.name.as_ref().map(ToString::to_string),
        created: now(),
        keep: args.detach && !args.rm,
    };
    let folder = store.create_container(&id, &record)?;
    let path = folder.path().to_owned();
    if let WritablePlace::Filestore(file, _) = &place {
        filestore::name(file.as_fd(), folder.fd(), FILESTORE)
            .with_context(|| format!("cannot keep the filestore in {}", path.display()))?;
    }
    files.name(&folder)?;
    if let Some(claim) = claim {
        let noted = claim.map.note(&path);
        noted.with_context(|| format!("cannot note the ids of {id} in {}", path.display()))?;
    }
    kept_place(&place, &args.wanted, &root)
        .and_then(|place| place.save(&path))
        .with_context(|| format!("cannot write in {}", path.display()))?;
    let headrooms = headrooms(&root, &stage, &path)?;
    let keep = record.keep;
    let signal = args.stop_signal.clone().unwrap_or(image.stop_signal);
    let stop = Stop { signal, timeout: args.stop_timeout };
    let timeout = (args.timeout > 0).then(|| Duration::from_secs(args.timeout.into()));
    Ok(Ready {
        id,
        folder,
        path,
        root,
        stage,
        headrooms,
        process,
        owner,
        config,
        terminal,
        runtime,
        signals,
        stop,
        timeout,
        notes,
        log_size: args.log_size.0,
        keep,
        _image: opened,
        _directory: place.into_locked(),
    })
}

/// Who takes room for what the container writes.
fn headrooms(root: &Root, stage: &Stage, folder: &Path) -> anyhow::Result<Vec<Headroom>> {
    let own = root.doomed.headroom(&folder.join(FILESTORE))?;
    Ok(own.into_iter().chain(Files::headrooms(folder, stage)?).collect())
}

/// Where the container writes, for whoever looks at that later.
fn kept_place(
    place: &WritablePlace,
    wanted: &args::Wanted,
    root: &Root,
) -> std::io::Result<kept::Place> {
    match (place, wish(wanted), root.doomed.upper()) {
        (WritablePlace::Memory(_), ..) => Ok(kept::Place::Memory),
        (WritablePlace::Filestore(..), ..) => Ok(kept::Place::Filestore { lost: false }),
        (WritablePlace::Directory(..), Some(WritableWish::Directory(path, _)), Some(upper)) => {
            kept::Place::directory(&std::path::absolute(path)?, upper)
        }
        _ => Ok(kept::Place::None),
    }
}

const NO_ACLS: &str = "the image has POSIX ACLs, which gVisor does not obey: the modes of such files count alone, whose bits of the \
                       group are the most that the ACL allows";

pub(crate) const LOST: &str = "the disk of the store is full or failing: some of what the container wrote was lost while it ran, and \
                               it may have read zeros in its place";

impl Ready {
    fn start<'a>(&'a self, config: Value, console: Option<&'a str>) -> Start<'a> {
        Start {
            id: &self.id,
            folder: &self.path,
            lock: self.folder.lock(),
            root: &self.root.mount,
            stage: &self.stage,
            process: &self.process,
            owner: self.owner,
            config,
            terminal: self.terminal,
            console,
            runtime: &self.runtime,
            signals: &self.signals,
            headrooms: &self.headrooms,
            log_size: self.log_size,
            timeout: self.timeout,
            notes: self.notes.as_deref(),
        }
    }

    fn has_lost(&self) -> bool {
        self.root.doomed.has_lost(self.root.mount.as_fd())
    }

    /// Takes everything down, behind the user's back if it takes long; calls `hidden` when nobody else can see it any more.
    fn end(self, left: Runs, hidden: impl FnOnce()) -> anyhow::Result<()> {
        let takes_long = self.root.doomed.takes_long() || self.stage.takes_long();
        // For everybody else it is gone now.
        let (id, root, stage, headrooms) = (self.id, self.root, self.stage, self.headrooms);
        let folder = self.folder.hide()?;
        hidden();
        let clear = move || {
            root.doomed.shut_down();
            stage.shut_down();
            drop((headrooms, root.mount, root.image));
            if left == Runs::Perhaps && !container::life::teardown::clear(folder.path(), &id) {
                tracing::warn!(id, "cannot end all that is left of the container");
            }
            if let Err(error) = folder.remove() {
                tracing::warn!(id, %error, "the container's folder stays: `quire gc` removes it");
            }
        };
        match takes_long {
            true => drop(finish_behind(clear)),
            false => clear(),
        }
        Ok(())
    }

    /// In a process of its own: sees the container through to its end, and tells by `report` how it began, and to whoever
    /// sits at its terminal how it ended, too.
    fn watch(mut self, report: OwnedFd, seat: Option<Seat>) {
        let config = self.config.take();
        let mut report = Some(File::from(report));
        let end_report = seat.as_ref().and_then(|_| report.as_ref()?.try_clone().ok());
        let console = seat.as_ref().map(|seat| seat.console.clone());
        let keeping = seat.map(|seat| seat.keep(&self.path, self.log_size));
        // Nobody is to find a directory in use by us.
        let _moved = std::env::set_current_dir("/");
        self.offer();
        let clock = || now().0;
        let mut started = || tell(report.take(), &[0]);
        let (mut lost, mut is_told) = (false, false);
        // Whoever waits for its end finds this in the log then, if there is room for it.
        let mut ended = || {
            lost = self.has_lost();
            is_told = lost && log(&self.path, LOST);
            let exit = lost.then_some(Exit::Code(FAILED.into()));
            Last { exit, written: self.root.doomed.written() }
        };
        let start = self.start(config, console.as_deref());
        let result = detached::watch(start, &self.stop, &clock, &mut started, &mut ended);
        // Who was told that it runs finds it, also when its end is not known.
        let has_started = report.is_none();
        let is_unwanted = detached::is_unwanted(&self.path);
        let keep = self.keep && has_started && !is_unwanted;
        let mut refusal = Vec::new();
        let end = match result {
            Ok(end) => {
                let code = u8::try_from(end.exit.shell_code()).unwrap_or(u8::MAX);
                let reason = end.reason.map_or("", Reason::sentence);
                [&[code], if lost { LOST } else { reason }.as_bytes()].concat()
            }
            Err(error) => {
                let error = anyhow::Error::new(error);
                let text = format!("{error:#}");
                let said = [&[exit_code(&error)], text.as_bytes()].concat();
                match has_started {
                    true => drop(log(&self.path, &text)),
                    false => refusal.clone_from(&said),
                }
                if has_started { said } else { Vec::new() }
            }
        };
        if let Some(keeping) = keeping {
            keeping.finish();
        }
        if keep {
            self.rest(lost, is_told);
            return;
        }
        let untold = Cell::new(Some((report, end_report)));
        let tell_end = || {
            if let Some((report, end_report)) = untold.take() {
                tell(report, &refusal);
                tell(end_report, &end);
            }
        };
        // Before another one can have its name, and its cgroup.
        if !container::life::teardown::clear(&self.path, &self.id) {
            // With the folder, which says what it is.
            tracing::warn!("what is left of the container stays: `quire gc` removes it");
            tell_end();
            return;
        }
        if let Err(error) = self.end(Runs::No, tell_end) {
            tracing::warn!(%error, "the container's folder stays: `quire gc` removes it");
            tell_end();
        }
    }

    /// Takes down what runs, and keeps what was written, with the log and the exit code.
    fn rest(self, has_lost: bool, is_told: bool) {
        let kept = match has_lost {
            true => {
                self.root.doomed.shut_down();
                false
            }
            // It has ended for everybody else; `rm` shuts the file system down under this.
            false => {
                self.settle();
                self.root.doomed.keep().is_ok()
            }
        };
        drop((self.headrooms, self.root.mount, self.root.image));
        // Those of further mounts go with their container.
        Files::remove(&self.path, &self.stage);
        self.stage.shut_down();
        detached::clear(&self.path, &self.id);
        if let (false, Some(kept::Place::Filestore { .. })) = (kept, kept::Place::load(&self.path))
        {
            // First, since it may be what the disk is full of.
            drop(std::fs::remove_file(self.path.join(FILESTORE)));
            let noted = kept::Place::Filestore { lost: true }.save(&self.path);
            if let Err(error) = noted {
                tracing::debug!(id = self.id, %error, "what is lost is found out by its absence");
            }
            let _told = is_told || log(&self.path, LOST);
        }
    }

    /// Gives back what nobody will write to any more.
    fn settle(&self) {
        for headroom in &self.headrooms {
            if let Err(error) = headroom.settle() {
                tracing::debug!(id = self.id, %error, "a filestore keeps room that it does not need");
            }
        }
    }

    /// Lets other containers of the image share what this process has mounted, and others look at what is written.
    fn offer(&self) {
        if let Err(error) = self.root.image.offer(&self.path) {
            tracing::debug!(id = self.id, %error, "nobody shares this container's image");
        }
        let upper = self.root.doomed.upper().map(|upper| kept::offer(&self.path, upper));
        if let Some(Err(error)) = upper {
            tracing::debug!(id = self.id, %error, "nobody can look at this container's changes");
        }
    }
}

/// A sentence among what the container wrote; answers whether there was room for it.
fn log(folder: &Path, text: &str) -> bool {
    let log = File::options().append(true).open(folder.join(LOG));
    log.and_then(|mut log| log.write_all(format!("quire: {text}\n").as_bytes())).is_ok()
}

/// Whether the kernel and the runtime may still have something of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Runs {
    Perhaps,
    No,
}

/// Whoever asked may be gone, and the container is what counts.
fn tell(report: Option<File>, bytes: &[u8]) {
    let _heard = report.map(|mut pipe| pipe.write_all(bytes));
}

/// Why a detached container did not start, as its monitor says.
#[derive(Debug)]
struct NotStarted {
    code: u8,
    message: String,
}

impl std::fmt::Display for NotStarted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for NotStarted {}

/// Waits until the monitor says how the start went. A signal that ends programs ends the start, unless that was faster.
fn started(
    id: &str,
    folder: &Path,
    report: OwnedFd,
    monitor: &kernel::process::Process,
    signals: &Signals,
) -> anyhow::Result<Answer> {
    let mut said = Vec::new();
    let mut report = File::from(report);
    let mut asked = None;
    loop {
        signals.wait_or(report.as_fd())?;
        if let Some(signal) = ending(signals) {
            asked = Some(signal);
            // It may be gone, or have just told us that the container runs.
            let _heard = monitor.signal(Signal::TERM);
        } else {
            let mut bytes = [0; 4096];
            match report.read(&mut bytes).context("cannot hear the monitor")? {
                0 => break,
                length => said.extend_from_slice(&bytes[..length]),
            }
        }
    }
    match (said.split_first(), asked) {
        (Some((0, _)), _) => {
            match report::line(id) {
                Err(error) if !report::is_broken_pipe(&error) => {
                    // Whoever asked for it is told that this failed, and may not know its name.
                    Err(error.context(if take_back(id, folder, monitor) {
                        format!("container {id} was removed again")
                    } else {
                        format!("container {id} stays: `quire rm --force {id}` removes it")
                    }))
                }
                printed => printed.map(|()| Answer::Yes),
            }
        }
        _ => not_started(id, &said, asked),
    }
}

/// Kills a container and waits until its monitor has ended, which removes it; returns whether it is gone. A container that
/// ended by itself just before stays.
fn take_back(id: &str, folder: &Path, monitor: &kernel::process::Process) -> bool {
    let _asked = detached::unwant(folder);
    let _killed = detached::signal(folder, id, "KILL");
    let time = Timespec { tv_sec: UNWANTED, tv_nsec: 0 };
    let _ended = poll(&mut [PollFd::new(monitor, PollFlags::IN)], Some(&time));
    !folder.exists()
}

/// For how many seconds the end of a killed container is waited for.
const UNWANTED: i64 = 20;

/// What a container's monitor `said` of it that has not started, perhaps since it was `asked` to end.
fn not_started(id: &str, said: &[u8], asked: Option<Signal>) -> anyhow::Result<Answer> {
    match (said.split_first(), asked) {
        (_, Some(signal)) => {
            let code = 128 + signal.as_raw();
            Ok(Answer::Program(u8::try_from(code).unwrap_or(FAILED)))
        }
        (Some((code, message)), None) => {
            let message = String::from_utf8_lossy(message).into_owned();
            Err(NotStarted { code: *code, message }.into())
        }
        (None, None) => bail!("the monitor of {id} ended before the container started"),
    }
}

/// Whether a signal has arrived that ends programs. Others are lost on a container that is not there yet.
pub(crate) fn is_asked_to_end(signals: &Signals) -> bool {
    ending(signals).is_some()
}

fn ending(signals: &Signals) -> Option<Signal> {
    while let Ok(Some(received)) = signals.next() {
        let signal = received.signal;
        if matches!(signal, Signal::HUP | Signal::INT | Signal::QUIT | Signal::TERM) {
            return Some(signal);
        }
    }
    None
}

/// Where it is noted which runtimes have worked: gone with the next start of the machine.
fn notes() -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Some(PathBuf::from(container::notes::FOLDER));
    }
    let folder = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    Some(folder.filter(|it| it.is_absolute())?.join("quire"))
}

/// Twelve hexadecimal digits, as container ids are.
fn new_id() -> anyhow::Result<String> {
    let mut bytes = [0_u8; 6];
    let flags = rustix::rand::GetRandomFlags::empty();
    let taken = rustix::rand::getrandom(&mut bytes, flags).context("no random numbers")?;
    // getrandom(2): requests of up to 256 bytes are never cut short.
    debug_assert_eq!(taken, bytes.len());
    Ok(bytes.iter().fold(String::new(), |id, byte| format!("{id}{byte:02x}")))
}
