//! Generates `docs/json.md`, the page of all reports, from their types.

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value};

use crate::output::progress;
use crate::session::failure::FailureReport;
use crate::verbs::containers::access::inspect::inspected_container::InspectedContainerReport;
use crate::verbs::containers::access::inspect::inspected_image::InspectedImageReport;
use crate::verbs::containers::access::port;
use crate::verbs::containers::machine::MachineReport;
use crate::verbs::containers::volumes::verb as volume;
use crate::verbs::containers::{changes, networks, ps, wait};
use crate::verbs::images::export::reports::{
    DiskReport, DockerReport, ErofsReport, ExportReport, ExtensionReport, LayoutReport, TarReport,
};
use crate::verbs::images::filter::FilterReport;
use crate::verbs::images::history::HistoryReport;
use crate::verbs::images::images::{DamagedNameReport, SoundNameReport};
use crate::verbs::images::import::ImportReport;
use crate::verbs::images::merge::MergeReport;
use crate::verbs::images::registry::login::LoginReport;
use crate::verbs::images::registry::logout::LogoutReport;
use crate::verbs::images::registry::pull::{LazyPullReport, PullReport, UpToDateReport};
use crate::verbs::images::registry::{push, referrers};
use crate::verbs::images::show::ShowReport;
use crate::verbs::images::{build, diff, file_listing, index};
use crate::verbs::mounts::mount_spec;
use crate::verbs::store::{damage, doctor, du, gc, info, memory, system, unseal, version};

const START: &str = "\
# What `--json` prints

This page is made from the types in `crates/cli/src` and their comments, and a test compares it with them.
`QUIRE_UPDATE=1 cargo test -p quire-cli --bin quire json` writes it again after a change.

Standard output has only the report; warnings go to standard error as text. If a command fails, the last line of
standard error is a JSON object, which the section *A failure* describes. A command prints one JSON value, unless its
heading has the word *lines*: then each line is a value. Names after a dot are fields of the object before it, and `[]`
stands for each element of a list. A field is always present and never null, unless the last column says so. Later
versions may add fields and words: programs should ignore unknown ones.

Ids of images, objects and devices are fs-verity digests in hexadecimal digits. Digests and diff ids are OCI's, such
as `sha256:…`. Sizes on disks are of the blocks that files take.
";

