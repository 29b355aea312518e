//! `mkcomposefs`: makes an image from a directory or a dump.

use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, IsTerminal as _, Write};
use std::num::NonZeroUsize;
use std::os::fd::AsFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use image::dump::Strictness;
use image::erofs::{Profile, Version, Versions, write};
use image::tree::Tree;
use image::verity::{Algorithm, ImageId, Tee};
use store::walk::{self, COMPOSEFS_INLINE_MAX, Devices, Hardlinks, KeptXattrs, Times};

use super::getopt::{Given, Options, Spec};
use super::objects::Objects;
use super::{Arguments, Failure, refuse, wrong_option};

pub(super) const USAGE: &str = "[OPTIONS] SOURCE IMAGE

SOURCE is a directory, or with --from-file a dump; - is standard input. IMAGE is a file; - is standard output.

Options:
  --digest-store=PATH   Copy files into this directory, named by their digest
  --use-epoch           Set all modification times to 0
  --skip-devices        Leave out device nodes
  --skip-xattrs         Leave out xattrs
  --user-xattrs         Leave out xattrs other than user.*
  --print-digest        Print the fs-verity digest of the image
  --print-digest-only   Print the digest, and do not write the image
  --from-file           SOURCE is a dump
  --min-version=N       Oldest allowed format version (default 0)
  --max-version=N       Newest allowed format version (default 1, or 0 with --min-version)
  --threads=N           Number of threads that read files (default: one for each processor)";

const SPEC: Spec = Spec {
    short: &[],
    long: &[
        ("digest-store", true),
        ("use-epoch", false),
        ("skip-devices", false),
        ("skip-xattrs", false),
        ("user-xattrs", false),
        ("print-digest", false),
        ("print-digest-only", false),
        ("from-file", false),
        ("min-version", true),
        ("max-version", true),
        ("threads", true),
    ],
};

/// Maximum number of threads; more threads would only wait for each other.
const THREADS_MAX: usize = 256;

#[derive(Debug, Clone, PartialEq, Eq)]
enum TreeSource {
    Directory(PathBuf),
    Dump(PathBuf),
    DumpOnStandardInput,
}

/// The parsed command line.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Request {
    source: TreeSource,
    /// `None` if only the digest is printed.
    image: Option<OsString>,
    prints_digest: bool,
    digest_store: Option<PathBuf>,
    times: Times,
    devices: Devices,
    xattrs: KeptXattrs,
    versions: Versions,
    /// `None` means the number of processors.
    threads: Option<NonZeroUsize>,
}

pub(super) fn run(arguments: Arguments) -> Result<(), Failure> {
    let request = Request::parse(arguments)?;
    let digest = Output::open(request.image.as_deref())?.fill(|out| make(&request, out))?;
    if let Some(digest) = digest {
        writeln!(io::stdout(), "{digest}").context("cannot print the digest")?;
    }
    Ok(())
}

/// Makes the image, and returns its digest if the request prints it.
fn make(request: &Request, out: &mut impl Write) -> Result<Option<ImageId>, Failure> {
    let tree = read(request)?;
    let profile = Profile::Composefs(request.versions);
    if !request.prints_digest {
        write(&tree, &profile, out).context("cannot write file")?;
        return Ok(None);
    }
    let mut out = Tee::new(out, Algorithm::Sha256);
    write(&tree, &profile, &mut out).context("cannot write file")?;
    Ok(Some(out.finish().1.into()))
}

fn read(request: &Request) -> Result<Tree, Failure> {
    let path = match &request.source {
        TreeSource::Directory(path) => return read_directory(path, request),
        TreeSource::DumpOnStandardInput => Path::new("/dev/stdin"),
        TreeSource::Dump(path) => path,
    };
    let file = match &request.source {
        TreeSource::DumpOnStandardInput => File::from(io::stdin().as_fd().try_clone_to_owned()?),
        _ => File::open(path).with_context(|| format!("open `{}`", path.display()))?,
    };
    // Any value of the variable enables strict parsing. Source: composefs, `tools/mkcomposefs.c`.
    let strictness = match std::env::var_os("CFS_PARSE_STRICT") {
        Some(_) => Strictness::Strict,
        None => Strictness::Lenient,
    };
    Ok(image::dump::parse(BufReader::with_capacity(1 << 17, file), strictness)?)
}

