//! A cgroup of this command's own, from the user's service manager.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use container::life::cgroups::{self, Delegated, NotDelegated};

use crate::args;
use crate::helpers;

/// Asks for it on D-Bus. Part of systemd.
const PROGRAM: &str = "busctl";

/// How long the service manager may take. It moves a process in some milliseconds.
const MOST: Duration = Duration::from_secs(5);
const GLANCE: Duration = Duration::from_millis(1);

const NO_SCOPE: &str = "cannot ask systemd for a cgroup";

/// Before a container is run: moves this process to where its limits can be set, if it has some.
pub(crate) fn for_limits(wanted: &args::Wanted, user: u32) -> anyhow::Result<()> {
    let has_limits = wanted.memory.is_some()
        || wanted.cpu.cpus.is_some()
        || wanted.cpu.cpu_shares.is_some()
        || wanted.cpu.cpuset_cpus.is_some()
        || wanted.security.pids_limit.is_some_and(|it| it > 0);
    match Delegated::own() {
        Err(NotDelegated::Others) if has_limits => enter(user).context(NO_SCOPE),
        // Whatever it is, the container tells.
        _ => Ok(()),
    }
}

/// Before a program is added to a container with this folder: moves this process to where that can be done.
pub(crate) fn to_join(container: &Path, user: u32) -> anyhow::Result<()> {
    let cgroup = cgroups::of_user(container);
    match cgroup.map(|it| cgroups::may_join(&it)) {
        Some(Err(NotDelegated::Apart)) => enter(user).context(NO_SCOPE),
        _ => Ok(()),
    }
}

/// Whether containers of this user can be limited, and how, in a line for people.
pub(crate) fn describe(user: u32) -> String {
    let why = match Delegated::own() {
        Ok(_) => return "limits of containers work: this cgroup is the user's".to_owned(),
        Err(why @ NotDelegated::Others) => match Manager::find(user) {
            Ok(_) => return "limits of containers work by the user's systemd".to_owned(),
            Err(error) => format!("{why} ({error})"),
        },
        Err(why) => why.to_string(),
    };
    format!("limits of containers do not work: {why}")
}

/// How to ask a user's service manager.
struct Manager {
    program: PathBuf,
    runtime: PathBuf,
}

impl Manager {
    fn find(user: u32) -> anyhow::Result<Self> {
        let Some(program) = helpers::find(PROGRAM) else { bail!("{PROGRAM} is not installed") };
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|it| !it.is_empty());
        let runtime = runtime.map_or_else(|| format!("/run/user/{user}").into(), PathBuf::from);
        let bus = runtime.join("bus");
        if !bus.exists() {
            bail!("this user has no session bus at {}", bus.display());
        }
        Ok(Self { program, runtime })
    }
}

/// Moves this process into a new scope with `Delegate=yes`. Nothing of it changes but its cgroup.
fn enter(user: u32) -> anyhow::Result<()> {
    let Manager { program, runtime } = Manager::find(user)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let process = std::process::id();
    let name = format!("quire-{process}-{}.scope", now.as_nanos());
    let mut command = Command::new(program);
    command.env("XDG_RUNTIME_DIR", &runtime).args(["--user", "--quiet", "call"]);
    // Source: systemd, org.freedesktop.systemd1(5), "StartTransientUnit"; systemd.scope(5).
    command.args(["org.freedesktop.systemd1", "/org/freedesktop/systemd1"]);
    command.args(["org.freedesktop.systemd1.Manager", "StartTransientUnit", "ssa(sv)a(sa(sv))"]);
    command.args([&*name, "fail", "4", "Description", "s", "A container of Quire"]);
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
    while !cgroups::is_in(&name) {
        if since.elapsed() > MOST {
            bail!("the user's service manager has not moved this process into {name}");
        }
        std::thread::sleep(GLANCE);
    }
    Ok(())
}
