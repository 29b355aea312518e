//! `run`: a command in a container whose root is an image.

mod attached;

use std::fs::File;
use std::io::Read as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, bail};
use container::bundle::Terminal;
use container::life::detached;
use container::life::ended::LOST;
use container::life::monitor::{FAILED, RunError};
use container::life::prepare::{Ready, Surroundings};
use container::life::reap::clear_dead;
use container::life::running::Finish;
use container::notes::Notes;
use container::plan::{ContainerPlan, ContainerWish};
use container::runtime::Runtime;
use kernel::process::{Signal, Signals, Who, start_behind};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use store::OpenOptions;

use crate::Answer;
use crate::args::{self, When};
use crate::containers::signal_number;
use crate::context::{Context, now};
use crate::report;
use crate::volumes::volumes;
use crate::wanted::{image_config, init_wish, terminal, wishes, writable_wish};

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

/// The exit code for a container that did not run.
pub(crate) fn exit_code(error: &anyhow::Error) -> u8 {
    if let Some(NotStarted { code, .. }) = error.downcast_ref() {
        return *code;
    }
    error.downcast_ref().map_or(FAILED, RunError::exit_code)
}

pub(crate) fn run(context: &Context, args: &args::Run) -> anyhow::Result<Answer> {
    // Before anything else: no signal may end us between the container's folder and its removal.
    let signals = Arc::new(Signals::block(&FORWARDED)?);
    let ready = prepare(context, args, signals)?;
    if args.detach {
        let (id, path) = (ready.id().to_owned(), ready.path().to_owned());
        let signals = Arc::clone(ready.signals());
        let (report, monitor) = start_behind(|report| ready.watch(report, None, &|| now().0))?;
        return started(&id, &path, report, &monitor, &signals);
    }
    if ready.has_terminal_of_ours() {
        return attached::run(context, ready);
    }
    let Finish { end, has_lost, stays } = ready.run(&|text| context.remark(text));
    // What went wrong with the program comes before what goes wrong after it.
    let end = end?;
    stays.map_or(Ok(()), Err)?;
    if let Some(reason) = end.reason {
        context.remark(reason.sentence());
    }
    let code = end.exit.shell_code();
    if has_lost {
        bail!(LOST);
    }
    Ok(Answer::Program(u8::try_from(code).unwrap_or(u8::MAX)))
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
    let (search, notes) = (context.search(), notes(context.who()));
    let runtime = Runtime::find(&search, args.runtime.as_deref(), notes.as_ref())?;
    let store = context.open(OpenOptions::write())?;
    let asked = Arc::clone(&signals);
    store.give_up_when(move || is_asked_to_end(&asked));
    let (_, living) = clear_dead(&store, &|| now().0);
    let found = crate::names::resolve(&store, &args.image)?;
    let image = crate::policy::permit(context, &store, found)?.open(&store)?;
    let config = image_config(&store, image.found())?;
    let id = args.name.clone().map_or_else(new_id, Ok)?;
    // Before it is taken for a host name.
    store::check_id(&id)?;
    let plan =
        ContainerPlan::new(config, container_wish(context, args, terminal, id)?, runtime.kind)?;
    let asked = Arc::clone(&signals);
    let input = std::io::stdin();
    let around = Surroundings {
        search: &search,
        now: now(),
        unique: &new_id()?,
        terminal: input.as_fd(),
        notes: notes.as_ref(),
        remark: &|text| context.remark(text),
        is_asked_to_end: &|| is_asked_to_end(&asked),
    };
    Ok(container::life::prepare::prepare(&store, image, plan, runtime, &living, signals, &around)?)
}

/// What the command line asks for.
fn container_wish(
    context: &Context,
    args: &args::Run,
    terminal: Terminal,
    id: String,
) -> anyhow::Result<ContainerWish> {
    let wanted = &args.wanted;
    let writable = writable_wish(context, wanted);
    let bundle = wishes(wanted, &args.command, terminal, &id, writable.access())?;
    Ok(ContainerWish {
        id,
        names: crate::hosts::name_files(&wanted.names, &bundle)?,
        bundle,
        user: wanted.program.user.clone(),
        trust: wanted.trust.wish()?,
        writable,
        df: wanted.df,
        warm: wanted.warm.into(),
        ids: wanted.ids.wish()?,
        volumes: volumes(wanted)?,
        mounts: wanted.mount.clone(),
        init: init_wish(wanted),
        stop_signal: args.stop_signal.clone(),
        stop_timeout: args.stop_timeout,
        timeout: args.timeout,
        log_size: args.log_size.0,
        keep: args.detach && !args.rm,
    })
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
fn notes(who: Who) -> Option<Notes> {
    if who.user == 0 {
        return Some(Notes::new(Path::new(container::notes::FOLDER), who.user));
    }
    let folder = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let folder = folder.filter(|it| it.is_absolute())?.join("quire");
    Some(Notes::new(&folder, who.user))
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
