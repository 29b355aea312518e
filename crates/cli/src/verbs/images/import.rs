//! `import`: makes an image from a source.

use std::ffi::OsString;
use std::time::Duration;

use anyhow::bail;
use clap::Args;
use oci::manifest::Platform;
use oci::source::ImageSource;
use serde::Serialize;
use store::{OpenOptions, RefName, walk};
use transfer::directory_layer::import_directory;
use transfer::import::{ImportOptions, LayerIndexed, OtherPlatform, Report, Unsupported};

use crate::Answer;
use crate::args::{ChangeOptions, FormOptions, TreeOptions};
use crate::output::report::{self, Bytes, Seconds, count};
use crate::session::context::Context;
use crate::session::forms::choose;
use crate::session::resources::{JobResources, budget};
use crate::verbs::VerbArgs;
use crate::verbs::images::file_listing;

// The source of an image.
#[derive(Debug, Args)]
pub(crate) struct Import {
    // This is not a doc comment, because rustdoc would parse the brackets as a link.
    #[arg(
        help = "oci:DIR[:TAG], docker-archive:FILE, tar:FILE (- for standard input), dir:DIR, dump:FILE, erofs:FILE or disk:FILE"
    )]
    pub(crate) source: OsString,
    /// The image's name; by default the source's own
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) changes: ChangeOptions,
    #[command(flatten)]
    pub(crate) tree: TreeOptions,
    #[command(flatten)]
    pub(crate) form: FormOptions,
    /// Index the layers while they are read, as `quire index` does; only with `--form tar`
    #[arg(long)]
    pub(crate) index: bool,
    /// Take the image of this platform from an index, as os/architecture[/variant]; refuse an image of another one
    #[arg(long, value_name = "PLATFORM")]
    pub(crate) platform: Option<String>,
    /// Use up to this much memory for data in flight, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u64).range(8..=65536))]
    pub(crate) memory: u64,
}

impl VerbArgs for Import {
    const NAME: &'static str = "import";
    const ABOUT: &'static str =
        "Import an image from a layout, archive, tar, directory, dump, EROFS image or disk";
    const DETAILS: &'static str = "`--change` sets the configuration of an image of dir: or tar:, and the same source and \
        changes always give the same image. An image of dir: gets a layer then, so that it can be pushed and committed; \
        without `--change` it has none.";
    const EXAMPLES: &'static str = "quire import oci:./layout:1.0 app\n  docker export web | quire import tar:- web\n  quire import dir:/srv/root base\n  quire import --change 'CMD [\"sh\"]' dir:/srv/root base\n  quire import erofs:base.erofs again";
    const HAS_SHORT_QUIET: bool = true;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        import(context, self)
    }
}

pub(crate) fn import(context: &Context, args: &Import) -> anyhow::Result<Answer> {
    let source = ImageSource::parse(&args.source)?;
    let name: Option<RefName> = args.name.as_deref().map(str::parse).transpose()?;
    let changes = &args.changes.change[..];
    if !changes.is_empty() && !matches!(source, ImageSource::Directory(_) | ImageSource::Tar(_)) {
        bail!(
            "--change is only for dir: and tar:, because other images have their own configuration or none: `quire \
            commit --change` changes it"
        );
    }
    args.changes.check()?;
    transfer::import::check(&source)?;
    let store = context.open(OpenOptions::create())?;
    let (platform, other_platform) = platform(args.platform.as_deref())?;
    let form = choose(&args.form, &store)?;
    let options = ImportOptions {
        name: name.as_ref(),
        platform: &platform,
        other_platform,
        form,
        index: args.index,
        changes,
        ..of_tree(&args.tree)
    };
    let resources = JobResources::new(context, &store, budget(args.memory)?);
    let done = resources.during(|environment| -> anyhow::Result<_> {
        Ok(match &source {
            ImageSource::Directory(directory) if !changes.is_empty() => {
                import_directory(&store, directory, environment, &options)?
            }
            source => transfer::import::import(&store, source, environment, &options)?,
        })
    })??;
    if done.name.is_none() {
        context.remark("the image has no name: `quire tag` names it, so that `quire gc` keeps it");
    }
    tell(context, &done)?;
    Ok(Answer::Yes)
}

