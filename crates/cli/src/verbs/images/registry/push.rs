//! `push`: sends an image to a registry.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context as _;
use clap::{Args, ValueHint};
use oci::policy::{Repository, Signature};
use oci::reference::Reference;
use oci::registry::{Pauses, Registry};
use serde::Serialize;
use store::{OpenOptions, Store};
use transfer::evidence::read_evidence;
use transfer::export::{Compression, ExportPlan, How, Options};
use transfer::progress::Event;
use transfer::push::{PushOptions, Pushed, Sent};

use crate::Answer;
use crate::args::{self, RegistryOptions};
use crate::output::report;
use crate::session::context::Context;
use crate::session::layers;
use crate::session::resources::scratch;
use crate::session::signals::{give_up_when, until_signal};
use crate::verbs::VerbArgs;
use crate::verbs::images::registry::pull::settings;
use crate::verbs::images::signing::private_key::{KeyOptions, read_key};

// The image to push, and its target.
#[derive(Debug, Args)]
pub(crate) struct Push {
    /// A name, an image id or its first digits (6 or more)
    pub(crate) name: String,
    /// Name in a registry, such as ghcr.io/owner/app:1.2 or localhost:5000/app; by default the image's name
    pub(crate) target: Option<String>,
    /// Compress layers like this. By default, layers that the registry has and layers of a pulled image stay as they
    /// are; other layers are compressed with gzip
    #[arg(long, value_enum, value_name = "HOW")]
    pub(crate) compression: Option<args::Compression>,
    /// Sign the image with this private key, for the target: a PEM file of `cosign generate-key-pair`, or of `openssl
    /// genpkey`
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) sign_by_sigstore_private_key: Option<PathBuf>,
    /// Read the key's passphrase from the first line of this file. By default it is $COSIGN_PASSWORD, or Quire asks for
    /// it
    #[arg(
        long,
        value_name = "FILE",
        value_hint = ValueHint::FilePath,
        requires = "sign_by_sigstore_private_key"
    )]
    pub(crate) sign_passphrase_file: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) registry: RegistryOptions,
}

impl VerbArgs for Push {
    const NAME: &'static str = "push";
    const ABOUT: &'static str = "Push an image to a registry";
    const DETAILS: &'static str = "\
        Quire pushes the stored manifest and sends no layer that the registry already has. It looks in the \
        repository itself, and in those that the image or its base came from or was pushed to. So a pulled \
        image keeps its digest, and a derived image sends only its new layer, once to each registry, by \
        default compressed with gzip.\n\n\
        If the registry lacks a layer and the store did not keep its blob (`pull --keep-layers`), Quire \
        compresses the layer again. That changes the manifest, and Quire prints a remark.\n\n\
        Signatures of the store for the pushed manifest, which name the target's repository, are sent along, to the \
        place where cosign, skopeo and podman look for them.\n\n\
        If the image was pulled from an index, Quire pushes the image of the pulled platform only, not the index.";
    const EXAMPLES: &'static str = "quire push app registry.example.com/team/app:1.2\n  quire push --sign-by-sigstore-private-key cosign.key app registry.example.com/team/app:1.2";
    const HAS_SHORT_QUIET: bool = true;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        push(context, self)
    }
}

const OPTIONS: KeyOptions =
    KeyOptions { key: "--sign-by-sigstore-private-key", passphrase: "--sign-passphrase-file" };

/// Minimum number of layers sent at once.
const LAYERS_MIN: usize = 3;

pub(crate) fn push(context: &Context, args: &Push) -> anyhow::Result<Answer> {
    let store = open(context)?;
    let found = crate::session::resolve::resolve(&store, &args.name)?;
    let target: Reference = match (&args.target, &found.name) {
        (Some(target), _) => target.parse()?,
        (None, Some(name)) => name.as_str().parse()?,
        (None, None) => anyhow::bail!("{} has no name: give the name to push it to", args.name),
    };
    let manifest = found.manifest.with_context(|| layers::none(&args.name, ""))?;
    let key = args.sign_by_sigstore_private_key.as_deref();
    let key = key.map(|key| read_key(context, key, args.sign_passphrase_file.as_deref(), OPTIONS));
    let key = key.transpose()?;
    let cancel = Arc::new(AtomicBool::new(false));
    give_up_when(&store, &cancel);
    let wish = PushOptions {
        manifest: &manifest,
        target: &target,
        compression: match args.compression {
            None => Compression::Usual,
            Some(args::Compression::AsItWas) => Compression::AsItWas,
            Some(args::Compression::Gzip) => Compression::Gzip,
            Some(args::Compression::Zstd) => Compression::Zstd,
            Some(args::Compression::None) => Compression::None,
        },
        key: key.as_ref(),
    };
    let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let progress = Arc::new(context.progress().with_events(context.json));
    let told = Arc::clone(&progress);
    let pauses = Pauses::to(move |pause| told.pause(pause));
    let scratch = scratch(&store);
    let options = Options {
        threads: NonZeroUsize::new(threads.max(LAYERS_MIN)).expect("the width is at least 3"),
        scratch: &scratch,
        progress: &|event: Event<'_>| progress.tell(event),
        cancel: &cancel,
    };
    let changed = |plan: &ExportPlan| {
        if let Some(text) = changes(plan, wish.compression) {
            progress.remark(&text);
        }
    };
    let work = || -> anyhow::Result<Pushed> {
        // `gc` keeps the image and its objects while it is open.
        let _open = store.open_found(&found)?;
        // The client is created now, while signals are blocked, because its thread inherits the signal mask.
        let registry =
            Registry::new(&target, &settings(context.who(), &args.registry, &cancel, pauses)?)?;
        Ok(transfer::push::push(&store, &registry, &wish, &options, &changed)?)
    };
    let result = until_signal(&cancel, work)?;
    progress.finish();
    let done = result?;
    let repository = Repository::new(target.registry(), target.repository());
    let is_for_target =
        |it: &Signature| it.claim().is_some_and(|it| it.repository.as_ref() == Some(&repository));
    let has_signature = || {
        let evidence = read_evidence(&store, &manifest);
        evidence.is_ok_and(|it| it.all_signatures().any(is_for_target))
    };
    if !done.is_unchanged && key.is_none() && has_signature() {
        context.remark(
            "the store's signatures are for the manifest before it was changed: \
            --sign-by-sigstore-private-key signs the pushed one",
        );
    }
    let report = PushReport {
        event: "pushed",
        manifest: done.digest.to_string(),
        unchanged: done.is_unchanged,
        name: target.to_string(),
        layers: done.layers.iter().map(|(how, sent)| layer(*how, *sent)).collect(),
        signatures: done.signatures,
    };
    if context.json {
        report::json_line(&report)?;
    } else if !context.is_quiet() {
        report::line(&report.text())?;
    }
    Ok(Answer::Yes)
}

