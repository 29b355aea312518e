//! The disks of `bundle --vm` in the configurations of Firecracker, Cloud Hypervisor and Kata Containers.
//!
//! The configurations of the first two name the format of each file, and Kata chooses it itself. The author of an image
//! chooses the bytes of a device, including the first ones, so a hypervisor that guesses the format may take a device
//! for a QCOW2 whose backing file is a file of the host.

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
struct DiskFile {
    id: String,
    path: String,
    is_read_only: bool,
}

fn files(parts: &Parts<'_>) -> Vec<DiskFile> {
    let image = parts.disks.iter().map(|it| (it.file.as_str(), true));
    let changes = parts.writable.map(|_| (WRITABLE, false));
    let file = |(name, is_read_only): (&str, bool)| {
        let id = name.split('.').next().unwrap_or(name).replace('-', "_");
        DiskFile { id, path: parts.path(name), is_read_only }
    };
    image.chain(changes).map(file).collect()
}

pub(super) fn firecracker(parts: &Parts<'_>) -> Firecracker {
    let drive = |it: DiskFile| Drive {
        drive_id: it.id,
        path_on_host: it.path,
        is_root_device: false,
        is_read_only: it.is_read_only,
        cache_type: if it.is_read_only { "Unsafe" } else { "Writeback" },
    };
    Firecracker { drives: files(parts).into_iter().map(drive).collect() }
}

/// Only raw disks: up to version 53, Cloud Hypervisor reads no VMDK. Its later commits between #8599 and #8691 opened
/// extents for writing if they are `RW`, which QEMU requires. Source: cloud-hypervisor#8690.
pub(super) fn cloud_hypervisor(parts: &Parts<'_>) -> CloudHypervisor {
    let disk =
        |it: DiskFile| CloudDisk { path: it.path, readonly: it.is_read_only, image_type: "Raw" };
    CloudHypervisor { disks: files(parts).into_iter().map(disk).collect() }
}

/// Returns the arguments of Cloud Hypervisor for the same disks. In quotes, only a quote is special, and two of them are
/// one. Source: Cloud Hypervisor `option_parser/src/lib.rs`, `split_commas` and `dequote`, equal in all versions from 51
/// on, which is the first one that knows `image_type`.
pub(super) fn cloud_hypervisor_arguments(parts: &Parts<'_>) -> Vec<String> {
    let mut arguments = vec!["--disk".to_owned()];
    arguments.extend(files(parts).into_iter().map(|it| {
        let path = match it.path.contains(['"', ',', '[', ']']) {
            true => format!("\"{}\"", it.path.replace('"', "\"\"")),
            false => it.path,
        };
        let access = if it.is_read_only { "on" } else { "off" };
        format!("path={path},readonly={access},image_type=raw")
    }));
    arguments.extend(["--cmdline".to_owned(), parts.command_line()]);
    arguments
}

