//! `start`: starts containers that were created, or that have ended, in their own folders.

mod boot_unit;

use std::cell::RefCell;
use std::fs::File;
use std::io::{Seek as _, SeekFrom};
use std::iter;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, bail};
use clap::{ArgMatches, Args, Command};
use container::boot_cache::Notes;
use container::life::background;
use container::life::end::reap::{Sweep, clear_dead};
use container::life::kept::KeptContainer;
use container::life::log::Halves;
use container::life::lookup::{KnownContainer, find_at_rest, find_container};
use container::life::monitor::CallerStreams;
use container::life::monitor_report::{MonitorReport, StartReport};
use container::life::prepare::{AdmittedImage, restart};
use container::life::rollback::roll_back;
use container::life::signal::signal_number;
use container::life::state::State;
use container::network::Ports;
use container::request::StoredRequest;
use kernel::process::{Requests, Signal, Signals, start_behind};
use store::{ContainerRecord, OpenOptions, PermittedImage, Resolved, Store};

use crate::Answer;
use crate::args::Trust;
use crate::output::report;
use crate::session::context::{Context, now};
use crate::session::signals::FORWARDED;
use crate::verbs::VerbArgs;
use crate::verbs::containers::container_options::image_config;
use crate::verbs::containers::ps::filtered;
use crate::verbs::containers::run::{exit_code, finished, not_started, runtime, with_environment};
use crate::verbs::containers::{logs, security};
use crate::verbs::exit_codes::ExitCodes;

/// Filter of containers that start at boot.
const AT_BOOT: &str = "should-start-on-boot=true";

#[expect(clippy::struct_excessive_bools, reason = "each is an option")]
#[derive(Debug, Args)]
pub(crate) struct Start {
    /// Names of containers
    #[arg(required_unless_present_any = ["all", "filter", "at_boot", "print_unit"])]
    pub(crate) containers: Vec<String>,
    /// Start all containers that do not run
    #[arg(long, conflicts_with_all = ["containers", "attach", "interactive"])]
    pub(crate) all: bool,
    /// Start the containers that fit, such as restart-policy=always, of all or of the named ones. The keys are those of
    /// `quire ps`
    #[arg(short, long, value_name = "KEY=VALUE", conflicts_with_all = ["attach", "interactive"])]
    pub(crate) filter: Vec<String>,
    /// Start the containers that start at boot: those with `run --restart always`, and those with `unless-stopped`
    /// that no user has stopped
    #[arg(long, conflicts_with_all = ["containers", "attach", "interactive", "all", "filter"])]
    pub(crate) at_boot: bool,
    /// Print a unit for systemd that runs `quire start --at-boot`: as root one of the system, otherwise one of the user
    #[arg(long, conflicts_with_all = ["containers", "attach", "interactive", "all", "filter", "at_boot"])]
    pub(crate) print_unit: bool,
    /// Print the container's output until it ends, pass signals on to it, and exit with its exit code
    #[arg(short, long)]
    pub(crate) attach: bool,
    /// The same as --attach: a container in the background has no standard input
    #[arg(short, long)]
    pub(crate) interactive: bool,
}

impl VerbArgs for Start {
    const NAME: &'static str = "start";
    const ABOUT: &'static str = "Start containers that were created or have ended";
    const DETAILS: &'static str = "A container has the settings, the name, the ports and the user ids that it had \
        before, and its changes, except those of `--writable memory`. Its log continues. The image must still be \
        allowed by the policies.";
    const EXAMPLES: &'static str = "quire start web\n  quire start --attach batch\n  quire start --all --filter label=job=7\n  \
        quire start --print-unit > quire-restart.service";
    const PRINTS_JSON: bool = false;
    const EXIT_CODES: ExitCodes = ExitCodes::Start;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        start(context, self)
    }
}

impl Start {
    /// Whether this command has the container's output.
    const fn attaches(&self) -> bool {
        self.attach || self.interactive
    }

    /// Whether the containers are not named.
    pub(crate) fn is_of_all(&self) -> bool {
        self.all || self.at_boot || !self.filter.is_empty()
    }
}

