//! `images` and `show`.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;

use image::tree::{Node, Tree};
use serde_json::{Value, json};
use store::{BadRef, Digest, OpenOptions, RefError, RefName, Reference, Store};

use crate::Answer;
use crate::args;
use crate::context::Context;
use crate::du::short;
use crate::report;
use crate::target::read;

pub(crate) fn list(context: &Context, args: &args::Images) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::read())?;
    let (refs, bad) = store.readable_refs()?;
    let answer = if bad.is_empty() { Answer::Yes } else { Answer::No };
    if args.ids || context.quiet {
        tell_bad(&bad);
        let ids: BTreeSet<_> = refs.values().map(|it| short(&it.image)).collect();
        let printed = report::lines(ids.iter().map(String::as_str));
        return report::answer(answer, printed.map(drop));
    }
    report::answer(answer, print_list(context, &refs, &bad))
}

fn print_list(
    context: &Context,
    refs: &BTreeMap<RefName, Reference>,
    bad: &[BadRef],
) -> anyhow::Result<()> {
    tell_bad(bad);
    if context.json {
        let all = refs.iter().map(|(name, it)| reference_json(name.as_str(), it));
        let bad = bad
            .iter()
            .map(|it| json!({"name": it.name.to_string(), "damage": report::chain(&it.error)}));
        return report::json(&all.chain(bad).collect::<Vec<Value>>());
    }
    let rows: Vec<_> = refs
        .iter()
        .map(|(name, it)| vec![name.to_string(), short(&it.image), report::time(it.created.0)])
        .collect();
    let mut out = report::standard_output();
    report::table(&mut out, &["NAME", "IMAGE", "CREATED"], &rows, &[])?;
    out.flush()?;
    Ok(())
}

/// Names that nobody can read are an answer too, however little is said otherwise.
fn tell_bad(bad: &[BadRef]) {
    for BadRef { name, error } in bad {
        let text = report::chain(error);
        // A disk that fails now may not fail the next time.
        let hint = match error {
            RefError::Disk(_) => String::new(),
            _ => format!("; `quire rm {name}` removes the name"),
        };
        report::error_line(&format!("quire: {text}{hint}"));
    }
}

fn reference_json(name: &str, reference: &Reference) -> Value {
    json!({
        "name": name,
        "image": reference.image.to_string(),
        "manifest": reference.manifest.map(|it| it.to_string()),
        "form": reference.form,
        "created": report::rfc3339(reference.created.0),
    })
}

pub(crate) fn show(context: &Context, args: &args::Show) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::read())?;
    let found = crate::names::resolve(&store, &args.name)?;
    let opened = store.open_image(&found.image)?;
    let tree = read(&store, &opened)?;
    let (refs, bad) = store.readable_refs()?;
    tell_bad(&bad);
    // One of them may be a name of this image.
    let answer = if bad.is_empty() { Answer::Yes } else { Answer::No };
    let refs = refs.into_iter().filter(|(_, it)| it.image == found.image);
    let names: Vec<_> = refs.map(|(name, _)| name.to_string()).collect();
    let manifest = match found.manifest {
        Some(digest) => load(&store, &digest)?,
        None => None,
    };
    let config = match manifest.as_ref().and_then(|it| it["config"]["digest"].as_str()) {
        Some(digest) => load(&store, &digest.parse()?)?,
        None => None,
    };
    let bytes = content_bytes(&tree);
    if context.json {
        report::json(&json!({
            "image": found.image.to_string(),
            "names": names,
            "form": opened.form,
            "dataBlobs": opened.devices.iter().map(|it| it.id.to_string()).collect::<Vec<_>>(),
            "imageBytes": opened.image.size(),
            "inodes": tree.inode_count(),
            "fileBytes": bytes,
            "kernelVerity": opened.kernel_verity,
            "manifestDigest": found.manifest.map(|it| it.to_string()),
            "manifest": manifest,
            "config": config,
        }))?;
        return Ok(answer);
    }
    let mut out = report::standard_output();
    writeln!(out, "image     {}", found.image)?;
    writeln!(out, "names     {}", names.join(" "))?;
    writeln!(
        out,
        "files     {} inodes, {} of content, image of {}",
        tree.inode_count(),
        report::size(bytes),
        report::size(opened.image.size())
    )?;
    match opened.devices.as_slice() {
        [] => writeln!(out, "form      {}", crate::forms::word(opened.form))?,
        devices => {
            let bytes = devices.iter().map(|it| it.bytes).sum();
            let (word, size) = (crate::forms::word(opened.form), report::size(bytes));
            writeln!(out, "form      {word}, in {} data blobs of {size}", devices.len())?;
        }
    }
    let checked = if opened.kernel_verity { "by the kernel" } else { "at import" };
    writeln!(out, "verified  {checked}")?;
    if let Some(digest) = found.manifest {
        writeln!(out, "manifest  {digest}")?;
    }
    if let Some(config) = &config {
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
            writeln!(out, "label     {}={}", name.escape_debug(), text(value))?;
        }
        for diff_id in config["rootfs"]["diff_ids"].as_array().into_iter().flatten() {
            writeln!(out, "layer     {}", text(diff_id))?;
        }
    }
    out.flush()?;
    Ok(answer)
}

/// The lengths of all regular files, each inode once.
fn content_bytes(tree: &Tree) -> u64 {
    let mut walk = tree.walk();
    let mut bytes = 0;
    while let Some((_, entry)) = walk.next() {
        if let (true, Node::Regular(content)) = (entry.is_owner, entry.inode.node()) {
            bytes += content.size();
        }
    }
    bytes
}

/// A manifest or config of the store as JSON.
fn load(store: &Store, digest: &Digest) -> anyhow::Result<Option<Value>> {
    let bytes = store.manifest(digest)?;
    Ok(bytes.map(|bytes| serde_json::from_slice(&bytes)).transpose()?)
}

/// A JSON value as a person would write it: strings bare, lists as JSON, nothing for null.
fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.escape_debug().to_string(),
        other => other.to_string(),
    }
}
