//! Damaged EROFS images and disks, which every function for files outside of a store reads. Each call must end with a
//! result or an error, and take little memory.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::ffi::OsStr;
use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::AtomicBool;

use image::dump::Strictness;
use image::erofs::Flavor;
use oci::manifest::Platform;
use oci::source::ImageSource;
use quire_transfer::export::{self, Options};
use quire_transfer::import::{
    ErofsFile, FilePiece, ImportContext, ImportError, ImportOptions, Limits, image_of, import,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use store::{OpenOptions, Seconds, Store};

static NEVER: AtomicBool = AtomicBool::new(false);

/// Address space in bytes. It is above what libraries, threads and sound images take, and far below what numbers of
/// damaged images state.
const MEMORY: u64 = 3 << 30;

/// A small generator of random numbers with the same sequence each time.
struct Random(u64);

impl Random {
    fn next(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 11).unwrap() % below
    }

    /// Changes some bytes, most of them metadata at the beginning of the image, and sometimes the length.
    fn damage(&mut self, sound: &[u8], start: usize) -> Vec<u8> {
        let mut bytes = sound.to_vec();
        let front = (bytes.len() - start).min(48 << 10);
        for _ in 0..=self.next(6) {
            let at = match self.next(8) {
                0 => self.next(bytes.len()),
                1 => start + 1024 + self.next(160),
                2 if start > 0 => self.next(2048),
                _ => start + self.next(front),
            };
            let other = bytes[start + self.next(front)];
            bytes[at] = match self.next(4) {
                0 => bytes[at] ^ 1 << self.next(8),
                1 => 0xff,
                2 => other,
                _ => self.next(256).to_le_bytes()[0],
            };
        }
        if self.next(8) == 0 {
            bytes.truncate(self.next(sound.len()));
        }
        bytes
    }
}

struct Stage {
    folder: tempfile::TempDir,
    store: Store,
    platform: Platform,
}

impl Stage {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        let store = Store::open(&path, store::Who::this_process(), OpenOptions::create()).unwrap();
        Self { folder, store, platform: "linux/amd64".parse().unwrap() }
    }

    fn environment(&self) -> ImportContext<'_> {
        ImportContext {
            now: Seconds(1_700_000_000),
            threads: NonZeroUsize::new(2).unwrap(),
            budget: 8 << 20,
            scratch: self.folder.path(),
            progress: &|_| {},
            cancel: &NEVER,
        }
    }

    fn import(&self, kind: &str, file: &Path) -> Result<(), ImportError> {
        let source = ImageSource::parse(OsStr::new(&format!("{kind}:{}", file.display()))).unwrap();
        let objects = self.folder.path().join("objects");
        let options = ImportOptions {
            unnamed: true,
            platform: &self.platform,
            objects: Some(&objects),
            ..ImportOptions::default()
        };
        import(&self.store, &source, &self.environment(), &options).map(drop)
    }

    /// Reads a file as `ls`, `cat`, `dump`, `diff` and `show` do.
    fn read(&self, kind: &str, file: &Path) -> Result<(), ImportError> {
        let opened = match kind {
            "disk" => ErofsFile::open_disk(file, "amd64")?,
            _ => ErofsFile::open(file)?,
        };
        let limits = Limits { content_bytes: 64 << 20, ..Limits::default() };
        let names = opened.names(&limits, &NEVER)?;
        if !opened.is_composefs() {
            for (inode, content) in names.tree.files().filter(|(_, it)| it.size() < 1 << 20) {
                let (nid, mut read) = (names.nids[inode.id().index()], 0);
                let failed = opened.read(nid, inode, |piece| {
                    read += match piece {
                        FilePiece::Data(bytes) => bytes.len() as u64,
                        FilePiece::Hole(count) => count,
                    };
                    Ok::<_, ImportError>(())
                });
                assert!(failed.is_err() || read == content.size() || content.size() == 0);
            }
        }
        let tree = opened.tree(&limits, &self.environment())?;
        let mut dump = Vec::new();
        let size = image::dump::directory_size;
        image::dump::write(&tree, image::dump::Links::ToOwner, size, &mut dump).unwrap();
        // A tree of an image states nothing that a dump cannot.
        let again = image::dump::parse(&dump[..], Strictness::Exact).unwrap();
        assert_eq!(again.inode_count(), tree.inode_count());
        image_of(&tree).map(drop)
    }
}

/// Makes a tree with many kinds of files.
fn tree(folder: &Path) {
    testing::trees::rich_tree(folder);
    fs::remove_file(folder.join("sparse")).unwrap();
    for name in ["1048579", "524291"] {
        fs::remove_file(folder.join("usr/lib").join(name)).unwrap();
    }
    let words = "words that compress, and words that follow ".repeat(400);
    fs::write(folder.join("words"), &words).unwrap();
    fs::write(folder.join("more"), &words[5..9000]).unwrap();
    fs::write(folder.join("noise"), testing::noise(20_000)).unwrap();
}

