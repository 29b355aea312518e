//! `images`: lists the names in the store.

mod listed_image;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::rc::Rc;

use anyhow::Context as _;
use clap::Args;
use image::erofs::read::{Cached, FileType, Image};
use image::verity::ImageId;
use serde::Serialize;
use store::{BadRef, Form, OpenOptions, RefError, RefName, Reference, Store};

use self::listed_image::{ImageFilters, ImageOrder, KEYS, ListedImage, TITLES, json_of, sort};
use crate::Answer;
use crate::output::list_filter::ListFilters;
use crate::output::report::{self, Bytes, Time, short};
use crate::output::{table, template};
use crate::session::context::{Context, now};
use crate::verbs::VerbArgs;

#[expect(clippy::struct_excessive_bools, reason = "each is an option")]
#[derive(Debug, Args)]
pub(crate) struct Images {
    /// List only names that are or end with this one, such as debian; * stands for any part
    pub(crate) image: Option<String>,
    /// List all names, which is the default. An image that `commit` or `untag` left without a name is `<none>`; `quire
    /// du` lists all images
    #[arg(short, long)]
    pub(crate) all: bool,
    /// Show whole ids
    #[arg(long)]
    pub(crate) no_trunc: bool,
    /// Also show the digests of manifests
    #[arg(long)]
    pub(crate) digests: bool,
    /// Print ids only, each once
    #[arg(short = 'q')]
    pub(crate) ids: bool,
    /// List only images that fit, such as reference='app:*'. The keys are before, dangling, digest, id, label, label!,
    /// readonly, reference, since and until
    #[arg(short, long, value_name = "KEY=VALUE")]
    pub(crate) filter: Vec<String>,
    /// Print `json`, or each name by a template of Go, such as '{{.Repository}}:{{.Tag}}', with podman's fields. A
    /// template that begins with "table " has titles
    #[arg(long, value_name = "TEMPLATE", conflicts_with = "json")]
    pub(crate) format: Option<String>,
    /// Sort the list; the default is by names
    #[arg(long, value_name = "KEY", value_enum)]
    pub(crate) sort: Option<ImageOrder>,
    /// Print no titles
    #[arg(short = 'n', long)]
    pub(crate) noheading: bool,
}

impl VerbArgs for Images {
    const NAME: &'static str = "images";
    const ABOUT: &'static str = "List images";
    const EXAMPLES: &'static str = "quire images\n  quire images --digests\n  quire images --filter label=app --format '{{.Repository}}:{{.Tag}} {{.Size}}'";
    const ALIAS: Option<&'static str> = Some("list");

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        list(context, self)
    }
}

impl Images {
    fn id(&self, id: &impl std::fmt::Display) -> String {
        if self.no_trunc { id.to_string() } else { short(id) }
    }
}

/// Names in this user's own store and in shared stores, with their stores.
pub(crate) type NamesOfAll = BTreeMap<RefName, (Reference, Rc<Store>)>;

/// Returns all names, and those that cannot be read.
pub(crate) fn all_names(context: &Context) -> anyhow::Result<(NamesOfAll, Vec<BadRef>)> {
    let own = context.open_for(OpenOptions::read(), true)?;
    let (mut refs, mut bad) = (NamesOfAll::new(), Vec::new());
    for store in own.into_iter().chain(context.open_shared()).map(Rc::new) {
        let (sound, damaged) = store.refs.readable()?;
        // A name in the user's own store, or in an earlier shared store, hides the same name in later stores.
        for (name, reference) in sound {
            refs.entry(name).or_insert_with(|| (reference, Rc::clone(&store)));
        }
        bad.extend(damaged);
    }
    // An image that has a name now is listed by it.
    let identity = |it: &Reference| (it.image, it.manifest);
    let named: BTreeSet<_> =
        refs.iter().filter(|it| !it.0.is_unnamed()).map(|it| identity(&it.1.0)).collect();
    refs.retain(|name, it| !name.is_unnamed() || !named.contains(&identity(&it.0)));
    Ok((refs, bad))
}

