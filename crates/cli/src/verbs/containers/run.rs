//! `run`: a command in a container whose root is an image.

mod attached;

use std::ffi::OsString;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;

use anyhow::bail;
use clap::Args;
use container::life::ended::LOST;
use container::life::monitor::{FAILED, RunError, Watch};
use container::life::prepare::{Ready, Surroundings, random_id};
use container::life::reap::{Sweep, clear_dead};
use container::life::running::Finish;
use container::life::stop::signal_number;
use container::life::told::{MonitorReport, NotStarted, StartReport, TakenBack, take_back};
use container::notes::Notes;
use container::plan::ContainerPlan;
use container::runtime::Runtime;
use kernel::process::{Process, Signals, start_behind};
use store::OpenOptions;

use crate::Answer;
use crate::args::{LogSize, Tty, Wanted};
use crate::output::report;
use crate::session::context::{Context, now};
use crate::session::signals::FORWARDED;
use crate::verbs::VerbArgs;
use crate::verbs::containers::rootless::Ways;
use crate::verbs::containers::wanted::{GivenFiles, container_wish, image_config, terminal_of_run};
use crate::verbs::help::RUN_CODES;

#[derive(Debug, Args)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) wanted: Wanted,
    /// Have ports of the host lead to ports of the container; implies `--network pasta`. Without HOST, any free port, which
    /// `ps` lists; both may be ranges, such as 8000-8003
    #[arg(short, long, value_name = "[[IP:]HOST:]CONTAINER[/udp]")]
    pub(crate) publish: Vec<crate::args::ports::Published>,
    /// OCI runtime, by name or path; by default the first of crun, runc and runsc that is installed. With runsc, gVisor keeps
    /// pipes, sockets and an empty /tmp in memory, so they are in no layer
    #[arg(long, env = "QUIRE_RUNTIME", value_name = "RUNTIME")]
    pub(crate) runtime: Option<OsString>,
    /// Run in the background; `ps` lists the container, `logs` prints its output, `rm` removes it
    #[arg(short, long)]
    pub(crate) detach: bool,
    /// Remove the container when it ends; without --detach this is always so
    #[arg(long)]
    pub(crate) rm: bool,
    /// Kill the container after this many seconds; the exit code is then 255. 0 means no limit
    #[arg(long, value_name = "SECONDS", default_value_t = 0, hide_default_value = true)]
    pub(crate) timeout: u32,
    /// Signal that `stop` sends first; by default the image's, or TERM
    #[arg(long, value_name = "SIGNAL")]
    pub(crate) stop_signal: Option<String>,
    /// Seconds after which `stop` kills the container, unless `stop --time` says otherwise; by default 10
    #[arg(long, value_name = "SECONDS")]
    pub(crate) stop_timeout: Option<u32>,
    /// Limit the log to this size, at least 4 KiB; at the limit, the older half is dropped. 0 means no limit
    #[arg(long, value_name = "SIZE", default_value = "64m")]
    pub(crate) log_size: LogSize,
    /// Name the container: 1 to 64 letters, digits, `-`, `_` and `.`; by default twelve digits
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) tty: Tty,
    /// A name of an image, an image id or its first digits (6 or more)
    pub(crate) image: String,
    /// The command; by default the image's
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<OsString>,
}

impl VerbArgs for Run {
    const NAME: &'static str = "run";
    const ABOUT: &'static str = "Run a command in a container whose root is an image";
    const EXAMPLES: &'static str = "quire run debian -- cat /etc/os-release\n  quire run -d --name web -v /srv/www:/www:ro nginx\n  \
         quire run --read-only --memory 512m --userns auto app";
    const HAS_SHORT_HELP: bool = false;
    const PRINTS_JSON: bool = false;
    const EXIT_CODES: &'static str = RUN_CODES;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        run(context, self)
    }
}

/// The exit code for a container that did not run.
pub(crate) fn exit_code(error: &anyhow::Error) -> u8 {
    if let Some(NotStarted { code, .. }) = error.downcast_ref() {
        return *code;
    }
    error.downcast_ref().map_or(FAILED, RunError::exit_code)
}

