//! Images whose files' pages are in memory once. The images are mkfs.erofs's, of a version that writes fingerprints.
//!
//! What is shared is seen by reading through one mount and asking for the pages of another, without touching them:
//! mincore(2) answers for the page cache, whoever filled it.

use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use kernel::mount::{self, Domain, Erofs, ErofsOptions, Io, Sharing};

use crate::stage::{Stage, is_before, mountinfo, skipped};

/// Not a whole number of pages, and more than one read ahead.
const LENGTH: usize = 300 * 4096 + 100;

/// mkfs.erofs with `--xattr-inode-digest` (1.9 and later): Debian sid's out of the cache, or the one on `PATH`.
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

/// Two images: `same` is in both; as `other-name` with other metadata, too; `differs` has one length and two contents.
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

    /// Whether this kernel takes images with long xattr prefixes, which fingerprints are written with.
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

/// How many pages of a file are in memory.
fn cached(erofs: &Erofs, name: &str) -> usize {
    kernel_pages(&open(erofs, name))
}

/// By fincore(1), which asks mincore(2): this crate's tests do nothing unsafe.
fn kernel_pages(file: &File) -> usize {
    use std::os::fd::AsRawFd as _;
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    let output = Command::new("fincore").args(["-n", "-o", "PAGES", &path]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
}

/// Reads all of it, which must be what is expected.
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
        // Different files of one name and length.
        read(&first, "differs", 1);
        assert_eq!(cached(&second, "differs"), 0);
        read(&second, "differs", 2);
        read(&first, "differs", 1);
        // Each still has metadata of its own.
        let mode =
            |erofs: &Erofs, name: &str| open(erofs, name).metadata().unwrap().permissions().mode();
        assert_eq!(mode(&first, "name-1") & 0o777, 0o600);
        assert_eq!(mode(&second, "name-2") & 0o777, 0o755);
        // The first to have read it goes: the pages stay good.
        drop(first);
        read(&second, "same", 0);
        // Domains are secrets of a kind.
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

/// What makes a domain one trust: the kernel takes an image's word for what is in its files.
#[test]
fn a_forged_fingerprint_is_believed_within_its_domain() {
    let Some(pair) = Pair::new(&[FINGERPRINTS, "-Enosbcrc"]).filter(Pair::can_be_mounted) else {
        return;
    };
    // `differs` of the second image gets the fingerprint of that of the first.
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
