//! Guests of a bench, which read all files of one image and then stay alive.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::architecture::Architecture;
use super::boot::{self, Guest, Machine, Step};
use super::contents::OVER_IT;
use super::initramfs::{self, Way};
use super::kernels::{self, Kernel};
use super::machine::{PMEM, WAIT_FOR_PMEM};
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
    fn mount(&self) -> String {
        let mount = match self {
            Self::Disk(_) => "mount -t erofs -o ro /dev/vda /lower\n",
            Self::Memory(_) => "mount -t erofs -o ro,dax=always /dev/pmem0 /lower\n",
            Self::Share(_) => "mount -t virtiofs quire /lower\n",
        };
        let wait = if matches!(self, Self::Memory(_)) { WAIT_FOR_PMEM } else { "" };
        format!("mkdir /lower /upper\n{wait}{mount}")
    }

    /// Modules of the mount.
    const fn modules(&self) -> &'static [&'static str] {
        match self {
            Self::Memory(_) => &PMEM,
            Self::Disk(_) | Self::Share(_) => &[],
        }
    }
}

/// Reads all files, and prints their bytes, and the bytes that the page cache has more afterwards. Programs and names
/// are in the cache before.
const READ: &str = r"cached() { /vm/busybox awk '/^(Cached|Buffers):/ { sum += $2 } END { print sum * 1024 }' \
        /proc/meminfo; } \
    && sync && echo 3 > /proc/sys/vm/drop_caches \
    && bytes=$(find image -type f -printf '%i %s\n' | sort -u | /vm/busybox awk '{ sum += $2 } END { print sum }') \
    && xargs -0 -r cat < /dev/null && cat /dev/null && before=$(cached) \
    && find image -type f -print0 | xargs -0 cat > /dev/null \
    && after=$(cached) && echo RESULT $bytes $((after - before))";

/// Limit of the time in which a guest reads. Eight guests may share two processors.
const PATIENCE: Duration = Duration::from_secs(3600);

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
        let step = |name: &str, limit: Duration, command: String| Step {
            name: name.to_owned(),
            limit,
            command,
            harness: false,
        };
        let steps = [step("read", PATIENCE, READ.replace("\\\n", " "))];
        // Longer than all guests of a bench take.
        let stay = step("stay", 24 * PATIENCE, String::from("sleep 86400"));
        let plan = plan_text(&steps) + &plan_text(&[stay]);
        let script = access.mount() + OVER_IT;
        let files = [("vm/init", root::GUEST), ("vm/plan", plan.as_str()), ("vm/environment", "")];
        let modules = access.modules();
        let way = Way { script: &script, programs: &[], files: &files, modules };
        initramfs::write(&kernel, &need("busybox")?, &way, work.path(), &initramfs)?;
        Ok(Self { kernel, _work: work, initramfs, steps, memory })
    }

    /// The kernel's release.
    #[must_use]
    pub fn release(&self) -> &str {
        &self.kernel.release
    }

    /// Boots the guest with this number, which reads all files.
    pub fn start(&self, number: usize, access: Access<'_>) -> Result<(Guest, GuestRead)> {
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
            arguments: &arguments,
            persistent,
            share,
            memory: self.memory,
            ..Machine::new(&self.kernel, &self.initramfs, &format!("-fleet-{number}"))?
        };
        let mut guest = boot::start(&machine)?;
        let mut outcome = None;
        guest.steps(&self.steps, |_, it| outcome = Some(it))?;
        let outcome = outcome.context("a guest has one step")?;
        let numbers = outcome.output.iter().find_map(|it| it.strip_prefix("RESULT "));
        let numbers = numbers.and_then(|it| it.split_once(' ')).filter(|_| outcome.code == 0);
        let Some((bytes, cached)) = numbers else {
            bail!(Failed(format!("a guest cannot read: {}", outcome.output.join("\n"))));
        };
        Ok((guest, GuestRead { bytes: bytes.parse()?, cached: cached.parse()? }))
    }
}
