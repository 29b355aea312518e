//! Starts the service for lazy devices where a mount needs it and nobody has.

use std::fs::{self, DirBuilder, File};
use std::io::{ErrorKind, Read as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use kernel::mount::Propagation;
use kernel::process::{Setup, spawn};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serve::lazy::LazyService;

use crate::args::RegistryOptions;
use crate::context::Context;

/// A service that was started like this ends when nothing was in use for so many seconds.
const IDLE: u32 = 300;
/// How long it may take until it can be asked.
const BEGIN: Duration = Duration::from_secs(30);
/// One that ended at once found that another one was starting. That one may take so long.
const OTHER: Duration = Duration::from_secs(5);
const TURN: Duration = Duration::from_millis(10);
/// The most bytes of its messages that are shown.
const TOLD: u64 = 2048;

/// The service of a store, which is started if there is none.
pub(super) fn service(
    context: &Context,
    folder: &Path,
    registry: &RegistryOptions,
) -> anyhow::Result<LazyService> {
    if let Some(service) = LazyService::connect(folder)? {
        let mut options = Vec::new();
        for (option, path) in
            [("--authfile", &registry.authfile), ("--certs-dir", &registry.certs_dir)]
        {
            options.extend(path.as_ref().map(|path| format!("{option} {}", path.display())));
        }
        options.extend(registry.plain_http.then(|| "--plain-http".to_owned()));
        if !options.is_empty() {
            let options = options.join(" ");
            context.remark(&format!(
                "the service that runs fetches with its own credentials and settings: `quire serve --lazy --replace {options}` \
                 gives it these"
            ));
        }
        return Ok(service);
    }
    if !context.who().is_host_root() {
        bail!("no service fills the lazy devices of this store: root starts `quire serve --lazy`");
    }
    let log = log_of(folder);
    start(context, folder, registry, &log).with_context(|| {
        format!("no service fills the lazy devices of this store, and none starts (its messages are in {})", log.display())
    })
}

fn start(
    context: &Context,
    folder: &Path,
    registry: &RegistryOptions,
    log: &Path,
) -> anyhow::Result<LazyService> {
    if let Some(parent) = log.parent() {
        // As the service makes it.
        let made = DirBuilder::new().recursive(true).mode(0o700).create(parent);
        made.with_context(|| format!("cannot make {}", parent.display()))?;
    }
    let mut options = File::options();
    options.append(true).create(true).mode(0o600);
    let messages = options.open(log).and_then(|it| it.set_len(0).map(|()| it));
    let messages = messages.with_context(|| format!("cannot write {}", log.display()))?;
    let more = ["--detached", "--idle"].map(Into::into);
    let more = more.into_iter().chain([IDLE.to_string().into()]).collect();
    let program = super::program(context, registry, more)?;
    let mut command = Command::new(&program.path);
    command.args(&program.arguments).current_dir("/").env_remove("NOTIFY_SOCKET");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::from(messages));
    let setup = Setup { own_session: true, own_mounts: own_mounts(), ..Setup::default() };
    let started = spawn(command, &setup)?;
    let mut output = started.stdout.context("its output is a pipe")?;
    let begun = Instant::now();
    let (mut ended, mut is_ready) = (None, false);
    loop {
        let found = LazyService::connect(folder)?;
        // The one that was found may be another one, which was started at the same moment.
        let is_known = is_ready || ended.is_some() || begun.elapsed() > BEGIN;
        if let Some(service) = found.filter(|_| is_known) {
            if is_ready {
                context.remark(&format!(
                    "started `quire serve --lazy`, which ends {} minutes after the last use",
                    IDLE / 60
                ));
            }
            return Ok(service);
        }
        match ended {
            None if begun.elapsed() > BEGIN => {
                bail!("it cannot be asked after {} seconds", BEGIN.as_secs())
            }
            Some(ended) if Instant::now() > ended => bail!("it ended: {}", told(log)),
            Some(_) => thread::sleep(TURN),
            None => {
                let wait = Timespec { tv_sec: 0, tv_nsec: TURN.subsec_nanos().into() };
                let ready = poll(
                    &mut [PollFd::from_borrowed_fd(output.as_fd(), PollFlags::IN)],
                    Some(&wait),
                );
                // It says something when it is ready. At its end there is nothing.
                if ready.is_ok_and(|it| it > 0) {
                    match output.read(&mut [0; 256])? {
                        0 => ended = Some(Instant::now() + OTHER),
                        _ => is_ready = true,
                    }
                }
            }
        }
    }
}

/// The service outlives the command that starts it. In a mount namespace that may end, it would keep that namespace, and so the
/// lazy mounts in it, and it ends when there are none. So it has a copy, from before the mount.
fn own_mounts() -> Option<Propagation> {
    let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/mnt")).ok();
    (namespace("1")? != namespace("self")?).then_some(Propagation::Downstream)
}

/// Where a service that a mount started writes its messages. They stay when it ends.
pub(super) fn log_of(folder: &Path) -> PathBuf {
    folder.with_extension("log")
}

/// Removes the messages of a service that ends, if there are none.
pub(super) fn remove_empty_log(folder: &Path) {
    let log = log_of(folder);
    if fs::metadata(&log).is_ok_and(|it| it.is_file() && it.len() == 0) {
        let _it_is_in_nobodys_way = fs::remove_file(&log);
    }
}

/// The first lines of its messages, in one.
fn told(log: &Path) -> String {
    let mut text = String::new();
    let read = File::open(log).and_then(|it| it.take(TOLD).read_to_string(&mut text));
    match read {
        Ok(0) | Err(_) => "it said nothing".to_owned(),
        Ok(_) => text.lines().map(str::trim).collect::<Vec<_>>().join("; "),
    }
}

/// Leaves the control group of whoever wanted the mount. A service manager that ends that group with all its processes would
/// end keeper and service at once, and readers would see zeros.
pub(super) fn leave_group() {
    let root = Path::new("/sys/fs/cgroup");
    if !root.join("cgroup.controllers").exists() {
        tracing::debug!("there is no control group of version 2");
        return;
    }
    let group = root.join("quire-lazy");
    let made = match fs::create_dir(&group) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => fs::write(group.join("cgroup.procs"), "0"),
    };
    if let Err(error) = made {
        tracing::debug!(%error, "the service stays in the control group of the mount");
    }
}
