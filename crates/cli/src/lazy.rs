//! `serve --lazy`, and images whose devices it fills.

pub(crate) mod devices;
pub(crate) mod engine;
mod prove;
mod start;
mod tuning;

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Cursor, Read};
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use container::owner::check_lazy;
use image::digest::Digest;
use image::verity::{DeviceId, ImageId};
use kernel::process::{Signal, Signals};
use oci::blobs::{BlobSource, FailingReader, Whole};
use oci::reference::Reference;
use oci::registry::{Registry, RegistryError, Settings};
use serve::lazy::{
    ClientError, LayerSource, LazyService, LazyWatch, Left, Program, Replace, Supply, Surroundings,
    folder_of,
};
use store::{Form, LendDevices, OpenOptions, Permitted, PermittedImage, Presence, Store, Trace};
use transfer::StoredImage;
use transfer::import::{self, BUDGET, Completed};
use transfer::lazy::{KeptBlobs, LayerIndex};

use crate::Answer;
use crate::args;
use crate::context::Context;
use crate::lazy::tuning::Tuning;
use crate::notify::{self, ServiceStep};
use crate::pull::{lenient_settings, pauses, settings};
use crate::report;
use crate::settings::NO_TRACE;
use crate::signals::{Heard, until_stopped};

/// How long layers of one repository share its connections and tokens, from the first one on. A later mount sees logins,
/// mirrors and certificates that have changed since.
const SHARED: Duration = Duration::from_secs(60);

/// Where indexes and blobs come from: the store, and the registries that its images came from.
struct StoreSupply<'a> {
    store: &'a Store,
    tuning: &'a Tuning,
    blobs: StoreBlobs<'a>,
    surroundings: &'a crate::surroundings::Surroundings<'a>,
}

/// Blobs that the store keeps, or registries have.
struct StoreBlobs<'a> {
    kept: KeptBlobs<'a>,
    /// Kept blobs with wrong bytes, as far as an index can be believed: the fault may be its own.
    damaged: Mutex<BTreeSet<BlobKey>>,
    settings: Settings,
    /// The registries of each blob, in the order in which they are asked for it.
    registries: Mutex<BTreeMap<BlobKey, Vec<Arc<Registry>>>>,
    /// Those that were made a moment ago, by registry and repository.
    recent: Mutex<BTreeMap<(String, String), RecentRegistry>>,
}

/// A blob, as a layer of this manifest's image: each image has registries of its own.
type BlobKey = (Option<Digest>, Digest);

/// The blobs of one image.
struct ImageBlobs<'b, 'a> {
    all: &'b StoreBlobs<'a>,
    manifest: Option<Digest>,
}

/// A repository, and when it was first used.
type RecentRegistry = (Instant, Arc<Registry>);

impl Supply for StoreSupply<'_> {
    fn index(
        &self,
        device: &DeviceId,
        manifest: Option<&Digest>,
    ) -> Result<Option<LayerIndex>, Box<dyn std::error::Error + Send + Sync>> {
        let Some(index) = LayerIndex::load(self.store, device, manifest)? else { return Ok(None) };
        let mut sources = Vec::new();
        // One record that is damaged keeps no other image from its bytes, and what is here needs no source.
        // Only those who had such an image are asked for its layers. It may have no name any more, and be in use.
        for image in self.images_with(device)? {
            match transfer::lazy::sources(self.store, &image) {
                Ok(found) => sources.extend(found),
                Err(error) => {
                    let error: &dyn std::error::Error = &error;
                    tracing::warn!(%image, error, "where the image is from is not known");
                }
            }
        }
        // Another image may have this device, too, and a registry that does not answer.
        sources.sort_by_key(|it| it.digest() != manifest);
        self.blobs.know((manifest.copied(), index.head.blob), &sources);
        Ok(Some(index))
    }

    fn source(&self, index: &LayerIndex, manifest: Option<&Digest>) -> LayerSource<'_> {
        let manifest = manifest.copied();
        let registries = self.blobs.registries((manifest, index.head.blob));
        let host = registries.first().map(|it| it.registry().into());
        LayerSource { blobs: Box::new(self.blobs.of(manifest)), manifest, host }
    }

    fn trace(
        &self,
        image: &ImageId,
        name: Option<&str>,
    ) -> Result<Option<Trace>, Box<dyn std::error::Error + Send + Sync>> {
        let usual = self.tuning.prefetch();
        let name = name.unwrap_or(&usual);
        if name == NO_TRACE {
            return Ok(None);
        }
        Ok(self.store.downloads.traces(image)?.get(name).cloned())
    }

    fn files(&self, device: &DeviceId) -> Vec<Range<u64>> {
        let images = self.images_with(device).unwrap_or_default();
        let Some(image) = images.first() else { return Vec::new() };
        self.store.file_places(image, device).unwrap_or_else(|error| {
            let error: &dyn std::error::Error = &error;
            tracing::debug!(%device, error, "where its files are is not known");
            Vec::new()
        })
    }

    fn sealed(
        &self,
        device: &DeviceId,
        cancel: &AtomicBool,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let named = self.store.refs.all()?.into_iter();
        let named = named.filter(|it| it.1.form == Form::Tar);
        let named = named.filter_map(|it| Some((it.1.image, it.1.manifest?)));
        // A container keeps its image though the name has gone to another.
        let used = self.store.containers.all()?.into_iter();
        let used = used.filter_map(|it| Some((it.1.image, it.1.manifest?)));
        // Engines have images that have no name.
        let (snapshots, damaged) = self.store.snapshots.all()?;
        for error in damaged {
            let error: &dyn std::error::Error = &error;
            tracing::warn!(error, "the image of a snapshot is not known");
        }
        let of_engines = snapshots.iter().filter_map(|it| it.record.content()?.lazy);
        let of_engines = of_engines.map(|it| (it.image, it.manifest));
        let mut images = BTreeSet::new();
        for (image, manifest) in named.chain(used).chain(of_engines) {
            // Or another import has brought the device, while it was filled.
            if self.store.sparse_devices(&image)?.contains(device)
                || self.store.presence_of(&image, Some(&manifest))? == Presence::Unproven
            {
                images.insert((image, manifest));
            }
        }
        // One that cannot be made complete keeps no other from it.
        let done = images.iter().map(|it| self.complete(&it.0, &it.1, cancel));
        let done: Vec<_> = done.collect();
        done.into_iter().collect()
    }
}

