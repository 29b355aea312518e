//! `pull`: fetches an image from a registry.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context as _;
use clap::Args;
use image::verity::ImageId;
use oci::reference::Reference;
use oci::registry::{Pauses, Protection, Registry, Settings};
use serde::Serialize;
use store::{Form, OpenOptions, RefName, Store, Who};
use transfer::import::{ImportOptions, Unsupported};
use transfer::lazy::TrustIndex;
use transfer::pull::{
    Indexes, Layers, LazyPullError, LazyPulled, LazySource, PullSettings, Pulled, Syncs, UseTables,
    default_name, pull_lazy,
};

use crate::Answer;
#[cfg(feature = "serve")]
use crate::args::PullPolicy;
use crate::args::{
    self, FormChoice, FormOptions, KeepIndexOption, LazyChoice, PULL_MEMORY, RegistryOptions,
};
use crate::output::report;
use crate::session::context::{self, Context};
use crate::session::forms::choose_again;
use crate::session::resources::{JobResources, budget};
use crate::verbs::VerbArgs;
use crate::verbs::images::import::{ImportReport, platform, tell};
#[cfg(feature = "serve")]
use anyhow::bail;

// The image to pull, and how.
#[derive(Debug, Args)]
pub(crate) struct Pull {
    /// Image in a registry, such as alpine, ghcr.io/owner/app:1.2 or localhost:5000/app@sha256:…
    pub(crate) reference: String,
    /// The image's name in the store; by default the whole reference
    pub(crate) name: Option<String>,
    /// Take the image of this platform from an index, as os/architecture[/variant]; refuse an image of another one
    #[arg(long, value_name = "PLATFORM")]
    pub(crate) platform: Option<String>,
    /// Also keep the compressed layers, so that a push sends the very same bytes
    #[arg(long)]
    pub(crate) keep_layers: bool,
    /// Fetch the image and an index from the registry, but no layers: `mount --lazy` then fetches data on demand.
    /// Without an index, the layers' own tables of contents are used, if all layers have one. Otherwise the image is
    /// pulled with its layers, or refused with `require`
    #[arg(
        long,
        value_enum,
        value_name = "HOW",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "prefer",
        conflicts_with_all = ["keep_layers", "form"]
    )]
    pub(crate) lazy: Option<LazyChoice>,
    /// Trust the index with this digest, or any index in the repository with `repository`. By default only an index
    /// that is signed or that the manifest names is trusted, unless the image is named by its tag
    #[arg(long, value_name = "DIGEST|repository", requires = "lazy")]
    pub(crate) trust_index: Option<TrustIndex>,
    /// Leave out sockets and unknown file types, and list them, instead of refusing the image
    #[arg(long)]
    pub(crate) skip_unsupported: bool,
    #[command(flatten)]
    pub(crate) form: FormOptions,
    /// Index the layers while they are read, as `quire index` does; only with `--form tar`
    #[arg(long, conflicts_with = "lazy")]
    pub(crate) index: bool,
    #[command(flatten)]
    pub(crate) keep_index: KeepIndexOption,
    /// Use up to this much memory for data in flight, in MiB
    #[arg(long, value_name = "MIB", default_value_t = PULL_MEMORY, value_parser = clap::value_parser!(u64).range(8..=65536))]
    pub(crate) memory: u64,
    #[command(flatten)]
    pub(crate) registry: RegistryOptions,
}

impl VerbArgs for Pull {
    const NAME: &'static str = "pull";
    const ABOUT: &'static str = "Pull an image from a registry";
    const EXAMPLES: &'static str =
        "quire pull debian:13\n  quire pull --platform linux/arm64 ghcr.io/owner/app:1.2 app";
    const HAS_SHORT_QUIET: bool = true;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        pull(context, self)
    }
}

/// Minimum number of layers fetched at once, because one connection seldom uses the whole bandwidth.
const LAYERS_MIN: NonZeroUsize = NonZeroUsize::new(3).expect("the number is not 0");

/// Returns the settings for registries from the environment and the options.
pub(crate) fn settings(
    who: Who,
    options: &RegistryOptions,
    cancel: &Arc<AtomicBool>,
    pauses: Pauses,
) -> anyhow::Result<Settings> {
    if let Some(file) = &options.authfile {
        // Without this check of the file, requests to registries would be anonymous.
        oci::files::read_settings(file, oci::registry::credentials::FILE_MAX)
            .with_context(|| format!("--authfile {}: cannot read it", file.display()))?;
    }
    lenient_settings(who, options, cancel, pauses)
}

