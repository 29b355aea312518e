//! `ps`: lists containers.

mod ports;
mod row;
mod select;

use std::collections::BTreeSet;

use clap::Args;
use container::life::lookup::{KnownContainer, all};
use container::life::state::Reason;
use container::listed_settings::ListedSettings;
use container::network::Ports;
use serde::Serialize;
use serde_json::Value;
use store::{OpenOptions, Store};

use crate::Answer;
use crate::output::list_filter::ListFilters;
use crate::output::report::{self, Time};
use crate::output::{table, template};
use crate::session::context::{Context, now};
use crate::verbs::VerbArgs;
use crate::verbs::containers::ps::ports::PortsReport;
use crate::verbs::containers::ps::row::{ListedContainer, TITLES};
use crate::verbs::containers::ps::select::{ContainerFilters, ContainerOrder, KEYS, sort};
use crate::verbs::containers::snapshots::origins::{self, Origins};
use crate::verbs::exit_codes::ExitCodes;
#[cfg(feature = "serve")]
use {
    crate::verbs::services::engines::roots::{RootOptions, list_roots},
    std::path::PathBuf,
};

#[expect(clippy::struct_excessive_bools, reason = "each is an option")]
#[derive(Debug, Args)]
pub(crate) struct Ps {
    /// Also list containers that have ended
    #[arg(short, long)]
    pub(crate) all: bool,
    /// Print only names
    #[arg(short = 'q')]
    pub(crate) ids: bool,
    /// List only containers that fit, such as name=web or status=exited. The keys are ancestor, before, command,
    /// exited, id, label, label!, name, network, pid, restart-policy, should-start-on-boot, since, status, until and
    /// volume
    #[arg(short, long, value_name = "KEY=VALUE")]
    pub(crate) filter: Vec<String>,
    /// Print `json`, or each container by a template of Go, such as '{{.Names}} {{.Status}}', with podman's fields. A
    /// template that begins with "table " has titles
    #[arg(long, value_name = "TEMPLATE", conflicts_with_all = ["json", "tree"])]
    pub(crate) format: Option<String>,
    /// List the last containers that were made, running or not
    #[arg(short = 'n', long, value_name = "COUNT")]
    pub(crate) last: Option<usize>,
    /// List the last container that was made, running or not
    #[arg(short, long, conflicts_with = "last")]
    pub(crate) latest: bool,
    /// Sort the list; the default is created
    #[arg(long, value_name = "KEY", value_enum, conflicts_with = "tree")]
    pub(crate) sort: Option<ContainerOrder>,
    /// Print no titles
    #[arg(long)]
    pub(crate) noheading: bool,
    /// Accepted without effect: all containers of the store are Quire's
    #[arg(long, hide = true)]
    pub(crate) external: bool,
    /// Accepted without effect: each call reads the states
    #[arg(long, hide = true)]
    pub(crate) sync: bool,
    /// Show whole commands
    #[arg(long)]
    pub(crate) no_trunc: bool,
    /// Show how much each container has written
    #[arg(short, long)]
    pub(crate) size: bool,
    /// Show each fork below the container of which it was made
    #[arg(long)]
    pub(crate) tree: bool,
    /// List the devices of lazily mounted images instead: how much of each is downloaded, and how long readers wait
    #[cfg(feature = "serve")]
    #[arg(long, group = "service", conflicts_with_all = ["all", "ids", "size", "tree", "filter", "format", "last", "latest", "sort"])]
    pub(crate) lazy: bool,
    /// List the roots of container engines instead that `quire serve --snapshotter` has mounted; with --all, all
    /// snapshots
    #[cfg(feature = "serve")]
    #[arg(long, group = "service", conflicts_with_all = ["ids", "size", "tree", "lazy", "filter", "format", "last", "latest", "sort"])]
    pub(crate) engine: bool,
    /// Print the list of --lazy, or the counters of the service behind --engine, as metrics in the text format of
    /// Prometheus
    #[cfg(feature = "serve")]
    #[arg(long, conflicts_with = "json", requires = "service")]
    pub(crate) metrics: bool,
    /// Socket of the snapshotter whose metrics are printed, instead of the one in serve.toml
    #[cfg(feature = "serve")]
    #[arg(long, value_name = "PATH", requires_all = ["engine", "metrics"])]
    pub(crate) socket: Option<PathBuf>,
}

impl VerbArgs for Ps {
    const NAME: &'static str = "ps";
    const ABOUT: &'static str = "List containers";
    const EXAMPLES: &'static str = "quire ps\n  quire ps --all --size\n  quire ps --tree\n  quire ps --filter status=exited --format '{{.Names}} {{.ExitCode}}'";
    const EXIT_CODES: ExitCodes = ExitCodes::Objects;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        ps(context, self)
    }
}

