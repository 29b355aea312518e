//! Boots a machine from the directory of `quire bundle --vm`, and reads its image in every way that
//! `docs/images.md` describes: from the VMDK, from one disk for each file, from these disks joined by the device mapper,
//! and from an export as persistent memory.

use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::boot::{self, Machine, Step};
use super::contents::{self, Contents};
use super::initramfs::{self, Way};
use super::kernels::Kernel;
use super::{Each, plan_text};
use crate::cache::Cache;
use crate::process::{need, quiet};
use crate::{Failed, inputs};

pub(super) const NAME: &str = "machine";
pub(super) const ABOUT: &str = "disks without a copy, and persistent memory, of a machine";

/// Earlier kernels do not mount images with blocks of 512 bytes.
const SINCE: (u32, u32) = (6, 4);

/// Modules of these mounts. The device mapper's `linear` is part of `dm_mod`.
const MODULES: [&str; 3] = ["dm_mod", "virtio_pmem", "nd_pmem"];

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
mount -t erofs -o ro,dax=always /dev/pmem0 /root/vm/memory
";

/// Path of a new file in the writable layer, with the content of `/vm/digests`.
const NEW: &str = "root/new";

/// A file of the writable layer is read back from the disk for changes.
const CHANGES: &str = r"cp digests /NEW && sync && echo 3 > /proc/sys/vm/drop_caches && cmp digests /NEW \
    && cmp digests changes/upper/NEW && grep -q '^/dev/WRITABLE /vm/changes ext4 rw' /proc/mounts";

/// Checks the digests of all files of the mount of one disk for each file.
const DISKS: &str = r"grep -q '^/dev/FIRST /vm/disks erofs ro,' /proc/mounts && cd disks \
    && sha256sum --check --strict --quiet /vm/digests";

/// The disk of the device mapper has the bytes of the VMDK, whose files were checked, and can be mounted.
const JOINED: &str = r"grep -q '^/dev/dm-0 /vm/joined erofs ro,' /proc/mounts \
    && cmp image/etc/os-release joined/etc/os-release && cmp /dev/VMDK /dev/dm-0";

/// Reads all files, which may add at most 3 % of their bytes to the page cache. The names of the files, the checking
/// program and its input are in the cache before. The kernel maps programs as well.
const MEMORY: &str = r#"grep -q '^/dev/pmem0 /vm/memory erofs ro,.*dax=always' /proc/mounts && cd memory \
    && cached() { /vm/busybox awk '/^(Cached|Buffers):/ { sum += $2 } END { print sum }' /proc/meminfo; } \
    && bytes=$(find . -type f -links 1 -printf '%s\n' | /vm/busybox awk '{ sum += $1 } END { print sum }') \
    && sync && echo 3 > /proc/sys/vm/drop_caches && cat /vm/digests > /dev/null \
    && find . -type f -printf '%s' > /dev/null \
    && head -n 3 /vm/digests | sha256sum --check --strict --quiet && before=$(cached) \
    && sha256sum --check --strict --quiet /vm/digests && after=$(cached) \
    && chroot . /bin/true && echo "read $bytes bytes, cached $((after - before)) KiB more" \
    && test $(((after - before) * 1024 * 100)) -le $((3 * bytes))"#;