fn start(context: &Context, args: &Start) -> anyhow::Result<Answer> {
    if args.print_unit {
        return boot_unit::print(context);
    }
    if args.at_boot {
        return start_all(context, &[AT_BOOT.to_owned()], &[]);
    }
    if args.is_of_all() {
        return start_all(context, &args.filter, &args.containers);
    }
    if args.attaches() && args.containers.len() > 1 {
        bail!("--attach: only one container at a time can have this command's output");
    }
    let store = context.open(OpenOptions::write())?;
    // All names are checked before any container is started.
    for name in &args.containers {
        let found = find_container(&store, name)?;
        let has_input =
            || StoredRequest::load(&found.folder, &found.id).is_ok_and(|it| it.request.stdin);
        if args.interactive && has_input() {
            bail!(
                "container {name} was made with --interactive, so its standard input is open, but nothing can write to \
                it: leave -i out; `quire exec -it {name} sh` gives a command this input"
            );
        }
    }
    let starter = Starter::new(context, &store)?;
    for name in &args.containers {
        let begun = match starter.begin(name, Watcher::of(args))? {
            Begun::Over(answer) => return Ok(answer),
            Begun::Ran if args.attaches() => bail!(
                "container {name} is already running: `quire logs --follow {name}` prints its \
                output"
            ),
            Begun::Ran => {
                context.remark(&format!("container {name} is already running"));
                None
            }
            Begun::Runs(begun) => Some(begun),
        };
        match begun {
            Some(begun) if args.attaches() => return starter.attend(&begun),
            _ => report::line(name)?,
        }
    }
    Ok(Answer::Yes)
}

/// Starts all containers that fit the filters and do not run, or those of them with these names. One that does not start does not keep others from it.
fn start_all(context: &Context, filters: &[String], names: &[String]) -> anyhow::Result<Answer> {
    let Some(store) = context.open_for(OpenOptions::write(), true)? else {
        return Ok(Answer::Yes);
    };
    // This also ends containers whose monitor was killed.
    let starter = Starter::new(context, &store)?;
    let mut found = filtered(&store, filters)?;
    let named = names.iter().map(|name| find_container(&store, name).map(|it| it.id));
    let named = named.collect::<Result<Vec<_>, _>>()?;
    found.retain(|it| !it.is_running() && (names.is_empty() || named.contains(&it.id)));
    let mut failed = 0_usize;
    for id in found.iter().map(|it| &it.id) {
        match starter.begin(id, Watcher::Monitor) {
            Ok(Begun::Runs(_) | Begun::Ran) => report::line(id)?,
            Ok(Begun::Over(answer)) => return Ok(answer),
            Err(error) => {
                failed += 1;
                let error = error.context(format!("cannot start container {id}"));
                context.complain(&error, exit_code(&error));
            }
        }
    }
    if failed > 0 {
        bail!("{failed} of {} did not start", report::count(found.len(), "container"));
    }
    Ok(Answer::Yes)
}

/// Result of starting a container.
pub(crate) enum Begun {
    Runs(BegunContainer),
    /// It was running already.
    Ran,
    /// It did not start because a signal arrived, or it has already ended in the foreground.
    Over(Answer),
}

/// The process that watches a container until its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Watcher {
    Monitor,
    /// This process, if the container is removed at its end.
    Caller,
}

impl Watcher {
    const fn of(args: &Start) -> Self {
        if args.attach { Self::Caller } else { Self::Monitor }
    }
}

/// A container that was just started.
pub(crate) struct BegunContainer {
    id: String,
    folder: PathBuf,
    /// The newer half of its log, after the output of earlier runs. `None` if it had no log.
    log: Option<File>,
}

/// Starts containers of a store.
pub(crate) struct Starter<'a> {
    context: &'a Context,
    store: &'a Store,
    signals: Arc<Signals>,
    /// Names of running containers.
    living: Vec<String>,
}

impl<'a> Starter<'a> {
    /// Blocks signals, so that none ends this process while a folder is in the middle of a start.
    pub(crate) fn new(context: &'a Context, store: &'a Store) -> anyhow::Result<Self> {
        let signals = Arc::new(Signals::block(&FORWARDED)?);
        let asked = Arc::clone(&signals);
        store.give_up_when(move || asked.ending().is_some());
        let (_, living) = clear_dead(store, Sweep::Brief, &|| now().0);
        Ok(Self { context, store, signals, living })
    }

    /// Starts a container, and waits until it runs.
    pub(super) fn begin(&self, name: &str, watcher: Watcher) -> anyhow::Result<Begun> {
        let Self { store, .. } = *self;
        let is_asked = || self.signals.ending().is_some();
        let (known, folder) = find_at_rest(store, name, &is_asked)?;
        let Some(folder) = folder.filter(|_| !known.is_unwatched) else { return Ok(Begun::Ran) };
        let kept = KeptContainer::open(folder, now().0)?;
        self.begin_kept(&known, kept, watcher)
    }

