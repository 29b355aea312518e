//! `load`: imports all images of an archive of `save`.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, IsTerminal as _, Read, Seek as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, bail};
use clap::{Args, ValueHint};
use container::copy::{Destination, LinkHandling, NewOwner, unpack};
use oci::docker::Archive;
use oci::layout::Layout;
use oci::manifest::Descriptor;
use oci::source::{Choice, ImageSource, Input};
use store::{DiskRoom, OpenOptions, RefName, Store};
use transfer::import::{BUDGET, ImportContext, ImportError, ImportOptions, Limits, open_archive};

use crate::Answer;
use crate::args::FormOptions;
use crate::output::report;
use crate::session::context::Context;
use crate::session::forms::choose;
use crate::session::resources::JobResources;
use crate::verbs::VerbArgs;
use crate::verbs::images::import::platform;

#[derive(Debug, Args)]
pub(crate) struct Load {
    /// Read this archive, or the OCI layout in this directory; by default standard input
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::AnyPath)]
    pub(crate) input: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) form: FormOptions,
    /// Print no progress
    #[arg(short = 'q', hide = true)]
    pub(crate) is_silent: bool,
}

impl VerbArgs for Load {
    const NAME: &'static str = "load";
    const ABOUT: &'static str =
        "Load the images of an archive that docker, podman or `quire save` wrote";
    const DETAILS: &'static str = "The archive is a docker-archive or an oci-archive, compressed or not. The images get \
        the names that they have in it, and a single image without a name gets that of the file. `quire import` reads \
        other formats, and gives an image another name.";
    const EXAMPLES: &'static str = "quire load -i debian.tar\n  docker save app | quire load";
    const PRINTS_JSON: bool = false;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        load(context, self)
    }
}

fn load(context: &Context, args: &Load) -> anyhow::Result<Answer> {
    let input = match &args.input {
        Some(path) if path.as_os_str() != "-" => Input::File(path.clone()),
        _ if std::io::stdin().is_terminal() => {
            bail!("standard input is a terminal: redirect an archive to it, or use --input FILE")
        }
        _ => Input::Stdin,
    };
    let context = &match args.is_silent {
        true => context.without_progress(),
        false => context.clone(),
    };
    let directory = match &input {
        Input::File(path) => {
            let found = std::fs::metadata(path);
            let found = found.with_context(|| format!("cannot read {}", path.display()))?;
            found.is_dir().then_some(path.as_path())
        }
        Input::Stdin => None,
    };
    let store = context.open(OpenOptions::create())?;
    let resources = JobResources::new(context, &store, BUDGET);
    let mut loaded = Vec::new();
    let done = resources.during(|environment| {
        let run = LoadRun { args, store: &store, environment, loaded: &mut loaded };
        match directory {
            Some(directory) => run.layout(directory, stem(&input).as_deref()),
            None => run.archive(&input),
        }
    })?;
    // Images before a failed one are loaded.
    for name in &loaded {
        report::line(&format!("Loaded image: {name}"))?;
    }
    done?;
    Ok(Answer::Yes)
}

struct LoadRun<'a> {
    args: &'a Load,
    store: &'a Store,
    environment: &'a ImportContext<'a>,
    /// Names of the images that are loaded.
    loaded: &'a mut Vec<RefName>,
}

