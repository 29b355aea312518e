//! `volume`: makes, lists, copies and removes volumes, which containers mount by `--volume NAME:PATH`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum, ValueHint};
use container::life::lookup::{IfRunning, OwnVolumes, Removal};
use container::life::prepare::random_volume_name;
use serde::Serialize;
use serde_json::Value;
use store::{OpenOptions, Store, VolumeError, VolumeFiles, VolumeRecord};
use transfer::export::Output;

use crate::Answer;
use crate::args::labels::label;
use crate::output::report::{self, Time};
use crate::output::{confirmation, table, template};
use crate::session::context::{Context, now};
use crate::verbs::VerbArgs;
use crate::verbs::containers::named_items::{
    ActionOption, ItemFilters, NamedItem, check_options, choose, no_labels, print_formatted,
    tell_removed,
};
use crate::verbs::containers::volumes::archive;
use crate::verbs::exit_codes::ExitCodes;

/// An action of `volume`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum VolumeAction {
    /// Make an empty volume, with the name NAME or a random one
    Create,
    /// List the volumes
    #[value(alias = "list")]
    Ls,
    /// Describe volumes
    Inspect,
    /// Exit with 0 if there is such a volume, or else with 1
    Exists,
    /// Print the directory with the files of a volume
    Mount,
    /// Accepted for scripts of podman: the directory stays as it is
    #[value(alias = "umount")]
    Unmount,
    /// Add the files of a tar, compressed or not, to a volume: `NAME [FILE]`; without a file, of standard input
    Import,
    /// Write the files of a volume as a tar, to standard output
    Export,
    /// Remove volumes that no container uses
    #[value(alias = "remove")]
    Rm,
    /// Remove the volumes without a chosen name that no container uses; with --all, all that no container uses
    Prune,
}

/// The only driver of volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum VolumeDriver {
    /// A directory of the store
    Local,
}

#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of the command line")]
pub(crate) struct Volume {
    /// The action
    #[arg(value_enum)]
    pub(crate) action: VolumeAction,
    /// Names of volumes
    #[arg(value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// For create: the kind of volume
    #[arg(short, long, value_enum, value_name = "DRIVER")]
    pub(crate) driver: Option<VolumeDriver>,
    /// For create: attach a label
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    pub(crate) label: Vec<String>,
    /// For create: succeed if there is such a volume already
    #[arg(long)]
    pub(crate) ignore: bool,
    /// For ls and prune: only volumes to which this applies. Keys: dangling (whether no container uses it), label,
    /// label!, name
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) filter: Vec<String>,
    /// For ls and inspect: print each volume by a template of Go, or `json`
    #[arg(long, value_name = "TEMPLATE")]
    pub(crate) format: Option<String>,
    /// For ls: print no titles
    #[arg(short = 'n', long)]
    pub(crate) noheading: bool,
    /// For ls: print only names
    #[arg(short = 'q')]
    pub(crate) only_names: bool,
    /// For export: write to this file, and overwrite one of this name
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) output: Vec<PathBuf>,
    /// For rm: remove all volumes that no container uses. For prune: also remove volumes with chosen names
    #[arg(short, long)]
    pub(crate) all: bool,
    /// For rm: ignore names that do not exist, and remove the containers that use the volumes, even running ones. For
    /// prune: do not ask
    #[arg(short, long)]
    pub(crate) force: bool,
}

/// The keys of `--filter`. Source: podman-volume-ls(1).
const FILTERS: [&str; 4] = ["dangling", "label", "label!", "name"];

/// Titles of fields that differ from their names. Source: podman, `cmd/podman/volumes/list.go`.
const TITLES: [(&str, &str); 1] = [("Name", "VOLUME NAME")];

/// A volume of the store, with a container that uses it.
struct FoundVolume {
    name: String,
    record: Result<VolumeRecord, String>,
    container: Option<String>,
    path: String,
}

impl NamedItem for FoundVolume {
    fn name(&self) -> &str {
        &self.name
    }

