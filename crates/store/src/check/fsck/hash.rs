//! Hashes many files.

use std::fs::File;
use std::io::{self, Read as _};

use image::verity::{Algorithm, Hasher, Id};

use super::{FsckError, FsckOptions, check_error};
use crate::disk::DiskError;
use crate::parallel;

/// Result of hashing a file.
#[derive(Debug)]
pub(super) enum Hashed<K> {
    Sound(u64),
    Different(Id<K>, u64),
    /// A description of the damage.
    Damaged(String),
}

/// Opens the file of an id.
type OpenById<'o, K> = dyn Fn(&Id<K>) -> Result<Option<File>, DiskError> + Sync + 'o;

/// Hashes files on several threads. The results are in the order of the ids. A file that does not exist any more
/// counts as sound, because only `gc` removes files, and `gc` waits for the caller's lock.
///
/// # Errors
/// The first [`FsckError::Unchecked`], or the error of a thread that cannot be started.
pub(super) fn hash_all<K: Sync + Send>(
    ids: &[Id<K>],
    algorithm: Algorithm,
    options: FsckOptions,
    open: &OpenById<'_, K>,
) -> Result<Vec<Hashed<K>>, FsckError> {
    let buffer = || vec![0; 1 << 20];
    parallel::each_with("fsck", options.threads, ids.len(), buffer, |buffer, at| {
        match open(&ids[at]) {
            Ok(Some(file)) => hash(file, &ids[at], algorithm, buffer),
            Ok(None) => Ok(Hashed::Sound(0)),
            Err(error) => check_error::damage(&error).map(Hashed::Damaged),
        }
    })
}

fn hash<K>(
    mut file: File,
    id: &Id<K>,
    algorithm: Algorithm,
    buffer: &mut [u8],
) -> Result<Hashed<K>, FsckError> {
    let mut hasher = Hasher::new(algorithm);
    loop {
        match file.read(buffer) {
            Ok(0) => break,
            Ok(length) => hasher.update(&buffer[..length]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                return check_error::damage(&error)
                    .map(|why| Hashed::Damaged(format!("cannot read it: {why}")));
            }
        }
    }
    let size = hasher.size();
    Ok(match hasher.finish() {
        actual if actual == *id.digest() => Hashed::Sound(size),
        actual => Hashed::Different(actual.into(), size),
    })
}
