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
        let disk = if self.args.disk.is_verified() { self.disk_architecture()? } else { None };
        let (store, image) = (self.store, &self.found.image);
        let release = check_extension(store, image, kind, name, disk.as_deref(), self.options)?;
        if release.version.is_none() && release.id != "_any" {
            let (name, id) = (&release.name, &release.id);
            let hosts = match &release.level {
                Some(level) => format!("level {level}, or without a level and a VERSION_ID,"),
                None => "neither a level nor a VERSION_ID".to_owned(),
            };
            self.context.remark(&format!(
                "the extension {name} states no VERSION_ID of {id}: only hosts with {hosts} take it, and most hosts have \
                a VERSION_ID and no level"
            ));
        }
        if let Some(scopes) = &release.other_scopes {
            let (name, scopes) = (&release.name, scopes.escape_debug());
            self.context.remark(&format!(
                "the extension {name} has only the scope \"{scopes}\": running hosts do not take it"
            ));
        }
        match (file, disk) {
            (Output::File(path), Some(architecture)) => {
                self.extension_disk(release, path, &architecture)
            }
            _ if self.args.disk.is_verified() => {
                // `DiskOptions::check` has refused standard output.
                anyhow::bail!("--verity needs a file, and a build of Quire with the feature `disk`")
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
        let ExtensionRelease { name, id, level, version, .. } = release;
        Ok(Exported::Extension(ExtensionReport {
            name,
            id,
            level,
            version,
            root_hash: None,
            certificate: None,
            inodes: written.inodes,
            bytes: Bytes(written.bytes),
        }))
    }

    #[cfg(feature = "disk")]
    fn extension_disk(
        &self,
        release: ExtensionRelease,
        path: &Path,
        architecture: &str,
    ) -> anyhow::Result<Exported> {
        let (written, certificate) = self.verified_extension(path, architecture)?;
        let ExtensionRelease { name, id, level, version, .. } = release;
        Ok(Exported::Extension(ExtensionReport {
            name,
            id,
            level,
            version,
            root_hash: Some(written.root_hash.to_string()),
            certificate,
            inodes: written.disk.image.inodes,
            bytes: Bytes(written.disk.bytes),
        }))
    }

    #[cfg(not(feature = "disk"))]
    #[expect(clippy::unused_self, reason = "same signature as with the feature")]
    fn extension_disk(&self, _: ExtensionRelease, _: &Path, _: &str) -> anyhow::Result<Exported> {
        anyhow::bail!("this build of Quire writes no disks: build it with the feature `disk`")
    }

    /// Returns the architecture of the disk, as in Go.
    #[cfg(feature = "disk")]
    fn disk_architecture(&self) -> anyhow::Result<Option<String>> {
        self.architecture().map(Some)
    }

    #[cfg(not(feature = "disk"))]
    #[expect(
        clippy::unused_self,
        clippy::unnecessary_wraps,
        reason = "same signature as with the feature"
    )]
    fn disk_architecture(&self) -> anyhow::Result<Option<String>> {
        Ok(None)
    }
}
