//! Records what the start of an image reads, for the hot pack of its index. If the start cannot run, finds the programs
//! and libraries that it needs.
//!
//! The start runs as `quire trace` does, in another process, with a limited time, limited memory, no network and no
//! volumes.

use std::collections::HashSet;
use std::ffi::OsString;
use std::io::Read as _;
use std::ops::RangeInclusive;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use image::digest::Digest;
use image::lazy::hot::BLOCK;
use image::verity::ImageId;
use serde::Serialize;
use store::{DEFAULT_TRACE, Store, StoredTracesError, Trace, TraceRun, TraceStart};
use transfer::StoredImage;
use transfer::lazy::{StartCommand, add_block};

use crate::output::report::{self, Bytes};
use crate::session::context::Context;

/// How long a start is recorded, in seconds.
const TIME: &str = "10";
/// After this time, the recording itself is ended. It includes the time for preparing and removing the container.
const TIME_OF_ALL: Duration = Duration::from_secs(40);
/// How often the recorded process is looked at.
const LOOK: Duration = Duration::from_millis(20);
/// Bounds of the memory limit of a recorded container, in bytes. Programs choose what they read by their memory: a JVM
/// with less than 1792 MiB takes another garbage collector, so a record with less would not fit a container without a
/// limit. Source: OpenJDK 17, `os::is_server_class_machine`.
const MEMORY: RangeInclusive<u64> = 512 << 20..=2 << 30;
/// Part of the host's available memory that a recorded container may have.
const MEMORY_PART: u64 = 4;
/// Name of the trace while a start is recorded.
const RECORDING: &str = "index-start";
/// Longest part of the messages of a failed start that is shown, in bytes.
const MESSAGES_MAX: u64 = 64 << 10;

/// A start that was recorded.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(super) struct RecordedStart {
    /// The command that ran, in the notation of a shell.
    command: String,
    /// Whether it is the image's entrypoint and command.
    is_own: bool,
    /// Whether it could not run, so that the blocks are those of its program and libraries.
    is_closure: bool,
    /// Size of the blocks that it read, or needs.
    bytes: Bytes,
}

impl RecordedStart {
    pub(super) fn line(&self) -> String {
        let (command, size) = (self.command.escape_debug(), report::size(self.bytes.0));
        match self.is_closure {
            false => format!("start of \"{command}\": reads {size}"),
            true => format!("start of \"{command}\": its program and libraries have {size}"),
        }
    }
}

/// The start that a manifest's config describes.
#[derive(Debug)]
pub(super) struct OwnStart {
    /// Digest of the config.
    config: Digest,
    /// Entrypoint and command, in the notation of a shell.
    command: String,
    /// The same, in words.
    words: Vec<String>,
    env: Vec<String>,
    directory: String,
}

impl OwnStart {
    pub(super) fn of(documents: &StoredImage) -> Self {
        let of_image = &documents.config.config;
        let words: Vec<String> = of_image.entrypoint.iter().chain(&of_image.cmd).cloned().collect();
        // A word with NUL cannot be run.
        let command = shlex::try_join(words.iter().map(String::as_str)).unwrap_or_default();
        let (env, directory) = (of_image.env.clone(), of_image.working_dir.clone());
        Self { config: documents.manifest.config.digest, command, words, env, directory }
    }
}

