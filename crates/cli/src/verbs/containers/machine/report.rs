//! The report of `bundle --vm`, which is also the file `machine.json`.

use std::io;

use serde::Serialize;

use super::disks::{DISK, Parts, TABLE, WRITABLE};
use super::hypervisors::{self, CloudHypervisor, Firecracker, KataMount};
use crate::output::report::Bytes;

/// Number of disks that all hypervisors can attach beside some other devices. Firecracker has 19 interrupts for devices
/// without PCI. Cloud Hypervisor and QEMU have 32 places on a bus, and take some of them. Source: Firecracker
/// `src/vmm/src/arch/x86_64/layout.rs`, Cloud Hypervisor `pci/src/bus.rs`, `NUM_DEVICE_IDS`.
const DISKS_MAX: usize = 16;

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
    /// Part of the configuration of Firecracker, with one drive for each file.
    firecracker: Firecracker,
    /// Part of the configuration of Cloud Hypervisor for its API, with one disk for each file.
    cloud_hypervisor: CloudHypervisor,
    /// Arguments of Cloud Hypervisor for the same disks.
    cloud_hypervisor_arguments: Vec<String>,
    /// Mounts of a root for Kata Containers. Null with `--writable none`, if there is no VMDK, or if the path of the
    /// directory has a quote or a line feed.
    kata_mounts: Option<Vec<KataMount>>,
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
            firecracker: hypervisors::firecracker(parts),
            cloud_hypervisor: hypervisors::cloud_hypervisor(parts),
            cloud_hypervisor_arguments: hypervisors::cloud_hypervisor_arguments(parts),
            kata_mounts: hypervisors::kata(parts),
        }
    }

    /// Returns a remark if some hypervisors cannot attach one disk for each file.
    pub(super) fn remark(&self) -> Option<String> {
        let count = self.disks.len() + usize::from(self.writable.is_some());
        (count > DISKS_MAX).then(|| {
            format!(
                "there are {count} disks, but without {DISK}, Firecracker supports about 19 devices of all kinds, and \
                Cloud Hypervisor and QEMU about 28: `quire export NAME erofs:FILE` makes one disk"
            )
        })
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
    use super::super::disks::tests::{disks, parts};
    use super::*;

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
    fn many_disks_get_a_remark() {
        for (count, expect) in [(15, false), (16, true), (30, true)] {
            let disks = disks(count);
            let remark = MachineReport::new(&parts(&disks)).remark();
            assert_eq!(remark.is_some(), expect, "{count}: {remark:?}");
        }
        let disks = disks(16);
        let report = MachineReport::new(&Parts { writable: None, ..parts(&disks) });
        assert_eq!(report.remark(), None);
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
