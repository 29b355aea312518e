//! `load`: imports all images of an archive of `save`.

use std::fs::File;
use std::io::{IsTerminal as _, Seek as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::{Args, ValueHint};
use container::copy::{Destination, LinkHandling, NewOwner, unpack};
use oci::docker::Archive;
use oci::layout::Layout;
use oci::source::{Choice, ImageSource, Input};
use store::{OpenOptions, RefName, Store};
use transfer::import::{BUDGET, ImportOptions, Limits, open_archive};

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
        the names that they have in it. `quire import` reads other formats, and gives an image another name.";
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
    if let Input::File(path) = &input {
        let found = std::fs::metadata(path);
        let found = found.with_context(|| format!("cannot read {}", path.display()))?;
        if found.is_dir() {
            let stem = stem(&input);
            let store = context.open(OpenOptions::create())?;
            return import_all(context, args, &store, &of_layout(path, stem.as_deref())?);
        }
    }
    let store = context.open(OpenOptions::create())?;
    let resources = JobResources::new(context, &store, BUDGET);
    let limits = Limits::default();
    let opened = resources.during(|environment| open_archive(&input, &limits, environment))?;
    let mut file = opened?;
    let archive = Archive::open(file.try_clone()?)?;
    if archive.has("manifest.json") {
        let images = of_docker_archive(&archive, &input, &file)?;
        return import_all(context, args, &store, &images);
    }
    if !archive.has("oci-layout") {
        bail!(
            "{input} is neither a docker-archive nor an oci-archive: it has no manifest.json and no oci-layout"
        );
    }
    let scratch = tempfile::tempdir();
    let scratch = scratch.context("cannot make a temporary directory for the archive")?;
    file.rewind()?;
    let directory = File::open(scratch.path())?;
    // The archive may be hostile: it cannot write outside of the directory.
    let to = Destination {
        root: directory.as_fd(),
        directory: Vec::new(),
        links: LinkHandling::Refused,
        owner: NewOwner::Caller,
        keeps_set_ids: false,
    };
    unpack(&file, &to, &|| {}).with_context(|| format!("cannot unpack {input}"))?;
    let images = of_layout(scratch.path(), stem(&input).as_deref())?;
    import_all(context, args, &store, &images)
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
    let mut loaded = Vec::new();
    for names in &images {
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
            let source = source(Choice::Named(name.clone()));
            loaded.push(LoadedImage { source, name: name.parse()? });
        }
    }
    Ok(loaded)
}

/// Returns all images of an OCI layout. `stem` is the name of images that have only a tag.
fn of_layout(directory: &Path, stem: Option<&str>) -> anyhow::Result<Vec<LoadedImage>> {
    let layout = Layout::open(directory)?;
    let mut loaded = Vec::new();
    let mut seen = Vec::new();
    // Signatures are no images.
    for entry in layout.entries().iter().filter(|it| !it.is_attached()) {
        let (choice, name) = match entry.name() {
            // An index may list an image for each platform, of which the import chooses one.
            Some(name) if seen.contains(&name) => continue,
            Some(name) => {
                seen.push(name);
                let whole = match name.contains([':', '/']) {
                    true => name.to_owned(),
                    false => format!("{}:{name}", stem.unwrap_or("loaded")),
                };
                (Choice::Named(name.to_owned()), whole)
            }
            None => (Choice::Digest(entry.digest), stem.unwrap_or("loaded").to_owned()),
        };
        let source = ImageSource::Layout { directory: directory.to_owned(), choice };
        loaded.push(LoadedImage { source, name: name.parse()? });
    }
    if loaded.is_empty() {
        bail!("the layout has no images");
    }
    Ok(loaded)
}

fn import_all(
    context: &Context,
    args: &Load,
    store: &Store,
    images: &[LoadedImage],
) -> anyhow::Result<Answer> {
    let (platform, other_platform) = platform(None)?;
    let form = choose(&args.form, store)?;
    for LoadedImage { source, name } in images {
        let options = ImportOptions {
            name: Some(name),
            platform: &platform,
            other_platform,
            form,
            ..ImportOptions::default()
        };
        let resources = JobResources::new(context, store, BUDGET);
        resources.during(|environment| {
            transfer::import::import(store, source, environment, &options)
        })??;
        report::line(&format!("Loaded image: {name}"))?;
    }
    Ok(Answer::Yes)
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
}
