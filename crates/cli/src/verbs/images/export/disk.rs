//! Exports to disks, and to extensions that are disks.

use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use image::erofs::Flavor;
use oci::manifest::Platform;
use transfer::export::{
    BootFiles, BootProgram, Output, RootHashKey, RootSigner, RootType, VerifiedDisk,
    VerifiedDiskReport,
};
use transfer::progress::Event;

use super::ExportRun;
use super::reports::{DiskReport, Exported};
use crate::output::report::Bytes;
use crate::session::output_file::to_file;
use crate::session::settings::option_file::keep_out_of_dumps;

/// Maximum length of files with keys and certificates, in bytes.
const PEM_MAX: u64 = 64 << 10;
/// Maximum length of the kernel, the initrds and the stub together, in bytes.
const BOOT_MAX: u64 = 1 << 30;
/// Stubs of systemd, which Debian's package systemd-boot-efi and others install.
const STUB_AMD64: &str = "/usr/lib/systemd/boot/efi/linuxx64.efi.stub";
const STUB_ARM64: &str = "/usr/lib/systemd/boot/efi/linuxaa64.efi.stub";

impl ExportRun<'_> {
    pub(super) fn disk(&self, file: &Output) -> anyhow::Result<Exported> {
        let architecture = self.architecture()?;
        let root = root_type(&architecture)?;
        let (written, root_hash, certificate) = match file {
            Output::File(path) if self.args.disk.is_verified() => {
                let (signer, boot) = (self.signer()?, self.boot(&architecture)?);
                let kind = VerifiedDisk {
                    root,
                    flavor: self.flavor(),
                    signer: signer.as_ref(),
                    boot: boot.as_ref(),
                };
                let written = self.verified(path, &kind)?;
                let certificate = signer.map(|it| it.fingerprint());
                (written.disk, Some(written.root_hash.to_string()), certificate)
            }
            // `DiskOptions::check` has refused it.
            Output::Stdout if self.args.disk.is_verified() => bail!("--verity needs a file"),
            _ => {
                let (image, flavor) = (&self.found.image, self.flavor());
                let written = self.output(file, |out| {
                    let options = self.options;
                    Ok(transfer::export::to_disk(self.store, image, root, flavor, out, options)?)
                })?;
                (written, None, None)
            }
        };
        Ok(Exported::Disk(DiskReport {
            architecture,
            partition: written.partition.to_string(),
            root_hash,
            certificate,
            inodes: written.image.inodes,
            image_bytes: Bytes(written.image.bytes),
            bytes: Bytes(written.bytes),
        }))
    }

    /// Writes an extension as a disk. Returns its report, and the fingerprint of the certificate.
    pub(super) fn verified_extension(
        &self,
        path: &Path,
        architecture: &str,
    ) -> anyhow::Result<(VerifiedDiskReport, Option<String>)> {
        let root = root_type(architecture)?;
        let signer = self.signer()?;
        let flavor = Flavor::Linux;
        let kind = VerifiedDisk { root, flavor, signer: signer.as_ref(), boot: None };
        let written = self.verified(path, &kind)?;
        Ok((written, signer.map(|it| it.fingerprint())))
    }

    fn verified(&self, path: &Path, kind: &VerifiedDisk<'_>) -> anyhow::Result<VerifiedDiskReport> {
        let (store, image, options) = (self.store, &self.found.image, self.options);
        let write = |file: &File| -> anyhow::Result<_> {
            Ok(transfer::export::to_verified_disk(store, image, kind, file, options)?)
        };
        to_file(path, self.args.force, write, || (options.progress)(Event::Committing))
    }

    /// Reads the key and the certificate, if the root hash is signed.
    fn signer(&self) -> anyhow::Result<Option<RootSigner>> {
        let options = &self.args.disk;
        let (Some(key_file), Some(certificate_file)) = (&options.private_key, &options.certificate)
        else {
            return Ok(None);
        };
        keep_out_of_dumps().context("cannot keep the key out of core dumps")?;
        // Access that a device, such as a pipe of the shell, gives is not checked.
        let found = fs::metadata(key_file);
        if found.is_ok_and(|it| it.is_file() && it.mode() & 0o077 != 0) {
            let file = key_file.display();
            bail!("other users have permissions for the private key {file}: `chmod 600 {file}`");
        }
        let unusable = |file: &Path| format!("cannot sign with {}", file.display());
        let key = RootHashKey::from_pem(&read_file(key_file, PEM_MAX)?);
        let key = key.with_context(|| unusable(key_file))?;
        let signer = RootSigner::new(key, &read_file(certificate_file, PEM_MAX)?);
        Ok(Some(signer.with_context(|| unusable(certificate_file))?))
    }

    /// Reads the files of the boot program, if the disk has one.
    fn boot(&self, architecture: &str) -> anyhow::Result<Option<BootProgram>> {
        let options = &self.args.disk;
        let (true, Some(kernel)) = (options.bootable, &options.kernel) else { return Ok(None) };
        let stub = match (&options.stub, architecture) {
            (Some(stub), _) => stub.clone(),
            (None, "arm64") => PathBuf::from(STUB_ARM64),
            (None, _) => PathBuf::from(STUB_AMD64),
        };
        if options.stub.is_none() && !stub.exists() {
            bail!(
                "there is no {}: install systemd's stub (Debian: package systemd-boot-efi), or name another one with \
                --stub",
                stub.display()
            );
        }
        let mut left = BOOT_MAX;
        let mut read = |path: &Path| {
            let bytes = read_file(path, left)?;
            left -= bytes.len() as u64;
            anyhow::Ok(bytes)
        };
        let files = BootFiles {
            stub: read(&stub)?,
            kernel: read(kernel)?,
            initrds: options.initrd.iter().map(|it| read(it)).collect::<anyhow::Result<_>>()?,
            command_line: options.cmdline.clone().unwrap_or_default(),
        };
        let program = BootProgram::new(architecture, files);
        Ok(Some(program.context("cannot make the disk bootable")?))
    }

    /// Returns the processor architecture of the image.
    pub(super) fn architecture(&self) -> anyhow::Result<String> {
        if let Some(platform) = &self.args.disk.platform {
            let platform: Platform = platform.parse()?;
            if platform.os != "linux" {
                bail!("--platform {platform}: disks support only linux");
            }
            return Ok(platform.architecture);
        }
        let said = match &self.found.manifest {
            Some(manifest) => transfer::export::architecture(self.store, manifest)?,
            None => None,
        };
        Ok(said.unwrap_or_else(|| {
            let here = Platform::of_this_machine();
            self.context.remark(&format!(
                "{} does not state its processor: the disk is for {here}, like this machine; \
                --platform chooses another",
                self.args.name
            ));
            here.architecture.clone()
        }))
    }
}

fn root_type(architecture: &str) -> anyhow::Result<RootType> {
    RootType::for_architecture(architecture).with_context(|| {
        let known: Vec<_> = RootType::architectures().collect();
        format!(
            "the architecture {architecture:?} has no type of root partition: choose another with \
            --platform linux/ARCHITECTURE, one of {}",
            known.join(", ")
        )
    })
}

/// Reads a file of at most `max` bytes.
fn read_file(path: &Path, max: u64) -> anyhow::Result<Vec<u8>> {
    let failed = || format!("cannot read {}", path.display());
    let mut bytes = Vec::new();
    let file = File::open(path).with_context(failed)?;
    file.take(max + 1).read_to_end(&mut bytes).with_context(failed)?;
    if bytes.len() as u64 > max {
        bail!("{} is too large: it has more than {max} bytes", path.display());
    }
    Ok(bytes)
}
