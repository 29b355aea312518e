//! Overlays from descriptors.

use std::fs::{self, File};
use std::num::NonZeroU64;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use kernel::mount::{
    self, Credentials, Detached, Durability, ErofsOptions, MountError, OverlayOptions,
    TmpfsOptions, Upper, Verity, XattrNamespace,
};
use kernel::process::{IdRange, user_namespace};
use kernel::verity::{self, Measured};
use rustix::fs::{AtFlags, Mode};
use rustix::io::Errno;

use crate::stage::{
    Composefs, Stage, chain, is_before, mountinfo, open_directory, read_at, set_xattr, since,
    skipped, write_at,
};

fn options<'a>(lower: &'a [BorrowedFd<'a>], data: &'a [BorrowedFd<'a>]) -> OverlayOptions<'a> {
    OverlayOptions {
        name: "quire:test",
        lower,
        data,
        upper: None,
        verity: Verity::Off,
        xattrs: XattrNamespace::Trusted,
        credentials: Credentials::Mounter,
    }
}

fn image(composefs: &Composefs) -> Detached {
    let file = File::open(&composefs.image).unwrap();
    mount::erofs(file.as_fd(), &ErofsOptions::default()).unwrap().mount
}

/// Makes a detached tmpfs with an upper and a work directory.
fn memory() -> (Detached, OwnedFd, OwnedFd) {
    let bytes = NonZeroU64::new(1 << 20);
    let options = TmpfsOptions { name: "quire:upper", bytes, inodes: None, mode: 0o755 };
    let tmpfs = mount::tmpfs(&options).unwrap();
    let directory = |name: &str| {
        rustix::fs::mkdirat(&tmpfs, name, Mode::from_raw_mode(0o755)).unwrap();
        let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY;
        rustix::fs::openat(&tmpfs, name, flags, Mode::empty()).unwrap()
    };
    let (upper, work) = (directory("upper"), directory("work"));
    (tmpfs, upper, work)
}

#[test]
fn composefs_is_read_through() {
    let Some(stage) = Stage::new(&["mkfs.erofs"]) else { return };
    let composefs = stage.composefs();
    let image = image(&composefs);
    let objects = open_directory(&composefs.objects);
    let overlay = mount::overlay(&options(&[image.as_fd()], &[objects.as_fd()])).unwrap();

    assert_eq!(read_at(&overlay, "big").unwrap(), composefs.content);
    assert_eq!(read_at(&overlay, "small").unwrap(), "inline\n");
    assert_eq!(read_at(&overlay, "ab/cdef"), Err(Errno::NOENT), "data layers have no names");
    // Since Linux 6.5, reading metadata does not need the data object, because the lookup is deferred to the first
    // read.
    let stat = rustix::fs::statat(&overlay, "lost", AtFlags::empty());
    if is_before(6, 5) {
        assert_eq!(stat.err(), Some(Errno::IO));
    } else {
        assert_eq!(stat.unwrap().st_size, i64::try_from(composefs.content.len()).unwrap());
    }
    assert!(read_at(&overlay, "lost").is_err());
    assert!(!overlay.is_writable().unwrap());

    assert!(mountinfo("quire:test").is_empty());
    overlay.attach_at(&stage.dir("at")).unwrap();
    let lines = mountinfo("quire:test");
    assert_eq!(lines.len(), 1);
    assert!(lines[0].contains(" - overlay quire:test "), "{lines:?}");
    assert!(mountinfo(" erofs ").is_empty());
}

#[test]
fn two_overlays_share_one_image() {
    let Some(stage) = Stage::new(&["mkfs.erofs"]) else { return };
    let composefs = stage.composefs();
    let image = image(&composefs);
    let objects = open_directory(&composefs.objects);
    let first = mount::overlay(&options(&[image.as_fd()], &[objects.as_fd()])).unwrap();
    let second = mount::overlay(&options(&[image.as_fd()], &[objects.as_fd()]));
    let Some(second) = since(6, 15, second) else { return };
    let second = second.unwrap();
    drop(image);
    drop(first);
    assert_eq!(read_at(&second, "big").unwrap(), composefs.content);
}

#[test]
fn data_layers_are_searched_in_order() {
    let Some(stage) = Stage::new(&["mkfs.erofs"]) else { return };
    let composefs = stage.composefs();
    let image = image(&composefs);
    let other = stage.dir("other/00");
    fs::write(other.join("00"), "found").unwrap();
    let objects = open_directory(&composefs.objects);
    let other = open_directory(&stage.path("other"));
    let data = [objects.as_fd(), other.as_fd()];
    let overlay = mount::overlay(&options(&[image.as_fd()], &data)).unwrap();
    assert_eq!(read_at(&overlay, "big").unwrap(), composefs.content);
    assert_eq!(&read_at(&overlay, "lost").unwrap()[..5], "found");
}

#[test]
fn upper_in_memory_takes_writes() {
    let Some(stage) = Stage::new(&["mkfs.erofs"]) else { return };
    let composefs = stage.composefs();
    let image = image(&composefs);
    let objects = open_directory(&composefs.objects);
    let (tmpfs, upper, work) = memory();
    // Linux before 6.15 requires an attached mount.
    tmpfs.attach_at(&stage.dir("tmpfs")).unwrap();
    let lower = [image.as_fd()];
    let data = [objects.as_fd()];
    let upper =
        Upper { upper: upper.as_fd(), work: work.as_fd(), durability: Durability::Volatile };
    let options = OverlayOptions { upper: Some(upper), ..options(&lower, &data) };
    let overlay = mount::overlay(&options).unwrap();
    assert!(overlay.is_writable().unwrap());

    write_at(&overlay, "etc/new", "new\n").unwrap();
    assert_eq!(read_at(&overlay, "etc/new").unwrap(), "new\n");
    assert_eq!(read_at(&tmpfs, "upper/etc/new").unwrap(), "new\n");
    write_at(&overlay, "small", "changed\n").unwrap();
    assert_eq!(read_at(&overlay, "small").unwrap(), "changed\n");
    assert_eq!(read_at(&image, "small").unwrap(), "inline\n");
    rustix::fs::unlinkat(&overlay, "big", AtFlags::empty()).unwrap();
    assert_eq!(read_at(&overlay, "big"), Err(Errno::NOENT));
    rustix::fs::renameat(&overlay, "etc", &overlay, "etc.old").unwrap();
    assert_eq!(read_at(&overlay, "etc.old/new").unwrap(), "new\n");
    assert_eq!(write_at(&overlay, "huge", &"x".repeat(2 << 20)), Err(Errno::NOSPC));
    let object = fs::read_to_string(composefs.objects.join("ab/cdef")).unwrap();
    assert_eq!(object, composefs.content);
}

#[test]
fn upper_may_be_attached_nowhere() {
    let Some(stage) = Stage::new(&["mkfs.erofs"]) else { return };
    let composefs = stage.composefs();
    let image = image(&composefs);
    let (tmpfs, upper, work) = memory();
    let lower = [image.as_fd()];
    let upper =
        Upper { upper: upper.as_fd(), work: work.as_fd(), durability: Durability::Volatile };
    let overlay = mount::overlay(&OverlayOptions { upper: Some(upper), ..options(&lower, &[]) });
    let Some(overlay) = since(6, 15, overlay) else { return };
    write_at(overlay.unwrap(), "new", "new\n").unwrap();
    assert_eq!(read_at(&tmpfs, "upper/new").unwrap(), "new\n");
}

#[test]
fn a_silently_read_only_overlay_is_an_error() {
    let Some(stage) = Stage::new(&["mkfs.erofs"]) else { return };
    let composefs = stage.composefs();
    let image = image(&composefs);
    let range = [IdRange { inside: 0, outside: 100_000, count: 65_536 }];
    let namespace = user_namespace(&range, &range).unwrap();
    let (tmpfs, _upper, _work) = memory();
    let Some(mapped) = since(6, 15, tmpfs.clone_detached()) else { return };
    let mapped = mapped.unwrap();
    mapped.idmap(namespace.as_fd()).unwrap();
    let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY;
    let open = |name: &str| rustix::fs::openat(&mapped, name, flags, Mode::empty()).unwrap();
    let (upper, work) = (open("upper"), open("work"));
    let upper = Upper { upper: upper.as_fd(), work: work.as_fd(), durability: Durability::Durable };
    let lower = [image.as_fd()];
    let error =
        mount::overlay(&OverlayOptions { upper: Some(upper), ..options(&lower, &[]) }).unwrap_err();
    match error {
        MountError::ReadOnly { object } => assert_eq!(object, "quire:test"),
        other => panic!("{}", chain(&other)),
    }
}

/// Files copied up into a plain upper layer over an idmapped image get the mapped owners.
#[test]
fn an_upper_layer_over_mapped_owners() {
    let Some(stage) = Stage::new(&["mkfs.erofs"]) else { return };
    let composefs = stage.composefs();
    let image = image(&composefs);
    let users = [IdRange { inside: 0, outside: 100_000, count: 65_536 }];
    let groups = [IdRange { inside: 0, outside: 200_000, count: 65_536 }];
    let namespace = user_namespace(&users, &groups).unwrap();
    let Some(mapped) = since(6, 15, image.clone_detached()) else { return };
    let mapped = mapped.unwrap();
    mapped.idmap(namespace.as_fd()).unwrap();
    let (tmpfs, upper, work) = memory();
    let objects = open_directory(&composefs.objects);
    let (lower, data) = ([mapped.as_fd()], [objects.as_fd()]);
    let upper =
        Upper { upper: upper.as_fd(), work: work.as_fd(), durability: Durability::Volatile };
    let options = OverlayOptions { upper: Some(upper), ..options(&lower, &data) };
    let overlay = mount::overlay(&options).unwrap();
    drop(mapped);
    let owner = |at: &mount::Detached, path: &str| {
        let stat = rustix::fs::statat(at, path, AtFlags::empty()).unwrap();
        (stat.st_uid, stat.st_gid)
    };
    for path in ["small", "big", "etc"] {
        assert_eq!(owner(&image, path), (0, 0), "{path}");
        assert_eq!(owner(&overlay, path), (100_000, 200_000), "{path}");
    }
    // Data layers are not idmapped.
    assert_eq!(read_at(&overlay, "big").unwrap(), composefs.content);
    rustix::fs::chmodat(&overlay, "small", Mode::RUSR, AtFlags::empty()).unwrap();
    assert_eq!(owner(&tmpfs, "upper/small"), (100_000, 200_000));
    assert_eq!(owner(&overlay, "small"), (100_000, 200_000));
}

#[test]
fn user_xattrs() {
    let Some(stage) = Stage::new(&[]) else { return };
    let (low, high) = (stage.dir("low"), stage.dir("high"));
    fs::write(low.join("a"), "low").unwrap();
    fs::write(low.join("b"), "low").unwrap();
    fs::write(high.join("b"), "high").unwrap();
    let (low, high) = (open_directory(&low), open_directory(&high));
    let lower = [high.as_fd(), low.as_fd()];
    let options = OverlayOptions { xattrs: XattrNamespace::User, ..options(&lower, &[]) };
    let overlay = mount::overlay(&options).unwrap();
    assert_eq!(read_at(&overlay, "a").unwrap(), "low");
    assert_eq!(read_at(&overlay, "b").unwrap(), "high", "the first layer is the uppermost");
    overlay.attach_at(&stage.dir("at")).unwrap();
    assert!(mountinfo("quire:test")[0].contains("userxattr"));
}

#[test]
fn credentials_of_the_caller() {
    let Some(stage) = Stage::new(&[]) else { return };
    let (low, high) = (open_directory(&stage.dir("low")), open_directory(&stage.dir("high")));
    let lower = [high.as_fd(), low.as_fd()];
    let options = OverlayOptions { credentials: Credentials::Caller, ..options(&lower, &[]) };
    let Some(overlay) = since(6, 15, mount::overlay(&options)) else { return };
    overlay.unwrap();
}

/// With `require`, a file whose object has no fs-verity cannot be read.
#[test]
fn required_verity_refuses_objects_without() {
    let Some(stage) = Stage::new(&["mkfs.erofs"]) else { return };
    let composefs = stage.composefs();
    let image = image(&composefs);
    let objects = open_directory(&composefs.objects);
    let lower = [image.as_fd()];
    let data = [objects.as_fd()];
    let options = OverlayOptions { verity: Verity::Required, ..options(&lower, &data) };
    let Some(overlay) = since(6, 6, mount::overlay(&options)) else { return };
    let overlay = overlay.unwrap();
    assert_eq!(read_at(&overlay, "big"), Err(Errno::IO));
    assert_eq!(read_at(&overlay, "small").unwrap(), "inline\n");
}

/// The image records the digest that the object must have; the kernel measures the object's actual digest.
#[test]
fn required_verity_lets_only_the_right_object_through() {
    let Some(stage) = Stage::new(&["mkfs.erofs"]) else { return };
    let objects = stage.dir("objects");
    let source = stage.dir("source");
    for (name, content) in [("right", "right\n"), ("wrong", "wrong\n")] {
        fs::write(objects.join(name), content).unwrap();
        let object = File::open(objects.join(name)).unwrap();
        let digest = match verity::enable(object.as_fd(), verity::Algorithm::Sha256) {
            Ok(_) => verity::measure(object.as_fd()).unwrap().unwrap(),
            Err(error) => return skipped(&format!("no fs-verity to test: {error}")),
        };
        let Measured::Sha256(mut digest) = digest else { panic!("{digest:?}") };
        if name == "wrong" {
            digest[0] ^= 1;
        }
        // struct ovl_metacopy of fs/overlayfs/overlayfs.h: version, length, flags, algorithm.
        let metacopy = [&[0, 36, 0, 1], &digest[..]].concat();
        let file = File::create(source.join(name)).unwrap();
        file.set_len(6).unwrap();
        set_xattr(&file, "trusted.overlay.metacopy", &metacopy);
        set_xattr(&file, "trusted.overlay.redirect", format!("/{name}").as_bytes());
    }
    let image = File::open(stage.mkfs("verity.erofs", &[], &source)).unwrap();
    let image = mount::erofs(image.as_fd(), &ErofsOptions::default()).unwrap().mount;
    let objects = open_directory(&objects);
    let lower = [image.as_fd()];
    let data = [objects.as_fd()];
    let options = OverlayOptions { verity: Verity::Required, ..options(&lower, &data) };
    let Some(overlay) = since(6, 6, mount::overlay(&options)) else { return };
    let overlay = overlay.unwrap();
    assert_eq!(read_at(&overlay, "right").unwrap(), "right\n");
    assert_eq!(read_at(&overlay, "wrong"), Err(Errno::IO));
}

#[test]
fn errors_pass_on_what_the_kernel_says() {
    let Some(stage) = Stage::new(&["mkfs.erofs"]) else { return };
    let composefs = stage.composefs();
    let image = image(&composefs);
    let objects = open_directory(&composefs.objects);
    let file = File::open(&composefs.image).unwrap();

    // A regular file as a layer.
    let error = mount::overlay(&options(&[file.as_fd()], &[objects.as_fd()])).unwrap_err();
    let text = chain(&error);
    if is_before(6, 5) {
        // Such kernels take all options as one string, which is parsed when the superblock is made.
        assert!(text.starts_with("cannot create the superblock of overlay quire:test"), "{text}");
    } else {
        assert!(text.contains("cannot set option `lowerdir"), "{text}");
        assert!(text.contains("` of overlay quire:test (the kernel says: "), "{text}");
    }

    // A single lower layer is not an overlay.
    let error = mount::overlay(&options(&[image.as_fd()], &[])).unwrap_err();
    let text = chain(&error);
    assert_eq!(error.errno(), Some(Errno::INVAL), "{text}");
    assert!(text.contains("cannot create the superblock of overlay quire:test"), "{text}");
}
