//! `snapshot`: takes, lists and removes snapshots of containers' roots.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};
use container::snapshot::take::{LongWork, SnapshotName, Taken, take};
use kernel::process::finish_behind;
use serde::Serialize;
use store::{ContainerSnapshotRecord, OpenOptions, Store};

use crate::Answer;
use crate::output::report::{self, Bytes, Time};
use crate::output::table;
use crate::session::context::{Context, now};
use crate::session::signals::until_signal;
use crate::verbs::VerbArgs;
use crate::verbs::containers::snapshots::clear_unneeded;
use crate::verbs::exit_codes::ExitCodes;

/// An action of `snapshot`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SnapshotAction {
    /// Take a snapshot of CONTAINER, with the name NAME or the container's name and a number
    Create,
    /// List the snapshots, of CONTAINER or of all containers
    #[value(alias = "ls")]
    List,
    /// Remove snapshots, in any order
    #[value(alias = "remove")]
    Rm,
}

#[derive(Debug, Args)]
pub(crate) struct Snapshot {
    /// The action
    #[arg(value_enum)]
    pub(crate) action: SnapshotAction,
    /// For create: a container, and optionally a name; for list: optionally a container; for rm: names or ids of snapshots
    #[arg(value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// Also list snapshots without a name, which containers or other snapshots need
    #[arg(short, long)]
    pub(crate) all: bool,
    /// For list: print only names
    #[arg(short = 'q')]
    pub(crate) only_names: bool,
}

impl VerbArgs for Snapshot {
    const NAME: &'static str = "snapshot";
    const ABOUT: &'static str = "Take, list and remove snapshots of containers' roots";
    const DETAILS: &'static str = "A snapshot has everything that a container has changed in its image. It is read-only, \
        and shares its data with the containers that are made of it: `quire fork` and `quire run --from` make \
        containers, and `quire rollback` brings one back.\n\n\
        Quire copies the changes while the container runs, and freezes it for a moment, in which it copies later changes. \
        Processes and memory are not in a snapshot. Users without delegated cgroups can take snapshots of stopped \
        containers.\n\n\
        A removed snapshot takes space as long as a container or another snapshot needs it.";
    const EXAMPLES: &'static str = "quire snapshot create web before-upgrade\n  quire snapshot list web\n  quire snapshot rm before-upgrade";
    const EXIT_CODES: ExitCodes = ExitCodes::Objects;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        match (self.action, &*self.names) {
            (SnapshotAction::Create, _) if self.all => bail!("--all is for `quire snapshot list`"),
            (SnapshotAction::Rm, _) if self.all => bail!("--all is for `quire snapshot list`"),
            (SnapshotAction::Create, [container]) => {
                create(context, container, &SnapshotName::Numbered)
            }
            (SnapshotAction::Create, [container, name]) => {
                create(context, container, &SnapshotName::Given(name.clone()))
            }
            (SnapshotAction::Create, _) => bail!("use `quire snapshot create CONTAINER [NAME]`"),
            (SnapshotAction::List, []) => list(context, None, self),
            (SnapshotAction::List, [container]) => list(context, Some(container), self),
            (SnapshotAction::List, _) => bail!("use `quire snapshot list [CONTAINER]`"),
            (SnapshotAction::Rm, []) => {
                bail!("use `quire snapshot rm NAME…`; `quire snapshot list` prints the names")
            }
            (SnapshotAction::Rm, names) => remove(context, names),
        }
    }
}

/// Report of `snapshot create --json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct SnapshotTakenReport {
    /// Id of the snapshot.
    snapshot: String,
    /// Name of the snapshot.
    name: Option<String>,
    /// The container of which it was taken.
    container: String,
    /// Number of names that were copied.
    entries: u64,
    /// Number of names that were copied or removed while the container was frozen.
    recopied: u64,
    /// Size on disk of the snapshot.
    bytes: Bytes,
    /// Microseconds for which the container was frozen. Null if it does not run.
    paused: Option<u64>,
}

impl SnapshotTakenReport {
    fn of(taken: &Taken) -> Self {
        let record = &taken.snapshot.record;
        let micros = |it: Duration| u64::try_from(it.as_micros()).unwrap_or(u64::MAX);
        Self {
            snapshot: taken.snapshot.id.clone(),
            name: record.name.clone(),
            container: record.container.clone(),
            entries: taken.copied.entries,
            recopied: taken.copied.recopied,
            bytes: Bytes(record.bytes),
            paused: taken.pause.map(micros),
        }
    }
}

fn create(context: &Context, container: &str, name: &SnapshotName) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::write())?;
    let taken = take_snapshot(&store, container, name)?;
    let told = SnapshotTakenReport::of(&taken);
    let printed = match context.json {
        true => report::json(&told),
        false => report::line(told.name.as_deref().unwrap_or(&told.snapshot)),
    };
    let id = taken.snapshot.id.clone();
    // The process in the background must not have it open, because then it could not be removed.
    drop(taken);
    // Also if the caller does not read the name.
    settle_behind(&store, &id);
    printed.map(|()| Answer::Yes)
}

/// Takes a snapshot. A signal ends this before the container is frozen.
pub(crate) fn take_snapshot(
    store: &Store,
    container: &str,
    name: &SnapshotName,
) -> anyhow::Result<Taken> {
    let cancel = AtomicBool::new(false);
    let run = |work: &mut (dyn FnMut() + Send)| {
        until_signal(&cancel, work).map_err(std::io::Error::other)
    };
    let work = LongWork { cancel: &cancel, run: &run };
    Ok(take(store, container, name, &work, &|| now().0)?)
}

