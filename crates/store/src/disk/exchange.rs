//! Exchanges two directories in one step.

use rustix::fs::RenameFlags;

use super::{Directory, DiskError};
use crate::trace::Change;

impl Directory {
    /// Gives an entry of this directory the name and place of an entry of `to`, and the other way around, atomically.
    pub(crate) fn exchange(
        &self,
        name: impl AsRef<[u8]>,
        to: &Self,
        other: impl AsRef<[u8]>,
    ) -> Result<(), DiskError> {
        let (name, other) = (name.as_ref(), other.as_ref());
        let failed = |errno| to.failed("replace", other, errno);
        self.trace.allow().map_err(failed)?;
        rustix::fs::renameat_with(&self.fd, name, &to.fd, other, RenameFlags::EXCHANGE)
            .map_err(failed)?;
        self.trace.record(|| Change::Exchange(self.path_of(name), to.path_of(other)));
        Ok(())
    }
}