    /// Replaces the changes of a container at rest by those of a snapshot, or by none. Then starts it if it `runs`.
    pub(crate) fn roll_back(
        &self,
        name: &str,
        snapshot: Option<&str>,
        runs: bool,
    ) -> anyhow::Result<Option<Begun>> {
        let Self { context, store, .. } = *self;
        let is_asked = || self.signals.ending().is_some();
        let (known, folder) = find_at_rest(store, name, &is_asked)?;
        let Some(folder) = folder else {
            bail!("container {name} was started by another command: roll it back again");
        };
        let kept = KeptContainer::open(folder, now().0)?;
        let kept = roll_back(store, kept, snapshot, &context.search())?;
        if !runs {
            return Ok(None);
        }
        self.begin_kept(&known, kept, Watcher::Monitor).map(Some)
    }

    fn begin_kept(
        &self,
        known: &KnownContainer,
        mut kept: KeptContainer,
        watcher: Watcher,
    ) -> anyhow::Result<Begun> {
        let Self { context, store, .. } = *self;
        let is_kept = kept.request().keep;
        let apparmor = security::apparmor_again(context, &kept.request().bundle.security)?;
        kept.request_mut().bundle.security.apparmor = apparmor;
        let ports = kept.request().pasta.iter().flat_map(|it| &it.ports);
        for port in ports {
            Ports::check(port).with_context(|| format!("cannot start container {}", known.id))?;
        }
        let record = kept.record().clone();
        let shared = shared_store(context, record.shared.as_deref())?;
        let images = shared.as_ref().unwrap_or(store);
        let image = image(context, images, &record)?;
        let config = image_config(images, image.found())?;
        let runtime_dir = std::env::var_os("XDG_RUNTIME_DIR");
        let notes = Notes::of_user(context.who(), runtime_dir.as_deref());
        let path = kept.runtime().path.clone();
        runtime(context, Some(path.as_os_str()), notes.as_ref())?;
        let trust = usual::<Trust>()?;
        let image = AdmittedImage { store: images, image };
        let signals = Arc::clone(&self.signals);
        let ready = with_environment(context, &trust, notes.as_ref(), &self.signals, |around| {
            Ok(restart(store, image, config, kept, &self.living, signals, around)?)
        })?;
        // The end of such a container removes its log and its exit code.
        if watcher == Watcher::Caller && !is_kept && !ready.has_terminal() {
            // Such a check would discard the signals that are for the container.
            store.give_up_when(|| false);
            let remark = |text: &str| context.remark(text);
            let finish = ready.run_and_record(CallerStreams::OUTPUTS, &|| now().0, &remark);
            return finished(context, finish).map(Begun::Over);
        }
        let (id, folder) = (ready.id().to_owned(), ready.path().to_owned());
        let log = end_of_log(known).with_context(|| format!("cannot read the log of {id}"))?;
        let (report, monitor) = start_behind(|report| ready.watch(report, None, &|| now().0))?;
        match MonitorReport::new(&id, report).wait(&monitor, &self.signals)? {
            StartReport::Runs => Ok(Begun::Runs(BegunContainer { id, folder, log })),
            how => not_started(how).map(Begun::Over),
        }
    }

    /// Prints the output of a container until it ends, and returns its exit code. Signals go to the container.
    fn attend(&self, begun: &BegunContainer) -> anyhow::Result<Answer> {
        let BegunContainer { id, folder, log } = begun;
        // Such a check would discard the signals that are for the container.
        self.store.give_up_when(|| false);
        let failed = || format!("cannot read the log in {}", folder.display());
        let log = match log {
            Some(log) => log.try_clone().with_context(failed)?,
            None => match Halves::open(folder).with_context(failed)? {
                Some(Halves { newer, .. }) => newer,
                None => bail!("container {id} has no log"),
            },
        };
        let requests = RefCell::new(Requests::default());
        let is_over = || -> anyhow::Result<bool> {
            while let Some(received) = self.signals.next()? {
                let mut requests = requests.borrow_mut();
                pass_on(self.context, id, folder, received.signal, &mut requests);
            }
            // Another command may have removed it.
            let known = find_container(self.store, id);
            known.map_or(Ok(true), |it| Ok(!it.is_alive(self.store)?))
        };
        logs::follow(folder, log, &is_over)?;
        let known = find_container(self.store, id)?;
        if let Some(reason) = known.reason() {
            self.context.remark(reason.sentence());
        }
        if known.has_lost() {
            bail!(container::life::end::ended::LOST);
        }
        let code = known.code();
        let code = code.with_context(|| {
            format!("the exit code of container {id} is unknown: its monitor was killed")
        })?;
        Ok(Answer::Program(u8::try_from(code).unwrap_or(u8::MAX)))
    }
}

