//! `composefs-info`: prints the contents of images.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use image::dump::{self, Escape, Links};
use image::erofs::read::{ImageTree, Owners, View, to_tree};
use image::tree::{Content, Entry, Inode, Location, Node};
use image::verity::{Algorithm, Hasher};
use kernel::verity::Measured;

use super::getopt::{Given, OptionError, Options, Spec};
use super::{Arguments, Failure, read_image, refuse};

pub(super) const USAGE: &str = "[--basedir=PATH] [--filter=NAME]... COMMAND IMAGE...

Commands:
  ls               List all paths
  dump             Write the image as a dump, one line for each entry
  objects          List the objects of the images
  missing-objects  List the objects that are not in --basedir
  measure-file     Print the fs-verity digests of files, which need not be images

Options:
  --basedir=PATH   Directory of the objects
  --filter=NAME    Show only this entry of the root directory, and the tree below it";

const SPEC: Spec = Spec { short: &[], long: &[("basedir", true), ("filter", true)] };

type Out = BufWriter<File>;

pub(super) fn run(arguments: Arguments) -> Result<(), Failure> {
    let mut options = Options::new(SPEC, arguments);
    let (mut basedir, mut filter) = (None, Vec::new());
    loop {
        match options.next() {
            Ok(None) => break,
            Ok(Some(Given::Long("basedir", path))) => basedir = Some(PathBuf::from(path)),
            Ok(Some(Given::Long(_, name))) if name.as_bytes().contains(&b'/') => {
                return refuse(format!("Filter must be a single name: {}", name.display()));
            }
            Ok(Some(Given::Long(_, name) | Given::Short(_, name))) => {
                filter.push(name.into_vec());
            }
            Err(error) => return Err(wrong_option(&error)),
        }
    }
    let usage = |message: &str| Err(Failure::Usage(message.to_owned()));
    let mut others = options.others().into_iter();
    let Some(command) = others.next() else { return usage("No command specified") };
    let show: Show = match command.as_bytes() {
        b"ls" => ls,
        b"dump" => write_dump,
        b"objects" | b"missing-objects" => |_, _, _| Ok(()),
        b"measure-file" if others.len() == 0 => return usage("No files specified"),
        b"measure-file" => return measure_files(others),
        _ => return refuse(format!("Unknown command '{}'", command.display())),
    };
    let basedir = basedir.as_deref().map(Basedir::open).transpose()?;
    if others.len() == 0 {
        return usage("No image path specified");
    }
    let mut out = standard_output()?;
    let mut objects = BTreeSet::new();
    // Like the C tool, print the results from before an error.
    let result = others.try_for_each(|path| {
        let filter = Filter(&filter);
        let image = read_image(&path)?;
        let image = to_tree(&image, View::Composefs(Owners::FirstMet))
            .with_context(|| format!("Failed to load '{}'", path.display()))?;
        match command.as_bytes() {
            b"objects" => filter.objects(&image, |_path| true, &mut objects),
            b"missing-objects" => {
                let is_missing = |path: &[u8]| !basedir.as_ref().is_some_and(|it| it.has(path));
                filter.objects(&image, is_missing, &mut objects);
            }
            _ => show(&image, filter, &mut out).context("cannot write")?,
        }
        Ok(())
    });
    if result.is_ok() {
        for object in objects {
            out.write_all(&object).and_then(|()| out.write_all(b"\n")).context("cannot write")?;
        }
    }
    out.flush().context("cannot write")?;
    result
}

type Show = fn(&ImageTree, Filter<'_>, &mut Out) -> io::Result<()>;

/// Like the C tool, this prints `Def` on standard output, because scripts may look for it.
fn wrong_option(error: &OptionError) -> Failure {
    drop(writeln!(io::stdout(), "Def"));
    super::wrong_option(error)
}

/// Returns a buffered standard output. `std::io::Stdout` would search all output for newlines.
fn standard_output() -> Result<Out, Failure> {
    let own = io::stdout().as_fd().try_clone_to_owned().context("cannot use stdout")?;
    Ok(BufWriter::with_capacity(1 << 16, File::from(own)))
}

/// Names of the entries of the root directory to show; an empty list shows all.
#[derive(Debug, Clone, Copy)]
struct Filter<'a>(&'a [Vec<u8>]);