    fn labels(&self) -> &BTreeMap<String, String> {
        self.record.as_ref().map_or_else(|_| no_labels(), |it| &it.labels)
    }

    fn is_used(&self) -> bool {
        self.container.is_some()
    }
}

impl VerbArgs for Volume {
    const NAME: &'static str = "volume";
    const ABOUT: &'static str = "Make, list and remove volumes";
    const DETAILS: &'static str = "A volume is a directory of the store that containers mount by `--volume NAME:PATH`, \
        and that stays when they are removed. `run` and `create` make a missing volume. The first container that mounts \
        a volume copies the files of its image into it, if the volume is empty.\n\n\
        A volume of `--volume PATH`, or of an image, has a random name and belongs to one container: `quire rm \
        --volumes` removes it with the container, and so does the end of a container that is not kept. A volume that a \
        container uses, running or stopped, is never removed.";
    const EXAMPLES: &'static str = "quire volume create --label app=shop data\n  quire volume export -o data.tar data\n  quire volume import data data.tar\n  quire run -v data:/data debian -- sh -c 'echo 1 >/data/file'\n  quire volume ls --filter dangling=true\n  quire volume rm data";
    const EXIT_CODES: ExitCodes = ExitCodes::Groups;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        self.check()?;
        match (self.action, &*self.names) {
            (VolumeAction::Create, [] | [_]) => create(context, self),
            (VolumeAction::Create, _) => bail!("use `quire volume create [NAME]`"),
            (VolumeAction::Ls, []) => list(context, self),
            (VolumeAction::Ls, _) => bail!("use `quire volume ls --filter name=NAME`"),
            (VolumeAction::Inspect, []) => bail!("use `quire volume inspect NAME…`"),
            (VolumeAction::Inspect, _) => inspect(context, self),
            (VolumeAction::Exists, [name]) => exists(context, name),
            (VolumeAction::Exists, _) => bail!("use `quire volume exists NAME`"),
            (VolumeAction::Mount | VolumeAction::Unmount, []) => {
                bail!("use `quire volume mount NAME…`")
            }
            (VolumeAction::Mount | VolumeAction::Unmount, _) => mount(context, self),
            (VolumeAction::Import, [name]) => archive::import(context, name, None),
            (VolumeAction::Import, [name, file]) => archive::import(context, name, Some(file)),
            (VolumeAction::Import, _) => bail!("use `quire volume import NAME [FILE]`"),
            (VolumeAction::Export, [name]) => {
                let file = self.output.last().filter(|it| it.as_os_str() != "-").cloned();
                archive::export(context, name, &file.map_or(Output::Stdout, Output::File))
            }
            (VolumeAction::Export, _) => bail!("use `quire volume export NAME --output FILE`"),
            (VolumeAction::Rm, []) if self.all => remove(context, self),
            (VolumeAction::Rm, []) => {
                bail!("use `quire volume rm NAME…`; `quire volume ls` prints the names")
            }
            (VolumeAction::Rm, _) if self.all => bail!("--all: leave the names out"),
            (VolumeAction::Rm, _) => remove(context, self),
            (VolumeAction::Prune, []) => prune(context, self),
            (VolumeAction::Prune, _) => bail!("use `quire volume rm NAME…`"),
        }
    }
}

impl Volume {
    /// Whether files of volumes are read, written or removed, which may belong to other users of a user namespace.
    pub(crate) fn touches_files(&self) -> bool {
        use VolumeAction::{Export, Import, Prune, Rm};
        matches!(self.action, Import | Export | Rm | Prune)
    }

