//! `network`: makes, lists and removes networks, which containers join by `--network NAME`.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};
use container::life::lookup::{self, IfRunning, KnownContainer, OwnVolumes, Removal};
use container::life::prepare::random_id;
use container::listed_settings::ListedSettings;
use container::networks::attachment::noted_endpoints;
use container::networks::definition::{Definition, NewNetwork};
use container::networks::subnet::Subnet;
use serde::Serialize;
use store::{NetworkRecord, NetworkRecordError, OpenOptions, Store};

use crate::Answer;
use crate::args::labels::label;
use crate::output::report::{self, Time};
use crate::output::{confirmation, table, template};
use crate::session::context::{Context, now};
use crate::session::failure::NetworkInUse;
use crate::verbs::VerbArgs;
use crate::verbs::containers::named_items::{
    ActionOption, ItemFilters, NamedItem, check_options, choose, no_labels, print_formatted,
    tell_removed,
};
use crate::verbs::containers::networks::join;
use crate::verbs::exit_codes::ExitCodes;

/// An action of `network`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum NetworkAction {
    /// Make a network, with the name NAME or a random one
    Create,
    /// List the networks
    #[value(alias = "list")]
    Ls,
    /// Describe networks
    Inspect,
    /// Exit with 0 if there is such a network, or else with 1
    Exists,
    /// Remove networks that no container uses
    #[value(alias = "remove")]
    Rm,
    /// Remove all networks that no container uses
    Prune,
}

/// The only driver of networks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum NetworkDriver {
    /// A bridge of the host
    Bridge,
}

#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of the command line")]
pub(crate) struct Network {
    /// The action
    #[arg(value_enum)]
    pub(crate) action: NetworkAction,
    /// Names of networks
    #[arg(value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// For create: choose the addresses, such as 10.90.0.0/24; by default a free subnet from 10.89.0.0/24 on
    #[arg(long, value_name = "SUBNET")]
    pub(crate) subnet: Option<Subnet>,
    /// For create: choose the address of the host in the network; by default the first one
    #[arg(long, value_name = "IP")]
    pub(crate) gateway: Option<Ipv4Addr>,
    /// For create: make a network that leads only to its own containers and the host
    #[arg(long)]
    pub(crate) internal: bool,
    /// For create: containers do not resolve each other's names
    #[arg(long)]
    pub(crate) disable_dns: bool,
    /// For create: the kind of network
    #[arg(short, long, value_enum, value_name = "DRIVER")]
    pub(crate) driver: Option<NetworkDriver>,
    /// For create: attach a label
    #[arg(long, value_name = "NAME[=VALUE]")]
    pub(crate) label: Vec<String>,
    /// For create: succeed if there is such a network already
    #[arg(long)]
    pub(crate) ignore: bool,
    /// For ls and prune: only networks to which this applies. Keys: dangling (whether no container uses it), driver,
    /// id, label, label!, name
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) filter: Vec<String>,
    /// For ls and inspect: print each network by a template of Go, or `json`
    #[arg(long, value_name = "TEMPLATE")]
    pub(crate) format: Option<String>,
    /// For ls: print no titles
    #[arg(short = 'n', long)]
    pub(crate) noheading: bool,
    /// For ls: print only names
    #[arg(short = 'q')]
    pub(crate) only_names: bool,
    /// For rm: ignore names that do not exist, and remove the containers that use the networks, even running ones. For
    /// prune: do not ask
    #[arg(short, long)]
    pub(crate) force: bool,
}

/// The keys of `--filter`. Source: podman-network-ls(1).
const FILTERS: [&str; 6] = ["dangling", "driver", "id", "label", "label!", "name"];

/// Titles of fields that differ from their names. Source: podman, `cmd/podman/networks/list.go`.
const TITLES: [(&str, &str); 1] = [("ID", "NETWORK ID")];

/// Length of an id in tables, in digits.
const SHORT_ID: usize = 12;

/// Conditions on networks.
struct NetworkFilters(ItemFilters);

impl NetworkFilters {
    fn parse(texts: &[String]) -> anyhow::Result<Self> {
        ItemFilters::parse(texts, &FILTERS).map(Self)
    }

    fn fit(&self, network: &FoundNetwork) -> bool {
        let filters = &self.0.filters;
        self.0.fit(network)
            && filters.fits("driver", |it| it == DRIVER)
            && filters.fits("id", |it| network.id().starts_with(it))
    }
}

