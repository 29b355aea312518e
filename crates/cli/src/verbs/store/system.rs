//! `system`: shows the disk space of images and containers, and removes those that are not used.

use std::collections::BTreeSet;
use std::io::Write as _;

use clap::{Args, ValueEnum};
use container::life::lookup::{IfRunning, KnownContainer, KnownError, OwnVolumes, Removal, all};
use image::verity::ImageId;
use serde::Serialize;
use serde_json::{Value, json};
use store::{OpenOptions, RefName, Reference, Store, VolumeError};

use crate::Answer;
use crate::args::limits::seconds;
use crate::output::report::{self, Bytes};
use crate::output::{confirmation, table, template};
use crate::session::context::{Context, now};
use crate::session::failure::UsageError;
use crate::verbs::VerbArgs;
use crate::verbs::containers::networks::verb::clear_unused;
use crate::verbs::containers::snapshots::clear_unneeded;
use crate::verbs::store::gc::{Gc, gc};

/// An action of `system`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SystemAction {
    /// Show the disk space of images and containers
    Df,
    /// Remove containers that do not run, and data that no image needs
    Prune,
}

/// The things that `prune` removes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PrunedKind {
    /// Only containers
    Containers,
    /// Only images
    Images,
}

#[derive(Debug, Args)]
pub(crate) struct System {
    /// The action
    #[arg(value_enum)]
    pub(crate) action: SystemAction,
    /// For prune: also remove the names of images that no container uses
    #[arg(short, long)]
    pub(crate) all: bool,
    /// For prune: do not ask
    #[arg(short, long)]
    pub(crate) force: bool,
    /// For prune: also remove all volumes that no container uses, with their files
    #[arg(long)]
    pub(crate) volumes: bool,
    /// For prune: remove only older things, for example until=24h
    #[arg(long, value_name = "until=DURATION", value_parser = until)]
    pub(crate) filter: Option<i64>,
    /// For prune: remove only these, as `container prune` and `image prune`
    #[arg(long, hide = true, value_enum)]
    pub(crate) only: Option<PrunedKind>,
    /// For df: print this Go template of each row, such as {{.Size}}, or json
    #[arg(long, value_name = "TEMPLATE")]
    pub(crate) format: Option<String>,
}

impl VerbArgs for System {
    const NAME: &'static str = "system";
    const ABOUT: &'static str = "Show disk use; remove unused containers and images";
    const DETAILS: &'static str = "`system df` counts each byte once: `quire du` shows what each image takes, and what \
        images share. `system prune` removes all containers that do not run and all networks that no container uses, \
        and then frees unused data as `quire gc` does. `--volumes` also removes the volumes that no container uses, \
        with their files. An image without a name is unused unless a container needs it. `quire system info` is \
        `quire info`, \
        `quire container prune` removes only containers, and `quire image prune` only images.";
    const EXAMPLES: &'static str = "quire system df\n  quire system prune --force\n  quire system prune --all --force --filter until=7d";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        match self.action {
            SystemAction::Df => self.check_df().and_then(|()| df(context, self)),
            SystemAction::Prune => prune(context, self),
        }
    }
}

/// Parses the filter of `prune`, and returns seconds.
fn until(text: &str) -> Result<i64, String> {
    let value = text.strip_prefix("until=");
    seconds(value.ok_or("the only filter is until=DURATION, for example until=24h")?)
}

impl System {
    fn check_df(&self) -> anyhow::Result<()> {
        let has_prune = self.all || self.force || self.volumes || self.filter.is_some();
        if has_prune || self.only.is_some() {
            let text = "--all, --force, --volumes and --filter are for `system prune`";
            return Err(UsageError(text.to_owned()).into());
        }
        Ok(())
    }
}

/// Podman's name for volumes.
const VOLUMES: &str = "Local Volumes";