impl StoreSupply<'_> {
    /// All images of which this is a device that may lack something. One that cannot be read keeps no other from its bytes.
    fn images_with(&self, device: &DeviceId) -> Result<Vec<ImageId>, store::DiskError> {
        let has = |image: &ImageId| match self.store.sparse_devices(image) {
            Ok(devices) => devices.contains(device),
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(%image, error, "the devices of the image are not known");
                false
            }
        };
        Ok(self.store.images.ids()?.into_iter().filter(has).collect())
    }

    /// Makes an image complete if all bytes of its devices are here.
    fn complete(
        &self,
        image: &ImageId,
        manifest: &Digest,
        cancel: &AtomicBool,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        self.blobs.know_layers(image, manifest)?;
        let surroundings = self.surroundings.quiet(cancel);
        let blobs = self.blobs.of(Some(*manifest));
        match import::complete(self.store, image, manifest, &blobs, &surroundings)? {
            Completed::NotYet => {}
            Completed::Same => tracing::info!(%image, "the image is complete"),
            Completed::Other(right) => tracing::error!(
                %image,
                %right,
                "the index of the image was wrong, or made with other options: its layers make another image, which has its \
                 names now; stop the containers that run from it"
            ),
        }
        Ok(())
    }
}

impl<'a> StoreBlobs<'a> {
    fn new(store: &'a Store, settings: Settings) -> Self {
        Self {
            kept: KeptBlobs(store),
            damaged: Mutex::default(),
            settings,
            registries: Mutex::default(),
            recent: Mutex::default(),
        }
    }

    /// Looks up where the layers of an image are: a layer may have no device.
    fn know_layers(
        &self,
        image: &ImageId,
        manifest: &Digest,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let store = self.kept.0;
        let mut sources = transfer::lazy::sources(store, image)?;
        sources.sort_by_key(|it| it.digest() != Some(manifest));
        for layer in StoredImage::load(store, manifest)?.manifest.layers {
            let blob = (Some(*manifest), layer.digest);
            if self.registries(blob).is_empty() {
                self.know(blob, &sources);
            }
        }
        Ok(())
    }

    /// Those of the image of a manifest.
    const fn of(&self, manifest: Option<Digest>) -> ImageBlobs<'_, 'a> {
        ImageBlobs { all: self, manifest }
    }

    /// Notes who is asked for a blob. A registry that cannot be asked as it is configured is left out.
    fn know(&self, blob: BlobKey, sources: &[Reference]) {
        let mut asked = BTreeSet::new();
        let new = sources.iter().filter(|it| asked.insert((it.registry(), it.repository())));
        let made = new.filter_map(|it| {
            let registry = self.registry(it);
            let failed = |error: &RegistryError| {
                let error: &dyn std::error::Error = error;
                tracing::error!(registry = it.registry(), error, "the registry is not asked");
            };
            registry.inspect_err(failed).ok()
        });
        let made = made.collect();
        lock(&self.registries).insert(blob, made);
    }

