//! `show`: prints the details of an image.

use std::io::{self, Write};

use clap::Args;
use serde::Serialize;
use serde_json::Value;
use store::Form;
use transfer::{StoredError, StoredImage};

use crate::Answer;
use crate::output::report::{self, Bytes};
use crate::session::context::Context;
use crate::session::target::read_names;
use crate::verbs::VerbArgs;
use crate::verbs::images::images::tell_bad;

#[derive(Debug, Args)]
pub(crate) struct Show {
    /// A name, an image id or its first digits (6 or more)
    pub(crate) name: String,
}

impl VerbArgs for Show {
    const NAME: &'static str = "show";
    const ABOUT: &'static str = "Show the details of an image";
    const EXAMPLES: &'static str = "quire show debian\n  quire show --json debian";
    const ALIAS: Option<&'static str> = Some("inspect");

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        show(context, self)
    }
}

/// Report of `show --json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct ShowReport {
    /// Image id.
    image: String,
    /// Names of the image.
    names: Vec<String>,
    /// `objects`, `packed` or `tar`.
    #[cfg_attr(test, schemars(with = "String"))]
    form: Form,
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
}

pub(crate) fn show(context: &Context, args: &Show) -> anyhow::Result<Answer> {
    let store = context.open_with(&args.name)?;
    let found = crate::session::resolve::resolve(&store, &args.name)?;
    let opened = store.open_names(&found.image)?;
    let tree = read_names(&store, &opened)?;
    let (refs, bad) = store.refs.readable()?;
    tell_bad(&bad);
    // A damaged name may belong to this image.
    let answer = if bad.is_empty() { Answer::Yes } else { Answer::No };
    let refs = refs.into_iter().filter(|(_, it)| it.image == found.image);
    let names: Vec<_> = refs.map(|(name, _)| name.to_string()).collect();
    let stored = match found.manifest.map(|it| StoredImage::load(&store, &it)) {
        // `fsck` reports missing documents.
        None | Some(Err(StoredError::Absent { .. })) => None,
        Some(stored) => Some(stored?),
    };
    let manifest = stored.as_ref().map(StoredImage::manifest_json).transpose()?;
    let config = stored.as_ref().map(StoredImage::config_json).transpose()?;
    let bytes = tree.files().map(|(_, content)| content.size()).sum();
    let report = ShowReport {
        image: found.image.to_string(),
        names,
        form: opened.form,
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
    };
    report::print(context.json, &report, ShowReport::write)?;
    Ok(answer)
}

impl ShowReport {
    /// Prints the report for people.
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "image     {}", self.image)?;
        writeln!(out, "names     {}", self.names.join(" "))?;
        writeln!(
            out,
            "files     {}, {} of content, image of {}",
            report::count(self.inodes, "inode"),
            report::size(self.file_bytes.0),
            report::size(self.image_bytes.0)
        )?;
        match self.devices.len() {
            0 => writeln!(out, "form      {}", self.form)?,
            many => {
                let (devices, size) =
                    (report::count(many, "device"), report::size(self.data_bytes.0));
                writeln!(out, "form      {}, in {devices} of {size}", self.form)?;
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
        self.config.as_ref().map_or(Ok(()), |config| write_config(config, out))
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