/// Report of `system df --json` on a kind of data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct DfReport {
    /// `Images`, `Containers` or `Local Volumes`.
    #[serde(rename = "type")]
    kind: &'static str,
    /// Number of images, containers or volumes.
    total: usize,
    /// Number of images or volumes that containers use, or of running containers.
    active: usize,
    /// Disk space.
    size: Bytes,
    /// Part of the space that becomes free if those that are not active are removed.
    reclaimable: Bytes,
}

fn df(context: &Context, args: &System) -> anyhow::Result<Answer> {
    let store = context.open_for(OpenOptions::read(), true)?;
    let rows = store.as_ref().map_or_else(|| Ok(DfReport::empty().to_vec()), DfReport::of)?;
    if context.json {
        report::json(&rows)?;
        return Ok(Answer::Yes);
    }
    if let Some(format) = &args.format {
        let rows: Vec<Value> = rows.iter().map(DfReport::fields).collect();
        if template::is_json(format) {
            report::json(&rows)?;
            return Ok(Answer::Yes);
        }
        template::print(&template::list(format, &rows, &[])?)?;
        return Ok(Answer::Yes);
    }
    let cells: Vec<_> = rows.iter().map(DfReport::cells).collect();
    let mut out = report::standard_output();
    table::print(&mut out, &["TYPE", "TOTAL", "ACTIVE", "SIZE", "RECLAIMABLE"], &cells, &[1, 2])?;
    out.flush()?;
    Ok(Answer::Yes)
}

impl DfReport {
    fn empty() -> [Self; 3] {
        ["Images", "Containers", VOLUMES].map(|kind| {
            let (size, reclaimable) = (Bytes(0), Bytes(0));
            Self { kind, total: 0, active: 0, size, reclaimable }
        })
    }

    fn of(store: &Store) -> anyhow::Result<Vec<Self>> {
        let (used, containers) = (store.du()?, all(store)?);
        let in_use = images_of(&containers);
        let is_active = |id: &ImageId| in_use.contains(id);
        let spare = used.images.iter().filter(|it| !is_active(&it.image)).map(|it| it.own);
        let reclaimable = spare.chain([used.unused_objects, used.unused_data]).sum::<u64>();
        let sizes = [used.objects, used.data, used.image_files, used.layers, used.manifests];
        let images = Self {
            kind: "Images",
            total: used.images.len(),
            active: used.images.iter().filter(|it| is_active(&it.image)).count(),
            size: Bytes(sizes.iter().chain([&used.blobs]).sum()),
            reclaimable: Bytes(reclaimable),
        };
        let written = |it: &KnownContainer| it.written().unwrap_or(0);
        let is_running = KnownContainer::is_running;
        let containers = Self {
            kind: "Containers",
            total: containers.len(),
            active: containers.iter().filter(|it| is_running(it)).count(),
            size: Bytes(containers.iter().map(written).sum()),
            reclaimable: Bytes(containers.iter().filter(|it| !is_running(it)).map(written).sum()),
        };
        Ok(vec![images, containers, Self::of_volumes(store)?])
    }

    fn of_volumes(store: &Store) -> anyhow::Result<Self> {
        // If a container is damaged, each volume counts as used.
        let used = match store.used_volumes() {
            Err(VolumeError::UnknownUser(_)) => None,
            used => Some(used?),
        };
        let (kind, mut active) = (VOLUMES, 0);
        let (mut size, mut reclaimable) = (0_u64, 0_u64);
        let all = store.volumes.all()?;
        for (name, _) in &all {
            let bytes = store.volumes.disk_bytes(name)?;
            size = size.saturating_add(bytes);
            match used.as_ref().is_none_or(|it| it.contains_key(name)) {
                true => active += 1,
                false => reclaimable = reclaimable.saturating_add(bytes),
            }
        }
        let (total, size, reclaimable) = (all.len(), Bytes(size), Bytes(reclaimable));
        Ok(Self { kind, total, active, size, reclaimable })
    }

