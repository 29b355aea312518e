//! Connects a container's standard streams to files, for runtimes that must not get the files themselves.
//!
//! gVisor reads and writes a file from its beginning, and does not update the file position at the end. So it would
//! overwrite existing data of the file, and later writers would overwrite the container's data. Source: gVisor
//! `pkg/sentry/fsimpl/host/host.go`, "fileDescription.offset is set to 0". A pipe has no position.
//!
//! crun changes the owner of the streams to the program's user, with that user's id on the host. This would change the
//! owner of the host's `/dev/null`, and files that another user opened for a container (seen with 1.8.1). A pipe
//! belongs to this process only, so its owner does not matter.

use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use kernel::process::{Signal, Signals};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;

use crate::bundle::spec::{RuntimeSpec, SpecProcess};
use crate::runtime::Kind;

/// Returns the name of a standard stream of this process, which the container gets, that is a directory of the host.
pub(crate) fn directory() -> Option<&'static str> {
    let is_directory = |stream: BorrowedFd<'_>| {
        let stat = rustix::fs::fstat(stream);
        stat.is_ok_and(|it| FileType::from_raw_mode(it.st_mode) == FileType::Directory)
    };
    let streams = [
        (is_directory(io::stdin().as_fd()), "standard input"),
        (is_directory(io::stdout().as_fd()), "standard output"),
        (is_directory(io::stderr().as_fd()), "standard error"),
    ];
    streams.into_iter().find(|it| it.0).map(|it| it.1)
}

/// Threads of this process that copy between pipes and files, so that the files' positions are used.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    input: Option<Input>,
    outputs: Vec<JoinHandle<io::Result<()>>>,
    /// Closed when the program has ended, because its children may live on and keep the pipes open.
    running: Option<PipeWriter>,
}

/// Damage that a runtime would do to the host's files as standard streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Harm {
    /// The runtime uses its own positions in files.
    Positions,
    /// The runtime changes their owner to this user and group of the host; `None` if those are unknown.
    Owners(Option<(u32, u32)>),
    /// The runtime reads standard input even if the program does not, which would stop a job in the background.
    Reads,
}

fn harm(kind: Kind, spec: &RuntimeSpec, process: &SpecProcess) -> Harm {
    match kind {
        Kind::Runsc => Harm::Positions,
        Kind::Crun => Harm::Owners(owner(spec, process)),
        Kind::Runc => Harm::Reads,
    }
}

impl Streams {
    /// Replaces the standard streams that this runtime must not get by pipes, for a `process` of a container with
    /// this `spec`.
    pub(crate) fn replace_stdio(
        command: &mut Command,
        kind: Kind,
        spec: &RuntimeSpec,
        process: &SpecProcess,
    ) -> io::Result<Self> {
        let (input, output, error) = (io::stdin(), io::stdout(), io::stderr());
        let harm = harm(kind, spec, process);
        Self::between(command, harm, input.as_fd(), output.as_fd(), error.as_fd())
    }

    /// As [`replace_stdio`](Self::replace_stdio), but only for standard input.
    pub(crate) fn replace_stdin(
        command: &mut Command,
        kind: Kind,
        spec: &RuntimeSpec,
        process: &SpecProcess,
    ) -> io::Result<Self> {
        let (ended, running) = io::pipe()?;
        let input =
            Input::between(command, harm(kind, spec, process), io::stdin().as_fd(), &ended)?;
        Ok(Self { input, outputs: Vec::new(), running: Some(running) })
    }

    fn between(
        command: &mut Command,
        harm: Harm,
        input: BorrowedFd<'_>,
        output: BorrowedFd<'_>,
        error: BorrowedFd<'_>,
    ) -> io::Result<Self> {
        let mut outputs = Vec::new();
        let (ended, running) = io::pipe()?;
        let input_thread = Input::between(command, harm, input, &ended)?;
        let mut through_pipe = |file: Option<File>| {
            let Some(mut file) = file else { return Ok(None) };
            let (reader, writer) = io::pipe()?;
            let ended = ended.try_clone()?;
            let mut sink = move |_: usize, bytes: &[u8]| file.write_all(bytes);
            let pass = move || pass_on(&mut [Some(reader)], &mut sink, &ended, None).map(drop);
            outputs.push(std::thread::Builder::new().spawn(pass)?);
            io::Result::Ok(Some(writer))
        };
        // Streams of the same file share a pipe, so that lines stay in order.
        let same = same_file(output, error)?;
        let mut output_pipe = |stream| match harm {
            Harm::Reads => Ok(None),
            harm => through_pipe(harmed(stream, harm)?),
        };
        let writer = output_pipe(output)?;
        let other = match &writer {
            Some(writer) if same => Some(writer.try_clone()?),
            _ => output_pipe(error)?,
        };
        if let Some(writer) = writer {
            command.stdout(writer);
        }
        if let Some(writer) = other {
            command.stderr(writer);
        }
        Ok(Self { input: input_thread, outputs, running: Some(running) })
    }

