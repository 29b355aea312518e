//! A store with an image for containers, and the runtimes of this machine.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use image::erofs::{Profile, Versions};
use image::tree::{Builder, Content, InodeId, Link, Location, Metadata, Node, XattrsId};
use quire_container::runtime::Runtime;
use store::{OpenOptions, PermittedImage, Resolved, Store, Transaction, UsePolicy};

/// Returns the lock for one test, or `None` with a message if this process cannot mount.
///
/// Only one test runs at a time, because a process that monitors a container waits for all its children, which in this
/// process include those of other tests.
pub(crate) fn turn() -> Option<MutexGuard<'static, ()>> {
    static TURN: Mutex<()> = Mutex::new(());
    if !rustix::process::geteuid().is_root() {
        testing::skipped("containers need root");
        return None;
    }
    Some(TURN.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Returns all runtimes of this machine.
pub(crate) fn runtimes() -> Vec<Runtime> {
    let path = "/usr/local/bin:/usr/bin:/usr/local/sbin:/usr/sbin:/bin:/sbin".as_ref();
    let names = ["crun", "runc"];
    let found =
        names.iter().filter_map(|name| Runtime::locate(path, Some(name.as_ref()), None).ok());
    let found: Vec<_> = found.collect();
    if found.is_empty() {
        testing::skipped("crun is not installed");
    }
    found
}

/// A policy that allows all images.
struct Anything;

impl UsePolicy for Anything {
    type Refusal = Infallible;

    fn check(&self, _: &Store, _: &Resolved) -> Result<(), Infallible> {
        Ok(())
    }
}

/// A store with an image that contains some programs of this machine and their libraries.
pub(crate) struct Fixture {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) store: Store,
    pub(crate) found: Resolved,
}

impl Fixture {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(
            &folder.path().join("store"),
            store::Who::this_process(),
            OpenOptions::create(),
        )
        .unwrap();
        let import = store.begin().unwrap();
        let mut builder = Builder::new();
        for program in ["/bin/sh", "/bin/true", "/bin/cat", "/bin/sleep", "/bin/id"] {
            for file in with_libraries(Path::new(program)) {
                add(&mut builder, &import, &file, &std::fs::read(&file).unwrap(), 0o755);
            }
        }
        let script = Path::new("/bin/script");
        add(&mut builder, &import, script, b"#!/no/such/interpreter\n", 0o755);
        add(&mut builder, &import, Path::new("/bin/garbage"), b"garbage\n", 0o755);
        add(&mut builder, &import, Path::new("/etc/plain"), b"not a program\n", 0o644);
        for directory in ["proc", "sys", "dev", "tmp"] {
            builder.subdirectory(InodeId::ROOT, directory.as_bytes()).unwrap();
        }
        let mut draft = import.image().unwrap();
        let profile = Profile::Composefs(Versions::default());
        image::erofs::write(&builder.finish(), &profile, &mut draft).unwrap();
        let image = draft.finish().unwrap();
        import.commit().unwrap();
        let found = Resolved { image, name: None, manifest: None };
        Self { folder, store, found }
    }

    pub(crate) fn image(&self) -> PermittedImage {
        let Ok(permitted) = self.store.permit(&Anything, self.found.clone());
        permitted.open(&self.store).unwrap()
    }
}

fn add(
    builder: &mut Builder,
    import: &Transaction<'_>,
    path: &Path,
    bytes: &[u8],
    permissions: u16,
) {
    let bytes_of = std::os::unix::ffi::OsStrExt::as_bytes;
    let mut directory = InodeId::ROOT;
    let names: Vec<_> = image::tree::components(bytes_of(path.as_os_str())).collect();
    let (name, parents) = names.split_last().unwrap();
    for parent in parents {
        directory = builder.subdirectory(directory, parent).unwrap();
    }
    if builder.lookup(directory, name).is_some() {
        return;
    }
    let object = import.object(bytes).unwrap();
    let size = u64::try_from(bytes.len()).unwrap();
    let content = Content::External { size, object: Some(object), location: Location::Object };
    let metadata = Metadata { permissions, ..Metadata::IMPLICIT };
    let inode = builder.inode(&metadata, XattrsId::NONE, Node::Regular(content)).unwrap();
    builder.insert(directory, name, inode, Link::Equal).unwrap();
}

/// Returns a program and all libraries that `ldd` lists for it, by their paths.
fn with_libraries(program: &Path) -> Vec<PathBuf> {
    let output = Command::new("ldd").arg(program).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let words = text.split_whitespace().filter(|word| word.starts_with('/'));
    let all: BTreeSet<PathBuf> = words.map(PathBuf::from).collect();
    std::iter::once(program.to_owned()).chain(all).collect()
}