/// A network of the store, with the containers that use it.
struct FoundNetwork {
    name: String,
    record: Result<NetworkRecord, String>,
    users: Vec<NetworkUser>,
}

/// A container that uses a network, running or not.
struct NetworkUser {
    container: String,
    /// Address with the prefix of the subnet; `None` if the container does not run.
    address: Option<String>,
}

impl NamedItem for FoundNetwork {
    fn name(&self) -> &str {
        &self.name
    }

    fn labels(&self) -> &BTreeMap<String, String> {
        self.record.as_ref().map_or_else(|_| no_labels(), |it| &it.labels)
    }

    fn is_used(&self) -> bool {
        !self.users.is_empty()
    }
}

impl FoundNetwork {
    fn id(&self) -> &str {
        self.record.as_ref().map_or("", |it| &it.id)
    }
}

impl VerbArgs for Network {
    const NAME: &'static str = "network";
    const ABOUT: &'static str = "Make, list and remove networks of several containers";
    const DETAILS: &'static str = "A network is a bridge that containers join by `--network NAME`. They reach each other \
        at all ports, by the names of the containers and by `--network-alias`. Without `--internal`, they also connect \
        out through the host's network. Networks need the programs netavark and aardvark-dns.\n\n\
        A network that a container uses, running or stopped, is not removed without --force.";
    const EXAMPLES: &'static str = "quire network create --subnet 10.90.0.0/24 shop\n  quire run -d --network shop --name db postgres\n  quire run --network shop app -- psql -h db\n  quire network ls\n  quire network rm --force shop";
    const EXIT_CODES: ExitCodes = ExitCodes::Groups;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        self.check()?;
        match (self.action, &*self.names) {
            (NetworkAction::Create, [] | [_]) => create(context, self),
            (NetworkAction::Create, _) => bail!("use `quire network create [NAME]`"),
            (NetworkAction::Ls, []) => list(context, self),
            (NetworkAction::Ls, _) => bail!("use `quire network ls --filter name=NAME`"),
            (NetworkAction::Inspect, []) => bail!("use `quire network inspect NAME…`"),
            (NetworkAction::Inspect, _) => inspect(context, self),
            (NetworkAction::Exists, [name]) => exists(context, name),
            (NetworkAction::Exists, _) => bail!("use `quire network exists NAME`"),
            (NetworkAction::Rm, []) => {
                bail!("use `quire network rm NAME…`; `quire network ls` prints the names")
            }
            (NetworkAction::Rm, _) => remove(context, self),
            (NetworkAction::Prune, []) => prune(context, self),
            (NetworkAction::Prune, _) => bail!("use `quire network rm NAME…`"),
        }
    }
}

impl Network {
    /// Whether containers are removed, whose files may belong to other users of a user namespace.
    pub(crate) fn removes(&self) -> bool {
        matches!(self.action, NetworkAction::Rm) && self.force
    }

    /// Refuses options that another action has.
    fn check(&self) -> anyhow::Result<()> {
        use NetworkAction::{Create, Inspect, Ls, Prune, Rm};
        let given: [(&str, bool, &[NetworkAction]); 12] = [
            ("--subnet", self.subnet.is_some(), &[Create]),
            ("--gateway", self.gateway.is_some(), &[Create]),
            ("--internal", self.internal, &[Create]),
            ("--disable-dns", self.disable_dns, &[Create]),
            ("--driver", self.driver.is_some(), &[Create]),
            ("--label", !self.label.is_empty(), &[Create]),
            ("--ignore", self.ignore, &[Create]),
            ("--filter", !self.filter.is_empty(), &[Ls, Prune]),
            ("--format", self.format.is_some(), &[Ls, Inspect]),
            ("--noheading", self.noheading, &[Ls]),
            ("-q", self.only_names, &[Ls]),
            ("--force", self.force, &[Rm, Prune]),
        ];
        let given =
            given.map(|(option, is_given, actions)| ActionOption { option, is_given, actions });
        check_options(Self::NAME, &self.action, &given)
    }
}

