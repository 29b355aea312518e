//! An image counts as in use as long as it is mounted in any namespace.

use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::time::{Duration, Instant};

use kernel::lease::{LeaseError, in_use};
use kernel::mount::{self, ErofsOptions, Propagation, Unmount};

use crate::stage::{Stage, open_directory};

fn ask(path: &Path) -> bool {
    in_use(File::open(path).unwrap().as_fd()).unwrap()
}

/// Waits until a file is unused, because the kernel may finish an unmount a little later.
pub(crate) fn wait_until_free(path: &Path) {
    let start = Instant::now();
    while ask(path) {
        assert!(start.elapsed() < Duration::from_secs(120), "{} is still in use", path.display());
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn detached_then_attached_then_free() {
    let Some(stage) = Stage::new(&["mkfs.erofs"]) else { return };
    let image = stage.hello();
    assert!(!ask(&image));
    let erofs = {
        let file = File::open(&image).unwrap();
        mount::erofs(file.as_fd(), &ErofsOptions::default()).unwrap()
    };
    assert!(ask(&image), "detached");
    let at = stage.dir("at");
    erofs.mount.attach_at(&at).unwrap();
    drop(erofs);
    assert!(ask(&image), "attached");
    mount::unmount(&at, Unmount::Now).unwrap();
    wait_until_free(&image);
}

#[test]
fn in_another_mount_namespace() {
    let Some(stage) = Stage::new(&["mkfs.erofs"]) else { return };
    let image = stage.hello();
    let at = stage.dir("at");
    std::thread::scope(|scope| {
        let (attached, is_attached) = std::sync::mpsc::channel();
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let (image, at) = (&image, &at);
        scope.spawn(move || {
            kernel::process::own_mounts(Propagation::Private).unwrap();
            let file = File::open(image).unwrap();
            let erofs = mount::erofs(file.as_fd(), &ErofsOptions::default()).unwrap();
            erofs.mount.attach_at(at).unwrap();
            drop((erofs, file));
            attached.send(()).unwrap();
            // Waits until the other thread has checked.
            stopped.recv().unwrap_err();
        });
        is_attached.recv().unwrap();
        assert!(!at.join("hello").exists(), "not in this namespace");
        assert!(ask(image));
        drop(stop);
    });
    // The thread's namespace is gone, and so is its mount.
    wait_until_free(&image);
}

#[test]
fn loop_devices_and_blobs_count() {
    let Some(stage) = Stage::new(&["mkfs.erofs"]) else { return };
    let source = stage.dir("device.d");
    fs::write(source.join("file"), vec![7; 100_000]).unwrap();
    let blob = stage.path("blob");
    File::create(&blob).unwrap();
    let blob_option = format!("--blobdev={}", blob.display());
    let image = stage.mkfs("device.erofs", &["--chunksize=4096", &blob_option], &source);
    let erofs = {
        let (image, blob) = (File::open(&image).unwrap(), File::open(&blob).unwrap());
        let options = ErofsOptions { devices: &[blob.as_fd()], ..ErofsOptions::default() };
        mount::erofs(image.as_fd(), &options).unwrap()
    };
    assert!(ask(&image) && ask(&blob));
    drop(erofs);
    wait_until_free(&image);
    wait_until_free(&blob);

    let device = {
        let options = kernel::loopdev::LoopOptions {
            block_size: kernel::loopdev::LoopBlockSize::B4096,
            access: kernel::loopdev::Access::ReadOnly,
            direct_io: true,
        };
        kernel::loopdev::attach(File::open(&blob).unwrap().as_fd(), &options).unwrap()
    };
    assert!(ask(&blob));
    drop(device);
    wait_until_free(&blob);
}

#[test]
fn readers_count_but_duplicates_do_not() {
    let Some(stage) = Stage::new(&[]) else { return };
    let path = stage.path("file");
    fs::write(&path, "text").unwrap();
    let file = File::open(&path).unwrap();
    let duplicate = file.try_clone().unwrap();
    assert!(!in_use(file.as_fd()).unwrap());
    let second = File::open(&path).unwrap();
    assert!(in_use(file.as_fd()).unwrap());
    drop(second);
    assert!(!in_use(file.as_fd()).unwrap());
    drop(duplicate);

    let writable = File::options().write(true).open(&path).unwrap();
    drop(file);
    assert!(!in_use(writable.as_fd()).unwrap());
}

#[test]
fn what_cannot_ask() {
    let Some(stage) = Stage::new(&[]) else { return };
    let directory = open_directory(&stage.dir("directory"));
    let error = in_use(directory.as_fd()).unwrap_err();
    assert!(matches!(error, LeaseError::Descriptor { .. }), "{error:?}");
    let error = in_use(File::open(stage.path("directory")).unwrap().as_fd()).unwrap_err();
    assert!(matches!(error, LeaseError::Ask { .. }), "{error:?}");
}
