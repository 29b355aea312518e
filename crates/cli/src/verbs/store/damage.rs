//! Reports of `verify` and `fsck` on damage.

use std::io::{self, Write};

use image::verity::VerityDigest;
use serde::Serialize;
use store::{BlobFile, Damage, FsckOptions, FsckReport, Harm, StoreItem};

use crate::Answer;
use crate::output::report::{self, Bytes, FileName};
use crate::session::context::Context;
use crate::verbs::images::file_listing;
use crate::verbs::store::heal::EngineUses;

/// Maximum number of exposed files in the output for people. JSON has all of them.
const EXPOSED_MAX: usize = 20;

pub(crate) fn options() -> FsckOptions {
    FsckOptions { threads: std::thread::available_parallelism().map_or(1, std::num::NonZero::get) }
}

pub(crate) const WAY_OUT: &str = "`quire fsck --repair` removes the damage, and fetches the data \
    of images from registries again; import the other images again";

pub(crate) fn tell(
    context: &Context,
    found: &FsckReport,
    engines: &EngineUses,
    way_out: &str,
) -> anyhow::Result<Answer> {
    let answer = if found.is_sound() { Answer::Yes } else { Answer::No };
    let report = CheckReport::from_fsck(found, engines);
    let printed = report::print(context.json, &report, |it, out| it.write(way_out, out));
    report::answer(answer, printed)
}

/// Report of `verify --json` and `fsck --json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct CheckReport {
    /// Whether the check found no damage.
    sound: bool,
    /// Number of files that were checked.
    checked: u64,
    /// Number of bytes that were read.
    bytes: Bytes,
    /// All damage that was found.
    damage: Vec<DamageReport>,
    /// Layers that can no longer be exported.
    hurt_layers: Vec<HurtLayerReport>,
    /// Paths that other users can change, with the reason.
    exposed: Vec<String>,
}

impl CheckReport {
    fn from_fsck(found: &FsckReport, engines: &EngineUses) -> Self {
        let damage = found.damage.iter().map(|(damage, harms)| DamageReport {
            finding: finding(damage),
            text: words(damage),
            harms: harms.iter().map(|it| HarmReport::from_harm(it, engines)).collect(),
        });
        let layers = found.hurt_layers.iter().map(|(layer, objects)| HurtLayerReport {
            layer: layer.to_string(),
            objects: report::texts(objects),
            engines: engines.of_layer(layer),
        });
        Self {
            sound: found.is_sound(),
            checked: found.checked,
            bytes: Bytes(found.bytes),
            damage: damage.collect(),
            hurt_layers: layers.collect(),
            exposed: report::texts(&found.exposed),
        }
    }

