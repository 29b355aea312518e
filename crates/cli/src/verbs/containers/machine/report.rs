//! The texts of `bundle --vm`: `machine.json`, the VMDK, the table of a device mapper, and arguments of hypervisors.

use std::fmt::Write as _;
use std::io;

use image::verity::{DeviceId, ImageId};
use serde::Serialize;
use store::Form;

use crate::output::report::Bytes;

pub(super) const DISK: &str = "disk.vmdk";
pub(super) const TABLE: &str = "table";
pub(super) const MACHINE: &str = "machine.json";
pub(super) const WRITABLE: &str = "writable.ext4";

/// Bytes of a sector, which is the unit of VMDK and of the device mapper.
const SECTOR: u64 = 512;

/// Returns a number of whole sectors.
pub(super) fn sectors(bytes: u64) -> Option<u64> {
    bytes.is_multiple_of(SECTOR).then_some(bytes / SECTOR)
}

/// A file that is a disk of the virtual machine.
pub(super) struct Disk {
    pub(super) file: String,
    /// `None` for the image itself.
    pub(super) device: Option<DeviceId>,
    pub(super) bytes: u64,
}

/// Everything that the texts contain.
pub(super) struct Parts<'a> {
    pub(super) image: ImageId,
    pub(super) form: Form,
    /// Absolute path of the directory with the files.
    pub(super) directory: &'a str,
    /// The image, and its devices in the order of the device table.
    pub(super) disks: &'a [Disk],
    /// Whether the disks one after the other are a disk with the image.
    pub(super) is_one_disk: bool,
    /// Size of the disk for changes in bytes.
    pub(super) writable: Option<u64>,
}

impl Parts<'_> {
    fn bytes(&self) -> u64 {
        self.disks.iter().map(|it| it.bytes).sum()
    }

    fn path(&self, file: &str) -> String {
        format!("{}/{file}", self.directory.trim_end_matches('/'))
    }

    /// Returns a descriptor with the disks as flat extents. Source: VMware, "Virtual Disk Format 5.0". QEMU skips
    /// extents that are not `RW` (block/vmdk.c, `vmdk_parse_extents`), so the disk must be attached read-only.
    pub(super) fn vmdk(&self) -> String {
        let extents = self.disks.iter().fold(String::new(), |mut text, it| {
            let _written = writeln!(text, "RW {} FLAT \"{}\" 0", it.bytes / SECTOR, it.file);
            text
        });
        // All ones mean that there is no parent, so the id of a disk may not be this number.
        let id = self.image.to_string();
        let id = id.get(..8).filter(|it| !it.starts_with("fffffff")).unwrap_or("00000001");
        let cylinders = (self.bytes() / SECTOR / (16 * 63)).clamp(1, 65535);
        format!(
            "# Disk DescriptorFile\nversion=1\nCID={id}\nparentCID=ffffffff\n\
            createType=\"twoGbMaxExtentFlat\"\n\n# Extent description\n{extents}\n\
            # The Disk Data Base\n#DDB\n\nddb.virtualHWVersion = \"4\"\n\
            ddb.geometry.cylinders = \"{cylinders}\"\nddb.geometry.heads = \"16\"\n\
            ddb.geometry.sectors = \"63\"\nddb.adapterType = \"ide\"\n"
        )
    }

    /// Returns the table with which `dmsetup` joins the disks of a guest to one.
    pub(super) fn table(&self) -> String {
        let (mut text, mut at) = (String::new(), 0);
        for (number, disk) in self.disks.iter().enumerate() {
            let length = disk.bytes / SECTOR;
            let _written = writeln!(text, "{at} {length} linear /dev/{} 0", guest_disk(number));
            at += length;
        }
        text
    }

    /// Returns the options with which a guest mounts the first disk, if it has one disk for each file.
    fn mount_options(&self) -> String {
        let devices = (1..self.disks.len()).map(|it| format!(",device=/dev/{}", guest_disk(it)));
        format!("ro{}", devices.collect::<String>())
    }

    fn command_line(&self) -> String {
        let options = self.mount_options();
        let flags = options.strip_prefix("ro,").map(|it| format!(" rootflags={it}"));
        format!("root=/dev/vda rootfstype=erofs{} ro", flags.unwrap_or_default())
    }

    /// Returns the arguments of QEMU for these disks, and the disk for changes behind them.
    fn qemu(&self, disks: &[(&str, &str)], command_line: &str) -> Vec<String> {
        let read_only = disks.iter().map(|(file, format)| (*file, *format, "read-only=on"));
        let writable = self.writable.map(|_| (WRITABLE, "raw", "discard=unmap"));
        let mut all = Vec::new();
        for (file, format, option) in read_only.chain(writable) {
            // QEMU reads two commas as one that does not end the value.
            let path = self.path(file).replace(',', ",,");
            all.push("-drive".to_owned());
            all.push(format!("if=virtio,format={format},{option},file={path}"));
        }
        all.extend(["-append".to_owned(), command_line.to_owned()]);
        all
    }
}