/// Report of `network --json` on a network.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct NetworkReport {
    /// Name of the network.
    network: String,
    /// Its id. Empty if its record is damaged, like the other texts.
    id: String,
    /// Time of creation, in RFC 3339. Null if its record is damaged.
    created: Option<Time>,
    /// Labels of the network.
    labels: BTreeMap<String, String>,
    /// Name of the bridge.
    bridge: String,
    /// Addresses, such as `10.89.0.0/24`.
    subnet: String,
    /// Address of the bridge.
    gateway: String,
    /// Whether it leads only to its own containers and the host.
    internal: bool,
    /// Whether its containers resolve each other's names.
    dns: bool,
    /// Containers that use it, running or stopped.
    containers: Vec<String>,
    /// Why its record cannot be read. Null if it can.
    damage: Option<String>,
}

impl NetworkReport {
    fn of(network: &FoundNetwork) -> Self {
        let record = network.record.as_ref();
        let text =
            |of: &dyn Fn(&NetworkRecord) -> String| record.map_or_else(|_| String::new(), of);
        Self {
            network: network.name.clone(),
            id: network.id().to_owned(),
            created: record.ok().map(|it| Time(it.created.0)),
            labels: network.labels().clone(),
            bridge: text(&|it| it.bridge.clone()),
            subnet: text(&subnet),
            gateway: text(&|it| it.gateway.to_string()),
            internal: record.is_ok_and(|it| it.internal),
            dns: record.is_ok_and(|it| it.dns),
            containers: network.users.iter().map(|it| it.container.clone()).collect(),
            damage: record.err().cloned(),
        }
    }
}

fn subnet(record: &NetworkRecord) -> String {
    format!("{}/{}", record.address, record.prefix)
}

/// Description of a network by `network inspect`, with podman's names. Source: podman-network-inspect(1).
#[derive(Serialize)]
struct InspectedNetwork<'a> {
    name: &'a str,
    id: &'a str,
    driver: &'static str,
    network_interface: &'a str,
    created: String,
    subnets: Vec<InspectedSubnet>,
    ipv6_enabled: bool,
    internal: bool,
    dns_enabled: bool,
    labels: &'a BTreeMap<String, String>,
    ipam_options: BTreeMap<&'static str, &'static str>,
    containers: BTreeMap<&'a str, InspectedUser<'a>>,
}

#[derive(Serialize)]
struct InspectedSubnet {
    subnet: String,
    gateway: String,
}

#[derive(Serialize)]
struct InspectedUser<'a> {
    name: &'a str,
    address: Option<&'a str>,
}

/// A row of `network ls` for templates, with podman's names. Source: podman-network-ls(1).
#[derive(Serialize)]
struct ListedNetwork<'a> {
    #[serde(rename = "ID")]
    id: &'a str,
    #[serde(rename = "Name")]
    name: &'a str,
    #[serde(rename = "Driver")]
    driver: &'static str,
    #[serde(rename = "Labels")]
    labels: &'a BTreeMap<String, String>,
    #[serde(rename = "NetworkInterface")]
    bridge: &'a str,
    #[serde(rename = "Subnets")]
    subnets: Vec<InspectedSubnet>,
    #[serde(rename = "Internal")]
    internal: bool,
    #[serde(rename = "DNSEnabled")]
    dns: bool,
    #[serde(rename = "IPv6Enabled")]
    ipv6: bool,
    #[serde(rename = "Created")]
    created: String,
}

/// Name of the only driver.
const DRIVER: &str = "bridge";

fn subnets(network: &FoundNetwork) -> Vec<InspectedSubnet> {
    let one = |it: &NetworkRecord| InspectedSubnet {
        subnet: subnet(it),
        gateway: it.gateway.to_string(),
    };
    network.record.iter().map(one).collect()
}

fn created(network: &FoundNetwork) -> String {
    network.record.as_ref().map_or_else(|_| String::new(), |it| report::rfc3339(it.created.0))
}

impl<'a> InspectedNetwork<'a> {
    fn of(network: &'a FoundNetwork) -> Self {
        let record = network.record.as_ref();
        let user = |it: &'a NetworkUser| {
            let (name, address) = (it.container.as_str(), it.address.as_deref());
            (name, InspectedUser { name, address })
        };
        Self {
            name: &network.name,
            id: network.id(),
            driver: DRIVER,
            network_interface: record.map_or("", |it| &it.bridge),
            created: created(network),
            subnets: subnets(network),
            ipv6_enabled: false,
            internal: record.is_ok_and(|it| it.internal),
            dns_enabled: record.is_ok_and(|it| it.dns),
            labels: network.labels(),
            ipam_options: BTreeMap::from([("driver", "host-local")]),
            containers: network.users.iter().filter(|it| it.address.is_some()).map(user).collect(),
        }
    }
}

