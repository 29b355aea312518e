//! `show`: prints the details of an image.

mod composefs_id;

use std::ffi::OsStr;
use std::io::{self, Write};

use anyhow::bail;
use clap::Args;
use oci::policy::{Evidence, Policies, Signature, SignedItem};
use serde::Serialize;
use serde_json::Value;
use store::{Form, Resolved, Store};
use transfer::evidence::{EvidenceError, read_evidence};
use transfer::import::{ErofsFile, Limits, image_of};
use transfer::{StoredError, StoredImage};

use self::composefs_id::ComposefsIdOptions;

use crate::Answer;
use crate::output::report::{self, Bytes};
use crate::session::context::Context;
use crate::session::policy::policies;
use crate::session::resources::without_store;
use crate::session::target::{erofs_file, read_names};
use crate::verbs::VerbArgs;
use crate::verbs::images::images::tell_bad;

#[derive(Debug, Args)]
pub(crate) struct Show {
    /// A name, an image id or its first digits (6 or more), erofs:FILE or disk:FILE
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) composefs_id: ComposefsIdOptions,
}

impl VerbArgs for Show {
    const NAME: &'static str = "show";
    const ABOUT: &'static str = "Show the details of an image";
    const EXAMPLES: &'static str = "quire show debian\n  quire show --json debian\n  quire show erofs:debian.erofs\n  quire show --composefs-id=sha512 debian";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        show(context, self)
    }
}

/// Report of `show --json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct ShowReport {
    /// Image id; for an image file, the id of the image that an import in the form `objects` makes. Null for a
    /// composefs image that does not state the objects of all its files.
    image: Option<String>,
    /// Names of the image.
    names: Vec<String>,
    /// `objects`, `packed` or `tar`. Null for an image file.
    #[cfg_attr(test, schemars(with = "Option<String>"))]
    form: Option<Form>,
    /// Ids of the devices that have the image's data.
    devices: Vec<String>,
    /// Size of these devices.
    data_bytes: Bytes,
    /// Size of the EROFS image.
    image_bytes: Bytes,
    /// Number of inodes in the image.
    inodes: usize,
    /// Lengths of all files, each counted once.
    file_bytes: Bytes,
    /// Whether the kernel verifies the image file when it is read.
    kernel_verity: bool,
    /// Whether the image came with an index or from tables of contents, and was not compared with its layers yet.
    unproven: bool,
    /// Digest of the manifest. Null if the image came without one.
    manifest_digest: Option<String>,
    /// The manifest, as OCI defines it. Null if the image came without one.
    manifest: Option<Value>,
    /// The configuration, as OCI defines it. Null if the image came without one.
    config: Option<Value>,
    /// Signatures in the store, verified or not.
    signatures: Vec<ShownSignatureReport>,
    /// The id in composefs that `--composefs-id` asked for. Null without that option.
    composefs_id: Option<String>,
    /// The image file. Null for an image of the store.
    file: Option<ShownFileReport>,
}

/// A signature as `show --json` describes it.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
struct ShownSignatureReport {
    /// Signed digests of manifests or indexes, or the image id.
    signed: Vec<String>,
    /// Whether it is a signature of this image, which the manifest or an index that lists it names.
    of_image: bool,
    /// Repository that the signature names. Null if it names none.
    identity: Option<String>,
    /// File of the first key in the policies in force that verifies the signature. Null if there is none.
    key: Option<String>,
}

impl ShownSignatureReport {
    fn new(
        signature: &Signature,
        names: &[SignedItem],
        policies: Option<&Policies>,
    ) -> Option<Self> {
        let claim = signature.claim()?;
        let image = claim.image.map(|it| it.to_string());
        let key = policies.and_then(|it| it.key_of(signature));
        Some(Self {
            of_image: names.iter().any(|it| claim.is_for(it)),
            signed: claim.digests.iter().map(ToString::to_string).chain(image).collect(),
            identity: claim.repository.map(|it| it.to_string()),
            key: key.map(|it| it.display().to_string()),
        })
    }

    /// Returns the line for people.
    fn text(&self) -> String {
        let identity = self.identity.as_deref().unwrap_or("no repository");
        let of = if self.of_image { "" } else { ", of another image" };
        let key = match &self.key {
            Some(key) => format!("by {key}"),
            None => "by no known key".to_owned(),
        };
        report::plain(&format!("for {}, {key}{of}", identity.escape_debug())).into_owned()
    }
}

