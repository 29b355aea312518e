//! `trace`: runs a container, and notes what it reads first.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, bail, ensure};
use image::lazy::UNIT;
use kernel::process::Signals;
use serve::lazy::Recorder;
use store::{OpenOptions, Presence, Trace, check_trace_name};

use crate::Answer;
use crate::args::{self, PullPolicy};
use crate::context::Context;
use crate::layers;
use crate::report;
use crate::settings::NO_TRACE;
use crate::signals::FORWARDED;

pub(crate) fn trace(context: &Context, args: &args::Trace) -> anyhow::Result<Answer> {
    check_trace_name(&args.trace).context("--as")?;
    if args.trace == NO_TRACE {
        bail!("--as: `--prefetch {NO_TRACE}` means no trace: choose another name");
    }
    if args.run.detach {
        bail!("--detach: a trace ends when its command does");
    }
    let lazy = &args.run.wanted.lazy;
    if lazy.pull.pull.is_some_and(|it| it != PullPolicy::Never) {
        let image = &args.run.image;
        bail!(
            "--pull: pull the image before, since all of it has to be here: `quire pull --form tar {image}`"
        );
    }
    if !context.who().is_host_root() {
        bail!("trace: only the host's root may watch reads of files");
    }
    let store = context.open(OpenOptions::write())?;
    let found = crate::resolve::resolve(&store, &args.run.image)?;
    let image = found.image;
    let name = &args.run.image;
    let opened = store.open_names(&image)?;
    ensure!(
        layers::is_tar(opened.form, opened.devices.len()),
        "only images of the form tar are traced, and {name} has the form {}: {}",
        opened.form,
        match found.manifest {
            Some(_) => format!("use `quire convert --form tar {name}`"),
            None => layers::none(name, "--form tar "),
        }
    );
    ensure!(
        opened.presence == Presence::Complete && args.run.wanted.lazy.lazy.is_none(),
        "{name} is traced where all of it is here: `quire pull --form tar {name}`"
    );
    // Where another mount has it, pages that were read before are not read again.
    ensure!(
        !kernel::lease::in_use(opened.image.fd()).unwrap_or(false),
        "{name} is mounted already: end its containers and unmount it, so that the trace has all that is read"
    );
    drop(opened);
    let opened = store.open_image(&image)?;
    let recorder = Recorder::new(opened.devices.iter().map(|it| (it.id, &it.file)))?;
    drop(opened);
    // The container is to get them, and no thread.
    let _signals = Signals::block(&FORWARDED)?;
    let stop = AtomicBool::new(false);
    let (answer, runs) = std::thread::scope(|scope| {
        let noted = scope.spawn(|| {
            let noted = recorder.record(&stop);
            // Nobody waits for a recorder that is gone.
            drop(recorder);
            noted
        });
        let answer = crate::run::run(context, &args.run);
        stop.store(true, Ordering::Relaxed);
        (answer, noted.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    let answer = answer?;
    let runs = runs?;
    ensure!(!runs.is_empty(), "nothing was read of {name}: there is no trace of it");
    let mut traces = store.downloads.traces(&image).unwrap_or_else(|error| {
        tracing::warn!(%error, "the traces of the image are made anew");
        store::Traces::default()
    });
    let (mut runs, room) = (runs, traces.room(&args.trace));
    let count = runs.len();
    if count > room {
        // What is read late is worth least.
        context.remark(&format!(
            "the trace ends after {room} of {count} parts: an image keeps no more"
        ));
        runs.truncate(room);
    }
    let (count, units) = (runs.len(), runs.iter().map(|it| u64::from(it.units)).sum::<u64>());
    let bytes = report::size(units.saturating_mul(UNIT));
    traces.set(Trace { name: args.trace.clone(), runs })?;
    store.downloads.set_traces(&image, &traces)?;
    if !context.quiet {
        context.remark(&format!("trace {} of {name}: {bytes} in {count} parts", args.trace));
    }
    Ok(answer)
}