impl<'a> ListedNetwork<'a> {
    fn of(network: &'a FoundNetwork) -> Self {
        let record = network.record.as_ref();
        Self {
            id: network.id().get(..SHORT_ID).unwrap_or_default(),
            name: &network.name,
            driver: DRIVER,
            labels: network.labels(),
            bridge: record.map_or("", |it| &it.bridge),
            subnets: subnets(network),
            internal: record.is_ok_and(|it| it.internal),
            dns: record.is_ok_and(|it| it.dns),
            ipv6: false,
            created: created(network),
        }
    }
}

/// Returns the networks of the store.
fn found(store: &Store) -> anyhow::Result<Vec<FoundNetwork>> {
    let mut users: BTreeMap<String, Vec<NetworkUser>> = BTreeMap::new();
    for known in lookup::all(store)? {
        // Settings that cannot be read belong to a damaged container, which cannot be started.
        let settings = ListedSettings::load(&known.folder).unwrap_or_default();
        for name in settings.networks {
            let user = NetworkUser { container: known.id.clone(), address: address(&known, &name) };
            users.entry(name).or_default().push(user);
        }
    }
    let all = store.networks.all()?.into_iter().map(|(name, record)| FoundNetwork {
        users: users.remove(&name).unwrap_or_default(),
        record: record.map_err(|error| report::chain(&error)),
        name,
    });
    Ok(all.collect())
}

/// Returns the address of a running container in a network, with the prefix of the subnet.
fn address(known: &KnownContainer, network: &str) -> Option<String> {
    let endpoints = noted_endpoints(&known.folder);
    let endpoint = endpoints.iter().find(|it| it.network == network).filter(|_| known.is_running());
    let prefix = endpoint?.subnet.parse::<Subnet>().ok()?.prefix();
    Some(format!("{}/{prefix}", endpoint?.address))
}

fn create(context: &Context, args: &Network) -> anyhow::Result<Answer> {
    let labels = args.label.iter().map(|it| label(it)).collect::<Result<_, _>>();
    let labels = labels.context("--label")?;
    let name = args
        .names
        .first()
        .cloned()
        .map_or_else(|| random_id().map(|it| format!("network-{it}")), Ok)?;
    let store = context.open(OpenOptions::create())?;
    let new = NewNetwork {
        labels,
        subnet: args.subnet,
        gateway: args.gateway,
        internal: args.internal,
        dns: !args.disable_dns,
    };
    match new.create(&store, &name, now()) {
        Err(container::networks::NetworksError::Record(NetworkRecordError::Exists(_)))
            if args.ignore => {}
        made => drop(made?),
    }
    if context.json {
        let all = found(&store)?;
        report::json(&all.iter().find(|it| it.name == name).map(NetworkReport::of))?;
    } else {
        report::line(&name)?;
    }
    Ok(Answer::Yes)
}

fn list(context: &Context, args: &Network) -> anyhow::Result<Answer> {
    let filters = NetworkFilters::parse(&args.filter)?;
    let mut all = match context.open_for(OpenOptions::read(), true)? {
        Some(store) => found(&store)?,
        None => Vec::new(),
    };
    all.retain(|it| filters.fit(it));
    if args.only_names || context.quiet {
        return report::lines(all.iter().map(|it| it.name.as_str()));
    }
    if let Some(format) = &args.format {
        if template::is_json(format) {
            report::json(&all.iter().map(InspectedNetwork::of).collect::<Vec<_>>())?;
            return Ok(Answer::Yes);
        }
        let rows: Vec<_> = all.iter().map(ListedNetwork::of).collect();
        return print_formatted(format, &rows, &TITLES, args.noheading);
    }
    let told: Vec<_> = all.iter().map(NetworkReport::of).collect();
    report::print(context.json, &told, |all, out| {
        let row = |it: &NetworkReport| {
            let id = it.id.get(..SHORT_ID).unwrap_or_default().to_owned();
            vec![id, it.network.clone(), DRIVER.to_owned()]
        };
        let titles = if args.noheading { [""; 3] } else { ["NETWORK ID", "NAME", "DRIVER"] };
        table::print_whole(out, &titles, &all.iter().map(row).collect::<Vec<_>>(), &[])
    })?;
    Ok(Answer::Yes)
}