    /// Waits until all output so far is written. Call this when the program has ended.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        drop(self.running.take());
        let mut written = Ok(());
        for output in self.outputs {
            match output.join() {
                Ok(result) => written = written.and(result),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        // The input's position is also restored if an output failed.
        written.and(self.input.map_or(Ok(()), Input::give_back))
    }
}

/// A thread that copies a regular file into a pipe, and the end of the pipe from which the program reads.
#[derive(Debug)]
struct Input {
    reader: PipeReader,
    /// Returns the file, and the number of bytes that were read and not sent.
    thread: JoinHandle<(File, u64)>,
}

impl Input {
    /// Replaces standard input by a pipe, if the runtime must not get the file. `None` also means that it has no position.
    fn between(
        command: &mut Command,
        harm: Harm,
        input: BorrowedFd<'_>,
        ended: &PipeReader,
    ) -> io::Result<Option<Self>> {
        let Some(mut file) = harmed(input, harm)? else { return Ok(None) };
        let (reader, writer) = io::pipe()?;
        command.stdin(reader.try_clone()?);
        let ended = ended.try_clone()?;
        let has_position = file.metadata()?.is_file() && file.stream_position().is_ok();
        let thread = std::thread::Builder::new().spawn(move || {
            let unsent = copy_to_pipe(&mut file, writer, &ended);
            (file, unsent)
        })?;
        // For other files the thread may block in `read`, because another process may read the data that `poll` reported.
        Ok(has_position.then_some(Self { reader, thread }))
    }

    /// Joins the thread when the program has ended, and moves the file's position back to the first byte that the
    /// program has not read, so that the caller's next program reads it.
    fn give_back(self) -> io::Result<()> {
        let (mut file, unsent) = match self.thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        let unread = unsent + rustix::io::ioctl_fionread(&self.reader)?;
        let back = i64::try_from(unread).map_err(io::Error::other)?;
        file.seek(SeekFrom::Current(-back)).map(drop)
    }
}

/// Interval between checks of a terminal whose foreground is another job.
const BACKGROUND: Duration = Duration::from_millis(200);

/// Copies a file into a pipe, until the end of the file or until the other end of `ended` is closed. Returns the
/// number of bytes that were read but not written.
///
/// A terminal is read only while this process is in its foreground. Otherwise the kernel would stop the whole
/// process, including the threads that monitor the container.
fn copy_to_pipe(file: &mut File, mut writer: PipeWriter, ended: &PipeReader) -> u64 {
    let is_terminal = rustix::termios::isatty(&*file);
    // Between the check and the read, another job may become the foreground job. Then the read fails.
    let _masked = is_terminal.then(|| Signals::block(&[Signal::TTIN]));
    // If a pipe is writable, it has space for this many bytes. Source: pipe(7), `PIPE_BUF`.
    let mut bytes = [0; 4096];
    let mut is_refused = false;
    loop {
        let is_elsewhere = is_refused
            || is_terminal
                && rustix::termios::tcgetpgrp(&*file)
                    .is_ok_and(|it| it != rustix::process::getpgrp());
        is_refused = false;
        let most = is_elsewhere.then(|| Timespec::try_from(BACKGROUND).ok()).flatten();
        let mut waiting = vec![PollFd::new(ended, PollFlags::IN)];
        if !is_elsewhere {
            waiting.push(PollFd::new(&writer, PollFlags::OUT));
        }
        if poll(&mut waiting, most.as_ref()).is_err() {
            continue;
        }
        if !waiting[0].revents().is_empty() {
            return 0;
        }
        if is_elsewhere {
            continue;
        }
        let mut waiting = [PollFd::new(ended, PollFlags::IN), PollFd::new(&*file, PollFlags::IN)];
        // During this wait, this process may come to the foreground.
        let most = is_terminal.then(|| Timespec::try_from(BACKGROUND).ok()).flatten();
        if poll(&mut waiting, most.as_ref()).is_err() || waiting[1].revents().is_empty() {
            if waiting[0].revents().is_empty() {
                continue;
            }
            return 0;
        }
        let count = match file.read(&mut bytes) {
            Ok(0) => return 0,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) if is_terminal && Errno::from_io_error(&error) == Some(Errno::IO) => {
                // This process is in the background, or the terminal has hung up.
                is_refused = true;
                continue;
            }
            Err(_) => return 0,
        };
        if writer.write_all(&bytes[..count]).is_err() {
            return count as u64;
        }
    }
}

