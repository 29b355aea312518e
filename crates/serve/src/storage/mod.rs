//! Offers images as volumes of systemd's `io.systemd.StorageProvider` (decision 27): `storagectl` lists them, and
//! `mount -t storage` mounts them.

mod wire;

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use fast_glob::{glob_match, validate};
use kernel::mount::Detached;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use serde::Serialize;
use store::Who;
use zlink::tokio::unix::Stream;
use zlink::varlink_service::Error;
use zlink::{Connection, Reply};

use crate::any_error::AnyError;
use crate::varlink::{
    Bounded, DescriptionReply, InfoReply, MethodCall, SERVICE_DESCRIPTION, WrongCall,
};
use wire::{
    AcquireAsk, AcquireReply, DESCRIPTION, INTERFACE, ListAsk, StorageAsk, StorageError,
    SystemError, VolumeReply, VolumeType, ask_of,
};

/// Socket at which systemd's tools look for this provider. Source: storagectl(1).
pub const STORAGE_SOCKET: &str = "/run/systemd/io.systemd.StorageProvider/quire";

/// How long a volume's mount is kept after its client disconnects. The client may still clone the mount in this time.
const HELD: Duration = Duration::from_secs(30);

/// How long an unauthorized client may take to send its first call.
const REFUSED: Duration = Duration::from_secs(1);

/// An entry of the list of volumes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    pub name: String,
    /// Other names of the volume.
    pub aliases: Vec<String>,
    /// Size of the volume's files in bytes, if known.
    pub used: Option<u64>,
}

/// Why a volume was not mounted.
#[derive(Debug)]
pub enum VolumeError {
    /// An image with this name does not exist.
    Absent,
    /// A policy forbids the image.
    Refused(AnyError),
    /// Mounting failed.
    Failed(AnyError),
}

/// A provider of volumes.
pub trait Volumes {
    /// Returns the volumes for which `wanted` returns true. It gets all names of a volume.
    ///
    /// # Errors
    /// If the store cannot be read.
    fn list(&self, wanted: &dyn Fn(&[&str]) -> bool) -> Result<Vec<Volume>, AnyError>;

    /// Mounts a volume detached and read-only, in a way that allows id-mapped mounts.
    fn acquire(&self, name: &str) -> Result<Detached, VolumeError>;
}

/// Listens at a socket to which only root may connect.
///
/// # Errors
/// If the socket cannot be created, or other users could replace it.
pub fn listen_for_storage(path: &Path, who: Who) -> io::Result<UnixListener> {
    crate::socket::listen(path, who, 0o600)
}

/// Serves a client until it disconnects, and keeps the mounts of its volumes for another 30 seconds. `version` is the
/// version of the program. Starts no thread.
///
/// # Errors
/// If the connection fails. Errors of volumes are sent to the client.
pub fn serve_volumes(client: OwnedFd, volumes: &dyn Volumes, version: &str) -> io::Result<()> {
    let peer = rustix::net::sockopt::socket_peercred(&client)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut held = Vec::new();
    let spoken = runtime.block_on(async {
        let stream = std::os::unix::net::UnixStream::from(client);
        let stream = Stream::try_from(stream).map_err(io::Error::other)?;
        let mut connection = Connection::new(Bounded(stream));
        if peer.uid.as_raw() != 0 {
            tracing::warn!(user = peer.uid.as_raw(), "only root may use volumes");
            let call = tokio::time::timeout(REFUSED, connection.receive_call::<MethodCall>());
            let Ok(Ok(_)) = call.await else { return Ok(()) };
            return told(connection.send_error(&Error::PermissionDenied, Vec::new()).await);
        }
        loop {
            // An error here is usually the end of the connection.
            let Ok((call, _)) = connection.receive_call::<MethodCall>().await else {
                return Ok(());
            };
            let has_more = call.more();
            let mut speech = Speech { connection: &mut connection, volumes, version };
            speech.answer(call.method(), has_more, &mut held).await?;
        }
    });
    if !held.is_empty() {
        std::thread::sleep(HELD);
    }
    spoken
}

fn told(sent: zlink::Result<()>) -> io::Result<()> {
    sent.map_err(io::Error::other)
}

