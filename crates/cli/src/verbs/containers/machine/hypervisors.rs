//! The disks of `bundle --vm` in the configurations of Firecracker, Cloud Hypervisor and Kata Containers.
//!
//! Every configuration names the format of a file. The content of a device is an image's author's from its first byte
//! on, so a hypervisor that guesses the format may take a device for a QCOW2 whose backing file is a file of the host.

use serde::Serialize;

use super::disks::{Parts, WRITABLE};

/// A part of Firecracker's configuration. Firecracker reads no VMDK, and knows only raw drives. Source: Firecracker
/// `src/firecracker/swagger/firecracker.yaml`, `FullVmConfiguration`, `Drive`.
#[derive(Debug, PartialEq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Firecracker {
    /// One drive for each file, in order.
    drives: Vec<Drive>,
}

#[derive(Debug, PartialEq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Drive {
    /// Name of the drive, which consists of letters, digits and `_`.
    drive_id: String,
    /// Absolute path of the file.
    path_on_host: String,
    /// Always false, so that Firecracker adds no `root=` to the kernel command line. Use `commandLineOfDisks`.
    is_root_device: bool,
    /// Whether the drive is read-only. Only the drive for changes is not.
    is_read_only: bool,
    /// `Writeback` for the drive for changes, so that a flush of the guest syncs the file.
    cache_type: &'static str,
}

/// A part of Cloud Hypervisor's configuration. Source: Cloud Hypervisor
/// `vmm/src/api/openapi/cloud-hypervisor.yaml`, `VmConfig`, `DiskConfig`.
#[derive(Debug, PartialEq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct CloudHypervisor {
    /// One disk for each file, in order.
    disks: Vec<CloudDisk>,
}

#[derive(Debug, PartialEq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct CloudDisk {
    /// Absolute path of the file.
    path: String,
    /// Whether the disk is read-only. Only the disk for changes is not.
    readonly: bool,
    /// Format of the file: `Raw`.
    image_type: &'static str,
}

/// A mount of a container's root, as a snapshotter of containerd gives it to Kata Containers.
#[derive(Debug, PartialEq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct KataMount {
    /// Type of the mount.
    r#type: &'static str,
    /// Absolute path of the file; `overlay` for the last mount.
    source: String,
    /// Options of the mount.
    options: Vec<String>,
}

/// A file that is a disk.
struct File {
    id: String,
    path: String,
    is_read_only: bool,
}

fn files(parts: &Parts<'_>) -> Vec<File> {
    let image = parts.disks.iter().map(|it| (it.file.as_str(), true));
    let changes = parts.writable.map(|_| (WRITABLE, false));
    let file = |(name, is_read_only): (&str, bool)| {
        let id = name.split('.').next().unwrap_or(name).replace('-', "_");
        File { id, path: parts.path(name), is_read_only }
    };
    image.chain(changes).map(file).collect()
}

pub(super) fn firecracker(parts: &Parts<'_>) -> Firecracker {
    let drive = |it: File| Drive {
        drive_id: it.id,
        path_on_host: it.path,
        is_root_device: false,
        is_read_only: it.is_read_only,
        cache_type: if it.is_read_only { "Unsafe" } else { "Writeback" },
    };
    Firecracker { drives: files(parts).into_iter().map(drive).collect() }
}

/// Only raw disks: no version of Cloud Hypervisor up to 53 reads VMDK, and the first code that does opened extents for
/// writing if they are `RW`, which QEMU requires. Source: cloud-hypervisor#8690.
pub(super) fn cloud_hypervisor(parts: &Parts<'_>) -> CloudHypervisor {
    let disk = |it: File| CloudDisk { path: it.path, readonly: it.is_read_only, image_type: "Raw" };
    CloudHypervisor { disks: files(parts).into_iter().map(disk).collect() }
}

/// Returns the arguments of Cloud Hypervisor for the same disks; `None` if its parser cannot read the path. Source:
/// Cloud Hypervisor `option_parser/src/lib.rs`, `split_commas`: quotes protect commas, but not brackets, and there is
/// no way to write a quote.
pub(super) fn cloud_hypervisor_arguments(parts: &Parts<'_>) -> Option<Vec<String>> {
    if parts.directory.contains(['"', '[', ']']) {
        return None;
    }
    let mut arguments = vec!["--disk".to_owned()];
    arguments.extend(files(parts).into_iter().map(|it| {
        let quote = if it.path.contains(',') { "\"" } else { "" };
        let access = if it.is_read_only { "on" } else { "off" };
        format!("path={quote}{}{quote},readonly={access},image_type=raw", it.path)
    }));
    arguments.extend(["--cmdline".to_owned(), parts.command_line()]);
    Some(arguments)
}

