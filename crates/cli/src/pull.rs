//! `pull`: an image comes from a registry.

use std::io::Write as _;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context as _;
use image::erofs::Versions;
use oci::manifest::Platform;
use oci::reference::Reference;
use oci::registry::{Pauses, Registry, Settings};
use serde::Serialize;
use store::{OpenOptions, RefName, Who, walk};
use transfer::import::{Durable, Limits, Options, OtherPlatform, Unsupported};
use transfer::progress::Event;
use transfer::pull::{Layers, Pulled, default_name};

use crate::Answer;
use crate::args::{self, RegistryOptions};
use crate::context::{Context, now};
use crate::import::{ImportReport, give_up_when, tell};
use crate::progress::Progress;
use crate::report;
use crate::signals::until_signal;

/// At least so many layers are fetched at once: one connection seldom fills a line.
const LAYERS_MIN: usize = 3;

/// How registries are talked to: what the environment says, and the options.
pub(crate) fn settings(
    who: Who,
    options: &RegistryOptions,
    cancel: &Arc<AtomicBool>,
    pauses: Pauses,
) -> Settings {
    let mut settings = Settings::from_environment(who.user, |name| std::env::var_os(name));
    if let Some(folder) = &options.certs_dir {
        settings.hosts.insert(0, folder.clone());
    }
    if let Some(file) = &options.authfile {
        settings.keyring.files.insert(0, file.clone());
    }
    settings.plain_http = options.plain_http;
    settings.cancel = Arc::clone(cancel);
    settings.pauses = pauses;
    settings
}

/// Prints each pause of a verb that shows no progress.
pub(crate) fn pauses(context: &Context) -> Pauses {
    let is_quiet = context.is_quiet();
    Pauses::to(move |pause| {
        if !is_quiet {
            report::error_line(&format!("quire: {pause}"));
        }
    })
}

/// The last line of `pull --json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct PullReport {
    #[serde(flatten)]
    import: ImportReport,
    /// `pulled`.
    event: &'static str,
}

/// The last line of `pull --json` where nothing had to be pulled.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct UpToDateReport {
    /// `pulled`.
    event: &'static str,
    /// Image id.
    image: String,
    /// Its name.
    name: String,
    /// Digest of the manifest.
    manifest: String,
    /// Always true.
    up_to_date: bool,
}

pub(crate) fn pull(context: &Context, args: &args::Pull) -> anyhow::Result<Answer> {
    let reference: Reference = args.reference.parse()?;
    let name: RefName = match &args.name {
        Some(name) => name.parse()?,
        None => default_name(&reference)?,
    };
    let platform: Platform = match &args.platform {
        Some(text) => text.parse()?,
        None => Platform::linux(std::env::consts::ARCH),
    };
    let store = context.open(OpenOptions::create())?;
    let policies = crate::policy::policies(context)?;
    let cancel = Arc::new(AtomicBool::new(false));
    give_up_when(&store, &cancel);
    let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let threads = NonZeroUsize::new(threads.max(LAYERS_MIN)).expect("it is at least 3");
    let progress = Arc::new(Progress::new(context).with_events(context.json));
    let told = Arc::clone(&progress);
    let pauses = Pauses::to(move |pause| told.pause(pause));
    let here = store.refs.get(&name).ok().flatten();
    let form = crate::forms::choose_again(&args.form, &store, here.map(|it| it.form))?;
    let scratch = std::env::temp_dir();
    let options = transfer::pull::Options {
        import: Options {
            name: Some(&name),
            now: now(),
            platform: &platform,
            other_platform: match args.platform {
                Some(_) => OtherPlatform::Refuse,
                None => OtherPlatform::Tell,
            },
            limits: Limits::default(),
            budget: usize::try_from(args.memory << 20).context("--memory is too much")?,
            durable: Durable::EachLayer,
            form: form.form,
            dedup: form.dedup,
            threads,
            unsupported: match args.skip_unsupported {
                true => Unsupported::Skip,
                false => Unsupported::Refuse,
            },
            xattrs: walk::Xattrs::All,
            times: walk::Times::Exact,
            versions: Versions::default(),
            objects: None,
            scratch: &scratch,
            progress: &|event: Event<'_>| progress.tell(event),
            cancel: &cancel,
        },
        policies: &policies,
        layers: if args.keep_layers { Layers::Keep } else { Layers::Forget },
    };
    let work = || -> anyhow::Result<Pulled> {
        // Its thread takes over which signals are blocked here.
        let registry =
            Registry::new(&reference, &settings(context.who(), &args.registry, &cancel, pauses))?;
        Ok(transfer::pull::pull(&store, &registry, &reference, &options)?)
    };
    let result = until_signal(&cancel, work)?;
    progress.finish();
    match result? {
        Pulled::Image(done) if context.json => {
            report::json_line(&PullReport { import: ImportReport::of(&done), event: "pulled" })?;
        }
        Pulled::Image(done) => tell(context, &done)?,
        Pulled::UpToDate { image, manifest, name } => {
            if context.json {
                report::json_line(&UpToDateReport {
                    event: "pulled",
                    image: image.to_string(),
                    name: name.to_string(),
                    manifest: manifest.to_string(),
                    up_to_date: true,
                })?;
            } else if !context.is_quiet() {
                let mut out = report::standard_output();
                writeln!(out, "image {image}\nname  {name}\nhere already: {manifest}")?;
                out.flush()?;
            }
        }
    }
    Ok(Answer::Yes)
}
