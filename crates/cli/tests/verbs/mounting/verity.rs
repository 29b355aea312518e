//! Files that fs-verity protects are read correctly or not at all, even if the disk changes. The store is on a
//! separate ext4, whose bytes are changed while it is not mounted.

use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::io::Errno;
use sha2::{Digest as _, Sha256};

use crate::container_disk::writable::{has, run};
use crate::mounting::mounts::Unmount;
use crate::{Place, is_root};

/// Length of the object in blocks. It is so large that fs-verity has a tree of hashes for the object.
const BLOCKS: usize = 5;

/// A store with fs-verity and an image `a`, whose `etc/long` is `content`.
struct Sealed {
    place: Place,
    content: Vec<u8>,
    /// Id of the image; `object` is the id of the object of `etc/long`.
    image: String,
    object: String,
}

impl Sealed {
    /// `None`, with a note, if the kernel has no fs-verity.
    fn new() -> Option<Self> {
        if !is_root() || !has(&["mkfs.ext4", "mount"]) {
            return None;
        }
        let place = Place::new();
        let disk = place.path("disk");
        File::create(&disk).unwrap().set_len(48 << 20).unwrap();
        let features = ["-q", "-F", "-b", "4096", "-O", "verity", disk.to_str().unwrap()];
        run("mkfs.ext4", &features);
        for name in ["mounted", "point", "tree", "tree/etc"] {
            fs::create_dir(place.path(name)).unwrap();
        }
        let mut this =
            Self { place, content: content('a'), image: String::new(), object: String::new() };
        if !this.mount_disk() {
            testing::skipped("this kernel mounts no ext4 with fs-verity");
            return None;
        }
        fs::create_dir(this.mounted("store")).unwrap();
        symlink(this.mounted("store"), this.place.path("store")).unwrap();
        fs::write(this.tree("etc/long"), &this.content).unwrap();
        fs::write(this.tree("etc/short"), SHORT).unwrap();
        let imported = this.place.out("import --form objects --json dir:tree a");
        let imported: serde_json::Value = serde_json::from_str(&imported).unwrap();
        this.image = imported["image"].as_str().unwrap().to_owned();
        this.object = this.only_object();
        // A file that the kernel protects cannot be opened for writing.
        let writable = File::options().write(true).open(this.object_path()).map(drop);
        if writable.is_ok() {
            testing::skipped("no fs-verity in this kernel");
            return None;
        }
        assert_eq!(writable.unwrap_err().raw_os_error(), Some(Errno::PERM.raw_os_error()));
        Some(this)
    }

    fn tree(&self, name: &str) -> PathBuf {
        self.place.path("tree").join(name)
    }

    fn only_object(&self) -> String {
        let mut found = Vec::new();
        for folder in fs::read_dir(self.place.path("store/objects")).unwrap() {
            let folder = folder.unwrap().path();
            for file in fs::read_dir(&folder).unwrap() {
                let name = file.unwrap().file_name().into_string().unwrap();
                found.push(format!("{}{name}", folder.file_name().unwrap().to_str().unwrap()));
            }
        }
        assert_eq!(found.len(), 1, "{found:?}");
        found.remove(0)
    }

    fn object_path(&self) -> PathBuf {
        let (folder, name) = self.object.split_at(2);
        self.place.path("store/objects").join(folder).join(name)
    }

    /// Returns a path below the mount point of the disk.
    fn mounted(&self, name: &str) -> PathBuf {
        self.place.path("mounted").join(name)
    }

    fn mount_disk(&self) -> bool {
        let mut mount = Command::new("mount");
        mount.args(["-o", "loop"]).arg(self.place.path("disk")).arg(self.mounted(""));
        mount.output().unwrap().status.success()
    }

    /// Flips a bit at each offset of the disk that has these bytes, and returns the number of offsets.
    fn flip(&self, bytes: &[u8]) -> usize {
        run("umount", &[self.mounted("").to_str().unwrap()]);
        let path = self.place.path("disk");
        let mut disk = fs::read(&path).unwrap();
        let mut places = Vec::new();
        let mut at = 0;
        while let Some(found) = memchr(&disk[at..], bytes) {
            places.push(at + found);
            at += found + bytes.len();
        }
        for &place in &places {
            disk[place] ^= 1;
        }
        fs::write(&path, disk).unwrap();
        assert!(self.mount_disk());
        places.len()
    }