/// Records the starts of an image as its default trace: those of `commands`, or else the image's own start, unless the
/// image has such a trace already. The start of another manifest with the same layers is replaced. If the image's own
/// start cannot be recorded, its program and libraries are the trace. If they are not found either, this only prints a
/// remark, because the index works without a hot pack.
pub(super) fn record(
    context: &Context,
    store: &Store,
    image: &ImageId,
    name: &str,
    commands: &[String],
    own: &OwnStart,
) -> anyhow::Result<Vec<RecordedStart>> {
    let is_own = commands.is_empty();
    forget_recording(store, image)?;
    let before = store.downloads.traces(image)?;
    let before = before.get(DEFAULT_TRACE);
    let of_start = before.and_then(|it| it.start.as_ref());
    let is_of_another =
        of_start.and_then(|it| it.config).is_some_and(|config| config != own.config);
    let can_record = context.who().is_host_root();
    let is_closure = of_start.is_some_and(|it| it.is_closure);
    // A recorded start replaces files that were found without running it.
    if is_own && before.is_some() && !is_of_another && !(is_closure && can_record) {
        return Ok(Vec::new());
    }
    if !can_record {
        ensure!(is_own, "--start: only the host's root may watch reads of files");
        if is_of_another && !is_closure {
            context.remark(
                "the start is not recorded, because only root may watch reads: the hot pack has the start of another \
                 image with the same layers",
            );
            return Ok(Vec::new());
        }
        return without_run(context, store, image, own, "only root may watch reads");
    }
    let all = if is_own { std::slice::from_ref(&own.command) } else { commands };
    // A command that cannot be split is an error before anything runs.
    let words = commands.iter().map(|it| split(it)).collect::<anyhow::Result<Vec<_>>>()?;
    // The image's own command is not repeated, because words of a config can be empty.
    let words = if is_own { vec![Vec::new()] } else { words };
    let (mut recorded, mut runs, mut seen) = (Vec::new(), Vec::new(), HashSet::new());
    for (command, words) in all.iter().zip(words) {
        let read = match record_one(context, store, image, name, &words) {
            Ok(read) => read,
            Err(error) if is_own => {
                forget_recording(store, image)?;
                let why = format!("the start failed: {error:#}");
                return without_run(context, store, image, own, &why);
            }
            Err(error) => return Err(error.context("--start")),
        };
        let bytes = read.iter().map(|it| u64::from(it.blocks) * BLOCK).sum();
        let (command, bytes) = (command.clone(), Bytes(bytes));
        recorded.push(RecordedStart { command, is_own, is_closure: false, bytes });
        // A block that several starts read is listed once, so that the runs have room.
        for run in read {
            for block in run.block..run.block.saturating_add(run.blocks) {
                if seen.insert((run.device, block)) {
                    add_block(&mut runs, TraceRun { block, blocks: 1, ..run });
                }
            }
        }
    }
    forget_recording(store, image)?;
    let config = is_own.then_some(own.config);
    let start = TraceStart { commands: all.to_vec(), config, is_closure: false };
    keep(store, image, runs, start)?;
    Ok(recorded)
}

/// Stores the default trace.
fn keep(
    store: &Store,
    image: &ImageId,
    mut runs: Vec<TraceRun>,
    start: TraceStart,
) -> anyhow::Result<()> {
    let mut traces = store.downloads.traces(image)?;
    runs.truncate(traces.room(DEFAULT_TRACE));
    let start = Some(start.shortened());
    traces.set(Trace { name: DEFAULT_TRACE.to_owned(), runs, start })?;
    Ok(store.downloads.set_traces(image, &traces)?)
}

/// Makes the default trace of an image whose start cannot be recorded, from its program and libraries.
fn without_run(
    context: &Context,
    store: &Store,
    image: &ImageId,
    own: &OwnStart,
    why: &str,
) -> anyhow::Result<Vec<RecordedStart>> {
    let OwnStart { config, command, words, env, directory } = own;
    let start = StartCommand { words, env, directory };
    let find = || -> anyhow::Result<Vec<TraceRun>> {
        Ok(transfer::lazy::closure(&store.open_image(image)?, &start)?)
    };
    let runs = find().unwrap_or_else(|error| {
        context.remark(&format!("cannot find the libraries of the start: {error:#}"));
        Vec::new()
    });
    if runs.is_empty() {
        context.remark(&format!("no hot pack, because {why}"));
        // An earlier trace belongs to another image with the same layers.
        forget(store, image, DEFAULT_TRACE)?;
        return Ok(Vec::new());
    }
    context.remark(&format!(
        "the start is not recorded, because {why}: the hot pack has its program and libraries"
    ));
    let bytes = runs.iter().map(|it| u64::from(it.blocks) * BLOCK).sum();
    let commands = vec![command.clone()];
    keep(store, image, runs, TraceStart { commands, config: Some(*config), is_closure: true })?;
    let (command, bytes) = (command.clone(), Bytes(bytes));
    Ok(vec![RecordedStart { command, is_own: true, is_closure: true, bytes }])
}

/// Removes what an interrupted recording has left.
pub(super) fn forget_recording(store: &Store, image: &ImageId) -> Result<(), StoredTracesError> {
    forget(store, image, RECORDING)
}

fn forget(store: &Store, image: &ImageId, trace: &str) -> Result<(), StoredTracesError> {
    let mut traces = store.downloads.traces(image)?;
    if traces.remove(trace) {
        store.downloads.set_traces(image, &traces)?;
    }
    Ok(())
}

/// Splits a command into words, as a shell does.
fn split(command: &str) -> anyhow::Result<Vec<String>> {
    shlex::split(command)
        .filter(|it| !it.is_empty())
        .with_context(|| format!("--start: \"{}\" is not a command", command.escape_debug()))
}

