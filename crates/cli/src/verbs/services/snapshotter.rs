//! `serve --snapshotter`: starts the proxy snapshotter of containerd.

use std::num::NonZeroUsize;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use serve::metrics::{MetricsAddress, MetricsListener};
use serve::snapshots::{
    CollectChoices, EngineChoices, EngineImages, LazyChoices, PATIENCE, SkipLayers,
    SnapshotResources, Snapshotter, serve_snapshots,
};
use store::{OpenOptions, Store};
use transfer::lazy::TrustIndex;

use crate::output::report;
use crate::session::context::{Context, moment};
use crate::session::resources::scratch;
use crate::verbs::images::registry::pull::{pauses, settings};
use crate::verbs::services::engines;
use crate::verbs::services::lazy::{resources, starter};
use crate::verbs::services::notify::{self, ServiceStep};
use crate::verbs::services::service_config::SnapshotterChoices;
use crate::{Answer, args};

/// Default log filter: one line per call, and warnings of other modules.
pub(crate) const LOGGED: &str = "warn,quire_serve::snapshots=info";

pub(crate) fn serve(
    context: &Context,
    args: &crate::verbs::services::serve::args::Serve,
) -> anyhow::Result<Answer> {
    let wanted = SnapshotterChoices::from_args(args)?;
    if let Some(engine) = args.print_config {
        return print_config(context, args, &wanted, engine);
    }
    if !context.who().is_host_root() {
        bail!("serve --snapshotter: only the host's root may mount roots for an engine");
    }
    // The service may be started at boot, before the first pull.
    let store = context.open(OpenOptions::create())?;
    let place = store.path().display().to_string();
    // Errors in the policies are reported now, and not at the first container.
    drop(crate::session::policy::policies(context)?);
    let of_policies = context.clone();
    let mut environment = SnapshotResources {
        policies: Box::new(move || {
            crate::session::policy::policies(&of_policies).map_err(|error| format!("{error:#}"))
        }),
        now: Box::new(moment),
        in_an_hour: Box::new(|| report::rfc3339(moment().seconds.saturating_add(3600))),
        threads: std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN),
        scratch: scratch(&store),
        search: context.search(),
        skip: match wanted.skip {
            args::Skip::Download => SkipLayers::Download,
            args::Skip::Unpack => SkipLayers::Unpack,
            args::Skip::Never => SkipLayers::Never,
        },
        lazy: None,
        collect: Some(CollectChoices {
            apart: CollectChoices::APART,
            at_once_above: wanted.gc_above,
        }),
        patience: PATIENCE,
    };
    // Errors of the address are reported before engines connect.
    let metrics = wanted.metrics.as_ref().map(|it| listen_for_metrics(it, &store)).transpose()?;
    let metrics_at = metrics.as_ref().map(|it| shown(it.address()));
    let ready = || {
        if !context.is_quiet() {
            let text = format!(
                "snapshots of {} in {place} for engines at {}",
                wanted.instance,
                wanted.socket.display()
            );
            // A failed write is ignored, because the process that started the service may have closed the pipe.
            let _told = report::line(&text);
            if let Some(address) = &metrics_at {
                let _told = report::line(&format!("metrics at {address}"));
            }
        }
        notify::tell(ServiceStep::Ready);
    };
    let work = |stop| -> anyhow::Result<()> {
        let choices = engine_choices(context, &store, args, &wanted)?;
        let images = Arc::new(EngineImages::new(&store, choices));
        let (starts, image_service) = (wanted.lazy, wanted.image_service.clone());
        environment.lazy = Some(LazyChoices { images, starts, image_service });
        let snapshotter = Snapshotter::open(store, &wanted.instance, environment)?;
        Ok(serve_snapshots(snapshotter, &wanted.socket, &wanted.engine, metrics, stop, ready)?)
    };
    notify::serve_until_asked(work)??;
    Ok(Answer::Yes)
}

/// Listens for clients that request metrics.
fn listen_for_metrics(address: &MetricsAddress, store: &Store) -> anyhow::Result<MetricsListener> {
    MetricsListener::bind(address, store.who()).with_context(|| {
        format!(
            "cannot listen for metrics on {address}: set another address as metrics below \
            [snapshotter], for example if another service uses this one"
        )
    })
}

/// Returns an address of metrics as a user types it.
fn shown(address: &MetricsAddress) -> String {
    match address {
        MetricsAddress::Network(address) => format!("http://{address}/metrics"),
        MetricsAddress::Socket(path) => format!("{}, by HTTP", path.display()),
    }
}

/// Returns the settings for pulls of images whose layers are not downloaded.
fn engine_choices(
    context: &Context,
    store: &Store,
    args: &crate::verbs::services::serve::args::Serve,
    wanted: &SnapshotterChoices,
) -> anyhow::Result<EngineChoices> {
    let (of_policies, of_registries) = (context.clone(), context.clone());
    let registry = args.registry.clone();
    Ok(EngineChoices {
        policies: Box::new(move || Ok(crate::session::policy::policies(&of_policies)?)),
        registries: Box::new(move |cancel| {
            let (who, pauses) = (of_registries.who(), pauses(&of_registries));
            Ok(settings(who, &registry, cancel, pauses)?)
        }),
        has_credentials: args.registry.authfile.is_some(),
        trust: match wanted.trust_repository {
            true => TrustIndex::Repository,
            false => TrustIndex::Signed,
        },
        starter: starter(context, &args.registry)?,
        resources: resources(store),
    })
}

/// Prints the configuration on standard output, so that it can be written to a file, and instructions on standard
/// error.
fn print_config(
    context: &Context,
    args: &crate::verbs::services::serve::args::Serve,
    wanted: &SnapshotterChoices,
    engine: args::Engine,
) -> anyhow::Result<Answer> {
    let socket = std::path::absolute(&wanted.socket)?;
    let root = context.store_directory()?;
    let config = match &args.runtime_class {
        None => engines::config(engine, args.version, &socket, &root)?,
        Some(class) if engine == args::Engine::Containerd => {
            engines::config_for_class(args.version, class, &socket, &root)?
        }
        Some(_) => bail!("--runtime-class is for `--print-config containerd`"),
    };
    report::line(config.text.trim_end())?;
    context.remark(&config.remark);
    Ok(Answer::Yes)
}