    /// Mounts the image and reads a file; returns its bytes or the kernel's error. `None` if this kernel's overlays
    /// cannot verify.
    fn read(&self, options: &str, name: &str) -> Option<Result<Vec<u8>, Errno>> {
        let ran = self.place.run(&format!("mount {options} a point"));
        if ran.code == Some(2) && ran.err.contains("Linux 6.6") {
            return None;
        }
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        let _guard = Unmount(self.place.path("point"));
        let mut bytes = Vec::new();
        let read = File::open(self.place.path("point").join(name))
            .and_then(|mut file| file.read_to_end(&mut bytes));
        let errno = |error: std::io::Error| Errno::from_io_error(&error).unwrap();
        let read = read.map(|_| bytes).map_err(errno);
        self.place.out("umount point");
        Some(read)
    }

    /// Checks that the damaged object is never returned, and that verbs that look for damage name it.
    fn check_damaged(&self, what: &str) {
        match self.read("--verity require", "etc/long") {
            Some(read) => assert_eq!(read, Err(Errno::IO), "{what}"),
            None => testing::skipped("overlays check: this kernel is older than Linux 6.6"),
        }
        for verb in ["verify a", "fsck"] {
            let ran = self.place.run(verb);
            assert_eq!(ran.code, Some(1), "{what}: {verb}: {}{}", ran.out, ran.err);
            let text = ran.out + &ran.err;
            assert!(text.contains(&self.object), "{what}: {verb}: {text}");
            assert!(text.contains("/etc/long"), "{what}: {verb}: {text}");
        }
    }
}

impl Drop for Sealed {
    fn drop(&mut self) {
        drop(Unmount(self.mounted("")));
    }
}

/// Contents of a file that is short enough to be in the image, and occurs nowhere else on the disk.
const SHORT: &str = "found once on a disk, in the image\n";

/// Returns blocks that all differ and begin with the letter.
fn content(letter: char) -> Vec<u8> {
    let line = |number: usize| format!("{letter}{number:014}\n");
    (0..BLOCKS * 4096 / 16).flat_map(|number| line(number).into_bytes()).collect()
}

fn memchr(text: &[u8], bytes: &[u8]) -> Option<usize> {
    text.windows(bytes.len()).position(|it| it == bytes)
}

#[test]
fn a_good_object_is_read_through_fs_verity() {
    let Some(sealed) = Sealed::new() else { return };
    let image = format!("--digest {} --verity require", sealed.image);
    for options in ["--verity require", "--verity auto", &image] {
        match sealed.read(options, "etc/long") {
            Some(read) => assert!(read == Ok(sealed.content.clone()), "{options}"),
            None => testing::skipped(&format!("{options}: this kernel is older than Linux 6.6")),
        }
    }
    sealed.place.out("verify a");
    // The id differs from the image's.
    let ran = sealed.place.run(&format!("mount --digest {} a point", "0".repeat(64)));
    assert!(ran.code == Some(2) && ran.err.contains("as --digest requires"), "{}", ran.err);
    assert!(!sealed.place.path("point/etc").exists());
}

#[test]
fn a_bit_of_an_object_that_flips_on_the_disk_is_never_read() {
    let Some(sealed) = Sealed::new() else { return };
    let last = sealed.content.len() - 16;
    assert_eq!(sealed.flip(&sealed.content[last..]), 1);
    // Blocks before the damaged one can be read, because every kernel verifies single blocks.
    let mut file = File::open(sealed.object_path()).unwrap();
    let mut block = vec![0; 4096];
    file.read_exact(&mut block).unwrap();
    assert!(block == sealed.content[..4096]);
    let mut rest = Vec::new();
    let error = file.read_to_end(&mut rest).unwrap_err();
    assert_eq!(Errno::from_io_error(&error), Some(Errno::IO));
    drop(file);
    sealed.check_damaged("a bit of data");
}

