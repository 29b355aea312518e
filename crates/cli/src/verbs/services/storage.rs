//! `serve --storage`: starts the storage provider for systemd.

use std::collections::BTreeMap;
use std::os::fd::AsFd as _;
use std::process::Command;

use anyhow::{Context as _, bail, ensure};
use container::bundle::Access;
use container::root::{
    BetweenOwners, SOURCE, Shape, Space, Trust, TrustedImage, Via, Writable, WritableChoice, make,
};
use kernel::mount::{Attributes, DETACHED_SOURCES, Detached};
use kernel::version::KernelVersion;
use serve::SocketFile;
use serve::fuse::FuseServer;
use serve::storage::{
    STORAGE_SOCKET, Volume, VolumeError, Volumes, accept_clients, listen_for_storage, serve_volumes,
};
use store::{Form, Permitted};
use transfer::evidence::UseError;

use crate::Answer;
use crate::output::report;
use crate::session::context::{Context, is_absent_store};
use crate::verbs::images::images::{all_names, content_of};
use crate::verbs::services::notify::{self, ServiceStep};

pub(crate) fn serve(
    context: &Context,
    args: &crate::verbs::services::serve::args::Serve,
) -> anyhow::Result<Answer> {
    if !context.who().is_host_root() {
        bail!("serve --storage: only the host's root may mount images for others");
    }
    if let Some(running) = KernelVersion::running().filter(|it| *it < DETACHED_SOURCES) {
        bail!(
            "serve --storage needs Linux {DETACHED_SOURCES} or newer, but this is {running}: use \
            `quire mount`"
        );
    }
    if args.inetd {
        let client = std::io::stdin().as_fd().try_clone_to_owned()?;
        ensure!(
            rustix::net::sockopt::socket_type(&client).is_ok(),
            "--inetd: standard input is not a socket: leave it out, and systemd's tools find the \
            service at its --socket"
        );
        serve_volumes(client, &Images(context), env!("CARGO_PKG_VERSION"))
            .context("cannot serve a client")?;
        return Ok(Answer::Yes);
    }
    let socket = args.socket.clone().unwrap_or_else(|| STORAGE_SOCKET.into());
    let listener = listen_for_storage(&socket, context.who())
        .with_context(|| format!("cannot listen on {}", socket.display()))?;
    let own = SocketFile::at(&socket);
    let speaker = || {
        let mut speaker = Command::new("/proc/self/exe");
        speaker.args(std::env::args_os().skip(1)).arg("--inetd");
        speaker
    };
    notify::serve_until_asked(|stop| -> anyhow::Result<()> {
        let accept = move || accept_clients(&listener, &speaker);
        std::thread::Builder::new().spawn(accept).context("cannot start a thread")?;
        if !context.is_quiet() {
            // A failed write is ignored, because the process that started the service may have closed the pipe.
            let _told = report::line(&format!("serving images as volumes at {}", socket.display()));
        }
        notify::tell(ServiceStep::Ready);
        stop();
        Ok(())
    })??;
    own.remove();
    Ok(Answer::Yes)
}

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// The images of a store, as volumes.
struct Images<'a>(&'a Context);

impl Volumes for Images<'_> {
    fn list(&self, wanted: &dyn Fn(&[&str]) -> bool) -> Result<Vec<Volume>, AnyError> {
        let (names, damaged) = all_names(self.0)?;
        for bad in damaged {
            tracing::warn!(name = %bad.name, error = %bad.error, "cannot read a name");
        }
        let (mut sizes, mut volumes) = (BTreeMap::new(), Vec::new());
        for (name, (reference, store)) in names {
            let alias = reference.image.to_string();
            let name = if name.is_unnamed() { alias.clone() } else { name.to_string() };
            if !wanted(&[&name, &alias]) {
                continue;
            }
            // `fsck` reports why a size is unknown.
            let find = || content_of(&store, &reference.image).ok();
            let used = *sizes.entry(reference.image).or_insert_with(find);
            volumes.push(Volume { name, aliases: vec![alias], used });
        }
        Ok(volumes)
    }

    fn acquire(&self, name: &str) -> Result<Detached, VolumeError> {
        let store = match self.0.open_with(name) {
            Err(error) if is_absent_store(&error) => return Err(VolumeError::Absent),
            store => store.map_err(failed)?,
        };
        let found = crate::session::resolve::resolve(&store, name).map_err(|error| {
            if error.is_of_none() { VolumeError::Absent } else { failed(error.into()) }
        })?;
        let permitted = crate::session::policy::permit(self.0, &store, found).map_err(|error| {
            match error.downcast_ref() {
                Some(UseError::Refused(_)) => VolumeError::Refused(error.into()),
                _ => failed(error),
            }
        })?;
        self.mount(&store, permitted).map_err(failed)
    }
}

fn failed(error: anyhow::Error) -> VolumeError {
    VolumeError::Failed(error.into())
}

impl Images<'_> {
    /// Makes a mount whose ids a client can map. The kernel can map ids of EROFS and FUSE, but not of an overlay.
    fn mount(&self, store: &store::Store, permitted: Permitted) -> anyhow::Result<Detached> {
        let permitted = permitted.open(store)?;
        let form = permitted.image().form;
        let image = TrustedImage::to_mount(
            store,
            permitted,
            Trust::default(),
            Some(&WritableChoice::None),
        )?;
        let mount = match form {
            Form::Packed | Form::Tar => {
                let shape = Shape {
                    writable: Writable::None,
                    map: None,
                    space: Space::AsIs,
                    places: &[],
                    claimed: &[],
                    between: &[],
                    between_owners: BetweenOwners::Image,
                    via: Via::Auto { lender: None, names: None, server: None },
                    source: None,
                };
                make(store, &image, &shape, std::iter::empty())?.mount
            }
            Form::Objects => {
                let source = format!("{SOURCE}{}", image.name());
                let server = FuseServer::new(self.0.who());
                server.mount(&image, &source).map_err(anyhow::Error::from_boxed)?
            }
        };
        // Every user of the host can reach the mount.
        let set = crate::verbs::mounts::mount::flags(&[], Access::ReadOnly)?;
        mount.set(&Attributes { set, ..Attributes::default() })?;
        Ok(mount)
    }
}
