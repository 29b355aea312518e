//! Stores files: a queue that is bounded in bytes, and the threads that process it.
//!
//! Small files travel in batches, as owned memory. A large file travels piece by piece through a separate channel, so
//! that a file of any size takes a fixed amount of memory. Pieces of large files do not count against the queue's
//! budget, because a worker that waits for pieces must never wait for the tasks behind it.

use std::collections::VecDeque;
use std::io::Write as _;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use image::verity::{Hasher, ObjectId};
use sha2::{Digest as _, Sha256};
use store::{Draft, Transaction};

use super::ImportError;
use super::stop::Stop;

/// Bytes in a batch at which it is sent, and the largest file that goes into a batch.
pub(super) const BATCH: usize = 512 << 10;
/// Bytes in a piece of a large file. It equals the size of a batch, so that both can use the same buffers.
pub(super) const PIECE: usize = BATCH;
/// Number of pieces of one large file that may be queued.
const PIECES: usize = 2;
/// Bytes that a file in a batch is charged besides its content, for its list entries.
const FILE_COST: usize = 256;

/// Where the data of files is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Keep {
    /// Each file is stored as an object in `objects/`.
    Object,
    /// The data stays in the layer's tar, and is only hashed.
    InTar,
}

/// A file's digests, known once all of its bytes were read.
#[derive(Debug, Clone, Copy)]
pub(super) struct FileDigests {
    pub(super) object: ObjectId,
    /// SHA-256 of the data, for files that are kept in the tar.
    pub(super) sha256: Option<[u8; 32]>,
}

/// The digests of one layer's files that are computed so far.
#[derive(Debug, Default)]
pub(super) struct Known {
    ids: Mutex<Vec<(u32, FileDigests)>>,
    more: Condvar,
}

impl Known {
    fn add(&self, ids: impl IntoIterator<Item = (u32, FileDigests)>) {
        lock(&self.ids).extend(ids);
        self.more.notify_one();
    }

    /// Moves the digests that are computed so far to `into`.
    pub(super) fn take(&self, into: &mut Vec<(u32, FileDigests)>) {
        into.append(&mut lock(&self.ids));
    }

    /// Waits until a digest is computed or the import has failed.
    pub(super) fn wait(&self, stop: &Stop<'_>, into: &mut Vec<(u32, FileDigests)>) {
        let mut ids = lock(&self.ids);
        while ids.is_empty() && !stop.is_set() {
            // A failure elsewhere does not notify this condition variable, so wait with a timeout.
            let timeout = std::time::Duration::from_millis(20);
            let waited = self.more.wait_timeout(ids, timeout);
            ids = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        into.append(&mut ids);
    }
}

/// Whole files in one buffer.
#[derive(Debug)]
pub(super) struct Batch {
    /// [`BATCH`] bytes, the first of which are used. The buffer is never shortened, because filling memory with zeros
    /// that are then overwritten is a measurable part of an import.
    pub(super) bytes: Vec<u8>,
    /// Number of each file, and its end in `bytes`.
    pub(super) files: Vec<(u32, usize)>,
    pub(super) keep: Keep,
    pub(super) known: Arc<Known>,
}

/// A part of a large file.
#[derive(Debug)]
pub(super) struct FilePiece {
    /// [`PIECE`] bytes, the first `used` of which are used.
    pub(super) bytes: Vec<u8>,
    pub(super) used: usize,
}

/// The transaction to which a file is added. Each queued file holds a reference, so the layer's transaction is
/// released only after its last file.
pub(super) type Target<'s> = Arc<Transaction<'s>>;

enum WriteTask<'s> {
    Batch(Batch, Target<'s>),
    Large(Large, Receiver<FilePiece>, Target<'s>),
}

/// A file that arrives in pieces.
#[derive(Debug)]
pub(super) struct Large {
    pub(super) number: u32,
    pub(super) size: u64,
    pub(super) keep: Keep,
    pub(super) known: Arc<Known>,
}

impl WriteTask<'_> {
    fn cost(&self) -> usize {
        match self {
            Self::Batch(batch, _) => batch.bytes.len() + batch.files.len() * FILE_COST,
            Self::Large(..) => 0,
        }
    }
}

#[derive(Default)]
struct State<'s> {
    tasks: VecDeque<WriteTask<'s>>,
    /// Bytes of the tasks that are queued or in progress.
    bytes: usize,
    is_closed: bool,
    /// Buffers that can be reused; the last used buffer is on top. Their number is bounded by the budget and the
    /// layers in progress. Returning them to the system would cost more time than it saves.
    spares: Vec<Vec<u8>>,
}

/// A queue of files to hash and write.
pub(super) struct Queue<'a> {
    state: Mutex<State<'a>>,
    room: Condvar,
    work: Condvar,
    budget: usize,
    stop: &'a Stop<'a>,
}

/// Error: the import has failed or was cancelled, so there is no use in continuing.
#[derive(Debug)]
pub(super) struct Stopped;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A thread that panicked has left a consistent value, and the scope propagates its panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<'a> Queue<'a> {
    /// Makes a queue whose batches take at most `budget` bytes in total, or one batch if a batch is larger.
    pub(super) fn new(budget: usize, stop: &'a Stop<'a>) -> Self {
        Self { state: Mutex::default(), room: Condvar::new(), work: Condvar::new(), budget, stop }
    }

    /// Returns a buffer of [`BATCH`] bytes with arbitrary content.
    pub(super) fn buffer(&self) -> Vec<u8> {
        lock(&self.state).spares.pop().unwrap_or_else(|| vec![0; BATCH])
    }

    fn spent(&self, buffer: Vec<u8>) {
        lock(&self.state).spares.push(buffer);
    }

