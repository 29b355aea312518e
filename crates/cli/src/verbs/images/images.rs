//! `images` and `show`.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::rc::Rc;

use anyhow::Context as _;
use clap::Args;
use image::erofs::read::{Cached, FileType, Image};
use image::verity::ImageId;
use serde::Serialize;
use serde_json::Value;
use store::{BadRef, Form, OpenOptions, RefError, RefName, Reference, Store};
use transfer::{StoredError, StoredImage};

use crate::Answer;
use crate::output::report::{self, Bytes, Time, short};
use crate::session::context::{Context, now};
use crate::session::target::read_names;
use crate::verbs::VerbArgs;

#[derive(Debug, Args)]
pub(crate) struct Images {
    /// List all names, which is the default; `quire du` lists images without names too
    #[arg(short, long)]
    pub(crate) all: bool,
    /// Also show the digests of manifests
    #[arg(long)]
    pub(crate) digests: bool,
    /// Print ids only, each once
    #[arg(short = 'q')]
    pub(crate) ids: bool,
}

impl VerbArgs for Images {
    const NAME: &'static str = "images";
    const ABOUT: &'static str = "List images";
    const EXAMPLES: &'static str = "quire images\n  quire images --digests";
    const ALIAS: Option<&'static str> = Some("list");

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        list(context, self)
    }
}

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

/// Names of this user's own store, and of those that others share, with their stores.
pub(crate) type NamesOfAll = BTreeMap<RefName, (Reference, Rc<Store>)>;

/// All names, and those that cannot be read.
pub(crate) fn all_names(context: &Context) -> anyhow::Result<(NamesOfAll, Vec<BadRef>)> {
    let own = context.open_for(OpenOptions::read(), true)?;
    let (mut refs, mut bad) = (BTreeMap::new(), Vec::new());
    for store in own.into_iter().chain(context.open_shared()).map(Rc::new) {
        let (sound, damaged) = store.refs.readable()?;
        // A name of the own store, or of one before, hides those of later ones.
        for (name, reference) in sound {
            refs.entry(name).or_insert_with(|| (reference, Rc::clone(&store)));
        }
        bad.extend(damaged);
    }
    Ok((refs, bad))
}

pub(crate) fn list(context: &Context, args: &Images) -> anyhow::Result<Answer> {
    let (refs, bad) = all_names(context)?;
    let mut answer = if bad.is_empty() { Answer::Yes } else { Answer::No };
    tell_bad(&bad);
    if args.ids || context.quiet {
        let ids: BTreeSet<_> = refs.values().map(|(it, _)| short(&it.image)).collect();
        let printed = report::lines(ids.iter().map(String::as_str));
        return report::answer(answer, printed.map(drop));
    }
    let mut sizes = BTreeMap::new();
    let mut rows = Vec::new();
    for (name, (reference, store)) in &refs {
        let bytes = match sizes.get(&reference.image) {
            Some(bytes) => *bytes,
            None => {
                let read = content_of(store, &reference.image);
                if let Err(error) = &read {
                    // `fsck` tells whether it is damaged.
                    report::error_line(&format!(
                        "quire: cannot tell the size of {name}: {error:#}"
                    ));
                    answer = Answer::No;
                }
                *sizes.entry(reference.image).or_insert(read.ok())
            }
        };
        rows.push(NameReport::Sound(SoundNameReport {
            name: name.to_string(),
            image: reference.image.to_string(),
            manifest: reference.manifest.map(|it| it.to_string()),
            form: reference.form,
            file_bytes: bytes.map(Bytes),
            created: Time(reference.created.0),
            image_created: made(store, reference).map(Time),
            shared: (!store.is_own()).then(|| store.path().display().to_string()),
        }));
    }
    let rows: Vec<_> = rows.into_iter().chain(bad.iter().map(NameReport::damaged)).collect();
    let printed = report::print(context.json, &rows, |rows, out| write_list(args, rows, out));
    report::answer(answer, printed)
}

/// Report of `images --json` on a name.
#[derive(Serialize)]
#[serde(untagged)]
enum NameReport {
    Sound(SoundNameReport),
    Damaged(DamagedNameReport),
}

/// A name that leads to an image.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct SoundNameReport {
    /// The name.
    name: String,
    /// Image id.
    image: String,
    /// Digest of the manifest. Null if the image came without one.
    manifest: Option<String>,
    /// `objects`, `packed` or `tar`.
    #[cfg_attr(test, schemars(with = "String"))]
    form: Form,
    /// Lengths of all files, each counted once. Null if the image cannot be read.
    file_bytes: Option<Bytes>,
    /// Time of the import, as RFC 3339 has it.
    created: Time,
    /// Time at which the image was made, as its configuration says. Null if it does not say.
    image_created: Option<Time>,
    /// Directory of the store that others share. Null if the name is of this user's own store.
    shared: Option<String>,
}

/// A name whose file is damaged.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct DamagedNameReport {
    /// The name.
    name: String,
    /// Description of the damage.
    damage: String,
}

impl NameReport {
    fn damaged(bad: &BadRef) -> Self {
        let damage = report::chain(&bad.error);
        Self::Damaged(DamagedNameReport { name: bad.name.to_string(), damage })
    }
}

