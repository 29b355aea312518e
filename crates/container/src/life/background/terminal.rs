//! `exec` with a terminal: the runtime creates the terminal and exits, and this process copies the data and waits.

use std::ffi::OsStr;
use std::io::{self, IsTerminal as _};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use kernel::process::{Exit, Pid, Process, ProcessError, Setup, Signal, Signals};
use kernel::terminal::{Modes, Receiver};
use store::OperationError;

use crate::life::monitor::RunError;
use crate::life::terminal::{Attached, Events};
use crate::runtime::Runtime;
use crate::runtime::call::enter;

/// Forwards signals to the program.
struct Pass<'a>(&'a Process);

impl Events for Pass<'_> {
    fn signal(&mut self, signal: Signal) -> Result<(), ProcessError> {
        // The process may have exited just now.
        let _gone = self.0.signal(signal);
        Ok(())
    }

    fn interrupted(&mut self, _group: Pid, _since: Option<Duration>) {
        // The kernel drops interrupts only for a container's first process.
    }
}

/// Runs `exec` on the caller's terminal. `exec` is a runtime's command line without the container's name, and the
/// runtime writes the pid file.
pub(super) fn exec(
    mut exec: Command,
    folder: &Path,
    id: &str,
    runtime: &Runtime,
    pid_file: &Path,
    socket: &Path,
    signals: &Signals,
) -> Result<Exit, RunError> {
    let streams_failed = OperationError::of("forward the standard streams of container", id);
    let runtime_failed = OperationError::at("run", &runtime.path);
    let (input, output) = (io::stdin(), io::stdout());
    let modes = input.is_terminal().then(|| Modes::save(input.as_fd())).transpose();
    let modes = modes.map_err(|errno| streams_failed(errno.into()))?;
    // The container's own terminal, and other calls, have other sockets.
    let name = socket.file_name().and_then(OsStr::to_str).unwrap_or_default();
    let receiver = Receiver::named(folder, name).map_err(streams_failed)?;
    exec.args(["--detach", "--console-socket", &receiver.path()]);
    exec.arg(id).stdin(Stdio::null()).stdout(Stdio::null());
    kernel::process::set_subreaper().map_err(runtime_failed)?;
    enter(runtime, folder).map_err(runtime_failed)?;
    let setup = Setup { signals: Some(signals), ..Setup::default() };
    let child = kernel::process::spawn(exec, &setup).map_err(runtime_failed)?.process;
    let attached = |over| Attached {
        input: input.as_fd(),
        output: output.as_fd(),
        signals,
        over,
        can_detach: false,
    };
    let master = attached(child.as_fd()).wait(&receiver, &mut Pass(&child));
    // The runtime starts the program, or exits with an error, without any action of this process.
    let exit = child.wait();
    let pid = std::fs::read_to_string(pid_file).ok();
    let (master, exit) = (master.map_err(runtime_failed)?, exit.map_err(runtime_failed)?);
    let pid = pid.and_then(|text| text.trim().parse().ok()).and_then(Pid::from_raw);
    let Some(master) = master else { return Ok(exit) };
    let (Exit::Code(0), Some(pid)) = (exit, pid) else {
        // crun writes the error message to the new terminal.
        let copied = attached(child.as_fd()).copy(modes.as_ref(), master, &mut Pass(&child));
        return Ok(copied.map(|_| exit).map_err(runtime_failed)?);
    };
    let program = Process::open(pid).map_err(runtime_failed)?;
    program.adopt().map_err(runtime_failed)?;
    let copied = attached(program.as_fd()).copy(modes.as_ref(), master, &mut Pass(&program));
    copied.map_err(runtime_failed)?;
    Ok(program.wait().map_err(runtime_failed)?)
}
