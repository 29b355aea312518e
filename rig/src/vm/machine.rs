//! Boots a machine from the directory of `quire bundle --vm`, and reads its image in every way that `docs/images.md`
//! describes: from the VMDK, from one disk for each file, from these disks joined by the device mapper, and from an
//! export as persistent memory.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

use super::boot::{self, Guest, Machine, Step};
use super::contents::{self, Contents};
use super::initramfs::{self, Way, has_module};
use super::kernels::Kernel;
use super::{Each, plan_text};
use crate::cache::Cache;
use crate::process::{need, quiet};
use crate::{Failed, Skipped, inputs};

pub(super) const NAME: &str = "machine";
pub(super) const ABOUT: &str = "disks without a copy, and persistent memory, of a machine";

/// Earlier kernels do not mount images with blocks of 512 bytes.
const SINCE: (u32, u32) = (6, 4);

/// From this kernel on, the image has the form `packed`, and before it the form `tar`, so that the tests of two kernels
/// cover both.
const PACKED_SINCE: (u32, u32) = (7, 0);

/// Modules of these mounts. The device mapper's `linear` is part of `dm_mod`.
const MODULES: [&str; 1] = ["dm_mod"];

/// Modules of persistent memory, which some kernels lack.
pub(super) const PMEM: [&str; 2] = ["virtio_pmem", "nd_pmem"];

/// Waits until a device exists, because `nd_pmem` registers it after its module has been loaded.
pub(super) const WAIT_FOR_PMEM: &str = r"
n=0
until test -b /dev/pmem0; do
    n=$((n + 1))
    test $n -lt 100
    sleep 0.1
done
";

/// The root is the image of the VMDK with changes on the ext4, and `/vm` has all other mounts.
const MOUNT: &str = r"
mkdir /image /changes
mount -t erofs -o ro /dev/VMDK /image
mount -t ext4 /dev/WRITABLE /changes
mkdir -p /changes/upper /changes/work
cp -r /vm /changes/upper/vm
cp /bin/busybox /changes/upper/vm/busybox
(cd /changes/upper/vm && mkdir image changes disks joined memory)
mount -t overlay -o lowerdir=/image,upperdir=/changes/upper,workdir=/changes/work overlay /root
mount --move /image /root/vm/image
mount --move /changes /root/vm/changes
mount -t erofs -o OPTIONS /dev/FIRST /root/vm/disks
DMSETUP create --readonly --noudevsync joined /vm/table
mount -t erofs -o ro /dev/dm-0 /root/vm/joined
";

const MOUNT_MEMORY: &str = "mount -t erofs -o ro,dax=always /dev/pmem0 /root/vm/memory\n";

/// Path of a new file in the writable layer, with the content of `/vm/digests`.
const NEW: &str = "root/new";

/// A file of the writable layer is read back from the disk for changes.
const CHANGES: &str = r"cp digests /NEW && sync && echo 3 > /proc/sys/vm/drop_caches && cmp digests /NEW \
    && cmp digests changes/upper/NEW && grep -q '^/dev/WRITABLE /vm/changes ext4 rw' /proc/mounts";

/// All disks but the one for changes state that they are read-only, and no write succeeds. Linux itself refuses writes
/// to such disks, and the host tests which files QEMU can write.
const READ_ONLY: &str = r"for it in DISKS dm-0; do test $(cat /sys/block/$it/ro) = 1 || exit 1; \
    if printf x | dd of=/dev/$it bs=1 conv=notrunc,fsync 2> /dev/null; then exit 1; fi; done; \
    test $(cat /sys/block/WRITABLE/ro) = 0";

/// Checks the digests of all files. Without KVM, this takes less time than `cmp` of two mounts.
const EQUAL: &str = "sha256sum --check --strict --quiet /vm/digests";

/// The mount of one disk for each file has the names and contents.
const DISKS: &str =
    r"grep -q '^/dev/FIRST /vm/disks erofs ro,' /proc/mounts && cd disks && NAMES && EQUAL";

/// The disk of the device mapper has the bytes of the VMDK, whose files were checked, and can be mounted.
const JOINED: &str = r"grep -q '^/dev/dm-0 /vm/joined erofs ro,' /proc/mounts \
    && cmp image/etc/os-release joined/etc/os-release && cmp /dev/VMDK /dev/dm-0";