/// Like [`settings`], but the file with credentials may be missing.
pub(crate) fn lenient_settings(
    who: Who,
    options: &RegistryOptions,
    cancel: &Arc<AtomicBool>,
    pauses: Pauses,
) -> anyhow::Result<Settings> {
    // Service managers set no HOME for programs of root.
    let home = |name: &str| context::home(who).filter(|_| name == "HOME").map(Into::into);
    let variable = |name: &str| std::env::var_os(name).or_else(|| home(name));
    let mut settings = Settings::from_environment(who.user, variable);
    if let Some(folder) = &options.certs_dir {
        // If the directory is missing, the pull would use only the system's CAs and no mirrors, so this is an error.
        std::fs::read_dir(folder).with_context(|| {
            format!("--certs-dir {}: cannot read the directory", folder.display())
        })?;
        settings.hosts.insert(0, folder.clone());
    }
    if let Some(file) = &options.authfile {
        settings.keyring.files.insert(0, file.clone());
    }
    settings.protection = match (options.plain_http, options.tls_verify) {
        (true, _) => Protection::None,
        (false, None) => Protection::Usual,
        (false, Some(true)) => Protection::Verified,
        (false, Some(false)) => Protection::Unverified,
    };
    settings.cancel = Arc::clone(cancel);
    settings.pauses = pauses;
    Ok(settings)
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

/// The last line of `pull --json` if there was nothing to pull.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct UpToDateReport {
    /// `pulled`.
    event: &'static str,
    /// Image id.
    image: String,
    /// Name of the image.
    name: String,
    /// Digest of the manifest.
    manifest: String,
    /// Always true.
    up_to_date: bool,
}

impl UpToDateReport {
    fn new(image: &ImageId, manifest: &oci::Digest, name: &RefName) -> Self {
        let [image, name] = [image.to_string(), name.to_string()];
        let manifest = manifest.to_string();
        Self { event: "pulled", image, name, manifest, up_to_date: true }
    }

    fn tell(&self, context: &Context) -> anyhow::Result<()> {
        if context.json {
            report::json_line(self)?;
        } else if context.is_quiet() {
            report::line(&self.image)?;
        } else {
            let Self { image, name, manifest, .. } = self;
            report::line(&format!("image {image}\nname  {name}\nup to date: {manifest}"))?;
        }
        Ok(())
    }
}

/// The last line of `pull --lazy --json` if no layers were pulled.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct LazyPullReport {
    /// `pulled`.
    event: &'static str,
    /// Image id.
    image: String,
    /// Name of the image.
    name: String,
    /// Digest of the manifest.
    manifest: String,
    /// `index`, or `tables` if the layers' own tables of contents replace it.
    source: &'static str,
    /// Digest of the index's manifest. Null without an index.
    index: Option<String>,
    /// Number of layers of the image.
    layers: usize,
    /// Number of devices that are fetched on demand. The store has the others.
    lazy_devices: usize,
    /// Size of these devices when they are complete.
    lazy_bytes: report::Bytes,
}

impl LazyPullReport {
    /// Formats the report for people.
    fn text(&self) -> String {
        let Self { image, name, .. } = self;
        let index = self.index.as_deref().unwrap_or(
            "none; from the layers' own tables of contents (at most 2 requests for each layer)",
        );
        let layers = report::count(self.layers, "layer");
        let size = report::size(self.lazy_bytes.0);
        format!("image {image}\nname  {name}\nindex {index}\n{layers}, {size} fetched on demand")
    }
}

pub(crate) fn pull(context: &Context, args: &Pull) -> anyhow::Result<Answer> {
    match fetch(context, args, Told::All, Syncs::AtOnce)? {
        Fetched::Lazy(done, name) => tell_lazy(context, &name, done)?,
        Fetched::Whole(Pulled::Image(done)) if context.json => {
            report::json_line(&PullReport {
                import: ImportReport::from_report(&done),
                event: "pulled",
            })?;
        }
        Fetched::Whole(Pulled::Image(done)) => tell(context, &done)?,
        Fetched::Whole(Pulled::UpToDate { image, manifest, name }) => {
            UpToDateReport::new(&image, &manifest, &name).tell(context)?;
        }
    }
    Ok(Answer::Yes)
}

/// Pulls the image of another verb, if that verb's options require it. Standard output stays empty.
#[cfg(feature = "serve")]
pub(crate) fn pull_first(
    context: &Context,
    name: &str,
    options: &args::LazyOptions,
) -> anyhow::Result<()> {
    use crate::session::resolve::{may_be_pulled, resolve};
    let usual = if options.lazy.is_some() { PullPolicy::Missing } else { PullPolicy::Never };
    match options.pull.pull.unwrap_or(usual) {
        PullPolicy::Never => return Ok(()),
        PullPolicy::Always => return pull_always(context, name, options, None),
        PullPolicy::Missing if !may_be_pulled(name) => return Ok(()),
        PullPolicy::Missing => {
            drop(context.open(OpenOptions::create())?);
            let store = context.open_with(name)?;
            // Other errors are reported when the image is used.
            if !resolve(&store, name).is_err_and(|error| error.is_absent()) {
                return Ok(());
            }
        }
    }
    let fetched = fetch_for(context, name, options, None);
    fetched.with_context(|| format!("cannot pull \"{}\"", name.escape_debug()))
}

