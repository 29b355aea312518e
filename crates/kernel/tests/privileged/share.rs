//! Page sharing: pages of equal files of several images are in memory only once. The images are made by a version of
//! mkfs.erofs that writes fingerprints.
//!
//! The tests read through one mount and count the resident pages of another without touching them: mincore(2) reports
//! the page cache, no matter which mount filled it.

use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use kernel::mount::{self, Domain, Erofs, ErofsOptions, Io, Sharing};

use crate::stage::{Stage, is_before, mountinfo, skipped};

/// Longer than one read-ahead, and with a partial page at its end.
const LENGTH: usize = 300 * 4096 + 100;

/// Returns a mkfs.erofs with `--xattr-inode-digest` (1.9 and later): the program of Debian sid in the cache, or the
/// program on `PATH`.
#[expect(clippy::disallowed_methods, reason = "where the tools of tests are")]
fn mkfs() -> Option<PathBuf> {
    let cached =
        std::env::var_os("QUIRE_CACHE").map(|it| Path::new(&it).join("sid/bin/mkfs.erofs"));
    let programs = cached.into_iter().chain([PathBuf::from("mkfs.erofs")]);
    let found = programs.into_iter().find(|program| {
        let output = Command::new(program).arg("--help").output();
        output.is_ok_and(|it| String::from_utf8_lossy(&it.stdout).contains("xattr-inode-digest"))
    });
    if found.is_none() {
        testing::not_made("an mkfs.erofs that writes fingerprints", "sid");
    }
    found
}

fn content(seed: u8) -> Vec<u8> {
    let mut state = u32::from(seed) + 1;
    let bytes = (0..LENGTH).map(|_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    });
    bytes.collect()
}

/// Two images. `same` is in both. `name-1` and `name-2` have equal content but different metadata. `differs` has the
/// same length but different content.
struct Pair {
    stage: Stage,
    images: [PathBuf; 2],
}

impl Pair {
    fn new(options: &[&str]) -> Option<Self> {
        let stage = Stage::new(&[])?;
        let mkfs = mkfs()?;
        let images = [1, 2].map(|number| {
            let source = stage.dir(&format!("source{number}"));
            fs::write(source.join("same"), content(0)).unwrap();
            let renamed = source.join(format!("name-{number}"));
            fs::write(&renamed, content(9)).unwrap();
            let mode = if number == 1 { 0o600 } else { 0o755 };
            fs::set_permissions(&renamed, fs::Permissions::from_mode(mode)).unwrap();
            fs::write(source.join("differs"), content(number)).unwrap();
            let image = stage.path(&format!("{number}.erofs"));
            let output =
                Command::new(&mkfs).args(options).arg(&image).arg(&source).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            image
        });
        Some(Self { stage, images })
    }

    /// Whether this kernel mounts images with long xattr prefixes, which fingerprints use.
    fn can_be_mounted(&self) -> bool {
        if is_before(6, 4) {
            let image = File::open(&self.images[0]).unwrap();
            let error = mount::erofs(image.as_fd(), &ErofsOptions::default()).unwrap_err();
            assert_eq!(error.errno(), Some(rustix::io::Errno::INVAL));
            skipped("this kernel is older than Linux 6.4");
            return false;
        }
        true
    }

    fn mount(&self, number: usize, domain: Option<&str>, io: Io) -> Erofs {
        let image = File::open(&self.images[number]).unwrap();
        let options = ErofsOptions { share: domain.map(Domain), io, ..ErofsOptions::default() };
        mount::erofs(image.as_fd(), &options).unwrap()
    }
}

const FINGERPRINTS: &str = "--xattr-inode-digest=erofs.fingerprint.v1";

fn open(erofs: &Erofs, name: &str) -> File {
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
    let mode = rustix::fs::Mode::empty();
    File::from(rustix::fs::openat(&erofs.mount, name, flags, mode).unwrap())
}

/// Returns the number of pages of a file that are in memory.
fn cached(erofs: &Erofs, name: &str) -> usize {
    kernel_pages(&open(erofs, name))
}