    /// The repository of `reference`, with the connections and tokens of another layer that was just mounted.
    fn registry(&self, reference: &Reference) -> Result<Arc<Registry>, RegistryError> {
        let mut recent = lock(&self.recent);
        recent.retain(|_, (made, _)| made.elapsed() < SHARED);
        let name = (reference.registry().to_owned(), reference.repository().to_owned());
        if let Some((_, registry)) = recent.get(&name) {
            return Ok(Arc::clone(registry));
        }
        let registry = Arc::new(Registry::new(reference, &self.settings)?);
        recent.insert(name, (Instant::now(), Arc::clone(&registry)));
        Ok(registry)
    }

    fn registries(&self, blob: BlobKey) -> Vec<Arc<Registry>> {
        let all = lock(&self.registries);
        let (manifest, digest) = blob;
        let any = || all.iter().find(|it| manifest.is_none() && it.0.1 == digest).map(|it| it.1);
        all.get(&blob).or_else(any).cloned().unwrap_or_default()
    }
}

impl BlobSource for ImageBlobs<'_, '_> {
    fn blob(&self, digest: &Digest, size: u64, range: Range<u64>) -> Box<dyn Read + Send + '_> {
        match self.ranges(digest, size, &[range], Whole::Read) {
            Ok(parts) => Box::new(Cursor::new(parts.concat())),
            Err(error) => Box::new(FailingReader::new(error)),
        }
    }

    fn ranges(
        &self,
        digest: &Digest,
        size: u64,
        ranges: &[Range<u64>],
        whole: Whole,
    ) -> io::Result<Vec<Vec<u8>>> {
        let mut failed =
            io::Error::other("the store keeps no such blob, and knows no registry that has it");
        let all = self.all;
        if !lock(&all.damaged).contains(&(self.manifest, *digest)) {
            match all.kept.ranges(digest, size, ranges, whole) {
                Ok(parts) => return Ok(parts),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => failed = error,
            }
        }
        for registry in all.registries((self.manifest, *digest)) {
            match BlobSource::ranges(&*registry, digest, size, ranges, whole) {
                Ok(parts) => return Ok(parts),
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    fn distrust(&self, digest: &Digest) -> bool {
        let registries = self.all.registries((self.manifest, *digest));
        let is_kept = lock(&self.all.damaged).insert((self.manifest, *digest));
        let others = registries.iter().filter(|it| it.distrust(digest)).count();
        others > 0 || (is_kept && !registries.is_empty())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn serve(context: &Context, args: &args::Serve) -> anyhow::Result<Answer> {
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
    // A machine starts it before the first pull.
    let is_new = !context.store_directory()?.join("meta").exists();
    let store = context.open(OpenOptions::create())?;
    // Nothing of it is mounted, and root works on no files that another can change.
    check_lazy(&store)?;
    let folder = folder_of(store.path()).context("cannot look at the store's directory")?;
    if args.detached {
        start::leave_group();
    }
    let stop = Arc::new(AtomicBool::new(false));
    // Readers wait for one that is started again.
    let settings = if args.again { lenient_settings } else { settings };
    let settings = settings(context.who(), &args.registry, &stop, pauses(context))?;
    let blobs =
        StoreBlobs::new(&store, engine::with_pull_secrets(settings, &store, &args.registry));
    let resources = crate::surroundings::Surroundings::new(context, &store, BUDGET);
    let surroundings = Surroundings {
        supply: &StoreSupply { store: &store, tuning: &tuning, blobs, surroundings: &resources },
        folder: &folder,
        keeper: &again(context, args, &["--keeper".into(), folder.clone().into()])?,
        complete: &|| tuning.completion(),
        door: &|| tuning.door(),
        patience: tuning.patience(),
        idle: args.idle.map(|it| Duration::from_secs(it.into())),
        stop: &stop,
    };
    let replace = if args.replace { Replace::Yes } else { Replace::No };
    let ready = || {
        if !context.quiet {
            // Whoever started it may have gone on.
            let new = if is_new { ", a store that it has made" } else { "" };
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
    let work = || serve::lazy::serve(&store, &surroundings, replace, ready);
    let left = until_stopped(&stop, hear, work)??;
    if left == Left::Nothing && args.detached {
        start::remove_empty_log(&folder);
    }
    if let Left::InUse(left) = left {
        context.remark(&format!(
            "{left} lazy devices are in use: their readers get I/O errors in ten seconds, until `quire serve --lazy` runs again"
        ));
    }
    Ok(Answer::Yes)
}

fn stop(context: &Context) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::read())?;
    let folder = folder_of(store.path()).context("cannot look at the store's directory")?;
    match LazyService::connect(&folder)? {
        Some(service) => match service.stop() {
            Err(ClientError::Refused(reason)) => bail!(
                "the service runs on: {reason} (`quire ps --lazy` lists them): end the lazy containers, and unmount the \
                 lazy images"
            ),
            stopped => stopped?,
        },
        None => context.remark("no service fills lazy devices of this store"),
    }
    Ok(Answer::Yes)
}

fn keep(context: &Context, args: &args::Serve, folder: &Path) -> anyhow::Result<Answer> {
    // Who ends the service does not mean the keeper. They stay blocked.
    let _signals = Signals::block(&[Signal::INT, Signal::TERM, Signal::HUP])?;
    let socket = std::io::stdin().as_fd().try_clone_to_owned();
    let socket = socket.context("cannot use standard input")?;
    // It may find that another service is there already.
    serve::lazy::keep(socket, folder, &again(context, args, &["--again".into()])?)?;
    Ok(Answer::Yes)
}

/// This program, as a service of the same store.
fn again(context: &Context, args: &args::Serve, more: &[OsString]) -> anyhow::Result<Program> {
    let mut arguments = Vec::new();
    if args.complete {
        arguments.push("--complete".into());
    }
    if let Some(door) = args.door {
        arguments.extend(["--door".into(), door.name().into()]);
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

/// This program, as a service of the store in use. It starts in another directory.
fn program(
    context: &Context,
    registry: &args::RegistryOptions,
    more: Vec<OsString>,
) -> anyhow::Result<Program> {
    let path = std::env::current_exe().context("cannot tell which program this is")?;
    let store = context.store_directory()?;
    let mut arguments: Vec<OsString> = vec!["--store".into(), store.into(), "serve".into()];
    arguments.push("--lazy".into());
    if registry.plain_http {
        arguments.push("--plain-http".into());
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

fn absolute(option: &str, path: &Path) -> anyhow::Result<PathBuf> {
    std::path::absolute(path)
        .with_context(|| format!("{option}: \"{}\" is not a path", path.display()))
}

/// Asks the service as soon as a device is lazy.
struct Lender<'a> {
    context: &'a Context,
    store: &'a Store,
    /// Of the image.
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
                let found = start::service(self.context, &folder, registry)?;
                self.service.get_or_init(|| found.of(self.manifest))
            }
        };
        Ok(service.lend(device)?)
    }
}

/// Has the service of a store, if there is one, let go of what nothing else has open.
pub(crate) fn release(store: &Store) {
    let asked = folder_of(store.path()).and_then(|folder| LazyService::connect(&folder));
    match asked.map(|service| service.map(|it| it.release())) {
        Ok(None | Some(Ok(()))) => {}
        // It keeps what it has: then so does `gc`.
        Ok(Some(Err(error))) => {
            tracing::warn!(%error, "the service for lazy devices does not let go");
        }
        Err(error) => tracing::debug!(%error, "cannot ask the service for lazy devices"),
    }
}

/// Opens an image; lazily, if that is wanted: not every byte has to be here.
pub(crate) fn open(
    context: &Context,
    store: &Store,
    image: Permitted,
    wanted: &args::LazyOptions,
) -> anyhow::Result<PermittedImage> {
    // Nobody is there who could watch.
    Ok(open_watched(context, store, image, wanted)?.0)
}

/// The same for a container, whose monitor keeps readers from zeros.
pub(crate) fn open_watched(
    context: &Context,
    store: &Store,
    image: Permitted,
    wanted: &args::LazyOptions,
) -> anyhow::Result<(PermittedImage, Option<LazyWatch>)> {
    let image = prove::proven(context, store, image, &wanted.pull.registry)?;
    if wanted.lazy.is_none() {
        return Ok((image.open(store)?, None));
    }
    let manifest = image.found().manifest;
    let lender = Lender { context, store, manifest, wanted, service: OnceCell::new() };
    let opened = image.open_lazy(store, &lender)?;
    let service = lender.service.get().filter(|_| opened.image().presence == Presence::Partial);
    let Some(service) = service else { return Ok((opened, None)) };
    let watch = service.watch(&folder_of(store.path())?)?;
    if wanted.complete {
        service.complete(&opened.image().id).context("--complete")?;
    }
    let name = wanted.prefetch.as_deref();
    if name != Some(NO_TRACE) {
        match (service.bring(&opened.image().id, name), &wanted.prefetch) {
            (Ok(true), _) | (Ok(false), None) => {}
            (Ok(false), Some(name)) => {
                bail!("--prefetch: the image has no trace \"{}\"", name.escape_debug())
            }
            // It starts without.
            (Err(error), None) => tracing::warn!(%error, "nothing is fetched ahead of its readers"),
            (Err(error), Some(_)) => return Err(error).context("--prefetch"),
        }
    }
    Ok((opened, Some(watch)))
}
