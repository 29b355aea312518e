//! `run`: a command in a container whose root is an image.
//!
//! Its steps: enter a user namespace ([`crate::verbs::enter_namespace`]), find the runtime and the image ([`find()`]),
//! plan the container ([`request`]), and let [`container::life`] prepare and run it.

pub(crate) mod args;
mod attached;
mod cid_file;
mod find;
pub(crate) mod hosts;
mod request;

use std::ffi::OsStr;
use std::io::IsTerminal as _;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use container::boot_cache::Notes;
use container::life::end::ended::LOST;
use container::life::monitor::{CallerStreams, FAILED, RunError};
use container::life::monitor_report::{
    MonitorReport, NotStarted, StartReport, TakenBack, take_back,
};
use container::life::prepare::{AdmittedImage, CallerEnvironment, PrepareError, Ready, random_id};
use container::life::running::Finish;
use container::life::signal::signal_number;
use container::network::PortError;
use container::networks::NetworksError;
use container::plan::{ContainerPlan, ContainerRequest, IdsChoice, ImageVolumes};
use container::runtime::Runtime;
use container::runtime::caller_fds::CallerFds;
use kernel::process::{Process, Signals, start_behind};
use store::ContainerSnapshot;
#[cfg(feature = "serve")]
use store::OpenOptions;

use crate::Answer;
use crate::args::Trust;
use crate::output::report;
use crate::session::context::{Context, now};
use crate::session::failure::find;
use crate::session::own_namespace::changes_can_stay;
use crate::session::signals::FORWARDED;
use crate::session::ways::Ways;
use crate::verbs::containers::container_options::{GivenFiles, image_config};
use crate::verbs::containers::networks::{connect, join};
use crate::verbs::containers::snapshots::clear_after_end;
use crate::verbs::containers::volumes::unneeded;
use crate::verbs::exit_codes::ExitCodes;
#[cfg(feature = "serve")]
use crate::verbs::services::lazy::devices::LazyRun;
use crate::verbs::{VerbArgs, option_groups};

pub(crate) use args::{NewContainer, Run};
use cid_file::CidFile;
use find::FoundImage;
use request::container_wish;
pub(super) use request::{NO_FDS, RequestedLife, background_terminal};

impl VerbArgs for Run {
    const NAME: &'static str = "run";
    const ABOUT: &'static str = "Run a command in a container whose root is an image";
    const DETAILS: &'static str = "Options come before the image: all words after the image are the command and its \
        arguments. An image that the store lacks is pulled from its registry.\n\n\
        The container is removed when it ends, unless `--detach` is given. It has no network, unless `--network` or \
        `--publish` is given. Options that add something, such as `--env`, `--volume`, `--publish` and `--cap-add`, \
        may be given several times. Defaults of some options are in /etc/quire/run.toml and \
        $XDG_CONFIG_HOME/quire/run.toml: see quire-run.toml(5).";
    const EXAMPLES: &'static str = "quire run debian -- cat /etc/os-release\n  quire run -d --name web -v /srv/www:/www:ro nginx\n  \
         quire run --read-only --memory 512m --userns auto app";
    const HAS_SHORT_HELP: bool = false;
    const HAS_SHORT_QUIET: bool = true;
    const GROUPS: &'static [option_groups::OptionGroup] = option_groups::CONTAINER;
    const PRINTS_JSON: bool = false;
    const EXIT_CODES: ExitCodes = ExitCodes::Run;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        run(context, self)
    }
}

/// Returns the exit code for a container that did not run.
pub(crate) fn exit_code(error: &anyhow::Error) -> u8 {
    if let Some(NotStarted { code, .. }) = error.downcast_ref() {
        return *code;
    }
    if error.chain().any(is_port_in_use) {
        return PORT_IN_USE;
    }
    error.downcast_ref().map_or(FAILED, RunError::exit_code)
}

/// Exit code if a published port is in use. Source: podman 5, `libpod/define/exec_codes.go`, where this is an error of
/// the runtime.
const PORT_IN_USE: u8 = 126;