/// Report of `ps --json` on a container.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct PsReport {
    /// Id of the container.
    container: String,
    /// Id of the container's image. Null if the container is damaged.
    image: Option<String>,
    /// Name by which the image was started. Null if it had none, or the container is damaged.
    image_name: Option<String>,
    /// Command of the container.
    command: Vec<String>,
    /// Time at which the container was made, in RFC 3339. Null if the container is damaged.
    created: Option<Time>,
    /// `created` (it has never been started), `running`, `restarting` (its program has ended, and is started again soon), `unwatched` (it runs, but its monitor was killed), `exited`, `lost` (it ended in an unknown way),
    /// or `damaged`.
    status: &'static str,
    /// Process id of the first process. Null unless the container runs.
    pid: Option<u32>,
    /// Time of the start, in RFC 3339. Null if the container has not started.
    started: Option<Time>,
    /// Time of the end, in RFC 3339. Null if the container has not ended.
    finished: Option<Time>,
    /// Exit code. Null if the container has not ended, or the code is unknown.
    code: Option<i32>,
    /// Whether the disk lost some of the container's writes.
    lost: bool,
    /// Cause of the end: `timeout` or `memory`. Null for any other cause.
    #[cfg_attr(test, schemars(with = "Option<String>"))]
    reason: Option<Reason>,
    /// Exit code of the last run, for the table.
    #[serde(skip)]
    last_code: Option<i32>,
    /// Number of times that the restart policy has started the program again.
    restarts: u32,
    /// Id of the snapshot below the container's writable layer. Null if there is only its image.
    snapshot: Option<String>,
    /// The container of whose snapshot it was made, which may have been removed. Null if it was made of its image, or
    /// the snapshots between the two were merged.
    origin: Option<String>,
    /// Ports of the host that lead to the container.
    ports: Vec<PortsReport>,
    /// Size of the writable layer. Absent without `--size`. Null if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    written: Option<Option<report::Bytes>>,
}

pub(crate) fn ps(context: &Context, args: &Ps) -> anyhow::Result<Answer> {
    #[cfg(feature = "serve")]
    if args.lazy {
        let store = context.open(OpenOptions::read())?;
        return crate::verbs::services::lazy::devices::list(context, &store, args.metrics);
    }
    #[cfg(feature = "serve")]
    if args.engine {
        let store = context.open(OpenOptions::read())?;
        let options =
            RootOptions { all: args.all, metrics: args.metrics, socket: args.socket.as_deref() };
        return list_roots(context, &store, &options);
    }
    let filters = ListFilters::parse(&args.filter, &KEYS)?;
    let store = context.open_for(OpenOptions::read(), true)?;
    let mut found = store.as_ref().map_or_else(|| Ok(Vec::new()), all)?;
    let shown = chosen(&mut found, args, filters, store.as_ref())?;
    let is_shown = |it: &KnownContainer| shown.contains(&it.id);
    if !args.tree {
        found.retain(is_shown);
    }
    let is_short = args.ids || context.quiet;
    // As in podman, a format has precedence over -q.
    if let Some(form) = args.format.as_deref().filter(|it| *it != "table") {
        return write_form(form, &found, args).map(|()| Answer::Yes);
    }
    let origins = store.as_ref().filter(|_| args.tree || !is_short);
    let origins = origins.map_or_else(Origins::default, |store| Origins::read(store, &found));
    let found = match args.tree {
        true => origins.tree(found, is_shown),
        false => found.into_iter().map(|it| (String::new(), it)).collect(),
    };
    if is_short {
        return report::lines(found.iter().map(|it| it.1.id.as_str()));
    }
    let (lines, found): (Vec<_>, Vec<_>) = found.into_iter().unzip();
    let report = |it| PsReport::from_container(it, &origins, args);
    let all: Vec<_> = found.iter().map(report).collect();
    report::print(context.json, &all, |all, out| {
        let has_ports = all.iter().any(|it| !it.ports.is_empty());
        let mut titles = vec!["CONTAINER", "IMAGE", "STATUS", "CREATED"];
        titles.extend(has_ports.then_some("PORTS"));
        titles.push("COMMAND");
        if args.size {
            titles.push("SIZE");
        }
        if args.noheading {
            titles.fill("");
        }
        let now = now().0;
        let row = |(lines, it): (&String, &PsReport)| {
            let mut row = it.row(has_ports, args.no_trunc, now);
            if let Some(name) = row.first_mut() {
                name.insert_str(0, lines);
            }
            row
        };
        let rows: Vec<_> = lines.iter().zip(all).map(row).collect();
        let print = if args.no_trunc { table::print_whole } else { table::print };
        print(out, &titles, &rows, &[])
    })?;
    Ok(Answer::Yes)
}