    /// Prints the report for people, with advice about damage.
    fn write(&self, way_out: &str, out: &mut dyn Write) -> io::Result<()> {
        for DamageReport { text, harms, finding } in &self.damage {
            writeln!(out, "{text}")?;
            let hurts = if finding.problem == "incomplete" { "belongs to" } else { "affects" };
            for harm in harms {
                let names = harm.names.join(" ");
                let name = if names.is_empty() { &harm.image } else { &names };
                let name = format!("{name}{}", by_engines(&harm.engines));
                match &harm.paths[..] {
                    [] if hurts == "affects" => writeln!(out, "  affects all of {name}")?,
                    [] => writeln!(out, "  {hurts} {name}")?,
                    paths => {
                        let paths: Vec<_> =
                            paths.iter().map(|it| file_listing::name(&it.0)).collect();
                        writeln!(out, "  {hurts} {name}: {}", paths.join(" "))?;
                    }
                }
            }
        }
        for HurtLayerReport { layer, objects, engines } in &self.hurt_layers {
            let which = match objects.len() {
                1 => "one of its objects is".to_owned(),
                many => format!("{many} of its objects are"),
            };
            let engines = by_engines(engines);
            writeln!(out, "layer {layer}{engines} cannot be rebuilt: {which} damaged or missing")?;
        }
        for exposure in self.exposed.iter().take(EXPOSED_MAX) {
            writeln!(out, "exposed: {exposure}")?;
        }
        if let Some(more @ 1..) = self.exposed.len().checked_sub(EXPOSED_MAX) {
            writeln!(out, "exposed: {more} more")?;
        }
        let (files, bytes) = (report::count(self.checked, "file"), report::size(self.bytes.0));
        match self.damage.len() {
            0 => writeln!(out, "sound: {files}, {bytes} read"),
            many => {
                writeln!(out, "{many} damaged of {files}, {bytes} read")?;
                if way_out.is_empty() { Ok(()) } else { writeln!(out, "{way_out}") }
            }
        }
    }
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct DamageReport {
    #[serde(flatten)]
    finding: Finding,
    /// The finding as text.
    text: String,
    /// Images that the damage affects.
    harms: Vec<HarmReport>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct HarmReport {
    /// Image id.
    image: String,
    /// Names of the image.
    names: Vec<String>,
    /// Container engines that use the image: an instance and an image, or a snapshot.
    engines: Vec<String>,
    /// Affected paths; empty if the whole image is affected. Bytes other than printable ASCII are `\xHH`.
    paths: Vec<FileName>,
}

impl HarmReport {
    fn from_harm(harm: &Harm, engines: &EngineUses) -> Self {
        Self {
            image: harm.image.to_string(),
            names: report::texts(&harm.refs),
            engines: engines.of_image(&harm.image),
            paths: harm.paths.iter().cloned().map(FileName).collect(),
        }
    }
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct HurtLayerReport {
    /// Diff id.
    layer: String,
    /// Objects of the layer that are damaged or missing.
    objects: Vec<String>,
    /// Container engines that use the layer: an instance and an image, or a snapshot.
    engines: Vec<String>,
}

/// Lists the engines that use a damaged item, as a suffix of the item's name.
fn by_engines(engines: &[String]) -> String {
    match engines {
        [] => String::new(),
        engines => format!(" (engine {})", report::plain(&engines.join(", "))),
    }
}

/// Damage in JSON.
#[derive(Debug, PartialEq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
struct Finding {
    /// `object`, `image`, `layer`, `device`, `name`, `container` and so on.
    kind: &'static str,
    /// Id, digest, name or path of the damaged thing.
    id: String,
    /// `different` from the expected value, `missing`, `damaged` as `reason` says, `incomplete` (a lazy device), or
    /// `stray`.
    problem: &'static str,
    /// Expected id, or size in bytes. Null unless `problem` is `different`.
    expected: Option<Evidence>,
    /// Found id, or size in bytes. Null unless `problem` is `different`.
    actual: Option<Evidence>,
    /// Reason of the damage. Null unless `problem` is `damaged`.
    reason: Option<String>,
}

/// An expected or found value.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema), schemars(inline))]
#[serde(untagged)]
enum Evidence {
    Id(String),
    Size(u64),
}

impl std::fmt::Display for Evidence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Id(id) => f.write_str(id),
            Self::Size(bytes) => write!(f, "{bytes}"),
        }
    }
}

fn finding(damage: &Damage) -> Finding {
    let new = |kind, id: String, problem| Finding {
        kind,
        id,
        problem,
        expected: None,
        actual: None,
        reason: None,
    };
    let damaged = |kind, id: String, reason: &String| Finding {
        reason: Some(reason.clone()),
        ..new(kind, id, "damaged")
    };
    let different = |kind, id: &VerityDigest, expected, actual| Finding {
        expected: Some(expected),
        actual: Some(actual),
        ..new(kind, id.to_string(), "different")
    };
    let other = |kind, expected: &VerityDigest, actual: &VerityDigest| {
        let id = |it: &VerityDigest| Evidence::Id(it.to_string());
        different(kind, expected, id(expected), id(actual))
    };
    match damage {
        Damage::Object { expected, actual, .. } => {
            other("object", expected.digest(), actual.digest())
        }
        Damage::Image { expected, actual } => other("image", expected.digest(), actual.digest()),
        Damage::Size { object, actual, stated } => {
            different("object", object.digest(), Evidence::Size(*stated), Evidence::Size(*actual))
        }
        Damage::Missing(object) => new("object", object.to_string(), "missing"),
        Damage::Lazy(device) => new("lazy device", device.to_string(), "incomplete"),
        Damage::Stored { object, device, why } => {
            damaged("object", object.to_string(), &format!("in device {device}: {why}"))
        }
        Damage::Bad(item, reason) => damaged(item.kind(), item.name(), reason),
        Damage::Stray(path) => new("stray", path.clone(), "stray"),
    }
}

