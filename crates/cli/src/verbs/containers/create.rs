//! `create`: makes a container that `start` starts.

use std::sync::Arc;

use clap::Args;
use kernel::process::Signals;

use crate::Answer;
use crate::args::Tty;
use crate::output::report;
use crate::session::context::Context;
use crate::session::signals::FORWARDED;
use crate::verbs::containers::container_options::GivenFiles;
use crate::verbs::containers::run::{
    NewContainer, Prepared, RequestedLife, background_terminal, prepare,
};
use crate::verbs::exit_codes::ExitCodes;
use crate::verbs::{VerbArgs, option_groups};

#[derive(Debug, Args)]
pub(crate) struct Create {
    #[command(flatten)]
    pub(crate) tty: Tty,
    #[command(flatten)]
    pub(crate) new: NewContainer,
}

impl VerbArgs for Create {
    const NAME: &'static str = "create";
    const ABOUT: &'static str = "Make a container without starting it";
    const DETAILS: &'static str = "`quire start` starts the container in the background, as `quire run --detach` \
        does. The options are those of `run`. Options come before the image: all words after the image are the \
        command and its arguments.";
    const EXAMPLES: &'static str =
        "quire create --name batch debian -- sleep 60\n  quire start batch";
    const HAS_SHORT_HELP: bool = false;
    const HAS_SHORT_QUIET: bool = true;
    const GROUPS: &'static [option_groups::OptionGroup] = option_groups::CONTAINER;
    const PRINTS_JSON: bool = false;
    const EXIT_CODES: ExitCodes = ExitCodes::Start;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        create(context, self)
    }
}

fn create(context: &Context, args: &Create) -> anyhow::Result<Answer> {
    // As in `run`: files may be pipes without writers, and signals must not end this process before the folder is
    // complete.
    let given = GivenFiles::read(&args.new.wanted)?.with_labels(&args.new.labels)?;
    let signals = Arc::new(Signals::block(&FORWARDED)?);
    let life = RequestedLife {
        terminal: background_terminal(&args.tty),
        rests: true,
        keep: args.new.rm != Some(true),
        stdin: args.tty.interactive,
        fds: Vec::new(),
    };
    let Prepared { ready, .. } = prepare(context, &args.new, &life, given, signals)?;
    let id = ready.id().to_owned();
    ready.keep()?;
    report::line(&id)?;
    Ok(Answer::Yes)
}
