//! `mount --specification`: prints the data that an engine needs to mount an image by itself.
//!
//! `docs/format/mount-specification.md` describes the format.

use std::iter;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::path::PathBuf;

use anyhow::Context as _;
use container::root::{TrustedImage, may_have_acl};
use rustix::fs::readlink;
use serde::Serialize;
use store::{Form, OpenImage};

use crate::output::report;

/// Version of the format. It changes if a program that knows only the old version would do something wrong.
const VERSION: u32 = 1;

/// The file systems that an engine mounts, one after the other.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct SpecificationReport {
    /// Version of this format: 1.
    version: u32,
    /// Image id.
    image: String,
    /// Name of the image. Null if it was named by its id.
    name: Option<String>,
    /// Digest of the image's manifest. Null if it has none.
    manifest: Option<String>,
    /// Whether files of the image and objects have fs-verity, so that the kernel checks each read.
    kernel_verity: bool,
    /// The EROFS file system, which is mounted first.
    erofs: ErofsReport,
    /// The overlay over it. Null if the EROFS file system is the root.
    overlay: Option<OverlayReport>,
}

/// The EROFS file system.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
struct ErofsReport {
    /// File with the image, which is the `source` of the mount.
    source: String,
    /// Files with data, in this order. Each is a `device` option.
    devices: Vec<DeviceReport>,
    /// Options without values.
    flags: Vec<&'static str>,
}

/// A file with data.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
struct DeviceReport {
    /// Path of the file.
    path: String,
    /// Device id.
    id: String,
    /// Length of the file.
    bytes: report::Bytes,
}

/// The overlay.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
struct OverlayReport {
    /// Directories with the data of files, in this order: each is a `datadir+` option. The mounted EROFS is the
    /// `lowerdir+` before them.
    data: Vec<String>,
    /// Options with values, written `NAME=VALUE`.
    options: Vec<&'static str>,
}

impl SpecificationReport {
    pub(crate) fn from_image(image: &TrustedImage) -> anyhow::Result<Self> {
        let (found, opened) = (image.found(), image.image());
        let flags = match may_have_acl(opened)? {
            true => vec!["ro"],
            false => vec!["ro", "noacl"],
        };
        let devices = opened.devices.iter().map(|it| {
            Ok(DeviceReport {
                path: path(it.file.as_fd())?,
                id: it.id.to_string(),
                bytes: report::Bytes(it.bytes),
            })
        });
        Ok(Self {
            version: VERSION,
            image: opened.id.to_string(),
            name: found.name.as_ref().map(ToString::to_string),
            manifest: found.manifest.map(|it| it.to_string()),
            kernel_verity: opened.kernel_verity,
            erofs: ErofsReport {
                source: path(opened.image.fd())?,
                devices: devices.collect::<anyhow::Result<_>>()?,
                flags,
            },
            overlay: overlay(opened)?,
        })
    }
}

fn overlay(image: &OpenImage) -> anyhow::Result<Option<OverlayReport>> {
    match image.form {
        Form::Packed | Form::Tar => Ok(None),
        Form::Objects => {
            let mut options = vec!["metacopy=on", "redirect_dir=on"];
            options.extend(image.kernel_verity.then_some("verity=require"));
            let data =
                iter::once(image.objects.as_fd()).chain(image.absent.as_ref().map(AsFd::as_fd));
            let data = data.map(path).collect::<anyhow::Result<_>>()?;
            Ok(Some(OverlayReport { data, options }))
        }
    }
}

/// Returns the path of an open file.
fn path(file: BorrowedFd<'_>) -> anyhow::Result<String> {
    let link = PathBuf::from("/proc/self/fd").join(file.as_raw_fd().to_string());
    let path = readlink(&link, Vec::new())
        .context("cannot determine the position of a file of the image")?;
    path.into_string().ok().context("the path of the store is not UTF-8")
}