    /// Formats the reclaimable part for people, with its percentage, as Docker does.
    fn reclaimable(&self) -> String {
        let percent = self.reclaimable.0.saturating_mul(100).checked_div(self.size.0).unwrap_or(0);
        format!("{} ({percent}%)", report::size(self.reclaimable.0))
    }

    fn cells(&self) -> Vec<String> {
        let size = report::size(self.size.0);
        let counts = [self.total.to_string(), self.active.to_string()];
        [self.kind.to_owned()].into_iter().chain(counts).chain([size, self.reclaimable()]).collect()
    }

    /// Returns the fields for templates, with podman's names.
    fn fields(&self) -> Value {
        json!({
            "Type": self.kind,
            "Total": self.total,
            "TotalCount": self.total,
            "Active": self.active,
            "Size": report::size(self.size.0),
            "RawSize": self.size.0,
            "Reclaimable": self.reclaimable(),
            "RawReclaimable": self.reclaimable.0,
        })
    }
}

fn images_of(containers: &[KnownContainer]) -> BTreeSet<ImageId> {
    containers.iter().filter_map(|it| Some(it.record.as_ref()?.image)).collect()
}

/// The things that `prune` is about to remove.
#[derive(Debug, Default, PartialEq, Eq)]
struct Doomed {
    containers: Vec<String>,
    /// Names that no container uses, and their images at that time. Without `--all`, only those of images without names.
    names: Vec<(RefName, Reference)>,
}

impl Doomed {
    /// Decides what to remove. `before` is the latest time of things to remove, in seconds since 1970.
    fn find(store: &Store, args: &System, before: i64) -> anyhow::Result<Self> {
        let all = all(store)?;
        // A damaged container stays, as with `gc`, because its changes may be needed.
        let is_old = |it: &KnownContainer| {
            it.record.as_ref().is_some_and(|record| record.created.0 <= before)
        };
        let is_doomed = |it: &KnownContainer| {
            args.only != Some(PrunedKind::Images) && !it.is_running() && is_old(it)
        };
        let (doomed, rest): (Vec<_>, Vec<_>) = all.into_iter().partition(is_doomed);
        let mut names = Vec::new();
        if args.only != Some(PrunedKind::Containers) {
            let in_use = images_of(&rest);
            let (refs, _) = store.refs.readable()?;
            let is_unused = |it: &Reference| !in_use.contains(&it.image) && it.created.0 <= before;
            let is_doomed = |name: &RefName| args.all || name.is_unnamed();
            names = refs.into_iter().filter(|it| is_doomed(&it.0) && is_unused(&it.1)).collect();
        }
        let mut containers: Vec<_> = doomed.into_iter().map(|it| it.id).collect();
        containers.sort_unstable();
        Ok(Self { containers, names })
    }
}

fn prune(context: &Context, args: &System) -> anyhow::Result<Answer> {
    if context.json {
        let text = "--json: `system prune` never prints JSON; `quire gc --json` frees unused data";
        return Err(UsageError(text.to_owned()).into());
    }
    if args.format.is_some() {
        return Err(UsageError("--format is for `system df`".to_owned()).into());
    }
    if args.volumes && args.only.is_some() {
        let text = "--volumes is for `system prune`: `quire volume prune` removes only volumes";
        return Err(UsageError(text.to_owned()).into());
    }
    if !args.force && !is_confirmed(args)? {
        return Ok(Answer::Yes);
    }
    let Some(store) = context.open_for(OpenOptions::write(), true)? else {
        return Ok(Answer::Yes);
    };
    let before = now().0.saturating_sub(args.filter.unwrap_or(0));
    let doomed = Doomed::find(&store, args, before)?;
    remove(context, &store, &doomed)?;
    if args.volumes {
        remove_volumes(context, &store, before)?;
    }
    if args.only == Some(PrunedKind::Containers) {
        return Ok(Answer::Yes);
    }
    if args.only.is_none() {
        let networks = clear_unused(&store, before)?;
        if !networks.is_empty() {
            report::line("Deleted Networks")?;
            networks.iter().try_for_each(|it| report::line(it))?;
        }
    }
    drop(store);
    let options = Gc {
        dry_run: false,
        unfinished: false,
        older_than: args.filter,
        keep_storage: None,
        wait: false,
    };
    gc(context, &options)
}