fn read_directory(path: &Path, request: &Request) -> Result<Tree, Failure> {
    // O_NOFOLLOW: like the C tool, refuse a symlink to a directory.
    let flags = rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::NOFOLLOW;
    let flags = i32::try_from(flags.bits()).context("flags fit into an int")?;
    let directory = OpenOptions::new().read(true).custom_flags(flags).open(path);
    let directory = directory.with_context(|| format!("error accessing {}", path.display()))?;
    let processors = || std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let options = walk::Options {
        hardlinks: Hardlinks::Split,
        xattrs: request.xattrs,
        times: request.times,
        devices: request.devices,
        inline_max: COMPOSEFS_INLINE_MAX,
        threads: request.threads.unwrap_or_else(processors),
    };
    let objects = request.digest_store.as_deref().map(Objects::new);
    let tree = walk::tree(directory.as_fd(), path, &options, |source| match &objects {
        Some(objects) => objects.put(source),
        None => Ok(source.digest(Algorithm::Sha256)?),
    })?;
    if let Some(objects) = objects {
        objects.publish()?;
    }
    Ok(tree)
}

impl Request {
    fn parse(arguments: Arguments) -> Result<Self, Failure> {
        let mut options = Options::new(SPEC, arguments);
        let (mut from_file, mut prints_digest, mut digest_only) = (false, false, false);
        let (mut digest_store, mut threads) = (None, None);
        let (mut times, mut devices) = (Times::Exact, Devices::Keep);
        let (mut skips_xattrs, mut only_user_xattrs) = (false, false);
        let (mut min, mut max) = (None, None);
        while let Some(given) = options.next().map_err(|error| wrong_option(&error))? {
            let Given::Long(name, value) = given else { continue };
            match name {
                "digest-store" => digest_store = Some(PathBuf::from(value)),
                "use-epoch" => times = Times::Epoch,
                "skip-devices" => devices = Devices::Skip,
                "skip-xattrs" => skips_xattrs = true,
                "user-xattrs" => only_user_xattrs = true,
                "print-digest" => prints_digest = true,
                "print-digest-only" => (prints_digest, digest_only) = (true, true),
                "from-file" => from_file = true,
                "min-version" => min = Some(version(&value, "min")?),
                "max-version" => max = Some(version(&value, "max")?),
                "threads" => threads = Some(thread_count(&value)?),
                other => unreachable!("--{other} is not in SPEC"),
            }
        }
        let usage = |message: &str| Err(Failure::Usage(message.to_owned()));
        let mut others = options.others().into_iter();
        let (source, image) = match (others.next(), others.next(), others.next()) {
            (_, _, Some(_)) => return usage("Too many arguments"),
            (None, ..) => return usage("No source path specified"),
            (Some(source), Some(image), None) if !digest_only => (source, Some(image)),
            (Some(_), Some(_), None) => {
                return usage("Cannot specify destination path with --print-digest-only");
            }
            (Some(source), None, None) if digest_only => (source, None),
            (Some(_), None, None) => return usage("No destination path specified"),
        };
        if source.is_empty() {
            return refuse("Empty source path specified");
        }
        let xattrs = match (skips_xattrs, only_user_xattrs) {
            (false, false) => KeptXattrs::All,
            (true, false) => KeptXattrs::None,
            (false, true) => KeptXattrs::UserOnly,
            (true, true) => return refuse("--skip-xattrs and --user-xattrs exclude each other"),
        };
        Ok(Self {
            source: match (from_file, source.as_encoded_bytes()) {
                (false, _) => TreeSource::Directory(source.into()),
                (true, b"-") => TreeSource::DumpOnStandardInput,
                (true, _) => TreeSource::Dump(source.into()),
            },
            image,
            prints_digest,
            digest_store,
            times,
            devices,
            xattrs,
            versions: versions(min, max),
            threads,
        })
    }
}

/// Returns the range of versions. Like in the C tool, a missing bound is 0, unless both are missing.
fn versions(min: Option<Version>, max: Option<Version>) -> Versions {
    match (min, max) {
        (None, None) => Versions::default(),
        _ => Versions { min: min.unwrap_or(Version::V0), max: max.unwrap_or(Version::V0) },
    }
}

fn version(text: &OsStr, which: &str) -> Result<Version, Failure> {
    match number(text) {
        Some(0) => Ok(Version::V0),
        Some(1) => Ok(Version::V1),
        Some(other) => refuse(format!("unknown format version {other}: use 0 or 1")),
        None => refuse(format!("Invalid {which} version {}", text.display())),
    }
}

fn thread_count(text: &OsStr) -> Result<NonZeroUsize, Failure> {
    let count = number(text).and_then(|number| usize::try_from(number).ok());
    match count.and_then(NonZeroUsize::new) {
        Some(count) => Ok(count.min(NonZeroUsize::new(THREADS_MAX).unwrap_or(NonZeroUsize::MIN))),
        None => refuse(format!("Invalid threads count {}", text.display())),
    }
}

/// Parses a number like `strtol`, which also skips leading blanks.
fn number(text: &OsStr) -> Option<i64> {
    text.to_str()?.trim_ascii_start().parse().ok()
}