    /// Refuses options that another action has.
    fn check(&self) -> anyhow::Result<()> {
        use VolumeAction::{Create, Export, Inspect, Ls, Prune, Rm};
        if self.action == Create && !self.output.is_empty() {
            // In podman and Docker, these are options of the mount.
            bail!(
                "volumes have no options -o: `run -v /DIR:PATH` mounts a directory, and `run --tmpfs PATH:size=SIZE` \
                a file system in memory"
            );
        }
        let given: [(&str, bool, &[VolumeAction]); 10] = [
            ("--driver", self.driver.is_some(), &[Create]),
            ("--output", !self.output.is_empty(), &[Export]),
            ("--label", !self.label.is_empty(), &[Create]),
            ("--ignore", self.ignore, &[Create]),
            ("--filter", !self.filter.is_empty(), &[Ls, Prune]),
            ("--format", self.format.is_some(), &[Ls, Inspect]),
            ("--noheading", self.noheading, &[Ls]),
            ("-q", self.only_names, &[Ls]),
            ("--all", self.all, &[Rm, Prune]),
            ("--force", self.force, &[Rm, Prune]),
        ];
        let given =
            given.map(|(option, is_given, actions)| ActionOption { option, is_given, actions });
        check_options(Self::NAME, &self.action, &given)
    }
}

/// Report of `volume --json` on a volume.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct VolumeReport {
    /// Name of the volume.
    volume: String,
    /// Directory with its files.
    path: String,
    /// Time of creation, in RFC 3339. Null if its record is damaged.
    created: Option<Time>,
    /// Labels of the volume.
    labels: BTreeMap<String, String>,
    /// Whether it was made for one container, without a name that a user chose.
    anonymous: bool,
    /// A container that uses it, running or stopped. Null if none does.
    container: Option<String>,
    /// Why its record cannot be read. Null if it can.
    damage: Option<String>,
}

impl VolumeReport {
    fn of(volume: &FoundVolume) -> Self {
        let record = volume.record.as_ref();
        Self {
            volume: volume.name.clone(),
            path: volume.path.clone(),
            created: record.ok().map(|it| Time(it.created.0)),
            labels: volume.labels().clone(),
            anonymous: record.is_ok_and(|it| it.anonymous),
            container: volume.container.clone(),
            damage: record.err().cloned(),
        }
    }
}

/// Description of a volume by `volume inspect`, with podman's names. Source: podman-volume-inspect(1).
#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct InspectedVolume<'a> {
    name: &'a str,
    driver: &'static str,
    mountpoint: &'a str,
    created_at: String,
    labels: &'a BTreeMap<String, String>,
    scope: &'static str,
    options: BTreeMap<String, String>,
    anonymous: bool,
    /// Whether the first container copies the files of its image into the volume, and gives it its owner.
    needs_copy_up: bool,
    needs_chown: bool,
}

/// The only driver and scope of volumes.
const LOCAL: &str = "local";

impl<'a> InspectedVolume<'a> {
    fn of(volume: &'a FoundVolume) -> Self {
        let record = volume.record.as_ref();
        Self {
            name: &volume.name,
            driver: LOCAL,
            mountpoint: &volume.path,
            created_at: record.map_or_else(|_| String::new(), |it| report::rfc3339(it.created.0)),
            labels: volume.labels(),
            scope: LOCAL,
            options: BTreeMap::new(),
            anonymous: record.is_ok_and(|it| it.anonymous),
            needs_copy_up: record.is_ok_and(|it| it.fresh),
            needs_chown: record.is_ok_and(|it| it.fresh),
        }
    }

    /// Returns the row of `volume ls` for templates, where labels are one text. Source: podman,
    /// `cmd/podman/volumes/list.go`.
    fn row(&self) -> serde_json::Result<Value> {
        let mut row = serde_json::to_value(self)?;
        let labels = self.labels.iter().map(|(name, value)| format!("{name}={value}"));
        row["Labels"] = labels.collect::<Vec<_>>().join(",").into();
        Ok(row)
    }
}

