//! `serve --lazy`: starts the service for lazy devices, and opens images whose devices it fills.

pub(crate) mod devices;
mod prove;
mod tuning;

use std::cell::OnceCell;
use std::ffi::OsString;
use std::fs::File;
use std::num::NonZeroUsize;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context as _, bail};
use container::store_ownership::check_lazy;
use image::digest::Digest;
use image::lazy::hot::READ_AHEAD;
use image::verity::DeviceId;
use kernel::process::{Signal, Signals};
use serve::lazy::{
    Brought, ClientError, ImportResources, LazyResources, LazyService, Left, NO_TRACE, Program,
    Replace, STARTED_IDLE, Starter, StoreBlobs, Supply, folder_of, leave_group, remove_empty_log,
};
use serve::snapshots::with_pull_secrets;
use store::{LendDevices, OpenOptions, Permitted, PermittedImage, Presence, Store};

use crate::output::report;
use crate::session::context::{Context, now};
use crate::session::resources::scratch;
use crate::session::signals::{Heard, give_up_when, until_stopped};
use crate::verbs::images::registry::pull::{lenient_settings, pauses, settings};
use crate::verbs::services::lazy::tuning::Tuning;
use crate::verbs::services::notify::{self, ServiceStep};
use crate::{Answer, args};

pub(crate) fn serve(
    context: &Context,
    args: &crate::verbs::services::serve::args::Serve,
) -> anyhow::Result<Answer> {
    if !context.who().is_host_root() {
        bail!("serve --lazy: only the host's root may wait for reads of files");
    }
    if let Some(folder) = &args.keeper {
        return keep(context, args, folder);
    }
    if args.stop {
        return stop(context);
    }
    let tuning = Tuning::new(args)?;
    // Dozens of threads fetch and inflate, and then wait for days.
    kernel::process::keep_little_heap();
    // The service may be started at boot, before the first pull.
    let is_new = !context.store_directory()?.join("meta").exists();
    let store = context.open(OpenOptions::create())?;
    // The service mounts no image, but as root it must not use files that another user can change.
    check_lazy(&store)?;
    store.prepare_lazy().context("cannot prepare the store for lazy images")?;
    let folder = folder_of(store.path()).context("cannot examine the store's directory")?;
    if args.detached {
        leave_group();
    }
    let stop = Arc::new(AtomicBool::new(false));
    // Readers wait for a restarted service, so it starts even if the file with credentials cannot be read.
    let settings = if args.again { lenient_settings } else { settings };
    let settings = settings(context.who(), &args.registry, &stop, pauses(context))?;
    give_up_when(&store, &stop);
    let settings = with_pull_secrets(settings, &store, args.registry.authfile.is_some());
    let blobs = StoreBlobs::new(&store, settings);
    let (usual_trace, resources) = (|| tuning.prefetch(), resources(&store));
    let environment = LazyResources {
        supply: &Supply::new(&store, blobs, &usual_trace, &resources),
        folder: &folder,
        keeper: &again(context, args, &["--keeper".into(), folder.clone().into()])?,
        complete: &|| tuning.completion(),
        options: &options_for_registries(&args.registry)?,
        patience: tuning.patience(),
        idle: args.idle.map(|it| Duration::from_secs(it.into())),
        stop: &stop,
    };
    let replace = if args.replace { Replace::Yes } else { Replace::No };
    let ready = || {
        if !context.quiet {
            // A failed write is ignored, because the process that started the service may have closed the pipe.
            let new = if is_new { ", a store that it made" } else { "" };
            let store = store.path().display();
            let _told = report::line(&format!("fills the lazy devices of {store}{new}"));
        }
        tuning.ready();
    };
    let hear = |signal| {
        if signal == Signal::HUP {
            tuning.reload();
            return Heard::Done;
        }
        notify::tell(ServiceStep::Stopping);
        Heard::ToEnd
    };
    let work = || serve::lazy::serve(&store, &environment, replace, ready);
    let left = until_stopped(&stop, hear, work)??;
    if left == Left::Nothing && args.detached {
        remove_empty_log(&folder);
    }
    if let Left::InUse(left) = left {
        context.remark(&format!(
            "{left} lazy devices are in use: their readers get I/O errors in ten seconds, unless \
            `quire serve --lazy` runs again"
        ));
    }
    Ok(Answer::Yes)
}

/// Returns the resources for imports of a service.
pub(crate) fn resources(store: &Store) -> ImportResources {
    ImportResources {
        now,
        threads: std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN),
        scratch: scratch(store),
    }
}

fn stop(context: &Context) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::read())?;
    let folder = folder_of(store.path()).context("cannot examine the store's directory")?;
    match LazyService::connect(&folder)? {
        Some(service) => match service.stop() {
            Err(ClientError::Refused(reason)) => bail!(
                "the service keeps running: {reason} (`quire ps --lazy` lists them): stop the \
                lazy containers, and unmount the lazy images"
            ),
            stopped => stopped?,
        },
        None => context.remark("no service fills lazy devices of this store"),
    }
    Ok(Answer::Yes)
}

fn keep(
    context: &Context,
    args: &crate::verbs::services::serve::args::Serve,
    folder: &Path,
) -> anyhow::Result<Answer> {
    // Signals that end the service must not end the keeper, so they stay blocked.
    let _signals = Signals::block(&[Signal::INT, Signal::TERM, Signal::HUP])?;
    let socket = std::io::stdin().as_fd().try_clone_to_owned();
    let socket = socket.context("cannot use standard input")?;
    // The started program exits if another service is running already.
    serve::lazy::keep(socket, folder, &again(context, args, &["--again".into()])?)?;
    Ok(Answer::Yes)
}