/// Runs a command, or the image's entrypoint and command. Returns the blocks that it read.
fn record_one(
    context: &Context,
    store: &Store,
    image: &ImageId,
    name: &str,
    words: &[String],
) -> anyhow::Result<Vec<TraceRun>> {
    forget_recording(store, image)?;
    let container = format!("quire-index-{}", std::process::id());
    let directory = context.store_directory()?;
    let mut global: Vec<OsString> = vec!["--store".into(), directory.into()];
    if let Some(policy) = context.policy() {
        global.extend(["--policy".into(), std::path::absolute(policy)?.into()]);
    }
    let mut trace = Command::new("/proc/self/exe");
    trace.args(&global).args(["--quiet", "trace", "--as", RECORDING, "--name", &container]);
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let memory = memory_limit(&meminfo).to_string();
    trace.args(["--rm", "--network", "none", "--writable", "memory", "--memory", &memory]);
    trace.args(["--timeout", TIME]);
    if !words.is_empty() {
        // The command replaces the image's entrypoint as well.
        trace.arg("--entrypoint=");
    }
    trace.args([name, "--"]).args(words);
    trace.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut running = trace.spawn().context("cannot start another process of this program")?;
    let messages = running.stderr.take();
    let started = std::thread::Builder::new().spawn(move || {
        let mut said = Vec::new();
        // The rest is read as well, so that the program does not wait for a full pipe.
        let read = messages.map(|mut it| {
            let part = it.by_ref().take(MESSAGES_MAX).read_to_end(&mut said);
            part.and_then(|_| std::io::copy(&mut it, &mut std::io::sink()))
        });
        let _failed = read.transpose();
        String::from_utf8_lossy(&said).into_owned()
    });
    if started.is_err() {
        let _ended = running.kill().and_then(|()| running.wait());
    }
    let said = started.context("cannot start a thread")?;
    let ended = wait(&mut running, || {
        let mut stop = Command::new("/proc/self/exe");
        stop.args(&global).args(["--quiet", "stop", "--time", "1", &container]);
        let _stopped =
            stop.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    })?;
    let said = said.join().unwrap_or_default();
    let traces = store.downloads.traces(image)?;
    match traces.get(RECORDING) {
        Some(trace) => {
            // A command whose time was over ended with a signal, or with this code of `run --timeout`.
            if let Some(code) = ended.code().filter(|it| !matches!(it, 0 | 255)) {
                context.remark(&format!(
                    "the start ended with exit code {code}: what it read until then is recorded"
                ));
            }
            Ok(trace.runs.clone())
        }
        None => bail!("{}", last_line(&said)),
    }
}

/// Returns the memory limit of a recorded container in bytes, given the text of `/proc/meminfo`.
fn memory_limit(meminfo: &str) -> u64 {
    let available = meminfo.lines().find_map(|line| {
        let kib = line.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB")?;
        kib.parse::<u64>().ok()?.checked_mul(1024)
    });
    (available.unwrap_or(0) / MEMORY_PART).clamp(*MEMORY.start(), *MEMORY.end())
}

/// Waits for the end of a process. If it takes too long, calls `stop` and kills the process.
fn wait(running: &mut Child, stop: impl Fn()) -> anyhow::Result<ExitStatus> {
    let begun = Instant::now();
    loop {
        if let Some(status) = running.try_wait().context("cannot wait for the start")? {
            return Ok(status);
        }
        if begun.elapsed() >= TIME_OF_ALL {
            stop();
            running.kill().context("cannot end the recording of the start")?;
        }
        std::thread::sleep(LOOK);
    }
}

/// Returns the last message of the process.
fn last_line(said: &str) -> String {
    let line = said.lines().rev().map(str::trim).find(|it| !it.is_empty());
    let line = line.unwrap_or("it read no data of the image");
    line.strip_prefix("quire: ").unwrap_or(line).to_owned()
}

#[cfg(test)]
mod tests {
    use image::verity::DeviceId;

    use super::*;

    #[test]
    fn blocks_that_follow_each_other_become_a_run() {
        let device = DeviceId::from_bytes(&[1; 32]).unwrap();
        let other = DeviceId::from_bytes(&[2; 32]).unwrap();
        let block = |device, block| TraceRun { device, block, blocks: 1 };
        let mut runs = Vec::new();
        for it in [block(device, 3), block(device, 4), block(other, 5), block(device, 5)] {
            add_block(&mut runs, it);
        }
        assert_eq!(
            runs,
            [TraceRun { device, block: 3, blocks: 2 }, block(other, 5), block(device, 5)]
        );
    }

    #[test]
    fn a_start_may_have_a_quarter_of_the_hosts_memory() {
        let check = |text: &str, expected: u64| assert_eq!(memory_limit(text), expected, "{text}");
        check("MemTotal:       9 kB\nMemAvailable:    4194304 kB\nBuffers: 1 kB\n", 1 << 30);
        check("MemAvailable:   25165824 kB\n", 2 << 30);
        check("MemAvailable:   1024 kB\n", 512 << 20);
        check("MemAvailable:   18446744073709551615 kB\n", 512 << 20);
        check("", 512 << 20);
    }

    #[test]
    fn the_last_message_is_the_reason() {
        assert_eq!(last_line("quire: one\nquire: two\n\n"), "two");
        assert_eq!(last_line(""), "it read no data of the image");
    }
}
