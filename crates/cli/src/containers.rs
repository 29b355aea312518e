//! Containers that are there: `ps`, `exec`, `stop`, `wait`, and what `rm` does about them.

use std::cell::Cell;
use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use container::Terms;
use container::bundle::userns::IdMap;
use container::folder::{self, CONFIG};
use container::life::detached::{self, More};
use container::life::kept;
use container::life::monitor::KILLED;
use container::life::state::{Code, Reason, State};
use kernel::process::{Signal, Signals};
use serde_json::{Value, json};
use store::{ContainerError, ContainerRecord, Liveness, OpenOptions, Store};

use crate::Answer;
use crate::args;
use crate::context::{Context, now};
use crate::report;
use crate::written::written;

/// A container, as it was a moment ago.
pub(crate) struct Found {
    pub(crate) id: String,
    /// None if it is damaged.
    pub(crate) record: Option<ContainerRecord>,
    liveness: Liveness,
    pub(crate) folder: PathBuf,
    /// None before it has started, and of those that are not detached.
    pub(crate) state: Option<State>,
}

impl Found {
    pub(crate) fn is_running(&self) -> bool {
        // Of one that has ended somebody is taking the rest down.
        let is_over = self.state.as_ref().is_some_and(|it| it.finished.is_some());
        self.liveness == Liveness::Alive && !is_over
    }

    /// `running`, `exited`, `lost` (it has ended, and nobody knows how), or `damaged`.
    fn status(&self) -> &'static str {
        if self.record.is_none() {
            return "damaged";
        }
        match (&self.state, self.liveness) {
            (Some(State { finished: Some(_), code: Some(_), .. }), _) => "exited",
            (_, Liveness::Alive) => "running",
            (_, Liveness::Dead) => "lost",
        }
    }

    /// Whether the disk has lost some of what it wrote.
    fn has_lost(&self) -> bool {
        self.state.as_ref().is_some_and(|it| it.lost)
    }

    fn reason(&self) -> Option<Reason> {
        self.state.as_ref().and_then(|it| it.reason)
    }

    fn code(&self) -> Option<i32> {
        self.state.as_ref().and_then(|it| it.code)
    }

    /// What it executes, from its bundle.
    pub(crate) fn command(&self) -> Vec<String> {
        let bytes = std::fs::read(self.folder.join(CONFIG)).unwrap_or_default();
        let config: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        let args = config["process"]["args"].as_array().cloned().unwrap_or_default();
        args.iter().filter_map(|it| it.as_str().map(str::to_owned)).collect()
    }
}

pub(crate) fn all(store: &Store) -> anyhow::Result<Vec<Found>> {
    let sound = store.containers()?.into_iter().map(|(id, record, it)| (id, Some(record), it));
    let damaged = store.damaged_containers()?.into_iter().map(|(id, it, _)| (id, None, it));
    sound.chain(damaged).map(|(id, record, liveness)| found(store, id, record, liveness)).collect()
}

fn found(
    store: &Store,
    id: String,
    record: Option<ContainerRecord>,
    liveness: Liveness,
) -> anyhow::Result<Found> {
    let folder = folder::path(store, &id);
    let state = load_state(&folder, &id)?;
    Ok(Found { id, record, liveness, folder, state })
}

fn load_state(folder: &Path, id: &str) -> anyhow::Result<Option<State>> {
    State::load(folder).with_context(|| format!("cannot read the state of container {id}"))
}

/// One by its name, or by the beginning of an id that only one has; none if there is none.
fn look(store: &Store, name: &str) -> anyhow::Result<Option<Found>> {
    if let Some(it) = store.container(name)? {
        return Ok(Some(found(store, it.id, it.record.ok(), it.liveness)?));
    }
    let mut all = all(store)?;
    // Names are said whole, as with Docker.
    let is_id = |id: &str| id.len() == 12 && id.bytes().all(|it| it.is_ascii_hexdigit());
    all.retain(|it| !name.is_empty() && is_id(&it.id) && it.id.starts_with(name));
    if let [one, other, ..] = &all[..] {
        bail!("\"{name}\" may be container {} or {}: say more of it", one.id, other.id);
    }
    Ok(all.pop())
}

pub(crate) fn find(store: &Store, name: &str) -> anyhow::Result<Found> {
    container::owner::check_containers(store)?;
    look(store, name)?.with_context(|| {
        format!("there is no container \"{name}\": `quire ps --all` lists what there is")
    })
}