/// The state that handlers of one call need.
struct Speech<'a> {
    connection: &'a mut Connection<Bounded>,
    volumes: &'a dyn Volumes,
    version: &'a str,
}

impl Speech<'_> {
    async fn answer(
        &mut self,
        call: &MethodCall,
        has_more: bool,
        held: &mut Vec<Detached>,
    ) -> io::Result<()> {
        match ask_of(call) {
            Err(wrong) => self.error(&WrongCall::error(wrong)).await,
            Ok(StorageAsk::Info) => {
                self.reply(InfoReply::new("quire serve --storage", self.version, INTERFACE)).await
            }
            Ok(StorageAsk::Description { interface }) => {
                let is_own = interface == INTERFACE;
                let description = if is_own { DESCRIPTION } else { SERVICE_DESCRIPTION };
                self.reply(DescriptionReply { description }).await
            }
            Ok(StorageAsk::Acquire(ask)) => self.acquire(&ask, held).await,
            Ok(StorageAsk::ListVolumes(_) | StorageAsk::ListTemplates(_)) if !has_more => {
                self.error(&Error::ExpectedMore).await
            }
            Ok(StorageAsk::ListVolumes(ask)) => self.list(&ask).await,
            // The interface has no empty list: it expects this error.
            Ok(StorageAsk::ListTemplates(_)) => self.error(&StorageError::NoSuchTemplate).await,
        }
    }

    async fn acquire(&mut self, ask: &AcquireAsk, held: &mut Vec<Detached>) -> io::Result<()> {
        if let Err(error) = ask.check() {
            return self.error(&error).await;
        }
        let name = &*ask.name;
        match self.volumes.acquire(name) {
            Ok(mount) => match root_of(&mount) {
                Ok(root) => {
                    held.push(mount);
                    let reply = AcquireReply {
                        file_descriptor_index: 0,
                        kind: VolumeType::Dir,
                        read_only: true,
                        base_uid: 0,
                        base_gid: 0,
                    };
                    let reply = Reply::new(Some(reply));
                    told(self.connection.send_reply(&reply, vec![root]).await)
                }
                Err(errno) => self.failed(name, &errno).await,
            },
            Err(VolumeError::Absent) => self.error(&StorageError::NoSuchVolume).await,
            Err(VolumeError::Refused(error)) => {
                tracing::warn!(error = &*error, "refused volume {name}");
                self.error(&Error::PermissionDenied).await
            }
            Err(VolumeError::Failed(error)) => self.failed(name, &*error).await,
        }
    }

    async fn list(&mut self, ask: &ListAsk) -> io::Result<()> {
        let pattern = ask.match_name.as_deref().map(matcher);
        let wanted = |names: &[&str]| {
            pattern.as_ref().is_none_or(|fits| names.iter().any(|name| fits(name)))
        };
        let mut volumes = match self.volumes.list(&wanted) {
            Ok(volumes) => volumes.into_iter().peekable(),
            Err(error) => return self.failed("list", &*error).await,
        };
        if volumes.peek().is_none() {
            // The interface has no empty list: it expects this error.
            return self.error(&StorageError::NoSuchVolume).await;
        }
        while let Some(Volume { name, aliases, used }) = volumes.next() {
            let kind = VolumeType::Dir;
            let volume = VolumeReply { name, aliases, kind, read_only: true, used_bytes: used };
            let reply = Reply::new(Some(volume)).set_continues(Some(volumes.peek().is_some()));
            told(self.connection.send_reply(&reply, Vec::new()).await)?;
        }
        Ok(())
    }

    /// Logs an error and sends a plain I/O error, because the interface has no error messages.
    async fn failed(
        &mut self,
        name: &str,
        error: &(dyn std::error::Error + 'static),
    ) -> io::Result<()> {
        tracing::error!(error, "cannot provide volume {name}");
        let errno = Errno::IO.raw_os_error();
        self.error(&SystemError::System { origin: "linux".to_owned(), errno }).await
    }

    async fn reply(&mut self, reply: impl Serialize + std::fmt::Debug) -> io::Result<()> {
        told(self.connection.send_reply(&Reply::new(Some(reply)), Vec::new()).await)
    }

    async fn error(&mut self, error: &(impl Serialize + std::fmt::Debug)) -> io::Result<()> {
        told(self.connection.send_error(error, Vec::new()).await)
    }
}

