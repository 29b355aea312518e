//! The test on Debian's kernel for arm64: a directory is imported, an image is mounted with `--verity require`,
//! containers run, and an image is pulled lazily from a registry of the guest.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::architecture::Architecture;
use super::boot::{self, Machine, Step};
use super::{Tally, initramfs, kernels, plan_text, root};
use crate::cache::Cache;
use crate::{inputs, tools};

/// Programs for running the guest, each with its Debian package.
const PACKAGES: [(&str, &str); 5] = [
    ("qemu-system-aarch64", "qemu-system-arm"),
    ("mkfs.ext4", "e2fsprogs"),
    ("depmod", "kmod"),
    ("cpio", "cpio"),
    ("xz", "xz-utils"),
];

/// The kernel of Debian 13, whose programs the guest has.
const KERNEL: &str = "lts";

const SCRIPT: &str = include_str!("arm64.sh");
/// Path of the script in the guest.
const PLACE: &str = "/vm/arm64.sh";

/// The steps of the script. An emulated processor takes up to half a minute for each.
const STEPS: [&str; 4] = ["import", "verity", "run", "lazy"];
const LIMIT: Duration = Duration::from_secs(600);

/// Boots the kernel, and runs the steps with this static `quire` for aarch64.
pub fn test(cache: &Cache, quire: &Path) -> Result<()> {
    tools::install(&PACKAGES)?;
    let kernel = kernels::find_kernel(cache, KERNEL, Architecture::Arm64, false)?;
    let base = inputs::arm64_root(cache, false)?;
    let steps = STEPS.map(|name| Step {
        name: format!("arm64/{name}"),
        limit: LIMIT,
        command: format!("sh {PLACE} {name}"),
        harness: false,
    });
    let work = super::work(cache)?;
    let [initramfs, disk, script] =
        ["initramfs.cpio", "disk", "script"].map(|it| work.path().join(it));
    fs::write(&script, SCRIPT)?;
    let files: [(PathBuf, PathBuf); 2] =
        [(script, PLACE.into()), (quire.into(), "/usr/bin/quire".into())];
    let busybox = base.join("usr/bin/busybox");
    let start = Instant::now();
    initramfs::write(&kernel, &busybox, &initramfs::DISK, work.path(), &initramfs)?;
    let environment = kernel.architecture.environment();
    root::write_over(&base, work.path(), &files, &plan_text(&steps), environment, &disk)?;
    println!("   made the disk in {:.1} s", start.elapsed().as_secs_f64());
    let machine =
        Machine { disks: &[&disk], memory: 1536, ..Machine::new(&kernel, &initramfs, "")? };
    let version = kernel.version().context("the kernel's release has no version")?;
    let mut tally = Tally::default();
    let start = Instant::now();
    boot::run(&machine, &steps, |step, outcome| tally.add(step, &outcome, version, false))?;
    tally.close(&kernel, start.elapsed())
}
