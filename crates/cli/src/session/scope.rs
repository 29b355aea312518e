//! A systemd scope for this command: a delegated cgroup, which the user's service manager creates.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use container::life::cgroup::cgroups;
use container::life::cgroup::delegation;
use container::life::cgroup::delegation::{Delegated, NotDelegated};

use crate::session::system_programs;

/// Program that sends the request on D-Bus. It is part of systemd.
const PROGRAM: &str = "busctl";

/// Timeout for the reply of the service manager, in seconds. It usually moves a process within milliseconds.
const ANSWER: &str = "--timeout=5";
/// Timeout for moving the process after the reply.
const MOVE: Duration = Duration::from_secs(5);
const GLANCE: Duration = Duration::from_millis(1);

const NO_SCOPE: &str = "cannot ask systemd for a cgroup";

/// Directory in which logind notes users whose services continue after logout. Source: systemd,
/// `src/login/logind-dbus.c`.
const LINGER: &str = "/var/lib/systemd/linger";

/// Before a container with limits is run, moves this process into a cgroup in which its limits can be set. Returns
/// a remark for the user.
pub(crate) fn for_limits(
    has_limits: bool,
    is_detached: bool,
    user: u32,
    name: Option<&str>,
) -> anyhow::Result<Option<String>> {
    if !has_limits {
        return Ok(None);
    }
    match Delegated::own() {
        Err(NotDelegated::Others) => {
            Manager::for_user(user).and_then(|it| it.enter()).context(NO_SCOPE)?;
        }
        Err(NotDelegated::Unmarked(own)) => {
            let manager = Manager::for_user(user).context(NO_SCOPE)?;
            if own.unit().is_some_and(|it| manager.delegates(it)) {
                own.mark().context("cannot mark a cgroup as delegated")?;
                return Ok(None);
            }
            manager.enter().context(NO_SCOPE)?;
        }
        // The container reports other problems.
        _ => return Ok(None),
    }
    let lingers = name.is_some_and(|it| Path::new(LINGER).join(it).exists());
    let ends = is_detached && !lingers;
    Ok(ends.then(|| {
        "it ends when its user logs out: `loginctl enable-linger` keeps containers with limits"
            .to_owned()
    }))
}

/// Before a program is added to the container in this folder, moves this process into a cgroup from which that is
/// possible.
pub(crate) fn to_join(container: &Path, user: u32) -> anyhow::Result<()> {
    let Some(cgroup) = cgroups::of_user(container) else { return Ok(()) };
    // Only a cgroup of this user's service manager has a common ancestor with a scope of this user. Source: systemd,
    // user@.service(5).
    let is_of_manager = cgroup.split('/').any(|it| it == format!("user@{user}.service"));
    match delegation::may_join(&cgroup) {
        Err(NotDelegated::Apart) if is_of_manager => {
            Manager::for_user(user).and_then(|it| it.enter()).context(NO_SCOPE)
        }
        _ => Ok(()),
    }
}

/// Describes in one line for people whether and how containers of this user can be limited.
pub(crate) fn describe(user: u32) -> String {
    let why = match Delegated::own() {
        Ok(own) => match own.controllers() {
            none if none.is_empty() => NotDelegated::Controllers.to_string(),
            some => return format!("limits of containers work ({})", some.join(", ")),
        },
        Err(why @ (NotDelegated::Others | NotDelegated::Unmarked(_))) => {
            match Manager::for_user(user) {
                Ok(_) => return "limits of containers work by the user's systemd".to_owned(),
                Err(error) => format!("{why} ({error})"),
            }
        }
        Err(why) => why.to_string(),
    };
    format!("limits of containers do not work: {why}")
}

/// A user's service manager.
struct Manager {
    program: PathBuf,
    /// Path of `systemctl`, which is part of systemd like [`PROGRAM`].
    control: Option<PathBuf>,
    /// Directory of the manager's socket, unless the environment names another one.
    runtime: PathBuf,
}

impl Manager {
    fn for_user(user: u32) -> anyhow::Result<Self> {
        let Some(program) = system_programs::program_path(PROGRAM) else {
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
        // In a container with the host's bus, systemd would mistake this process's pid for that of another process.
        let first = std::fs::read_to_string("/proc/1/comm").unwrap_or_default();
        if first.trim_end() != "systemd" {
            bail!("systemd does not run as PID 1");
        }
        Ok(Self { program, control: system_programs::program_path("systemctl"), runtime })
    }

    /// Returns whether the unit has `Delegate=yes`, so that it manages everything below its cgroup.
    fn delegates(&self, unit: &str) -> bool {
        let Some(control) = &self.control else { return false };
        let mut command = Command::new(control);
        command.env("XDG_RUNTIME_DIR", &self.runtime);
        command.args(["--user", "show", "--property=Delegate", "--value", "--", unit]);
        command.stdin(Stdio::null());
        command.output().is_ok_and(|it| it.stdout.trim_ascii() == b"yes")
    }

    /// Moves this process into a new scope with `Delegate=yes`. Only the cgroup of the process changes.
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
            let said = said.lines().next().unwrap_or("it gave no reason");
            bail!("the user's service manager refused a cgroup: {said}");
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