/// The sections are in the order in which images are used: verbs that make, that move, and that inspect images.
fn page() -> String {
    let mut page = Page(START.to_owned());
    page.table::<FailureReport>(
        "A failure (one line on standard error)",
        "Commands for images, for the store and for services exit with 3 for the kind `absent`, 4 for `refused`, 5 for\n\
         `network`, 6 for `full`, and 2 for the others. They exit with 1 if they find damage or a difference, which is no\n\
         failure. Commands for containers, volumes and networks have 125, and `rm` also 1 and 2. `run`, `exec` and `trace` exit\n\
         with the code of the program, or with 125 to 127.",
    );
    page.table::<ImportReport>("import, commit, convert", "");
    page.table::<MergeReport>("merge", "");
    page.table::<FilterReport>("filter", "");
    page.table::<index::IndexReport>("index", "");
    page.table::<build::BuildReport>("build", "");
    page.table::<progress::ProgressReport<'_>>(
        "pull, push (lines)",
        "While they work, these commands print events. Their last lines are in the next sections.",
    );
    page.table::<PullReport>("pull (last line)", "");
    page.table::<UpToDateReport>("pull (last line, where nothing had to be pulled)", "");
    page.table::<LazyPullReport>("pull --lazy (last line, where no layers were pulled)", "");
    page.table::<push::PushReport>("push (last line)", "");
    page.table::<crate::verbs::images::signing::sign::SignReport>("sign", "");
    page.table::<referrers::ReferrersReport>("referrers", "");
    page.table::<LoginReport>("login", "");
    page.table::<LogoutReport>("logout", "");
    page.table::<ExportReport<LayoutReport>>("export oci:DIRECTORY", "");
    page.table::<ExportReport<DockerReport>>("export docker-archive:FILE", "");
    page.table::<ExportReport<TarReport>>("export tar:FILE", "");
    page.table::<ExportReport<ErofsReport>>("export erofs:FILE", "");
    page.table::<ExportReport<DiskReport>>("export disk:FILE", "");
    page.table::<ExportReport<ExtensionReport>>("export sysext:FILE, confext:FILE", "");
    page.table::<ps::PsReport>("ps", "A list of objects, one for each container.");
    page.table::<crate::verbs::services::lazy::devices::LazyDeviceReport>(
        "ps --lazy",
        "A list of objects, one for each device.",
    );
    page.table::<crate::verbs::services::engines::roots::EngineRootReport>(
        "ps --engine",
        "A list of objects, one for each snapshot whose root is mounted; with `--all`, for each snapshot.",
    );
    page.table::<port::PortReport>("port", "A list of objects, one for each port.");
    page.table::<mount_spec::SpecificationReport>("mount --specification", "");
    page.table::<MachineReport>(
        "bundle --vm",
        "The file `machine.json` in the directory has the same fields.",
    );
    page.table::<wait::WaitReport>("wait (lines)", "");
    page.table::<volume::VolumeReport>(
        "volume create, volume ls, volume inspect",
        "An object, or for `ls` and `inspect` a list of objects, one for each volume.",
    );
    page.table::<volume::VolumeRemovedReport>(
        "volume rm, volume prune",
        "A list of objects, one for each removed volume.",
    );
    page.table::<networks::verb::NetworkReport>(
        "network create, network ls, network inspect",
        "An object, or for `ls` and `inspect` a list of objects, one for each network.",
    );
    page.table::<networks::verb::NetworkRemovedReport>(
        "network rm, network prune",
        "A list of objects, one for each removed network.",
    );
    page.table::<changes::ChangesReport>("export changes:FILE", "");
    page.table::<SoundNameReport>("images", "A list of objects, one for each name.");
    page.table::<DamagedNameReport>("images, for a name whose file is damaged", "");
    page.table::<ShowReport>("show", "");
    page.table::<InspectedContainerReport>(
        "inspect, for a container",
        "`inspect` always prints JSON: a list of objects, one for each name, with podman's names of the fields.",
    );
    page.table::<InspectedImageReport>("inspect, for an image", "");
    page.table::<HistoryReport>("history", "A list of objects, one for each step, newest first.");
    page.table::<file_listing::FileReport>("ls, tree", "A list of objects, one for each file.");
    page.table::<diff::DifferenceReport>("diff", "A list of objects, one for each difference.");
    page.table::<du::DuReport>("du", "");
    page.table::<memory::MemoryReport>("du --memory", "");
    page.table::<damage::CheckReport>("verify, fsck", "");
    page.table::<unseal::UnsealReport>("unseal", "");
    page.table::<gc::GcReport>("gc", "");
    page.table::<system::DfReport>("system df", "A list of objects, one for each kind of data.");
    page.table::<doctor::DoctorReport>("doctor", "");
    page.table::<info::InfoReport>("info", "");
    page.table::<version::VersionReport>("version", "");
    page.0
}

struct Page(String);

impl Page {
    fn table<T: JsonSchema>(&mut self, title: &str, text: &str) {
        let settings = SchemaSettings::draft2020_12().for_serialize();
        let schema = settings.into_generator().into_root_schema_for::<T>().to_value();
        let types = schema["$defs"].as_object().cloned().unwrap_or_default();
        let mut table = Table { types, rows: Vec::new() };
        match schema["oneOf"].as_array() {
            Some(events) => events.iter().for_each(|it| table.event(it)),
            None => table.fields("", &schema),
        }
        let text = if text.is_empty() { String::new() } else { format!("{text}\n\n") };
        self.0 += &format!("\n## {title}\n\n{text}");
        self.0 += "| field | type | unit | meaning | null or absent |\n|---|---|---|---|---|\n";
        table.rows.iter().for_each(|row| self.0 += &format!("| {} |\n", row.join(" | ")));
    }
}

struct Table {
    types: Map<String, Value>,
    rows: Vec<[String; 5]>,
}

