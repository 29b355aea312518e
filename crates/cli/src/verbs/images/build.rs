//! `build`: writes an image file and optionally a folder of objects, by importing into a temporary store.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, ErrorKind, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::{Args, ValueHint};
use image::tree::{Content, Location, Node};
use kernel::files::NameOutcome;
use oci::source::ImageSource;
use rustix::fs::{FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use serde::Serialize;
use store::{OpenOptions, Store};
use tempfile::{TempDir, TempPath};
use transfer::import::BUDGET;

use crate::Answer;
use crate::args::TreeOptions;
use crate::output::report;
use crate::session::context::Context;
use crate::session::failure::UsageError;
use crate::session::output_file;
use crate::session::resources::JobResources;
use crate::session::target;
use crate::verbs::VerbArgs;
use crate::verbs::images::import::of_tree;

#[derive(Debug, Args)]
pub(crate) struct Build {
    /// Source, as for `import`
    pub(crate) source: OsString,
    /// Image file to write, - for standard output
    #[arg(value_hint = ValueHint::FilePath)]
    pub(crate) image: PathBuf,
    #[command(flatten)]
    pub(crate) tree: TreeOptions,
    /// Copy the file data into this object directory
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) digest_store: Option<PathBuf>,
}

impl VerbArgs for Build {
    const NAME: &'static str = "build";
    const ABOUT: &'static str = "Write an image file, without a store";
    const EXAMPLES: &'static str = "quire build dir:/srv/root root.erofs\n  quire build --digest-store objects dir:/srv/root root.erofs";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        build(context, self)
    }
}

/// Prefix of temporary files and folders that a build makes next to its output.
const PREFIX: &str = ".quire-build-";
/// Mode of an image file: anyone may read it, as far as the umask permits.
const MODE: u32 = 0o644;

/// Report of `build --json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct BuildReport {
    /// Image id.
    image: String,
    /// Size of the image file.
    bytes: report::Bytes,
}

impl BuildReport {
    fn text(&self) -> &str {
        &self.image
    }
}

pub(crate) fn build(context: &Context, args: &Build) -> anyhow::Result<Answer> {
    let source = ImageSource::parse(&args.source)?;
    // The output is checked before the work, which may take long.
    let output = match args.image.as_os_str().as_bytes() {
        b"-" if context.json => {
            let reason = "--json: the image is already written to standard output";
            return Err(UsageError(reason.to_owned()).into());
        }
        b"-" => None,
        _ => Some(Output::new(&args.image)?),
    };
    // The work folder is next to the output, so that objects need not be copied to another file system.
    let beside = match (&args.digest_store, &output) {
        (Some(folder), _) => {
            std::fs::create_dir_all(folder)
                .with_context(|| format!("cannot make {}", folder.display()))?;
            folder.clone()
        }
        (None, Some(_)) => parent(&args.image).to_owned(),
        (None, None) => std::env::temp_dir(),
    };
    clear_stale(&beside, context.who().user);
    let (place, lock) = workplace(&beside)?;
    let answer = build_in(context, args, &source, output, &place);
    let path = place.path().to_owned();
    if let Err(error) = place.close() {
        let path = path.display();
        context.remark(&format!(
            "cannot remove {path}: {error}; the next build in this directory removes it"
        ));
    }
    // The lock is held until now, so that other builds do not remove the folder as a leftover.
    drop(lock);
    answer
}

/// Builds through a store in the folder `place`.
fn build_in(
    context: &Context,
    args: &Build,
    source: &ImageSource,
    output: Option<Output>,
    place: &TempDir,
) -> anyhow::Result<Answer> {
    let path = std::path::absolute(place.path())?.join("store");
    let store = Store::open(&path, context.who(), context.with_hash(OpenOptions::create()))?;
    let options = of_tree(&args.tree);
    let done = JobResources::new(context, &store, BUDGET)
        .during(|environment| transfer::import::import(&store, source, environment, &options))??;
    let image = store.open_image(&done.image)?;
    if let Some(folder) = &args.digest_store {
        give_objects(
            &store,
            &target::read(&store, &image)?,
            folder,
            &place.path().join("objects"),
        )?;
    }
    let mut bytes = image.image.into_file();
    let Some(output) = output else {
        let mut out = report::standard_output();
        std::io::copy(&mut bytes, &mut out)?;
        out.flush()?;
        return Ok(Answer::Yes);
    };
    output.finish(&mut bytes)?;
    let told =
        BuildReport { image: done.image.to_string(), bytes: report::Bytes(done.image_bytes) };
    if context.json {
        report::json(&told)?;
    } else if !context.is_quiet() {
        report::line(told.text())?;
    }
    Ok(Answer::Yes)
}

