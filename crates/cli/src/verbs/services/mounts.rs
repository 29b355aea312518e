//! `serve --mounts`: starts the mount service for users who are not root.

use std::ffi::OsString;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::bail;
use serve::SocketFile;
use serve::mounts::{
    MOUNTS_SOCKET, MountResources, listen_for_mounts, open_copies, serve_mounts, speak_with_client,
    unused_id, write_for_user,
};

use crate::Answer;
use crate::output::report;
use crate::session::context::Context;
use crate::verbs::services::notify::{self, ServiceStep};
use crate::verbs::services::service_config::{COPIES, ServeFile};

/// Default log filter: one line per request.
pub(crate) const LOGGED: &str = "warn,quire_serve::mounts=info";

/// Name under which this program copies an image.
const WRITER: &str = "quire-image-writer";
/// Name under which this program serves one client.
const SPEAKER: &str = "quire-mount-client";
/// Environment variable that contains the task of a process with one of these names. Other users can see a process's
/// arguments, but not its environment.
const TOLD: &str = "QUIRE_TOLD";

/// Copies an image for the service, or serves a client, if the service has started this process for that purpose.
/// Returns `None` otherwise.
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

/// Returns the command that starts this program under another name.
fn again(name: &str, told: String) -> Command {
    let mut program = Command::new("/proc/self/exe");
    program.arg0(name).env_clear().env(TOLD, told);
    program
}

pub(crate) fn serve(
    context: &Context,
    args: &crate::verbs::services::serve::args::Serve,
) -> anyhow::Result<Answer> {
    if !context.who().is_host_root() {
        bail!("serve --mounts: only the host's root may mount images for others");
    }
    let settings = ServeFile::new(args.config.as_deref());
    let set = settings.load()?.mounts;
    // Errors in the settings are reported now, and not at the first container.
    let lookup = |path: &str| std::fs::read_to_string(path);
    set.policy(lookup)?;
    let socket = args.socket.clone().or(set.socket.clone());
    let socket = socket.unwrap_or_else(|| MOUNTS_SOCKET.into());
    let copies = open_copies(set.copies.as_deref().unwrap_or(Path::new(COPIES)))?;
    let (listener, own) = match given_socket()? {
        Some(listener) => (listener, None),
        None => {
            let listener = listen_for_mounts(&socket, context.who())?;
            (listener, Some(SocketFile::at(&socket)))
        }
    };
    let has_name = |database: &str, id: u32| {
        crate::session::system_programs::getent(database, &id.to_string()).is_some()
    };
    let environment = MountResources {
        policy: Box::new(move || {
            let policy = settings.load().and_then(|it| it.mounts.policy(lookup));
            policy.map_err(|error| format!("{error:#}"))
        }),
        ids: Box::new(crate::session::own_namespace::given_ids),
        writer: Box::new(|told| again(WRITER, told)),
        speaker: Box::new(|told| again(SPEAKER, told)),
        id: unused_id(&has_name)?,
        copies,
        version: env!("CARGO_PKG_VERSION"),
    };
    let ready = || {
        if !context.is_quiet() && own.is_some() {
            // A failed write is ignored, because the process that started the service may have closed the pipe.
            let _told = report::line(&format!("serving mounts at {}", socket.display()));
        }
        notify::tell(ServiceStep::Ready);
    };
    let served =
        notify::serve_until_asked(|stop| serve_mounts(environment, listener, stop, ready))?;
    if let Some(own) = own {
        own.remove();
    }
    served?;
    Ok(Answer::Yes)
}

/// Returns the socket on which a service manager listens for this service. Source: sd_listen_fds(3).
fn given_socket() -> anyhow::Result<Option<UnixListener>> {
    let count = sd_notify::listen_fds().map_or(0, |it| it.len());
    let mut given = kernel::process::given_descriptors(count)?;
    match (given.pop(), count) {
        (None, _) => Ok(None),
        (Some(socket), 1) => Ok(Some(socket.into())),
        _ => bail!(
            "the service manager passed {count} sockets, but the service uses one: use \
            ListenStream= once"
        ),
    }
}
