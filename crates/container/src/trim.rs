//! What is freed inside of a filestore is given back to the host now and then, by whoever watches the container: the file
//! system would make each `unlink` wait for that.

use std::cell::Cell;
use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

/// How often it is looked at.
const EVERY: Duration = Duration::from_secs(5);

/// So many bytes are worth the work.
const WORTH: u64 = 256 << 10;

/// What is trimmed at a time: ext4 keeps in mind for each group of blocks, of this size, whether anything was freed.
const GROUP: u64 = 128 << 20;

/// Looks after the filestore of one container.
#[derive(Debug)]
pub struct Trimmer<'a> {
    /// Anything in the file system.
    inside: BorrowedFd<'a>,
    filestore: PathBuf,
    /// Bytes that the file has beyond those in use, when there was nothing more to take: the file system's own.
    own: Cell<Option<u64>>,
    next: Cell<Option<Instant>>,
}

impl<'a> Trimmer<'a> {
    pub(crate) const fn new(inside: BorrowedFd<'a>, filestore: PathBuf) -> Self {
        Self { inside, filestore, own: Cell::new(None), next: Cell::new(None) }
    }

    /// Takes what can be taken, if it is time for that, and answers when it will be again.
    pub fn look(&self) -> Duration {
        let wait = self.next.get().map(|it| it.saturating_duration_since(Instant::now()));
        if let Some(wait) = wait.filter(|wait| !wait.is_zero()) {
            return wait;
        }
        if let Err(error) = self.trim() {
            tracing::debug!(%error, filestore = %self.filestore.display(), "nothing is taken from a filestore");
        }
        self.next.set(Some(Instant::now() + EVERY));
        EVERY
    }

    fn trim(&self) -> std::io::Result<()> {
        let extra = self.extra()?;
        match self.own.get() {
            Some(own) if extra <= own.saturating_add(WORTH) => return Ok(()),
            Some(_) => {}
            None => {
                self.own.set(Some(extra));
                return Ok(());
            }
        }
        // Where the file has holes there is nothing to take.
        let file = File::open(&self.filestore)?;
        let mut position = 0;
        while let Some(data) = data_from(&file, position)? {
            let group = data - data % GROUP;
            position = group + GROUP;
            kernel::files::trim(self.inside, &(group..position))?;
        }
        self.own.set(Some(self.extra()?));
        Ok(())
    }

    fn extra(&self) -> std::io::Result<u64> {
        // Source: stat(2): blocks of 512 bytes, whatever the file system's are.
        let allocated = std::fs::metadata(&self.filestore)?.blocks().saturating_mul(512);
        let inside = rustix::fs::fstatvfs(self.inside)?;
        let used = inside.f_blocks.saturating_sub(inside.f_bfree).saturating_mul(inside.f_frsize);
        Ok(allocated.saturating_sub(used))
    }
}

/// Where the next data is; none if there is none.
fn data_from(file: &File, position: u64) -> std::io::Result<Option<u64>> {
    match seek(file.as_fd(), SeekFrom::Data(position)) {
        Ok(data) => Ok(Some(data)),
        Err(Errno::NXIO) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}
