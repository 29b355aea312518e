//! The disks of `bundle --vm`, and the texts that describe them: the VMDK, the table of the device mapper, kernel
//! command lines, and arguments of QEMU.

use std::fmt::Write as _;

use image::verity::{DeviceId, ImageId};
use store::Form;

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
    pub(super) fn bytes(&self) -> u64 {
        self.disks.iter().map(|it| it.bytes).sum()
    }

    pub(super) fn path(&self, file: &str) -> String {
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
    pub(super) fn mount_options(&self) -> String {
        let devices = (1..self.disks.len()).map(|it| format!(",device=/dev/{}", guest_disk(it)));
        format!("ro{}", devices.collect::<String>())
    }

    /// Returns the kernel command line for a guest with one disk for each file.
    pub(super) fn command_line(&self) -> String {
        let options = self.mount_options();
        let flags = options.strip_prefix("ro,").map(|it| format!(" rootflags={it}"));
        format!("root=/dev/vda rootfstype=erofs{} ro", flags.unwrap_or_default())
    }

    /// Returns the arguments of QEMU for these disks, and the disk for changes behind them.
    pub(super) fn qemu(&self, disks: &[(&str, &str)], command_line: &str) -> Vec<String> {
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

#[cfg(test)]
pub(super) mod tests {
    use image::verity::{Algorithm, digest};

    use super::*;

    pub(in super::super) fn disks(count: usize) -> Vec<Disk> {
        let disk = |number: usize| Disk {
            file: if number == 0 { "image.erofs".to_owned() } else { format!("device-{number}") },
            device: (number > 0).then(|| digest(Algorithm::Sha256, &number.to_le_bytes()).into()),
            bytes: 512 * (number as u64 + 2),
        };
        (0..count).map(disk).collect()
    }

    pub(in super::super) fn parts(disks: &[Disk]) -> Parts<'_> {
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
}