/// A read of all files by DAX adds at most 3 % of their bytes to the page cache. A read of the same files from a disk
/// adds more than half, so the counters work. Names are in the cache before. The kernel maps programs as well. The
/// last command tries to write. That must not reach the file of the host, which is compared afterwards.
const MEMORY: &str = r#"grep -q '^/dev/pmem0 /vm/memory erofs ro,.*dax=always' /proc/mounts \
    && cached() { /vm/busybox awk '/^(Cached|Buffers):/ { sum += $2 } END { print sum * 1024 }' /proc/meminfo; } \
    && grown() { (cd $1 && sync && echo 3 > /proc/sys/vm/drop_caches && find . -type f -printf '%s' > /dev/null \
        && xargs -0 -r cat < /dev/null && cat /dev/null && before=$(cached) \
        && find . -type f -print0 | xargs -0 cat > /dev/null && echo $(($(cached) - before))); } \
    && bytes=$(find memory -type f -printf '%i %s\n' | sort -u | /vm/busybox awk '{ sum += $2 } END { print sum }') \
    && disk=$(grown image) && memory=$(grown memory) \
    && echo "read $bytes bytes; cached $disk more from a disk, $memory more by DAX" \
    && test $((disk * 2)) -gt $bytes && test $((memory * 100)) -le $((3 * bytes)) \
    && chroot memory /bin/true && cd memory && NAMES && EQUAL \
    && { printf x | dd of=/dev/pmem0 bs=1 seek=4096 conv=notrunc,fsync 2> /dev/null || true; }"#;

/// Bundles a Debian image, boots it, and calls `each` with the result of each step.
pub(super) fn test(cache: &Cache, kernel: &Kernel, each: Each<'_>) -> Result<()> {
    let version = kernel.version().context("the kernel's release has no version")?;
    if version < SINCE {
        let (major, minor) = SINCE;
        bail!(Skipped(format!(
            "kernels before {major}.{minor} mount no images with blocks of 512 bytes"
        )));
    }
    let form = if version < PACKED_SINCE { "tar" } else { "packed" };
    let mut has_memory = true;
    for module in PMEM {
        has_memory &= has_module(kernel, module)?;
    }
    if !has_memory {
        println!(
            "   LEFT OUT: {NAME}/persistent-memory: Linux {} lacks its modules",
            kernel.release
        );
    }
    let layout = inputs::debian_small(cache, false)?;
    let work = super::work(cache)?;
    let at = |name: &str| work.path().join(name);
    let [vm, dax, initramfs] = ["vm", "dax.erofs", "initramfs.cpio"].map(at);
    let contents = Contents::from_layout(&layout, work.path())?;
    let quire = || super::quire(&at("store"));
    let layout = format!("oci:{}", layout.display());
    quiet(quire()?.args(["--quiet", "import", "--form", form]).arg(layout).arg("a"))?;
    let options = ["bundle", "--json", "--writable", "self,size=1g", "--vm"];
    let told: serde_json::Value =
        serde_json::from_str(&quiet(quire()?.args(options).arg(&vm).arg("a"))?)?;
    quiet(
        quire()?.args(["--quiet", "export", "--dax", "a"]).arg(format!("erofs:{}", dax.display())),
    )?;

    let disks = told["disks"].as_array().context("the report has no field `disks`")?.len();
    // The image has two layers. In the form `packed`, the small files of the second one need no device.
    if disks < if form == "tar" { 3 } else { 2 } {
        bail!(Failed(format!("the image has only {} devices", disks - 1)));
    }
    // The files are disks twice, because the device mapper needs its disks exclusively. The first ones have the names
    // that the bundle expects. The disk for changes and the VMDK are between them.
    let [writable, vmdk, first] = [disks, disks + 1, disks + 2].map(guest_disk);
    let (writable, vmdk, first) = (writable?, vmdk?, first?);
    let options = told["mountOptions"].as_str().context("the report has no mount options")?;
    let mut options = options.to_owned();
    for number in (1..disks).rev() {
        options = options.replace(&guest_disk(number)?, &guest_disk(disks + 2 + number)?);
    }
    let dmsetup = need("dmsetup")?.display().to_string();
    let mut script = MOUNT.to_owned();
    if has_memory {
        script = script + WAIT_FOR_PMEM + MOUNT_MEMORY;
    }
    let script = script
        .replace("VMDK", &vmdk)
        .replace("WRITABLE", &writable)
        .replace("OPTIONS", &options)
        .replace("FIRST", &first)
        .replace("DMSETUP", &dmsetup);
    let others = (0..disks).chain([disks + 1]).chain(disks + 2..2 * disks + 2).map(guest_disk);
    let others = others.collect::<Result<Vec<_>>>()?.join(" ");
    let (steps, plan) = steps(&vmdk, &writable, &first, &others, has_memory);
    let modules: Vec<_> =
        MODULES.into_iter().chain(PMEM.into_iter().filter(|_| has_memory)).collect();
    let table = fs::read_to_string(vm.join("table"))?;
    let mut files = contents.files(&plan).to_vec();
    files.push(("vm/table", &table));
    let way = Way { script: &script, programs: &["dmsetup"], files: &files, modules: &modules };
    initramfs::write(kernel, &need("busybox")?, &way, work.path(), &initramfs)?;

    let arguments = told["qemuDisks"].as_array().context("the report has no arguments")?;
    let arguments = arguments.iter().filter_map(|it| it.as_str().map(String::from));
    let mut arguments: Vec<_> = arguments.take_while(|it| it != "-append").collect();
    let drive = told["qemu"][1].as_str().context("the report has no VMDK")?;
    let again = arguments[..2 * disks].to_vec();
    arguments.extend(["-drive".to_owned(), drive.to_owned()]);
    arguments.extend(again);
    let machine = Machine {
        arguments: &arguments,
        persistent: has_memory.then_some(&*dax),
        ..Machine::new(kernel, &initramfs, "-machine")?
    };
    let digest = || quiet(Command::new(need("sha256sum")?).arg(&dax));
    let before = digest()?;
    let mut guest = boot::start(&machine)?;
    check_files(&guest, work.path(), disks + usize::from(has_memory))?;
    guest.steps(&steps, each)?;
    guest.end()?;
    ensure!(digest()? == before, Failed(String::from("a guest has changed persistent memory")));
    // The changes are on the disk, and the files of the store are as before.
    let (ext4, new) = (vm.join("writable.ext4"), at("new"));
    // The guest did not unmount it, so the first call replays the journal, with the exit code 1. The second one accepts
    // no damage.
    for (options, accepted) in [(&["-E", "journal_only", "-p"][..], 1), (&["-f", "-n"][..], 0)] {
        let check = Command::new(need("e2fsck")?).args(options).arg(&ext4).output()?;
        if check.status.code().is_none_or(|code| code > accepted) {
            let said = String::from_utf8_lossy(&check.stdout);
            bail!(Failed(format!("e2fsck of the disk for changes: {}\n{said}", check.status)));
        }
    }
    let dump = format!("dump /upper/{NEW} \"{}\"", new.display());
    quiet(Command::new(need("debugfs")?).args(["-R", &dump]).arg(&ext4))?;
    if fs::read_to_string(&new)? != contents.digests() {
        bail!(Failed(String::from("a file that the guest wrote has other bytes on the disk")));
    }
    quiet(quire()?.args(["--quiet", "verify", "a"]))?;
    quiet(quire()?.args(["--quiet", "fsck", "--deep"])).map(drop)
}