/// Returns the mounts from which Kata Containers makes disks, a root and an overlay; `None` without a disk for changes,
/// or if the files one after the other are no disk, because Kata joins them. Source: Kata Containers
/// `src/runtime-rs/crates/resource/src/rootfs/erofs_rootfs.rs`, `is_erofs_multi_layer`, `ErofsMultiLayerRootfs::new`.
pub(super) fn kata(parts: &Parts<'_>) -> Option<Vec<KataMount>> {
    let (image, devices) = parts.disks.split_first().filter(|_| parts.is_one_disk)?;
    let _size = parts.writable?;
    let devices = devices.iter().map(|it| format!("device={}", parts.path(&it.file)));
    let words = |words: &[&str]| words.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>();
    Some(vec![
        KataMount { r#type: "ext4", source: parts.path(WRITABLE), options: words(&["rw", "loop"]) },
        KataMount {
            r#type: "erofs",
            source: parts.path(&image.file),
            options: words(&["ro", "loop"]).into_iter().chain(devices).collect(),
        },
        KataMount {
            r#type: "format/mkdir/overlay",
            source: "overlay".to_owned(),
            options: words(&[
                "X-containerd.mkdir.path={{ mount 0 }}/upper:0755",
                "X-containerd.mkdir.path={{ mount 0 }}/work:0755",
                "workdir={{ mount 0 }}/work",
                "upperdir={{ mount 0 }}/upper",
                "lowerdir={{ mount 1 }}",
            ]),
        },
    ])
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::{Value, json};

    use super::super::disks::tests::{disks, parts};
    use super::*;

    #[test]
    fn firecracker_gets_a_drive_for_each_file() {
        let disks = disks(2);
        let told = serde_json::to_value(firecracker(&parts(&disks))).unwrap();
        let drive = |id: &str, file: &str, is_read_only: bool, cache: &str| {
            json!({
                "drive_id": id, "path_on_host": format!("/vm,1/{file}"), "is_root_device": false,
                "is_read_only": is_read_only, "cache_type": cache,
            })
        };
        let drives = [
            drive("image", "image.erofs", true, "Unsafe"),
            drive("device_1", "device-1", true, "Unsafe"),
            drive("writable", "writable.ext4", false, "Writeback"),
        ];
        assert_eq!(told, json!({ "drives": drives }));
        // Firecracker refuses ids with other characters. Source: `src/firecracker/src/api_server/parsed_request.rs`,
        // `checked_id`.
        for drive in told["drives"].as_array().unwrap() {
            let id = drive["drive_id"].as_str().unwrap();
            assert!(id.chars().all(|it| it.is_ascii_alphanumeric() || it == '_'), "{id}");
        }
    }

    /// Splits an argument as Cloud Hypervisor does.
    fn split(text: &str) -> BTreeMap<String, String> {
        let (mut parts, mut is_quoted) = (vec![String::new()], false);
        for letter in text.chars() {
            match letter {
                '"' => is_quoted = !is_quoted,
                ',' if !is_quoted => parts.push(String::new()),
                other => parts.last_mut().unwrap().push(other),
            }
        }
        let pair = |it: &String| {
            let (name, value) = it.split_once('=').unwrap();
            (name.to_owned(), value.to_owned())
        };
        parts.iter().map(pair).collect()
    }

    #[test]
    fn cloud_hypervisor_gets_raw_disks() {
        let disks = disks(2);
        let parts = parts(&disks);
        let told = serde_json::to_value(cloud_hypervisor(&parts)).unwrap();
        let told = told["disks"].as_array().unwrap();
        let arguments = cloud_hypervisor_arguments(&parts).unwrap();
        assert_eq!((told.len(), arguments[0].as_str()), (3, "--disk"));
        for (disk, argument) in told.iter().zip(&arguments[1..4]) {
            let read = split(argument);
            assert_eq!(disk["image_type"], "Raw");
            assert_eq!(read["image_type"], "raw", "{argument}");
            assert_eq!(disk["path"], Value::from(read["path"].as_str()), "{argument}");
            assert_eq!(disk["readonly"], read["readonly"] == "on", "{argument}");
        }
        assert_eq!(told.iter().filter(|it| it["readonly"] == false).count(), 1);
        assert_eq!(
            arguments[4..],
            ["--cmdline", "root=/dev/vda rootfstype=erofs rootflags=device=/dev/vdb ro"]
        );
        for directory in ["/a\"b", "/a[b", "/a]b"] {
            let parts = Parts { directory, ..self::parts(&disks) };
            assert_eq!(cloud_hypervisor_arguments(&parts), None, "{directory}");
        }
    }

    /// The rules of Kata's `is_erofs_multi_layer` of both 2026 versions: at least two mounts, one of them `erofs`, one an
    /// `ext4` with `rw`, one an overlay. The files of the image are the source and the options `device=`, in order.
    #[test]
    fn kata_gets_mounts_that_it_makes_disks_of() {
        let disks = disks(3);
        let told = kata(&parts(&disks)).unwrap();
        let of = |kind: &str| told.iter().filter(|it| it.r#type == kind).collect::<Vec<_>>();
        let [erofs] = of("erofs")[..] else { panic!("{told:?}") };
        let files = erofs.options.iter().filter_map(|it| it.strip_prefix("device="));
        let files: Vec<_> = [&*erofs.source].into_iter().chain(files).collect();
        assert_eq!(files, ["/vm,1/image.erofs", "/vm,1/device-1", "/vm,1/device-2"]);
        let [ext4] = of("ext4")[..] else { panic!("{told:?}") };
        assert!(ext4.options.iter().any(|it| it == "rw"), "{ext4:?}");
        assert_eq!(ext4.source, "/vm,1/writable.ext4");
        assert_eq!(of("format/mkdir/overlay").len(), 1);
        for without in [
            Parts { writable: None, ..parts(&disks) },
            Parts { is_one_disk: false, ..parts(&disks) },
        ] {
            assert_eq!(kata(&without), None);
        }
    }
}
