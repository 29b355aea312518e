//! `run` with a terminal: a monitor in the background watches the container, while this process copies the terminal
//! until the container ends or the caller detaches.

use std::io::IsTerminal as _;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use container::life::background;
use container::life::monitor_report::{self, EndReport, MonitorReport};
use container::life::prepare::Ready;
use container::life::running::Seat;
use container::life::terminal::{
    Attached, Events, Left, SHORT_MOMENT, TerminalLog, is_spared_interrupts, link,
};
use kernel::process::{Pid, Process, ProcessError, Requests, Signal, start_behind};
use kernel::terminal::{Modes, Receiver};

use super::not_started;
use crate::Answer;
use crate::output::report;
use crate::session::context::{Context, now};
use crate::verbs::containers::volumes::unneeded;

pub(super) fn run(context: &Context, ready: Ready) -> anyhow::Result<Answer> {
    let (input, output) = (std::io::stdin(), std::io::stdout());
    let (id, path, signals) =
        (ready.id().to_owned(), ready.path().to_owned(), Arc::clone(ready.signals()));
    let modes = || {
        let modes = input.is_terminal().then(|| Modes::save(input.as_fd())).transpose();
        modes.context("cannot read the settings of the terminal")
    };
    let receiver = Receiver::new(&path)
        .with_context(|| format!("cannot make a socket for the terminal in {}", path.display()))?;
    let (link, keeper) = link().context("cannot talk to the container's monitor")?;
    let seat = Seat { console: receiver.path(), keeper, modes: modes()? };
    let mut link = Some(link);
    let log = ready.terminal_log();
    // The monitor changes its working directory.
    let store = ready.leaves_volumes().then(|| context.store_directory()).transpose()?;
    let (report, monitor) = {
        let link = &mut link;
        start_behind(|report| {
            // The caller must have the only copy of its end.
            drop(link.take());
            ready.watch(report, Some(seat), &|| now().0);
            if let Some(store) = &store {
                unneeded::clear_unneeded_in(context, store);
            }
        })?
    };
    // The modes are read again after the fork, so that the monitor has no copy of this value. The monitor must not
    // keep a terminal open that is no longer used.
    let modes = modes()?;
    let mut events = Caller {
        context,
        id: &id,
        folder: &path,
        monitor: &monitor,
        requests: Requests::default(),
        is_asked: None,
        log,
    };
    let attached = Attached {
        input: input.as_fd(),
        output: output.as_fd(),
        signals: &signals,
        over: report.as_fd(),
        can_detach: true,
    };
    let mut said = MonitorReport::new(&id, report.try_clone()?);
    let master = attached.wait(&receiver, &mut events)?;
    drop(receiver);
    let Some(master) = master else {
        return not_started(said.not_started(events.is_asked)?);
    };
    // The monitor reports the start, and after that reports only the end.
    if let Some(failure) = said.start(&signals, &mut |signal| events.signal(signal))? {
        return not_started(monitor_report::not_started(events.id, &failure, events.is_asked)?);
    }
    let (left, master) = attached.copy(modes.as_ref(), master, &mut events)?;
    if let (Left::Detached, Some(master), Some(link)) = (left, &master, link.take()) {
        link.leave(master.as_fd()).context("the container's monitor exited")?;
        report::error_line("");
        context.remark(&format!("container {id} keeps running: `quire stop {id}` stops it"));
        return Ok(Answer::Yes);
    }
    if let Some(link) = link {
        link.done();
    }
    let EndReport { code, remark } = said.end()?;
    if !remark.is_empty() {
        report::error_line(&format!("quire: {remark}"));
    }
    Ok(Answer::Program(code))
}

/// The process at the terminal, which receives signals.
struct Caller<'a> {
    context: &'a Context,
    id: &'a str,
    folder: &'a Path,
    monitor: &'a Process,
    /// Number of requests to end the container.
    requests: Requests,
    is_asked: Option<Signal>,
    /// `None` if the container is removed at its end.
    log: Option<TerminalLog>,
}

impl Caller<'_> {
    /// Prints a remark while the terminal is in raw mode.
    fn remark(&self, text: &str) {
        if !self.context.quiet {
            report::error_line_raw(&format!("quire: {text}"));
        }
    }

    fn kill(&self) {
        if let Err(error) = background::signal(self.folder, self.id, "KILL") {
            self.remark(&error);
        }
    }
}

impl Events for Caller<'_> {
    fn output(&mut self, bytes: &[u8]) {
        if let Some(log) = &mut self.log {
            log.write(bytes);
        }
    }

    fn signal(&mut self, signal: Signal) -> Result<(), ProcessError> {
        // The monitor forwards the signal, or cancels the start. It may have exited.
        let _heard = self.monitor.signal(signal);
        if matches!(signal, Signal::HUP | Signal::INT | Signal::QUIT | Signal::TERM) {
            self.is_asked = Some(signal);
        }
        if let Some(requests) = self.requests.add(signal) {
            match requests {
                0 | 1 => {}
                2 => self.remark("the container was signalled twice: a third signal kills it"),
                _ => self.kill(),
            }
        }
        Ok(())
    }

    fn interrupted(&mut self, group: Pid, since: Option<Duration>) {
        if !is_spared_interrupts(self.folder, group) {
            return;
        }
        match since {
            Some(since) if since < SHORT_MOMENT => self.kill(),
            _ => self
                .remark("the program does not handle Ctrl-C: press it again to kill the program"),
        }
    }
}
