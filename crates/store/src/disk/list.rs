//! Append-only files that several threads write and other processes read at the same time.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::Mode;

use super::new_file::write_at;
use super::{Change, Directory, DiskError, NEW, Trace};

/// A file of this process that only grows. Each addition is one system call.
#[derive(Debug)]
pub(crate) struct ListFile {
    fd: OwnedFd,
    path: PathBuf,
    /// Offset of the next addition, in bytes. A slot that is reserved but not yet written reads as zeros.
    length: AtomicU64,
    trace: Trace,
}

impl Directory {
    /// Creates an empty list that only this user can read and write.
    pub(crate) fn create_list(&self, name: &str) -> Result<ListFile, DiskError> {
        let failed = |errno| self.failed("create", name, errno);
        self.trace.allow().map_err(failed)?;
        let mode = Mode::RUSR | Mode::WUSR;
        let fd = rustix::fs::openat(&self.fd, name, NEW, mode).map_err(failed)?;
        self.trace.record(|| Change::Create(self.path_of(name)));
        let (path, trace) = (self.path_of(name), self.trace.clone());
        Ok(ListFile { fd, path, length: AtomicU64::new(0), trace })
    }
}

impl ListFile {
    /// Appends bytes. Processes that read the file after this call see them.
    pub(crate) fn add(&self, bytes: &[u8]) -> Result<(), DiskError> {
        let failed = |errno: rustix::io::Errno| DiskError {
            action: "write",
            path: self.path.clone(),
            source: errno.into(),
        };
        self.trace.allow().map_err(failed)?;
        let at = self.length.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        write_at(&self.fd, bytes, at).map_err(failed)?;
        self.trace.record(|| Change::Write(self.path.clone(), bytes.to_vec()));
        Ok(())
    }
}