fn found(store: &Store) -> anyhow::Result<Vec<FoundVolume>> {
    // If a container is damaged, each volume counts as used.
    let used = store.used_volumes();
    let user = |name: &str| match &used {
        Ok(used) => used.get(name).cloned(),
        Err(VolumeError::UnknownUser(container)) => Some(container.clone()),
        Err(_) => None,
    };
    let all = store.volumes.all()?.into_iter().map(|(name, record)| FoundVolume {
        container: user(&name),
        path: store.volumes.path(&name).display().to_string(),
        record: record.map_err(|error| report::chain(&error)),
        name,
    });
    let all = all.collect();
    if let Err(error @ VolumeError::Disk(_)) = used {
        return Err(error.into());
    }
    Ok(all)
}

fn create(context: &Context, args: &Volume) -> anyhow::Result<Answer> {
    let labels = args.label.iter().map(|it| label(it)).collect::<Result<_, _>>();
    let labels = labels.context("--label")?;
    let name = args.names.first().cloned().map_or_else(random_volume_name, Ok)?;
    let store = context.open(OpenOptions::create())?;
    let anonymous = args.names.is_empty();
    let record = VolumeRecord { labels, anonymous, fresh: true, ..VolumeRecord::new(now()) };
    let lock = store.hold_volumes()?;
    let draft = store.volumes.draft()?;
    match store.publish_volume(&lock, draft, &name, &record, VolumeFiles::Unsynced) {
        Err(VolumeError::Exists(_)) if args.ignore => {}
        published => published?,
    }
    drop(lock);
    if context.json {
        let all = found(&store)?;
        let made = all.iter().find(|it| it.name == name).map(VolumeReport::of);
        report::json(&made)?;
    } else {
        report::line(&name)?;
    }
    Ok(Answer::Yes)
}

fn list(context: &Context, args: &Volume) -> anyhow::Result<Answer> {
    let filters = ItemFilters::parse(&args.filter, &FILTERS)?;
    let mut all = match context.open_for(OpenOptions::read(), true)? {
        Some(store) => found(&store)?,
        None => Vec::new(),
    };
    all.retain(|it| filters.fit(it));
    if args.only_names || context.quiet {
        return report::lines(all.iter().map(|it| it.name.as_str()));
    }
    if let Some(format) = &args.format {
        let all: Vec<_> = all.iter().map(InspectedVolume::of).collect();
        if template::is_json(format) {
            return print_formatted(format, &all, &TITLES, args.noheading);
        }
        let rows = all.iter().map(InspectedVolume::row).collect::<Result<Vec<_>, _>>()?;
        return print_formatted(format, &rows, &TITLES, args.noheading);
    }
    let told: Vec<_> = all.iter().map(VolumeReport::of).collect();
    report::print(context.json, &told, |all, out| {
        // Source: podman-volume-ls(1).
        let rows = all.iter().map(|it| vec![LOCAL.to_owned(), it.volume.clone()]);
        let titles = if args.noheading { ["", ""] } else { ["DRIVER", "VOLUME NAME"] };
        table::print_whole(out, &titles, &rows.collect::<Vec<_>>(), &[])
    })?;
    Ok(Answer::Yes)
}

fn inspect(context: &Context, args: &Volume) -> anyhow::Result<Answer> {
    let all = match context.open_for(OpenOptions::read(), true)? {
        Some(store) => found(&store)?,
        None => Vec::new(),
    };
    let wanted = choose(all, &args.names, |name| VolumeError::Absent(name.to_owned()).into())?;
    let described: Vec<_> = wanted.iter().map(InspectedVolume::of).collect();
    if let Some(format) = &args.format {
        return print_formatted(format, &described, &TITLES, true);
    }
    if context.json {
        report::json(&wanted.iter().map(VolumeReport::of).collect::<Vec<_>>())?;
    } else {
        report::json(&described)?;
    }
    Ok(Answer::Yes)
}

fn exists(context: &Context, name: &str) -> anyhow::Result<Answer> {
    let Some(store) = context.open_for(OpenOptions::read(), true)? else { return Ok(Answer::No) };
    match store.volumes.get(name) {
        Ok(Some(_)) | Err(VolumeError::Damaged { .. }) => Ok(Answer::Yes),
        Ok(None) => Ok(Answer::No),
        Err(error) => Err(error.into()),
    }
}