/// Describes damage for people.
fn words(damage: &Damage) -> String {
    let Finding { kind, id, actual, reason, .. } = finding(damage);
    match (damage, reason) {
        (Damage::Object { size, actual, .. }, _) => {
            format!("object {id} is damaged: the digest of its {size} bytes is {actual}")
        }
        (Damage::Size { actual, stated, .. }, _) => {
            format!("object {id} has {actual} bytes, but an image states {stated}")
        }
        (Damage::Missing(_), _) => format!("object {id} is missing"),
        (Damage::Lazy(_), _) => {
            format!(
                "device {id} is lazy and not complete: it is not damaged, but cannot be verified"
            )
        }
        (Damage::Stray(path), _) => format!("{} is not a file of a store", report::plain(path)),
        (Damage::Bad(StoreItem::Blob(BlobFile::Chunks(_)), _), Some(reason)) => {
            format!("table of chunks of layer {id} is damaged: {reason}")
        }
        (_, Some(reason)) => format!("{kind} {id} is damaged: {reason}"),
        (_, None) => format!(
            "{kind} {id} is damaged: its digest is {}",
            actual.as_ref().map(ToString::to_string).unwrap_or_default()
        ),
    }
}

#[cfg(test)]
mod tests {
    use image::verity::{Algorithm, digest};
    use serde_json::Value;
    use store::Digest;

    use super::*;

    #[test]
    fn damage_is_told_in_words_and_in_fields() {
        let [a, b] = [&b"a"[..], b"b"].map(|it| digest(Algorithm::Sha256, it));
        let layer = Digest::sha256(b"");
        let why = || "why".to_owned();
        let check = |damage: Damage, text: String, fields: [Value; 5]| {
            assert_eq!(words(&damage), text);
            let it = finding(&damage);
            assert_eq!(it.reason.is_some(), it.problem == "damaged", "{text}");
            let it = serde_json::to_value(it).unwrap();
            let found = ["kind", "id", "problem", "expected", "actual"].map(|name| &it[name]);
            assert_eq!(found, fields.each_ref());
        };
        let [one, two] = [a, b].map(|it| Value::from(it.to_string()));
        let named = |kind: &str, id: &str| {
            [kind.into(), id.into(), "damaged".into(), Value::Null, Value::Null]
        };
        check(
            Damage::Object { expected: a.into(), actual: b.into(), size: 5 },
            format!("object {a} is damaged: the digest of its 5 bytes is {b}"),
            ["object".into(), one.clone(), "different".into(), one.clone(), two.clone()],
        );
        check(
            Damage::Image { expected: a.into(), actual: b.into() },
            format!("image {a} is damaged: its digest is {b}"),
            ["image".into(), one.clone(), "different".into(), one.clone(), two],
        );
        check(
            Damage::Size { object: a.into(), actual: 3, stated: 4 },
            format!("object {a} has 3 bytes, but an image states 4"),
            ["object".into(), one.clone(), "different".into(), 4.into(), 3.into()],
        );
        check(
            Damage::Missing(a.into()),
            format!("object {a} is missing"),
            ["object".into(), one, "missing".into(), Value::Null, Value::Null],
        );
        let id = a.to_string();
        let text = format!("object {a} is damaged: why");
        check(Damage::Bad(StoreItem::Object(a.into()), why()), text, named("object", &id));
        let text = format!("image {a} is damaged: why");
        check(Damage::Bad(StoreItem::Image(a.into()), why()), text, named("image", &id));
        let id = layer.to_string();
        let text = format!("layer {layer} is damaged: why");
        check(Damage::Bad(StoreItem::Layer(layer), why()), text, named("layer", &id));
        let text = format!("table of chunks of layer {layer} is damaged: why");
        check(
            Damage::Bad(StoreItem::Blob(BlobFile::Chunks(layer)), why()),
            text,
            named("table of chunks", &id),
        );
        let text = "name a:b is damaged: why".to_owned();
        check(Damage::Bad(StoreItem::Ref("a:b".to_owned()), why()), text, named("name", "a:b"));
        let text = "container c is damaged: why".to_owned();
        check(
            Damage::Bad(StoreItem::Container("c".to_owned()), why()),
            text,
            named("container", "c"),
        );
    }
}
