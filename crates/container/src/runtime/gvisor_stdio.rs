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
use std::os::fd::{AsFd as _, BorrowedFd};
use std::process::Command;
use std::thread::JoinHandle;
use std::time::Duration;

use kernel::process::{Signal, Signals};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
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
    /// The runtime reads standard input even if the program does not, so it would be stopped if it is in the
    /// terminal's background.
    Reads,
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
        let harm = match kind {
            Kind::Runsc => Harm::Positions,
            Kind::Crun => Harm::Owners(owner(spec, process)),
            Kind::Runc => Harm::Reads,
        };
        let (input, output, error) = (io::stdin(), io::stdout(), io::stderr());
        Self::between(command, harm, input.as_fd(), output.as_fd(), error.as_fd())
    }

    fn between(
        command: &mut Command,
        harm: Harm,
        input: BorrowedFd<'_>,
        output: BorrowedFd<'_>,
        error: BorrowedFd<'_>,
    ) -> io::Result<Self> {
        let (mut input_thread, mut outputs) = (None, Vec::new());
        let (ended, running) = io::pipe()?;
        if let Some(mut file) = harmed(input, harm)? {
            let (reader, writer) = io::pipe()?;
            command.stdin(reader.try_clone()?);
            let ended = ended.try_clone()?;
            let has_position = file.metadata()?.is_file() && file.stream_position().is_ok();
            let thread = std::thread::spawn(move || {
                let unsent = copy_to_pipe(&mut file, writer, &ended);
                (file, unsent)
            });
            // The thread is joined only for a file with a position. For other files it may block in `read`, because
            // another process may read the data that `poll` has reported.
            input_thread = has_position.then_some(Input { reader, thread });
        }
        let mut through_pipe = |file: Option<File>| {
            let Some(mut file) = file else { return Ok(None) };
            let (reader, writer) = io::pipe()?;
            let ended = ended.try_clone()?;
            let mut sink = move |bytes: &[u8]| file.write_all(bytes);
            outputs.push(std::thread::spawn(move || pass_on(reader, &mut sink, &ended)));
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
        let given_back = self.input.map_or(Ok(()), Input::give_back);
        written.and(given_back)
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

/// A thread that passes the data of a pipe to a function.
#[derive(Debug)]
pub(crate) struct Pump {
    thread: JoinHandle<io::Result<()>>,
    running: PipeWriter,
}

impl Pump {
    pub(crate) fn start(
        reader: PipeReader,
        mut sink: impl FnMut(&[u8]) -> io::Result<()> + Send + 'static,
    ) -> io::Result<Self> {
        let (ended, running) = io::pipe()?;
        // Each container has such a thread, which needs little stack.
        let thread = std::thread::Builder::new().stack_size(128 << 10);
        let thread = thread.spawn(move || pass_on(reader, &mut sink, &ended))?;
        Ok(Self { thread, running })
    }

    /// Waits until all data so far is passed on, even if another process still has the pipe's other end open.
    pub(crate) fn finish(self) -> io::Result<()> {
        drop(self.running);
        match self.thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

/// Passes the data from `reader` to `sink`, up to its end. When the other end of `ended` is closed, only the data
/// that is already in the pipe is passed on.
fn pass_on(
    mut reader: PipeReader,
    sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ended: &PipeReader,
) -> io::Result<()> {
    let mut bytes = vec![0; 1 << 16];
    loop {
        let is_over = {
            let mut waiting =
                [PollFd::new(&reader, PollFlags::IN), PollFd::new(ended, PollFlags::IN)];
            match poll(&mut waiting, None) {
                Err(Errno::INTR) => continue,
                result => result?,
            };
            waiting[0].revents().is_empty()
        };
        let count = match is_over {
            true => Ok(0),
            false => reader.read(&mut bytes),
        };
        let count = match count {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            count => count?,
        };
        match bytes.get(..count) {
            None | Some([]) => return Ok(()),
            Some(bytes) => sink(bytes)?,
        }
    }
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
