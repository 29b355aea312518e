//! Compresses with gzip in several threads. The output is one member, whose deflate stream consists of independent
//! blocks.
//!
//! The ends of blocks depend only on the content's length, so the same content gives the same bytes with any number
//! of threads. Sources: RFC 1951, 1952; pigz and pgzip do the same.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread;

use flate2::{Compress, Compression, Crc, FlushCompress, Status};
use store::parallel::thread_failed;

use super::Options;
use super::copy_error::CopyError;

/// The default level of the `gzip` program, and of most programs that make layers.
const LEVEL: u32 = 6;
/// Bytes of content per block. The 32 KiB window is empty at the start of each block, which costs less than one
/// percent of the size.
const BLOCK: usize = 1 << 20;
/// The header has no name, time or system, so it is always the same. Source: RFC 1952, 2.3.
const HEADER: [u8; 10] = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0xff];

/// A block of content to compress, and the channel for its result.
struct Task {
    content: Vec<u8>,
    /// Whether this is the last block.
    is_last: bool,
    done: SyncSender<io::Result<Block>>,
}

/// A compressed block.
struct Block {
    bytes: Vec<u8>,
    crc: Crc,
}

/// Compresses all of `content`. `size` is its approximate size in bytes, if known.
pub(super) fn gzip(
    content: &mut dyn Read,
    size: Option<u64>,
    into: &mut dyn Write,
    options: &Options<'_>,
    tell: &dyn Fn(u64),
) -> Result<(), CopyError> {
    let size = size.unwrap_or(u64::MAX);
    let blocks = usize::try_from(size / BLOCK as u64 + 1).unwrap_or(usize::MAX);
    let threads = options.threads.get().min(blocks);
    let (sender, tasks) = sync_channel::<Task>(threads);
    let tasks = Mutex::new(tasks);
    thread::scope(|scope| {
        for _ in 0..threads {
            let named = thread::Builder::new().name("gzip".to_owned());
            named.spawn_scoped(scope, || work(&tasks)).map_err(thread_failed)?;
        }
        // The threads end when the sender is dropped.
        let sender = sender;
        into.write_all(&HEADER).map_err(CopyError::Write)?;
        let mut crc = Crc::new();
        let mut waiting: VecDeque<Receiver<io::Result<Block>>> = VecDeque::new();
        let mut is_last = false;
        while !is_last || !waiting.is_empty() {
            if options.cancel.load(Ordering::Relaxed) {
                return Err(CopyError::Cancelled);
            }
            if !is_last && waiting.len() <= threads {
                let content = fill(content, tell)?;
                is_last = content.len() < BLOCK;
                let (done, outcome) = sync_channel(1);
                let sent = sender.send(Task { content, is_last, done });
                sent.expect("the threads wait for tasks until the sender is dropped");
                waiting.push_back(outcome);
            } else if let Some(outcome) = waiting.pop_front() {
                let outcome = outcome.recv().expect("the thread that took a task finishes it");
                let block = outcome.map_err(CopyError::Write)?;
                crc.combine(&block.crc);
                into.write_all(&block.bytes).map_err(CopyError::Write)?;
            }
        }
        let end = [crc.sum().to_le_bytes(), crc.amount().to_le_bytes()].concat();
        into.write_all(&end).map_err(CopyError::Write)
    })
}

