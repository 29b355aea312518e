//! Names that are set and removed one by one.

use super::TransactionError;
use crate::shelf::refs::{RefError, RefName, Reference};
use crate::store::Store;

/// Why a ref cannot be set.
#[derive(Debug, thiserror::Error)]
#[error("cannot set the ref {name}")]
pub struct SetRefError {
    /// Which one.
    pub name: RefName,
    /// Why.
    pub source: TransactionError,
}

impl Store {
    /// Lets `name` stand for `reference`, durably. What it names must be in the store.
    ///
    /// # Errors
    /// [`SetRefError`] when it is not, or the ref cannot be written.
    pub fn set_ref(&self, name: &RefName, reference: &Reference) -> Result<(), SetRefError> {
        let failed = |source| SetRefError { name: name.clone(), source };
        let transaction = self.begin().map_err(failed)?;
        transaction.set_ref(name.clone(), reference.clone());
        transaction.commit().map(drop).map_err(failed)
    }

    /// Removes a ref, and nothing else: `gc` frees what it was the last to hold. Answers what it
    /// was, if that could be read: a damaged one is removed too.
    ///
    /// # Errors
    /// [`RefError::Absent`], or when it cannot be removed.
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
}
