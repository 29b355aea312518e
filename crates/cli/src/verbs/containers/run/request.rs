//! Third step of `run`: the command line becomes a [`ContainerRequest`], from which the container is planned.

use anyhow::{Context as _, bail};
use container::bundle::Terminal;
use container::plan::{ContainerRequest, PlanError};
use container::restart_policy::RestartPolicy;

use crate::args::{Tty, When, mounts, volumes};
use crate::session::context::Context;
use crate::verbs::containers::container_options::{
    GivenFiles, bundle_options, disk, init_wish, terminal, writable_wish,
};
use crate::verbs::containers::networks::connect::pasta;
use crate::verbs::containers::networks::join::networks;
use crate::verbs::containers::run::args::{NewContainer, Run};
use crate::verbs::containers::run::hosts::names_wish;
use crate::verbs::containers::security;

/// Returns the terminal of a container.
fn terminal_of_run(context: &Context, args: &Run) -> Terminal {
    if args.detach { background_terminal(&args.tty) } else { terminal(context, &args.tty) }
}

/// Returns the terminal of a container in the background: its output goes to the log, and nothing is typed.
pub(in crate::verbs::containers) fn background_terminal(tty: &Tty) -> Terminal {
    if tty.when() == When::Always { Terminal::New } else { Terminal::None }
}

/// How long a container is kept, and its terminal.
pub(in crate::verbs::containers) struct RequestedLife {
    pub(in crate::verbs::containers) terminal: Terminal,
    /// Whether the container is only made.
    pub(in crate::verbs::containers) rests: bool,
    /// Whether the container is kept when it has ended.
    pub(in crate::verbs::containers) keep: bool,
    /// Whether standard input of a container in the background stays open.
    pub(in crate::verbs::containers) stdin: bool,
    /// Descriptors of the caller for the program, by their numbers.
    pub(in crate::verbs::containers) fds: Vec<i32>,
}

/// Refusal of descriptors for a program that another process watches.
pub(in crate::verbs::containers) const NO_FDS: &str = "--preserve-fds: only a program in the foreground and without a \
    terminal can have descriptors of the caller: leave out --detach and -t";

impl RequestedLife {
    pub(super) fn of_run(context: &Context, args: &Run) -> anyhow::Result<Self> {
        let keep = !args.new.rm.unwrap_or(!args.detach);
        // Before the image is pulled.
        if args.new.restart != RestartPolicy::No && !keep {
            return Err(PlanError::Restart(args.new.restart).into());
        }
        let _valid = args.new.log.limit()?;
        let (terminal, fds) = (terminal_of_run(context, args), args.descriptors.numbers());
        if (args.detach || terminal == Terminal::New) && !fds.is_empty() {
            bail!("{NO_FDS}");
        }
        Ok(Self { terminal, fds, rests: false, keep, stdin: args.detach && args.tty.interactive })
    }
}

/// Returns the options of the command line.
pub(super) fn container_wish(
    context: &Context,
    args: &NewContainer,
    life: &RequestedLife,
    id: String,
    mut given: GivenFiles,
) -> anyhow::Result<ContainerRequest> {
    let wanted = &args.wanted;
    let labels = given.take_labels();
    let writable = writable_wish(context, wanted, disk(context).as_deref());
    let mut bundle =
        bundle_options(wanted, &args.command(), life.terminal, &id, writable.access(), given)?;
    bundle.security.apparmor = security::apparmor(context, &wanted.security)?;
    security::remark_on_labels(context, wanted);
    let pasta = pasta(context, &args.published(), wanted.network.as_ref(), &mut bundle.network)?;
    let networks = networks(context, args)?;
    bundle.process.check(&bundle.network).context("--sysctl")?;
    Ok(ContainerRequest {
        id,
        names: Some(names_wish(&wanted.names, &bundle.network)?),
        bundle,
        user: wanted.program.user.clone(),
        trust: wanted.trust.wish()?,
        writable,
        df: wanted.df,
        warm: wanted.warm.into(),
        ids: wanted.ids.wish()?,
        volumes: volumes(wanted)?,
        mounts: mounts(wanted),
        pasta,
        networks,
        init: init_wish(wanted),
        stop_signal: args.stop_signal.clone(),
        stop_timeout: args.stop_timeout,
        timeout: args.timeout,
        log_size: args.log.limit()?,
        keep: life.keep,
        labels,
        stdin: life.stdin,
        restart: args.restart,
        no_log: args.log.is_off(),
        rests: life.rests,
        snapshot: None,
    })
}