/// Returns the name of a virtio disk in a Linux guest, which counts `vda` to `vdz`, then from `vdaa` on. Source: Linux
/// `drivers/block/virtio_blk.c`, `virtblk_name_format`.
fn guest_disk(number: usize) -> String {
    let (mut letters, mut rest) = (Vec::new(), number);
    loop {
        letters.push(b'a' + u8::try_from(rest % 26).expect("below 26"));
        match (rest / 26).checked_sub(1) {
            Some(next) => rest = next,
            None => break,
        }
    }
    letters.reverse();
    format!("vd{}", String::from_utf8_lossy(&letters))
}

/// Report of `bundle --vm --json`, and the file `machine.json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct MachineReport {
    /// Image id.
    image: String,
    /// Form of the image: `packed` or `tar`.
    form: String,
    /// Absolute path of the directory.
    directory: String,
    /// The files with the image, in order. The first one is the image itself, the others are its devices.
    disks: Vec<DiskReport>,
    /// Size of all these files.
    bytes: Bytes,
    /// File that shows them as one disk. Null if the image has no addresses for this.
    pub(super) vmdk: Option<String>,
    /// File with a table for `dmsetup`, which joins the disks in a guest. Null if there is no VMDK.
    table: Option<String>,
    /// File with an ext4 for changes. Null with `--writable none`.
    writable: Option<String>,
    /// Size of the ext4. Null with `--writable none`.
    writable_bytes: Option<Bytes>,
    /// Options of a mount in a guest with one disk for each file. The first disk is the one to mount.
    mount_options: String,
    /// Kernel command line for a guest with the VMDK as its first disk. Null if there is no VMDK.
    command_line: Option<String>,
    /// Kernel command line for a guest with one disk for each file. Its initramfs must mount the root, because the
    /// kernel itself does not find `device=`.
    command_line_of_disks: String,
    /// Arguments of QEMU with the VMDK. Null if there is no VMDK.
    qemu: Option<Vec<String>>,
    /// Arguments of QEMU with one disk for each file.
    qemu_disks: Vec<String>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct DiskReport {
    /// File name in the directory.
    file: String,
    /// Id of the device. Null for the image itself.
    device: Option<String>,
    /// Size of the file.
    bytes: Bytes,
}

impl MachineReport {
    pub(super) fn new(parts: &Parts<'_>) -> Self {
        let disks = parts.disks.iter().map(|it| DiskReport {
            file: it.file.clone(),
            device: it.device.map(|it| it.to_string()),
            bytes: Bytes(it.bytes),
        });
        let files: Vec<_> = parts.disks.iter().map(|it| it.file.as_str()).collect();
        let raw: Vec<_> = files.iter().map(|it| (*it, "raw")).collect();
        let (one, many) = ("root=/dev/vda rootfstype=erofs ro", parts.command_line());
        Self {
            image: parts.image.to_string(),
            form: parts.form.to_string(),
            directory: parts.directory.to_owned(),
            disks: disks.collect(),
            bytes: Bytes(parts.bytes()),
            vmdk: parts.is_one_disk.then(|| DISK.to_owned()),
            table: parts.is_one_disk.then(|| TABLE.to_owned()),
            writable: parts.writable.map(|_| WRITABLE.to_owned()),
            writable_bytes: parts.writable.map(Bytes),
            mount_options: parts.mount_options(),
            command_line: parts.is_one_disk.then(|| one.to_owned()),
            qemu: parts.is_one_disk.then(|| parts.qemu(&[(DISK, "vmdk")], one)),
            qemu_disks: parts.qemu(&raw, &many),
            command_line_of_disks: many,
        }
    }