/// Checks that QEMU has opened these files of the image, and can write none of them. Root may write to files of any
/// mode, so the store is protected only by the way in which they were opened.
fn check_files(guest: &Guest, work: &Path, count: usize) -> Result<()> {
    let work = work.canonicalize()?;
    let mut files = guest.files()?;
    files.retain(|it| it.path.starts_with(&work));
    let (writable, read_only): (Vec<_>, Vec<_>) = files.iter().partition(|it| it.is_writable);
    if let Some(file) = writable.iter().find(|it| !it.path.ends_with("writable.ext4")) {
        bail!(Failed(format!("QEMU can write to {}", file.path.display())));
    }
    let read_only: BTreeSet<_> = read_only.iter().map(|it| &it.path).collect();
    if read_only.len() < count || writable.is_empty() {
        bail!(Failed(format!("QEMU has other files open than expected: {files:?}")));
    }
    Ok(())
}

/// Returns the guest's name of a disk.
fn guest_disk(number: usize) -> Result<String> {
    let letter = u8::try_from(number).ok().filter(|it| *it < 26);
    let letter = letter.context("the image has too many devices for this test")?;
    Ok(format!("vd{}", char::from(b'a' + letter)))
}

/// Returns the steps, and the plan for the guest.
fn steps(
    vmdk: &str,
    writable: &str,
    first: &str,
    others: &str,
    has_memory: bool,
) -> (Vec<Step>, String) {
    let (mut steps, _) = contents::steps(NAME, &format!("^/dev/{vmdk} /vm/image erofs ro,"));
    let compare = |it: &str| it.replace("NAMES", contents::NAMES).replace("EQUAL", EQUAL);
    let more = [
        ("changes", CHANGES.replace("NEW", NEW).replace("WRITABLE", writable)),
        ("disks-are-read-only", READ_ONLY.replace("DISKS", others).replace("WRITABLE", writable)),
        ("disk-for-each-file", compare(&DISKS.replace("FIRST", first))),
        ("device-mapper", JOINED.replace("VMDK", vmdk)),
        ("persistent-memory", compare(MEMORY)),
    ];
    let more = more.into_iter().filter(|(name, _)| has_memory || *name != "persistent-memory");
    steps.extend(more.map(|(name, command)| Step {
        name: format!("{NAME}/{name}"),
        limit: Duration::from_secs(600),
        // The plan has a line for each step.
        command: command.replace("\\\n", " "),
        harness: false,
    }));
    let plan = plan_text(&steps);
    (steps, plan)
}
