//! Unnamed temporary files.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd as _;
use std::path::Path;

use store::DiskRoom;

/// An unnamed temporary file, which does not fill its disk.
#[derive(Debug)]
pub(crate) struct Spool {
    file: File,
    room: DiskRoom,
}

impl Spool {
    /// Makes the file on the file system of this directory.
    ///
    /// # Errors
    /// If the file cannot be made.
    pub(crate) fn new(directory: &Path) -> io::Result<Self> {
        let file = tempfile::tempfile_in(directory)?;
        let room = DiskRoom::from_fd(file.as_fd())?;
        Ok(Self { file, room })
    }

    pub(crate) fn into_file(self) -> File {
        self.file
    }
}

impl Write for Spool {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.room.take(bytes.len() as u64)?;
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