/// Prints the directories of volumes, or for `unmount` the names. Directories are never mounted.
fn mount(context: &Context, args: &Volume) -> anyhow::Result<Answer> {
    let all = match context.open_for(OpenOptions::read(), true)? {
        Some(store) => found(&store)?,
        None => Vec::new(),
    };
    let wanted = choose(all, &args.names, |name| VolumeError::Absent(name.to_owned()).into())?;
    let shown = |it: &FoundVolume| match args.action {
        VolumeAction::Mount => it.path.clone(),
        _ => it.name.clone(),
    };
    let shown: Vec<_> = wanted.iter().map(shown).collect();
    report::lines(shown.iter().map(String::as_str))
}

/// Report of `volume rm --json` and `volume prune --json` on a volume.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct VolumeRemovedReport {
    /// Name of the volume.
    volume: String,
}

fn tell(context: &Context, names: Vec<String>) -> anyhow::Result<Answer> {
    tell_removed(context, names, |volume| VolumeRemovedReport { volume })
}

fn remove(context: &Context, args: &Volume) -> anyhow::Result<Answer> {
    let Some(store) = context.open_for(OpenOptions::write(), true)? else {
        return match args.names.first().filter(|_| !args.force && !args.all) {
            Some(name) => Err(VolumeError::Absent(name.clone()).into()),
            None => tell(context, Vec::new()),
        };
    };
    let names = match args.all {
        true => {
            let all = found(&store)?.into_iter();
            all.filter(|it| args.force || it.container.is_none()).map(|it| it.name).collect()
        }
        false => args.names.clone(),
    };
    if !args.force {
        // All names are looked up before any volume is removed.
        let (used, all) = (store.used_volumes()?, store.volumes.all()?);
        let all: BTreeSet<_> = all.iter().map(|it| it.0.as_str()).collect();
        for name in &names {
            if let Some(container) = used.get(name).cloned() {
                return Err(VolumeError::InUse { name: name.clone(), container }.into());
            }
            if !all.contains(name.as_str()) {
                return Err(VolumeError::Absent(name.clone()).into());
            }
        }
    }
    let mut removed = Vec::new();
    for name in names {
        match remove_one(&store, &name, args.force) {
            Ok(()) => removed.push(name),
            Err(VolumeError::Absent(_)) if args.force => {}
            Err(error) => return Err(error.into()),
        }
    }
    tell(context, removed)
}

/// Removes a volume, and with `force` the containers that use it.
fn remove_one(store: &Store, name: &str, force: bool) -> Result<(), VolumeError> {
    loop {
        let container = match store.remove_volume(name) {
            Err(VolumeError::InUse { container, .. }) if force => container,
            removed => return removed,
        };
        let in_use = || VolumeError::InUse { name: name.to_owned(), container: container.clone() };
        let now = || now().0;
        let removal = Removal::new(store, IfRunning::Kill, OwnVolumes::Stay, &now);
        removal.remove(&container).map_err(|error| {
            tracing::warn!(container, %error, "cannot remove the container");
            in_use()
        })?;
        if store.containers.get(&container).is_ok_and(|it| it.is_some()) {
            return Err(in_use());
        }
    }
}

