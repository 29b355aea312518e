//! `export`: an image becomes a layout, an archive or a tar again, or an EROFS image or a disk that needs no store.

use std::fs::{File, Permissions};
use std::io::{IsTerminal as _, Write};
use std::num::NonZeroUsize;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use anyhow::{Context as _, bail};
use image::erofs::Flavor;
use image::verity::ObjectId;
use oci::Digest;
#[cfg(feature = "disk")]
use oci::manifest::Platform;
use serde_json::{Map, Value, json};
use store::{OpenOptions, Resolved, Store};
#[cfg(feature = "disk")]
use transfer::export::RootType;
use transfer::export::{Compression, How, Options, Output, Plan, Target};
use transfer::import::Unsupported;
use transfer::progress::Event;

use crate::Answer;
use crate::args;
use crate::context::{Context, Outside};
use crate::import::give_up_when;
use crate::progress::Progress;
use crate::signals::until_signal;
use crate::{describe, report};

pub(crate) fn export(context: &Context, args: &args::Export) -> anyhow::Result<Answer> {
    let start = Instant::now();
    let target = Target::parse(&args.target)?;
    check(context, args, &target)?;
    let store = context.open(OpenOptions::read())?;
    let found = crate::names::resolve(&store, &args.name)?;
    // What is written would be local to whoever imports it.
    let permitted = crate::policy::permit(context, &store, found)?;
    let found = permitted.found();
    let threads = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let progress = Progress::new(context);
    let cancel = Arc::new(AtomicBool::new(false));
    give_up_when(&store, &cancel);
    let scratch = std::env::temp_dir();
    let options = Options {
        threads,
        scratch: &scratch,
        progress: &|event: Event<'_>| progress.tell(event),
        cancel: &cancel,
    };
    let job = Job { context, args, store: &store, found, options: &options };
    let work = || -> anyhow::Result<Told> {
        // `gc` keeps the image and its objects while it is open.
        let _open = store.open_image(&found.image)?;
        job.write(&target)
    };
    let result = until_signal(&cancel, work)?;
    progress.finish();
    let mut told = result?;
    if matches!(
        &target,
        Target::DockerArchive { file: Output::Stdout, .. }
            | Target::Tar(Output::Stdout)
            | Target::Erofs { file: Output::Stdout, .. }
            | Target::Disk(Output::Stdout)
    ) {
        return Ok(Answer::Yes);
    }
    if context.json {
        told.json.insert("image".to_owned(), json!(found.image.to_string()));
        told.json.insert("seconds".to_owned(), json!(start.elapsed().as_secs_f64()));
        report::json(&told.json)?;
    } else if !context.is_quiet() {
        let mut out = report::standard_output();
        for line in &told.lines {
            writeln!(out, "{line}")?;
        }
        writeln!(out, "{:.2} s", start.elapsed().as_secs_f64())?;
        out.flush()?;
    }
    Ok(Answer::Yes)
}

/// What can be seen to be wrong before anything is opened.
fn check(context: &Context, args: &args::Export, target: &Target) -> anyhow::Result<()> {
    if args.platform.is_some() && !matches!(target, Target::Disk(_)) {
        bail!("--platform is for disk:FILE alone");
    }
    let (what, output) = match target {
        Target::Layout { .. } => return Ok(()),
        Target::DockerArchive { file, .. } => ("layers of docker archives", file),
        Target::Tar(file) => ("a flat tar", file),
        Target::Erofs { file, .. } => ("an EROFS image", file),
        Target::Disk(file) => ("a disk", file),
    };
    if matches!(args.compression, Some(args::Compression::Gzip | args::Compression::Zstd)) {
        bail!("{what} cannot be compressed: write to - and pipe it into a compressor");
    }
    check_output(context, output, args.force)
}

/// Whether an archive can be written there.
pub(crate) fn check_output(context: &Context, output: &Output, force: bool) -> anyhow::Result<()> {
    match output {
        Output::Stdout if context.json => {
            bail!("--json prints to standard output, as the export would: name a file")
        }
        Output::Stdout if std::io::stdout().is_terminal() => {
            bail!("standard output is a terminal: redirect it, or name a file")
        }
        Output::Stdout => Ok(()),
        Output::File(path) => match path.metadata() {
            Ok(found) if !found.is_file() => bail!(
                "{} is not a regular file: write to - and redirect standard output",
                path.display()
            ),
            Ok(_) if !force => {
                bail!("{} is there already: --force overwrites it", path.display())
            }
            _ => Ok(()),
        },
    }
}

/// What is to be said at the end.
#[derive(Default)]
struct Told {
    lines: Vec<String>,
    json: Map<String, Value>,
}

struct Job<'a> {
    context: &'a Context,
    args: &'a args::Export,
    store: &'a Store,
    found: &'a Resolved,
    options: &'a Options<'a>,
}