pub(crate) fn run(context: &Context, args: &Run) -> anyhow::Result<Answer> {
    // A file may be a pipe without a writer, and a signal ends the wait for it.
    let given = GivenFiles::read(&args.wanted)?;
    // Before the rest: no signal may end us between the container's folder and its removal.
    let signals = Arc::new(Signals::block(&FORWARDED)?);
    let ready = prepare(context, args, given, signals)?;
    if args.detach {
        let (id, path) = (ready.id().to_owned(), ready.path().to_owned());
        let signals = Arc::clone(ready.signals());
        let (report, monitor) = start_behind(|report| ready.watch(report, None, &|| now().0))?;
        let how = MonitorReport::new(&id, report).wait(&monitor, &signals)?;
        return started(&id, &path, how, &monitor);
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

fn prepare(
    context: &Context,
    args: &Run,
    given: GivenFiles,
    signals: Arc<Signals>,
) -> anyhow::Result<Ready> {
    let terminal = terminal_of_run(args)?;
    if let Some(signal) = &args.stop_signal {
        signal_number(signal)?;
    }
    let search = context.search();
    let runtime_dir = std::env::var_os("XDG_RUNTIME_DIR");
    let notes = Notes::of_user(context.who(), runtime_dir.as_deref());
    let runtime = Runtime::find(&search, args.runtime.as_deref(), notes.as_ref())?;
    if let Some(notes) = notes.as_ref().filter(|_| !context.is_quiet())
        && let Some(old) = runtime.missing_fixes_once(notes)
    {
        context.remark(&old.to_string());
    }
    #[cfg(feature = "serve")]
    crate::verbs::images::pull::pull_first(context, &args.image, &args.wanted.lazy)?;
    // Whose image it is, if it may be somebody else's.
    let others = match context.shared() {
        [] => None,
        _ => Some(context.open_with(&args.image)?),
    };
    let is_here = others.as_ref().is_none_or(store::Store::is_own);
    let options = if is_here { OpenOptions::write() } else { OpenOptions::create() };
    let store = context.open(options)?;
    let images = others.as_ref().unwrap_or(&store);
    for store in [&store, images] {
        let asked = Arc::clone(&signals);
        store.give_up_when(move || asked.ending().is_some());
    }
    let (_, living) = clear_dead(&store, Sweep::Brief, &|| now().0);
    let found = crate::session::resolve::resolve(images, &args.image)?;
    let image = crate::session::policy::permit(context, images, found)?;
    #[cfg(feature = "serve")]
    let (image, watch) =
        crate::verbs::services::lazy::open_watched(context, images, image, &args.wanted.lazy)?;
    #[cfg(feature = "serve")]
    let watch = watch.map(|it| Box::new(it) as Box<dyn Watch>);
    #[cfg(not(feature = "serve"))]
    let (image, watch) = (image.open(images)?, None::<Box<dyn Watch>>);
    let config = image_config(images, image.found())?;
    let id = args.name.clone().map_or_else(random_id, Ok)?;
    // Before it is taken for a host name.
    store::check_id(&id)?;
    let plan = ContainerPlan::new(
        config,
        container_wish(context, args, terminal, id, given)?,
        runtime.kind,
    )?;
    let asked = Arc::clone(&signals);
    let input = std::io::stdin();
    let ways = Ways::new(context.who(), &args.wanted.trust);
    let via = ways.via(&args.wanted.trust);
    let around = Surroundings {
        search: &search,
        now: now(),
        unique: &random_id()?,
        terminal: input.as_fd(),
        notes: notes.as_ref(),
        via,
        remark: &|text| context.remark(text),
        is_asked_to_end: &|| asked.ending().is_some(),
    };
    let image = (images, image);
    let ready =
        container::life::prepare::prepare(&store, image, plan, runtime, &living, signals, &around)?;
    Ok(ready.with(watch))
}

/// Tells how the start of a detached container went.
fn started(id: &str, folder: &Path, how: StartReport, monitor: &Process) -> anyhow::Result<Answer> {
    if how != StartReport::Runs {
        return not_started(how);
    }
    match report::line(id) {
        Err(error) if !report::is_broken_pipe(&error) => {
            // Whoever asked for it is told that this failed, and may not know its name.
            Err(error.context(match take_back(id, folder, monitor) {
                TakenBack::Gone => format!("container {id} was removed again"),
                TakenBack::Stays => {
                    format!("container {id} stays: `quire rm --force {id}` removes it")
                }
                TakenBack::Unsettled => {
                    format!("container {id} may stay: `quire rm --force {id}` makes sure")
                }
            }))
        }
        printed => printed.map(|()| Answer::Yes),
    }
}

fn not_started(how: StartReport) -> anyhow::Result<Answer> {
    match how {
        StartReport::Runs => Ok(Answer::Yes),
        StartReport::Failed(error) => Err(error.into()),
        StartReport::Interrupted(signal) => {
            let code = 128 + signal.as_raw();
            Ok(Answer::Program(u8::try_from(code).unwrap_or(FAILED)))
        }
    }
}
