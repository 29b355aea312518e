//! The immutable flag of published files.

use std::os::fd::AsFd as _;

use kernel::seal::{SealError, set_immutable};

use super::{NO, Transaction};
use crate::disk::Directory;
use crate::meta::Sealing;

/// Sets the immutable flag on files, until that fails.
pub(super) struct Sealer {
    wanted: bool,
}

impl Sealer {
    pub(super) fn new(transaction: &Transaction<'_>) -> Self {
        let verity = transaction.verity.load(std::sync::atomic::Ordering::Relaxed);
        let wanted = transaction.store.sealing == Sealing::VerityOrImmutable && verity == NO;
        Self { wanted }
    }

    pub(super) fn seal(&mut self, directory: &Directory, name: &str) {
        if !self.wanted {
            return;
        }
        let Ok(Some((file, _))) = directory.read(name) else { return };
        match set_immutable(file.as_fd()) {
            Ok(()) => {}
            // The flag is not permitted, or not supported by this file system, so it would fail for later files as
            // well.
            Err(error @ (SealError::Unsupported { .. } | SealError::Forbidden { .. })) => {
                tracing::debug!(%error, "cannot set the immutable flag: only their mode protects objects");
                self.wanted = false;
            }
            Err(error) => tracing::warn!(%error, name, "cannot set the immutable flag"),
        }
    }
}