impl LoadRun<'_> {
    fn archive(self, input: &Input) -> anyhow::Result<()> {
        let mut file = open_archive(input, &Limits::default(), self.environment)?;
        let archive = Archive::open(file.try_clone()?)?;
        if archive.has("manifest.json") {
            let images = of_docker_archive(&archive, input, &file)?;
            return self.import_all(&images);
        }
        if !archive.has("oci-layout") {
            bail!(
                "{input} is neither a docker-archive nor an oci-archive: it has no manifest.json and no oci-layout"
            );
        }
        let scratch = self.store.scratch()?;
        file.rewind()?;
        // The archive may be hostile: it cannot write outside of the directory.
        let to = Destination {
            root: scratch.directory(),
            directory: Vec::new(),
            links: LinkHandling::Refused,
            owner: NewOwner::Caller,
            keeps_set_ids: false,
            is_mounted_file: false,
        };
        let cancel = self.environment.cancel;
        let source = LimitedReader { inner: &file, room: scratch.room(), cancel };
        match unpack(source, &to, &|| {}) {
            Err(_) if cancel.load(Ordering::Relaxed) => return Err(ImportError::Cancelled.into()),
            unpacked => unpacked.with_context(|| format!("cannot unpack {input}"))?,
        };
        self.layout(scratch.path(), stem(input).as_deref())
    }

    fn layout(self, directory: &Path, stem: Option<&str>) -> anyhow::Result<()> {
        let images = of_layout(&Layout::open(directory)?, directory, stem)?;
        self.import_all(&images)
    }

    fn import_all(self, images: &[LoadedImage]) -> anyhow::Result<()> {
        let (platform, other_platform) = platform(None)?;
        let form = choose(&self.args.form, self.store)?;
        for LoadedImage { source, name } in images {
            let options = ImportOptions {
                name: Some(name),
                platform: &platform,
                other_platform,
                form,
                ..ImportOptions::default()
            };
            transfer::import::import(self.store, source, self.environment, &options)?;
            self.loaded.push(name.clone());
        }
        Ok(())
    }
}

/// The tar of an archive that is unpacked. It ends with an error when the command is interrupted, or when its files
/// would fill the disk.
pub(crate) struct LimitedReader<'a, R> {
    pub(crate) inner: R,
    pub(crate) room: &'a DiskRoom,
    pub(crate) cancel: &'a AtomicBool,
}

impl<R: Read> Read for LimitedReader<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.cancel.load(Ordering::Relaxed) {
            return Err(io::Error::other("cancelled"));
        }
        let count = self.inner.read(into)?;
        self.room.take(count as u64)?;
        Ok(count)
    }
}

/// An image of an archive, and its future name.
struct LoadedImage {
    source: ImageSource,
    name: RefName,
}

/// Returns the name of an archive's file without the suffix.
fn stem(input: &Input) -> Option<String> {
    let Input::File(path) = input else { return None };
    let name = path.file_name()?.to_str()?;
    let end = name.find(".tar").or_else(|| name.find(".tgz")).unwrap_or(name.len());
    Some(name[..end].to_owned()).filter(|it| !it.is_empty())
}

/// Returns all images of a docker-archive, which the process has open as `file`.
fn of_docker_archive(
    archive: &Archive,
    input: &Input,
    file: &File,
) -> anyhow::Result<Vec<LoadedImage>> {
    let identity = |it: std::fs::Metadata| (it.dev(), it.ino());
    let own = identity(file.metadata()?);
    // An unpacked archive has no name.
    let path = match input {
        Input::File(path) if std::fs::metadata(path).is_ok_and(|it| identity(it) == own) => {
            path.clone()
        }
        _ => PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd())),
    };
    let source = |choice| ImageSource::DockerArchive { file: Input::File(path.clone()), choice };
    let images = archive.images()?;
    let (mut loaded, mut named) = (Vec::new(), HashMap::new());
    for (at, names) in images.iter().enumerate() {
        if names.is_empty() {
            let Some(stem) = stem(input).filter(|_| images.len() == 1) else {
                bail!(
                    "an image of the archive has no name: `quire import docker-archive:FILE NAME` gives it one, if \
                    it is the only one"
                );
            };
            loaded.push(LoadedImage { source: source(Choice::Only), name: stem.parse()? });
        }
        for name in names {
            match named.insert(name, at) {
                None => {}
                Some(other) if other == at => continue,
                Some(_) => bail!("two images of the archive have the name {}", name.escape_debug()),
            }
            let source = source(Choice::Named(name.clone()));
            loaded.push(LoadedImage { source, name: name.parse()? });
        }
    }
    check_names(&loaded)?;
    Ok(loaded)
}

