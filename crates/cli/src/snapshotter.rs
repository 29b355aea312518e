//! `serve --snapshotter`.

use std::num::NonZeroUsize;
use std::sync::Arc;

use anyhow::bail;
use serve::snapshots::{
    CollectChoices, LazyChoices, PATIENCE, SkipLayers, SnapshotSurroundings, Snapshotter,
    serve_snapshots,
};
use store::OpenOptions;

use crate::Answer;
use crate::args;
use crate::context::{Context, moment};
use crate::engine_version::EngineVersion;
use crate::engines;
use crate::lazy::engine::EngineImages;
use crate::notify::{self, ServiceStep};
use crate::report;
use crate::settings::SnapshotterChoices;

/// What is logged unless options say otherwise: a line for each call. Of other parts, what an operator has to know.
pub(crate) const LOGGED: &str = "warn,quire_serve::snapshots=info";

pub(crate) fn serve(context: &Context, args: &args::Serve) -> anyhow::Result<Answer> {
    let wanted = SnapshotterChoices::of(args)?;
    if let Some(engine) = args.print_config {
        return print_config(context, args.version, &wanted, engine);
    }
    if !context.who().is_host_root() {
        bail!("serve --snapshotter: only the host's root may mount roots for an engine");
    }
    // A machine starts it before the first pull.
    let store = context.open(OpenOptions::create())?;
    let place = store.path().display().to_string();
    // What is wrong with them is told now, not at the first container.
    drop(crate::policy::policies(context)?);
    let of_policies = context.clone();
    let trust = crate::lazy::engine::trust(wanted.trust_repository);
    let mut surroundings = SnapshotSurroundings {
        policies: Box::new(move || {
            crate::policy::policies(&of_policies).map_err(|error| format!("{error:#}"))
        }),
        now: Box::new(moment),
        in_an_hour: Box::new(|| report::rfc3339(moment().seconds.saturating_add(3600))),
        threads: std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN),
        scratch: std::env::temp_dir(),
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
    let ready = || {
        if !context.is_quiet() {
            let text = format!(
                "snapshots of {} in {place} for engines at {}",
                wanted.instance,
                wanted.socket.display()
            );
            // Whoever started it may have gone on.
            let _told = report::line(&text);
        }
        notify::tell(ServiceStep::Ready);
    };
    let work = |stop| -> anyhow::Result<()> {
        let images = Arc::new(EngineImages::new(context, &store, &args.registry, trust));
        let (starts, image_service) = (wanted.lazy, wanted.image_service.clone());
        surroundings.lazy = Some(LazyChoices { images, starts, image_service });
        let snapshotter = Snapshotter::open(store, &wanted.instance, surroundings)?;
        Ok(serve_snapshots(snapshotter, (&wanted.socket, &wanted.engine), stop, ready)?)
    };
    notify::serve_until_asked(work)??;
    Ok(Answer::Yes)
}

/// The text goes to standard output, so that it can be put into a file; what to do with it goes beside it.
fn print_config(
    context: &Context,
    version: Option<EngineVersion>,
    wanted: &SnapshotterChoices,
    engine: args::Engine,
) -> anyhow::Result<Answer> {
    let socket = std::path::absolute(&wanted.socket)?;
    let config = engines::config(engine, version, &socket, &context.store_directory()?)?;
    report::line(config.text.trim_end())?;
    context.remark(&config.remark);
    Ok(Answer::Yes)
}