#[test]
fn a_bit_of_the_tree_of_hashes_that_flips_on_the_disk_is_found() {
    let Some(sealed) = Sealed::new() else { return };
    // Without a salt, the first block of the tree has the digests of the data blocks.
    assert_eq!(sealed.flip(&Sha256::digest(&sealed.content[..4096])), 1);
    sealed.check_damaged("a bit of the tree");
}

#[test]
fn an_object_in_the_place_of_another_is_not_read() {
    let Some(sealed) = Sealed::new() else { return };
    let path = sealed.object_path();
    let aside = sealed.mounted("aside");
    fs::rename(&path, &aside).unwrap();
    // The other object also has fs-verity and the same length, but has other bytes.
    fs::write(sealed.tree("etc/long"), content('b')).unwrap();
    sealed.place.out("import --form objects dir:tree b");
    let other = sealed.only_object();
    assert_ne!(other, sealed.object);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let (folder, name) = other.split_at(2);
    let other = sealed.place.path("store/objects").join(folder).join(name);
    fs::hard_link(&other, &path).unwrap();
    sealed.check_damaged("another sealed object");
    // These copies have no fs-verity.
    for (what, bytes) in [
        ("a copy with other bytes", content('c')),
        ("a copy cut short", sealed.content[..4096].to_vec()),
        ("an empty copy", Vec::new()),
    ] {
        fs::remove_file(&path).unwrap();
        fs::write(&path, bytes).unwrap();
        sealed.check_damaged(what);
    }
    // The file has the right bytes but no fs-verity. A mount that requires fs-verity refuses it, but Quire's own check
    // accepts it.
    fs::remove_file(&path).unwrap();
    fs::write(&path, &sealed.content).unwrap();
    if let Some(read) = sealed.read("--verity require", "etc/long") {
        assert_eq!(read, Err(Errno::IO));
    }
    // The original object works again.
    fs::remove_file(&path).unwrap();
    fs::rename(&aside, &path).unwrap();
    if let Some(read) = sealed.read("--verity require", "etc/long") {
        assert!(read == Ok(sealed.content.clone()));
    }
    sealed.place.out("verify a");
}

#[test]
fn an_image_that_changed_on_the_disk_is_not_believed() {
    let Some(sealed) = Sealed::new() else { return };
    assert_eq!(sealed.flip(SHORT.as_bytes()), 1);
    // The kernel's digest of the file is unchanged, so the image may be mounted, even by its id. The kernel refuses
    // to return the damaged blocks when they are read.
    for options in [format!("--digest {}", sealed.image), String::from("--verity require")] {
        let ran = sealed.place.run(&format!("mount {options} a point"));
        if ran.code == Some(2) {
            continue;
        }
        assert_eq!(ran.code, Some(0), "{options}: {}", ran.err);
        let _guard = Unmount(sealed.place.path("point"));
        let read = fs::read(sealed.place.path("point/etc/short"));
        assert_eq!(read.map_err(|it| Errno::from_io_error(&it)), Err(Some(Errno::IO)), "{options}");
        sealed.place.out("umount point");
    }
    for verb in ["verify a", "fsck"] {
        let ran = sealed.place.run(verb);
        assert_eq!(ran.code, Some(1), "{verb}: {}{}", ran.out, ran.err);
        assert!((ran.out + &ran.err).contains(&sealed.image), "{verb}");
    }
}

/// An image file that has lost its protection may have been replaced by another user.
#[test]
fn an_unsealed_image_is_refused_where_verity_is_required() {
    let Some(sealed) = Sealed::new() else { return };
    let path: PathBuf = sealed.place.path("store/images").join(&sealed.image);
    let bytes = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    fs::write(Path::new(&path), &bytes).unwrap();
    let ran = sealed.place.run("mount --verity require a point");
    assert_eq!(ran.code, Some(2), "{}", ran.err);
    assert!(!sealed.place.path("point/etc").exists());
}
