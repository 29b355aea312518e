//! `serve --mounts`.

use std::ffi::OsString;
use std::fs::{DirBuilder, File};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, bail, ensure};
use kernel::process::UNUSED_IDS;
use serve::SocketFile;
use serve::mounts::{
    MOUNTS_SOCKET, MountSurroundings, listen_for_mounts, serve_mounts, speak_with_client,
    write_for_user,
};

use crate::Answer;
use crate::args;
use crate::context::Context;
use crate::notify::{self, ServiceStep};
use crate::report;
use crate::settings::{COPIES, ServeFile};

/// What is logged unless options say otherwise: a line for each request.
pub(crate) const LOGGED: &str = "warn,quire_serve::mounts=info";

/// The name by which this program is the process that copies images.
const WRITER: &str = "quire-image-writer";
/// And the process that speaks with a client.
const SPEAKER: &str = "quire-mount-client";
/// What they are told. Other users see the words of a process, but not its variables.
const TOLD: &str = "QUIRE_TOLD";
/// Source: `linux/magic.h`, TMPFS_MAGIC.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Copies an image for the service, or speaks with a client, if that is what this process was started for.
pub(crate) fn write(arguments: impl IntoIterator<Item = OsString>) -> Option<ExitCode> {
    let own = arguments.into_iter().next()?;
    let work = match own.to_str()? {
        WRITER => write_for_user,
        SPEAKER => speak_with_client,
        _ => return None,
    };
    let told = std::env::var(TOLD).unwrap_or_default();
    Some(ExitCode::from(work(&told)))
}

/// This program under another name.
fn again(name: &str, told: String) -> Command {
    let mut program = Command::new("/proc/self/exe");
    program.arg0(name).env_clear().env(TOLD, told);
    program
}

pub(crate) fn serve(context: &Context, args: &args::Serve) -> anyhow::Result<Answer> {
    if !context.who().is_host_root() {
        bail!("serve --mounts: only the host's root may mount images for others");
    }
    let settings = ServeFile::new(args.config.as_deref());
    let set = settings.load()?.mounts;
    // What is wrong is told now, not at the first container.
    let lookup = |path: &str| std::fs::read_to_string(path);
    set.policy(lookup)?;
    let socket = args.socket.clone().or(set.socket.clone());
    let socket = socket.unwrap_or_else(|| MOUNTS_SOCKET.into());
    let copies = copies(set.copies.as_deref().unwrap_or(Path::new(COPIES)))?;
    let (listener, own) = match given_socket()? {
        Some(listener) => (listener, None),
        None => {
            let listener = listen_for_mounts(&socket, context.who())?;
            (listener, Some(SocketFile::at(&socket)))
        }
    };
    let surroundings = MountSurroundings {
        policy: Box::new(move || {
            let policy = settings.load().and_then(|it| it.mounts.policy(lookup));
            policy.map_err(|error| format!("{error:#}"))
        }),
        ids: Box::new(crate::rootless::given_ids),
        writer: Box::new(|told| again(WRITER, told)),
        speaker: Box::new(|told| again(SPEAKER, told)),
        id: unused_id()?,
        copies,
        version: env!("CARGO_PKG_VERSION"),
    };
    let ready = || {
        if !context.is_quiet() && own.is_some() {
            // Whoever started it may have gone on.
            let _told = report::line(&format!("images are lent at {}", socket.display()));
        }
        notify::tell(ServiceStep::Ready);
    };
    let served =
        notify::serve_until_asked(|stop| serve_mounts(surroundings, listener, stop, ready))?;
    if let Some(own) = own {
        own.remove();
    }
    served?;
    Ok(Answer::Yes)
}

/// The socket that a service manager listens at for this service. Source: sd_listen_fds(3).
fn given_socket() -> anyhow::Result<Option<UnixListener>> {
    let count = sd_notify::listen_fds().map_or(0, |it| it.len());
    let mut given = kernel::process::given_descriptors(count)?;
    match (given.pop(), count) {
        (None, _) => Ok(None),
        (Some(socket), 1) => Ok(Some(socket.into())),
        _ => bail!("{count} sockets were given, and there is a use for one: ListenStream= once"),
    }
}

/// A user and group that nothing on this host has: no process of theirs can end those of the service.
fn unused_id() -> anyhow::Result<u32> {
    // The first one is that of root's pasta.
    let mut ids = UNUSED_IDS.skip(1).take(256);
    let given: Vec<_> = ["/etc/subuid", "/etc/subgid"]
        .iter()
        .filter_map(|it| std::fs::read_to_string(it).ok())
        .flat_map(|text| given_ranges(&text))
        .collect();
    let is_unused = |id: &u32| {
        let is_given = given.iter().any(|it| it.contains(&u64::from(*id)));
        let has_name = |database| crate::helpers::getent(database, &id.to_string()).is_some();
        !is_given && !has_name("passwd") && !has_name("group")
    };
    ids.find(is_unused).context(
        "serve --mounts: there is no user for processes without rights: users, or ranges in /etc/subuid, have all numbers from \
         2147418113 to 2147418368",
    )
}

/// The ranges in a file of subordinate ids. Source: subuid(5).
fn given_ranges(text: &str) -> Vec<Range<u64>> {
    let range = |line: &str| {
        let mut fields = line.split(':').skip(1).map(|it| it.trim().parse::<u64>().ok());
        let (first, count) = (fields.next()??, fields.next()??);
        Some(first..first.saturating_add(count))
    };
    text.lines().filter_map(range).collect()
}

/// The directory for copies: root's alone, and on a disk.
fn copies(path: &Path) -> anyhow::Result<OwnedFd> {
    let shown = path.display();
    let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.with_context(|| format!("cannot make {shown} for copies of images"))?;
    let directory = File::open(path).with_context(|| format!("cannot open {shown}"))?;
    let found = directory.metadata().with_context(|| format!("cannot look at {shown}"))?;
    ensure!(
        found.uid() == 0 && found.mode() & 0o022 == 0,
        "{shown} is for copies of images, and others can write to it: `chown root {shown}; chmod 0700 {shown}`, or set \
         `copies` below [mounts] to another directory"
    );
    let system =
        rustix::fs::fstatfs(&directory).with_context(|| format!("cannot look at {shown}"))?;
    ensure!(
        system.f_type != TMPFS_MAGIC,
        "{shown} is on a tmpfs, from whose files the kernel mounts no image: set `copies` below [mounts] to a directory on a \
         disk"
    );
    Ok(directory.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_users_are_no_ids_of_the_service() {
        let text = "me:100000:65536\nodd\n1000:2147418113:10\nx:y:1\n";
        assert_eq!(given_ranges(text), [100_000..165_536, 2_147_418_113..2_147_418_123]);
    }
}
