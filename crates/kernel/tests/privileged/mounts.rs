//! EROFS, tmpfs, bind mounts, attributes, and error messages.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::num::NonZeroU64;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;

use kernel::loopdev::{Access, LoopBlockSize, LoopOptions};
use kernel::mount::{
    self, Attributes, Backing, ErofsOptions, Io, MountAttrFlags, NATIVE_READ_AHEAD_MAX, Reach,
    TmpfsOptions, Unmount, native_read_ahead,
};
use kernel::process::{IdRange, user_namespace};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

use crate::stage::{Stage, chain, mountinfo, open_directory, read_at, since, write_at};

fn small_tmpfs() -> mount::Detached {
    let bytes = NonZeroU64::new(1 << 20);
    mount::tmpfs(&TmpfsOptions { name: "quire:test", bytes, inodes: None, mode: 0o700 }).unwrap()
}

#[test]
fn erofs_is_read_while_attached_nowhere() {
    let Some(stage) = Stage::new(&["mkfs.erofs"]) else { return };
    let image = File::open(stage.hello()).unwrap();
    let erofs = mount::erofs(image.as_fd(), &ErofsOptions::default()).unwrap();
    drop(image);
    assert_eq!(read_at(&erofs.mount, "hello").unwrap(), "hello\n");
    assert_eq!(read_at(&erofs.mount, "sub/deep").unwrap(), "deep\n");
    assert_eq!(write_at(&erofs.mount, "hello", ""), Err(Errno::ROFS));
    assert!(!erofs.mount.is_writable().unwrap());
    assert!(mountinfo(" erofs ").is_empty());
    if stage.backs_files() {
        assert_eq!((erofs.backing, erofs.io), (Backing::File, Io::Direct));
    }
}

/// Returns the current read-ahead of file-backed EROFS mounts in KiB, by the kernel's names for them.
fn read_ahead() -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir("/sys/class/bdi").unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        // A mount that is being removed can no longer be read.
        if let (true, Ok(text)) =
            (name.starts_with("erofs-"), fs::read_to_string(entry.path().join("read_ahead_kb")))
        {
            found.insert(name, text.trim().to_owned());
        }
    }
    found
}

#[test]
fn read_ahead_is_what_was_asked_for_and_that_of_this_mount_only() {
    let Some(stage) = Stage::new(&["mkfs.erofs"]) else { return };
    if !stage.backs_files() {
        return;
    }
    let image = File::open(stage.hello()).unwrap();
    let other = mount::erofs(image.as_fd(), &ErofsOptions::default()).unwrap();
    assert_eq!(other.read_ahead, None);
    // If another process mounts or unmounts at the same time, the read-ahead is reported as not set.
    for _ in 0..100 {
        let before = read_ahead();
        let options = ErofsOptions { read_ahead: Some(640), ..ErofsOptions::default() };
        let erofs = mount::erofs(image.as_fd(), &options).unwrap();
        let after = read_ahead();
        if erofs.read_ahead.is_none() {
            continue;
        }
        assert_eq!(erofs.read_ahead, Some(640));
        let new: Vec<_> = after.iter().filter(|(name, _)| !before.contains_key(*name)).collect();
        assert!(new.iter().any(|(_, now)| *now == "640"), "{new:?}");
        for (name, was) in &before {
            assert!(after.get(name).is_none_or(|now| now == was), "{name}: {was}, {after:?}");
        }
        return;
    }
    panic!("never done");
}

/// The read-ahead of a disk also applies to native images on it, up to a limit.
#[test]
fn native_images_are_read_ahead_as_their_disk_is() {
    let Some(stage) = Stage::new(&["mkfs.ext4"]) else { return };
    let file = stage.path("disk");
    File::create(&file).unwrap().set_len(8 << 20).unwrap();
    let status = Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&file).status().unwrap();
    assert!(status.success());
    let disk = File::options().read(true).write(true).open(&file).unwrap();
    let options = LoopOptions {
        block_size: LoopBlockSize::B512,
        access: Access::ReadWrite,
        direct_io: false,
    };
    let device = kernel::loopdev::attach(disk.as_fd(), &options).unwrap();
    let (at, path) = (stage.dir("on-disk"), device.path());
    rustix::mount::mount(&path, &at, "ext4", MountFlags::empty(), None).unwrap();
    let data = File::create(at.join("data")).unwrap();
    let name = Path::new(&path).file_name().unwrap().to_str().unwrap().to_owned();
    let queue = format!("/sys/class/block/{name}/queue/read_ahead_kb");
    for (disk, expect) in [
        ("64", Some(64)),
        ("128", None),
        ("192", Some(192)),
        ("512", Some(512)),
        ("8192", Some(NATIVE_READ_AHEAD_MAX)),
    ] {
        fs::write(&queue, disk).unwrap();
        assert_eq!(native_read_ahead(data.as_fd()), expect, "{disk}");
    }
    drop(data);
    rustix::mount::unmount(&at, UnmountFlags::empty()).unwrap();
    // The read-ahead of a tmpfs is unknown.
    let options = TmpfsOptions { name: "t", bytes: None, inodes: None, mode: 0o755 };
    let memory = stage.dir("memory");
    mount::tmpfs(&options).unwrap().attach_at(&memory).unwrap();
    let file = File::create(memory.join("file")).unwrap();
    assert_eq!(native_read_ahead(file.as_fd()), None);
}