fn remove(context: &Context, store: &Store, doomed: &Doomed) -> anyhow::Result<()> {
    let mut is_first = true;
    let now = || now().0;
    let removal = Removal::new(store, IfRunning::Refuse, OwnVolumes::Stay, &now);
    for id in &doomed.containers {
        match removal.remove(id) {
            Ok(true) => {}
            // Another command has removed it, or has started it just now.
            Ok(false) | Err(KnownError::Runs(_)) => continue,
            // One damaged container must not keep the others.
            Err(error) => {
                context.remark(&format!("container {id} stays: {:#}", anyhow::Error::from(error)));
                continue;
            }
        }
        if std::mem::take(&mut is_first) {
            report::line("Deleted Containers")?;
        }
        report::line(id)?;
    }
    if !doomed.containers.is_empty() {
        clear_unneeded(store);
    }
    let mut is_first = true;
    for (name, reference) in &doomed.names {
        // Another command has removed the name, or has given it to another image.
        if !store.remove_ref_if(name, reference)? {
            continue;
        }
        if std::mem::take(&mut is_first) {
            report::line("Deleted Images")?;
        }
        match name.is_unnamed() {
            true => report::line(&reference.image.to_string())?,
            false => report::line(name.as_str())?,
        }
    }
    Ok(())
}

/// Removes the volumes that no container uses. `before` is the latest time of their creation, in seconds since 1970.
fn remove_volumes(context: &Context, store: &Store, before: i64) -> anyhow::Result<()> {
    let mut is_first = true;
    for (name, record) in store.volumes.all()? {
        // A volume with a damaged record may be needed: `fsck --repair` makes a new record.
        if record.map_or(true, |it| it.created.0 > before) {
            continue;
        }
        match store.remove_volume(&name) {
            Ok(()) => {}
            // Another command has removed it, or a container uses it.
            Err(VolumeError::Absent(_) | VolumeError::InUse { .. }) => continue,
            Err(error @ VolumeError::UnknownUser(_)) => {
                context.remark(&format!("all volumes stay: {error}"));
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        }
        if std::mem::take(&mut is_first) {
            report::line("Deleted Volumes")?;
        }
        report::line(&name)?;
    }
    Ok(())
}

/// Asks for a confirmation on standard input, as podman does.
fn is_confirmed(args: &System) -> anyhow::Result<bool> {
    let containers = "all containers that do not run";
    let images = match args.all {
        true => "all images that no container uses",
        false => "all data that no image needs",
    };
    let networks = "all networks that no container uses";
    let volumes = "all files of volumes that no container uses";
    let what: &[&str] = match args.only {
        Some(PrunedKind::Containers) => &[containers],
        Some(PrunedKind::Images) => &[images],
        None if args.volumes => &[containers, networks, volumes, images],
        None => &[containers, networks, images],
    };
    confirmation::is_confirmed(&format!("this removes {}", what.join(" and ")), &[])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_percentages() {
        let report = |size, reclaimable| DfReport {
            kind: "Images",
            total: 2,
            active: 1,
            size: Bytes(size),
            reclaimable: Bytes(reclaimable),
        };
        assert_eq!(report(1024, 512).reclaimable(), "512 B (50%)");
        assert_eq!(report(0, 0).reclaimable(), "0 B (0%)");
        assert_eq!(report(3, u64::MAX).cells().len(), 5);
    }

    #[test]
    fn filters_are_durations() {
        assert_eq!(until("until=24h"), Ok(86_400));
        for text in ["24h", "label=a", "until=", "until=x"] {
            assert!(until(text).is_err(), "{text}");
        }
    }
}
