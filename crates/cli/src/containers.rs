//! `ps`, `exec`, `stop` and `wait`, and the part of `rm` for containers.

use std::os::fd::AsFd as _;

use anyhow::{Context as _, bail};
use container::bundle::userns::{IdMap, OwnIds};
use container::life::detached::{self, More};
use container::life::known::{self, KnownContainer, all, find};
use container::life::monitor::KILLED;
use container::life::state::{Code, Reason};
use container::life::stop::{self, StopWish, signal_number};
use container::life::{cgroups, delegation};
use container::network::{Ports, Protocol};
use kernel::process::Signals;
use serde::Serialize;
use store::OpenOptions;

use crate::Answer;
use crate::args;
use crate::context::{Context, now};
use crate::report::{self, Time};
use crate::signals::FORWARDED;

/// Report of `ps --json` on a container.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct PsReport {
    /// The container.
    container: String,
    /// Id of its image. Null if the container is damaged.
    image: Option<String>,
    /// Name by which its image was started. Null if it had none, or the container is damaged.
    image_name: Option<String>,
    /// Its command.
    command: Vec<String>,
    /// Time at which it was made, as RFC 3339 has it. Null if the container is damaged.
    created: Option<Time>,
    /// `running`, `unwatched` (it runs, but its monitor was killed), `exited`, `lost` (it has ended in an unknown way), or
    /// `damaged`.
    status: &'static str,
    /// Its first process. Null unless it runs.
    pid: Option<u32>,
    /// Time of its start, as RFC 3339 has it. Null if it has not started.
    started: Option<Time>,
    /// Time of its end, as RFC 3339 has it. Null if it has not ended.
    finished: Option<Time>,
    /// Exit code. Null if it has not ended, or the code is unknown.
    code: Option<i32>,
    /// Whether the disk lost some of its writes.
    lost: bool,
    /// Cause of its end: `timeout` or `memory`. Null for any other cause.
    #[cfg_attr(test, schemars(with = "Option<String>"))]
    reason: Option<Reason>,
    /// Ports of the host that lead to it.
    ports: Vec<PortsReport>,
    /// Size of its writable layer. Absent without `--size`. Null if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    written: Option<Option<report::Bytes>>,
}

/// Ports of the host that lead to ports of a container, one to one and in order.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
struct PortsReport {
    /// Address of the host. Null means all that it has.
    address: Option<String>,
    /// The first port of the host.
    host: u16,
    /// The first port of the container.
    container: u16,
    /// Number of ports.
    count: u16,
    /// `tcp` or `udp`.
    protocol: &'static str,
}

/// A line of `wait --json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct WaitReport {
    /// The container.
    container: String,
    /// Exit code.
    code: i32,
    /// Whether the disk lost some of its writes.
    lost: bool,
    /// Cause of its end: `timeout` or `memory`. Null for any other cause.
    #[cfg_attr(test, schemars(with = "Option<String>"))]
    reason: Option<Reason>,
}

pub(crate) fn ps(context: &Context, args: &args::Ps) -> anyhow::Result<Answer> {
    #[cfg(feature = "serve")]
    if args.lazy {
        let store = context.open(OpenOptions::read())?;
        return crate::lazy::devices::list(context, &store, args.metrics);
    }
    #[cfg(feature = "serve")]
    if args.engine {
        let store = context.open(OpenOptions::read())?;
        return crate::engines::roots::list(context, &store, args);
    }
    let store = context.open_for(OpenOptions::read(), true)?;
    let mut found = store.as_ref().map_or_else(|| Ok(Vec::new()), all)?;
    found.retain(|it| args.all || it.is_running());
    found.sort_by_key(|it| it.record.as_ref().map(|it| it.created));
    if args.ids || context.quiet {
        return report::lines(found.iter().map(|it| it.id.as_str()));
    }
    let all: Vec<_> = found.iter().map(|it| PsReport::of(it, args)).collect();
    report::print(context.json, &all, |all, out| {
        let has_ports = all.iter().any(|it| !it.ports.is_empty());
        let mut titles = vec!["CONTAINER", "IMAGE", "STATUS", "CREATED"];
        titles.extend(has_ports.then_some("PORTS"));
        titles.push("COMMAND");
        if args.size {
            titles.push("SIZE");
        }
        let rows: Vec<_> = all.iter().map(|it| it.row(has_ports)).collect();
        report::table(out, &titles, &rows, &[])
    })?;
    Ok(Answer::Yes)
}

impl PsReport {
    fn of(known: &KnownContainer, args: &args::Ps) -> Self {
        let record = known.record.as_ref();
        let state = known.state.as_ref();
        Self {
            container: known.id.clone(),
            image: record.map(|it| it.image.to_string()),
            image_name: record.and_then(|it| it.name.clone()),
            command: known.command(),
            created: record.map(|it| Time(it.created.0)),
            status: known.status(),
            pid: state.filter(|_| known.is_running()).map(|state| state.pid),
            started: state.map(|state| Time(state.started)),
            finished: state.and_then(|it| it.finished).map(Time),
            code: known.code(),
            lost: known.has_lost(),
            reason: known.reason(),
            ports: match known.is_watched() {
                true => Ports::noted(&known.folder).iter().map(PortsReport::of).collect(),
                false => Vec::new(),
            },
            written: args.size.then(|| known.written().map(report::Bytes)),
        }
    }

