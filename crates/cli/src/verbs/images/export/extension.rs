//! Exports to extensions of systemd.

use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use image::erofs::Flavor;
use transfer::export::{ExtensionKind, ExtensionRelease, Output, check_extension};

use super::ExportRun;
use super::reports::{Exported, ExtensionReport};
use crate::output::report::Bytes;

impl ExportRun<'_> {
    pub(super) fn extension(&self, kind: ExtensionKind, file: &Output) -> anyhow::Result<Exported> {
        let name = match file {
            Output::Stdout => None,
            Output::File(path) => Some(path.file_name().unwrap_or_default().as_bytes()),
        };
        let release = check_extension(self.store, &self.found.image, kind, name, self.options)?;
        if release.level.is_none() && release.id != "_any" {
            self.context.remark(&format!(
                "the extension {} states no version of {}: only hosts without a VERSION_ID take it",
                release.name, release.id
            ));
        }
        match file {
            Output::File(path) if self.args.disk.is_verified() => {
                self.extension_disk(release, path)
            }
            _ => self.extension_erofs(release, file),
        }
    }

    fn extension_erofs(
        &self,
        release: ExtensionRelease,
        file: &Output,
    ) -> anyhow::Result<Exported> {
        let (store, image, options) = (self.store, &self.found.image, self.options);
        let written = self.output(file, |out| {
            Ok(transfer::export::to_erofs(store, image, Flavor::Linux, out, options)?)
        })?;
        let ExtensionRelease { name, id, level } = release;
        Ok(Exported::Extension(ExtensionReport {
            name,
            id,
            level,
            root_hash: None,
            certificate: None,
            inodes: written.inodes,
            bytes: Bytes(written.bytes),
        }))
    }

    #[cfg(feature = "disk")]
    fn extension_disk(&self, release: ExtensionRelease, path: &Path) -> anyhow::Result<Exported> {
        let (written, certificate) = self.verified_extension(path)?;
        let ExtensionRelease { name, id, level } = release;
        Ok(Exported::Extension(ExtensionReport {
            name,
            id,
            level,
            root_hash: Some(written.root_hash.to_string()),
            certificate,
            inodes: written.disk.image.inodes,
            bytes: Bytes(written.disk.bytes),
        }))
    }

    #[cfg(not(feature = "disk"))]
    #[expect(clippy::unused_self, reason = "same signature as with the feature")]
    fn extension_disk(&self, _: ExtensionRelease, _: &Path) -> anyhow::Result<Exported> {
        anyhow::bail!("this build of Quire writes no disks: build it with the feature `disk`")
    }
}
