//! Loop devices are attached as requested, and detached after use.

use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kernel::loopdev::{self, Access, LoopBlockSize, LoopOptions};
use rustix::io::Errno;

use crate::stage::{Stage, chain};

/// Returns the loop devices of a file, according to sysfs.
pub(crate) fn backed_by(file: &Path) -> Vec<PathBuf> {
    let devices = fs::read_dir("/sys/block").unwrap().map(|entry| entry.unwrap().path());
    devices
        .filter(|device| {
            let backing = fs::read_to_string(device.join("loop/backing_file"));
            backing.is_ok_and(|path| path.trim_end().ends_with(file.to_str().unwrap()))
        })
        .collect()
}

/// Waits until a file has no loop devices, because the last steps of an unmount run after the close.
pub(crate) fn wait_until_free(file: &Path) {
    let start = Instant::now();
    while !backed_by(file).is_empty() {
        assert!(start.elapsed() < Duration::from_secs(120), "{} is still attached", file.display());
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn attach_as_asked() {
    let Some(stage) = Stage::new(&[]) else { return };
    let path = stage.path("file");
    fs::write(&path, vec![7; 1 << 16]).unwrap();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    for (block_size, size) in [(LoopBlockSize::B512, 512), (LoopBlockSize::B4096, 4096)] {
        for (access, ro) in [(Access::ReadOnly, "1"), (Access::ReadWrite, "0")] {
            for direct_io in [false, true] {
                let options = LoopOptions { block_size, access, direct_io };
                let device = loopdev::attach(file.as_fd(), &options).unwrap();
                assert_eq!(rustix::fs::ioctl_blksszget(&device).unwrap(), size);
                let found = backed_by(&path);
                assert_eq!(found.len(), 1);
                assert_eq!(found[0].file_name(), Path::new(&device.path()).file_name());
                let attribute = |name: &str| {
                    fs::read_to_string(found[0].join(name)).unwrap().trim_end().to_owned()
                };
                assert_eq!(attribute("ro"), ro);
                assert_eq!(attribute("loop/autoclear"), "1");
                assert_eq!(attribute("loop/dio") == "1", direct_io);
                drop(device);
                wait_until_free(&path);
            }
        }
    }
}

/// Many threads compete for the same free device, and each must get one.
#[test]
fn contention() {
    let Some(stage) = Stage::new(&[]) else { return };
    let path = stage.path("file");
    fs::write(&path, vec![7; 4096]).unwrap();
    let options = LoopOptions {
        block_size: LoopBlockSize::B4096,
        access: Access::ReadOnly,
        direct_io: false,
    };
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..10 {
                    let file = File::open(&path).unwrap();
                    drop(loopdev::attach(file.as_fd(), &options).unwrap());
                }
            });
        }
    });
    wait_until_free(&path);
}

#[test]
fn a_directory_is_refused_by_name() {
    let Some(stage) = Stage::new(&[]) else { return };
    let directory = File::open(stage.dir("directory")).unwrap();
    let options = LoopOptions {
        block_size: LoopBlockSize::B4096,
        access: Access::ReadOnly,
        direct_io: false,
    };
    let error = loopdev::attach(directory.as_fd(), &options).unwrap_err();
    assert_eq!(error.errno(), Some(Errno::INVAL));
    let text = chain(&error);
    assert!(text.contains("/directory to /dev/loop"), "{text}");
}