fn inspect(context: &Context, args: &Network) -> anyhow::Result<Answer> {
    let all = match context.open_for(OpenOptions::read(), true)? {
        Some(store) => found(&store)?,
        None => Vec::new(),
    };
    let absent = |name: &str| NetworkRecordError::Absent(name.to_owned()).into();
    let wanted = choose(all, &args.names, absent)?;
    for network in &wanted {
        if let Ok(record) = &network.record
            && let Err(error) = Definition::check(&network.name, record.clone())
        {
            context.remark(&report::chain(&error));
        }
    }
    if context.json {
        report::json(&wanted.iter().map(NetworkReport::of).collect::<Vec<_>>())?;
        return Ok(Answer::Yes);
    }
    let described: Vec<_> = wanted.iter().map(InspectedNetwork::of).collect();
    if let Some(format) = &args.format {
        return print_formatted(format, &described, &[], true);
    }
    report::json(&described)?;
    Ok(Answer::Yes)
}

fn exists(context: &Context, name: &str) -> anyhow::Result<Answer> {
    let Some(store) = context.open_for(OpenOptions::read(), true)? else { return Ok(Answer::No) };
    match store.networks.get(name) {
        Ok(_) | Err(NetworkRecordError::Damaged { .. }) => Ok(Answer::Yes),
        Err(NetworkRecordError::Absent(_)) => Ok(Answer::No),
        Err(error) => Err(error.into()),
    }
}

/// Report of `network rm --json` and `network prune --json` on a network.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct NetworkRemovedReport {
    /// Name of the network.
    network: String,
}

fn tell(context: &Context, names: Vec<String>) -> anyhow::Result<Answer> {
    tell_removed(context, names, |network| NetworkRemovedReport { network })
}

fn remove(context: &Context, args: &Network) -> anyhow::Result<Answer> {
    let Some(store) = context.open_for(OpenOptions::write(), true)? else {
        return match args.names.first().filter(|_| !args.force) {
            Some(name) => Err(NetworkRecordError::Absent(name.clone()).into()),
            None => tell(context, Vec::new()),
        };
    };
    // All names are looked up before any network is removed.
    let all = found(&store)?;
    let mut doomed = Vec::new();
    for name in &args.names {
        match all.iter().find(|it| it.name == *name) {
            Some(network) => doomed.push(network),
            None if args.force => {}
            None => return Err(NetworkRecordError::Absent(name.clone()).into()),
        }
    }
    if !args.force {
        refuse_used(doomed.iter().copied())?;
    }
    let now = || now().0;
    let removal = Removal::new(&store, IfRunning::Kill, OwnVolumes::Removed, &now);
    for user in doomed.iter().flat_map(|it| &it.users) {
        removal.remove(&user.container)?;
    }
    join::sweep(context);
    let mut removed = Vec::new();
    let lock = store.lock_networks()?;
    // A container may have been made since.
    refuse_used(found(&store)?.iter().filter(|it| args.names.contains(&it.name)))?;
    for network in doomed {
        match store.networks.remove(&lock, &network.name) {
            // Another command has removed it.
            Err(NetworkRecordError::Absent(_)) => {}
            gone => {
                gone?;
                removed.push(network.name.clone());
            }
        }
    }
    tell(context, removed)
}

/// Returns an error if a container uses one of these networks.
fn refuse_used<'a>(networks: impl IntoIterator<Item = &'a FoundNetwork>) -> anyhow::Result<()> {
    let used = networks.into_iter().find_map(|it| Some((it, it.users.first()?)));
    let Some((network, user)) = used else { return Ok(()) };
    let (container, network) = (user.container.clone(), network.name.clone());
    Err(NetworkInUse { container, network }.into())
}

fn prune(context: &Context, args: &Network) -> anyhow::Result<Answer> {
    let filters = NetworkFilters::parse(&args.filter)?;
    join::sweep(context);
    let Some(store) = context.open_for(OpenOptions::write(), true)? else {
        return tell(context, Vec::new());
    };
    let unused = found(&store)?.into_iter().filter(|it| it.users.is_empty());
    let unused: Vec<_> = unused.filter(|it| filters.fit(it)).map(|it| it.name).collect();
    if !args.force && !unused.is_empty() {
        let count = report::count(unused.len(), "network");
        let warning = format!("this removes {count}, which no container uses:");
        if !confirmation::is_confirmed(&warning, &unused)? {
            return tell(context, Vec::new());
        }
    }
    tell(context, clear(&store, &unused)?)
}

