//! Guests of a bench, which read all files of one image and then stay alive.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::architecture::Architecture;
use super::boot::{self, Guest, Machine, Step};
use super::contents::OVER_IT;
use super::initramfs::{self, Way};
use super::kernels::{self, Kernel};
use super::{PACKAGES, plan_text, root};
use crate::cache::Cache;
use crate::process::need;
use crate::{Failed, tools};

/// The means by which a guest gets the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access<'a> {
    /// A disk: the value of QEMU's option `-drive`.
    Disk(&'a str),
    /// Persistent memory, mapped by DAX.
    Memory(&'a Path),
    /// A directory of the host: the socket of a virtiofsd.
    Share(&'a Path),
}

impl Access<'_> {
    /// Commands that mount the image at `/lower`, for busybox's shell.
    const fn mount(&self) -> &'static str {
        match self {
            Self::Disk(_) => "mkdir /lower /upper\nmount -t erofs -o ro /dev/vda /lower\n",
            Self::Memory(_) => {
                "mkdir /lower /upper\nmount -t erofs -o ro,dax=always /dev/pmem0 /lower\n"
            }
            Self::Share(_) => "mkdir /lower /upper\nmount -t virtiofs quire /lower\n",
        }
    }
}

/// Reads all files, and prints their bytes and those that the page cache has more afterwards.
const READ: &str = r"cached() { /vm/busybox awk '/^(Cached|Buffers):/ { sum += $2 } END { print sum }' /proc/meminfo; } \
    && bytes=$(find image -type f -printf '%i %s\n' | sort -u | /vm/busybox awk '{ sum += $2 } END { print sum }') \
    && sync && echo 3 > /proc/sys/vm/drop_caches && before=$(cached) \
    && find image -type f -print0 | xargs -0 cat > /dev/null \
    && after=$(cached) && echo RESULT $bytes $(((after - before) * 1024))";

/// Guests with the same kernel, memory and access.
#[derive(Debug)]
pub struct Fleet {
    kernel: Kernel,
    /// The folder of `initramfs`.
    _work: tempfile::TempDir,
    initramfs: PathBuf,
    steps: [Step; 1],
    /// Memory of each guest, in MB.
    memory: u32,
}

/// The bytes of all files of an image, and the bytes by which the page cache of a guest grew when it read them.
#[derive(Debug, Clone, Copy)]
pub struct GuestRead {
    pub bytes: u64,
    pub cached: u64,
}

impl Fleet {
    /// Prepares guests with the named kernel, and this access.
    pub fn new(cache: &Cache, name: &str, access: Access<'_>, memory: u32) -> Result<Self> {
        tools::install(&PACKAGES)?;
        let kernel = kernels::find_kernel(cache, name, Architecture::Amd64, false)?;
        let work = super::work(cache)?;
        let initramfs = work.path().join("initramfs.cpio");
        let step = |name: &str, command: String| Step {
            name: name.to_owned(),
            limit: Duration::from_secs(3600),
            command,
            harness: false,
        };
        let steps = [step("read", READ.replace("\\\n", " "))];
        let plan = plan_text(&steps) + &plan_text(&[step("stay", String::from("sleep 3600"))]);
        let script = access.mount().to_owned() + OVER_IT;
        let files = [("vm/init", root::GUEST), ("vm/plan", plan.as_str()), ("vm/environment", "")];
        let modules = ["virtio_pmem", "nd_pmem"];
        let way = Way { script: &script, programs: &[], files: &files, modules: &modules };
        initramfs::write(&kernel, &need("busybox")?, &way, work.path(), &initramfs)?;
        Ok(Self { kernel, _work: work, initramfs, steps, memory })
    }

    /// The kernel's release.
    #[must_use]
    pub fn release(&self) -> &str {
        &self.kernel.release
    }

    /// Boots one guest, which reads all files.
    pub fn start(&self, access: Access<'_>) -> Result<(Guest, GuestRead)> {
        let arguments = match access {
            Access::Disk(drive) => vec!["-drive".to_owned(), drive.to_owned()],
            Access::Memory(_) | Access::Share(_) => Vec::new(),
        };
        let (persistent, share) = match access {
            Access::Memory(file) => (Some(file), None),
            Access::Share(socket) => (None, Some(socket)),
            Access::Disk(_) => (None, None),
        };
        let machine = Machine {
            architecture: self.kernel.architecture,
            kernel: &self.kernel.image(),
            initramfs: &self.initramfs,
            disks: &[],
            arguments: &arguments,
            persistent,
            share,
            memory: self.memory,
            console: &super::console(&self.kernel, "-fleet")?,
        };
        let mut outcome = None;
        let guest = boot::keep(&machine, &self.steps, |_, it| outcome = Some(it))?;
        let outcome = outcome.context("a guest has one step")?;
        let numbers = outcome.output.iter().find_map(|it| it.strip_prefix("RESULT "));
        let numbers = numbers.and_then(|it| it.split_once(' ')).filter(|_| outcome.code == 0);
        let Some((bytes, cached)) = numbers else {
            bail!(Failed(format!("a guest cannot read: {}", outcome.output.join("\n"))));
        };
        Ok((guest, GuestRead { bytes: bytes.parse()?, cached: cached.parse()? }))
    }
}