/// Sorts the containers, and returns the ids of those that are listed.
fn chosen(
    found: &mut [KnownContainer],
    args: &Ps,
    filters: ListFilters,
    store: Option<&Store>,
) -> anyhow::Result<BTreeSet<String>> {
    let filters = ContainerFilters::new(filters, store)?;
    let last = if args.latest { Some(1) } else { args.last };
    let all = args.all || last.is_some() || filters.name_states();
    let mut shown = Vec::new();
    let mut is_read_error_known = false;
    sort(found, ContainerOrder::Created, |_| None);
    for it in found.iter().filter(|it| all || it.is_running()) {
        let settings = match filters.need_settings() {
            true => settings(it, &mut is_read_error_known),
            false => ListedSettings::default(),
        };
        if filters.fit(it, &settings) {
            shown.push(it.id.clone());
        }
    }
    let skipped = last.map_or(0, |last| shown.len().saturating_sub(last));
    if let Some(order) = args.sort {
        sort(found, order, KnownContainer::written);
    }
    Ok(shown.into_iter().skip(skipped).collect())
}

/// Returns the containers of a store that fit filters in the form of `--filter`, in the order in which they were made.
pub(crate) fn filtered(store: &Store, filters: &[String]) -> anyhow::Result<Vec<KnownContainer>> {
    let filters = ContainerFilters::new(ListFilters::parse(filters, &KEYS)?, Some(store))?;
    let mut found = all(store)?;
    sort(&mut found, ContainerOrder::Created, |_| None);
    let mut is_read_error_known = false;
    found.retain(|it| {
        let settings = match filters.need_settings() {
            true => settings(it, &mut is_read_error_known),
            false => ListedSettings::default(),
        };
        filters.fit(it, &settings)
    });
    Ok(found)
}

/// Reads the settings of a container. A container whose settings cannot be read is listed without them.
fn settings(known: &KnownContainer, is_told: &mut bool) -> ListedSettings {
    ListedSettings::load(&known.folder).unwrap_or_else(|error| {
        if !std::mem::replace(is_told, true) {
            let id = &known.id;
            report::error_line(&format!("quire: cannot read the settings of {id}: {error}"));
        }
        ListedSettings::default()
    })
}

/// Prints a list by `--format`.
fn write_form(form: &str, found: &[KnownContainer], args: &Ps) -> anyhow::Result<()> {
    let now = now().0;
    let (mut is_told, is_json) = (false, template::is_json(form));
    let wants_size = args.size || form.contains(".Size");
    let mut row = |known: &KnownContainer| {
        let settings = settings(known, &mut is_told);
        let written = wants_size.then(|| known.written()).flatten();
        let listed = ListedContainer { known, settings: &settings, written };
        if is_json { listed.json(now) } else { listed.fields(args.no_trunc, now) }
    };
    let rows: Vec<Value> = found.iter().map(&mut row).collect();
    if is_json {
        return report::json(&rows);
    }
    template::print_list(form, &rows, &TITLES, args.noheading)
}

impl PsReport {
    fn from_container(known: &KnownContainer, origins: &Origins, args: &Ps) -> Self {
        let record = known.record.as_ref();
        let state = known.state.as_ref();
        Self {
            container: known.id.clone(),
            image: record.map(|it| it.image.to_string()),
            image_name: record.and_then(|it| it.name.clone()),
            command: known.command(),
            created: record.map(|it| Time(it.created.0)),
            status: known.status(),
            pid: state
                .filter(|_| known.is_running() && known.delay().is_none())
                .map(|state| state.pid),
            started: state.map(|state| Time(state.started)),
            finished: state.and_then(|it| it.finished).map(Time),
            code: known.code(),
            lost: known.has_lost(),
            reason: known.reason(),
            last_code: known.delay().map(|it| it.code),
            restarts: known.restarts(),
            snapshot: origins::snapshot(known).map(str::to_owned),
            origin: origins.of(known).map(|it| it.container.clone()),
            ports: match known.is_watched() {
                true => Ports::noted(&known.folder).iter().map(PortsReport::from_ports).collect(),
                false => Vec::new(),
            },
            written: args.size.then(|| known.written().map(report::Bytes)),
        }
    }

    /// Returns the row of the table for people, at the time `now` in seconds since 1970.
    fn row(&self, has_ports: bool, is_whole: bool, now: i64) -> Vec<String> {
        let unknown = || "?".to_owned();
        let image =
            self.image_name.clone().or_else(|| self.image.as_ref().map(|it| report::short(it)));
        let last = self.last_code.map(|code| format!(" ({code})")).unwrap_or_default();
        let status = match (self.code, self.reason) {
            (Some(code), _) if self.lost => format!("exited ({code}), writes lost"),
            (Some(code), Some(reason)) => format!("exited ({code}), {}", reason.short()),
            (Some(code), None) => format!("exited ({code})"),
            (None, _) => format!("{}{last}", self.status),
        };
        let mut row = vec![
            self.container.clone(),
            image.unwrap_or_else(unknown),
            status,
            self.created.map_or_else(unknown, |it| report::ago(now.saturating_sub(it.0))),
        ];
        if has_ports {
            row.push(self.ports.iter().map(PortsReport::text).collect::<Vec<_>>().join(", "));
        }
        let command = self.command.join(" ");
        row.push(if is_whole { command } else { report::truncated(&command) });
        if let Some(written) = self.written {
            row.push(written.map_or_else(unknown, |it| report::size(it.0)));
        }
        row
    }
}