/// Returns the command that starts this program as a service of the same store.
fn again(
    context: &Context,
    args: &crate::verbs::services::serve::args::Serve,
    more: &[OsString],
) -> anyhow::Result<Program> {
    let mut arguments = Vec::new();
    if args.complete {
        arguments.push("--complete".into());
    }
    for (option, seconds) in [("--lazy-timeout", args.lazy_timeout), ("--idle", args.idle)] {
        if let Some(seconds) = seconds {
            arguments.extend([option.into(), seconds.to_string().into()]);
        }
    }
    if let Some(path) = &args.config {
        arguments.extend(["--config".into(), absolute("--config", path)?.into()]);
    }
    arguments.extend_from_slice(more);
    program(context, &args.registry, arguments)
}

/// Returns the command that starts this program as a service of the store in use, from another working directory.
fn program(
    context: &Context,
    registry: &args::RegistryOptions,
    more: Vec<OsString>,
) -> anyhow::Result<Program> {
    let path = std::env::current_exe().context("cannot determine the path of this program")?;
    let store = context.store_directory()?;
    let mut arguments: Vec<OsString> = vec!["--store".into(), store.into(), "serve".into()];
    arguments.push("--lazy".into());
    if registry.plain_http {
        arguments.push("--plain-http".into());
    }
    if registry.tls_verify == Some(true) {
        arguments.push("--tls-verify".into());
    }
    for (option, path) in [("--authfile", &registry.authfile), ("--certs-dir", &registry.certs_dir)]
    {
        if let Some(path) = path {
            arguments.extend([option.into(), absolute(option, path)?.into()]);
        }
    }
    arguments.extend(more);
    Ok(Program { path, arguments })
}

/// Returns how a mount that needs the service starts it.
pub(crate) fn starter(
    context: &Context,
    registry: &args::RegistryOptions,
) -> anyhow::Result<Starter> {
    registry.check_several()?;
    let more = ["--detached", "--idle"].map(OsString::from);
    let more = more.into_iter().chain([STARTED_IDLE.to_string().into()]).collect();
    let options = options_for_registries(registry)?;
    let (who, of_remarks) = (context.who(), context.clone());
    let remark = Box::new(move |text: &str| of_remarks.remark(text));
    Ok(Starter { program: program(context, registry, more)?, options, who, remark })
}

/// Returns the options for registries, as on a command line.
fn options_for_registries(registry: &args::RegistryOptions) -> anyhow::Result<Vec<String>> {
    let mut options = Vec::new();
    for (option, path) in [("--authfile", &registry.authfile), ("--certs-dir", &registry.certs_dir)]
    {
        if let Some(path) = path {
            options.push(format!("{option} {}", absolute(option, path)?.display()));
        }
    }
    options.extend(registry.plain_http.then(|| "--plain-http".to_owned()));
    options.extend((registry.tls_verify == Some(true)).then(|| "--tls-verify".to_owned()));
    Ok(options)
}

fn absolute(option: &str, path: &Path) -> anyhow::Result<PathBuf> {
    std::path::absolute(path)
        .with_context(|| format!("{option}: \"{}\" is not a path", path.display()))
}

/// Gets lazy devices from the service, and connects to it at the first one.
struct Lender<'a> {
    context: &'a Context,
    store: &'a Store,
    /// Digest of the image's manifest.
    manifest: Option<Digest>,
    wanted: &'a args::LazyOptions,
    service: OnceCell<LazyService>,
}

impl LendDevices for Lender<'_> {
    fn lend(&self, device: &DeviceId) -> Result<File, Box<dyn std::error::Error + Send + Sync>> {
        let service = match self.service.get() {
            Some(service) => service,
            None => {
                let folder = folder_of(self.store.path())?;
                let registry = &self.wanted.pull.registry;
                check_lazy(self.store)?;
                let found = starter(self.context, registry)?.service(&folder)?;
                self.service.get_or_init(|| found.with_manifest(self.manifest))
            }
        };
        Ok(service.lend(device)?)
    }
}

/// Opens an image; with `--lazy`, the image may lack data.
pub(crate) fn open(
    context: &Context,
    store: &Store,
    image: Permitted,
    wanted: &args::LazyOptions,
) -> anyhow::Result<PermittedImage> {
    let image = prove::proven(context, store, image, &wanted.pull.registry)?;
    if wanted.lazy.is_none() {
        let mut opened = image.open(store)?;
        if wanted.is_recorded.get() {
            opened.set_read_ahead(READ_AHEAD);
        }
        return Ok(opened);
    }
    let manifest = image.found().manifest;
    let lender = Lender { context, store, manifest, wanted, service: OnceCell::new() };
    let mut opened = image.open_lazy(store, &lender)?;
    let service = lender.service.get().filter(|_| opened.image().presence == Presence::Partial);
    let Some(service) = service else { return Ok(opened) };
    if wanted.complete {
        service.complete(&opened.image().id).context("--complete")?;
    }
    let name = wanted.prefetch.as_deref();
    if name != Some(NO_TRACE) {
        match (service.bring(&opened.image().id, name), &wanted.prefetch) {
            // The image has a hot pack of blocks that were read with this read-ahead.
            (Ok(Brought::HotPack), _) => opened.set_read_ahead(READ_AHEAD),
            (Ok(Brought::Trace), _) | (Ok(Brought::Nothing), None) => {}
            (Ok(Brought::Nothing), Some(name)) => {
                bail!("--prefetch: the image has no trace \"{}\"", name.escape_debug())
            }
            // The container starts without prefetching.
            (Err(error), None) => tracing::warn!(%error, "not prefetching"),
            (Err(error), Some(_)) => return Err(error).context("--prefetch"),
        }
    }
    Ok(opened)
}