/// Passes the data of pipes to a function, in a thread that lives only as long as data arrives. Most containers write
/// nothing most of the time, and then their monitor has no second thread with a stack in the kernel and one in memory.
/// The thread is needed while there is data, because a slow disk must not delay a signal or a timeout.
pub(crate) struct Pump {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<io::Result<()>>>,
    running: Option<PipeWriter>,
}

/// State that the threads of a [`Pump`] share.
struct Shared {
    passing: Mutex<Passing>,
    /// Becomes readable when data arrives that no thread passes on (epoll(7), `EPOLLONESHOT`).
    arrival: OwnedFd,
    /// Whose other end is closed at the end of the container.
    ended: PipeReader,
    /// How long a thread waits for more data.
    patience: Duration,
}

struct Passing {
    readers: Vec<OpenReader>,
    sink: Box<Sink>,
}

/// A pipe, or `None` after its end.
type OpenReader = Option<PipeReader>;

/// Gets the index of a pipe, and data. Clippy counts this type as too complex inside of another.
type Sink = dyn FnMut(usize, &[u8]) -> io::Result<()> + Send;

/// How long the thread of a [`Pump`] waits for more data.
const PATIENCE: Duration = Duration::from_secs(1);

impl Pump {
    pub(crate) fn new(
        readers: Vec<PipeReader>,
        sink: impl FnMut(usize, &[u8]) -> io::Result<()> + Send + 'static,
    ) -> io::Result<Self> {
        Self::with(readers, sink, PATIENCE)
    }

    fn with(
        readers: Vec<PipeReader>,
        sink: impl FnMut(usize, &[u8]) -> io::Result<()> + Send + 'static,
        patience: Duration,
    ) -> io::Result<Self> {
        let (ended, running) = io::pipe()?;
        let arrival = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let readers: Vec<_> = readers.into_iter().map(Some).collect();
        let passing = Mutex::new(Passing { readers, sink: Box::new(sink) });
        let shared = Arc::new(Shared { passing, arrival, ended, patience });
        shared.wait_for_more(&shared.passing().readers)?;
        Ok(Self { shared, thread: None, running: Some(running) })
    }

    /// Returns a descriptor that is readable when [`look`](Self::look) should be called.
    pub(crate) fn arrival(&self) -> io::Result<OwnedFd> {
        self.shared.arrival.try_clone()
    }

    /// Starts a thread if data has arrived that no thread passes on. After an error, the rest of the data is left in
    /// the pipes.
    pub(crate) fn look(&mut self) -> io::Result<()> {
        let mut event =
            [epoll::Event { flags: Shared::EVENTS, data: epoll::EventData::new_u64(0) }];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        match epoll::wait(&self.shared.arrival, &mut event, Some(&now)) {
            Ok(0) | Err(Errno::INTR) => return Ok(()),
            found => drop(found?),
        }
        // The earlier thread has asked for this event, so it has nothing left to do.
        self.join()?;
        self.shared.stop_waiting()?;
        let shared = Arc::clone(&self.shared);
        // Many containers may have such a thread, which needs little stack.
        let thread = std::thread::Builder::new().stack_size(128 << 10);
        match thread.spawn(move || shared.pass_on()) {
            Ok(thread) => self.thread = Some(thread),
            // The limit of processes is reached. So this thread passes on some of the data, and may be late.
            Err(_) => self.shared.pass_once()?,
        }
        Ok(())
    }

    fn join(&mut self) -> io::Result<()> {
        match self.thread.take().map(JoinHandle::join) {
            None => Ok(()),
            Some(Ok(result)) => result,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
        }
    }

    /// Waits until all data so far is passed on, even if another process still has the other end of a pipe open.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        drop(self.running.take());
        self.join()?;
        let passing = &mut *self.shared.passing();
        pass_on(&mut passing.readers, &mut passing.sink, &self.shared.ended, None).map(drop)
    }
}