fn prune(context: &Context, args: &Volume) -> anyhow::Result<Answer> {
    let filters = ItemFilters::parse(&args.filter, &FILTERS)?;
    let Some(store) = context.open_for(OpenOptions::write(), true)? else {
        return tell(context, Vec::new());
    };
    let unused = found(&store)?.into_iter().filter(|it| it.container.is_none());
    let is_doomed = |it: &FoundVolume| args.all || it.record.as_ref().is_ok_and(|it| it.anonymous);
    let unused = unused.filter(|it| is_doomed(it) && filters.fit(it));
    let unused: Vec<_> = unused.map(|it| it.name).collect();
    if !args.force && !is_confirmed(args, &unused)? {
        return tell(context, Vec::new());
    }
    let mut removed = Vec::new();
    for name in unused {
        match store.remove_volume(&name) {
            Ok(()) => removed.push(name),
            // A container has begun to use it, or another command has removed it.
            Err(VolumeError::InUse { .. } | VolumeError::Absent(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    tell(context, removed)
}

/// Lists the volumes, and asks whether to remove them. The texts are those of podman.
fn is_confirmed(args: &Volume, doomed: &[String]) -> anyhow::Result<bool> {
    let (kind, none) = match args.all {
        true => ("volumes", "No dangling volumes found"),
        false => ("anonymous volumes", "No dangling anonymous volumes found"),
    };
    let warning = format!(
        "this removes all files of {kind} that no container uses, running or stopped. The following volumes will be \
        removed:"
    );
    if doomed.is_empty() {
        report::error_line(&format!(
            "WARNING: {warning}
{none}"
        ));
        return Ok(false);
    }
    confirmation::is_confirmed(&warning, doomed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use store::Seconds;

    fn volume(name: &str, labels: &[(&str, &str)], container: Option<&str>) -> FoundVolume {
        let labels = labels.iter().map(|(name, value)| (name.to_string(), value.to_string()));
        FoundVolume {
            name: name.to_owned(),
            record: Ok(VolumeRecord { labels: labels.collect(), ..VolumeRecord::new(Seconds(0)) }),
            container: container.map(ToOwned::to_owned),
            path: format!("/s/volumes/{name}/data"),
        }
    }

    /// Source: podman-volume-ls(1). A name is a regular expression.
    #[test]
    fn filters_are_those_of_podman() {
        let all = [
            volume("web", &[("a", "1")], Some("c")),
            volume("web2", &[("a", "2"), ("b", "")], None),
            volume("db", &[], None),
        ];
        let parse = |texts: &[&str]| {
            let texts: Vec<_> = texts.iter().map(|&it| it.to_owned()).collect();
            ItemFilters::parse(&texts, &FILTERS)
        };
        let check = |texts: &[&str], expect: &[&str]| {
            let filters = parse(texts).unwrap();
            let fitting = all.iter().filter(|it| filters.fit(*it));
            assert_eq!(fitting.map(|it| it.name.as_str()).collect::<Vec<_>>(), expect);
        };
        check(&[], &["web", "web2", "db"]);
        check(&["name=web"], &["web", "web2"]);
        check(&["name=^web$"], &["web"]);
        check(&["name=web2", "name=db"], &["web2", "db"]);
        check(&["label=a"], &["web", "web2"]);
        check(&["label=a=2"], &["web2"]);
        check(&["label=a", "label=b"], &["web2"]);
        check(&["label!=a"], &["db"]);
        check(&["label!=a=1"], &["web2", "db"]);
        check(&["dangling=true"], &["web2", "db"]);
        check(&["dangling=false", "name=web"], &["web"]);
        for text in ["", "name", "until=1h", "dangling=perhaps", "dangling"] {
            assert!(parse(&[text]).is_err(), "{text}");
        }
    }

    /// Source: podman-volume-inspect(1).
    #[test]
    fn fields_of_templates() {
        let volume = volume("web", &[("a", "1"), ("b", "")], None);
        let fields = serde_json::to_value(InspectedVolume::of(&volume)).unwrap();
        let format = |text: &str| template::render(text, &fields);
        assert_eq!(format("a {{ .Driver }}\\t{{.Name}}!").unwrap(), "a local\tweb!");
        assert_eq!(format("{{.Labels.a}}").unwrap(), "1");
        assert_eq!(format("{{.Mountpoint}}").unwrap(), "/s/volumes/web/data");
        assert_eq!(format("{{.CreatedAt}}").unwrap(), "1970-01-01T00:00:00Z");
        for text in ["{{.Name", "{{Name}}", "{{.Size}}"] {
            assert!(format(text).is_err(), "{text}");
        }
    }
}