pub(crate) fn ps(context: &Context, args: &args::Ps) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::read())?;
    let mut found = all(&store)?;
    found.retain(|it| args.all || it.is_running());
    found.sort_by_key(|it| it.record.as_ref().map(|it| it.created));
    if args.ids || context.quiet {
        return report::lines(found.iter().map(|it| it.id.as_str()));
    }
    if context.json {
        let rows = found.iter().map(|it| {
            let mut row = json!({
                "id": it.id,
                "name": it.id,
                "image": it.record.as_ref().and_then(|it| it.name.clone()),
                "imageId": it.record.as_ref().map(|it| it.image.to_string()),
                "command": it.command(),
                "created": it.record.as_ref().map(|it| report::rfc3339(it.created.0)),
                "status": it.status(),
                "pid": it.state.as_ref().filter(|_| it.is_running()).map(|state| state.pid),
                "started": it.state.as_ref().map(|state| report::rfc3339(state.started)),
                "finished": it.state.as_ref().and_then(|it| it.finished).map(report::rfc3339),
                "code": it.code(),
                "lost": it.has_lost(),
                "reason": it.reason(),
            });
            if args.size {
                row["written"] = written(it).into();
            }
            row
        });
        report::json(&rows.collect::<Vec<_>>())?;
        return Ok(Answer::Yes);
    }
    let rows: Vec<_> = found
        .iter()
        .map(|it| {
            let status = match it.code() {
                Some(code) if it.has_lost() => format!("exited ({code}), writes lost"),
                Some(code) if it.reason().is_some() => {
                    format!("exited ({code}), {}", it.reason().map_or("", Reason::short))
                }
                Some(code) => format!("exited ({code})"),
                None => it.status().to_owned(),
            };
            let unknown = || ("?".to_owned(), "?".to_owned());
            let (image, created) = it.record.as_ref().map_or_else(unknown, |it| {
                let name = it.name.clone().unwrap_or_else(|| crate::du::short(&it.image));
                (name, report::time(it.created.0))
            });
            let mut row = vec![it.id.clone(), image, status, created, it.command().join(" ")];
            if args.size {
                row.push(written(it).map_or_else(|| "?".to_owned(), report::size));
            }
            row
        })
        .collect();
    let mut out = report::standard_output();
    let mut titles = vec!["CONTAINER", "IMAGE", "STATUS", "CREATED", "COMMAND"];
    if args.size {
        titles.push("SIZE");
    }
    report::table(&mut out, &titles, &rows, &[])?;
    out.flush()?;
    Ok(Answer::Yes)
}