/// Calls fincore(1), which calls mincore(2), because this crate's tests contain no unsafe code.
fn kernel_pages(file: &File) -> usize {
    use std::os::fd::AsRawFd as _;
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    let output = Command::new("fincore").args(["-n", "-o", "PAGES", &path]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
}

/// Reads the whole file and compares its content.
fn read(erofs: &Erofs, name: &str, seed: u8) {
    use std::io::Read as _;
    let mut bytes = Vec::new();
    open(erofs, name).read_to_end(&mut bytes).unwrap();
    assert!(bytes == content(seed), "{name} has other bytes");
}

const PAGES: usize = LENGTH.div_ceil(4096);

#[test]
fn equal_files_of_one_domain_are_in_memory_once() {
    for io in [Io::Direct, Io::Buffered] {
        let Some(pair) = Pair::new(&[FINGERPRINTS]).filter(Pair::can_be_mounted) else { return };
        let first = pair.mount(0, Some("one"), io);
        let second = pair.mount(1, Some("one"), io);
        let elsewhere = pair.mount(1, Some("two"), io);
        let alone = pair.mount(1, None, io);
        assert_eq!(alone.sharing, Sharing::Alone);
        if is_before(7, 0) {
            assert_eq!(first.sharing, Sharing::Alone);
            read(&first, "same", 0);
            assert_eq!(cached(&second, "same"), 0);
            skipped("this kernel is older than Linux 7.0");
            return;
        }
        assert_eq!(first.sharing, Sharing::Domain, "is CONFIG_EROFS_FS_PAGE_CACHE_SHARE off?");
        for (name, name_there, seed) in [("same", "same", 0), ("name-1", "name-2", 9)] {
            assert_eq!(cached(&second, name_there), 0);
            read(&first, name, seed);
            assert_eq!(cached(&first, name), PAGES, "{name}");
            assert_eq!(cached(&second, name_there), PAGES, "{name_there} is not shared");
            read(&second, name_there, seed);
            for other in [&elsewhere, &alone] {
                assert_eq!(cached(other, name_there), 0, "{name_there} is shared too far");
                read(other, name_there, seed);
            }
        }
        // Different files with the same name and length are not shared.
        read(&first, "differs", 1);
        assert_eq!(cached(&second, "differs"), 0);
        read(&second, "differs", 2);
        read(&first, "differs", 1);
        // Each file keeps its own metadata.
        let mode =
            |erofs: &Erofs, name: &str| open(erofs, name).metadata().unwrap().permissions().mode();
        assert_eq!(mode(&first, "name-1") & 0o777, 0o600);
        assert_eq!(mode(&second, "name-2") & 0o777, 0o755);
        // The pages stay valid when the mount that read them first is gone.
        drop(first);
        read(&second, "same", 0);
        // mountinfo must not show the name of the domain, because the name is a secret.
        let at = pair.stage.dir("at");
        second.mount.attach_at(&at).unwrap();
        let lines = mountinfo(" - erofs ");
        assert!(lines[0].contains("inode_share") && !lines[0].contains("one"), "{lines:?}");
    }
}

#[test]
fn an_image_without_fingerprints_shares_nothing() {
    let Some(pair) = Pair::new(&[]) else { return };
    let first = pair.mount(0, Some("one"), Io::Direct);
    let second = pair.mount(0, Some("one"), Io::Direct);
    assert_eq!((first.sharing, second.sharing), (Sharing::Alone, Sharing::Alone));
    read(&first, "same", 0);
    assert_eq!(cached(&second, "same"), 0);
}

/// The reason why all images of a domain must be trusted: the kernel believes an image's fingerprints.
#[test]
fn a_forged_fingerprint_is_believed_within_its_domain() {
    let Some(pair) = Pair::new(&[FINGERPRINTS, "-Enosbcrc"]).filter(Pair::can_be_mounted) else {
        return;
    };
    // `differs` of the second image gets the fingerprint of `differs` of the first.
    let digest = |number: usize| {
        let output = Command::new("sha256sum")
            .arg(pair.stage.path(&format!("source{number}/differs")))
            .output();
        let text = String::from_utf8(output.unwrap().stdout).unwrap();
        let hex = text.split(' ').next().unwrap().to_owned();
        let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        [b"sha256:".as_slice(), &(0..32).map(|at| byte(at * 2)).collect::<Vec<_>>()].concat()
    };
    let (theirs, own) = (digest(1), digest(2));
    let mut image = fs::read(&pair.images[1]).unwrap();
    let places: Vec<_> =
        (0..image.len() - own.len()).filter(|&at| image[at..].starts_with(&own)).collect();
    assert_eq!(places.len(), 1, "mkfs.erofs writes fingerprints in another way");
    image[places[0]..places[0] + theirs.len()].copy_from_slice(&theirs);
    fs::write(&pair.images[1], image).unwrap();
    let first = pair.mount(0, Some("one"), Io::Direct);
    let forged = pair.mount(1, Some("one"), Io::Direct);
    let elsewhere = pair.mount(1, Some("two"), Io::Direct);
    if first.sharing == Sharing::Alone {
        assert!(is_before(7, 0));
        read(&forged, "differs", 2);
        return skipped("this kernel is older than Linux 7.0");
    }
    read(&first, "differs", 1);
    read(&forged, "differs", 1);
    read(&elsewhere, "differs", 2);
}