    /// Prints the arguments of QEMU, each option on a line, quoted for a shell.
    pub(super) fn write(&self, out: &mut dyn io::Write) -> io::Result<()> {
        let words = self.qemu.as_ref().unwrap_or(&self.qemu_disks);
        for option in words.chunks(2) {
            let line = shlex::try_join(option.iter().map(String::as_str));
            writeln!(out, "{}", line.map_err(io::Error::other)?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use image::verity::{Algorithm, digest};

    use super::*;

    fn disks(count: usize) -> Vec<Disk> {
        let disk = |number: usize| Disk {
            file: if number == 0 { "image.erofs".to_owned() } else { format!("device-{number}") },
            device: (number > 0).then(|| digest(Algorithm::Sha256, &number.to_le_bytes()).into()),
            bytes: 512 * (number as u64 + 2),
        };
        (0..count).map(disk).collect()
    }

    fn parts(disks: &[Disk]) -> Parts<'_> {
        Parts {
            image: digest(Algorithm::Sha256, b"image").into(),
            form: Form::Packed,
            directory: "/vm,1",
            disks,
            is_one_disk: true,
            writable: Some(16 << 20),
        }
    }

    #[test]
    fn disks_of_guests_have_the_names_of_linux() {
        for (number, expect) in
            [(0, "vda"), (25, "vdz"), (26, "vdaa"), (27, "vdab"), (701, "vdzz"), (702, "vdaaa")]
        {
            assert_eq!(guest_disk(number), expect, "{number}");
        }
    }

    #[test]
    fn the_table_and_the_vmdk_have_the_disks_in_order() {
        let disks = disks(3);
        let parts = parts(&disks);
        let table = "0 2 linear /dev/vda 0\n2 3 linear /dev/vdb 0\n5 4 linear /dev/vdc 0\n";
        assert_eq!(parts.table(), table);
        let vmdk = parts.vmdk();
        let extents =
            "\nRW 2 FLAT \"image.erofs\" 0\nRW 3 FLAT \"device-1\" 0\nRW 4 FLAT \"device-2\" 0\n";
        assert!(vmdk.contains(extents), "{vmdk}");
        assert!(vmdk.starts_with("# Disk DescriptorFile\n"), "{vmdk}");
    }

    #[test]
    fn guests_get_the_devices_in_order() {
        let disks = disks(3);
        let report = MachineReport::new(&parts(&disks));
        assert_eq!(report.mount_options, "ro,device=/dev/vdb,device=/dev/vdc");
        assert_eq!(
            report.command_line_of_disks,
            "root=/dev/vda rootfstype=erofs rootflags=device=/dev/vdb,device=/dev/vdc ro"
        );
        let expect = [
            "-drive",
            "if=virtio,format=vmdk,read-only=on,file=/vm,,1/disk.vmdk",
            "-drive",
            "if=virtio,format=raw,discard=unmap,file=/vm,,1/writable.ext4",
            "-append",
            "root=/dev/vda rootfstype=erofs ro",
        ];
        assert_eq!(report.qemu.unwrap(), expect);
        assert_eq!(report.qemu_disks.len(), 2 * 5);
    }

    #[test]
    fn disks_that_are_no_single_one_get_no_table() {
        let disks = disks(2);
        let report = MachineReport::new(&Parts { is_one_disk: false, ..parts(&disks) });
        assert_eq!((report.table, report.vmdk, report.qemu), (None, None, None));
    }

    #[test]
    fn without_devices_there_are_no_options_for_them() {
        let disks = disks(1);
        let report = MachineReport::new(&Parts { writable: None, ..parts(&disks) });
        assert_eq!(report.mount_options, "ro");
        assert_eq!(report.command_line_of_disks, "root=/dev/vda rootfstype=erofs ro");
        assert_eq!(report.writable, None);
    }
}
