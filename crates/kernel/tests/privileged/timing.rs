//! Measures the system calls of a mount. Run it with `--ignored --nocapture`, in release.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use kernel::mount::{
    self, Credentials, Detached, Durability, ErofsOptions, OverlayOptions, TmpfsOptions, Upper,
    Verity, XattrNamespace,
};
use rustix::fs::{Mode, OFlags};

use crate::stage::{Stage, open_directory};

fn median(what: &str, mut once: impl FnMut()) {
    let mut times: Vec<Duration> = (0..500)
        .map(|_| {
            let start = Instant::now();
            once();
            start.elapsed()
        })
        .collect();
    times.sort();
    let (half, best) = (times[times.len() / 2], times[0]);
    let mut terminal = std::io::stdout();
    writeln!(terminal, "{what}: median {half:?}, best {best:?}").unwrap();
}

fn stack(lower: &Detached, objects: &OwnedFd, upper: Option<Upper<'_>>) -> Detached {
    mount::overlay(&OverlayOptions {
        name: "quire:timing",
        lower: &[lower.as_fd()],
        data: &[objects.as_fd()],
        upper,
        verity: Verity::Off,
        xattrs: XattrNamespace::Trusted,
        credentials: Credentials::Mounter,
    })
    .unwrap()
}

#[test]
#[ignore = "a measurement"]
fn microseconds() {
    let Some(stage) = Stage::new(&["mkfs.erofs"]) else { return };
    let composefs = stage.composefs();
    let at = stage.dir("at");
    let image_file = File::open(&composefs.image).unwrap();
    let objects = open_directory(&composefs.objects);
    let erofs = || mount::erofs(image_file.as_fd(), &ErofsOptions::default()).unwrap().mount;
    let overlay = |lower: &Detached, upper: Option<Upper<'_>>| stack(lower, &objects, upper);
    median("erofs, detached", || drop(erofs()));
    median("composefs, detached", || drop(overlay(&erofs(), None)));
    median("composefs, attached, unmounted", || {
        let image = erofs();
        overlay(&image, None).attach_at(&at).unwrap();
        drop(image);
        mount::unmount(&at, mount::Unmount::Now).unwrap();
    });
    let image = erofs();
    median("overlay over a shared image", || drop(overlay(&image, None)));
    median("the same with a tmpfs upper", || {
        let options = TmpfsOptions { name: "t", bytes: None, inodes: None, mode: 0o755 };
        let tmpfs = mount::tmpfs(&options).unwrap();
        let directory = |name: &str| {
            rustix::fs::mkdirat(&tmpfs, name, Mode::RWXU).unwrap();
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            rustix::fs::openat(&tmpfs, name, flags, Mode::empty()).unwrap()
        };
        let (upper, work) = (directory("upper"), directory("work"));
        let upper =
            Upper { upper: upper.as_fd(), work: work.as_fd(), durability: Durability::Volatile };
        drop(overlay(&image, Some(upper)));
    });
}