/// Pulls the image of another verb in any case.
#[cfg(feature = "serve")]
pub(crate) fn pull_always(
    context: &Context,
    name: &str,
    options: &args::LazyOptions,
    platform: Option<&str>,
) -> anyhow::Result<()> {
    if !crate::session::resolve::may_be_pulled(name) {
        bail!(
            "--pull always: \"{}\" is not the name of an image of a registry",
            name.escape_debug()
        )
    }
    let fetched = fetch_for(context, name, options, platform);
    fetched.with_context(|| format!("cannot pull \"{}\"", name.escape_debug()))
}

/// Pulls the image of another verb, which the store lacks. `lack` is the error that shows it; if the pull fails, the
/// message also has the names that the user may have meant.
#[cfg(feature = "serve")]
pub(crate) fn pull_missing(
    context: &Context,
    name: &str,
    options: &args::LazyOptions,
    platform: Option<&str>,
    lack: &anyhow::Error,
) -> anyhow::Result<()> {
    use crate::session::resolve::Unresolved;

    context.remark(&format!("pulling {name}"));
    fetch_for(context, name, options, platform).with_context(|| {
        let lack = match lack.is::<store::StoreError>() {
            true => format!("there is no image \"{}\"", name.escape_debug()),
            false => match lack.downcast_ref().and_then(Unresolved::meant) {
                Some(meant) => format!("{lack} ({meant})"),
                None => lack.to_string(),
            },
        };
        format!("{lack}, and it cannot be pulled")
    })
}

/// Fetches the image of another verb. Standard output stays empty.
#[cfg(feature = "serve")]
fn fetch_for(
    context: &Context,
    name: &str,
    options: &args::LazyOptions,
    platform: Option<&str>,
) -> anyhow::Result<()> {
    let wanted = Pull {
        reference: name.to_owned(),
        name: None,
        platform: platform.map(ToOwned::to_owned),
        keep_layers: false,
        lazy: options.lazy,
        trust_index: options.trust_index,
        skip_unsupported: false,
        form: args::FormOptions::default(),
        index: false,
        keep_index: options.pull.keep_index,
        memory: args::PULL_MEMORY,
        registry: options.pull.registry.clone(),
    };
    // The program of the image starts before the disk has everything. The service of lazy devices syncs it afterwards.
    fetch(context, &wanted, Told::Progress, Syncs::Later).map(drop)
}

/// Pulls an image again that is stored under this name but lacks data. Standard output stays empty.
pub(crate) fn pull_again(
    context: &Context,
    name: &RefName,
    reference: &str,
    registry: &RegistryOptions,
) -> anyhow::Result<()> {
    let wanted = Pull {
        reference: reference.to_owned(),
        name: Some(name.to_string()),
        platform: None,
        keep_layers: false,
        lazy: None,
        trust_index: None,
        // The user decided about unsupported files at the first pull.
        skip_unsupported: true,
        form: args::FormOptions::default(),
        index: false,
        // An index that was kept is made again.
        keep_index: KeepIndexOption { keep_index: has_kept_index(context, name)? },
        memory: args::PULL_MEMORY,
        registry: registry.clone(),
    };
    fetch(context, &wanted, Told::Progress, Syncs::AtOnce).map(drop)
}

/// Whether an index was kept with an image that is stored under this name. A damaged record counts.
fn has_kept_index(context: &Context, name: &RefName) -> anyhow::Result<bool> {
    let store = context.open(OpenOptions::read())?;
    let Some(reference) = store.refs.get(name).ok().flatten() else { return Ok(false) };
    let has = |manifest| !matches!(store.downloads.kept_index(&manifest), Ok(None));
    Ok(reference.form == Form::Tar && reference.manifest.is_some_and(has))
}

/// Output of a pull.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    /// Progress, and with `--json` events on standard output.
    All,
    /// Progress only, because standard output is used for other data.
    Progress,
}

enum Fetched {
    Whole(Pulled),
    Lazy(LazyPulled, RefName),
}

