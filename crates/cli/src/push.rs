//! `push`: an image goes to a registry.

use std::io::Write as _;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context as _;
use oci::export::{Compression, How, Options, Plan};
use oci::import::Event;
use oci::push::{Pushed, Sent, Wish};
use oci::reference::Reference;
use oci::registry::{Pauses, Registry};
use serde_json::json;
use store::{OpenOptions, Store};

use crate::Answer;
use crate::args;
use crate::context::Context;
use crate::import::{give_up_when, until_signal};
use crate::progress::Progress;
use crate::pull::settings;
use crate::report;

/// At least so many layers are sent at once.
const LAYERS_MIN: usize = 3;

pub(crate) fn push(context: &Context, args: &args::Push) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::read())?;
    let found = crate::names::resolve(&store, &args.name)?;
    let target: Reference = match (&args.target, &found.name) {
        (Some(target), _) => target.parse()?,
        (None, Some(name)) => name.as_str().parse()?,
        (None, None) => anyhow::bail!("{} has no name: say where to push it", args.name),
    };
    let manifest = found.manifest.with_context(|| {
        let name = &args.name;
        format!(
            "{name} came from a directory or a dump, or was merged or filtered, and has no layers: `quire export {name} tar:FILE` and `quire import \
             tar:FILE` make an image of one layer of it"
        )
    })?;
    let cancel = Arc::new(AtomicBool::new(false));
    give_up_when(&store, &cancel);
    let sources = sources(&store, &manifest, &target)?;
    let wish = Wish {
        manifest: &manifest,
        target: &target,
        sources: &sources,
        compression: match args.compression {
            None | Some(args::Compression::AsItWas) => Compression::AsItWas,
            Some(args::Compression::Gzip) => Compression::Gzip,
            Some(args::Compression::Zstd) => Compression::Zstd,
            Some(args::Compression::None) => Compression::None,
        },
    };
    let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let progress = Arc::new(Progress::new(context).with_events(context.json));
    let told = Arc::clone(&progress);
    let pauses = Pauses::to(move |pause| told.pause(pause));
    let scratch = std::env::temp_dir();
    let options = Options {
        threads: NonZeroUsize::new(threads.max(LAYERS_MIN)).expect("it is at least 3"),
        scratch: &scratch,
        progress: &|event: Event<'_>| progress.tell(event),
        cancel: &cancel,
    };
    let changed = |plan: &Plan| {
        let anew = plan.layers.iter().filter(|it| it.how == How::Compressed).count();
        if wish.compression == Compression::AsItWas {
            progress.remark(&format!(
                "{anew} of {} layers are compressed anew, since neither the store nor the registry has them as they came \
                 (`pull --keep-layers` keeps them): the manifest is {} now",
                plan.layers.len(),
                plan.digest
            ));
        }
    };
    let work = || -> anyhow::Result<Pushed> {
        // `gc` keeps the image and its objects while it is open.
        let _open = store.open_image(&found.image)?;
        // Its thread takes over which signals are blocked here.
        let registry = Registry::new(&target, &settings(&args.registry, &cancel, pauses))?;
        Ok(oci::push::push(&store, &registry, &wish, &options, &changed)?)
    };
    let result = until_signal(&cancel, work)?;
    progress.finish();
    let done = result?;
    if context.json {
        report::json_line(&json!({
            "event": "pushed",
            "manifest": done.digest.to_string(),
            "unchanged": done.is_unchanged,
            "name": target.to_string(),
            "layers": done.layers.iter().map(|(how, sent)| layer(*how, *sent)).collect::<Vec<_>>(),
        }))?;
    } else if !context.is_quiet() {
        tell(&target, &done)?;
    }
    Ok(Answer::Yes)
}

/// Repositories of the target's registry that had this image, by what the store calls it.
fn sources(
    store: &Store,
    manifest: &oci::Digest,
    target: &Reference,
) -> anyhow::Result<Vec<String>> {
    let mut sources = Vec::new();
    // One that is damaged is for `fsck` to tell of, and no reason to send what the registry may have.
    let (refs, _bad) = store.readable_refs()?;
    for (name, reference) in refs {
        let Ok(other) = name.as_str().parse::<Reference>() else { continue };
        let repository = other.repository();
        if reference.manifest == Some(*manifest)
            && other.registry() == target.registry()
            && repository != target.repository()
            && !sources.iter().any(|it| it == repository)
        {
            sources.push(repository.to_owned());
        }
    }
    Ok(sources)
}

fn layer(how: How, sent: Sent) -> serde_json::Value {
    let bytes = match how {
        How::There => "there",
        How::Kept => "kept",
        How::Plain => "made again",
        How::Compressed => "compressed anew",
    };
    match sent {
        Sent::Not => json!({"bytes": bytes, "sent": 0}),
        Sent::Mounted => json!({"bytes": bytes, "sent": 0, "mounted": true}),
        Sent::Bytes(sent) => json!({"bytes": bytes, "sent": sent}),
    }
}

fn tell(target: &Reference, done: &Pushed) -> anyhow::Result<()> {
    let (mut layers, mut bytes) = (0, 0);
    for (_, sent) in &done.layers {
        if let Sent::Bytes(sent) = sent {
            layers += 1;
            bytes += sent;
        }
    }
    let mut out = report::standard_output();
    writeln!(out, "manifest {}", done.digest)?;
    writeln!(out, "name     {target}")?;
    let there = done.layers.len() - layers;
    writeln!(out, "{layers} layers sent ({}), {there} there already", report::size(bytes))?;
    out.flush()?;
    Ok(())
}