fn is_port_in_use(cause: &(dyn std::error::Error + 'static)) -> bool {
    find(cause).is_some_and(|it: &PortError| it.is_in_use)
        || matches!(find(cause), Some(PrepareError::Networks(NetworksError::Port { .. })))
}

pub(crate) fn run(context: &Context, args: &Run) -> anyhow::Result<Answer> {
    // The files are read before signals are blocked, because a file may be a pipe without a writer, and a signal must
    // end the wait for it.
    let given = GivenFiles::read(&args.new.wanted)?.with_labels(&args.new.labels)?;
    // Signals are blocked now, so that none ends this process between the creation of the container's folder and its
    // removal.
    let signals = Arc::new(Signals::block(&FORWARDED)?);
    let life = RequestedLife::of_run(context, args)?;
    let Prepared {
        ready,
        has_snapshot,
        #[cfg(feature = "serve")]
        lazy,
    } = prepare(context, &args.new, &life, given, signals)?;
    if args.detach {
        let (id, path) = (ready.id().to_owned(), ready.path().to_owned());
        let signals = Arc::clone(ready.signals());
        // The monitor changes its working directory.
        let store = ready.leaves_volumes().then(|| context.store_directory()).transpose()?;
        let (report, monitor) = start_behind(|report| {
            ready.watch(report, None, &|| now().0);
            if has_snapshot {
                clear_after_end(context);
            }
            if let Some(store) = &store {
                unneeded::clear_unneeded_in(context, store);
            }
        })?;
        let how = MonitorReport::new(&id, report).wait(&monitor, &signals)?;
        return started(&id, &path, how, &monitor);
    }
    #[cfg(feature = "serve")]
    let begun = std::time::Instant::now();
    let leaves_volumes = ready.leaves_volumes();
    let ended = if ready.has_terminal_of_ours() {
        attached::run(context, ready)
    } else {
        in_foreground(context, ready, life.keep, args.attach.streams())
    };
    if has_snapshot {
        clear_after_end(context);
    }
    if leaves_volumes {
        unneeded::clear_unneeded_in(context, &context.store_directory()?);
    }
    #[cfg(feature = "serve")]
    if let Some(lazy) = lazy {
        lazy.tell_failures(context, begun);
    }
    // Codes from 126 on are of programs that did not run, or that a signal ended.
    if let Ok(Answer::Program(1..=125)) = &ended
        && args.new.wanted.network.is_none()
        && args.new.published().is_empty()
    {
        context.remark(&connect::lack());
    }
    #[cfg(feature = "serve")]
    if args.new.wanted.lazy.lazy.is_some() {
        // The service has done this, unless it was killed.
        if let Err(error) = context.open(OpenOptions::write()).and_then(|it| Ok(it.settle()?)) {
            tracing::warn!(error = format!("{error:#}"), "cannot sync the image");
        }
    }
    ended
}

/// Runs a container without a terminal, and waits for its end.
fn in_foreground(
    context: &Context,
    ready: Ready,
    keep: bool,
    streams: CallerStreams,
) -> anyhow::Result<Answer> {
    let remark = |text: &str| context.remark(text);
    if ready.has_terminal() && !std::io::stdin().is_terminal() {
        bail!("-t: standard input is not a terminal, which gVisor needs: leave -t out");
    }
    let is_recorded = keep || streams != CallerStreams::ALL;
    if !streams.output && !streams.errors {
        // As in podman, which prints the id of a container whose output nothing else shows.
        report::line(ready.id())?;
    }
    let finish = match is_recorded {
        true if ready.has_terminal() => bail!(
            "--rm=false: gVisor connects the container's terminal itself, so its output cannot be kept: leave out \
            -t, or use --rm"
        ),
        true => ready.run_and_record(streams, &|| now().0, &remark),
        false => ready.run(&remark),
    };
    finished(context, finish)
}

/// Reports the end of a container in the foreground.
pub(super) fn finished(context: &Context, finish: Finish) -> anyhow::Result<Answer> {
    let Finish { end, has_lost, stays } = finish;
    // A failure of the program is reported before failures after its end.
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

/// A container that can be started.
pub(super) struct Prepared {
    pub(super) ready: Ready,
    /// Whether it begins with a snapshot.
    has_snapshot: bool,
    /// The devices of its image that are filled while it runs.
    #[cfg(feature = "serve")]
    lazy: Option<LazyRun>,
}

/// Finds the image, plans the container, and makes the root and the folder of the container.
pub(super) fn prepare(
    context: &Context,
    args: &NewContainer,
    life: &RequestedLife,
    given: GivenFiles,
    signals: Arc<Signals>,
) -> anyhow::Result<Prepared> {
    if let Some(signal) = &args.stop_signal {
        signal_number(signal)?;
    }
    let cid_file = args.cidfile.as_deref().map(CidFile::create).transpose()?;
    let runtime_dir = std::env::var_os("XDG_RUNTIME_DIR");
    let notes = Notes::of_user(context.who(), runtime_dir.as_deref());
    let runtime = runtime(context, args.runtime.as_deref(), notes.as_ref())?;
    let fds = CallerFds::find(&life.fds, runtime.kind).context("--preserve-fds")?;
    let found = FoundImage::resolve(context, args, &signals)?;
    let config = image_config(found.images(), found.image.found())?;
    let id = args.name.clone().map_or_else(random_id, Ok)?;
    // The id is checked now, because it is also used as the host name.
    store::check_id(&id)?;
    let mut wish = container_wish(context, args, life, id, given)?;
    if let Some(snapshot) = &found.snapshot {
        begin_with(&mut wish, snapshot)?;
    }
    // If the ids of a user end with the container, the files of its volumes could not stay.
    let can_stay = changes_can_stay(context.outside());
    let image_volumes = if can_stay { args.image_volume.into() } else { ImageVolumes::Ignore };
    wish.inherit(&config, image_volumes)?;
    let plan = ContainerPlan::new(config, wish, runtime.kind)?;
    #[cfg(feature = "serve")]
    let lazy = LazyRun::of(found.images(), found.image.image()).unwrap_or_else(|error| {
        tracing::debug!(%error, "cannot report on lazy devices");
        None
    });
    let FoundImage { store, shared, living, image, snapshot } = found;
    let image = AdmittedImage { store: shared.as_ref().unwrap_or(&store), image };
    let asked = Arc::clone(&signals);
    let ready = with_environment(context, &args.wanted.trust, notes.as_ref(), &asked, |around| {
        use container::life::prepare::{TakenName, prepare};
        let taken = match args.replace {
            true => TakenName::Replaced(&|| now().0),
            false => TakenName::Refused,
        };
        Ok(prepare(&store, image, plan, runtime, &living, signals, taken, around)?)
    })?;
    let has_snapshot = snapshot.is_some();
    // From here on, the container's record keeps it.
    drop(snapshot);
    if let Some(file) = cid_file {
        file.write(ready.id())?;
    }
    Ok(Prepared {
        ready: ready.with_fds(fds),
        has_snapshot,
        #[cfg(feature = "serve")]
        lazy,
    })
}

/// Calls `work` with the environment of this process. `trust` has the options of the image's mount.
pub(super) fn with_environment<T>(
    context: &Context,
    trust: &Trust,
    notes: Option<&Notes>,
    signals: &Signals,
    work: impl FnOnce(&CallerEnvironment<'_>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let input = std::io::stdin();
    let networks = join::place(context.who(), context.outside());
    let ways = Ways::new(context.who(), trust);
    work(&CallerEnvironment {
        search: &context.search(),
        now: now(),
        unique: &random_id()?,
        terminal: input.as_fd(),
        notes,
        networks: networks.as_ref(),
        via: ways.via(trust),
        remark: &|text| context.remark(text),
        is_asked_to_end: &|| signals.ending().is_some(),
    })
}

/// Puts a snapshot below the container's writable layer. The container's users get the ids to which its files belong.
fn begin_with(wish: &mut ContainerRequest, snapshot: &ContainerSnapshot) -> anyhow::Result<()> {
    let ids = match &snapshot.record.map {
        Some(map) => IdsChoice::Map(map.parse().context("the map of the snapshot's user ids")?),
        None => IdsChoice::Host,
    };
    if wish.ids != IdsChoice::Host && wish.ids != ids {
        bail!(
            "--userns and maps of ids: the files of a snapshot belong to the ids of the container of which it \
            was taken; leave these options out"
        );
    }
    wish.ids = ids;
    wish.snapshot = Some(snapshot.id.clone());
    Ok(())
}

/// Finds the runtime. A remark names known faults of its version, once until the next boot.
pub(super) fn runtime(
    context: &Context,
    wanted: Option<&OsStr>,
    notes: Option<&Notes>,
) -> anyhow::Result<Runtime> {
    let runtime = Runtime::locate(&context.search(), wanted, notes)?;
    if let Some(notes) = notes.filter(|_| !context.is_quiet())
        && let Some(old) = runtime.missing_fixes_once(notes)
    {
        context.remark(&old.to_string());
    }
    Ok(runtime)
}

/// Reports the start of a detached container.
fn started(id: &str, folder: &Path, how: StartReport, monitor: &Process) -> anyhow::Result<Answer> {
    if how != StartReport::Runs {
        return not_started(how);
    }
    match report::line(id) {
        Err(error) if !report::is_broken_pipe(&error) => {
            // The caller gets an error and may not know the container's name, so the container is removed.
            Err(error.context(match take_back(id, folder, monitor) {
                TakenBack::Gone => format!("container {id} was removed again"),
                TakenBack::Stays => {
                    format!("container {id} stays: `quire rm --force {id}` removes it")
                }
                TakenBack::Unsettled => {
                    format!("container {id} may still exist: `quire rm --force {id}` removes it")
                }
            }))
        }
        printed => printed.map(|()| Answer::Yes),
    }
}

pub(super) fn not_started(how: StartReport) -> anyhow::Result<Answer> {
    match how {
        StartReport::Runs => Ok(Answer::Yes),
        StartReport::Failed(error) => Err(error.into()),
        StartReport::Interrupted(signal) => {
            let code = 128 + signal.as_raw();
            Ok(Answer::Program(u8::try_from(code).unwrap_or(FAILED)))
        }
    }
}
