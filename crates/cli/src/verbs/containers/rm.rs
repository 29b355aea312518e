//! `rm`: removes containers.

use std::collections::BTreeSet;

use clap::Args;
use container::life::end::stop::{StopOptions, stop};
use container::life::lookup::{self, IfRunning, KnownContainer, KnownError, OwnVolumes, Removal};
use store::{OpenOptions, Store};

use crate::Answer;
use crate::output::report;
use crate::session::context::{Context, now};
use crate::session::resolve::NoContainer;
use crate::verbs::VerbArgs;
use crate::verbs::containers::networks::join;
use crate::verbs::containers::ps::filtered;
use crate::verbs::containers::snapshots::{clear_unneeded, origins};
use crate::verbs::containers::volumes::unneeded;
use crate::verbs::exit_codes::ExitCodes;
use crate::verbs::images::names::rmi::image_name;

#[expect(clippy::struct_excessive_bools, reason = "each is an option")]
#[derive(Debug, Args)]
pub(crate) struct Rm {
    /// Names of containers
    #[arg(required_unless_present_any = ["all", "filter"])]
    pub(crate) names: Vec<String>,
    /// Remove all containers; without --force, running ones are an error
    #[arg(short, long, conflicts_with = "names")]
    pub(crate) all: bool,
    /// Remove the containers that fit, such as status=exited. The keys are those of `quire ps`
    #[arg(long, value_name = "KEY=VALUE", conflicts_with = "names")]
    pub(crate) filter: Vec<String>,
    /// Ignore names that do not exist
    #[arg(short, long)]
    pub(crate) ignore: bool,
    /// Accepted for older scripts: only containers are removed in any case
    #[arg(long, hide = true)]
    pub(crate) container: bool,
    /// Also remove the volumes that only a container has: those of `--volume PATH` and of its image. Others stay, as
    /// `quire volume ls` shows
    #[arg(short, long)]
    pub(crate) volumes: bool,
    /// Kill running containers, and ignore names that do not exist
    #[arg(short, long)]
    pub(crate) force: bool,
    /// Before a running container is killed, ask it to end, and wait this many seconds
    #[arg(short, long, value_name = "SECONDS", requires = "force")]
    pub(crate) time: Option<u32>,
}

impl VerbArgs for Rm {
    const NAME: &'static str = "rm";
    const ABOUT: &'static str = "Remove containers";
    const EXAMPLES: &'static str =
        "quire rm web\n  quire rm --force web db\n  quire rm --all --force --time 10";
    const EXIT_CODES: ExitCodes = ExitCodes::Removal;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        rm(context, self)
    }
}

pub(crate) fn rm(context: &Context, args: &Rm) -> anyhow::Result<Answer> {
    let may_lack = args.force || args.ignore;
    let is_of_all = args.all || !args.filter.is_empty();
    let Some(store) = context.open_for(OpenOptions::write(), may_lack || is_of_all)? else {
        return Ok(Answer::Yes);
    };
    let names = match is_of_all {
        true => filtered(&store, &args.filter)?.into_iter().map(|it| it.id).collect(),
        false => args.names.clone(),
    };
    if !may_lack && !is_of_all {
        // Look up all containers before any of them is removed.
        for text in &names {
            lookup::find_container(&store, text).map_err(|error| absent(&store, text, error))?;
        }
    }
    if let Some(time) = args.time.filter(|it| *it > 0) {
        let found = names.iter().filter_map(|it| lookup::find_container(&store, it).ok());
        let found: Vec<_> = found.filter(KnownContainer::is_running).collect();
        let wish = StopOptions { signal: None, timeout: Some(time) };
        stop(&store, found, wish, &|| now().0, &|text| context.remark(text))?;
    }
    let (mut had_snapshot, mut had_volumes) = (false, false);
    let mut known_ids = BTreeSet::new();
    let (mut doomed, mut absent) = (Vec::new(), Vec::new());
    for name in names {
        let known = match lookup::find_container(&store, &name) {
            Ok(known) => known,
            // Such a container exists, and would stay without a word.
            Err(error @ (KnownError::Ambiguous { .. } | KnownError::State { .. })) => {
                return Err(error.into());
            }
            Err(_) => {
                absent.push(name);
                continue;
            }
        };
        had_snapshot |= origins::snapshot(&known).is_some();
        had_volumes |= known.record.as_ref().is_some_and(|it| !it.volumes.is_empty());
        if known_ids.insert(known.id) {
            doomed.push(name);
        }
    }
    let own_volumes = if args.volumes { OwnVolumes::Removed } else { OwnVolumes::Stay };
    let if_running = if args.force { IfRunning::Kill } else { IfRunning::Refuse };
    let now = || now().0;
    let removal = Removal::new(&store, if_running, own_volumes, &now);
    let mut failed: Option<anyhow::Error> = None;
    let mut keep_error = |error: anyhow::Error| match failed {
        None => failed = Some(error),
        Some(_) => context.remark(&format!("{error:#}")),
    };
    removal.remove_all(&doomed, &mut |name, removed| match removed {
        // Its monitor may have removed a killed container first.
        Ok(is_removed) if is_removed || args.force => {
            if !context.json
                && let Err(error) = report::line(name)
            {
                keep_error(error);
            }
        }
        // The container existed a moment ago.
        Ok(_) if !may_lack && !is_of_all => {
            context.remark(&format!("container {name} was already removed"));
        }
        Ok(_) => {}
        Err(error) => keep_error(error.into()),
    });
    for name in absent.iter().filter(|_| args.force && !is_of_all && !args.ignore) {
        if let Some(name) = image_name(&store, name, true).ok().flatten() {
            context.remark(&format!(
                "{name} is an image, and stays: `quire rmi {name}` removes its name"
            ));
        }
    }
    // A container whose monitor was killed may still be connected.
    join::sweep(context);
    if had_snapshot {
        clear_unneeded(&store);
    }
    if had_volumes {
        unneeded::clear_unneeded(&store);
    }
    failed.map_or(Ok(Answer::Yes), Err)
}

/// Returns the error for a name that no container has, with the images and containers that the user may have meant.
fn absent(store: &Store, text: &str, error: KnownError) -> anyhow::Error {
    let KnownError::Absent { nearest, .. } = &error else { return error.into() };
    let hint = match image_name(store, text, false) {
        Ok(Some(name)) => format!("{name} is an image: `quire rmi {name}` removes its name"),
        _ if nearest.is_empty() => "`quire ps --all` lists all containers".to_owned(),
        _ => format!("did you mean {}?", nearest.join(" or ")),
    };
    NoContainer { name: text.to_owned(), hint }.into()
}
