//! Boots a machine from a disk with a dm-verity hash tree: the root hash opens the root, another one does not, and
//! changed bytes are errors.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::Each;
use super::architecture::Architecture;
use super::boot::{self, Machine, Step};
use super::contents::{self, Contents, OVER_IT};
use super::initramfs::{self, Way};
use super::kernels::Kernel;
use super::plan_text;
use crate::cache::Cache;
use crate::process::{need, quiet};
use crate::tools::STUB;
use crate::{Skipped, inputs};

pub(super) const NAME: &str = "verified";
pub(super) const ABOUT: &str =
    "a disk with dm-verity boots with its root hash only, and changed bytes are errors";

/// The first disk is as exported, and the second has one changed bit. cryptsetup, and not Quire, reads the superblock
/// and the tree.
///
/// A wrong hash may open a device, but then no block of it can be read.
const MOUNT: &str = r#"
mkdir /lower /upper /damaged
VERITYSETUP open /dev/vda1 wrong /dev/vda2 WRONG || true
if [ -e /dev/mapper/wrong ] && mount -t erofs -o ro /dev/mapper/wrong /lower; then
    echo mounted > /vm/wrong
else
    echo refused > /vm/wrong
    [ ! -e /dev/mapper/wrong ] || VERITYSETUP close wrong
fi
VERITYSETUP open /dev/vda1 root /dev/vda2 RIGHT
VERITYSETUP open /dev/vdb1 damaged /dev/vdb2 RIGHT
mount -t erofs -o ro /dev/mapper/root /lower
mount -t erofs -o ro /dev/mapper/damaged /damaged
"#;

/// Takes the root hash from the command line of the boot program.
const MOUNT_BY_COMMAND_LINE: &str = r#"
mkdir /lower /upper
hash=$(sed -n 's/^roothash=\([0-9a-f]*\) .*/\1/p' /proc/cmdline)
VERITYSETUP open /dev/vda1 root /dev/vda2 "$hash"
mount -t erofs -o ro /dev/mapper/root /lower
"#;

/// Shows the damaged image beside the sound one.
const DAMAGED: &str = "
mkdir /upper/files/vm/damaged
mount --move /damaged /root/vm/damaged
";

/// The module of dm-verity.
const MODULES: &[&str] = &["dm_verity"];
/// Firmware for UEFI with its variables, and systemd's stub.
const FIRMWARE: &str = "/usr/share/ovmf/OVMF.fd";

/// A file of the image that has whole blocks.
const FILE: &str = "/usr/bin/bash";
/// Length of the part of the file that is searched on the disk, in bytes.
const BLOCK: usize = 4096;

/// Exports a Debian image, boots it, and calls `each` with the result of each step.
pub(super) fn test(cache: &Cache, kernel: &Kernel, each: Each<'_>) -> Result<()> {
    let layout = inputs::debian_small(cache, false)?;
    let work = super::work(cache)?;
    let at = |name: &str| work.path().join(name);
    let [disk, damaged, initramfs] = ["root.disk", "damaged.disk", "initramfs.cpio"].map(at);
    let contents = Contents::from_layout(&layout, work.path())?;
    let quire = || super::quire(&at("store"));
    quiet(quire()?.args(["--quiet", "import"]).arg(format!("oci:{}", layout.display())).arg("a"))?;
    let told = quiet(
        quire()?
            .args(["export", "--json", "--verity", "a"])
            .arg(format!("disk:{}", disk.display())),
    )?;
    let told: serde_json::Value = serde_json::from_str(&told)?;
    let root_hash = told["rootHash"].as_str().context("the export tells no root hash")?;
    let file = quire()?.arg("cat").arg(format!("a:{FILE}")).output()?;
    if !file.status.success() {
        bail!("quire cat {FILE}: {}", String::from_utf8_lossy(&file.stderr));
    }
    fs::copy(&disk, &damaged)?;
    change_bit(&damaged, &file.stdout)?;
    // The last digit of the wrong hash is another one.
    let other = if root_hash.ends_with('0') { "1" } else { "0" };
    let wrong = format!("{}{other}", &root_hash[..root_hash.len() - 1]);
    let (mut steps, _) = contents::steps(NAME, "^/dev/mapper/root /vm/image erofs ro,");
    steps.extend(own_steps());
    let plan = plan_text(&steps);
    let veritysetup = need("veritysetup")?.display().to_string();
    let mount = MOUNT.replace("VERITYSETUP", &veritysetup);
    let mount = mount.replace("RIGHT", root_hash).replace("WRONG", &wrong);
    let script = mount + OVER_IT + DAMAGED;
    let files = contents.files(&plan);
    let way = Way { script: &script, programs: &["veritysetup"], files: &files, modules: MODULES };
    initramfs::write(kernel, &need("busybox")?, &way, work.path(), &initramfs)?;
    let machine =
        Machine { disks: &[&disk, &damaged], ..Machine::new(kernel, &initramfs, "-verified")? };
    boot::run(&machine, &steps, each)?;
    Ok(())
}