/// Where an image is written.
#[derive(Debug)]
pub(super) enum Output<'a> {
    Nowhere,
    Stdout(File),
    /// `is_new` if this program created the file.
    File {
        file: File,
        path: &'a Path,
        is_new: bool,
    },
}

impl<'a> Output<'a> {
    /// Opens and truncates a file; `-` is standard output.
    pub(super) fn open(path: Option<&'a OsStr>) -> Result<Self, Failure> {
        let Some(path) = path else { return Ok(Self::Nowhere) };
        if path == "-" {
            if io::stdout().is_terminal() {
                return refuse("stdout is a tty.  Refusing to use it");
            }
            // `std::io::Stdout` would search all output for newlines.
            let own = io::stdout().as_fd().try_clone_to_owned().context("cannot use stdout")?;
            return Ok(Self::Stdout(File::from(own)));
        }
        let path = Path::new(path);
        let mut options = OpenOptions::new();
        options.write(true);
        let (opened, is_new) = match options.clone().create_new(true).open(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                (options.create(true).truncate(true).open(path), false)
            }
            opened => (opened, true),
        };
        let name = || format!("failed to open output file {}", path.display());
        Ok(Self::File { file: opened.with_context(name)?, path, is_new })
    }

    /// Calls `write`. If it fails, a file that this program created is removed.
    pub(super) fn fill<T>(
        mut self,
        write: impl FnOnce(&mut Self) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let result = write(&mut self);
        if let (Err(_), Self::File { path, is_new: true, .. }) = (&result, &self) {
            // If the removal fails, this is ignored, because the first error is the important one.
            drop(std::fs::remove_file(path));
        }
        result
    }
}

impl Write for Output<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Nowhere => Ok(bytes.len()),
            Self::Stdout(file) | Self::File { file, .. } => file.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &str) -> Result<Request, String> {
        let arguments: Vec<_> = arguments.split(' ').map(OsString::from).collect();
        Request::parse(arguments.into_iter()).map_err(|failure| match failure {
            Failure::Usage(message) => format!("usage: {message}"),
            Failure::Error(error) => format!("{error:#}"),
        })
    }

    fn check_refused(arguments: &str, expect: &str) {
        assert_eq!(parse(arguments).unwrap_err(), expect, "{arguments}");
    }

    #[test]
    fn what_makes_no_sense() {
        check_refused("a", "usage: No destination path specified");
        check_refused("--print-digest a", "usage: No destination path specified");
        check_refused("a b c", "usage: Too many arguments");
        check_refused("--use-epoch", "usage: No source path specified");
        check_refused(" b", "Empty source path specified");
        check_refused(
            "--print-digest-only a b",
            "usage: Cannot specify destination path with --print-digest-only",
        );
        check_refused("a b --threads=0", "Invalid threads count 0");
        check_refused("a b --threads=3x", "Invalid threads count 3x");
        check_refused("a b --threads=-1", "Invalid threads count -1");
        check_refused("a b --min-version=", "Invalid min version ");
        check_refused("a b --max-version=x", "Invalid max version x");
        check_refused("a b --min=2", "unknown format version 2: use 0 or 1");
        check_refused("a b --max-version=-1", "unknown format version -1: use 0 or 1");
        check_refused(
            "--user-xattrs a --skip-xattrs b",
            "--skip-xattrs and --user-xattrs exclude each other",
        );
        check_refused(
            "--use a b",
            "usage: option '--use' is ambiguous; possibilities: '--use-epoch' '--user-xattrs'",
        );
        check_refused("-x a b", "usage: invalid option -- 'x'");
    }

    fn check_versions(arguments: &str, min: Version, max: Version) {
        let found = parse(&format!("a b {arguments}").trim_end().replace("  ", " ")).unwrap();
        assert_eq!(found.versions, Versions { min, max }, "{arguments}");
    }

    #[test]
    fn versions_that_are_not_given() {
        use Version::{V0, V1};
        check_versions("", V0, V1);
        check_versions("--min-version=0", V0, V0);
        check_versions("--min-version=1", V1, V0);
        check_versions("--max-version=0", V0, V0);
        check_versions("--max-version=1", V0, V1);
        check_versions("--min-version=0 --max-version=1", V0, V1);
    }

    #[test]
    fn what_is_asked_for() {
        let found = parse("--from-f - --print-digest-only").unwrap();
        assert_eq!((found.source, found.image), (TreeSource::DumpOnStandardInput, None));
        assert!(found.prints_digest);
        let found = parse("--skip-d --user -- --use-epoch -").unwrap();
        assert_eq!(found.source, TreeSource::Directory("--use-epoch".into()));
        assert_eq!(found.image, Some("-".into()));
        assert_eq!(
            (found.devices, found.xattrs, found.times),
            (Devices::Skip, KeptXattrs::UserOnly, Times::Exact)
        );
    }
}