#[test]
fn erofs_attaches_and_unmounts() {
    let Some(stage) = Stage::new(&["mkfs.erofs"]) else { return };
    let image = File::open(stage.hello()).unwrap();
    let at = stage.dir("at");
    let erofs = mount::erofs(image.as_fd(), &ErofsOptions::default()).unwrap();
    erofs.mount.attach(open_directory(&at).as_fd()).unwrap();
    assert_eq!(fs::read_to_string(at.join("hello")).unwrap(), "hello\n");
    drop(erofs);
    assert_eq!(fs::read_to_string(at.join("hello")).unwrap(), "hello\n");

    let busy = File::open(at.join("hello")).unwrap();
    let error = mount::unmount(&at, Unmount::Now).unwrap_err();
    assert_eq!(error.errno(), Some(Errno::BUSY));
    drop(busy);
    mount::unmount(&at, Unmount::Now).unwrap();
    assert!(!at.join("hello").exists());

    let second = mount::erofs(image.as_fd(), &ErofsOptions::default()).unwrap();
    second.mount.attach_at(&at).unwrap();
    assert!(at.join("hello").exists());
    mount::unmount_fd(open_directory(&at).as_fd()).unwrap();
    assert!(!at.join("hello").exists());
}

#[test]
fn erofs_on_tmpfs_goes_through_a_loop_device() {
    let Some(stage) = Stage::new(&["mkfs.erofs"]) else { return };
    let tmpfs = small_tmpfs();
    let at = stage.dir("tmpfs");
    tmpfs.attach_at(&at).unwrap();
    fs::copy(stage.hello(), at.join("image")).unwrap();
    let image = File::open(at.join("image")).unwrap();
    let erofs = mount::erofs(image.as_fd(), &ErofsOptions::default()).unwrap();
    assert_eq!(erofs.backing, Backing::Loop);
    assert_eq!(read_at(&erofs.mount, "hello").unwrap(), "hello\n");
    let backing = crate::loopdev::backed_by(&at.join("image"));
    assert_eq!(backing.len(), 1, "{backing:?}");
    drop(erofs);
    crate::loopdev::wait_until_free(&at.join("image"));
}

/// Blob devices are given in the order of the image's device table. mkfs.erofs writes one device.
#[test]
fn erofs_reads_from_a_device() {
    let Some(stage) = Stage::new(&["mkfs.erofs"]) else { return };
    let source = stage.dir("device.d");
    // All chunks differ, because mkfs.erofs would store equal ones once.
    let text: String = (0..5000).map(|line| format!("{line}\n")).collect();
    fs::write(source.join("file"), &text).unwrap();
    let blob = stage.path("blob");
    File::create(&blob).unwrap();
    let blob_option = format!("--blobdev={}", blob.display());
    let image = stage.mkfs("device.erofs", &["--chunksize=4096", &blob_option], &source);
    let image = File::open(image).unwrap();
    let blob = File::open(blob).unwrap();
    assert!(blob.metadata().unwrap().len() >= text.len() as u64);

    // Newer kernels mount the image without its devices, but read data of the devices from the image file.
    if let Ok(erofs) = mount::erofs(image.as_fd(), &ErofsOptions::default()) {
        assert_ne!(read_at(&erofs.mount, "file"), Ok(text.clone()));
    }
    for io in [Io::Direct, Io::Buffered] {
        let options = ErofsOptions { devices: &[blob.as_fd()], io, ..ErofsOptions::default() };
        let erofs = mount::erofs(image.as_fd(), &options).unwrap();
        assert_eq!(read_at(&erofs.mount, "file").unwrap(), text);
        assert_eq!(erofs.io, io);
    }
}

#[test]
fn idmapped_clone_of_an_image() {
    let Some(stage) = Stage::new(&["mkfs.erofs"]) else { return };
    let image = File::open(stage.hello()).unwrap();
    let erofs = mount::erofs(image.as_fd(), &ErofsOptions::default()).unwrap();
    let range = [IdRange { inside: 0, outside: 100_000, count: 65_536 }];
    let namespace = user_namespace(&range, &range).unwrap();
    let Some(mapped) = since(6, 15, erofs.mount.clone_detached()) else { return };
    let mapped = mapped.unwrap();
    mapped.idmap(namespace.as_fd()).unwrap();
    let owner = |mount: &mount::Detached| {
        let stat = rustix::fs::statat(mount, "hello", rustix::fs::AtFlags::empty()).unwrap();
        (stat.st_uid, stat.st_gid)
    };
    assert_eq!(owner(&erofs.mount), (0, 0));
    assert_eq!(owner(&mapped), (100_000, 100_000));
    // Both have one superblock, and so one set of inodes and pages.
    let device = |mount: &mount::Detached| rustix::fs::fstat(mount).unwrap().st_dev;
    assert_eq!(device(&mapped), device(&erofs.mount));
    // The map lacks the owner's id.
    let one = [IdRange { inside: 1, outside: 100_000, count: 1 }];
    let without = erofs.mount.clone_detached().unwrap();
    without.idmap(user_namespace(&one, &range).unwrap().as_fd()).unwrap();
    assert_eq!(owner(&without), (65_534, 100_000));
    let error = mapped.idmap(namespace.as_fd()).unwrap_err();
    assert!(chain(&error).starts_with("cannot map the owners of"), "{}", chain(&error));
}

