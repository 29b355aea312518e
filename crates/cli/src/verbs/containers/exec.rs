//! `exec`: runs another command in a container.

use std::os::fd::AsFd as _;

use anyhow::{Context as _, bail};
use clap::Args;
use container::bundle::Terminal;
use container::bundle::userns::{IdMap, OwnIds};
use container::life::background::{self, More};
use container::life::cgroup::{cgroups, delegation};
use container::life::lookup;
use container::life::monitor::KILLED;
use container::life::monitor_report::MonitorReport;
use container::life::state::Reason;
use kernel::process::Signals;
use store::OpenOptions;

use crate::Answer;
use crate::args::{Descriptors, Program, Tty};
use crate::session::context::Context;
use crate::session::signals::FORWARDED;
use crate::verbs::VerbArgs;
use crate::verbs::containers::run::{NO_FDS, not_started};
use crate::verbs::exit_codes::ExitCodes;

#[derive(Debug, Args)]
pub(crate) struct Exec {
    #[command(flatten)]
    pub(crate) program: Program,
    #[command(flatten)]
    pub(crate) tty: Tty,
    /// Run in the background, without the caller's standard streams and terminal
    #[arg(short, long)]
    pub(crate) detach: bool,
    #[command(flatten)]
    pub(crate) descriptors: Descriptors,
    /// A running container
    pub(crate) container: String,
    /// The command
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<String>,
}

impl VerbArgs for Exec {
    const NAME: &'static str = "exec";
    const ABOUT: &'static str = "Run another command in a running container";
    const EXAMPLES: &'static str =
        "quire exec web -- ps ax\n  quire exec -it web sh\n  quire exec -d web sleep 60";
    const PRINTS_JSON: bool = false;
    const EXIT_CODES: ExitCodes = ExitCodes::Run;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        exec(context, self)
    }
}

pub(crate) fn exec(context: &Context, args: &Exec) -> anyhow::Result<Answer> {
    // The files are read before signals are blocked, because a file may be a pipe without a writer, and a signal must
    // end the wait for it.
    let env = crate::verbs::containers::container_options::environment(&args.program)?;
    let signals = Signals::block(&FORWARDED)?;
    let terminal = match args.detach {
        true => Terminal::None,
        false => crate::verbs::containers::container_options::terminal(context, &args.tty),
    };
    let store = context.open(OpenOptions::read())?;
    let is_asked_to_end = || signals.ending().is_some();
    let (found, root) = lookup::running(&store, &args.container, &is_asked_to_end)?;
    // While `commit` or `diff` reads the container, this waits before it starts a program.
    let goes_on = container::life::cgroup::pause::pass(&found.folder, &found.id, &is_asked_to_end);
    if !goes_on.with_context(|| format!("cannot determine whether {} is paused", found.id))? {
        bail!(
            "interrupted while another command paused container {} to read its changes",
            found.id
        );
    }
    if let Some(cgroup) = cgroups::of_user(&found.folder) {
        let may_join = delegation::may_join(&cgroup);
        may_join.with_context(|| format!("cannot start a program in container {}", found.id))?;
    }
    let map = IdMap::noted(&found.folder);
    let user = args.program.user.as_deref().map(|user| {
        let user = container::bundle::user::find_user(root.as_fd(), user)?;
        map.map_or(Ok(()), |map| map.check(&user))?;
        OwnIds::read()?.check(&user)?;
        anyhow::Ok(user)
    });
    let more = More {
        args: args.command.clone(),
        env,
        working_dir: args.program.workdir.clone(),
        user: user.transpose()?,
        terminal,
        fds: args.descriptors.numbers(),
    };
    if (args.detach || terminal == Terminal::New) && !more.fds.is_empty() {
        bail!("{NO_FDS}");
    }
    if args.detach {
        let (report, process) = background::exec_behind(&found.folder, &found.id, more, &signals)?;
        return not_started(MonitorReport::new(&found.id, report).wait(&process, &signals)?);
    }
    let killed = container::life::cgroup::memory::killed_in(&found.folder);
    let exit = background::exec(&found.folder, &found.id, more, &signals)?;
    if exit.shell_code() == KILLED
        && container::life::cgroup::memory::killed_in(&found.folder) > killed
    {
        context.remark(Reason::Memory.sentence());
    }
    Ok(Answer::Program(u8::try_from(exit.shell_code()).unwrap_or(u8::MAX)))
}