/// Removes networks that no container uses by now, and returns the names of those that existed.
fn clear(store: &Store, names: &[String]) -> anyhow::Result<Vec<String>> {
    if names.is_empty() {
        return Ok(Vec::new());
    }
    let mut removed = Vec::new();
    let lock = store.lock_networks()?;
    let used = found(store)?.into_iter().filter(NamedItem::is_used).map(|it| it.name);
    let used: BTreeSet<_> = used.collect();
    for name in names.iter().filter(|it| !used.contains(*it)) {
        match store.networks.remove(&lock, name) {
            Err(NetworkRecordError::Absent(_)) => {}
            gone => {
                gone?;
                removed.push(name.clone());
            }
        }
    }
    Ok(removed)
}

/// Removes the networks that no container uses and that are older than `before`, in seconds since 1970.
pub(crate) fn clear_unused(store: &Store, before: i64) -> anyhow::Result<Vec<String>> {
    let is_old = |it: &FoundNetwork| it.record.as_ref().is_ok_and(|it| it.created.0 <= before);
    let unused = found(store)?.into_iter().filter(|it| it.users.is_empty() && is_old(it));
    clear(store, &unused.map(|it| it.name).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use store::Seconds;

    use super::*;

    fn network(name: &str, labels: &[(&str, &str)], user: Option<&str>) -> FoundNetwork {
        let labels = labels.iter().map(|(name, value)| (name.to_string(), value.to_string()));
        let user = user.map(|it| NetworkUser {
            container: it.to_owned(),
            address: Some("10.90.0.2/24".to_owned()),
        });
        FoundNetwork {
            name: name.to_owned(),
            record: Ok(NetworkRecord {
                id: "0a".repeat(32),
                created: Seconds(0),
                labels: labels.collect(),
                bridge: "quire-0123abcd".to_owned(),
                address: "10.90.0.0".parse().unwrap(),
                prefix: 24,
                gateway: "10.90.0.1".parse().unwrap(),
                internal: false,
                dns: true,
            }),
            users: user.into_iter().collect(),
        }
    }

    /// Source: podman-network-ls(1). A name is a regular expression.
    #[test]
    fn filters_are_those_of_podman() {
        let all = [
            network("web", &[("a", "1")], Some("c")),
            network("web2", &[("a", "2")], None),
            network("db", &[], None),
        ];
        let parse = |texts: &[&str]| {
            let texts: Vec<_> = texts.iter().map(|&it| it.to_owned()).collect();
            NetworkFilters::parse(&texts)
        };
        let check = |texts: &[&str], expect: &[&str]| {
            let filters = parse(texts).unwrap();
            let fitting = all.iter().filter(|it| filters.fit(it));
            assert_eq!(fitting.map(|it| it.name.as_str()).collect::<Vec<_>>(), expect);
        };
        check(&[], &["web", "web2", "db"]);
        check(&["name=web"], &["web", "web2"]);
        check(&["name=^web$"], &["web"]);
        check(&["label=a=2"], &["web2"]);
        check(&["label!=a"], &["db"]);
        check(&["driver=bridge", "name=db"], &["db"]);
        check(&["driver=macvlan"], &[]);
        check(&["id=0a0a", "dangling=false"], &["web"]);
        check(&["id=0b"], &[]);
        for text in ["", "name", "until=1h", "dangling=perhaps"] {
            assert!(parse(&[text]).is_err(), "{text}");
        }
    }

    /// Source: podman-network-inspect(1) and podman-network-ls(1).
    #[test]
    fn fields_of_templates() {
        let network = network("web", &[("a", "1")], Some("c"));
        let described = serde_json::to_value(InspectedNetwork::of(&network)).unwrap();
        assert_eq!(described["subnets"][0]["gateway"], "10.90.0.1");
        assert_eq!(described["containers"]["c"]["address"], "10.90.0.2/24");
        assert_eq!(described["dns_enabled"], true);
        let listed = serde_json::to_value(ListedNetwork::of(&network)).unwrap();
        let format = |text: &str| template::render(text, &listed).unwrap();
        assert_eq!(format("{{.ID}} {{.Name}} {{.Driver}}"), "0a0a0a0a0a0a web bridge");
        assert_eq!(format("{{.Labels.a}}"), "1");
    }
}