pub(super) const UKI_NAME: &str = "uki";
pub(super) const UKI_ABOUT: &str = "a bootable disk is all that a machine with UEFI needs";

/// Exports a Debian image with a kernel, boots it by firmware, and calls `each` with the result of each step.
pub(super) fn test_uki(cache: &Cache, kernel: &Kernel, each: Each<'_>) -> Result<()> {
    if kernel.architecture != Architecture::Amd64 {
        bail!(Skipped(String::from("only firmware for amd64 is installed")));
    }
    for (file, package) in [(FIRMWARE, "ovmf"), (STUB, "systemd-boot-efi")] {
        if !Path::new(file).is_file() {
            bail!(Skipped(format!("{file} is not installed (Debian: {package})")));
        }
    }
    let layout = inputs::debian_small(cache, false)?;
    let work = super::work(cache)?;
    let at = |name: &str| work.path().join(name);
    let [disk, initramfs] = ["root.disk", "initramfs.cpio"].map(at);
    let contents = Contents::from_layout(&layout, work.path())?;
    let (steps, plan) = contents::steps(UKI_NAME, "^/dev/mapper/root /vm/image erofs ro,");
    let veritysetup = need("veritysetup")?.display().to_string();
    let script = MOUNT_BY_COMMAND_LINE.replace("VERITYSETUP", &veritysetup) + OVER_IT;
    let files = contents.files(&plan);
    let way = Way { script: &script, programs: &["veritysetup"], files: &files, modules: MODULES };
    initramfs::write(kernel, &need("busybox")?, &way, work.path(), &initramfs)?;
    let quire = || super::quire(&at("store"));
    quiet(quire()?.args(["--quiet", "import"]).arg(format!("oci:{}", layout.display())).arg("a"))?;
    let command_line = format!("console={} {}", kernel.architecture.console(), boot::COMMAND_LINE);
    let mut export = quire()?;
    export.args(["--quiet", "export", "--bootable", "--stub", STUB, "--cmdline", &command_line]);
    export.arg("--kernel").arg(kernel.image()).arg("--initrd").arg(&initramfs);
    quiet(export.arg("a").arg(format!("disk:{}", disk.display())))?;
    let machine = Machine {
        firmware: Some(Path::new(FIRMWARE)),
        disks: &[&disk],
        ..Machine::new(kernel, &initramfs, "-uki")?
    };
    boot::run(&machine, &steps, each)?;
    Ok(())
}

/// Returns the steps for the wrong hash and the damaged disk.
fn own_steps() -> [Step; 3] {
    let eio = format!(
        "! cat damaged{FILE} > /dev/null 2> /tmp/error && grep -q 'Input/output error' /tmp/error && \
         cat image{FILE} > /dev/null"
    );
    // Only one block is wrong, so the other files are readable.
    let others = format!(
        "cd damaged && find . -xdev -type f ! -path .{FILE} ! -samefile .{FILE} -exec cat {{}} + > /dev/null"
    );
    let step = |name: &str, seconds, command: String| Step {
        name: format!("{NAME}/{name}"),
        limit: Duration::from_secs(seconds),
        command,
        harness: false,
    };
    [
        step("wrong-root-hash", 60, "test \"$(cat wrong)\" = refused".to_owned()),
        step("changed-bit-is-an-error", 60, eio),
        step("other-files", 600, others),
    ]
}

/// Changes a bit of a file's second block on the disk.
fn change_bit(disk: &Path, content: &[u8]) -> Result<()> {
    let wanted = content.get(BLOCK..2 * BLOCK).context("the file is too short")?;
    let bytes = fs::read(disk)?;
    let place = bytes.chunks(BLOCK).position(|it| it == wanted);
    let place = (place.context("the file's block is not on the disk")? * BLOCK + 100) as u64;
    let file = File::options().read(true).write(true).open(disk)?;
    let mut byte = [0];
    file.read_exact_at(&mut byte, place)?;
    file.write_all_at(&[byte[0] ^ 1], place)?;
    Ok(())
}