    /// For people.
    fn row(&self, has_ports: bool) -> Vec<String> {
        let unknown = || "?".to_owned();
        let image =
            self.image_name.clone().or_else(|| self.image.as_ref().map(|it| report::short(it)));
        let status = match (self.code, self.reason) {
            (Some(code), _) if self.lost => format!("exited ({code}), writes lost"),
            (Some(code), Some(reason)) => format!("exited ({code}), {}", reason.short()),
            (Some(code), None) => format!("exited ({code})"),
            (None, _) => self.status.to_owned(),
        };
        let mut row = vec![
            self.container.clone(),
            image.unwrap_or_else(unknown),
            status,
            self.created.map_or_else(unknown, |it| report::time(it.0)),
        ];
        if has_ports {
            row.push(self.ports.iter().map(PortsReport::text).collect::<Vec<_>>().join(", "));
        }
        row.push(self.command.join(" "));
        if let Some(written) = self.written {
            row.push(written.map_or_else(unknown, |it| report::size(it.0)));
        }
        row
    }
}

impl PortsReport {
    fn of(ports: &Ports) -> Self {
        Self {
            address: ports.address.map(|it| it.to_string()),
            host: ports.host,
            container: ports.container,
            count: ports.count.get(),
            protocol: match ports.protocol {
                Protocol::Tcp => "tcp",
                Protocol::Udp => "udp",
            },
        }
    }

    /// For people, as docker and podman write it.
    fn text(&self) -> String {
        let address = match &self.address {
            None => "0.0.0.0".to_owned(),
            Some(address) if address.contains(':') => format!("[{address}]"),
            Some(address) => address.clone(),
        };
        let range = |first: u16| match self.count {
            1 => first.to_string(),
            count => format!("{first}-{}", first.saturating_add(count - 1)),
        };
        format!("{address}:{}->{}/{}", range(self.host), range(self.container), self.protocol)
    }
}

pub(crate) fn exec(context: &Context, args: &args::Exec) -> anyhow::Result<Answer> {
    // A file of them may be a pipe without a writer, and a signal ends the wait for it.
    let env = crate::wanted::environment(&args.program)?;
    let signals = Signals::block(&FORWARDED)?;
    let terminal = crate::wanted::terminal(args.tty.when())?;
    let store = context.open(OpenOptions::read())?;
    let is_asked_to_end = || signals.ending().is_some();
    let (found, root) = known::running(&store, &args.container, &is_asked_to_end)?;
    // While `commit` or `diff` look at it nothing new runs in it.
    let goes_on = container::life::pause::pass(&found.folder, &found.id, &is_asked_to_end);
    if !goes_on.with_context(|| format!("cannot see whether {} is paused", found.id))? {
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
        let user = container::bundle::user::find(root.as_fd(), user)?;
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
    };
    let killed = container::life::memory::killed_in(&found.folder);
    let exit = detached::exec(&found.folder, &found.id, more, &signals)?;
    if exit.shell_code() == KILLED && container::life::memory::killed_in(&found.folder) > killed {
        context.remark(Reason::Memory.sentence());
    }
    Ok(Answer::Program(u8::try_from(exit.shell_code()).unwrap_or(u8::MAX)))
}

pub(crate) fn stop(context: &Context, args: &args::Stop) -> anyhow::Result<Answer> {
    let signal = args.signal.as_deref().map(signal_number).transpose()?;
    let store = context.open(OpenOptions::read())?;
    let found: Vec<_> =
        args.containers.iter().map(|name| find(&store, name)).collect::<Result<_, _>>()?;
    let wish = StopWish { signal, timeout: args.time };
    stop::stop(&store, found, wish, &|| now().0, &|text| context.remark(text))?;
    Ok(Answer::Yes)
}

pub(crate) fn wait(context: &Context, args: &args::Wait) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::read())?;
    for name in &args.containers {
        let found = find(&store, name)?;
        // It may be one that is removed as soon as it has ended.
        let kept = Code::open(&found.folder)
            .with_context(|| format!("cannot read how container {} ends", found.id))?;
        detached::wait(None, &|| found.is_alive(&store))?;
        let state = found.state_now()?;
        let lost = state.as_ref().is_some_and(|it| it.lost);
        let reason = state.as_ref().and_then(|it| it.reason);
        let code = state.and_then(|it| it.code);
        let code = code.or_else(|| kept?.read());
        let code = code.with_context(|| {
            format!(
                "it is unknown how container {} ended: it was removed, or its monitor was killed",
                found.id
            )
        })?;
        if context.json {
            let container = found.id.clone();
            report::json_line(&WaitReport { container, code, lost, reason })?;
        } else {
            report::line(&code.to_string())?;
        }
        let lost = lost.then_some(container::life::ended::LOST);
        for remark in lost.into_iter().chain(reason.map(Reason::sentence)) {
            report::error_line(&format!("quire: {}: {remark}", found.id));
        }
    }
    Ok(Answer::Yes)
}