/// Passes a signal on to a container. The third request to end kills the container.
pub(super) fn pass_on(
    context: &Context,
    id: &str,
    folder: &Path,
    signal: Signal,
    requests: &mut Requests,
) {
    let name = match requests.add(signal) {
        Some(3..) => "KILL".to_owned(),
        count => {
            if count == Some(2) {
                context.remark("the container was signalled twice: a third signal kills it");
            }
            signal.as_raw().to_string()
        }
    };
    let number = signal_number(&name).unwrap_or_default();
    if let Err(error) = background::note_stopped(folder, number) {
        context.remark(&format!("cannot record the stop of container {id}: {error}"));
    }
    if matches!(State::load(folder), Ok(Some(State { delay: Some(_), .. }))) {
        // There is no program that could get the signal.
        return;
    }
    if let Err(error) = background::signal(folder, id, &name) {
        context.remark(&error);
    }
}

/// Checks, without a change, that a container has settings and an image with which it can start again. Returns the
/// settings.
pub(crate) fn check_restart(
    context: &Context,
    store: &Store,
    known: &KnownContainer,
) -> anyhow::Result<StoredRequest> {
    let stored = StoredRequest::load(&known.folder, &known.id)?;
    let damaged = || format!("container {} is damaged", known.id);
    let record = known.record.as_ref().with_context(damaged)?;
    let shared = shared_store(context, record.shared.as_deref())?;
    drop(image(context, shared.as_ref().unwrap_or(store), record)?);
    Ok(stored)
}

/// Returns the store in the directory `shared`, which has a container's image. `None` for the user's own store.
pub(crate) fn shared_store(
    context: &Context,
    shared: Option<&str>,
) -> anyhow::Result<Option<Store>> {
    let Some(path) = shared else { return Ok(None) };
    let found = context.open_shared().find(|it| it.path() == Path::new(path));
    found.map(Some).with_context(|| {
        format!(
            "the container's image is in the store {path}: use --image-store {path}, if it is \
            still shared"
        )
    })
}

/// Opens a container's image, if the policies allow it now.
pub(crate) fn image(
    context: &Context,
    images: &Store,
    record: &ContainerRecord,
) -> anyhow::Result<PermittedImage> {
    let found = || Resolved {
        image: record.image,
        name: record.name.as_ref().and_then(|it| it.parse().ok()),
        manifest: record.manifest,
    };
    let permitted = crate::session::policy::permit(context, images, found())?;
    #[cfg(feature = "serve")]
    {
        use store::OpenImageError;

        use crate::args::{LazyChoice, LazyOptions};
        use crate::verbs::services::lazy;

        let mut wanted = usual::<LazyOptions>()?;
        match lazy::open(context, images, permitted, &wanted) {
            // The container was started with --lazy, and its image is still not complete.
            Err(error) if matches!(error.downcast_ref(), Some(OpenImageError::Partial(_))) => {
                wanted.lazy = Some(LazyChoice::Prefer);
                let permitted = crate::session::policy::permit(context, images, found())?;
                lazy::open(context, images, permitted, &wanted)
            }
            opened => opened,
        }
    }
    #[cfg(not(feature = "serve"))]
    Ok(permitted.open(images)?)
}

/// Returns a group of options as it is if the command line has none of them.
pub(crate) fn usual<T: Args>() -> anyhow::Result<T> {
    let command = T::augment_args(Command::default().no_binary_name(true));
    let matches: ArgMatches = command.try_get_matches_from(iter::empty::<&str>())?;
    Ok(T::from_arg_matches(&matches)?)
}

/// Returns the newer half of a container's log, at its end.
pub(super) fn end_of_log(known: &KnownContainer) -> std::io::Result<Option<File>> {
    let Some(Halves { mut newer, .. }) = Halves::open(&known.folder)? else { return Ok(None) };
    newer.seek(SeekFrom::End(0))?;
    Ok(Some(newer))
}
