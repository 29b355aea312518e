//! `save`: writes images as an archive that docker and podman load.

use std::fs::File;
use std::io::{self, Read as _, Write};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum, ValueHint};
use image::tar::Kind;
use image::tar::write::{Member, TarWriteError, Writer};
use image::tree::{Metadata, Timestamp};
use oci::Digest;
use store::{Resolved, Scratch, Store};
use tempfile::TempDir;
use transfer::export::{ArchivedImage, Compression, ExportError, Options, Output};
use transfer::progress::Event;

use crate::Answer;
use crate::session::context::Context;
use crate::session::layers;
use crate::session::output_file::{check_output, output};
use crate::session::resolve::resolve;
use crate::session::resources::scratch;
use crate::session::signals::{give_up_when, until_signal};
use crate::verbs::VerbArgs;

/// Format of an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SaveFormat {
    /// A tar that docker and podman load
    DockerArchive,
    /// A tar of an OCI layout
    OciArchive,
    /// A directory with an OCI layout
    OciDir,
}

#[derive(Debug, Args)]
pub(crate) struct Save {
    /// Write to this file, or directory for oci-dir; by default to standard output. An existing file is replaced
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::AnyPath)]
    pub(crate) output: Option<PathBuf>,
    /// Write this format
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = SaveFormat::DockerArchive)]
    pub(crate) format: SaveFormat,
    /// Compress the layers of an OCI layout with gzip; by default they are as in the manifest
    #[arg(long)]
    pub(crate) compress: bool,
    /// Accepted for older scripts: several images are always saved
    #[arg(short = 'm', long, hide = true)]
    pub(crate) multi_image_archive: bool,
    /// Print no progress
    #[arg(short = 'q', hide = true)]
    pub(crate) is_silent: bool,
    /// Names or ids of images
    #[arg(required = true)]
    pub(crate) names: Vec<String>,
}

impl VerbArgs for Save {
    const NAME: &'static str = "save";
    const ABOUT: &'static str = "Save images in an archive that docker and podman load";
    const DETAILS: &'static str = "Layers that several of the images share are saved once. `quire export` writes other \
        formats, and adds signatures.";
    const EXAMPLES: &'static str = "quire save -o debian.tar debian\n  quire save --format oci-archive -o all.tar debian app\n  quire save debian | gzip > debian.tar.gz";
    const PRINTS_JSON: bool = false;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        save(context, self)
    }
}

fn save(context: &Context, args: &Save) -> anyhow::Result<Answer> {
    let to = match (&args.output, args.format) {
        (None, SaveFormat::OciDir) => bail!("--format oci-dir needs --output DIRECTORY"),
        (None, _) => Output::Stdout,
        (Some(path), _) if path.as_os_str() == "-" => Output::Stdout,
        (Some(path), _) => Output::File(path.clone()),
    };
    if args.compress && args.format == SaveFormat::DockerArchive {
        bail!("--compress is for OCI layouts: pipe the archive into a compressor");
    }
    if args.format != SaveFormat::OciDir {
        check_output(context, &to, true)?;
    }
    let first = args.names.first().context("no image is named")?;
    let store = context.open_with(first)?;
    let mut images: Vec<SavedImage> = Vec::new();
    for name in &args.names {
        // An import of the archive would have the origin `local`, so the policies must accept the image now.
        let permitted = crate::session::policy::permit(context, &store, resolve(&store, name)?)?;
        let found = permitted.found();
        let manifest = found.manifest.with_context(|| layers::none(name, ""))?;
        let known = images.iter_mut().find(|it| it.image.manifest == manifest);
        match known {
            // Another name of the same image.
            Some(known) => {
                let new = found.name.iter().filter(|it| !known.image.names.contains(it));
                let new: Vec<_> = new.cloned().collect();
                known.image.names.extend(new);
            }
            None => images.push(SavedImage {
                image: ArchivedImage { manifest, names: found.name.iter().cloned().collect() },
                found: found.clone(),
            }),
        }
    }
    let progress = context.progress();
    let cancel = Arc::new(AtomicBool::new(false));
    give_up_when(&store, &cancel);
    let scratch = scratch(&store);
    let options = Options {
        threads: std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN),
        scratch: &scratch,
        progress: &|event: Event<'_>| {
            if !args.is_silent {
                progress.tell(event);
            }
        },
        cancel: &cancel,
    };
    let run = SaveRun { args, store: &store, options: &options };
    let work = || -> anyhow::Result<()> {
        // `gc` keeps the images and their objects while they are open.
        let open = images.iter().map(|it| store.open_found(&it.found));
        let _open = open.collect::<Result<Vec<_>, _>>()?;
        run.write(&images, &to)
    };
    let saved = until_signal(&cancel, work)?;
    progress.finish();
    saved?;
    Ok(Answer::Yes)
}

/// An image to save.
struct SavedImage {
    image: ArchivedImage,
    found: Resolved,
}