/// Bundles a Debian image, boots it, and calls `each` with the result of each step.
pub(super) fn test(cache: &Cache, kernel: &Kernel, each: Each<'_>) -> Result<()> {
    if kernel.version().is_some_and(|version| version < SINCE) {
        println!("   LEFT OUT: {NAME}: earlier kernels mount no images with blocks of 512 bytes");
        return Ok(());
    }
    let layout = inputs::debian_small(cache, false)?;
    let work = super::work(cache)?;
    let at = |name: &str| work.path().join(name);
    let [vm, dax, initramfs] = ["vm", "dax.erofs", "initramfs.cpio"].map(at);
    let contents = Contents::from_layout(&layout, work.path())?;
    let quire = || super::quire(&at("store"));
    let layout = format!("oci:{}", layout.display());
    quiet(quire()?.args(["--quiet", "import", "--form", "packed"]).arg(layout).arg("a"))?;
    let options = ["bundle", "--json", "--writable", "self,size=1g", "--vm"];
    let told: serde_json::Value =
        serde_json::from_str(&quiet(quire()?.args(options).arg(&vm).arg("a"))?)?;
    quiet(
        quire()?.args(["--quiet", "export", "--dax", "a"]).arg(format!("erofs:{}", dax.display())),
    )?;

    let disks = told["disks"].as_array().context("the bundle tells no disks")?.len();
    if disks < 2 {
        bail!(Failed(String::from("the image has no device")));
    }
    // The files are disks twice, because the device mapper needs its disks exclusively. The first ones have the names that
    // the bundle expects. The disk for changes and the VMDK are between them.
    let [writable, vmdk, first] = [disks, disks + 1, disks + 2].map(guest_disk);
    let (writable, vmdk, first) = (writable?, vmdk?, first?);
    let options = told["mountOptions"].as_str().context("the bundle tells no mount options")?;
    let mut options = options.to_owned();
    for number in (1..disks).rev() {
        options = options.replace(&guest_disk(number)?, &guest_disk(disks + 2 + number)?);
    }
    let dmsetup = need("dmsetup")?.display().to_string();
    let script = MOUNT
        .replace("VMDK", &vmdk)
        .replace("WRITABLE", &writable)
        .replace("OPTIONS", &options)
        .replace("FIRST", &first)
        .replace("DMSETUP", &dmsetup);
    let (steps, plan) = steps(&vmdk, &writable, &first);
    let table = fs::read_to_string(vm.join("table"))?;
    let mut files = contents.files(&plan).to_vec();
    files.push(("vm/table", &table));
    let way = Way { script: &script, programs: &["dmsetup"], files: &files, modules: &MODULES };
    initramfs::write(kernel, &need("busybox")?, &way, work.path(), &initramfs)?;

    let arguments = told["qemuDisks"].as_array().context("the bundle tells no arguments")?;
    let arguments = arguments.iter().filter_map(|it| it.as_str().map(String::from));
    let mut arguments: Vec<_> = arguments.take_while(|it| it != "-append").collect();
    let drive = told["qemu"][1].as_str().context("the bundle has no VMDK")?;
    let again = arguments[..2 * disks].to_vec();
    arguments.extend(["-drive".to_owned(), drive.to_owned()]);
    arguments.extend(again);
    let machine = Machine {
        arguments: &arguments,
        persistent: Some(&dax),
        ..Machine::new(kernel, &initramfs, "-machine")?
    };
    boot::run(&machine, &steps, each)?;
    // The changes are on the disk, and the files of the store are as before.
    let (ext4, new) = (vm.join("writable.ext4"), at("new"));
    // The guest did not unmount it, so this replays the journal, and the exit code is 1.
    let check = Command::new(need("e2fsck")?).arg("-p").arg(&ext4).output()?;
    if check.status.code().is_none_or(|code| code > 1) {
        let said = String::from_utf8_lossy(&check.stdout);
        bail!(Failed(format!("e2fsck of the disk for changes: {}\n{said}", check.status)));
    }
    let dump = format!("dump /upper/{NEW} {}", new.display());
    quiet(Command::new(need("debugfs")?).args(["-R", &dump]).arg(&ext4))?;
    if fs::read_to_string(&new)? != contents.digests() {
        bail!(Failed(String::from("a file that the guest wrote has other bytes on the disk")));
    }
    quiet(quire()?.args(["--quiet", "verify", "a"]))?;
    quiet(quire()?.args(["--quiet", "fsck", "--deep"])).map(drop)
}

/// Returns the guest's name of a disk.
fn guest_disk(number: usize) -> Result<String> {
    let letter = u8::try_from(number).ok().filter(|it| *it < 26);
    let letter = letter.context("the image has too many devices for this test")?;
    Ok(format!("vd{}", char::from(b'a' + letter)))
}

/// Returns the steps, and the plan for the guest.
fn steps(vmdk: &str, writable: &str, first: &str) -> (Vec<Step>, String) {
    let (mut steps, _) = contents::steps(NAME, &format!("^/dev/{vmdk} /vm/image erofs ro,"));
    let more = [
        ("changes", CHANGES.replace("NEW", NEW).replace("WRITABLE", writable)),
        ("disk-for-each-file", DISKS.replace("FIRST", first)),
        ("device-mapper", JOINED.replace("VMDK", vmdk)),
        ("persistent-memory", MEMORY.to_owned()),
    ];
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