pub(crate) fn exec(context: &Context, args: &args::Exec) -> anyhow::Result<Answer> {
    let signals = Signals::block(&crate::run::FORWARDED)?;
    let terminal = crate::wanted::terminal(args.tty.when())?;
    let store = context.open(OpenOptions::read())?;
    let (found, root) = running(&store, &args.container, &signals)?;
    // While `commit` or `diff` look at it nothing new runs in it.
    let goes_on = container::life::pause::pass(&found.folder, &found.id, &|| {
        crate::run::is_asked_to_end(&signals)
    });
    if !goes_on.with_context(|| format!("cannot see whether {} is paused", found.id))? {
        bail!("interrupted while container {} was paused for somebody who looks at it", found.id);
    }
    let map = IdMap::noted(&found.folder);
    let user = args.program.user.as_deref().map(|user| {
        let user = container::bundle::user::find(root.as_fd(), user)?;
        map.map_or(Ok(()), |map| map.check(&user))?;
        anyhow::Ok(user)
    });
    let more = More {
        args: args.command.clone(),
        env: crate::wanted::environment(&args.program.env)?,
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

/// A container that runs, and its root; of one that is being started, when it does.
fn running(store: &Store, name: &str, signals: &Signals) -> anyhow::Result<(Found, File)> {
    let since = std::time::Instant::now();
    loop {
        let found = find(store, name)?;
        if !found.is_running() {
            bail!("container {} does not run: it is {}", found.id, found.status());
        }
        if let Some(root) = detached::root(&found.folder) {
            return Ok((found, root));
        }
        if crate::run::is_asked_to_end(signals) {
            bail!("interrupted while container {} was started", found.id);
        }
        if since.elapsed() >= DEATH {
            bail!("container {} is not started yet", found.id);
        }
        std::thread::sleep(container::pace::GLANCE);
    }
}

/// How often what another process does is looked at.
const GLANCE: Duration = Duration::from_millis(50);

const TERM: u8 = 15;

/// For how many seconds `stop` waits if nobody says another number; as with podman.
const PATIENCE: u32 = 10;

pub(crate) fn stop(context: &Context, args: &args::Stop) -> anyhow::Result<Answer> {
    let asked = args.signal.as_deref().map(signal_number).transpose()?;
    let store = context.open(OpenOptions::read())?;
    let found: Vec<_> =
        args.containers.iter().map(|name| find(&store, name)).collect::<Result<_, _>>()?;
    for it in found.iter().filter(|it| it.liveness == Liveness::Dead) {
        // Its monitor was killed, and it may go on.
        if let Some(folder) = store.lock_container(&it.id)? {
            detached::bury(folder.path(), &it.id, now().0)
                .with_context(|| format!("cannot note the end of container {}", it.id))?;
        }
    }
    // All are asked before any is waited for.
    let running: Vec<_> = found.into_iter().filter(Found::is_running).collect();
    let patience = |it: &Found| {
        let own = it.state.as_ref().and_then(|it| it.stop_timeout);
        Duration::from_secs(args.time.or(own).unwrap_or(PATIENCE).into())
    };
    let since = std::time::Instant::now();
    let terms: Vec<_> = running.iter().map(|it| Terms::of(&it.folder)).collect();
    for (it, terms) in running.iter().zip(&terms) {
        let own = it.state.as_ref().map(|it| it.stop_signal.as_str()).filter(|it| !it.is_empty());
        // What an image says is no reason to let it run.
        let by_image = |own| match signal_number(own) {
            Ok(number) => number,
            Err(error) => {
                context.remark(&format!("{error:#}: {} gets TERM", it.id));
                TERM
            }
        };
        let mut signal = asked.unwrap_or_else(|| own.map_or(TERM, by_image));
        loop {
            let name = if signal == TERM { "TERM".to_owned() } else { signal.to_string() };
            if signal == TERM {
                terms.note(Signal::TERM);
            }
            let Err(message) = detached::signal(&it.folder, &it.id, &name) else { break };
            // It may have ended since.
            if !is_alive(&store, it)? {
                break;
            }
            // Or it has not started yet.
            if load_state(&it.folder, &it.id)?.is_some() || since.elapsed() >= patience(it) {
                if asked.is_some() || signal == TERM {
                    bail!(message);
                }
                context.remark(&format!("{message}: it gets TERM"));
                signal = TERM;
            }
            std::thread::sleep(GLANCE);
        }
    }
    for (it, terms) in running.iter().zip(&terms) {
        let rest = patience(it).saturating_sub(since.elapsed());
        let is_deaf = Cell::new(false);
        let is_waited_for = || -> anyhow::Result<bool> {
            let is_alive = is_alive(&store, it)?;
            if is_alive {
                terms.look(|| is_deaf.set(true));
            }
            Ok(is_alive && !is_deaf.get())
        };
        if !detached::wait(Some(rest), &is_waited_for)? || is_deaf.get() {
            kill(&store, it)?;
        }
    }
    Ok(Answer::Yes)
}

/// The number of a signal that a person or an image names; runtimes know fewer names, and some say nothing of one that they do
/// not know. Source: signal(7); real-time signals are counted as glibc and other engines do, from 34 to 64.
pub(crate) fn signal_number(signal: &str) -> anyhow::Result<u8> {
    const NAMES: [&str; 31] = [
        "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2",
        "PIPE", "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG",
        "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
    ];
    let upper = signal.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let offset = |text: &str, sign: char| match text {
        "" => Some(0),
        _ => text.strip_prefix(sign)?.parse::<u8>().ok().filter(|it| *it <= 30),
    };
    let number = if let Some(at) = NAMES.iter().position(|it| *it == name) {
        u8::try_from(at + 1).ok()
    } else if let Some(rest) = name.strip_prefix("RTMIN") {
        offset(rest, '+').map(|it| 34 + it)
    } else if let Some(rest) = name.strip_prefix("RTMAX") {
        offset(rest, '-').map(|it| 64 - it)
    } else {
        signal.parse().ok().filter(|it| (1..=64).contains(it))
    };
    number.with_context(|| {
        format!(
            "\"{signal}\" is no signal: a name such as TERM or RTMIN+3, or a number from 1 to 64"
        )
    })
}

/// Whether a container still runs. Of one that is kept somebody may be writing what it wrote to the disk after its end.
fn is_alive(store: &Store, found: &Found) -> anyhow::Result<bool> {
    if !store.is_container_alive(&found.id)? {
        return Ok(false);
    }
    if !found.record.as_ref().is_some_and(|it| it.keep) {
        return Ok(true);
    }
    let state = load_state(&found.folder, &found.id)?;
    Ok(!matches!(state, Some(State { finished: Some(_), .. })))
}

/// How long the kernel may take to end what is killed.
const DEATH: Duration = Duration::from_secs(20);

/// What is not paused has ended by then.
const PAUSED: Duration = Duration::from_millis(500);

fn kill(store: &Store, found: &Found) -> anyhow::Result<()> {
    let since = std::time::Instant::now();
    loop {
        // One that has not started yet cannot be told at once.
        let told = detached::signal(&found.folder, &found.id, "KILL");
        if told.is_ok() && !detached::wait(Some(PAUSED), &|| is_alive(store, found))? {
            // Somebody may have paused it to look at it, and it ends when it goes on.
            container::life::pause::resume(&found.folder, &found.id);
        }
        let pause = if told.is_ok() { DEATH } else { GLANCE };
        if detached::wait(Some(pause), &|| is_alive(store, found))? {
            return Ok(());
        }
        if since.elapsed() >= DEATH {
            told.map_err(anyhow::Error::msg)?;
            bail!("container {} does not end, although it was killed", found.id);
        }
    }
}

pub(crate) fn wait(context: &Context, args: &args::Wait) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::read())?;
    for name in &args.containers {
        let found = find(&store, name)?;
        // It may be one that is removed as soon as it has ended.
        let kept = Code::open(&found.folder)
            .with_context(|| format!("cannot read how container {} ends", found.id))?;
        detached::wait(None, &|| is_alive(&store, &found))?;
        let state = load_state(&found.folder, &found.id)?;
        let lost = state.as_ref().is_some_and(|it| it.lost);
        let reason = state.as_ref().and_then(|it| it.reason);
        let code = state.and_then(|it| it.code);
        let code = code.or_else(|| kept?.read());
        let code = code.with_context(|| {
            format!(
                "nobody knows how container {} ended: it was removed, or its monitor killed",
                found.id
            )
        })?;
        if context.json {
            let row = json!({"id": found.id, "code": code, "lost": lost, "reason": reason});
            report::json_line(&row)?;
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

/// Waits until what ended containers leave has been removed, or written to the disk of those that are kept.
pub(crate) fn settle(store: &Store) -> anyhow::Result<()> {
    loop {
        let is_over = |it: &Found| it.liveness == Liveness::Alive && !it.is_running();
        if !all(store)?.iter().any(is_over) && !store.is_clearing()? {
            return Ok(());
        }
        std::thread::sleep(container::pace::GLANCE);
    }
}

/// Whether there is a container of this very name.
pub(crate) fn is_there(store: &Store, name: &str) -> anyhow::Result<bool> {
    Ok(store.container(name)?.is_some())
}

/// Removes a container; not if it is not there, or no longer.
pub(crate) fn remove(store: &Store, name: &str, force: bool) -> anyhow::Result<bool> {
    container::owner::check_containers(store)?;
    let Some(found) = look(store, name)? else { return Ok(false) };
    let name = &found.id;
    if found.is_running() {
        if !force {
            bail!("container {name} runs: `quire stop {name}` first, or --force");
        }
        if let Err(error) = detached::unwant(&found.folder) {
            tracing::debug!(name, %error, "its monitor does not know that it is not wanted");
        }
        kill(store, &found)?;
    }
    // Its monitor may be taking the rest down, and others look at whether it lives.
    let since = std::time::Instant::now();
    let folder = loop {
        match store.lock_container(name) {
            Ok(Some(folder)) => break folder,
            // Somebody else was faster.
            Err(ContainerError::Absent(_)) => return Ok(false),
            Ok(None) if since.elapsed() < DEATH => {
                // Nobody needs what may still be on its way to the disk.
                kept::give_up(&found.folder);
                std::thread::sleep(container::pace::GLANCE);
            }
            Ok(None) => bail!("container {name} is in use"),
            Err(error) => return Err(error.into()),
        }
    };
    detached::bury(folder.path(), name, now().0)
        .with_context(|| format!("cannot note the end of container {name}"))?;
    folder.remove()?;
    Ok(true)
}