/// Returns the requested platform, or else this machine's, and how to handle an image of another platform.
pub(crate) fn platform(asked: Option<&str>) -> anyhow::Result<(Platform, OtherPlatform)> {
    Ok(match asked {
        Some(asked) => (asked.parse()?, OtherPlatform::Refuse),
        None => (Platform::of_this_machine().clone(), OtherPlatform::Tell),
    })
}

/// Returns how files of directories, tars and dumps are imported.
pub(crate) fn of_tree(options: &TreeOptions) -> ImportOptions<'_> {
    ImportOptions {
        unsupported: match options.skip_unsupported {
            true => Unsupported::Skip,
            false => Unsupported::Refuse,
        },
        xattrs: match (options.xattrs.skip_xattrs, options.xattrs.user_xattrs) {
            (true, _) => walk::KeptXattrs::None,
            (false, true) => walk::KeptXattrs::UserOnly,
            (false, false) => walk::KeptXattrs::All,
        },
        times: match options.whole_seconds {
            true => walk::Times::WholeSeconds,
            false => walk::Times::Exact,
        },
        objects: options.objects.as_deref(),
        ..ImportOptions::default()
    }
}

pub(crate) fn tell(context: &Context, done: &Report) -> anyhow::Result<()> {
    tell_form(context, done, None)
}

/// Like [`tell`], for an image that got another form, which `form` describes. All of its layers were in the store.
pub(crate) fn tell_form(
    context: &Context,
    done: &Report,
    form: Option<&str>,
) -> anyhow::Result<()> {
    for layer in &done.layers {
        for path in &layer.skipped {
            context.remark(&format!(
                "leaving out a file that images cannot contain: {}",
                file_listing::name(path)
            ));
        }
    }
    let lost: Vec<_> = done.layers.iter().flat_map(|it| &it.lost_acls).collect();
    if let Some(first) = lost.first() {
        let files = report::count(lost.len(), "file");
        context.remark(&format!(
            "leaving out the ACLs of {files}, which name users or groups without a number, such \
            as \"{}\" of {}: `--skip-xattrs` leaves out all ACLs and xattrs, and bsdtar writes \
            ACLs with numbers",
            file_listing::name(&first.line),
            file_listing::name(&first.path)
        ));
    }
    if !done.hidden_xattrs.is_empty() {
        let mut names: Vec<_> =
            done.hidden_xattrs.iter().take(3).map(|name| file_listing::name(name)).collect();
        if done.hidden_xattrs.len() > names.len() {
            names.push(format!("{} more", done.hidden_xattrs.len() - names.len()));
        }
        context.remark(&format!(
            "EROFS cannot store these extended attributes, so mounts do not show them: {}. \
            `export` writes them",
            names.join(", ")
        ));
    }
    for (number, layer) in (1..).zip(&done.layers) {
        if let LayerIndexed::None(reason) = &layer.index {
            context.remark(&format!("layer {number} has no index: {reason}"));
        }
    }
    if done.has_hash_tree {
        context.remark(
            "an import does not compare the disk's root with its hash tree: `veritysetup verify` does, with the root hash",
        );
    }
    let told = ImportReport::from_report(done);
    if context.json {
        report::json(&told)
    } else if context.is_quiet() {
        // Like podman, print only the id for scripts.
        report::line(&done.image.to_string())
    } else {
        report::line(&told.text(form))
    }
}

