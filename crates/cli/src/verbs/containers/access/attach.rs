//! `attach`: prints what a container writes from now on, passes signals on, and exits with the container's exit code.

use std::cell::RefCell;

use anyhow::{Context as _, bail};
use clap::Args;
use container::life::log::Halves;
use container::life::lookup::find_container;
use container::life::state::{Code, Reason};
use kernel::process::{Requests, Signals};
use store::OpenOptions;

use crate::Answer;
use crate::session::context::Context;
use crate::session::failure::UsageError;
use crate::session::signals::FORWARDED;
use crate::verbs::VerbArgs;
use crate::verbs::containers::logs;
use crate::verbs::containers::start::{end_of_log, pass_on};
use crate::verbs::exit_codes::ExitCodes;

#[derive(Debug, Args)]
pub(crate) struct Attach {
    /// Do not connect standard input, which is always so: a container in the background has none
    #[arg(long)]
    pub(crate) no_stdin: bool,
    /// Pass signals on to the container. With false, a signal only ends this command
    #[arg(
        long,
        value_name = "BOOL",
        default_value_t = true,
        default_missing_value = "true",
        num_args = 0..=1,
        require_equals = true,
        action = clap::ArgAction::Set
    )]
    pub(crate) sig_proxy: bool,
    /// Accepted without effect, because there is no terminal to detach from
    #[arg(long, value_name = "KEYS", hide = true)]
    pub(crate) detach_keys: Option<String>,
    /// A running container
    pub(crate) container: String,
}

impl VerbArgs for Attach {
    const NAME: &'static str = "attach";
    const ABOUT: &'static str = "Print the output of a running container until it ends";
    const DETAILS: &'static str = "The output is what the container writes from now on: `quire logs` prints what it wrote \
        before. Standard input is not connected: `quire exec -it CONTAINER sh` gives another command the terminal.";
    const EXAMPLES: &'static str = "quire attach web\n  quire attach --sig-proxy=false web";
    const PRINTS_JSON: bool = false;
    const EXIT_CODES: ExitCodes = ExitCodes::Run;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        attach(context, self)
    }
}

fn attach(context: &Context, args: &Attach) -> anyhow::Result<Answer> {
    if args.detach_keys.as_deref().is_some_and(|it| !it.is_empty()) {
        context.remark(
            "--detach-keys has no effect: --sig-proxy=false lets Ctrl-C end only this command",
        );
    }
    let store = context.open(OpenOptions::read())?;
    let known = find_container(&store, &args.container)?;
    let id = known.id.clone();
    if !known.is_running() {
        return Err(UsageError(format!(
            "you can only attach to running containers, and the status of {id} is {}",
            known.status()
        ))
        .into());
    }
    // Both are opened now, because the container may be removed as soon as it has ended.
    let code = Code::open(&known.folder);
    let code = code.with_context(|| format!("cannot read the exit code of container {id}"))?;
    let log = end_of_log(&known).with_context(|| format!("cannot read the log of {id}"))?;
    let log = match log {
        Some(log) => log,
        None if Halves::open(&known.folder)?.is_none() => bail!(
            "container {id} was not started with --detach: its output goes to the command that started it"
        ),
        None => bail!("container {id} has no log"),
    };
    let signals = if args.sig_proxy { &FORWARDED[..] } else { &[][..] };
    let signals = Signals::block(signals)?;
    let requests = RefCell::new(Requests::default());
    let is_over = || -> anyhow::Result<bool> {
        while let Some(received) = signals.next()? {
            pass_on(context, &id, &known.folder, received.signal, &mut requests.borrow_mut());
        }
        // Another command may have removed it.
        Ok(find_container(&store, &id).map_or(Ok(true), |it| it.is_alive(&store).map(|it| !it))?)
    };
    logs::follow(&known.folder, log, &is_over)?;
    let state = known.state_now().ok().flatten();
    if let Some(reason) = state.as_ref().and_then(|it| it.reason) {
        context.remark(Reason::sentence(reason));
    }
    if state.as_ref().is_some_and(|it| it.lost) {
        bail!(container::life::end::ended::LOST);
    }
    let code = state.and_then(|it| it.code).or_else(|| code?.read());
    let code = code.with_context(|| {
        format!("the exit code of container {id} is unknown: its monitor was killed")
    })?;
    Ok(Answer::Program(u8::try_from(code).unwrap_or(u8::MAX)))
}
