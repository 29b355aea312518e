//! Sets and removes single refs.

use crate::operation::OperationError;
use crate::shelf::refs::{RefError, RefName, Reference};
use crate::store::Store;

impl Store {
    /// Sets the ref `name` to `reference`, durably. The image and the manifest must be in the store.
    ///
    /// # Errors
    /// [`OperationError`] if one of them is not in the store, or if the ref cannot be written.
    pub fn set_ref(&self, name: &RefName, reference: &Reference) -> Result<(), OperationError> {
        let failed = OperationError::of("set the ref", name);
        let transaction = self.begin().map_err(failed)?;
        transaction.set_ref(name.clone(), reference.clone());
        transaction.commit().map(drop).map_err(failed)
    }

    /// Removes a ref, and no other item: `gc` frees the items that only this ref needed. Returns the removed ref, or
    /// `None` if it was damaged.
    ///
    /// # Errors
    /// [`RefError::Absent`], or another error if the ref cannot be removed.
    pub fn remove_ref(&self, name: &RefName) -> Result<Option<Reference>, RefError> {
        if !self.is_writable() {
            return Err(RefError::ReadOnly(self.path().to_owned()));
        }
        let was = match self.refs.get(name) {
            Err(RefError::Disk(error)) => return Err(error.into()),
            Err(_) => None,
            Ok(was) => was,
        };
        if !self.refs.directory.remove_any(name.file_name())? {
            return Err(RefError::Absent(name.clone()));
        }
        self.refs.directory.sync()?;
        Ok(was)
    }

    /// Removes a ref if its contents are still `expected`, as [`remove_ref`](Self::remove_ref) does. Returns whether it
    /// was removed: another process may have removed it, or set it to another image.
    ///
    /// # Errors
    /// [`RefError`] if the ref cannot be read or removed.
    pub fn remove_ref_if(&self, name: &RefName, expected: &Reference) -> Result<bool, RefError> {
        if !self.is_writable() {
            return Err(RefError::ReadOnly(self.path().to_owned()));
        }
        let alone = self.lock_records()?;
        match self.refs.get(name) {
            Ok(Some(now)) if now == *expected => {}
            // A damaged record has other contents.
            Ok(_) | Err(RefError::Damaged { .. } | RefError::Wrong { .. }) => return Ok(false),
            Err(error) => return Err(error),
        }
        let removed = self.refs.directory.remove_any(name.file_name())?;
        drop(alone);
        self.refs.directory.sync()?;
        Ok(removed)
    }
}
