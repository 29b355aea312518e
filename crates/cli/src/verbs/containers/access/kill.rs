//! `kill`: sends a signal to running containers, and waits for nothing.

use anyhow::bail;
use clap::Args;
use container::life::background;
use container::life::lookup::{KnownContainer, all, find_container};
use container::life::signal::signal_number;
use store::OpenOptions;

use crate::Answer;
use crate::output::report;
use crate::session::context::Context;
use crate::verbs::VerbArgs;
use crate::verbs::exit_codes::ExitCodes;

#[derive(Debug, Args)]
pub(crate) struct Kill {
    /// Send this signal, by name or number
    #[arg(short, long, value_name = "SIGNAL", default_value = "KILL", allow_hyphen_values = true)]
    pub(crate) signal: String,
    /// Send it to all running containers
    #[arg(short, long, conflicts_with = "containers")]
    pub(crate) all: bool,
    /// Names of containers
    #[arg(required_unless_present = "all")]
    pub(crate) containers: Vec<String>,
}

impl VerbArgs for Kill {
    const NAME: &'static str = "kill";
    const ABOUT: &'static str = "Send a signal to running containers";
    const DETAILS: &'static str = "The signal goes to the first process of the container, and the container goes on if \
        the program handles it. `quire stop` asks a container to end, and kills it after some time.";
    const EXAMPLES: &'static str = "quire kill --signal HUP web\n  quire kill web";
    const PRINTS_JSON: bool = false;
    const EXIT_CODES: ExitCodes = ExitCodes::Objects;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        kill(context, self)
    }
}

/// Number of `SIGKILL`.
const KILL: u8 = 9;

fn kill(context: &Context, args: &Kill) -> anyhow::Result<Answer> {
    // As for kill(1) and podman, `-HUP` is `HUP`.
    let signal = signal_number(args.signal.strip_prefix('-').unwrap_or(&args.signal))?;
    let Some(store) = context.open_for(OpenOptions::read(), args.all)? else {
        return Ok(Answer::Yes);
    };
    let found: Vec<KnownContainer> = if args.all {
        all(&store)?.into_iter().filter(KnownContainer::is_running).collect()
    } else {
        let found = args.containers.iter().map(|name| find_container(&store, name));
        found.collect::<Result<_, _>>()?
    };
    // All are checked before any gets the signal.
    if let Some(other) = found.iter().find(|it| !it.is_running()) {
        bail!(
            "only running containers get signals, and the status of {} is {}",
            other.id,
            other.status()
        );
    }
    for known in &found {
        if signal == KILL {
            known.kill(&store)?;
            report::line(&known.id)?;
            continue;
        }
        known.note_stopped(signal)?;
        if known.is_restarting()? {
            // There is no program that could get the signal.
        } else if let Err(message) =
            background::signal(&known.folder, &known.id, &signal.to_string())
        {
            // It may have ended just now.
            if known.is_alive(&store)? || !args.all {
                bail!(message);
            }
        }
        report::line(&known.id)?;
    }
    Ok(Answer::Yes)
}
