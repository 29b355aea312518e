//! Takes requests from the kernel and sends replies, with a few threads.

use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use image::erofs::read::ReadAt;
use kernel::fuse::{
    FuseConnection, FuseError, FuseOperation, FuseRequest, FuseRequestError, RequestBuffer,
    TakenRequest, Unique,
};
use kernel::process::last_processor;
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_setaffinity};

use super::supervisor::Successor;
use super::tree::{AnswerMemory, FileData, FileTree, FuseAnswer};

/// Largest number of threads. More threads would wait for each other, for the underlying file system, and for two
/// locks.
const THREADS_MAX: usize = 4;
/// How long a thread polls for the next request before it sleeps: a program that lists files sends the next request
/// at once, and waking a thread takes longer than a reply.
const SPIN: Duration = Duration::from_micros(100);
/// Longest read, in bytes, that the thread which takes requests handles itself.
const SHORT: u32 = 16 << 10;

/// After how many requests a thread that [follows](Processor) a program looks again where the program runs. Looking
/// takes longer than a request.
const LOOK: u32 = 256;
/// The same, if the request is of another program.
const LOOK_AT_ANOTHER: u32 = 16;

/// How long a server of names waits for requests before it exits. The next request starts another server, which takes a
/// millisecond. A host may have thousands of containers, most of which rest.
const IDLE: Duration = Duration::from_secs(1);

/// Serves a tree until its file system is unmounted, or until the server is not needed for now and `next` will start
/// another one.
///
/// If the server sends the data of files, there is one thread for each processor, up to four. One thread takes requests
/// and handles most of them itself. While it handles a long read, another thread takes requests. If the server sends
/// only names and attributes, one thread serves them, on the processor of the program that waits.
///
/// # Errors
/// If requests cannot be taken.
pub(super) fn serve<S, D>(
    connection: &FuseConnection,
    tree: &FileTree<S, D>,
    next: Successor,
) -> Result<(), FuseError>
where
    S: ReadAt + Send + Sync,
    D: FileData,
{
    if !tree.has_data() {
        return serve_names(connection, tree, next);
    }
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

/// Serves requests that all take a few microseconds, until none has come for a while. A listing sends them one after
/// another, so most of its time would be spent on waking programs on other processors.
fn serve_names<S: ReadAt, D: FileData>(
    connection: &FuseConnection,
    tree: &FileTree<S, D>,
    next: Successor,
) -> Result<(), FuseError> {
    connection.never_wait_in_take()?;
    let (mut buffer, mut memory) = (RequestBuffer::default(), AnswerMemory::default());
    let mut processor = Processor::new();
    let mut patience = Some(IDLE);
    loop {
        if !connection.has_request(patience)? {
            if next.is_there() {
                return Ok(());
            }
            patience = None;
        }
        match connection.take(&mut buffer) {
            Ok(TakenRequest::Request(request)) => {
                processor.follow(request.from.thread);
                one(connection, tree, &request, &mut memory);
            }
            Ok(TakenRequest::Nothing) => {}
            Ok(TakenRequest::Over) => return Ok(()),
            Err(FuseError::Request(error)) => refuse(connection, &error),
            Err(error) => return Err(error),
        }
    }
}

/// The processor on which a thread runs: that of the last program that sent a request. Then a request and its reply are
/// two switches between threads of one processor, and no processor is woken.
#[derive(Debug)]
struct Processor {
    current: Option<usize>,
    /// The thread that the last look was at.
    of: u32,
    since_look: u32,
}

impl Processor {
    const fn new() -> Self {
        Self { current: None, of: 0, since_look: LOOK }
    }

    /// Moves this thread to the processor of another one, from time to time. If this fails, the kernel chooses the
    /// processor.
    fn follow(&mut self, thread: u32) {
        self.since_look = self.since_look.saturating_add(1);
        let patience = if thread == self.of { LOOK } else { LOOK_AT_ANOTHER };
        if self.since_look < patience {
            return;
        }
        (self.of, self.since_look) = (thread, 0);
        let theirs = last_processor(thread).filter(|it| *it < CpuSet::MAX_CPU);
        if let Some(theirs) = theirs.filter(|it| self.current != Some(*it)) {
            let mut only = CpuSet::new();
            only.set(theirs);
            self.current = sched_setaffinity(None, &only).is_ok().then_some(theirs);
        }
    }
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
                Err(FuseError::Request(error)) => refuse(self.connection, &error),
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

/// Fails a request that cannot be decoded.
fn refuse(connection: &FuseConnection, error: &FuseRequestError) {
    tracing::error!(%error, "the kernel sent an unknown request");
    if let Some(unique) = error.unique() {
        said(connection.refuse(unique, Errno::IO));
    }
}

/// Logs a failed reply. The requester may have been killed.
fn said(replied: Result<(), FuseError>) {
    if let Err(error) = replied {
        tracing::debug!(%error, "the process that waited for a reply has exited");
    }
}
