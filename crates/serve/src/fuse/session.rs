//! Takes requests from the kernel and sends replies, with a few threads.

use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use image::erofs::read::ReadAt;
use kernel::fuse::{
    FuseConnection, FuseError, FuseOperation, FuseRequest, RequestBuffer, TakenRequest, Unique,
};
use rustix::io::Errno;

use super::tree::{AnswerMemory, FileData, FileTree, FuseAnswer};

/// Largest number of threads. More threads would wait for each other, for the underlying file system, and for two
/// locks.
const THREADS_MAX: usize = 4;
/// How long a thread polls for the next request before it sleeps: a program that lists files sends the next request
/// at once, and waking a thread takes longer than a reply.
const SPIN: Duration = Duration::from_micros(100);
/// Longest read, in bytes, that the thread which takes requests handles itself.
const SHORT: u32 = 16 << 10;

/// Serves a tree until its file system is unmounted, with one thread for each processor, up to four.
///
/// One thread takes requests and handles most of them itself. While it handles a long read, another thread takes
/// requests.
///
/// # Errors
/// If requests cannot be taken.
pub(super) fn serve<S, D>(
    connection: &FuseConnection,
    tree: &FileTree<S, D>,
) -> Result<(), FuseError>
where
    S: ReadAt + Send + Sync,
    D: FileData,
{
    connection.never_wait_in_take()?;
    let processors = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let spin = if processors > 1 { SPIN } else { Duration::ZERO };
    let turn = Mutex::new(());
    let session = Session { connection, tree, turn, spin };
    std::thread::scope(|scope| {
        for _ in 1..processors.min(THREADS_MAX) {
            let one_more = || {
                if let Err(error) = session.take_turns() {
                    // The other threads continue.
                    tracing::error!(%error, "a thread stopped serving requests");
                }
            };
            if let Err(error) = std::thread::Builder::new().spawn_scoped(scope, one_more) {
                tracing::warn!(%error, "serving with fewer threads than processors");
                break;
            }
        }
        session.take_turns()
    })
}

struct Session<'a, S, D> {
    connection: &'a FuseConnection,
    tree: &'a FileTree<S, D>,
    /// Held by the thread that takes requests.
    turn: Mutex<()>,
    spin: Duration,
}

impl<S: ReadAt, D: FileData> Session<'_, S, D> {
    fn take_turns(&self) -> Result<(), FuseError> {
        let (mut buffer, mut memory) = (RequestBuffer::default(), AnswerMemory::default());
        let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match self.connection.take(&mut buffer) {
                Ok(TakenRequest::Request(request)) if is_long(&request) => {
                    drop(turn);
                    one(self.connection, self.tree, &request, &mut memory);
                    turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
                }
                Ok(TakenRequest::Request(request)) => {
                    one(self.connection, self.tree, &request, &mut memory);
                }
                Ok(TakenRequest::Nothing) => self.wait()?,
                Ok(TakenRequest::Over) => return Ok(()),
                Err(FuseError::Request(error)) => {
                    tracing::error!(%error, "the kernel sent an unknown request");
                    if let Some(unique) = error.unique() {
                        said(self.connection.refuse(unique, Errno::IO));
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits until a request is available.
    fn wait(&self) -> Result<(), FuseError> {
        let until = Instant::now() + self.spin;
        while Instant::now() < until {
            if self.connection.has_request(Some(Duration::ZERO))? {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        self.connection.has_request(None).map(drop)
    }
}

const fn is_long(request: &FuseRequest<'_>) -> bool {
    matches!(request.operation, FuseOperation::Read { size, .. } if size > SHORT)
}

fn one<S: ReadAt, D: FileData>(
    connection: &FuseConnection,
    tree: &FileTree<S, D>,
    request: &FuseRequest<'_>,
    memory: &mut AnswerMemory,
) {
    let unique: Unique = request.unique;
    // A panic fails only this request. The next request overwrites the contents of `memory`.
    let answered = catch_unwind(AssertUnwindSafe(|| match tree.answer(request, memory) {
        FuseAnswer::None => Ok(()),
        FuseAnswer::Error(errno) => connection.refuse(unique, errno),
        FuseAnswer::Body(body) => connection.reply(unique, &body),
        FuseAnswer::Bytes(bytes) => connection.reply_bytes(unique, bytes),
    }));
    said(answered.unwrap_or_else(|_| connection.refuse(unique, Errno::IO)));
}

/// Logs a failed reply. The requester may have been killed.
fn said(replied: Result<(), FuseError>) {
    if let Err(error) = replied {
        tracing::debug!(%error, "the process that waited for a reply has exited");
    }
}