impl Job<'_> {
    fn write(&self, target: &Target) -> anyhow::Result<Told> {
        match target {
            Target::Layout { directory, tag } => self.layout(directory, tag.as_deref()),
            Target::DockerArchive { file, name } => {
                let manifest = self.manifest()?;
                let names: Vec<_> = name.iter().chain(&self.found.name).take(1).cloned().collect();
                let written = self.output(file, |out| {
                    Ok(transfer::export::to_docker_archive(
                        self.store,
                        &manifest,
                        &names,
                        out,
                        self.options,
                    )?)
                })?;
                let mut told = Told::default();
                told.lines.push(format!("image {}", written.config));
                told.lines.extend(names.iter().map(|it| format!("name  {it}")));
                told.lines.push(format!(
                    "{} layers, {}",
                    written.layers.len(),
                    report::size(written.bytes)
                ));
                let layers: Vec<_> = written.layers.iter().map(ToString::to_string).collect();
                told.json = object(json!({
                    "config": written.config.to_string(),
                    "names": names.iter().map(ToString::to_string).collect::<Vec<_>>(),
                    "layers": layers,
                    "bytes": written.bytes,
                }));
                Ok(told)
            }
            Target::Tar(file) => self.tar(file, &self.found.image),
            Target::Erofs { flavor, file } => self.erofs(*flavor, file),
            Target::Disk(file) => self.disk(file),
        }
    }

    fn manifest(&self) -> anyhow::Result<Digest> {
        let name = &self.args.name;
        self.found.manifest.with_context(|| {
            format!(
                "{name} came from a directory or a dump, or was merged or filtered, and has no layers: `quire export {name} tar:FILE` writes its \
                 files, and `quire import tar:FILE` makes an image of one layer of them"
            )
        })
    }

    fn layout(&self, directory: &Path, tag: Option<&str>) -> anyhow::Result<Told> {
        let manifest = self.manifest()?;
        let compression = match self.args.compression {
            None | Some(args::Compression::AsItWas) => Compression::AsItWas,
            Some(args::Compression::Gzip) => Compression::Gzip,
            Some(args::Compression::Zstd) => Compression::Zstd,
            Some(args::Compression::None) => Compression::None,
        };
        let plan = transfer::export::plan(self.store, &manifest, compression, self.options)?;
        if !plan.is_unchanged && compression == Compression::AsItWas {
            let anew = plan.layers.iter().filter(|it| it.how == How::Compressed).count();
            self.context.remark(&format!(
                "{anew} of {} layers are compressed anew, since the store has not kept them as they came: the manifest is \
                 {} now",
                plan.layers.len(),
                plan.digest
            ));
        }
        let written = transfer::export::to_layout(self.store, &plan, directory, tag, self.options)?;
        let mut told = Told::default();
        told.lines.push(format!("manifest {}", plan.digest));
        told.lines.push(format!(
            "{} layers; {} blobs added ({}), {} here already",
            plan.layers.len(),
            written.blobs,
            report::size(written.bytes),
            written.reused
        ));
        told.json = object(json!({
            "manifest": plan.digest.to_string(),
            "unchanged": plan.is_unchanged,
            "layers": layers(&plan),
            "blobsAdded": written.blobs,
            "bytesAdded": written.bytes,
            "blobsReused": written.reused,
        }));
        Ok(told)
    }

    fn tar(&self, file: &Output, image: &ObjectId) -> anyhow::Result<Told> {
        let unsupported = match self.args.skip_unsupported {
            true => Unsupported::Skip,
            false => Unsupported::Refuse,
        };
        let written = self.output(file, |out| {
            Ok(transfer::export::to_tar(self.store, image, out, unsupported, self.options)?)
        })?;
        for path in &written.skipped {
            let path = describe::name(path);
            self.context.remark(&format!("left out, no tar can hold it: {path}"));
        }
        let mut told = Told::default();
        told.lines.push(format!("{} entries, {}", written.entries, report::size(written.bytes)));
        let skipped: Vec<_> =
            written.skipped.iter().map(|it| it.escape_ascii().to_string()).collect();
        told.json = object(json!({
            "entries": written.entries,
            "bytes": written.bytes,
            "skipped": skipped,
        }));
        Ok(told)
    }

    fn erofs(&self, flavor: Flavor, file: &Output) -> anyhow::Result<Told> {
        let written = self.output(file, |out| {
            Ok(transfer::export::to_erofs(
                self.store,
                &self.found.image,
                flavor,
                out,
                self.options,
            )?)
        })?;
        if written.without_xattrs > 0 {
            let files = match written.without_xattrs {
                1 => "1 file has".to_owned(),
                many => format!("{many} files have"),
            };
            self.context.remark(&format!(
                "{files} xattrs (ACLs, capabilities, labels), which gVisor cannot read: they are left out"
            ));
        }
        if written.without_numbers > 0 {
            let devices = match written.without_numbers {
                1 => "1 device has no number".to_owned(),
                many => format!("{many} devices have no numbers"),
            };
            self.context.remark(&format!(
                "{devices} in gVisor: below a writable layer it hides character devices"
            ));
        }
        let mut told = Told::default();
        told.lines.push(format!("{} inodes, {}", written.inodes, report::size(written.bytes)));
        told.json = object(json!({
            "inodes": written.inodes,
            "bytes": written.bytes,
            "withoutXattrs": written.without_xattrs,
            "withoutNumbers": written.without_numbers,
        }));
        Ok(told)
    }

    #[cfg(not(feature = "disk"))]
    #[expect(clippy::unused_self, reason = "as with the feature")]
    fn disk(&self, _: &Output) -> anyhow::Result<Told> {
        bail!(
            "this build of Quire writes no disks: build it with the feature `disk`, or use erofs:FILE"
        )
    }

    #[cfg(feature = "disk")]
    fn disk(&self, file: &Output) -> anyhow::Result<Told> {
        let architecture = self.architecture()?;
        let root = RootType::of(&architecture).with_context(|| {
            let known: Vec<_> = RootType::architectures().collect();
            format!(
                "there are no root partitions for {architecture:?}: --platform linux/ARCHITECTURE says another, one of {}",
                known.join(", ")
            )
        })?;
        let written = self.output(file, |out| {
            Ok(transfer::export::to_disk(self.store, &self.found.image, root, out, self.options)?)
        })?;
        let mut told = Told::default();
        told.lines.push(format!("PARTUUID={} for {architecture}", written.partition));
        told.lines.push(format!(
            "{} inodes, {}",
            written.image.inodes,
            report::size(written.bytes)
        ));
        told.json = object(json!({
            "architecture": architecture,
            "partition": written.partition.to_string(),
            "inodes": written.image.inodes,
            "imageBytes": written.image.bytes,
            "bytes": written.bytes,
        }));
        Ok(told)
    }

    /// For which processor the image is.
    #[cfg(feature = "disk")]
    fn architecture(&self) -> anyhow::Result<String> {
        if let Some(platform) = &self.args.platform {
            let platform: Platform = platform.parse()?;
            if platform.os != "linux" {
                bail!("--platform {platform}: disks are for linux");
            }
            return Ok(platform.architecture);
        }
        let said = match &self.found.manifest {
            Some(manifest) => transfer::export::architecture(self.store, manifest)?,
            None => None,
        };
        Ok(said.unwrap_or_else(|| {
            let here = Platform::linux(std::env::consts::ARCH);
            self.context.remark(&format!(
                "{} does not say which processor it is for: the disk is for {here}, as this machine is; --platform says \
                 another",
                self.args.name
            ));
            here.architecture
        }))
    }

    /// As [`output`].
    fn output<T>(
        &self,
        file: &Output,
        write: impl FnOnce(&mut dyn Write) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        output(file, self.args.force, write, || (self.options.progress)(Event::Committing))
    }
}