/// Returns all images of an OCI layout. `stem` is the name of images that have only a tag, and of an image without a
/// name.
fn of_layout(
    layout: &Layout,
    directory: &Path,
    stem: Option<&str>,
) -> anyhow::Result<Vec<LoadedImage>> {
    let stem = stem.unwrap_or("loaded");
    // Signatures are no images.
    let entries: Vec<_> = layout.entries().iter().filter(|it| !it.is_attached()).collect();
    let (mut found, mut seen) = (Vec::new(), HashSet::new());
    for name in entries.iter().filter_map(|it| it.name()) {
        // An index may list an image for each platform, of which the import chooses one.
        if !seen.insert(name) {
            continue;
        }
        let whole = match name.contains([':', '/']) {
            true => name.to_owned(),
            false => format!("{stem}:{name}"),
        };
        found.push((Choice::Named(name.to_owned()), whole));
    }
    let unnamed: Vec<_> = entries.iter().filter(|it| it.name().is_none()).collect();
    match unnamed[..] {
        [] => {}
        [only] => found.push((Choice::Digest(only.digest), stem.to_owned())),
        _ if found.is_empty() && are_of_platforms(&entries) => {
            found.push((Choice::Only, stem.to_owned()));
        }
        [first, ..] => bail!(
            "{} images have no name: unpack the archive, and give each image a name: `quire import oci:DIRECTORY@{} \
            NAME`",
            unnamed.len(),
            first.digest
        ),
    }
    if found.is_empty() {
        bail!("the layout has no images");
    }
    let image = |(choice, name): (Choice, String)| -> anyhow::Result<LoadedImage> {
        let source = ImageSource::Layout { directory: directory.to_owned(), choice };
        Ok(LoadedImage { source, name: name.parse()? })
    };
    let loaded = found.into_iter().map(image).collect::<anyhow::Result<Vec<_>>>()?;
    check_names(&loaded)?;
    Ok(loaded)
}

/// Whether these entries are one image, for a different platform each.
fn are_of_platforms(entries: &[&Descriptor]) -> bool {
    let platforms: Option<Vec<_>> = entries.iter().map(|it| it.platform.as_ref()).collect();
    platforms.is_some_and(|all| {
        all.iter().enumerate().all(|(at, platform)| !all[..at].contains(platform))
    })
}

/// Refuses two images that would get one name, because the second would replace the first.
fn check_names(images: &[LoadedImage]) -> anyhow::Result<()> {
    let mut names = HashSet::new();
    match images.iter().find(|it| !names.insert(it.name.as_str())) {
        Some(image) => bail!("two images of the archive would get the name {}", image.name),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archives_name_images_without_a_name() {
        let check = |path: &str, expect: Option<&str>| {
            assert_eq!(stem(&Input::File(path.into())).as_deref(), expect, "{path}");
        };
        check("a/app.tar", Some("app"));
        check("app.tar.gz", Some("app"));
        check("app", Some("app"));
        check(".tar", None);
        assert_eq!(stem(&Input::Stdin), None);
    }

    #[test]
    fn an_interrupted_archive_is_not_read_to_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let directory = File::open(folder.path()).unwrap();
        let room = DiskRoom::from_fd(std::os::fd::AsFd::as_fd(&directory)).unwrap();
        let cancel = AtomicBool::new(false);
        let mut reader = LimitedReader { inner: io::repeat(1), room: &room, cancel: &cancel };
        assert_eq!(reader.read(&mut [0; 8]).unwrap(), 8);
        cancel.store(true, Ordering::Relaxed);
        assert_eq!(reader.read(&mut [0; 8]).unwrap_err().to_string(), "cancelled");
    }
}
