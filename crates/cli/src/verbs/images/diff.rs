//! `diff`: shows the differences between two images, or between a container and its image.

use std::ffi::OsString;
use std::io::{self, Write};

use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};
use image::diff::{Attribute, Bytes, Change, Difference};
use image::tree::{Timestamp, Tree, components};
use serde::Serialize;
use store::OpenOptions;

use crate::Answer;
use crate::output::report::{self, FileName};
use crate::session::context::Context;
use crate::session::target::{Target, split};
use crate::verbs::VerbArgs;
use crate::verbs::containers::ps::filtered;
use crate::verbs::images::file_listing;

#[derive(Debug, Args)]
pub(crate) struct Diff {
    // This is not a doc comment, because rustdoc would parse the brackets as links.
    #[arg(
        help = "NAME[:/PATH], erofs:FILE[:/PATH], disk:FILE[:/PATH], or the path of an image file; CONTAINER[:/PATH] without another side",
        required_unless_present = "latest"
    )]
    pub(crate) old: Option<OsString>,
    /// The other side, in the same form; without it, a container is compared with its image
    pub(crate) new: Option<OsString>,
    /// Do not freeze a running container; a file that changes during the comparison is an error
    #[arg(long, conflicts_with = "new")]
    pub(crate) no_pause: bool,
    /// Compare the container that was made last
    #[arg(short, long, conflicts_with_all = ["old", "new"])]
    pub(crate) latest: bool,
    /// Print lists of paths in podman's JSON, and exit with 0 even if there are differences
    #[arg(long, value_enum, conflicts_with = "json")]
    pub(crate) format: Option<DiffFormat>,
}

/// Value of `--format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DiffFormat {
    /// The object of podman: `changed`, `added` and `deleted`
    Json,
}

impl VerbArgs for Diff {
    const NAME: &'static str = "diff";
    const ABOUT: &'static str = "Compare two images, or a container with its image";
    const EXAMPLES: &'static str = "quire diff debian:12 debian:13\n  quire diff web";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        diff(context, self)
    }
}

pub(crate) fn diff(context: &Context, args: &Diff) -> anyhow::Result<Answer> {
    let old = match &args.old {
        Some(old) => old.clone(),
        None => latest(context)?.into(),
    };
    let Some(new) = &args.new else {
        let (name, path) = split(&old);
        let (old, new) = crate::verbs::containers::changes::preview(context, name, args.no_pause)?;
        let path: Vec<&[u8]> = components(path).collect();
        return compare(context, args, [&old, &new], &path);
    };
    let old = Target::open(context, &old)?;
    let new = Target::open(context, new)?;
    let path: Vec<&[u8]> = components(&old.path).collect();
    if !components(&new.path).eq(path.iter().copied()) {
        bail!(
            "diff compares the same path in two images, but \"{}\" and \"{}\" differ",
            old.text,
            new.text
        );
    }
    compare(context, args, [&old.tree, &new.tree], &path)
}

/// Returns the id of the container that was made last.
fn latest(context: &Context) -> anyhow::Result<String> {
    let store = context.open_for(OpenOptions::read(), true)?;
    let last = store.map(|it| filtered(&it, &[])).transpose()?.and_then(|mut all| all.pop());
    last.map(|it| it.id).context("--latest: there is no container")
}

/// Shows the differences of two trees, the old one and the new one, at and below a path.
fn compare(
    context: &Context,
    args: &Diff,
    [old, new]: [&Tree; 2],
    path: &[&[u8]],
) -> anyhow::Result<Answer> {
    let whole = path.join(&b'/');
    if old.resolve(&whole).is_none() && new.resolve(&whole).is_none() {
        bail!(
            "neither image has \"/{}\" (diff does not follow links in the path)",
            whole.escape_ascii()
        );
    }
    let mut found = Vec::new();
    image::diff::diff(old, new, |it| {
        if components(&it.path).take(path.len()).eq(path.iter().copied()) {
            found.push(it);
        }
    });
    if args.format.is_some() {
        report::json(&PathLists::of(&found, new))?;
        return Ok(Answer::Yes);
    }
    let answer = if found.is_empty() { Answer::Yes } else { Answer::No };
    let found: Vec<_> = found.iter().map(DifferenceReport::from_difference).collect();
    let printed = report::print(context.json, &found, |found, out| {
        found.iter().try_for_each(|it| it.write(out))
    });
    report::answer(answer, printed)
}

/// The object of `--format json`. Source: podman-diff(1).
#[derive(Debug, Default, Serialize)]
struct PathLists {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    changed: Vec<FileName>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    added: Vec<FileName>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    deleted: Vec<FileName>,
}