/// Returns the signatures of an image in the store.
fn signatures(
    context: &Context,
    store: &Store,
    found: &Resolved,
) -> anyhow::Result<Vec<ShownSignatureReport>> {
    let read = |item: SignedItem| match read_evidence(store, item) {
        Err(error @ EvidenceError::Damaged { .. }) => {
            context.remark(&error.to_string());
            Ok(Evidence::default())
        }
        other => other,
    };
    let image = SignedItem::from(&found.image);
    let mut names = vec![image];
    let mut signatures: Vec<_> = read(image)?.all_signatures().cloned().collect();
    if let Some(manifest) = &found.manifest {
        let evidence = read(SignedItem::from(manifest))?;
        names.extend(evidence.names_of(manifest).iter().map(SignedItem::from));
        signatures.extend(evidence.all_signatures().cloned());
    }
    // A policy that cannot be read accepts no image, but this verb only describes images.
    let policies = match policies(context) {
        Ok(policies) => Some(policies),
        Err(error) => {
            if !signatures.is_empty() {
                context.remark(&format!("no signature is compared with a key: {error:#}"));
            }
            None
        }
    };
    let of = |it: &Signature| ShownSignatureReport::new(it, &names, policies.as_ref());
    Ok(signatures.iter().filter_map(of).collect())
}

/// An image file as `show --json` describes it.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
struct ShownFileReport {
    /// Size of a block of the file system.
    block_bytes: Bytes,
    /// Algorithms that the image states for compressed files.
    compression: Vec<String>,
    /// Whether it is an image of composefs, so that the data of most files is in objects.
    composefs: bool,
}

pub(crate) fn show(context: &Context, args: &Show) -> anyhow::Result<Answer> {
    if let Some(erofs) = erofs_file(context, OsStr::new(&args.name))? {
        if args.composefs_id.is_set() {
            bail!("--composefs-id needs an image of the store: `quire import {}` first", args.name);
        }
        return show_file(context, &erofs);
    }
    let store = context.open_with(&args.name)?;
    let found = crate::session::resolve::resolve(&store, &args.name)?;
    let opened = store.open_names(&found.image)?;
    let tree = read_names(&store, &opened)?;
    let (refs, bad) = store.refs.readable()?;
    tell_bad(&bad);
    // A damaged name may belong to this image.
    let answer = if bad.is_empty() { Answer::Yes } else { Answer::No };
    let refs = refs.into_iter().filter(|(name, it)| it.image == found.image && !name.is_unnamed());
    let names: Vec<_> = refs.map(|(name, _)| name.to_string()).collect();
    let stored = match found.manifest.map(|it| StoredImage::load(&store, &it)) {
        // `fsck` reports missing documents.
        None | Some(Err(StoredError::Absent { .. })) => None,
        Some(stored) => Some(stored?),
    };
    if args.composefs_id.is_set()
        && let (None, Some(manifest)) = (&stored, &found.manifest)
    {
        bail!(
            "the store has no manifest {manifest}, which the id in composefs needs: run `quire fsck`"
        );
    }
    let manifest = stored.as_ref().map(StoredImage::manifest_json).transpose()?;
    let config = stored.as_ref().map(StoredImage::config_json).transpose()?;
    let bytes = tree.files().map(|(_, content)| content.size()).sum();
    let report = ShowReport {
        image: Some(found.image.to_string()),
        names,
        form: Some(opened.form),
        devices: report::texts(opened.devices.iter().map(|it| it.0)),
        data_bytes: Bytes(opened.devices.iter().map(|it| it.1).sum()),
        image_bytes: Bytes(opened.image.size()),
        inodes: tree.inode_count(),
        file_bytes: Bytes(bytes),
        kernel_verity: opened.kernel_verity,
        unproven: store.downloads.is_unproven_for(&found.image, found.manifest.as_ref())?,
        manifest_digest: found.manifest.map(|it| it.to_string()),
        manifest,
        config,
        signatures: signatures(context, &store, &found)?,
        composefs_id: args.composefs_id.compute(context, &store, &found.image, stored.as_ref())?,
        file: None,
    };
    report::print(context.json, &report, ShowReport::write)?;
    Ok(answer)
}

/// Describes an image file. All of it is read, because its id depends on the contents of its files.
fn show_file(context: &Context, erofs: &ErofsFile) -> anyhow::Result<Answer> {
    let limits = Limits::default();
    let tree = without_store(context, |environment| erofs.tree(&limits, environment))??;
    let superblock = erofs.image().superblock();
    let block = superblock.block_bits.size();
    let report = ShowReport {
        image: image_of(&tree)?.map(|it| it.to_string()),
        names: Vec::new(),
        form: None,
        devices: Vec::new(),
        data_bytes: Bytes(0),
        image_bytes: Bytes(superblock.blocks.saturating_mul(block)),
        inodes: tree.inode_count(),
        file_bytes: Bytes(tree.files().map(|(_, content)| content.size()).sum()),
        kernel_verity: false,
        unproven: false,
        manifest_digest: None,
        manifest: None,
        config: None,
        signatures: Vec::new(),
        composefs_id: None,
        file: Some(ShownFileReport {
            block_bytes: Bytes(block),
            compression: superblock.algorithms().map(|it| it.to_string()).collect(),
            composefs: erofs.is_composefs(),
        }),
    };
    report::print(context.json, &report, ShowReport::write)?;
    Ok(Answer::Yes)
}