/// Lets `write` write a file that is there as a whole or not at all, or standard output. `committing` is called between.
pub(crate) fn output<T>(
    file: &Output,
    force: bool,
    write: impl FnOnce(&mut dyn Write) -> anyhow::Result<T>,
    committing: impl FnOnce(),
) -> anyhow::Result<T> {
    let path = match file {
        Output::Stdout => {
            let written = write(&mut report::standard_output());
            return written.map_err(|error| Outside::note(error, None));
        }
        Output::File(path) => path,
    };
    let failed = || format!("cannot write {}", path.display());
    // Where a link leads to, not the link, is what is overwritten.
    let path = match path.canonicalize() {
        Ok(real) => real,
        Err(_) => path.clone(),
    };
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    let draft = tempfile::Builder::new()
        .prefix(".quire-export-")
        // It has the contents of all files, also of those that only root may read in the image.
        .permissions(Permissions::from_mode(0o600))
        .tempfile_in(&parent)
        .with_context(failed)?;
    let mut out = std::io::BufWriter::with_capacity(1 << 20, draft.as_file());
    let outside = |error| Outside::note(error, Some(parent.clone()));
    let done = write(&mut out).map_err(outside)?;
    let written = out.into_inner().map_err(std::io::IntoInnerError::into_error);
    written.with_context(failed).map_err(outside)?;
    committing();
    draft.as_file().sync_all().with_context(failed).map_err(outside)?;
    let published = match force {
        true => draft.persist(&path),
        false => draft.persist_noclobber(&path),
    };
    published.map_err(|error| error.error).with_context(failed)?;
    File::open(&parent).and_then(|it| it.sync_all()).with_context(failed)?;
    Ok(done)
}

fn layers(plan: &Plan) -> Vec<Value> {
    let layers = plan.layers.iter().map(|layer| {
        json!({
            "diffId": layer.diff_id.to_string(),
            "digest": layer.descriptor.digest.to_string(),
            "mediaType": layer.descriptor.media_type,
            "bytes": layer.descriptor.size,
            "from": match layer.how {
                How::There | How::Kept => "kept",
                How::Plain => "plain",
                How::Compressed | How::New => "compressed",
            },
        })
    });
    layers.collect()
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}