pub(crate) fn list(context: &Context, args: &Images) -> anyhow::Result<Answer> {
    let filters = ListFilters::parse(&args.filter, &KEYS)?;
    let (refs, bad) = all_names(context)?;
    let mut answer = if bad.is_empty() { Answer::Yes } else { Answer::No };
    tell_bad(&bad);
    let listed = |(name, (reference, store))| ListedImage::new(name, reference, store);
    let mut all: Vec<_> = refs.into_iter().map(listed).collect();
    let filters = ImageFilters::new(filters, &all)?;
    let is_meant = |it: &ListedImage| args.image.as_ref().is_none_or(|image| it.is_named(image));
    all.retain(|it| is_meant(it) && filters.fit(it));
    let mut sizes = Sizes::default();
    if let Some(order) = args.sort {
        sort(&mut all, order, |it| sizes.of(it));
    }
    let form = args.format.as_deref();
    let printed = if form.is_some_and(template::is_json) {
        report::json(&json_of(&all, |it| sizes.of(it)))
    } else if args.ids || context.quiet {
        let mut seen = BTreeSet::new();
        let ids = all.iter().map(|it| args.id(&it.reference.image));
        let ids: Vec<_> = ids.filter(|it| seen.insert(it.clone())).collect();
        report::lines(ids.iter().map(String::as_str)).map(drop)
    } else if let Some(form) = form.filter(|it| *it != "table") {
        write_form(form, &all, args, &mut sizes)
    } else {
        let rows: Vec<_> = all.iter().map(|it| NameReport::sound(it, &mut sizes)).collect();
        let rows: Vec<_> = rows.into_iter().chain(bad.iter().map(NameReport::damaged)).collect();
        report::print(context.json, &rows, |rows, out| write_list(args, rows, out))
    };
    if sizes.has_failed {
        answer = Answer::No;
    }
    report::answer(answer, printed)
}

/// Sizes of images. They take long to find.
#[derive(Default)]
struct Sizes {
    known: BTreeMap<ImageId, Option<u64>>,
    /// Whether an image could not be read.
    has_failed: bool,
}

impl Sizes {
    fn of(&mut self, image: &ListedImage) -> Option<u64> {
        let id = image.reference.image;
        if let Some(bytes) = self.known.get(&id) {
            return *bytes;
        }
        let read = content_of(&image.store, &id);
        if let Err(error) = &read {
            // `fsck` reports whether the image is damaged.
            let name = &image.name;
            report::error_line(&format!("quire: cannot determine the size of {name}: {error:#}"));
            self.has_failed = true;
        }
        *self.known.entry(id).or_insert(read.ok())
    }
}

/// Prints a list by `--format`.
fn write_form(
    form: &str,
    all: &[ListedImage],
    args: &Images,
    sizes: &mut Sizes,
) -> anyhow::Result<()> {
    let now = now().0;
    let wants_size = form.contains("Size");
    let row = |it: &ListedImage| {
        let bytes = if wants_size { sizes.of(it) } else { None };
        it.fields(args.no_trunc, now, bytes)
    };
    let rows: Vec<_> = all.iter().map(row).collect();
    template::print_list(form, &rows, &TITLES, args.noheading)
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
    /// Name of the image; `<none>` if it has none.
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
    /// Time of the import, in RFC 3339.
    created: Time,
    /// Time at which the image was made, from its configuration. Null if the configuration does not have it.
    image_created: Option<Time>,
    /// Directory of the shared store. Null if the name is in this user's own store.
    shared: Option<String>,
}

/// A name whose file is damaged.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct DamagedNameReport {
    /// The damaged name.
    name: String,
    /// Description of the damage.
    damage: String,
}

impl NameReport {
    fn sound(it: &ListedImage, sizes: &mut Sizes) -> Self {
        Self::Sound(SoundNameReport {
            name: it.shown_name().to_owned(),
            image: it.reference.image.to_string(),
            manifest: it.reference.manifest.map(|it| it.to_string()),
            form: it.reference.form,
            file_bytes: sizes.of(it).map(Bytes),
            created: Time(it.reference.created.0),
            image_created: it.made().map(Time),
            shared: (!it.store.is_own()).then(|| it.store.path().display().to_string()),
        })
    }

    fn damaged(bad: &BadRef) -> Self {
        let damage = report::chain(&bad.error);
        Self::Damaged(DamagedNameReport { name: bad.name.to_string(), damage })
    }
}

/// Prints the list for people. Damaged names are reported separately.
fn write_list(args: &Images, rows: &[NameReport], out: &mut dyn Write) -> io::Result<()> {
    let now = now().0;
    let is_shared = |it: &NameReport| matches!(it, NameReport::Sound(row) if row.shared.is_some());
    let has_shared = rows.iter().any(is_shared);
    let cells = |row: &SoundNameReport| {
        let made = row.image_created.unwrap_or(row.created).0;
        let mut cells = vec![row.name.clone(), args.id(&row.image)];
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
    if args.noheading {
        titles.fill("");
    }
    let is_whole = args.no_trunc || args.digests;
    let print = if is_whole { table::print_whole } else { table::print };
    print(out, &titles, &sound.collect::<Vec<_>>(), &[titles.len() - 1])
}

/// Returns the sum of the lengths of an image's regular files, each inode counted once.
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
pub(crate) fn tell_bad(bad: &[BadRef]) {
    for BadRef { name, error } in bad {
        let text = report::chain(error);
        // A disk error may be temporary, so the hint does not suggest to remove the name.
        let hint = match error {
            RefError::Disk(_) => String::new(),
            _ => format!("; `quire rmi {name}` removes the name"),
        };
        report::error_line(&format!("quire: {text}{hint}"));
    }
}