/// Opens the store, for writing if possible: a push records the blobs that it made and the registry that has them, but
/// also works without these records. It never writes to another user's store.
fn open(context: &Context) -> anyhow::Result<Store> {
    let store = context.open(OpenOptions::read())?;
    if !container::store_ownership::is_ours(&store) {
        return Ok(store);
    }
    match Store::open(store.path(), store.who(), OpenOptions::write()) {
        Ok(writable) => Ok(writable),
        Err(error) => {
            tracing::debug!(%error, "cannot record the pushed layers");
            Ok(store)
        }
    }
}

/// Returns the reason why the manifest differs from the manifest in the store, unless the user requested a
/// compression.
fn changes(plan: &ExportPlan, asked: Compression) -> Option<String> {
    let digest = plan.digest;
    let count = |how| plan.layers.iter().filter(|it| it.how == how).count();
    let layers = |count| match count {
        1 => "1 layer is".to_owned(),
        _ => format!("{count} layers are"),
    };
    let (anew, new) = (count(How::Compressed), count(How::New));
    match asked {
        Compression::Gzip | Compression::Zstd | Compression::None => None,
        _ if anew > 0 => Some(format!(
            "{} compressed again, because neither the store nor the registry has the original \
            blobs (`pull --keep-layers` keeps them): the manifest is now {digest}",
            layers(anew)
        )),
        _ if new > 0 => Some(format!(
            "{} compressed by gzip (`--compression as-it-was` sends the tar): the manifest is now \
            {digest}",
            layers(new)
        )),
        // The registry has the layers in other blobs than the manifest names.
        _ => Some(format!(
            "the registry has the layers in other blobs: the manifest is now {digest}"
        )),
    }
}

/// The last line of `push --json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct PushReport {
    /// `pushed`.
    event: &'static str,
    /// Digest of the manifest in the registry.
    manifest: String,
    /// Whether the manifest is the one that the image came with.
    unchanged: bool,
    /// Reference of the image in the registry.
    name: String,
    /// The layers, lowest first.
    layers: Vec<SentReport>,
    /// Number of signatures that were sent, or that the registry had.
    signatures: usize,
}

impl PushReport {
    /// Formats the report for people.
    fn text(&self) -> String {
        let bytes = self.layers.iter().map(|it| it.sent.0).sum();
        let sent = self.layers.iter().filter(|it| it.sent.0 > 0).count();
        let mounted = self.layers.iter().filter(|it| it.mounted).count();
        let there = self.layers.len() - sent - mounted;
        let mounted = match mounted {
            0 => String::new(),
            many => format!("{many} from another repository of the registry, "),
        };
        let (sent, size) = (report::count(sent, "layer"), report::size(bytes));
        let (manifest, name) = (&self.manifest, &self.name);
        let signed = match self.signatures {
            0 => String::new(),
            many => format!("\n{}", report::count(many, "signature")),
        };
        format!(
            "manifest {manifest}\nname     {name}\n{sent} sent ({size}), {mounted}{there} already in \
            the repository{signed}"
        )
    }
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct SentReport {
    /// Origin of the blob: `reused` (the registry had it), `kept` (the original), `made again`, `compressed`, or
    /// `compressed again`.
    bytes: &'static str,
    /// Number of bytes that were sent; 0 if there were none.
    sent: report::Bytes,
    /// Always true. Absent unless the registry mounted the blob from another of its repositories.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    mounted: bool,
}

fn layer(how: How, sent: Sent) -> SentReport {
    let bytes = match how {
        How::There => "reused",
        How::Kept => "kept",
        How::Plain => "made again",
        How::Compressed => "compressed again",
        How::New => "compressed",
    };
    let length = if let Sent::Bytes(length) = sent { length } else { 0 };
    SentReport { bytes, sent: report::Bytes(length), mounted: matches!(sent, Sent::Mounted) }
}