impl ShowReport {
    /// Prints the report for people.
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        if let Some(id) = &self.composefs_id {
            return writeln!(out, "{id}");
        }
        if let Some(image) = &self.image {
            writeln!(out, "image     {image}")?;
        }
        if self.file.is_none() {
            writeln!(out, "names     {}", self.names.join(" "))?;
        }
        writeln!(
            out,
            "files     {}, {} of content, image of {}",
            report::count(self.inodes, "inode"),
            report::size(self.file_bytes.0),
            report::size(self.image_bytes.0)
        )?;
        if let Some(file) = &self.file {
            return file.write(out);
        }
        let form = self.form.map(|form| form.to_string()).unwrap_or_default();
        match self.devices.len() {
            0 => writeln!(out, "form      {form}")?,
            many => {
                let (devices, size) =
                    (report::count(many, "device"), report::size(self.data_bytes.0));
                writeln!(out, "form      {form}, in {devices} of {size}")?;
            }
        }
        let checked = match (self.unproven, self.kernel_verity) {
            (true, _) => {
                "not yet: its index or tables of contents were not compared with its layers"
            }
            (false, true) => "by the kernel",
            (false, false) => "at import",
        };
        writeln!(out, "verified  {checked}")?;
        if let Some(digest) = &self.manifest_digest {
            writeln!(out, "manifest  {digest}")?;
        }
        for signature in &self.signatures {
            writeln!(out, "signature {}", signature.text())?;
        }
        self.config.as_ref().map_or(Ok(()), |config| write_config(config, out))
    }
}

impl ShownFileReport {
    /// Prints the details of the file system for people.
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let kind = if self.composefs { "composefs" } else { "EROFS" };
        writeln!(out, "file      {kind}, blocks of {} bytes", self.block_bytes.0)?;
        if !self.compression.is_empty() {
            writeln!(out, "packed    {}", self.compression.join(", "))?;
        }
        Ok(())
    }
}

/// Prints the configuration of an image.
fn write_config(config: &Value, out: &mut dyn Write) -> io::Result<()> {
    for (label, value) in [
        ("platform", format!("{}/{}", text(&config["os"]), text(&config["architecture"]))),
        ("created", text(&config["created"])),
        ("entrypoint", text(&config["config"]["Entrypoint"])),
        ("command", text(&config["config"]["Cmd"])),
        ("user", text(&config["config"]["User"])),
        ("directory", text(&config["config"]["WorkingDir"])),
    ] {
        if !value.is_empty() {
            writeln!(out, "{label:<9} {value}")?;
        }
    }
    for variable in config["config"]["Env"].as_array().into_iter().flatten() {
        writeln!(out, "env       {}", text(variable))?;
    }
    for (name, value) in config["config"]["Labels"].as_object().into_iter().flatten() {
        let name = text(&Value::String(name.clone()));
        writeln!(out, "label     {name}={}", text(value))?;
    }
    for diff_id in config["rootfs"]["diff_ids"].as_array().into_iter().flatten() {
        writeln!(out, "layer     {}", text(diff_id))?;
    }
    Ok(())
}

/// Formats a JSON value for people: strings without quotes, lists as JSON, and null as an empty string.
fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => report::plain(&text.escape_debug().to_string()).into_owned(),
        // JSON escapes control characters, but not other invisible characters.
        other => report::plain(&other.to_string()).into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Directional formatting characters make a terminal show the following text in another order. Source: Unicode
    /// Standard Annex #9, "Directional Formatting Characters".
    #[test]
    fn what_an_image_says_steers_no_terminal() {
        let hidden = [
            '\u{1b}',
            '\u{9b}',
            '\u{61c}',
            '\u{200b}',
            '\u{200e}',
            '\u{200f}',
            '\u{202a}',
            '\u{202b}',
            '\u{202c}',
            '\u{202d}',
            '\u{202e}',
            '\u{2028}',
            '\u{2066}',
            '\u{2067}',
            '\u{2068}',
            '\u{2069}',
            '\u{feff}',
            '\u{e0041}',
        ];
        for it in hidden {
            let word = format!("a{it}b");
            let config = serde_json::json!({
                "os": word, "architecture": word, "created": word, "rootfs": {"diff_ids": [word]},
                "config": {
                    "Entrypoint": [word], "Cmd": [word], "User": word, "WorkingDir": word, "Env": [word],
                    "Labels": {word.clone(): word},
                },
            });
            let mut shown = Vec::new();
            write_config(&config, &mut shown).unwrap();
            let shown = String::from_utf8(shown).unwrap();
            assert!(shown.lines().count() >= 8, "{shown}");
            assert!(!shown.chars().any(|it| it != '\n' && report::is_unseen(it)), "{shown:?}");
        }
    }
}
