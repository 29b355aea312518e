//! `verify` and `fsck`: is every byte what its name says?

use std::io::Write as _;

use serde_json::{Value, json};
use store::{Damage, FsckOptions, FsckReport, Harm, OpenOptions};

use crate::Answer;
use crate::args;
use crate::context::Context;
use crate::{describe, report};

fn options() -> FsckOptions {
    FsckOptions { threads: std::thread::available_parallelism().map_or(1, std::num::NonZero::get) }
}

pub(crate) fn verify(context: &Context, args: &args::Verify) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::read())?;
    let images = if args.names.is_empty() {
        store.images()?
    } else {
        let named = args.names.iter().map(|name| Ok(store.resolve(name)?.image));
        named.collect::<anyhow::Result<Vec<_>>>()?
    };
    let mut whole = FsckReport::default();
    for image in &images {
        let mut found = store.verify(image, options())?;
        whole.checked += found.checked;
        whole.bytes += found.bytes;
        found.damage.retain(|it| !whole.damage.contains(it));
        whole.damage.append(&mut found.damage);
    }
    tell(context, &whole)
}

pub(crate) fn fsck(context: &Context, args: &args::Fsck) -> anyhow::Result<Answer> {
    let open = if args.repair { OpenOptions::write() } else { OpenOptions::read() };
    let store = context.open(open)?;
    let report = store.fsck(options())?;
    let answer = tell(context, &report)?;
    if args.repair && !report.is_sound() {
        let removed = store.remove_damaged(&report)?;
        context.remark(&format!(
            "{removed} damaged files removed: import the images that they hurt again"
        ));
    }
    Ok(answer)
}

fn tell(context: &Context, found: &FsckReport) -> anyhow::Result<Answer> {
    let answer = if found.is_sound() { Answer::Yes } else { Answer::No };
    if context.json {
        let damage = found.damage.iter().map(|(damage, harms)| {
            json!({"damage": words(damage), "harms": harms.iter().map(harm_json).collect::<Vec<_>>()})
        });
        report::json(&json!({
            "sound": found.is_sound(),
            "checked": found.checked,
            "bytes": found.bytes,
            "damage": damage.collect::<Vec<Value>>(),
        }))?;
        return Ok(answer);
    }
    let mut out = report::standard_output();
    for (damage, harms) in &found.damage {
        writeln!(out, "{}", words(damage))?;
        for harm in harms {
            let names: Vec<_> = harm.refs.iter().map(ToString::to_string).collect();
            let name = if names.is_empty() { harm.image.to_string() } else { names.join(" ") };
            match &harm.paths[..] {
                [] => writeln!(out, "  hurts all of {name}")?,
                paths => {
                    let paths: Vec<_> = paths.iter().map(|path| describe::name(path)).collect();
                    writeln!(out, "  hurts {name}: {}", paths.join(" "))?;
                }
            }
        }
    }
    let bytes = report::size(found.bytes);
    match found.damage.len() {
        0 => writeln!(out, "sound: {} files, {bytes} read", found.checked)?,
        many => {
            writeln!(out, "{many} damaged of {} files, {bytes} read", found.checked)?;
            writeln!(
                out,
                "`quire fsck --repair` removes what is damaged; then import the images that it hurts again"
            )?;
        }
    }
    out.flush()?;
    Ok(answer)
}

fn harm_json(harm: &Harm) -> Value {
    json!({
        "image": harm.image.to_string(),
        "names": harm.refs.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "paths": harm.paths.iter().map(|it| it.escape_ascii().to_string()).collect::<Vec<_>>(),
    })
}

fn words(damage: &Damage) -> String {
    match damage {
        Damage::Object { expected, actual, size } => {
            format!("object {expected} is damaged: its {size} bytes are those of {actual}")
        }
        Damage::Missing(object) => format!("object {object} is missing"),
        Damage::Image { expected, actual } => {
            format!("image {expected} is damaged: its bytes are those of {actual}")
        }
        Damage::Layer(id, reason) => format!("layer {id} is damaged: {reason}"),
        Damage::Manifest(id, reason) => format!("manifest {id} is damaged: {reason}"),
        Damage::Ref(name, reason) => format!("name {name} is damaged: {reason}"),
        Damage::Stray(path) => format!("{path} has no place in a store"),
        other => format!("{other:?}"),
    }
}