/// Report of verbs that make an image.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct ImportReport {
    /// Image id.
    image: String,
    /// Name of the image. Null if it got none.
    name: Option<String>,
    /// Digest of the manifest. Null if the source has none.
    manifest: Option<String>,
    /// Number of inodes in the image.
    inodes: usize,
    /// Names of extended attributes of the image that mounts do not show.
    hidden_xattrs: Vec<String>,
    /// Size of the EROFS image.
    image_bytes: Bytes,
    /// The layers, lowest first.
    layers: Vec<ImportedLayerReport>,
    /// Number of objects that are new in the store.
    objects_added: u64,
    /// Size of the new objects.
    bytes_added: Bytes,
    /// Number of objects that the store had already.
    objects_reused: u64,
    /// Size of the objects that the store had already.
    bytes_reused: Bytes,
    /// Number of signatures that an OCI layout had of the image, verified or not. 0 for other sources.
    signatures: usize,
    /// Duration of the import's steps.
    seconds: ImportTimesReport,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct ImportedLayerReport {
    /// Digest of the uncompressed tar.
    diff_id: String,
    /// Size of the uncompressed tar.
    tar_bytes: Bytes,
    /// Whether the store had the layer already.
    reused: bool,
    /// Paths of files that an image cannot hold. Bytes other than printable ASCII are `\xHH`.
    skipped: Vec<String>,
    /// Paths of files whose ACL was left out, because it names a user or group without a number.
    lost_acls: Vec<String>,
    /// Size of the index that was made of the layer. Null if none was made.
    index_bytes: Option<Bytes>,
    /// Reason why a requested index was not made. Null if it was made, or if the store had it already.
    no_index: Option<String>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct ImportTimesReport {
    /// Reading the source.
    data: Seconds,
    /// Making the image.
    image: Seconds,
    /// Syncing the store to the disk.
    commit: Seconds,
}

impl ImportReport {
    pub(crate) fn from_report(done: &Report) -> Self {
        let layers = done.layers.iter().map(|layer| ImportedLayerReport {
            diff_id: layer.diff_id.to_string(),
            tar_bytes: Bytes(layer.tar_bytes),
            reused: layer.is_reused,
            skipped: report::paths(&layer.skipped),
            lost_acls: report::paths(
                layer.lost_acls.iter().map(|it| it.path.clone()).collect::<Vec<_>>(),
            ),
            index_bytes: match layer.index {
                LayerIndexed::Made { bytes } => Some(Bytes(bytes)),
                _ => None,
            },
            no_index: match &layer.index {
                LayerIndexed::None(reason) => Some(reason.clone()),
                _ => None,
            },
        });
        let seconds = |it: Duration| Seconds(it.as_secs_f64());
        Self {
            image: done.image.to_string(),
            name: done.name.as_ref().map(ToString::to_string),
            manifest: done.manifest.map(|it| it.to_string()),
            inodes: done.inodes,
            hidden_xattrs: report::paths(&done.hidden_xattrs),
            image_bytes: Bytes(done.image_bytes),
            layers: layers.collect(),
            objects_added: done.objects.objects,
            bytes_added: Bytes(done.objects.object_bytes),
            objects_reused: done.objects.reused,
            bytes_reused: Bytes(done.objects.reused_bytes),
            signatures: done.signatures,
            seconds: ImportTimesReport {
                data: seconds(done.times.data),
                image: seconds(done.times.image),
                commit: seconds(done.times.commit),
            },
        }
    }

    fn text(&self, form: Option<&str>) -> String {
        let mut lines = vec![format!("image {}", self.image)];
        lines.extend(self.name.as_ref().map(|name| format!("name  {name}")));
        lines.extend(form.map(|form| format!("form  {form}")));
        let reused = self.layers.iter().filter(|it| it.reused).count();
        if !self.layers.is_empty() && form.is_none() {
            lines.push(format!(
                "{}, {reused} already in the store",
                count(self.layers.len(), "layer")
            ));
        }
        let indexes: Vec<u64> =
            self.layers.iter().filter_map(|it| Some(it.index_bytes.as_ref()?.0)).collect();
        if !indexes.is_empty() {
            let size = report::size(indexes.iter().sum());
            lines.push(format!("{} indexed, {size}", count(indexes.len(), "layer")));
        }
        if self.signatures > 0 {
            lines.push(format!("{}, which policies verify", count(self.signatures, "signature")));
        }
        let mut contents = count(self.inodes, "inode");
        // An image of another form may have no objects.
        if self.objects_added + self.objects_reused > 0 {
            contents += &format!(
                "; {} added ({}), {} already in the store ({})",
                count(self.objects_added, "object"),
                report::size(self.bytes_added.0),
                self.objects_reused,
                report::size(self.bytes_reused.0)
            );
        }
        lines.push(contents);
        if form.is_none() && self.objects_added == 0 && (reused > 0 || self.objects_reused > 0) {
            // Make clear that the import did not repair anything.
            lines.push(
                "Quire did not read data again that was already in the store: `quire verify` \
                checks it for damage"
                    .to_owned(),
            );
        }
        let ImportTimesReport { data, image, commit } = &self.seconds;
        let whole = data.0 + image.0 + commit.0;
        lines.push(format!("{whole:.2} s, of which {:.2} s writing to the disk", commit.0));
        lines.join("\n")
    }
}