#[test]
fn tmpfs_has_its_limits() {
    let Some(stage) = Stage::new(&[]) else { return };
    let tmpfs = small_tmpfs();
    assert!(tmpfs.is_writable().unwrap());
    write_at(&tmpfs, "file", "text").unwrap();
    assert_eq!(read_at(&tmpfs, "file").unwrap(), "text");
    assert_eq!(write_at(&tmpfs, "big", &"x".repeat(2 << 20)), Err(Errno::NOSPC));

    let at = stage.dir("at");
    tmpfs.attach_at(&at).unwrap();
    assert_eq!(fs::metadata(&at).unwrap().mode() & 0o7777, 0o700);
    let lines = mountinfo("quire:test");
    assert_eq!(lines.len(), 1);
    assert!(lines[0].contains("size=1024k"), "{lines:?}");

    let few =
        TmpfsOptions { name: "quire:few", bytes: None, inodes: NonZeroU64::new(3), mode: 0o755 };
    let few = mount::tmpfs(&few).unwrap();
    write_at(&few, "1", "").unwrap();
    write_at(&few, "2", "").unwrap();
    assert_eq!(write_at(&few, "3", ""), Err(Errno::NOSPC));
}

#[test]
fn attributes_and_bind() {
    let Some(stage) = Stage::new(&[]) else { return };
    let source = stage.dir("source");
    fs::write(source.join("file"), "text").unwrap();
    small_tmpfs().attach_at(&stage.dir("source/sub")).unwrap();
    fs::write(source.join("sub/below"), "").unwrap();

    let one = mount::bind(open_directory(&source).as_fd(), Reach::One).unwrap();
    assert_eq!(read_at(&one, "file").unwrap(), "text");
    assert_eq!(read_at(&one, "sub/below"), Err(Errno::NOENT));
    let all = mount::bind(open_directory(&source).as_fd(), Reach::Recursive).unwrap();
    assert_eq!(read_at(&all, "sub/below").unwrap(), "");

    let read_only = MountAttrFlags::MOUNT_ATTR_RDONLY | MountAttrFlags::MOUNT_ATTR_NOSUID;
    let change = Attributes { set: read_only, ..Attributes::default() };
    one.set(&change).unwrap();
    assert!(!one.is_writable().unwrap());
    assert_eq!(write_at(&one, "file", "new"), Err(Errno::ROFS));
    one.attach_at(&stage.dir("at")).unwrap();
    let lines = mountinfo(&stage.path("at").display().to_string());
    assert!(lines[0].contains(" ro,nosuid"), "{lines:?}");

    // An atime mode replaces any previous one.
    let noatime = MountAttrFlags::MOUNT_ATTR_NOATIME;
    one.set(&Attributes { set: noatime, ..Attributes::default() }).unwrap();
    one.set(&Attributes { clear: read_only, ..Attributes::default() }).unwrap();
    let lines = mountinfo(&stage.path("at").display().to_string());
    assert!(lines[0].contains(" rw,noatime"), "{lines:?}");
    write_at(&one, "file", "new").unwrap();
}

#[track_caller]
fn check_error(error: &mount::MountError, errno: Errno, expect: &[&str]) {
    let text = chain(error);
    assert_eq!(error.errno(), Some(errno), "{text}");
    for part in expect {
        assert!(text.contains(part), "{text:?} does not say {part:?}");
    }
}

#[test]
fn errors_name_step_object_and_cause() {
    let Some(stage) = Stage::new(&[]) else { return };
    let path = stage.path("not-an-image");
    fs::write(&path, vec![7; 8192]).unwrap();
    let file = File::open(&path).unwrap();
    let error = mount::erofs(file.as_fd(), &ErofsOptions::default()).unwrap_err();
    check_error(
        &error,
        Errno::INVAL,
        &["cannot create the superblock of erofs image /", "not-an-image", "Invalid argument"],
    );

    let error = mount::unmount(&stage.path("absent"), Unmount::Lazy).unwrap_err();
    check_error(&error, Errno::NOENT, &["cannot unmount /", "absent", "No such file"]);

    let tmpfs = small_tmpfs();
    let error = tmpfs.attach(file.as_fd()).unwrap_err();
    check_error(&error, Errno::INVAL, &["cannot attach a mount at /", "not-an-image"]);
}
