//! A disk that Quire exported is the root of a machine: found by what its table says, with programs that run from it, and as
//! the layers say that it is.

use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};

use super::boot::{self, Machine, Outcome, Step};
use super::initramfs::{self, Way};
use super::kernels::Kernel;
use super::root;
use crate::cache::Cache;
use crate::inputs;
use crate::process::{need, quiet, target_dir};

pub(super) const NAME: &str = "disk";
pub(super) const ABOUT: &str = "a disk that was exported is the root of a machine";

/// Reads a layout without us.
const EXPECTED: &str = include_str!("disk.py");

/// The root is what is written over the image; the image alone is seen at `/vm/image`.
const MOUNT: &str = r#"
device=$(FINDFS PARTUUID=PARTITION)
[ "$(FINDFS PARTLABEL=root)" = "$device" ]
mkdir /lower /upper
mount -t erofs -o ro "$device" /lower
mount -t tmpfs tmpfs /upper
mkdir /upper/files /upper/work
cp -r /vm /upper/files/vm
cp /bin/busybox /upper/files/vm/busybox
mkdir /upper/files/vm/image
mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work overlay /root
mount --move /lower /root/vm/image
"#;

/// By name, with seconds, what the guest does with programs of the image. What is said without a word is as expected.
const STEPS: [(&str, u64, &str); 3] = [
    (
        "is-the-root",
        60,
        ". /etc/os-release && test \"$ID\" = debian && grep -q '^/dev/vda1 /vm/image erofs ro,' /proc/mounts && \
         touch /new && test ! -e image/new && ! touch image/new 2>/dev/null",
    ),
    (
        "names-kinds-owners-times",
        300,
        "cd image && find . -type d -printf 'd %m %U %G %T@ %p\\n' -o -type f -printf 'f %n %s %m %U %G %T@ %p\\n' \
         -o -type l -printf 'l %n %m %U %G %T@ %p -> %l\\n' -o -printf '%y %n %m %U %G %T@ %p\\n' \
         | LC_ALL=C sort | diff /vm/files -",
    ),
    ("digests", 600, "cd image && sha256sum --check --strict --quiet /vm/digests"),
];

/// Exports a Debian image, boots it, and hands out each step's outcome.
pub(super) fn test(cache: &Cache, kernel: &Kernel, each: impl FnMut(&Step, Outcome)) -> Result<()> {
    let layout = inputs::debian_small(cache, false)?;
    let work = super::work(cache)?;
    let at = |name: &str| work.path().join(name);
    let [files, digests, disk, initramfs] =
        ["files", "digests", "root.disk", "initramfs.cpio"].map(at);
    let mut python = Command::new(need("python3")?);
    quiet(python.args(["-c", EXPECTED]).arg(&layout).arg(&files).arg(&digests))?;
    let quire = || {
        let mut quire = Command::new(target_dir()?.join("debug/quire"));
        quire.arg("--store").arg(at("store"));
        anyhow::Ok(quire)
    };
    quiet(quire()?.args(["--quiet", "import"]).arg(format!("oci:{}", layout.display())).arg("a"))?;
    let told =
        quiet(quire()?.args(["export", "--json", "a"]).arg(format!("disk:{}", disk.display())))?;
    let told: serde_json::Value = serde_json::from_str(&told)?;
    let partition = told["partition"].as_str().context("the export tells no partition")?;
    let steps = STEPS.map(|(name, seconds, command)| Step {
        name: format!("disk/{name}"),
        limit: Duration::from_secs(seconds),
        command: command.to_owned(),
        harness: false,
    });
    let [files, digests] = [fs::read_to_string(files)?, fs::read_to_string(digests)?];
    let findfs = need("findfs")?.display().to_string();
    let way = Way {
        // By its path, else busybox takes its own, which knows no partitions.
        script: &MOUNT.replace("FINDFS", &findfs).replace("PARTITION", partition),
        programs: &["findfs"],
        files: &[
            ("vm/init", root::GUEST),
            ("vm/plan", &super::plan_text(&steps)),
            ("vm/environment", ""),
            ("vm/files", &files),
            ("vm/digests", &digests),
        ],
    };
    initramfs::write(kernel, &way, work.path(), &initramfs)?;
    let machine = Machine {
        kernel: &kernel.image(),
        initramfs: &initramfs,
        disk: &disk,
        data: None,
        memory: 1024,
        console: &super::console(kernel, "-disk")?,
    };
    boot::run(&machine, &steps, each)?;
    Ok(())
}