struct SaveRun<'a> {
    args: &'a Save,
    store: &'a Store,
    options: &'a Options<'a>,
}

impl SaveRun<'_> {
    fn write(&self, images: &[SavedImage], to: &Output) -> anyhow::Result<()> {
        match (self.args.format, to) {
            (SaveFormat::DockerArchive, to) => {
                let images: Vec<_> = images.iter().map(|it| it.image.clone()).collect();
                self.output(to, |out| {
                    let written =
                        transfer::export::to_docker_archive(self.store, &images, out, self.options);
                    Ok(written.map(drop)?)
                })
            }
            (SaveFormat::OciDir, Output::File(directory)) => self.layout(images, directory),
            (SaveFormat::OciDir, Output::Stdout) => bail!("a directory cannot be standard output"),
            (SaveFormat::OciArchive, to) => {
                let scratch = LayoutScratch::new(self.store)?;
                let directory = scratch.path().join("layout");
                self.layout(images, &directory)?;
                self.output(to, |out| archive(&directory, out, self.options.cancel))
            }
        }
    }

    fn output(
        &self,
        to: &Output,
        write: impl FnOnce(&mut dyn Write) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        output(to, true, write, || (self.options.progress)(Event::Committing))
    }

    fn layout(&self, images: &[SavedImage], directory: &Path) -> anyhow::Result<()> {
        use transfer::export::{plan_for_layout, to_layout};
        let compression = match self.args.compress {
            true => Compression::Gzip,
            false => Compression::AsItWas,
        };
        for saved in images {
            let manifest: &Digest = &saved.image.manifest;
            let plan = plan_for_layout(self.store, manifest, compression, directory, self.options)?;
            let names = saved.image.names.iter().map(|it| Some(it.as_str()));
            let names: Vec<_> =
                if saved.image.names.is_empty() { vec![None] } else { names.collect() };
            for name in names {
                let image = Some(&saved.found.image);
                to_layout(self.store, &plan, image, directory, name, self.options)?;
            }
        }
        Ok(())
    }
}

/// A directory for the layout of which an archive is made.
enum LayoutScratch {
    Store(Scratch),
    /// The user cannot write to the store.
    Other(TempDir),
}

impl LayoutScratch {
    fn new(store: &Store) -> anyhow::Result<Self> {
        if store.scratch_path().is_some() {
            return Ok(Self::Store(store.scratch()?));
        }
        let made = tempfile::tempdir();
        Ok(Self::Other(made.context("cannot make a temporary directory for the layout")?))
    }

    fn path(&self) -> &Path {
        match self {
            Self::Store(scratch) => scratch.path(),
            Self::Other(directory) => directory.path(),
        }
    }
}

/// Writes the tar of an OCI layout. The same layout always gives the same bytes.
fn archive(directory: &Path, out: &mut dyn Write, cancel: &AtomicBool) -> anyhow::Result<()> {
    let mut writer = Writer::new(out);
    let failed = || format!("cannot read {}", directory.display());
    for file in ["oci-layout", "index.json"] {
        add(&mut writer, file, &directory.join(file), cancel).with_context(failed)?;
    }
    let blobs = directory.join("blobs");
    for algorithm in names(&blobs).with_context(failed)? {
        let folder = blobs.join(&algorithm);
        for name in names(&folder).with_context(failed)? {
            let path = format!("blobs/{algorithm}/{name}");
            add(&mut writer, &path, &folder.join(&name), cancel).with_context(failed)?;
        }
    }
    writer.finish()?;
    Ok(())
}

/// Returns the names in a directory, sorted. Names in layouts are ASCII.
fn names(directory: &Path) -> io::Result<Vec<String>> {
    let names = std::fs::read_dir(directory)?.map(|it| it.map(|it| it.file_name()));
    let names = names.collect::<io::Result<Vec<_>>>()?;
    let mut names: Vec<_> = names.into_iter().filter_map(|it| it.into_string().ok()).collect();
    names.sort_unstable();
    Ok(names)
}

fn add(
    writer: &mut Writer<&mut dyn Write>,
    path: &str,
    file: &Path,
    cancel: &AtomicBool,
) -> anyhow::Result<()> {
    let mut file = File::open(file)?;
    let size = file.metadata()?.len();
    let mtime = Timestamp { seconds: 0, nanoseconds: 0 };
    let metadata = Metadata { permissions: 0o644, mtime, ..Metadata::IMPLICIT };
    let (path, kind) = (path.as_bytes(), Kind::Regular);
    writer.member(&Member { path, kind, metadata, size, xattrs: &[] })?;
    let mut buffer = vec![0; 256 << 10];
    loop {
        if cancel.load(Ordering::Relaxed) {
            return Err(ExportError::Cancelled.into());
        }
        let length = match file.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error.into()),
        };
        writer.content(&buffer[..length]).map_err(|error| match error {
            TarWriteError::Write(error) => anyhow::Error::from(error),
            error => error.into(),
        })?;
    }
}