/// Stores the image's objects in a folder that may have some of them already. The missing objects are copied to `work`
/// and synced together; then they get their names, which are also synced together. A file with an object's name is
/// therefore complete even after a crash.
fn give_objects(
    store: &Store,
    tree: &image::tree::Tree,
    folder: &Path,
    work: &Path,
) -> anyhow::Result<()> {
    let failed = || format!("cannot store objects in {}", folder.display());
    std::fs::create_dir(work).with_context(failed)?;
    let mut new = BTreeSet::new();
    let mut walk = tree.walk();
    while let Some((_, entry)) = walk.next() {
        let Node::Regular(Content::External { object: Some(object), location, .. }) =
            entry.inode.node()
        else {
            continue;
        };
        if location != Location::Object
            || new.contains(&object)
            || std::fs::symlink_metadata(folder.join(object.path())).is_ok()
        {
            continue;
        }
        let mut from = store.object(&object)?;
        let mut options = File::options();
        std::os::unix::fs::OpenOptionsExt::mode(options.write(true).create_new(true), MODE);
        let mut copy = options.open(work.join(object.to_string())).with_context(failed)?;
        match from.file() {
            Some(file) => {
                kernel::files::copy(file.as_fd(), copy.as_fd()).map(drop).map_err(io::Error::from)
            }
            None => io::copy(&mut from, &mut copy).map(drop),
        }
        .with_context(|| format!("cannot copy object {object}"))?;
        new.insert(object);
    }
    if new.is_empty() {
        return Ok(());
    }
    let opened = File::open(folder).with_context(failed)?;
    let from = File::open(work).with_context(failed)?;
    rustix::fs::syncfs(&opened).with_context(failed)?;
    for object in new {
        let path = object.path();
        let to = folder.join(&path);
        std::fs::create_dir_all(parent(&to)).with_context(failed)?;
        let name = object.to_string();
        match kernel::files::rename_new((from.as_fd(), &*name), (opened.as_fd(), &*path))
            .with_context(failed)?
        {
            // If another process stored the same object, our copy is removed with the work folder.
            NameOutcome::Now | NameOutcome::Taken => {}
        }
    }
    rustix::fs::syncfs(&opened).with_context(failed)
}

/// A file that appears completely or not at all. If [`output_file::unnamed`] can make it, it has no name until it is
/// finished; otherwise its name begins with [`PREFIX`].
struct Output {
    to: PathBuf,
    folder: File,
    file: File,
    /// Name of an unfinished file, which is removed on drop.
    name: Option<TempPath>,
}

impl Output {
    fn new(to: &Path) -> anyhow::Result<Self> {
        let folder = parent(to);
        target::check_directory(folder)?;
        match std::fs::metadata(to) {
            Ok(found) if found.is_dir() => {
                bail!("\"{}\" is a directory: name the file to write", to.display())
            }
            // The rename would replace the existing file, which must not happen to a device or another special file.
            Ok(found) if !found.is_file() => {
                bail!("\"{}\" is not a regular file; - is standard output", to.display())
            }
            _ => {}
        }
        let failed = || format!("cannot write in {}", folder.display());
        let opened = File::open(folder).with_context(failed)?;
        let unnamed = output_file::unnamed(opened.as_fd(), MODE).with_context(failed)?;
        let (file, name) = match unnamed {
            Some(file) => (file, None),
            None => {
                let mode = std::os::unix::fs::PermissionsExt::from_mode(MODE);
                let file = prefixed().permissions(mode).tempfile_in(folder).with_context(failed)?;
                lock(file.as_file()).with_context(failed)?;
                let (file, name) = file.into_parts();
                (file, Some(name))
            }
        };
        Ok(Self { to: to.to_owned(), folder: opened, file, name })
    }

    fn finish(mut self, from: &mut File) -> anyhow::Result<()> {
        let to = self.to.display().to_string();
        let failed = || format!("cannot write {to}");
        std::io::copy(from, &mut self.file).with_context(failed)?;
        self.file.sync_all().with_context(failed)?;
        match self.name.take() {
            Some(name) => name.persist(&self.to).map_err(|it| it.error).with_context(failed),
            None => self.link().with_context(failed),
        }
    }

    /// Gives the file its name. Under the temporary name that it may need, a lock shows that it is not a leftover.
    fn link(&self) -> Result<(), Errno> {
        let name = self.to.file_name().ok_or(Errno::ISDIR)?;
        let (file, folder) = (self.file.as_fd(), self.folder.as_fd());
        if kernel::files::link(file, folder, name)? == NameOutcome::Now {
            return Ok(());
        }
        rustix::fs::flock(file, FlockOperation::LockExclusive)?;
        output_file::replace(file, folder, name, PREFIX)
    }
}

/// Returns the parent directory of a path.
fn parent(path: &Path) -> &Path {
    path.parent().filter(|it| !it.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn prefixed() -> tempfile::Builder<'static, 'static> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(PREFIX);
    builder
}

/// Makes a work folder, and returns it with the lock that shows other builds that it is in use.
fn workplace(beside: &Path) -> anyhow::Result<(TempDir, File)> {
    let failed = || format!("cannot write in {}", beside.display());
    loop {
        let place = prefixed().tempdir_in(beside).with_context(failed)?;
        let opened = File::open(place.path());
        match opened {
            Ok(folder) => {
                lock(&folder).with_context(failed)?;
                // Before the lock was taken, another build may have removed the folder as a leftover.
                if place.path().exists() {
                    return Ok((place, folder));
                }
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_context(failed),
        }
    }
}

fn lock(file: &File) -> Result<(), Errno> {
    rustix::fs::flock(file, FlockOperation::LockExclusive)
}

/// Removes leftovers of this user's killed builds from a folder. Failures are ignored.
fn clear_stale(folder: &Path, user: u32) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if !entry.file_name().as_bytes().starts_with(PREFIX.as_bytes()) {
            continue;
        }
        let path = entry.path();
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let Ok(opened) = rustix::fs::open(&path, flags, Mode::empty()) else { continue };
        let Ok(stat) = rustix::fs::fstat(&opened) else { continue };
        let locked = rustix::fs::flock(&opened, FlockOperation::NonBlockingLockExclusive);
        if stat.st_uid != user || locked.is_err() {
            continue;
        }
        let removed = match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => std::fs::remove_dir_all(&path),
            _ => std::fs::remove_file(&path),
        };
        tracing::debug!(path = %path.display(), ?removed, "left by a killed build");
    }
}
