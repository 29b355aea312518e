//! Boots a machine from a disk that Quire exported: the root is found by the partition table, programs run from it,
//! and its files are those of the layers.

use anyhow::{Context as _, Result};

use super::Each;
use super::boot::{self, Machine};
use super::contents::{self, Contents, OVER_IT};
use super::initramfs::{self, Way};
use super::kernels::Kernel;
use crate::cache::Cache;
use crate::inputs;
use crate::process::{need, quiet};

pub(super) const NAME: &str = "disk";
pub(super) const ABOUT: &str = "a disk that was exported is the root of a machine";

/// The root is a writable layer over the image, and `/vm/image` shows only the image.
const MOUNT: &str = r#"
device=$(FINDFS PARTUUID=PARTITION)
[ "$(FINDFS PARTLABEL=root)" = "$device" ]
mkdir /lower /upper
mount -t erofs -o ro "$device" /lower
"#;

/// Exports a Debian image, boots it, and calls `each` with the result of each step.
pub(super) fn test(cache: &Cache, kernel: &Kernel, each: Each<'_>) -> Result<()> {
    let layout = inputs::debian_small(cache, false)?;
    let work = super::work(cache)?;
    let at = |name: &str| work.path().join(name);
    let [disk, initramfs] = ["root.disk", "initramfs.cpio"].map(at);
    let contents = Contents::from_layout(&layout, work.path())?;
    let quire = || super::quire(&at("store"));
    quiet(quire()?.args(["--quiet", "import"]).arg(format!("oci:{}", layout.display())).arg("a"))?;
    let told =
        quiet(quire()?.args(["export", "--json", "a"]).arg(format!("disk:{}", disk.display())))?;
    let told: serde_json::Value = serde_json::from_str(&told)?;
    let partition = told["partition"].as_str().context("the export tells no partition")?;
    let (steps, plan) = contents::steps(NAME, "^/dev/vda1 /vm/image erofs ro,");
    let findfs = need("findfs")?.display().to_string();
    // The full path is needed, because busybox's own `findfs` does not support partitions.
    let script = MOUNT.replace("FINDFS", &findfs).replace("PARTITION", partition) + OVER_IT;
    let way =
        Way { script: &script, programs: &["findfs"], files: &contents.files(&plan), modules: &[] };
    initramfs::write(kernel, &need("busybox")?, &way, work.path(), &initramfs)?;
    let machine = Machine { disks: &[&disk], ..Machine::new(kernel, &initramfs, "-disk")? };
    boot::run(&machine, &steps, each)?;
    Ok(())
}
