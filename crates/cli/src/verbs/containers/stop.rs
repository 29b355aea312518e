//! `stop`: asks containers to end, then kills them.

use clap::Args;
use container::life::end::stop;
use container::life::end::stop::StopOptions;
use container::life::lookup::{KnownContainer, KnownError, find_container};
use container::life::signal::signal_number;
use store::OpenOptions;

use crate::Answer;
use crate::output::report;
use crate::session::context::{Context, now};
use crate::verbs::VerbArgs;
use crate::verbs::containers::ps::filtered;
use crate::verbs::exit_codes::ExitCodes;

#[derive(Debug, Args)]
pub(crate) struct Stop {
    /// Names of containers
    #[arg(required_unless_present_any = ["all", "filter"])]
    pub(crate) containers: Vec<String>,
    /// Stop all running containers
    #[arg(short, long, conflicts_with = "containers")]
    pub(crate) all: bool,
    /// Stop the running containers that fit, such as label=job=7. The keys are those of `quire ps`
    #[arg(short, long, value_name = "KEY=VALUE", conflicts_with = "containers")]
    pub(crate) filter: Vec<String>,
    /// Ignore names that do not exist
    #[arg(short, long)]
    pub(crate) ignore: bool,
    /// Kill the container after this many seconds; by default the value of `run --stop-timeout`, or 10
    #[arg(short, long, alias = "timeout", value_name = "SECONDS")]
    pub(crate) time: Option<u32>,
    /// Ask the container to end by this signal; by default the image's, or TERM. `quire kill` only sends a signal
    #[arg(short, long, value_name = "SIGNAL")]
    pub(crate) signal: Option<String>,
}

impl VerbArgs for Stop {
    const NAME: &'static str = "stop";
    const ABOUT: &'static str = "Stop containers: signal them, then kill them";
    const EXAMPLES: &'static str =
        "quire stop web\n  quire stop --time 30 web db\n  quire stop --all";
    const EXIT_CODES: ExitCodes = ExitCodes::Objects;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        stop(context, self)
    }
}

pub(crate) fn stop(context: &Context, args: &Stop) -> anyhow::Result<Answer> {
    let signal = args.signal.as_deref().map(signal_number).transpose()?;
    let is_of_all = args.all || !args.filter.is_empty();
    let Some(store) = context.open_for(OpenOptions::read(), is_of_all || args.ignore)? else {
        return Ok(Answer::Yes);
    };
    let (names, found): (Vec<_>, Vec<_>) = if is_of_all {
        let found = filtered(&store, &args.filter)?.into_iter().filter(KnownContainer::is_running);
        found.map(|it| (it.id.clone(), it)).unzip()
    } else {
        let found = args
            .containers
            .iter()
            .map(|name| find_container(&store, name).map(|found| (name.clone(), found)));
        let is_ignored =
            |it: &Result<_, _>| args.ignore && matches!(it, Err(KnownError::Absent { .. }));
        let found = found.filter(|it| !is_ignored(it)).collect::<Result<Vec<_>, _>>()?;
        found.into_iter().unzip()
    };
    let wish = StopOptions { signal, timeout: args.time };
    stop::stop(&store, found, wish, &|| now().0, &|text| context.remark(text))?;
    if context.json {
        return Ok(Answer::Yes);
    }
    // As podman and Docker do.
    report::lines(names.iter().map(String::as_str))
}