impl Filter<'_> {
    fn keeps(self, name: &[u8]) -> bool {
        self.0.is_empty() || self.0.iter().any(|it| it == name)
    }

    /// Calls `show` for each entry that passes the filter.
    fn each(
        self,
        image: &ImageTree,
        mut show: impl FnMut(&[u8], Entry<'_>) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut is_kept = true;
        let mut walk = image.tree.walk();
        while let Some((path, entry)) = walk.next() {
            if path.len() == entry.name.len() + 1 {
                is_kept = self.keeps(entry.name);
            }
            if is_kept {
                show(path, entry)?;
            }
        }
        Ok(())
    }

    /// Adds the object paths of the files that pass the filter and `is_wanted`.
    fn objects(
        self,
        image: &ImageTree,
        is_wanted: impl Fn(&[u8]) -> bool,
        objects: &mut BTreeSet<Vec<u8>>,
    ) {
        let found = self.each(image, |_path, entry| {
            if let Some(place) = place(entry.inode)
                && !objects.contains(&place)
                && is_wanted(&place)
            {
                objects.insert(place);
            }
            Ok(())
        });
        found.expect("nothing is written");
    }
}

/// Returns the path of the object with a regular file's data, or `None` if the data is in the image.
fn place(inode: Inode<'_>) -> Option<Vec<u8>> {
    match inode.node() {
        Node::Regular(Content::External { location: Location::Path(path), .. }) => {
            Some(path.to_vec())
        }
        Node::Regular(Content::External {
            object: Some(object),
            location: Location::Object,
            ..
        }) => Some(object.path().into_bytes()),
        _ => None,
    }
}

fn ls(image: &ImageTree, filter: Filter<'_>, out: &mut Out) -> io::Result<()> {
    let mut is_met = vec![false; image.tree.inode_bound()];
    let mut line = Vec::new();
    filter.each(image, |path, entry| {
        line.clear();
        dump::escape(path, Escape::Nothing, &mut line);
        // For hard links to the same inode, only the first prints details.
        if !std::mem::replace(&mut is_met[entry.inode.id().index()], true) {
            match entry.inode.node() {
                Node::Directory => line.extend_from_slice(b"/\t"),
                Node::Symlink(target) => {
                    line.extend_from_slice(b"\t-> ");
                    dump::escape(target, Escape::Space, &mut line);
                }
                _ => {
                    if let Some(place) = place(entry.inode) {
                        line.extend_from_slice(b"\t@ ");
                        dump::escape(&place, Escape::Space, &mut line);
                    }
                }
            }
        }
        line.push(b'\n');
        out.write_all(&line)
    })
}

fn write_dump(image: &ImageTree, filter: Filter<'_>, out: &mut Out) -> io::Result<()> {
    let size = |directory: Inode<'_>| image.sizes[directory.id().index()];
    dump::write_some(&image.tree, Links::ToFirst, |name| filter.keeps(name), size, out)
}

/// The directory of `--basedir`.
struct Basedir(File);

impl Basedir {
    fn open(path: &Path) -> Result<Self, Failure> {
        let flags =
            rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
        let opened = rustix::fs::open(path, flags, rustix::fs::Mode::empty());
        let opened = opened.map_err(io::Error::from);
        let opened = opened.with_context(|| format!("Can't open basedir `{}`", path.display()))?;
        Ok(Self(File::from(opened)))
    }

    fn has(&self, place: &[u8]) -> bool {
        let start = place.iter().take_while(|byte| **byte == b'/').count();
        let path = Path::new(OsStr::from_bytes(&place[start..]));
        rustix::fs::statat(&self.0, path, rustix::fs::AtFlags::EMPTY_PATH).is_ok()
    }
}

fn measure_files(paths: impl Iterator<Item = OsString>) -> Result<(), Failure> {
    for path in paths {
        let mut file =
            File::open(&path).with_context(|| format!("Failed to open '{}'", path.display()))?;
        // Uses the digest that the kernel enforces. An error only means that the file has no fs-verity.
        let digest = match kernel::verity::measure(file.as_fd()) {
            Ok(Some(Measured::Sha256(digest))) => {
                image::verity::ObjectId::from_bytes(&digest).context("it has 32 bytes")?
            }
            _ => {
                let mut hasher = Hasher::new(Algorithm::Sha256);
                let mut buffer = vec![0; 1 << 18];
                loop {
                    let count = io::Read::read(&mut file, &mut buffer)
                        .with_context(|| format!("failed to measure '{}'", path.display()))?;
                    if count == 0 {
                        break;
                    }
                    hasher.update(&buffer[..count]);
                }
                hasher.finish().into()
            }
        };
        writeln!(io::stdout(), "{digest}").context("cannot write")?;
    }
    Ok(())
}