/// Pulls an image. If syncs are not deferred, the image is durable, also if another command has pulled it a moment ago.
fn fetch(context: &Context, args: &Pull, told: Told, syncs: Syncs) -> anyhow::Result<Fetched> {
    let store = context.open(OpenOptions::create())?;
    let fetched = fetch_to(context, &store, args, told, syncs)?;
    if syncs == Syncs::AtOnce {
        store.settle()?;
    }
    Ok(fetched)
}

fn fetch_to(
    context: &Context,
    store: &Store,
    args: &Pull,
    told: Told,
    syncs: Syncs,
) -> anyhow::Result<Fetched> {
    let reference: Reference = args.reference.parse()?;
    let name: RefName = match &args.name {
        Some(name) => name.parse()?,
        None => default_name(&reference)?,
    };
    let (platform, other_platform) = platform(args.platform.as_deref())?;
    let policies = crate::session::policy::policies(context)?;
    let mut environment = JobResources::new(context, store, budget(args.memory)?);
    environment.threads = environment.threads.max(LAYERS_MIN);
    environment.progress =
        Arc::new(context.progress().with_events(context.json && told == Told::All));
    let progress = Arc::clone(&environment.progress);
    let pauses = Pauses::to(move |pause| progress.pause(pause));
    let here = store.refs.get(&name).ok().flatten();
    let form = match (args.form.form, args.keep_index.keep_index) {
        (FormChoice::Auto, true) => Form::Tar,
        _ => choose_again(&args.form, store, here.map(|it| it.form))?,
    };
    let keeps_index = args.keep_index.keep_index && form == Form::Tar;
    if args.keep_index.keep_index && !keeps_index && args.lazy.is_none() {
        context.remark(&format!("keeping no index: images of the form {form} have none"));
    }
    let options = PullSettings {
        import: ImportOptions {
            name: Some(&name),
            platform: &platform,
            other_platform,
            form,
            index: args.index,
            unsupported: match args.skip_unsupported {
                true => Unsupported::Skip,
                false => Unsupported::Refuse,
            },
            ..ImportOptions::default()
        },
        policies: &policies,
        layers: if args.keep_layers { Layers::Keep } else { Layers::Forget },
        indexes: if keeps_index { Indexes::Keep } else { Indexes::Forget },
        syncs,
    };
    let settings = settings(context.outside(), &args.registry, &environment.cancel, pauses)?;
    if let Some(lazy) = args.lazy {
        let trust = (args.trust_index.unwrap_or_default(), UseTables::IfNoIndex);
        let pulled = environment.during(|environment| -> anyhow::Result<_> {
            let registry = Registry::new(&reference, &settings)?;
            Ok(pull_lazy(store, &registry, &reference, environment, &options, &name, trust))
        })?;
        match pulled? {
            Ok(done) => {
                if let LazyPulled::Image { unusable_index: Some(error), .. } = &done {
                    let error = anyhow::Error::from(Arc::clone(error));
                    context.remark(&format!(
                        "{error:#}: using the layers' own tables of contents instead"
                    ));
                }
                return Ok(Fetched::Lazy(done, name));
            }
            Err(
                error @ (LazyPullError::Index(_)
                | LazyPullError::Tables { .. }
                | LazyPullError::Contradiction { .. }),
            ) if lazy == LazyChoice::Prefer => {
                let error = anyhow::Error::from(error);
                context.remark(&format!("{error:#}: pulling the layers instead"));
            }
            Err(error) => return Err(error.into()),
        }
    }
    let pulled = environment.during(|environment| -> anyhow::Result<Pulled> {
        // Create the client here, where signals are blocked, because its thread inherits the signal mask.
        let registry = Registry::new(&reference, &settings)?;
        Ok(transfer::pull::pull(store, &registry, &reference, environment, &options)?)
    })?;
    Ok(Fetched::Whole(pulled?))
}

fn tell_lazy(context: &Context, name: &RefName, done: LazyPulled) -> anyhow::Result<()> {
    match done {
        LazyPulled::UpToDate { image, manifest, name } => {
            UpToDateReport::new(&image, &manifest, &name).tell(context)?;
        }
        LazyPulled::Image { image, manifest, source, layers, devices, device_bytes, .. } => {
            let (source, index) = match source {
                LazySource::Index(index) => ("index", Some(index.to_string())),
                LazySource::Tables => ("tables", None),
            };
            let report = LazyPullReport {
                event: "pulled",
                image: image.to_string(),
                name: name.to_string(),
                manifest: manifest.to_string(),
                source,
                index,
                layers,
                lazy_devices: devices,
                lazy_bytes: report::Bytes(device_bytes),
            };
            if context.json {
                report::json_line(&report)?;
            } else if context.is_quiet() {
                report::line(&report.image)?;
            } else {
                report::line(&report.text())?;
            }
        }
    }
    Ok(())
}