/// The possible values of a field, as a table shows them.
#[derive(Default)]
struct Kind {
    words: Vec<String>,
    unit: String,
    is_nullable: bool,
    /// The schema of an inner object that has fields, and the text between the field and its inner fields.
    inner: Option<(&'static str, Value)>,
}

impl Table {
    /// Adds a variant of an enum that is tagged by `event`.
    fn event(&mut self, schema: &Value) {
        let event = schema["properties"]["event"]["const"].as_str().expect("events have a name");
        let text = schema["description"].as_str().expect("events have a comment");
        let [unit, absent] = [String::new(), String::new()];
        self.rows.push([format!("`event`: `{event}`"), "string".into(), unit, text.into(), absent]);
        self.fields("", schema);
    }

    fn fields(&mut self, before: &str, schema: &Value) {
        let required = schema["required"].as_array().cloned().unwrap_or_default();
        for (name, field) in schema["properties"].as_object().expect("a report is an object") {
            if field.get("const").is_some() {
                continue;
            }
            let path = format!("{before}{name}");
            let text =
                field["description"].as_str().unwrap_or_else(|| panic!("{path} is in no section"));
            let text = text.replace('\n', " ");
            let at = [text.find("Absent "), text.find("Null ")].into_iter().flatten().min();
            let (meaning, absent) = text.split_at(at.unwrap_or(text.len()));
            let kind = self.kind(field);
            let is_optional = !required.contains(&name.as_str().into());
            assert_eq!(absent.contains("Absent "), is_optional, "the comment of {path}");
            // The schema does not state that a null field is left out of the output.
            if !is_optional {
                assert_eq!(absent.contains("Null "), kind.is_nullable, "the comment of {path}");
            }
            let words = kind.words.join(" or ");
            let cells = [&words, &kind.unit, meaning.trim(), absent.trim()].map(str::to_owned);
            let [words, unit, meaning, absent] = cells;
            self.rows.push([format!("`{path}`"), words, unit, meaning, absent]);
            if let Some((between, inner)) = kind.inner {
                self.fields(&format!("{path}{between}."), &inner);
            }
        }
    }

    fn kind(&self, schema: &Value) -> Kind {
        let unit = schema["unit"].as_str().unwrap_or_default().to_owned();
        let mut kind = Kind { unit, ..Kind::default() };
        if let Some(name) = schema["$ref"].as_str().and_then(|it| it.strip_prefix("#/$defs/")) {
            return self.kind(&self.types[name]);
        }
        if let Some(all) = schema["anyOf"].as_array() {
            for one in all.iter().map(|it| self.kind(it)) {
                kind.words.extend(one.words);
                kind.is_nullable |= one.is_nullable;
                kind.inner = kind.inner.or(one.inner);
            }
            return kind;
        }
        let types = match &schema["type"] {
            Value::Array(all) => all.iter().filter_map(Value::as_str).collect(),
            Value::String(one) => vec![one.as_str()],
            // A schema without a type allows any value, including null.
            _ => vec!["any", "null"],
        };
        for one in types {
            match one {
                "null" => kind.is_nullable = true,
                "array" => {
                    let of = self.kind(&schema["items"]);
                    let null = if of.is_nullable { " or null" } else { "" };
                    kind.words.push(format!("list: {}{null}", of.words.join(" or ")));
                    // A list's comment also describes its elements.
                    kind.is_nullable |= of.is_nullable;
                    kind.unit = of.unit;
                    kind.inner = of.inner.map(|(_, it)| ("[]", it));
                }
                "object" if schema.get("properties").is_some() => {
                    kind.words.push("object".to_owned());
                    kind.inner = Some(("", schema.clone()));
                }
                "object" => {
                    let of = self.kind(&schema["additionalProperties"]);
                    kind.words.push(format!("object of names: {}", of.words.join(" or ")));
                }
                other => kind.words.push(other.to_owned()),
            }
        }
        kind
    }
}

#[test]
fn the_page_has_what_the_types_say() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/json.md");
    let page = page();
    if std::env::var_os("QUIRE_UPDATE").is_some() {
        std::fs::write(path, &page).unwrap();
    }
    let found = std::fs::read_to_string(path).unwrap_or_default();
    assert!(found == page, "docs/json.md does not match the types: QUIRE_UPDATE=1 writes it");
}
