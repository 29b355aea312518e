//! Options of exports to disks and to extensions.

use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use transfer::export::{Output, Target};

#[derive(Debug, Args)]
pub(crate) struct DiskOptions {
    /// Platform of a disk, as linux/architecture; by default the image's, else this machine's
    #[arg(long, value_name = "PLATFORM")]
    pub(crate) platform: Option<String>,
    /// Add a dm-verity hash tree to a disk or an extension, and print its root hash
    #[arg(long)]
    pub(crate) verity: bool,
    /// Sign the root hash with the RSA key in this PEM file; implies --verity
    #[arg(long, value_name = "FILE", requires = "certificate")]
    pub(crate) private_key: Option<PathBuf>,
    /// PEM file with the certificate of --private-key
    #[arg(long, value_name = "FILE", requires = "private_key")]
    pub(crate) certificate: Option<PathBuf>,
    /// Add an EFI system partition to a disk, with a program that boots the root; implies --verity
    #[arg(long, requires = "kernel")]
    pub(crate) bootable: bool,
    /// Kernel of a bootable disk
    #[arg(long, value_name = "FILE", requires = "bootable")]
    pub(crate) kernel: Option<PathBuf>,
    /// Initrd of a bootable disk; may be given several times
    #[arg(long, value_name = "FILE", requires = "bootable")]
    pub(crate) initrd: Vec<PathBuf>,
    /// Kernel command line of a bootable disk, to which Quire adds the root hash
    #[arg(long, value_name = "TEXT", requires = "bootable")]
    pub(crate) cmdline: Option<String>,
    /// UEFI stub of a bootable disk; by default systemd's for the disk's processor
    #[arg(long, value_name = "FILE", requires = "bootable")]
    pub(crate) stub: Option<PathBuf>,
}

impl DiskOptions {
    /// Whether the output is a disk with a hash tree.
    pub(super) fn is_verified(&self) -> bool {
        self.verity || self.private_key.is_some() || self.bootable
    }

    /// Returns the first option that only disks with a hash tree have.
    fn verified_option(&self) -> Option<&'static str> {
        match self {
            Self { verity: true, .. } => Some("--verity"),
            Self { private_key: Some(_), .. } => Some("--private-key"),
            Self { bootable: true, .. } => Some("--bootable"),
            _ => None,
        }
    }

    /// Checks the options before anything is opened. `target` is `None` for changes of a container.
    pub(super) fn check(&self, target: Option<&Target>) -> anyhow::Result<()> {
        let output = match target {
            Some(Target::Disk(output)) => output,
            Some(Target::Extension { .. }) if self.bootable => {
                bail!("--bootable needs disk:FILE");
            }
            Some(Target::Extension { kind, file }) => {
                if self.platform.is_some() && !self.is_verified() {
                    bail!("--platform needs --verity with {}:FILE", kind.name());
                }
                file
            }
            _ => {
                if self.platform.is_some() {
                    bail!("--platform needs disk:FILE");
                }
                if let Some(option) = self.verified_option() {
                    bail!("{option} needs disk:FILE, sysext:FILE or confext:FILE");
                }
                return Ok(());
            }
        };
        if let (Some(option), Output::Stdout) = (self.verified_option(), output) {
            bail!(
                "{option} needs a file: the beginning of the disk has ids from the root hash, which is known when the \
                image is complete"
            );
        }
        Ok(())
    }
}
