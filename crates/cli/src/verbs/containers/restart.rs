//! `restart`: stops containers and starts them again, in their own folders.

use anyhow::bail;
use clap::Args;
use container::life::end::stop::{self, StopOptions};
use container::life::lookup::{KnownContainer, find_container};
use store::OpenOptions;

use crate::Answer;
use crate::output::report;
use crate::session::context::{Context, now};
use crate::verbs::VerbArgs;
use crate::verbs::containers::ps::filtered;
use crate::verbs::containers::run::exit_code;
use crate::verbs::containers::start::{Begun, Starter, Watcher, check_restart};
use crate::verbs::exit_codes::ExitCodes;

#[derive(Debug, Args)]
pub(crate) struct Restart {
    /// Names of containers
    #[arg(required_unless_present_any = ["all", "running", "filter"])]
    pub(crate) containers: Vec<String>,
    /// Restart all containers, also those that do not run
    #[arg(short, long, conflicts_with = "containers")]
    pub(crate) all: bool,
    /// Restart all running containers
    #[arg(long, conflicts_with_all = ["containers", "all"])]
    pub(crate) running: bool,
    /// Restart the containers that fit, such as label=job=7. The keys are those of `quire ps`
    #[arg(short, long, value_name = "KEY=VALUE", conflicts_with = "containers")]
    pub(crate) filter: Vec<String>,
    /// Kill a running container after this many seconds; by default the value of `run --stop-timeout`, or 10
    #[arg(short, long, alias = "timeout", value_name = "SECONDS")]
    pub(crate) time: Option<u32>,
}

impl VerbArgs for Restart {
    const NAME: &'static str = "restart";
    const ABOUT: &'static str = "Stop containers if they run, and start them again";
    const DETAILS: &'static str = "A container keeps its settings, its name, its ports and its changes, as with \
        `quire start`.";
    const EXAMPLES: &'static str =
        "quire restart web\n  quire restart --time 30 web db\n  quire restart --running";
    const PRINTS_JSON: bool = false;
    const EXIT_CODES: ExitCodes = ExitCodes::Start;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        restart(context, self)
    }
}

impl Restart {
    /// Whether the containers are not named.
    pub(crate) fn is_of_all(&self) -> bool {
        self.all || self.running || !self.filter.is_empty()
    }
}

fn restart(context: &Context, args: &Restart) -> anyhow::Result<Answer> {
    let Some(store) = context.open_for(OpenOptions::write(), args.is_of_all())? else {
        return Ok(Answer::Yes);
    };
    let found: Vec<_> = if args.is_of_all() {
        let found = filtered(&store, &args.filter)?.into_iter();
        found.filter(|it| !args.running || it.is_running()).collect()
    } else {
        let found = args.containers.iter().map(|name| find_container(&store, name));
        found.collect::<Result<_, _>>()?
    };
    for known in &found {
        // Such a container would be gone before its start.
        if known.record.as_ref().is_some_and(|it| !it.keep) {
            bail!("container {} is removed when it ends, so it cannot be started again", known.id);
        }
        // The same for one whose settings or image cannot be used.
        check_restart(context, &store, known)?;
    }
    let ids: Vec<_> = found.iter().map(|it| it.id.clone()).collect();
    let running: Vec<_> = found.into_iter().filter(|it| !it.is_created).collect();
    let wish = StopOptions { signal: None, timeout: args.time };
    stop_all(context, &store, running, wish)?;
    let starter = Starter::new(context, &store)?;
    let mut failed = 0_usize;
    for id in &ids {
        match starter.begin(id, Watcher::Monitor) {
            Ok(Begun::Runs(_) | Begun::Ran) => report::line(id)?,
            Ok(Begun::Over(answer)) => return Ok(answer),
            Err(error) if ids.len() == 1 => return Err(error),
            // The others are stopped, so they must be started all the same.
            Err(error) => {
                failed += 1;
                let error = error.context(format!("cannot start container {id}"));
                context.complain(&error, exit_code(&error));
            }
        }
    }
    if failed > 0 {
        bail!("{failed} of {} did not start", report::count(ids.len(), "container"));
    }
    Ok(Answer::Yes)
}

fn stop_all(
    context: &Context,
    store: &store::Store,
    running: Vec<KnownContainer>,
    wish: StopOptions,
) -> anyhow::Result<()> {
    Ok(stop::stop(store, running, wish, &|| now().0, &|text| context.remark(text))?)
}
