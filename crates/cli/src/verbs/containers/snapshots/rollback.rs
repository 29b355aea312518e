//! `rollback`: replaces a container's changes by those in a snapshot.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, bail};
use clap::Args;
use container::life::end::stop::{self, StopOptions};
use container::life::lookup::{KnownContainer, find_container};
use container::life::rollback::RollBackError;
use container::root::WritableChoice;
use store::{ContainerSnapshot, ContainerSnapshotRecord, OpenOptions, Store};

use crate::Answer;
use crate::output::report;
use crate::session::context::{Context, now};
use crate::verbs::VerbArgs;
use crate::verbs::containers::snapshots::{clear_unneeded, fits, origins};
use crate::verbs::containers::start::{Begun, Starter, check_restart};
use crate::verbs::exit_codes::ExitCodes;

#[derive(Debug, Args)]
pub(crate) struct Rollback {
    /// The container, which must be one that is kept after its end
    pub(crate) container: String,
    /// Name or id of a snapshot; by default the newest of the container that has a name
    pub(crate) snapshot: Option<String>,
    /// Go back to the image: remove all changes
    #[arg(long, conflicts_with = "snapshot")]
    pub(crate) image: bool,
    /// Kill a running container after this many seconds; by default the value of `run --stop-timeout`, or 10
    #[arg(short, long, alias = "timeout", value_name = "SECONDS")]
    pub(crate) time: Option<u32>,
}

impl VerbArgs for Rollback {
    const NAME: &'static str = "rollback";
    const ABOUT: &'static str = "Bring a container's root back to a snapshot";
    const DETAILS: &'static str = "The container's processes end, all changes since the snapshot are removed, and if it \
        was running, its command starts again, with the same name, network, ports and volumes. Its files in volumes \
        stay. Take a snapshot first if the present state may be needed.";
    const EXAMPLES: &'static str =
        "quire rollback web\n  quire rollback --time 0 web before-upgrade";
    const PRINTS_JSON: bool = false;
    const EXIT_CODES: ExitCodes = ExitCodes::Start;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        roll_back(context, self)
    }
}

fn roll_back(context: &Context, args: &Rollback) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::write())?;
    let found = find_container(&store, &args.container)?;
    let record = found.record.as_ref();
    let record = record.with_context(|| format!("container {} is damaged", found.id))?;
    if !record.keep {
        bail!("container {} is removed when it ends, so it cannot be rolled back", found.id);
    }
    // It stays open, so that it cannot be removed before the container needs it.
    let snapshot = match args.image {
        true => None,
        false => Some(snapshot(&store, &found, args.snapshot.as_deref())?),
    };
    let target = snapshot.as_ref().map(|it| it.id.as_str());
    // A container that could not start again, or that cannot be rolled back, is not stopped.
    let stored = check_restart(context, &store, &found)?;
    if let WritableChoice::Directory(path, _) = stored.request.writable {
        bail!(RollBackError::Directory { id: found.id, path });
    }
    let _held = target.map(|it| store.container_snapshots.chain(it)).transpose()?;
    // The disk may take long, or have failed to write the snapshot.
    target.map_or(Ok(()), |it| store.settle_container_snapshot(it))?;
    let id = found.id.clone();
    let had_snapshot = record.snapshot.is_some();
    let was_running = found.is_running();
    if was_running {
        let wish = StopOptions { signal: None, timeout: args.time };
        stop::stop(&store, vec![found], wish, &|| now().0, &|text| context.remark(text))?;
    }
    let starter = Starter::new(context, &store)?;
    let begun = starter.roll_back(&id, target, was_running)?;
    if had_snapshot {
        clear_unneeded(&store);
    }
    match begun {
        Some(Begun::Over(answer)) => Ok(answer),
        _ => report::line(&id).map(|()| Answer::Yes),
    }
}

/// Finds the snapshot, which must be of the same image and have the same owners.
fn snapshot(
    store: &Store,
    container: &KnownContainer,
    name: Option<&str>,
) -> anyhow::Result<ContainerSnapshot> {
    let id = &container.id;
    let Some(name) = name else { return newest(store, container) };
    let found = store.container_snapshots.find(name)?;
    if !fits(&found.record, container) {
        bail!(
            "snapshot {name} is of container {}, whose image or user ids are others than those of {id}: use `quire \
            run --from {name}`",
            found.record.container
        );
    }
    Ok(found)
}

/// Finds the newest snapshot of a container that has a name.
fn newest(store: &Store, container: &KnownContainer) -> anyhow::Result<ContainerSnapshot> {
    let id = &container.id;
    let all = store.container_snapshots.all()?.into_iter();
    let all: BTreeMap<_, _> = all.filter_map(|(it, record)| Some((it, record.ok()?))).collect();
    // Ids of the snapshots below the container's changes.
    let mut below = BTreeSet::new();
    let mut next = origins::snapshot(container);
    while let Some((it, record)) = next.and_then(|it| all.get_key_value(it)) {
        if !below.insert(it) {
            break;
        }
        next = record.below.as_deref();
    }
    let begun = container.record.as_ref().map(|it| it.created.0);
    let own = all.iter().filter(|(snapshot, record)| {
        // An earlier container may have had the same name.
        let is_own = Some(record.created.0) >= begun || below.contains(snapshot);
        is_own && record.container == *id && record.name.is_some() && fits(record, container)
    });
    let age = |(snapshot, record): (&String, &ContainerSnapshotRecord)| {
        // The record has only seconds.
        let folder = store.container_snapshots.by_id(snapshot).ok()?.path().to_owned();
        let born = std::fs::metadata(folder).and_then(|it| it.created()).ok();
        Some((record.created.0, born, snapshot.clone()))
    };
    let newest = own.filter_map(age).max().with_context(|| {
        format!(
            "container {id} has no snapshot: `quire snapshot create {id}` takes one, and \
            `quire rollback --image {id}` removes all changes"
        )
    })?;
    Ok(store.container_snapshots.by_id(&newest.2)?)
}