impl Shared {
    const EVENTS: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ONESHOT);

    fn passing(&self) -> MutexGuard<'_, Passing> {
        // After a panic in `sink`, the pipes are still sound.
        self.passing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pass_on(&self) -> io::Result<()> {
        let mut passing = self.passing();
        let Passing { readers, sink } = &mut *passing;
        if pass_on(readers, sink, &self.ended, Some(self.patience))? == Passed::Everything {
            return Ok(());
        }
        kernel::process::trim_heap();
        self.wait_for_more(&passing.readers)
    }

    /// Passes on the data that one read of each pipe returns.
    fn pass_once(&self) -> io::Result<()> {
        let Passing { readers, sink } = &mut *self.passing();
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        pass_round(readers, sink, &self.ended, Some(&now), &mut [0; 4096])?;
        self.wait_for_more(readers)
    }

    /// Makes `arrival` readable when data arrives, or a pipe ends.
    fn wait_for_more(&self, readers: &[OpenReader]) -> io::Result<()> {
        for reader in readers.iter().flatten() {
            epoll::add(&self.arrival, reader, epoll::EventData::new_u64(0), Self::EVENTS)?;
        }
        Ok(())
    }

    /// Keeps `arrival` from becoming readable while a thread passes data on: the event of one pipe disables only that
    /// pipe.
    fn stop_waiting(&self) -> io::Result<()> {
        for reader in self.passing().readers.iter().flatten() {
            epoll::delete(&self.arrival, reader)?;
        }
        Ok(())
    }
}

/// How much of the data of pipes was passed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Passed {
    /// All data: the pipes are at their end, or the container is.
    Everything,
    /// All data so far.
    Some,
}

/// Passes the data from `readers` to `sink`, up to their end. When the other end of `ended` is closed, only the data
/// that is already in the pipes is passed on. Also returns when no data has arrived for the time `patience`.
fn pass_on(
    readers: &mut [OpenReader],
    sink: &mut dyn FnMut(usize, &[u8]) -> io::Result<()>,
    ended: &PipeReader,
    patience: Option<Duration>,
) -> io::Result<Passed> {
    let mut bytes = vec![0; 1 << 16];
    let most = patience.and_then(|it| Timespec::try_from(it).ok());
    loop {
        match pass_round(readers, sink, ended, most.as_ref(), &mut bytes)? {
            Round::Read => {}
            Round::Silent => return Ok(Passed::Some),
            Round::Over => return Ok(Passed::Everything),
        }
    }
}

/// Result of one wait for the data of pipes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Round {
    /// Some pipes had data, or their end. The wait may also have been interrupted.
    Read,
    /// No pipe had data in time.
    Silent,
    /// All pipes are at their end, or the container is.
    Over,
}

/// Waits for data up to the time `most`, and passes on the data that one read of each pipe returns. Closes a pipe at its
/// end.
fn pass_round(
    readers: &mut [OpenReader],
    sink: &mut dyn FnMut(usize, &[u8]) -> io::Result<()>,
    ended: &PipeReader,
    most: Option<&Timespec>,
    bytes: &mut [u8],
) -> io::Result<Round> {
    let open: Vec<usize> = (0..readers.len()).filter(|at| readers[*at].is_some()).collect();
    if open.is_empty() {
        return Ok(Round::Over);
    }
    let ready: Vec<usize> = {
        let pipes = open.iter().filter_map(|at| readers[*at].as_ref());
        let mut waiting: Vec<_> =
            pipes.chain([ended]).map(|it| PollFd::new(it, PollFlags::IN)).collect();
        match poll(&mut waiting, most) {
            Err(Errno::INTR) => return Ok(Round::Read),
            Ok(0) => return Ok(Round::Silent),
            result => drop(result?),
        }
        let is_ready = |(at, fd): (&usize, &PollFd<'_>)| (!fd.revents().is_empty()).then_some(*at);
        open.iter().zip(&waiting).filter_map(is_ready).collect()
    };
    if ready.is_empty() {
        return Ok(Round::Over);
    }
    for at in ready {
        let Some(reader) = &mut readers[at] else { continue };
        match reader.read(bytes) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
            Ok(0) => readers[at] = None,
            Ok(count) => sink(at, &bytes[..count])?,
        }
    }
    Ok(Round::Read)
}

/// Returns the program's user and group on the host, or `None` if the container's ids are mapped.
fn owner(spec: &RuntimeSpec, process: &SpecProcess) -> Option<(u32, u32)> {
    spec.linux.uid_mappings.is_empty().then_some((process.user.uid, process.user.gid))
}