/// Makes an image of each kind: its name, the kind of source, the bytes, and where in them the image begins.
fn images(stage: &Stage) -> Vec<(String, &'static str, Vec<u8>, usize)> {
    let folder = stage.folder.path();
    tree(&folder.join("tree"));
    let source = ImageSource::Directory(folder.join("tree"));
    let name = "a".parse().unwrap();
    let options = ImportOptions { name: Some(&name), ..ImportOptions::default() };
    let image = import(&stage.store, &source, &stage.environment(), &options).unwrap().image;
    let mut made = Vec::new();
    let composefs = fs::read(folder.join("store/images").join(image.to_string())).unwrap();
    made.push(("composefs".to_owned(), "erofs", composefs, 0));
    let options =
        Options { threads: NonZeroUsize::MIN, scratch: folder, progress: &|_| {}, cancel: &NEVER };
    let mut bytes = Vec::new();
    export::to_erofs(&stage.store, &image, Flavor::Linux, &mut bytes, &options).unwrap();
    made.push(("export".to_owned(), "erofs", bytes, 0));
    let mut bytes = Vec::new();
    export::to_erofs(&stage.store, &image, Flavor::Dax, &mut bytes, &options).unwrap();
    made.push(("export for DAX".to_owned(), "erofs", bytes, 0));
    #[cfg(feature = "disk")]
    {
        let root = export::RootType::for_architecture("amd64").unwrap();
        let mut bytes = Vec::new();
        export::to_disk(&stage.store, &image, root, Flavor::Linux, &mut bytes, &options).unwrap();
        made.push(("disk".to_owned(), "disk", bytes, 1 << 20));
    }
    let newer = testing::built("sid", "mkfs.erofs", "sid");
    let older = testing::find_program("mkfs.erofs");
    let all: [(_, &[&str]); 2] = [
        (older, &["-x2", "-zlz4 -Eztailpacking", "--chunksize=4096"]),
        (
            newer,
            &[
                "-b512 -Exattr-name-filter",
                "-zlz4 -E48bit -C16384",
                "-zlzma -C8192",
                "-zdeflate -Eztailpacking",
                "-zzstd -Ededupe -C16384",
                "-zzstd --zD=1 -b1024",
            ],
        ),
    ];
    for (mkfs, lines) in all {
        let Some(mkfs) = mkfs else {
            testing::not_made("mkfs.erofs, or a newer one,", "sid");
            continue;
        };
        for line in lines {
            let mut command = Command::new(&mkfs);
            command.args(line.split(' ')).args(["m.erofs", "tree"]).current_dir(folder);
            let output = command.output().unwrap();
            let err = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{line}: {err}");
            made.push(((*line).to_owned(), "erofs", fs::read(folder.join("m.erofs")).unwrap(), 0));
        }
    }
    made
}

/// Ctrl-C ends the walk through the names of an image, which may take long.
#[test]
fn the_walk_of_names_can_be_cancelled() {
    let stage = Stage::new();
    let folder = stage.folder.path();
    fs::create_dir(folder.join("tree")).unwrap();
    let source = ImageSource::Directory(folder.join("tree"));
    let options = ImportOptions { unnamed: true, ..ImportOptions::default() };
    let image = import(&stage.store, &source, &stage.environment(), &options).unwrap().image;
    let opened = ErofsFile::open(&folder.join("store/images").join(image.to_string())).unwrap();
    let names = |cancel: bool| opened.names(&Limits::default(), &AtomicBool::new(cancel));
    assert_eq!(names(false).unwrap().nids.len(), 1);
    assert!(matches!(names(true), Err(ImportError::Cancelled)));
}

#[test]
fn damaged_images_are_read_by_every_function() {
    let cases = if testing::rounds(1) > 1 { 2000 } else { 100 };
    let stage = Stage::new();
    let images = images(&stage);
    // A number of a damaged image that is taken for a size aborts the test from now on.
    let hard = getrlimit(Resource::As).maximum;
    setrlimit(Resource::As, Rlimit { current: Some(MEMORY), maximum: hard }).unwrap();
    let file = stage.folder.path().join("damaged");
    for (seed, (name, kind, mut sound, start)) in (1..).zip(images) {
        // The superblock's checksum would refuse nearly all of them.
        sound[start + 1024 + 8] &= !1;
        fs::write(&file, &sound).unwrap();
        stage.read(kind, &file).unwrap_or_else(|error| panic!("{name}: {error:?}"));
        stage.import(kind, &file).unwrap_or_else(|error| panic!("{name}: {error:?}"));
        let mut random = Random(seed);
        let mut refused = 0;
        for case in 0..cases {
            fs::write(&file, random.damage(&sound, start)).unwrap();
            refused += usize::from(stage.read(kind, &file).is_err());
            // Imports wait for the disk.
            if case % 10 == 0 {
                let _result = stage.import(kind, &file);
            }
        }
        assert!(refused > cases / 50, "{name}: only {refused} of {cases} were refused");
    }
}
