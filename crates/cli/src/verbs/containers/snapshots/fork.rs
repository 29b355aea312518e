//! `fork`: makes containers that begin with the root of another one.

use std::collections::VecDeque;
use std::num::NonZero;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use clap::Args;
use container::boot_cache::Notes;
use container::life::end::reap::{Sweep, clear_dead};
use container::life::lookup::{KnownContainer, find_container};
use container::life::monitor_report::{MonitorReport, StartReport};
use container::life::prepare::{AdmittedImage, TakenName, prepare, random_id};
use container::plan::ContainerPlan;
use container::request::{ChildBase, StoredRequest};
use container::runtime::Runtime;
use container::snapshot::take::SnapshotName;
use kernel::process::{Process, Signals, start_behind};
use store::{ContainerSnapshot, OpenOptions, Store};

use crate::Answer;
use crate::args::Program;
use crate::output::report;
use crate::session::context::{Context, now};
use crate::session::signals::FORWARDED;
use crate::verbs::VerbArgs;
use crate::verbs::containers::container_options::image_config;
use crate::verbs::containers::exec::{Exec, exec};
use crate::verbs::containers::run::{not_started, with_environment};
use crate::verbs::containers::security;
use crate::verbs::containers::snapshots::snapshot::{settle_behind, take_snapshot};
use crate::verbs::containers::snapshots::{clear_unneeded, fits};
use crate::verbs::containers::start::{image, shared_store, usual};
use crate::verbs::exit_codes::ExitCodes;

/// Most containers that one call makes.
const COUNT_MAX: i64 = 10_000;

#[derive(Debug, Args)]
pub(crate) struct Fork {
    /// The container, which runs or has ended
    pub(crate) container: String,
    /// Make this many containers
    #[arg(short = 'n', long = "count", value_name = "N", default_value = "1",
        value_parser = clap::value_parser!(u32).range(1..=COUNT_MAX))]
    pub(crate) count: u32,
    /// Name them like this, where `{}` stands for a number from 1 on; without `{}`, and with more than one container,
    /// the number follows the name. The default is twelve random hexadecimal digits
    #[arg(long, value_name = "PATTERN")]
    pub(crate) name: Option<String>,
    /// Begin with this snapshot of the container, instead of a new one
    #[arg(long, value_name = "SNAPSHOT")]
    pub(crate) from: Option<String>,
    /// Run this command with `sh -c` in each new container after its start, with its number in the variable QUIRE_FORK
    #[arg(long, value_name = "COMMAND")]
    pub(crate) hook: Option<String>,
}

impl VerbArgs for Fork {
    const NAME: &'static str = "fork";
    const ABOUT: &'static str = "Make containers that begin with the root of another one";
    const DETAILS: &'static str = "The new containers have the image, the settings and the changes of the container, and \
        their own writable layers. They run its command from the beginning: processes and memory are not copied. They \
        publish no ports, because those of the container are in use, share its volumes, and have the same ids on \
        the host with `--userns`.\n\n\
        The container continues. Quire freezes it for a moment, as for `quire snapshot`.";
    const EXAMPLES: &'static str = "quire fork agent\n  quire fork agent -n 8 --name 'try-{}' --hook 'echo $QUIRE_FORK >/tmp/number'";
    const PRINTS_JSON: bool = false;
    const EXIT_CODES: ExitCodes = ExitCodes::Start;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        fork(context, self)
    }
}

/// Returns the name of a child, or `None` for a random one.
fn child_name(pattern: Option<&str>, number: u32, count: u32) -> Option<String> {
    let pattern = pattern?;
    Some(match pattern.contains("{}") {
        true => pattern.replace("{}", &number.to_string()),
        false if count == 1 => pattern.to_owned(),
        false => format!("{pattern}-{number}"),
    })
}

fn fork(context: &Context, args: &Fork) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::write())?;
    let parent = find_container(&store, &args.container)?;
    let stored = StoredRequest::load(&parent.folder, &parent.id)?;
    let mut names = Vec::new();
    for number in 1..=args.count {
        let name = child_name(args.name.as_deref(), number, args.count);
        let id = name.map_or_else(random_id, Ok)?;
        store::check_id(&id)?;
        names.push(id);
    }
    // A taken name is found before the container is frozen.
    for id in &names {
        if store.containers.get(id)?.is_some() {
            bail!("container {id} already exists: choose another --name");
        }
    }
    let snapshot = match &args.from {
        Some(name) => of_parent(store.container_snapshots.find(name)?, &parent)?,
        None => take_snapshot(&store, &parent.id, &SnapshotName::None)?.snapshot,
    };
    let map = snapshot.record.map.as_deref().map(str::parse).transpose();
    let map = map.context("the map of the snapshot's user ids")?;
    let id = snapshot.id.clone();
    let base = ChildBase { snapshot: Some(id.clone()), map };
    let signals = Arc::new(Signals::block(&FORWARDED)?);
    let asked = Arc::clone(&signals);
    store.give_up_when(move || asked.ending().is_some());
    let forker = Forker { context, store: &store, parent: &parent, stored, base, signals };
    let begun = forker.begin_all(&names);
    // From here on, only the children keep the snapshot.
    drop(snapshot);
    if !matches!(begun, Ok(None)) {
        clear_unneeded(&store);
    }
    // The process in the background must not have a snapshot open that is unneeded.
    if args.from.is_none() && store.container_snapshots.by_id(&id).is_ok() {
        settle_behind(&store, &id);
    }
    if let Some(answer) = begun? {
        return Ok(answer);
    }
    // A command in a container needs its own mount namespace, in which no further root can be made.
    for (id, number) in names.iter().zip(1..) {
        if let Some(hook) = &args.hook {
            run_hook(context, id, hook, number)?;
        }
    }
    Ok(Answer::Yes)
}