/// Returns a copy of the descriptor if `harm` applies to its file.
fn harmed(stream: BorrowedFd<'_>, harm: Harm) -> io::Result<Option<File>> {
    let stat = rustix::fs::fstat(stream)?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    let is_harmed = match harm {
        // Data in append mode is always written to the end of the file, so the position does not matter.
        Harm::Positions => {
            kind.is_file() && !rustix::fs::fcntl_getfl(stream)?.contains(OFlags::APPEND)
        }
        Harm::Owners(_) if kind.is_fifo() || kind.is_socket() => false,
        // A thread that reads a terminal for the program would take input that is typed for the next program, and
        // would be stopped in the background.
        Harm::Owners(Some((0, _))) if rustix::termios::isatty(stream) => false,
        Harm::Owners(owner) => owner != Some((stat.st_uid, stat.st_gid)),
        Harm::Reads => rustix::termios::isatty(stream),
    };
    is_harmed.then(|| stream.try_clone_to_owned().map(File::from)).transpose()
}

fn same_file(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> io::Result<bool> {
    let (one, other) = (rustix::fs::fstat(one)?, rustix::fs::fstat(other)?);
    Ok((one.st_dev, one.st_ino) == (other.st_dev, other.st_ino))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a program that reads three bytes and writes to both outputs, with files at the positions that a shell
    /// leaves.
    #[test]
    fn what_is_in_files_stays() {
        let file = |text: &str, at: u64| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(text.as_bytes()).unwrap();
            file.seek(SeekFrom::Start(at)).unwrap();
            file
        };
        let text = |file: &mut File| {
            let mut text = String::new();
            file.rewind().unwrap();
            file.read_to_string(&mut text).unwrap();
            text
        };
        let run = |input: &File, output: &File, error: &File| {
            let mut command = Command::new("sh");
            command.args(["-c", "head -c 3; echo err >&2; echo out"]);
            let streams = Streams::between(
                &mut command,
                Harm::Positions,
                input.as_fd(),
                output.as_fd(),
                error.as_fd(),
            );
            // The program simulates a runtime that ignores positions: it sees only pipes.
            command.env_clear().env("PATH", std::env::join_paths(["/usr/bin", "/bin"]).unwrap());
            assert!(command.status().unwrap().success());
            drop(command);
            streams.unwrap().finish().unwrap();
        };
        let input = file("skipped-read", 8);
        let (mut output, mut error) = (file("before\n", 7), file("xxxxxxxxxx", 2));
        run(&input, &output, &error);
        // The next program can read the unread rest.
        let mut rest = String::new();
        (&input).read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "d");
        // The next program continues at the position.
        output.write_all(b"after\n").unwrap();
        assert_eq!(text(&mut output), "before\nreaout\nafter\n");
        assert_eq!(text(&mut error), "xxerr\nxxxx");
        let (input, mut both) = (file("abc", 0), file("", 0));
        run(&input, &both, &both.try_clone().unwrap());
        assert_eq!(text(&mut both), "abcerr\nout\n");
    }

    #[test]
    fn who_lives_on_is_not_waited_for() {
        let mut file = tempfile::tempfile().unwrap();
        let null = File::open("/dev/null").unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo out; sleep 30 2>&- & echo $! >&2"]);
        let streams = Streams::between(
            &mut command,
            Harm::Positions,
            null.as_fd(),
            file.as_fd(),
            null.as_fd(),
        );
        let output = command.stderr(std::process::Stdio::piped()).output().unwrap();
        let pid: i32 = String::from_utf8(output.stderr).unwrap().trim().parse().unwrap();
        drop(command);
        streams.unwrap().finish().unwrap();
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "out\n");
    }

    #[test]
    fn a_pump_has_a_thread_only_while_data_arrives() {
        let (reader, mut writer) = io::pipe().unwrap();
        let passed = Arc::new(Mutex::new(Vec::new()));
        let sink = {
            let passed = Arc::clone(&passed);
            move |_: usize, bytes: &[u8]| {
                passed.lock().unwrap().extend_from_slice(bytes);
                Ok(())
            }
        };
        let mut pump = Pump::with(vec![reader], sink, Duration::from_millis(1)).unwrap();
        let arrival = pump.arrival().unwrap();
        pump.look().unwrap();
        assert!(pump.thread.is_none());
        for (text, all) in [("one", "one"), ("two", "onetwo")] {
            writer.write_all(text.as_bytes()).unwrap();
            poll(&mut [PollFd::new(&arrival, PollFlags::IN)], None).unwrap();
            pump.look().unwrap();
            // It ends by itself, and not before everything is passed on.
            let thread = pump.thread.take().unwrap();
            thread.join().unwrap().unwrap();
            assert_eq!(*passed.lock().unwrap(), all.as_bytes());
            pump.look().unwrap();
            assert!(pump.thread.is_none());
        }
        // Also without a thread, and although the writer stays open, the rest is passed on at the end.
        writer.write_all(b"three").unwrap();
        pump.finish().unwrap();
        assert_eq!(*passed.lock().unwrap(), b"onetwothree");
    }

    #[test]
    fn a_pump_ends_with_a_thread_that_waits_for_more() {
        let (reader, mut writer) = io::pipe().unwrap();
        let (said, heard) = std::sync::mpsc::channel();
        let sink =
            move |_: usize, bytes: &[u8]| said.send(bytes.to_vec()).map_err(io::Error::other);
        let mut pump = Pump::with(vec![reader], sink, Duration::from_secs(1000)).unwrap();
        writer.write_all(b"one").unwrap();
        pump.look().unwrap();
        assert_eq!(heard.recv().unwrap(), b"one");
        // A thread passes this on, so that there is nothing to do here.
        writer.write_all(b"two").unwrap();
        pump.look().unwrap();
        assert_eq!(heard.recv().unwrap(), b"two");
        pump.finish().unwrap();
        assert!(heard.recv().is_err());
    }

    /// A pipe that has ended, and one that has data while a thread runs, must not start another thread.
    #[test]
    fn a_pump_keeps_pipes_apart() {
        let (out_reader, mut out) = io::pipe().unwrap();
        let (error_reader, mut errors) = io::pipe().unwrap();
        let (said, heard) = std::sync::mpsc::channel();
        let sink = move |at: usize, bytes: &[u8]| {
            said.send((at, bytes.to_vec())).map_err(io::Error::other)
        };
        let readers = vec![out_reader, error_reader];
        let mut pump = Pump::with(readers, sink, Duration::from_millis(1)).unwrap();
        let arrival = pump.arrival().unwrap();
        let is_ready = || {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            poll(&mut [PollFd::new(&arrival, PollFlags::IN)], Some(&now)).unwrap() > 0
        };
        for _ in 0..3 {
            out.write_all(b"out").unwrap();
            errors.write_all(b"err").unwrap();
            assert!(is_ready());
            pump.look().unwrap();
            pump.thread.take().unwrap().join().unwrap().unwrap();
            let mut found: Vec<_> = heard.try_iter().collect();
            found.sort();
            assert_eq!(found, [(0, b"out".to_vec()), (1, b"err".to_vec())]);
            assert!(!is_ready());
        }
        drop(out);
        // A child of another test may have the pipe open until it executes its program.
        poll(&mut [PollFd::new(&arrival, PollFlags::IN)], None).unwrap();
        pump.look().unwrap();
        pump.thread.take().unwrap().join().unwrap().unwrap();
        assert!(!is_ready(), "the end of a pipe is reported once");
        errors.write_all(b"last").unwrap();
        assert!(is_ready());
        pump.look().unwrap();
        errors.write_all(b"more").unwrap();
        pump.finish().unwrap();
        assert!(heard.try_iter().map(|it| it.1).collect::<Vec<_>>().concat() == b"lastmore");
    }

    #[test]
    fn a_full_disk_is_told() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        assert!(
            harmed(full.as_fd(), Harm::Positions).unwrap().is_none(),
            "a device has no position"
        );
        // A file that is not open for writing replaces the full disk.
        let file = tempfile::NamedTempFile::new().unwrap();
        let output = File::open(file.path()).unwrap();
        let (input, error) = (File::open("/dev/null").unwrap(), File::open("/dev/null").unwrap());
        let mut command = Command::new("echo");
        let streams = Streams::between(
            &mut command,
            Harm::Positions,
            input.as_fd(),
            output.as_fd(),
            error.as_fd(),
        )
        .unwrap();
        command.arg("lost").spawn().unwrap().wait().unwrap();
        drop(command);
        let kind = streams.finish().unwrap_err().raw_os_error();
        assert_eq!(kind, Some(Errno::BADF.raw_os_error()));
    }
}
