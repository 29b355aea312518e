//! `rm`: removes containers.

use clap::Args;
use container::life::end::stop::{StopOptions, stop};
use container::life::lookup::{self, IfRunning, KnownContainer, KnownError, OwnVolumes};
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
    let own_volumes = if args.volumes { OwnVolumes::Removed } else { OwnVolumes::Stay };
    let (mut had_snapshot, mut had_volumes) = (false, false);
    for container in &names {
        let known = lookup::find_container(&store, container).ok();
        had_snapshot |= known.as_ref().is_some_and(|it| origins::snapshot(it).is_some());
        if let Some(record) = known.as_ref().and_then(|it| it.record.as_ref()) {
            had_volumes |= !record.volumes.is_empty();
        }
        let if_running = if args.force { IfRunning::Kill } else { IfRunning::Refuse };
        let is_removed = lookup::remove(&store, container, if_running, own_volumes, &|| now().0)?;
        // Its monitor may have removed a killed container first.
        if is_removed || args.force && known.is_some() {
            if !context.json {
                report::line(container)?;
            }
            continue;
        }
        if is_of_all || args.ignore {
            continue;
        }
        if !args.force {
            // The container existed a moment ago.
            context.remark(&format!("container {container} was already removed"));
        } else if let Some(name) = image_name(&store, container, true).ok().flatten() {
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
    Ok(Answer::Yes)
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