/// Reads a whole block, or the rest of the content.
fn fill(content: &mut dyn Read, tell: &dyn Fn(u64)) -> Result<Vec<u8>, CopyError> {
    let mut block = vec![0; BLOCK];
    let mut filled = 0;
    while filled < BLOCK {
        match content.read(&mut block[filled..]) {
            Ok(0) => break,
            Ok(read) => {
                filled += read;
                tell(read as u64);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(CopyError::Read(error)),
        }
    }
    block.truncate(filled);
    Ok(block)
}

fn work(tasks: &Mutex<Receiver<Task>>) {
    let mut state = Compress::new(Compression::new(LEVEL), false);
    loop {
        let next = tasks.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(Task { content, is_last, done }) = next else { return };
        let outcome = deflate(&mut state, &content, is_last);
        // If the writer has failed, the receiver no longer exists, so the result is dropped.
        let _unheard = done.send(outcome);
    }
}

fn deflate(state: &mut Compress, content: &[u8], is_last: bool) -> io::Result<Block> {
    let flush = if is_last { FlushCompress::Finish } else { FlushCompress::Full };
    let mut bytes = Vec::with_capacity(content.len() / 2 + 256);
    state.reset();
    loop {
        let taken = usize::try_from(state.total_in()).unwrap_or(usize::MAX);
        let rest = content.get(taken..).unwrap_or_default();
        let status = state.compress_vec(rest, &mut bytes, flush).map_err(io::Error::other)?;
        // If the buffer is not full, the flush is complete. Source: `zlib.h`, `deflate`.
        if status == Status::StreamEnd || (!is_last && bytes.len() < bytes.capacity()) {
            break;
        }
        bytes.reserve(bytes.capacity());
    }
    let mut crc = Crc::new();
    crc.update(content);
    Ok(Block { bytes, crc })
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;
    use std::sync::atomic::AtomicBool;

    use super::*;

    fn packed(content: &[u8], threads: usize) -> Vec<u8> {
        let options = Options {
            threads: NonZeroUsize::new(threads).unwrap(),
            scratch: std::path::Path::new("/"),
            progress: &|_| {},
            cancel: &AtomicBool::new(false),
        };
        let mut bytes = Vec::new();
        let size = Some(content.len() as u64);
        let Ok(()) = gzip(&mut &content[..], size, &mut bytes, &options, &|_| {}) else {
            panic!("nothing can fail")
        };
        bytes
    }

    /// Decompresses with another decoder.
    fn unpacked(bytes: &[u8]) -> Vec<u8> {
        let mut content = Vec::new();
        // This decoder reads only the first member, and the output must have only one.
        flate2::read::GzDecoder::new(bytes).read_to_end(&mut content).unwrap();
        content
    }

    #[test]
    fn all_lengths_come_back_and_threads_make_no_difference() {
        let mut state = 1_u32;
        let noise = std::iter::repeat_with(|| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // The content is half noise and half zeros.
            if state >> 31 == 0 { 0 } else { state.to_be_bytes()[1] }
        });
        let all: Vec<u8> = noise.take(2 * BLOCK + 7).collect();
        for length in [0, 1, BLOCK, BLOCK + 1, all.len()] {
            let bytes = packed(&all[..length], 3);
            assert!(unpacked(&bytes) == all[..length], "{length}");
            assert!(bytes == packed(&all[..length], 1), "{length}: another number of threads");
        }
        let zeros = vec![0; BLOCK];
        let bytes = packed(&zeros, 2);
        assert!(unpacked(&bytes) == zeros && bytes.len() < BLOCK / 100);
    }

    #[test]
    fn an_error_ends_it() {
        struct Fails(usize);
        impl Read for Fails {
            fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
                if self.0 == 0 {
                    return Err(io::Error::other("no more"));
                }
                self.0 -= 1;
                Ok(into.len())
            }
        }
        let options = Options {
            threads: NonZeroUsize::new(2).unwrap(),
            scratch: std::path::Path::new("/"),
            progress: &|_| {},
            cancel: &AtomicBool::new(false),
        };
        let ended = gzip(&mut Fails(9), Some(1 << 30), &mut io::sink(), &options, &|_| {});
        assert!(matches!(ended, Err(CopyError::Read(_))));
        options.cancel.store(true, Ordering::Relaxed);
        let ended = gzip(&mut io::repeat(1), Some(1 << 30), &mut io::sink(), &options, &|_| {});
        assert!(matches!(ended, Err(CopyError::Cancelled)));
    }
}
