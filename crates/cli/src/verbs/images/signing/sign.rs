//! `sign`: signs an image of the store.

use std::path::PathBuf;

use anyhow::bail;
use clap::{Args, ValueHint};
use oci::policy::SignedItem;
use oci::reference::Reference;
use serde::Serialize;
use store::{OpenOptions, Resolved, Store};

use crate::Answer;
use crate::output::report;
use crate::session::context::Context;
use crate::session::failure::UsageError;
use crate::session::resolve::resolve;
use crate::verbs::VerbArgs;
use crate::verbs::images::signing::private_key::{KeyOptions, read_key};

// The image to sign, and the key.
#[derive(Debug, Args)]
pub(crate) struct Sign {
    /// A name, an image id or its first digits (6 or more)
    pub(crate) name: String,
    /// Private key: a PEM file of `cosign generate-key-pair`, or of `openssl genpkey`
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) key: PathBuf,
    /// Read the key's passphrase from the first line of this file. By default it is $COSIGN_PASSWORD, or Quire asks for
    /// it
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) passphrase_file: Option<PathBuf>,
    /// Repository that the signature names, perhaps with a tag: ghcr.io/owner/app. By default it is the repository in
    /// the image's name, or else the one that the image was pulled from
    #[arg(long, value_name = "REGISTRY/REPOSITORY")]
    pub(crate) identity: Option<String>,
}

impl VerbArgs for Sign {
    const NAME: &'static str = "sign";
    const ABOUT: &'static str = "Sign an image";
    const DETAILS: &'static str = "\
        Quire signs the image id, and the manifest in cosign's format if the image has one. The signatures are stored \
        with the image: policies with the public key then accept it on this host. `push` sends the manifest's signature \
        if it names the target's repository, and `show` lists both.";
    const EXAMPLES: &'static str = "quire sign app --key cosign.key\n  quire sign app --key cosign.key --identity ghcr.io/owner/app";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        sign(context, self)
    }
}

const OPTIONS: KeyOptions = KeyOptions { key: "--key", passphrase: "--passphrase-file" };

fn sign(context: &Context, args: &Sign) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::write())?;
    let found = resolve(&store, &args.name)?;
    // An image that cannot be used is not signed.
    let _open = store.open_found(&found)?;
    if let Some(manifest) = &found.manifest
        && !store.manifests.has(manifest)?
    {
        bail!("the store has no manifest {manifest}: run `quire fsck`");
    }
    let reference = match &args.identity {
        Some(text) => Some(identity(text)?),
        None => usual_identity(&store, &found)?,
    };
    let key = read_key(context, &args.key, args.passphrase_file.as_deref(), OPTIONS)?;
    let text = reference.as_deref().unwrap_or_default();
    // Policies for images made here need both: the files, and the settings.
    let manifest = found.manifest.as_ref().map(SignedItem::from);
    let mut is_old = true;
    for item in manifest.into_iter().chain([SignedItem::from(&found.image)]) {
        is_old &= transfer::signing::sign(&store, &item, text, &key)?.is_old;
    }
    if reference.is_none() && found.manifest.is_some() {
        context.remark(
            "the signature names no repository, so no registry gets it: --identity names one",
        );
    }
    let report = SignReport {
        image: found.image.to_string(),
        manifest: found.manifest.map(|it| it.to_string()),
        identity: reference,
        key: key.fingerprint().to_string(),
        already_signed: is_old,
    };
    if context.json || !context.is_quiet() {
        report::print(context.json, &report, SignReport::write)?;
    }
    Ok(Answer::Yes)
}

/// Checks a repository that the user gave.
fn identity(text: &str) -> anyhow::Result<String> {
    let reference: Reference = text.parse()?;
    if reference.digest().is_some() || text.split('/').next() != Some(reference.registry()) {
        let why =
            format!("--identity {text}: write REGISTRY/REPOSITORY, such as ghcr.io/owner/app");
        return Err(UsageError(why).into());
    }
    let tag = reference.tag().map(|tag| format!(":{tag}")).unwrap_or_default();
    Ok(reference.name() + &tag)
}

/// Returns the repository that the image's name has, if it begins with a registry, or else the only one that the image
/// was pulled from.
fn usual_identity(store: &Store, found: &Resolved) -> anyhow::Result<Option<String>> {
    let in_name = found.name.as_ref().and_then(|name| {
        let reference: Reference = name.as_str().parse().ok()?;
        let registry = name.as_str().split('/').next()?;
        (registry == reference.registry()).then(|| reference.name())
    });
    if in_name.is_some() {
        return Ok(in_name);
    }
    let origins = store.downloads.origins(&found.image)?.into_iter();
    let origins = origins.filter(|it| it.manifest == found.manifest);
    let mut repositories: Vec<_> = origins.filter_map(|it| it.repository).collect();
    repositories.dedup();
    Ok(if repositories.len() == 1 { repositories.pop() } else { None })
}

/// Report of `sign --json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct SignReport {
    /// Image id, which is signed.
    image: String,
    /// Digest of the manifest, which is signed as well. Null if the image came without one.
    manifest: Option<String>,
    /// Repository that the signature names, perhaps with a tag. Null if it names none.
    identity: Option<String>,
    /// SHA-256 of the public key in DER.
    key: String,
    /// Whether the store had these signatures by this key already, so that no others were made.
    already_signed: bool,
}

impl SignReport {
    /// Prints the report for people.
    fn write(&self, out: &mut dyn std::io::Write) -> std::io::Result<()> {
        writeln!(out, "image    {}", self.image)?;
        if let Some(manifest) = &self.manifest {
            writeln!(out, "manifest {manifest}")?;
        }
        if let Some(identity) = &self.identity {
            writeln!(out, "identity {identity}")?;
        }
        let already = if self.already_signed { " (was signed before)" } else { "" };
        writeln!(out, "key      {}{already}", self.key)
    }
}