/// Makes a snapshot durable in the background. Until then, it is lost if the machine restarts.
pub(crate) fn settle_behind(store: &Store, id: &str) {
    finish_behind(|_| {
        if let Err(error) = store.settle_container_snapshot(id) {
            tracing::warn!(id, error = format!("{error:#}"), "cannot write a snapshot to the disk");
        }
    });
}

/// Report of `snapshot list --json` on a snapshot.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct SnapshotReport {
    /// Id of the snapshot.
    snapshot: String,
    /// Name of the snapshot. Null if it was removed and is still needed, or it is damaged.
    name: Option<String>,
    /// The container of which it was taken. Null if it is damaged.
    container: Option<String>,
    /// Id of the image below. Null if it is damaged.
    image: Option<String>,
    /// Name of the image, as the container was started. Null if it had none.
    image_name: Option<String>,
    /// Id of the snapshot below this one. Null if there is none.
    below: Option<String>,
    /// Time of creation, in RFC 3339. Null if it is damaged.
    created: Option<Time>,
    /// Size on disk. Null if it is damaged.
    bytes: Option<Bytes>,
    /// Whether it is on the disk. Otherwise it is lost if the machine restarts.
    durable: bool,
    /// Why the snapshot cannot be used. Null if it can.
    damage: Option<String>,
}

impl SnapshotReport {
    fn of<E: std::fmt::Display>(id: String, record: Result<ContainerSnapshotRecord, E>) -> Self {
        let (record, damage) = match record {
            Ok(record) => (Some(record), None),
            Err(error) => (None, Some(error.to_string())),
        };
        let record = record.as_ref();
        Self {
            snapshot: id,
            name: record.and_then(|it| it.name.clone()),
            container: record.map(|it| it.container.clone()),
            image: record.map(|it| it.image.to_string()),
            image_name: record.and_then(|it| it.image_name.clone()),
            below: record.and_then(|it| it.below.clone()),
            created: record.map(|it| Time(it.created.0)),
            bytes: record.map(|it| Bytes(it.bytes)),
            durable: record.is_some_and(|it| it.boot.is_none()),
            damage,
        }
    }

    /// Returns the row of the table for people, at the time `now` in seconds since 1970.
    fn row(&self, now: i64) -> Vec<String> {
        let unknown = || "?".to_owned();
        let image =
            self.image_name.clone().or_else(|| self.image.as_ref().map(|it| report::short(it)));
        vec![
            self.name.clone().unwrap_or_else(|| "-".to_owned()),
            self.snapshot.clone(),
            self.container.clone().unwrap_or_else(unknown),
            image.unwrap_or_else(unknown),
            self.created.map_or_else(unknown, |it| report::ago(now.saturating_sub(it.0))),
            match (&self.damage, self.bytes) {
                (Some(_), _) => "damaged".to_owned(),
                (None, Some(bytes)) => report::size(bytes.0),
                (None, None) => unknown(),
            },
        ]
    }
}

fn list(context: &Context, container: Option<&str>, args: &Snapshot) -> anyhow::Result<Answer> {
    let Some(store) = context.open_for(OpenOptions::read(), true)? else {
        return report::print(context.json, &Vec::<SnapshotReport>::new(), |_, _| Ok(()))
            .map(|()| Answer::Yes);
    };
    let found = store.container_snapshots.all()?;
    let found = found.into_iter().map(|(id, record)| SnapshotReport::of(id, record));
    let mut found: Vec<_> =
        found.filter(|it| args.all || it.name.is_some() || it.damage.is_some()).collect();
    if let Some(container) = container {
        found.retain(|it| it.container.as_deref() == Some(container));
    }
    found.sort_by_key(|it| it.created.map(|it| it.0));
    if args.only_names || context.quiet {
        return report::lines(found.iter().map(|it| it.name.as_deref().unwrap_or(&it.snapshot)));
    }
    report::print(context.json, &found, |all, out| {
        let titles = ["SNAPSHOT", "ID", "CONTAINER", "IMAGE", "CREATED", "SIZE"];
        let now = now().0;
        let rows: Vec<_> = all.iter().map(|it| it.row(now)).collect();
        table::print(out, &titles, &rows, &[])
    })?;
    Ok(Answer::Yes)
}

/// Report of `snapshot rm --json` on a snapshot.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct SnapshotRemovedReport {
    /// Name or id, as given.
    snapshot: String,
    /// Whether its data was removed. Otherwise a container or another snapshot needs it, and it is removed with the last
    /// of these.
    removed: bool,
}

fn remove(context: &Context, names: &[String]) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::write())?;
    // All names are looked up before any snapshot is removed.
    let mut found = Vec::new();
    for name in names {
        let id = match store.container_snapshots.find(name) {
            Ok(snapshot) => snapshot.id,
            // A damaged one can be removed by its id.
            Err(_) if store.container_snapshots.all()?.iter().any(|(id, _)| id == name) => {
                name.clone()
            }
            Err(error) => return Err(error.into()),
        };
        found.push((name, id));
    }
    let mut removed = Vec::new();
    for (name, id) in found {
        let gone = store.remove_container_snapshot(&id);
        let mut gone = gone.with_context(|| format!("cannot remove snapshot {name}"))?;
        if !gone {
            // Processes of a container that was just removed may have it open.
            clear_unneeded(&store);
            gone = store.container_snapshots.all()?.iter().all(|(it, _)| *it != id);
        }
        if !gone {
            context.remark(&format!(
                "the data of snapshot {name} stays as long as a container or another snapshot needs it"
            ));
        }
        removed.push(SnapshotRemovedReport { snapshot: name.clone(), removed: gone });
    }
    if context.json {
        report::json(&removed)?;
        return Ok(Answer::Yes);
    }
    report::lines(removed.iter().map(|it| it.snapshot.as_str()))
}