/// Returns the mounts from which Kata Containers makes disks, a root and an overlay. Returns `None` in these cases:
///
/// - without a disk for changes, which versions up to 3.31 need
/// - if the files one after the other are no disk, because Kata joins them by a VMDK
/// - if the path cannot be in a VMDK, in which these versions write it as it is
///
/// Source: Kata Containers `src/runtime-rs/crates/resource/src/rootfs/erofs_rootfs.rs`, `is_erofs_multi_layer`,
/// `ErofsMultiLayerRootfs::new`.
pub(super) fn kata(parts: &Parts<'_>) -> Option<Vec<KataMount>> {
    let (image, devices) = parts.disks.split_first()?;
    if !parts.is_one_disk || parts.writable.is_none() || parts.directory.contains(['"', '\n', '\r'])
    {
        return None;
    }
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

    /// Splits an argument as `split_commas` and `dequote` of Cloud Hypervisor do; `None` for an error.
    fn split(text: &str) -> Option<BTreeMap<String, String>> {
        let (mut parts, mut brackets, mut is_quoted) = (vec![String::new()], 0, false);
        for letter in text.chars() {
            match letter {
                '"' => is_quoted = !is_quoted,
                _ if is_quoted => {}
                '[' => brackets += 1,
                ']' if brackets < 1 => return None,
                ']' => brackets -= 1,
                ',' if brackets == 0 => {
                    parts.push(String::new());
                    continue;
                }
                _ => {}
            }
            parts.last_mut().unwrap().push(letter);
        }
        if is_quoted || brackets != 0 {
            return None;
        }
        let dequote = |value: &str| {
            let (mut out, mut before, mut is_quoted) = (String::new(), '\0', false);
            for letter in value.chars() {
                if letter != '"' || before == '"' && !is_quoted {
                    out.push(letter);
                }
                is_quoted ^= letter == '"';
                before = letter;
            }
            out
        };
        let pair = |it: &String| {
            let (name, value) = it.split_once('=')?;
            Some((name.to_owned(), dequote(value)))
        };
        parts.iter().map(pair).collect()
    }

    #[test]
    fn all_paths_can_be_arguments_of_cloud_hypervisor() {
        let disks = disks(1);
        for directory in [
            "/vm",
            "/a,b",
            "/a[1]/vm",
            "/a]b",
            "/a[b",
            "/a\"b",
            "/\"",
            "/\"\"a\",\"\"\"[",
            "/a b=c",
        ] {
            let parts = Parts { directory, ..parts(&disks) };
            let arguments = cloud_hypervisor_arguments(&parts);
            let read = split(&arguments[1]).unwrap_or_default();
            let expect = [
                ("image_type".to_owned(), "raw".to_owned()),
                ("path".to_owned(), format!("{directory}/image.erofs")),
                ("readonly".to_owned(), "on".to_owned()),
            ];
            assert_eq!(read, BTreeMap::from(expect), "{directory}: {}", arguments[1]);
        }
    }

    #[test]
    fn cloud_hypervisor_gets_raw_disks() {
        let disks = disks(2);
        let parts = parts(&disks);
        let told = serde_json::to_value(cloud_hypervisor(&parts)).unwrap();
        let told = told["disks"].as_array().unwrap();
        let arguments = cloud_hypervisor_arguments(&parts);
        assert_eq!((told.len(), arguments[0].as_str()), (3, "--disk"));
        for (disk, argument) in told.iter().zip(&arguments[1..4]) {
            let read = split(argument).unwrap();
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
    }

    /// The result of Kata's code for some mounts.
    #[derive(Debug, PartialEq)]
    struct KataDisks {
        /// Files of the read-only disk, in order.
        joined: Vec<String>,
        writable: Option<String>,
        /// Options of the mounts of both disks in the guest.
        options: [Vec<String>; 2],
        /// Directories that the guest makes.
        directories: Vec<String>,
    }

    /// Does what Kata's functions do with these mounts: `is_erofs_multi_layer` of 3.31 and of commit 7c6ba40c
    /// (August 2026), `ErofsMultiLayerRootfs::new`, and the agent's `resolve_mkdir_path`
    /// (`src/agent/src/storage/multi_layer_erofs.rs`).
    fn read_by_kata(mounts: &[KataMount]) -> Option<KataDisks> {
        let has = |kind: &str| mounts.iter().any(|it| it.r#type.eq_ignore_ascii_case(kind));
        let overlay = ["overlay", "format/overlay", "format/mkdir/overlay"];
        let is_writable = |it: &KataMount| it.r#type == "ext4" && it.options.contains(&"rw".into());
        let in_3_31 = mounts.len() >= 2 && has("erofs") && mounts.iter().any(is_writable);
        let in_august = mounts.len() >= 2 && has("erofs") && overlay.iter().any(|it| has(it));
        if !in_3_31 || !in_august {
            return None;
        }
        let mut disks = KataDisks {
            joined: Vec::new(),
            writable: None,
            options: [Vec::new(), Vec::new()],
            directories: Vec::new(),
        };
        for KataMount { r#type, source, options } in mounts {
            let rest = |but: &[&str]| -> Vec<String> {
                let is_kept =
                    |it: &&String| *it != "loop" && !but.iter().any(|but| it.starts_with(but));
                options.iter().filter(is_kept).cloned().collect()
            };
            let after = |prefix: &str| -> Vec<String> {
                options.iter().filter_map(|it| it.strip_prefix(prefix)).map(String::from).collect()
            };
            match *r#type {
                "ext4" => {
                    disks.writable = Some(source.clone());
                    disks.options[1] = rest(&[]);
                }
                // A second one would be a layer in a partition.
                "erofs" if disks.joined.is_empty() => {
                    disks.joined.push(source.clone());
                    disks.joined.extend(after("device="));
                    disks.options[0] = rest(&["device=", "X-kata."]);
                }
                kind if overlay.contains(&kind) => {
                    for directive in after("X-containerd.mkdir.path=") {
                        let path = directive.split(':').next().unwrap();
                        disks.directories.push(path.replace("{{ mount 0 }}", "/upper-mount"));
                    }
                }
                _ => return None,
            }
        }
        Some(disks)
    }

    #[test]
    fn kata_gets_mounts_that_it_makes_disks_of() {
        let disks = disks(3);
        let words = |words: &[&str]| words.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>();
        let expect = KataDisks {
            joined: words(&["/vm,1/image.erofs", "/vm,1/device-1", "/vm,1/device-2"]),
            writable: Some("/vm,1/writable.ext4".to_owned()),
            options: [words(&["ro"]), words(&["rw"])],
            directories: words(&["/upper-mount/upper", "/upper-mount/work"]),
        };
        assert_eq!(read_by_kata(&kata(&parts(&disks)).unwrap()), Some(expect));
        for without in [
            Parts { writable: None, ..parts(&disks) },
            Parts { is_one_disk: false, ..parts(&disks) },
            Parts { directory: "/a\"b", ..parts(&disks) },
            Parts { directory: "/a\nRW 1 FLAT b", ..parts(&disks) },
        ] {
            assert_eq!(kata(&without), None);
        }
    }
}