/// Returns the pattern of `fast_glob` for one of fnmatch(3), which has no braces, and in which `!` negates only in
/// brackets, and a backslash quotes also letters.
fn escaped(pattern: &str) -> String {
    let (mut text, mut chars) = (String::new(), pattern.chars());
    // Number of characters in the open brackets.
    let mut in_class: Option<u32> = None;
    while let Some(char) = chars.next() {
        let is_first = text.is_empty();
        match (char, in_class) {
            ('\\', _) => match chars.next() {
                Some(next) if next.is_ascii_alphabetic() => text.push(next),
                next => text.extend(std::iter::once('\\').chain(next)),
            },
            ('{' | '}', None) => text.extend(['\\', char]),
            ('!', None) if is_first => text.push_str("\\!"),
            _ => text.push(char),
        }
        in_class = match (char, in_class) {
            ('[', None) => Some(0),
            (']', Some(1..)) => None,
            // A bracket after these is a member of the class.
            ('!' | '^', Some(0)) => Some(0),
            (_, Some(count)) => Some(count.saturating_add(1)),
            (_, None) => None,
        };
    }
    text
}

/// Returns a function that matches names against a pattern of fnmatch(3), whose `*` matches slashes as well. An invalid
/// pattern matches only itself.
fn matcher(pattern: &str) -> impl Fn(&str) -> bool {
    // No name contains this character.
    let without_slashes = |text: &str| text.replace('/', "\0");
    let escaped = escaped(&without_slashes(pattern));
    let is_valid = validate(&escaped).is_ok();
    let pattern = pattern.to_owned();
    move |name| match is_valid {
        true => glob_match(&escaped, without_slashes(name)),
        false => name == pattern,
    }
}

/// Opens the root of a mount for reading, because clients refuse `O_PATH` descriptors.
fn root_of(mount: &Detached) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(mount.as_fd(), ".", flags, Mode::empty())
}

/// Largest number of clients at a time. Clients that got volumes count for another 30 seconds after they disconnect.
const CLIENTS_MAX: usize = 1024;

/// Starts a process for each client, with the connection as its standard input, and waits for it in a thread.
/// `speaker` returns the command. A separate process is needed because a FUSE server must be started by a process
/// with one thread.
pub fn accept_clients(listener: &UnixListener, speaker: &dyn Fn() -> Command) {
    let clients = Arc::new(AtomicUsize::new(0));
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        if clients.fetch_add(1, Ordering::Relaxed) >= CLIENTS_MAX {
            clients.fetch_sub(1, Ordering::Relaxed);
            tracing::warn!("refusing a client, because {CLIENTS_MAX} are connected");
            continue;
        }
        let mut speaker = speaker();
        speaker.stdin(OwnedFd::from(stream)).stdout(Stdio::null());
        let of_thread = Arc::clone(&clients);
        let waits = std::thread::Builder::new().spawn(move || {
            if let Err(error) = speaker.status() {
                tracing::error!(%error, "a process for a client failed");
            }
            of_thread.fetch_sub(1, Ordering::Relaxed);
        });
        if let Err(error) = waits {
            tracing::error!(%error, "cannot serve a client");
            clients.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::matcher;

    #[test]
    fn patterns_are_those_of_fnmatch() {
        for (pattern, name, fits) in [
            ("debian*", "debian:12", true),
            ("*/debian:?*", "docker.io/library/debian:12", true),
            ("debian", "debian:12", false),
            ("[de]ebian:12", "debian:12", true),
            ("{debian,alpine}:12", "debian:12", false),
            ("{a}", "{a}", true),
            ("[a", "[a", true),
            ("[a", "a", false),
            ("[!d]ebian", "webian", true),
            ("!a", "b", false),
            ("!a", "!a", true),
            ("a**b", "a/x/b", true),
            ("a[/]b", "a/b", true),
            ("", "a", false),
            ("\\nginx", "nginx", true),
            ("[{]a[}]", "{a}", true),
            ("\\{a\\}", "{a}", true),
            ("[]a]", "]", true),
            ("[!]a]", "b", true),
        ] {
            assert_eq!(matcher(pattern)(name), fits, "{pattern} {name}");
        }
    }
}