/// For people, who are told of damaged names otherwise.
fn write_list(args: &Images, rows: &[NameReport], out: &mut dyn Write) -> io::Result<()> {
    let now = now().0;
    let is_shared = |it: &NameReport| matches!(it, NameReport::Sound(row) if row.shared.is_some());
    let has_shared = rows.iter().any(is_shared);
    let cells = |row: &SoundNameReport| {
        let made = row.image_created.unwrap_or(row.created).0;
        let mut cells = vec![row.name.clone(), short(&row.image)];
        if args.digests {
            cells.push(row.manifest.clone().unwrap_or_else(|| "-".to_owned()));
        }
        if has_shared {
            cells.push(row.shared.clone().unwrap_or_default());
        }
        cells.push(report::ago(now.saturating_sub(made)));
        cells.push(row.file_bytes.map_or_else(|| "?".to_owned(), |it| report::size(it.0)));
        cells
    };
    let sound = rows.iter().filter_map(|it| match it {
        NameReport::Sound(row) => Some(cells(row)),
        NameReport::Damaged(_) => None,
    });
    let mut titles = vec!["NAME", "IMAGE"];
    titles.extend(args.digests.then_some("DIGEST"));
    titles.extend(has_shared.then_some("SHARED"));
    titles.extend(["CREATED", "SIZE"]);
    report::table(out, &titles, &sound.collect::<Vec<_>>(), &[titles.len() - 1])
}

/// When an image was made, as its config says.
fn made(store: &Store, reference: &Reference) -> Option<i64> {
    let stored = StoredImage::load(store, &reference.manifest?).ok()?;
    report::seconds(stored.config_json().ok()?["created"].as_str()?)
}

/// The lengths of all regular files of an image, each inode once.
pub(crate) fn content_of(store: &Store, id: &ImageId) -> anyhow::Result<u64> {
    let opened = store.open_names(id)?;
    let failed = || format!("cannot read image {id}");
    let image = Image::open(Cached::new(&opened.image)).with_context(failed)?;
    let (mut walk, mut bytes) = (image.walk(), 0_u64);
    while let Some(step) = walk.next().with_context(failed)? {
        if step.is_new && step.inode.file_type() == FileType::Regular {
            bytes = bytes.saturating_add(step.inode.size());
        }
    }
    Ok(bytes)
}

/// Reports names that cannot be read, even with `--quiet`.
fn tell_bad(bad: &[BadRef]) {
    for BadRef { name, error } in bad {
        let text = report::chain(error);
        // A disk that fails now may not fail the next time.
        let hint = match error {
            RefError::Disk(_) => String::new(),
            _ => format!("; `quire rmi {name}` removes the name"),
        };
        report::error_line(&format!("quire: {text}{hint}"));
    }
}

/// Report of `show --json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct ShowReport {
    /// Image id.
    image: String,
    /// Its names.
    names: Vec<String>,
    /// `objects`, `packed` or `tar`.
    #[cfg_attr(test, schemars(with = "String"))]
    form: Form,
    /// Ids of the devices that have its data.
    devices: Vec<String>,
    /// Size of these.
    data_bytes: Bytes,
    /// Size of the EROFS image.
    image_bytes: Bytes,
    /// Inodes in the image.
    inodes: usize,
    /// Lengths of all files, each counted once.
    file_bytes: Bytes,
    /// Whether the kernel checks the image file when it is read.
    kernel_verity: bool,
    /// Whether it came with an index, and was not compared with its layers yet.
    unproven: bool,
    /// Digest of the manifest. Null if the image came without one.
    manifest_digest: Option<String>,
    /// The manifest itself, as OCI defines it. Null if the image came without one.
    manifest: Option<Value>,
    /// The configuration itself, as OCI defines it. Null if the image came without one.
    config: Option<Value>,
}

pub(crate) fn show(context: &Context, args: &Show) -> anyhow::Result<Answer> {
    let store = context.open_with(&args.name)?;
    let found = crate::session::resolve::resolve(&store, &args.name)?;
    let opened = store.open_names(&found.image)?;
    let tree = read_names(&store, &opened)?;
    let (refs, bad) = store.refs.readable()?;
    tell_bad(&bad);
    // One of them may be a name of this image.
    let answer = if bad.is_empty() { Answer::Yes } else { Answer::No };
    let refs = refs.into_iter().filter(|(_, it)| it.image == found.image);
    let names: Vec<_> = refs.map(|(name, _)| name.to_string()).collect();
    let stored = match found.manifest.map(|it| StoredImage::load(&store, &it)) {
        // `fsck` tells what is missing.
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
    /// For people.
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
            (true, _) => "not yet: it came with an index, and was not compared with its layers",
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

/// What an image says of itself.
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

/// A JSON value as a person would write it: strings bare, lists as JSON, nothing for null.
fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => report::plain(&text.escape_debug().to_string()).into_owned(),
        // JSON escapes control characters, and no others.
        other => report::plain(&other.to_string()).into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Unicode Standard Annex #9, "Directional Formatting Characters": a terminal shows what follows in another order.
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
