//! A cgroup of this command's own, from the user's service manager.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use container::life::cgroups;
use container::life::delegation::{self, Delegated, NotDelegated};

use crate::session::system_programs;

/// Asks for it on D-Bus. Part of systemd.
const PROGRAM: &str = "busctl";

/// How long the service manager may take to answer, in seconds. It moves a process in some milliseconds.
const ANSWER: &str = "--timeout=5";
/// How long it may take to move a process after that.
const MOVE: Duration = Duration::from_secs(5);
const GLANCE: Duration = Duration::from_millis(1);

const NO_SCOPE: &str = "cannot ask systemd for a cgroup";

/// Where logind notes whose services go on without a login. Source: systemd, `src/login/logind-dbus.c`.
const LINGER: &str = "/var/lib/systemd/linger";

/// Before a container is run: moves this process to where its limits can be set, if it has some. Returns what its user has to
/// know.
pub(crate) fn for_limits(
    has_limits: bool,
    is_detached: bool,
    (user, name): (u32, Option<&str>),
) -> anyhow::Result<Option<String>> {
    if !has_limits {
        return Ok(None);
    }
    match Delegated::own() {
        Err(NotDelegated::Others) => {
            Manager::find(user).and_then(|it| it.enter()).context(NO_SCOPE)?;
        }
        Err(NotDelegated::Unmarked(own)) => {
            let manager = Manager::find(user).context(NO_SCOPE)?;
            if own.unit().is_some_and(|it| manager.delegates(it)) {
                own.mark().context("cannot mark a cgroup as delegated")?;
                return Ok(None);
            }
            manager.enter().context(NO_SCOPE)?;
        }
        // Whatever it is, the container tells.
        _ => return Ok(None),
    }
    let lingers = name.is_some_and(|it| Path::new(LINGER).join(it).exists());
    let ends = is_detached && !lingers;
    Ok(ends.then(|| {
        "it ends when its user has logged out: `loginctl enable-linger` keeps containers with limits".to_owned()
    }))
}

/// Before a program is added to a container with this folder: moves this process to where that can be done.
pub(crate) fn to_join(container: &Path, user: u32) -> anyhow::Result<()> {
    let Some(cgroup) = cgroups::of_user(container) else { return Ok(()) };
    // Source: systemd, user@.service(5). Others are not below anything that a scope of this user's is below, too.
    let is_of_manager = cgroup.split('/').any(|it| it == format!("user@{user}.service"));
    match delegation::may_join(&cgroup) {
        Err(NotDelegated::Apart) if is_of_manager => {
            Manager::find(user).and_then(|it| it.enter()).context(NO_SCOPE)
        }
        _ => Ok(()),
    }
}

/// Whether containers of this user can be limited, and how, in a line for people.
pub(crate) fn describe(user: u32) -> String {
    let why = match Delegated::own() {
        Ok(own) => match own.controllers() {
            none if none.is_empty() => NotDelegated::Controllers.to_string(),
            some => return format!("limits of containers work here ({})", some.join(", ")),
        },
        Err(why @ (NotDelegated::Others | NotDelegated::Unmarked(_))) => {
            match Manager::find(user) {
                Ok(_) => return "limits of containers work by the user's systemd".to_owned(),
                Err(error) => format!("{why} ({error})"),
            }
        }
        Err(why) => why.to_string(),
    };
    format!("limits of containers do not work: {why}")
}

/// How to ask a user's service manager.
struct Manager {
    program: PathBuf,
    /// As [`PROGRAM`] is part of systemd.
    control: Option<PathBuf>,
    /// Where its socket is, unless the environment names another one.
    runtime: PathBuf,
}

impl Manager {
    fn find(user: u32) -> anyhow::Result<Self> {
        let Some(program) = system_programs::find(PROGRAM) else {
            bail!("{PROGRAM} is not installed")
        };
        let of = |name: &str| std::env::var_os(name).filter(|it| !it.is_empty());
        let runtime = of("XDG_RUNTIME_DIR");
        let runtime = runtime.map_or_else(|| format!("/run/user/{user}").into(), PathBuf::from);
        let bus = runtime.join("bus");
        if of("DBUS_SESSION_BUS_ADDRESS").is_none() && !bus.exists() {
            bail!(
                "this user has no session bus at {} (Debian: package dbus-user-session)",
                bus.display()
            );
        }
        // In a container with the bus of the host, systemd would take this process's number for that of another one.
        let first = std::fs::read_to_string("/proc/1/comm").unwrap_or_default();
        if first.trim_end() != "systemd" {
            bail!("systemd is not the first program here");
        }
        Ok(Self { program, control: system_programs::find("systemctl"), runtime })
    }

    /// Whether it has said of a unit that all below its cgroup is its own.
    fn delegates(&self, unit: &str) -> bool {
        let Some(control) = &self.control else { return false };
        let mut command = Command::new(control);
        command.env("XDG_RUNTIME_DIR", &self.runtime);
        command.args(["--user", "show", "--property=Delegate", "--value", "--", unit]);
        command.stdin(Stdio::null());
        command.output().is_ok_and(|it| it.stdout.trim_ascii() == b"yes")
    }

    /// Moves this process into a new scope with `Delegate=yes`. Nothing of it changes but its cgroup.
    fn enter(&self) -> anyhow::Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let process = std::process::id();
        let name = delegation::scope(&format!("{process}-{}", now.as_nanos()));
        let mut command = Command::new(&self.program);
        command.env("XDG_RUNTIME_DIR", &self.runtime);
        command.args(["--user", "--quiet", ANSWER, "call"]);
        // Source: systemd, org.freedesktop.systemd1(5), "StartTransientUnit"; systemd.scope(5).
        command.args(["org.freedesktop.systemd1", "/org/freedesktop/systemd1"]);
        command.args(["org.freedesktop.systemd1.Manager", "StartTransientUnit"]);
        command.args(["ssa(sv)a(sa(sv))", &name, "fail", "4"]);
        command.args(["Description", "s", "A container of Quire"]);
        command.args(["PIDs", "au", "1", &process.to_string(), "Delegate", "b", "true"]);
        command.args(["CollectMode", "s", "inactive-or-failed", "0"]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let output = command.output().with_context(|| format!("cannot call {PROGRAM}"))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            let said = said.lines().next().unwrap_or("it does not say why");
            bail!("the user's service manager gives no cgroup: {said}");
        }
        let since = Instant::now();
        while !delegation::is_in(&name) {
            if since.elapsed() > MOVE {
                bail!("the user's service manager has not moved this process into {name}");
            }
            std::thread::sleep(GLANCE);
        }
        Ok(())
    }
}
