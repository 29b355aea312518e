//! `trace`: runs a container, and records the parts of its image that it reads first.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use image::lazy::hot::BLOCK;
use kernel::process::Signals;
use serve::lazy::{NO_TRACE, Recorder};
use store::{OpenOptions, Presence, Trace as ImageTrace, check_trace_name};

use crate::Answer;
use crate::args::PullPolicy;
use crate::output::report;
use crate::session::context::Context;
use crate::session::layers;
use crate::session::signals::FORWARDED;
use crate::verbs::containers::run::Run;
use crate::verbs::exit_codes::ExitCodes;
use crate::verbs::{VerbArgs, option_groups};

#[derive(Debug, Args)]
pub(crate) struct Trace {
    /// Name of the trace: one for each workload. A container that is started without `--prefetch` uses the one named
    /// default
    #[arg(long = "as", value_name = "TRACE", default_value = "default")]
    pub(crate) trace: String,
    #[command(flatten)]
    pub(crate) run: Run,
}

impl VerbArgs for Trace {
    const NAME: &'static str = "trace";
    const ABOUT: &'static str = "Run a command in a container, and record what it reads first";
    const DETAILS: &'static str = "Quire records the order in which the command reads parts of \
        the image, as a trace with this name. `quire index --push` pushes the traces of an image with \
        its index. A container that later starts with `--lazy` gets these parts first, before it \
        reads them. The image must have the form `tar`, and no other program may use it during the \
        trace. The options are those of `run`.";
    const EXAMPLES: &'static str = "quire trace debian -- cat /etc/os-release\n  quire trace --as worker app -- app worker --once";
    const HAS_SHORT_HELP: bool = false;
    const GROUPS: &'static [option_groups::OptionGroup] = option_groups::CONTAINER;
    const PRINTS_JSON: bool = false;
    const EXIT_CODES: ExitCodes = ExitCodes::Run;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        trace(context, self)
    }
}

pub(crate) fn trace(context: &Context, args: &Trace) -> anyhow::Result<Answer> {
    check_trace_name(&args.trace).context("--as")?;
    if args.trace == NO_TRACE {
        bail!("--as: `--prefetch {NO_TRACE}` means no trace: choose another name");
    }
    if args.run.detach {
        bail!("--detach: a trace ends when its command does");
    }
    let lazy = &args.run.new.wanted.lazy;
    if lazy.pull.pull.is_some_and(|it| it != PullPolicy::Never) {
        let image = args.run.new.image()?;
        bail!(
            "--pull: a trace needs the whole image in the store: pull it first with `quire pull \
            --form tar {image}`"
        );
    }
    if !context.who().is_host_root() {
        bail!("trace: only the host's root may watch reads of files");
    }
    let store = context.open(OpenOptions::write())?;
    let found = crate::session::resolve::resolve(&store, args.run.new.image()?)?;
    let image = found.image;
    let name = args.run.new.image()?;
    let opened = store.open_names(&image)?;
    ensure!(
        layers::is_tar(opened.form, opened.devices.len()),
        "a trace needs an image of the form tar, but {name} has the form {}: {}",
        opened.form,
        match found.manifest {
            Some(_) => format!("use `quire convert --form tar {name}`"),
            None => layers::none(name, "--form tar "),
        }
    );
    ensure!(
        opened.presence == Presence::Complete && args.run.new.wanted.lazy.lazy.is_none(),
        "a trace needs the whole image {name} in the store: `quire pull --form tar {name}`"
    );
    // If the image has another mount, pages that are in memory are not read again, so they would be missing in the
    // trace.
    ensure!(
        !kernel::lease::in_use(opened.image.fd()).unwrap_or(false),
        "{name} is already mounted: stop its containers and unmount it, so that the trace \
        includes all reads"
    );
    drop(opened);
    let opened = store.open_image(&image)?;
    let recorder = Recorder::new(opened.devices.iter().map(|it| (it.id, &it.file)))?;
    drop(opened);
    args.run.new.wanted.lazy.is_recorded.set(true);
    // Signals must reach the container, and none of the threads.
    let _signals = Signals::block(&FORWARDED)?;
    let stop = AtomicBool::new(false);
    let (answer, runs) = std::thread::scope(|scope| {
        let noted = scope.spawn(|| {
            let noted = recorder.record(&stop);
            // The recorder is dropped now, so that no reader waits for it any more.
            drop(recorder);
            noted
        });
        let answer = crate::verbs::containers::run::run(context, &args.run);
        stop.store(true, Ordering::Relaxed);
        (answer, noted.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    let answer = answer?;
    let runs = runs?;
    ensure!(!runs.is_empty(), "the command read no data of {name}, so there is no trace of it");
    let mut traces = store.downloads.traces(&image).unwrap_or_else(|error| {
        tracing::warn!(%error, "replacing the traces of the image");
        store::Traces::default()
    });
    let (mut runs, room) = (runs, traces.room(&args.trace));
    let count = runs.len();
    if count > room {
        // Parts that are read late are the least useful.
        context.remark(&format!(
            "the trace ends after {room} of {count} parts, the limit of an image"
        ));
        runs.truncate(room);
    }
    let (count, blocks) = (runs.len(), runs.iter().map(|it| u64::from(it.blocks)).sum::<u64>());
    let bytes = report::size(blocks.saturating_mul(BLOCK));
    traces.set(ImageTrace { name: args.trace.clone(), runs, start: None })?;
    store.downloads.set_traces(&image, &traces)?;
    if !context.quiet {
        context.remark(&format!("trace {} of {name}: {bytes} in {count} parts", args.trace));
    }
    Ok(answer)
}