impl PathLists {
    /// As in podman, the files of an added directory are listed, and not those of a removed one.
    fn of(found: &[Difference<'_>], new: &Tree) -> Self {
        let mut lists = Self::default();
        // As in podman, the root is in no list.
        for it in found.iter().filter(|it| !matches!(&*it.path, b"" | b"/")) {
            let list = match it.change {
                Change::Changed(_) => &mut lists.changed,
                Change::Added => {
                    add_below(new, &it.path, &mut lists.added);
                    &mut lists.added
                }
                Change::Removed => &mut lists.deleted,
            };
            list.push(FileName(it.path.clone()));
        }
        lists.added.sort_unstable_by(|one, other| one.0.cmp(&other.0));
        lists
    }
}

/// Adds the paths of all files below a directory.
fn add_below(tree: &Tree, path: &[u8], list: &mut Vec<FileName>) {
    let mut open: Vec<_> = tree.resolve(path).map(|it| (path.to_vec(), it)).into_iter().collect();
    while let Some((path, inode)) = open.pop() {
        if !inode.is_directory() {
            continue;
        }
        for entry in inode.children() {
            let below = [&path, &b"/"[..], entry.name].concat();
            list.push(FileName(below.clone()));
            open.push((below, entry.inode));
        }
    }
}

/// A difference as `diff --json` prints it.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct DifferenceReport {
    /// Path in both images. Bytes other than printable ASCII are `\xHH`.
    path: FileName,
    /// `removed`, `added` or `changed`.
    change: &'static str,
    /// Attributes that changed. Absent unless `change` is `changed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    attributes: Option<Vec<AttributeReport>>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct AttributeReport {
    /// `type`, `mode`, `uid`, `gid`, `mtime`, `links`, `hard link to`, `size`, `content`, `target`, `device` or
    /// `xattr NAME`.
    attribute: String,
    /// Value in the old image. Null if it has none.
    old: Option<String>,
    /// Value in the new image. Null if it has none.
    new: Option<String>,
}

impl DifferenceReport {
    fn from_difference(difference: &Difference<'_>) -> Self {
        let (change, attributes) = match &difference.change {
            Change::Removed => ("removed", None),
            Change::Added => ("added", None),
            Change::Changed(attributes) => {
                let attributes = attributes.iter().map(|attribute| {
                    let (attribute, old, new) = words(attribute);
                    AttributeReport { attribute, old, new }
                });
                ("changed", Some(attributes.collect()))
            }
        };
        Self { path: FileName(difference.path.clone()), change, attributes }
    }

    /// Prints the difference for people.
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let sign = match self.change {
            "removed" => '-',
            "added" => '+',
            _ => '~',
        };
        writeln!(out, "{sign} {}", file_listing::name(&self.path.0))?;
        for AttributeReport { attribute, old, new } in self.attributes.iter().flatten() {
            let show = |it: &Option<String>| it.clone().unwrap_or_else(|| "none".to_owned());
            writeln!(out, "    {attribute}: {} -> {}", show(old), show(new))?;
        }
        Ok(())
    }
}

/// Returns the attribute's name and its two values.
fn words(attribute: &Attribute<'_>) -> (String, Option<String>, Option<String>) {
    let escaped = |bytes: &[u8]| bytes.escape_ascii().to_string();
    let named = |name: &str, old: String, new: String| (name.to_owned(), Some(old), Some(new));
    match attribute {
        Attribute::Type(old, new) => named(
            "type",
            file_listing::type_name(*old).into(),
            file_listing::type_name(*new).into(),
        ),
        Attribute::Permissions(old, new) => {
            named("mode", format!("{old:04o}"), format!("{new:04o}"))
        }
        Attribute::Uid(old, new) => named("uid", old.to_string(), new.to_string()),
        Attribute::Gid(old, new) => named("gid", old.to_string(), new.to_string()),
        Attribute::Mtime(old, new) => named("mtime", moment(*old), moment(*new)),
        Attribute::Nlink(old, new) => named("links", old.to_string(), new.to_string()),
        Attribute::LinkTo(old, new) => {
            let path = |it: &Option<Vec<u8>>| it.as_ref().map(|path| escaped(path));
            ("hard link to".to_owned(), path(old), path(new))
        }
        Attribute::Size(old, new) => named("size", old.to_string(), new.to_string()),
        Attribute::Bytes(old, new) => named("content", content(*old), content(*new)),
        Attribute::Target(old, new) => named("target", escaped(old), escaped(new)),
        Attribute::Device(old, new) => named("device", device(*old), device(*new)),
        Attribute::Xattr(name, old, new) => {
            (format!("xattr {}", name.escape_ascii()), old.map(escaped), new.map(escaped))
        }
    }
}

fn moment(time: Timestamp) -> String {
    format!("{}.{:09} ({})", time.seconds, time.nanoseconds, report::time(time.seconds))
}

fn device(number: u64) -> String {
    format!("{}, {}", rustix::fs::major(number), rustix::fs::minor(number))
}

fn content(bytes: Bytes<'_>) -> String {
    match bytes {
        Bytes::Inline(bytes) => format!("\"{}\"", bytes.escape_ascii()),
        Bytes::Object(object) => object.to_string(),
        Bytes::Unknown => "unknown".to_owned(),
    }
}
