//! Hashing many files.

use std::fs::File;
use std::io::{self, Read as _};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use image::verity::{Algorithm, Hasher, ObjectId};

use super::{FsckError, FsckOptions, fault};
use crate::disk::DiskError;

/// What hashing a file found.
#[derive(Debug)]
pub(super) enum Hashed {
    Sound(u64),
    Different(ObjectId, u64),
    /// What is wrong with it.
    Damaged(String),
}

/// Hashes files on several threads; answers in the order of the ids. One that vanishes meanwhile is
/// sound: nothing but `gc` removes files, and it waits for whoever holds the lock.
///
/// # Errors
/// [`FsckError::Unchecked`], the first of them.
pub(super) fn hash_all(
    ids: &[ObjectId],
    algorithm: Algorithm,
    options: FsckOptions,
    open: &(dyn Fn(&ObjectId) -> Result<Option<File>, DiskError> + Sync),
) -> Result<Vec<Hashed>, FsckError> {
    let next = AtomicUsize::new(0);
    let results: Vec<Mutex<Option<Result<Hashed, FsckError>>>> =
        ids.iter().map(|_| Mutex::new(None)).collect();
    let work = || {
        let mut buffer = vec![0; 1 << 20];
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some((id, result)) = ids.get(at).zip(results.get(at)) else { return };
            let hashed = match open(id) {
                Ok(Some(file)) => hash(file, id, algorithm, &mut buffer),
                Ok(None) => Ok(Hashed::Sound(0)),
                Err(error) => fault::damage(&error).map(Hashed::Damaged),
            };
            *result.lock().unwrap_or_else(PoisonError::into_inner) = Some(hashed);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..options.threads.min(ids.len()) {
            scope.spawn(work);
        }
        work();
    });
    let results = results.into_iter().map(Mutex::into_inner);
    let results = results.map(|it| it.unwrap_or_else(PoisonError::into_inner));
    results.map(|it| it.expect("every id was taken by a thread, and all have ended")).collect()
}

fn hash(
    mut file: File,
    id: &ObjectId,
    algorithm: Algorithm,
    buffer: &mut [u8],
) -> Result<Hashed, FsckError> {
    let mut hasher = Hasher::new(algorithm);
    loop {
        match file.read(buffer) {
            Ok(0) => break,
            Ok(length) => hasher.update(&buffer[..length]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                return fault::damage(&error)
                    .map(|why| Hashed::Damaged(format!("cannot read it: {why}")));
            }
        }
    }
    let size = hasher.size();
    Ok(match hasher.finish() {
        actual if actual == *id => Hashed::Sound(size),
        actual => Hashed::Different(actual, size),
    })
}