    fn push(&self, task: WriteTask<'a>) -> Result<(), Stopped> {
        let cost = task.cost();
        let mut state = lock(&self.state);
        while state.bytes > 0 && state.bytes + cost > self.budget {
            if self.stop.is_set() {
                return Err(Stopped);
            }
            state = self.room.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if self.stop.is_set() {
            return Err(Stopped);
        }
        state.bytes += cost;
        state.tasks.push_back(task);
        self.work.notify_one();
        Ok(())
    }

    /// Makes an empty batch.
    pub(super) fn batch_for(&self, keep: Keep, known: &Arc<Known>) -> Batch {
        Batch { bytes: self.buffer(), files: Vec::new(), keep, known: Arc::clone(known) }
    }

    /// Queues whole files. Blocks while the budget is used up.
    pub(super) fn batch(&self, batch: Batch, target: &Target<'a>) -> Result<(), Stopped> {
        self.push(WriteTask::Batch(batch, Arc::clone(target)))
    }

    /// Queues a large file. The caller sends the file's pieces through the returned channel, and then drops the
    /// channel.
    pub(super) fn large(
        &self,
        file: Large,
        target: &Target<'a>,
    ) -> Result<SyncSender<FilePiece>, Stopped> {
        let (sender, pieces) = sync_channel(PIECES);
        self.push(WriteTask::Large(file, pieces, Arc::clone(target)))?;
        Ok(sender)
    }

    /// Closes the queue: no more tasks will be added.
    pub(super) fn close(&self) {
        lock(&self.state).is_closed = true;
        self.work.notify_all();
    }

    /// Ends the import when this thread panics, because other threads may wait for its work.
    fn panicked(&self) {
        self.stop.panicked();
        let state = lock(&self.state);
        self.room.notify_all();
        self.work.notify_all();
        drop(state);
    }

    /// Runs tasks until the queue is closed and empty, or the import has failed.
    pub(super) fn work(&self) {
        struct Guard<'q, 'a>(&'q Queue<'a>);
        impl Drop for Guard<'_, '_> {
            fn drop(&mut self) {
                if std::thread::panicking() {
                    self.0.panicked();
                }
            }
        }
        let _guard = Guard(self);
        loop {
            let mut state = lock(&self.state);
            let task = loop {
                if self.stop.is_set() {
                    // Drop the queued tasks, so that the threads that send pieces to them stop as well.
                    state.tasks.clear();
                    self.room.notify_all();
                    self.work.notify_all();
                    return;
                }
                if let Some(task) = state.tasks.pop_front() {
                    break task;
                }
                if state.is_closed {
                    return;
                }
                // Cancelling does not notify this condition variable.
                let timeout = std::time::Duration::from_millis(50);
                let waited = self.work.wait_timeout(state, timeout);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            };
            drop(state);
            let cost = task.cost();
            if let Err(error) = self.run(task) {
                self.stop.fail(error);
            }
            lock(&self.state).bytes -= cost;
            self.room.notify_all();
        }
    }

    fn run(&self, task: WriteTask<'a>) -> Result<(), ImportError> {
        match task {
            WriteTask::Batch(Batch { bytes, files, keep, known }, target) => {
                let mut ids = Vec::with_capacity(files.len());
                let mut start = 0;
                for (number, end) in files {
                    if self.stop.is_set() {
                        return Ok(());
                    }
                    let file = &bytes[start..end];
                    let named = match keep {
                        Keep::Object => {
                            let object = target.object(file).map_err(ImportError::Object)?;
                            FileDigests { object, sha256: None }
                        }
                        Keep::InTar => named(&target, file),
                    };
                    ids.push((number, named));
                    start = end;
                }
                // The target is released before the layer receives its last digest, because the layer must then hold
                // the only reference.
                drop(target);
                known.add(ids);
                self.spent(bytes);
            }
            WriteTask::Large(Large { number, size, keep, known }, pieces, target) => {
                let mut file = Sink::new(keep, &target)?;
                let mut written = 0;
                for FilePiece { bytes, used } in pieces {
                    if self.stop.is_set() {
                        return Ok(());
                    }
                    file.write(&bytes[..used])?;
                    written += used as u64;
                    self.spent(bytes);
                }
                // If the sender stopped early, it reports the cause itself.
                if written == size {
                    let named = file.finish()?;
                    drop(target);
                    known.add([(number, named)]);
                }
            }
        }
        Ok(())
    }
}

fn named(target: &Target<'_>, file: &[u8]) -> FileDigests {
    let object = image::verity::digest(target.store().algorithm(), file);
    FileDigests { object: object.into(), sha256: Some(Sha256::digest(file).into()) }
}

/// Where the pieces of a large file are written.
enum Sink<'t> {
    Object(Draft<'t>),
    Hashes(Hasher, Sha256),
}

impl<'t> Sink<'t> {
    fn new(keep: Keep, target: &'t Target<'_>) -> Result<Self, ImportError> {
        Ok(match keep {
            Keep::Object => Self::Object(target.draft().map_err(ImportError::Object)?),
            Keep::InTar => Self::Hashes(Hasher::new(target.store().algorithm()), Sha256::new()),
        })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), ImportError> {
        match self {
            Self::Object(draft) => draft.write_all(bytes).map_err(ImportError::write),
            Self::Hashes(hasher, sha256) => {
                hasher.update(bytes);
                sha256.update(bytes);
                Ok(())
            }
        }
    }

    fn finish(self) -> Result<FileDigests, ImportError> {
        match self {
            Self::Object(draft) => {
                let object = draft.finish().map_err(ImportError::Object)?;
                Ok(FileDigests { object, sha256: None })
            }
            Self::Hashes(hasher, sha256) => Ok(FileDigests {
                object: hasher.finish().into(),
                sha256: Some(sha256.finalize().into()),
            }),
        }
    }
}