/// Checks that a snapshot is one of the container's.
fn of_parent(
    snapshot: ContainerSnapshot,
    parent: &KnownContainer,
) -> anyhow::Result<ContainerSnapshot> {
    let name = snapshot.record.name.as_deref().unwrap_or(&snapshot.id);
    if snapshot.record.container != parent.id {
        let other = &snapshot.record.container;
        bail!(
            "snapshot {name} is of container {other}: use `quire fork {other}`, or `quire run --from {name}`"
        );
    }
    if !fits(&snapshot.record, parent) {
        bail!(
            "snapshot {name} is of an earlier container {}, with another image or other user ids: use \
            `quire run --from {name}`",
            parent.id
        );
    }
    Ok(snapshot)
}

/// Starts the children of a container.
struct Forker<'a> {
    context: &'a Context,
    store: &'a Store,
    parent: &'a KnownContainer,
    stored: StoredRequest,
    base: ChildBase,
    signals: Arc<Signals>,
}

/// A child that a monitor is starting.
struct StartedChild {
    id: String,
    report: MonitorReport,
    monitor: Process,
}

impl Forker<'_> {
    /// Starts the children, and prints the name of each one when it runs. As many runtimes work at a time as there are
    /// processors. After a failure, no further child is started. Returns the answer of a child that did not start.
    fn begin_all(&self, names: &[String]) -> anyhow::Result<Option<Answer>> {
        let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
        let mut outcome = Ok(None);
        let mut names = names.iter();
        let mut started = VecDeque::new();
        loop {
            while matches!(outcome, Ok(None)) && started.len() < processors {
                let Some(id) = names.next() else { break };
                match self.begin(id, &mut started) {
                    Ok(child) => started.push_back(child),
                    Err(error) => outcome = Err(error),
                }
            }
            let Some(child) = started.pop_front() else { return outcome };
            let answer = self.wait(child);
            if matches!(outcome, Ok(None)) {
                outcome = answer;
            }
        }
    }

    /// Waits until a child runs, and prints its name. Returns the answer of the program if a signal has arrived.
    fn wait(&self, child: StartedChild) -> anyhow::Result<Option<Answer>> {
        let StartedChild { id, report, monitor } = child;
        match report.wait(&monitor, &self.signals)? {
            StartReport::Runs => report::line(&id).map(|()| None),
            how => not_started(how).map(Some),
        }
    }

    /// Begins to start a child. `others` are being started already.
    fn begin(&self, id: &str, others: &mut VecDeque<StartedChild>) -> anyhow::Result<StartedChild> {
        let Self { context, store, parent, .. } = *self;
        let damaged = || format!("container {} is damaged", parent.id);
        let record = parent.record.as_ref().with_context(damaged)?;
        let (_, living) = clear_dead(store, Sweep::Brief, &|| now().0);
        let shared = shared_store(context, record.shared.as_deref())?;
        let images = shared.as_ref().unwrap_or(store);
        let image = image(context, images, record)?;
        let config = image_config(images, image.found())?;
        let mut wish = self.stored.clone().for_child(id, self.base.clone());
        wish.bundle.security.renew().context("cannot have a device of the container")?;
        wish.bundle.security.apparmor = security::apparmor_again(context, &wish.bundle.security)?;
        let runtime_dir = std::env::var_os("XDG_RUNTIME_DIR");
        let notes = Notes::of_user(context.who(), runtime_dir.as_deref());
        let runtime = Runtime::at(self.stored.runtime.clone());
        let plan = ContainerPlan::new(config, wish, runtime.kind)?;
        let trust = usual()?;
        let image = AdmittedImage { store: images, image };
        let signals = Arc::clone(&self.signals);
        let ready = with_environment(context, &trust, notes.as_ref(), &self.signals, |around| {
            Ok(prepare(store, image, plan, runtime, &living, signals, TakenName::Refused, around)?)
        })?;
        let (report, monitor) = start_behind(|report| {
            // The monitor must not keep the descriptors of the others.
            others.clear();
            ready.watch(report, None, &|| now().0);
        })?;
        let report = MonitorReport::new(id, report);
        Ok(StartedChild { id: id.to_owned(), report, monitor })
    }
}

/// Runs the hook in a child. A hook that fails is an error, and the child stays.
fn run_hook(context: &Context, id: &str, hook: &str, number: u32) -> anyhow::Result<()> {
    let program = Program { env: vec![format!("QUIRE_FORK={number}")], ..usual()? };
    let command = ["sh", "-c", hook].map(str::to_owned).to_vec();
    let args = Exec {
        detach: false,
        program,
        tty: usual()?,
        descriptors: usual()?,
        container: id.to_owned(),
        command,
    };
    match exec(context, &args)? {
        Answer::Program(0) => Ok(()),
        Answer::Program(code) => bail!("the hook of container {id} ended with {code}"),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::child_name;

    #[test]
    fn patterns_become_names() {
        let check = |pattern, number, count, expect: Option<&str>| {
            assert_eq!(child_name(pattern, number, count).as_deref(), expect);
        };
        check(None, 1, 1, None);
        check(Some("a"), 1, 1, Some("a"));
        check(Some("a"), 3, 4, Some("a-3"));
        check(Some("a{}b"), 3, 4, Some("a3b"));
        check(Some("{}"), 1, 1, Some("1"));
    }
}
