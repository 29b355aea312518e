//! The state of a detached container: a file in its folder, written by its monitor.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;

use kernel::process::{Exit, Process, ProcessIdentity};
use serde::{Deserialize, Serialize};

use crate::folder::{CODE, STATE, STATE_BEFORE, STATE_NEXT};

/// Word in the code's file if the disk has lost data of the container.
const LOST: &str = "lost";
/// Sizes in bytes, large enough for `255 lost timeout` and for a state.
const CODE_MAX: usize = 16;
const STATE_MAX: usize = 4096;

/// State of a container. Times are in seconds since 1970.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Pid of the monitor.
    pub monitor: u32,
    /// Pid of the container's first process on the host.
    pub pid: u32,
    /// Identity of that process, because its pid may have been reused.
    #[serde(default, with = "identity")]
    pub process: Option<ProcessIdentity>,
    /// Time of the start.
    pub started: i64,
    /// Signal that asks the container to end, as the image names it.
    pub stop_signal: String,
    /// Time of the end; `None` while the container runs.
    pub finished: Option<i64>,
    /// Exit code, as shells have it; `None` while the container runs, and if its monitor was killed.
    pub code: Option<i32>,
    /// Whether the disk has lost some of the container's writes.
    #[serde(default)]
    pub lost: bool,
    /// The reason for the end, unless the program ended by itself.
    #[serde(default)]
    pub reason: Option<Reason>,
    /// Seconds that `stop` waits before it kills, if the caller set them.
    #[serde(default)]
    pub stop_timeout: Option<u32>,
    /// Size of the writable layer at the end, in bytes; `None` while it runs, and for a directory of the host.
    #[serde(default)]
    pub written: Option<u64>,
    /// Number of restarts by the monitor. `None` for a container without a restart policy.
    #[serde(default)]
    pub restarts: Option<u32>,
    /// How the last run ended, while the monitor waits before the next one.
    #[serde(default)]
    pub delay: Option<RestartDelay>,
}

/// The last run of a container whose program is about to be started again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestartDelay {
    /// Time of the end, in seconds since 1970.
    pub finished: i64,
    /// Exit code, as shells have it.
    pub code: i32,
    /// The reason for the end, unless the program ended by itself.
    pub reason: Option<Reason>,
}

/// The identity of a process as a text, or null. A text of another version identifies no process.
mod identity {
    use kernel::process::ProcessIdentity;
    use serde::{Deserialize as _, Deserializer, Serializer};

    #[expect(clippy::ref_option, reason = "serde passes the field")]
    pub(super) fn serialize<S: Serializer>(
        process: &Option<ProcessIdentity>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match process {
            Some(process) => serializer.collect_str(process),
            None => serializer.serialize_none(),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<ProcessIdentity>, D::Error> {
        let text = Option::<String>::deserialize(deserializer)?;
        Ok(text.and_then(|it| it.parse().ok()))
    }
}

/// The reason for the end of a container whose program did not end by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reason {
    /// Quire, because the timeout was over.
    Timeout,
    /// The kernel, because the container was out of memory.
    Memory,
}

impl Reason {
    /// Returns a short text for tables.
    #[must_use]
    pub const fn short(self) -> &'static str {
        match self {
            Self::Timeout => "timed out",
            Self::Memory => "out of memory",
        }
    }

    /// Returns a word for programs.
    const fn word(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::Memory => "memory",
        }
    }

    /// Returns a sentence for users.
    #[must_use]
    pub const fn sentence(self) -> &'static str {
        match self {
            Self::Timeout => "the container was killed, because its time was over (--timeout)",
            Self::Memory => {
                "the container ran out of memory, and the kernel killed its program (--memory \
                sets its limit)"
            }
        }
    }
}

/// State of a container whose start is not complete, from before the start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StateBefore {
    /// The start is not a start in the folder of an earlier container, or it is complete.
    None,
    /// The container was created, and has never run.
    Created,
    /// The container had ended.
    Ended(State),
    /// A crash of the host has truncated the file.
    Unknown,
}

impl StateBefore {
    /// Reads the state from the folder.
    pub fn load(folder: &Path) -> std::io::Result<Self> {
        let bytes = match std::fs::read(folder.join(STATE_BEFORE)) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Self::None),
            Err(error) => return Err(error),
        };
        Ok(match serde_json::from_slice::<Option<State>>(&bytes) {
            Ok(None) => Self::Created,
            Ok(Some(state)) => Self::Ended(state),
            Err(_) => Self::Unknown,
        })
    }

    /// Records that a container was created without being started.
    pub(crate) fn note_created(folder: &Path) -> std::io::Result<()> {
        std::fs::write(folder.join(STATE_BEFORE), "null")
    }

    /// Whether the container stays, although it has no state.
    #[must_use]
    pub(crate) fn exists(folder: &Path) -> bool {
        folder.join(STATE_BEFORE).exists()
    }

    /// Puts the state of a container that has ended aside, because the container is being started again. From now on,
    /// it counts as not started, and its exit code is unknown to new readers. `wait` may still read the old code,
    /// because it has the file open.
    #[expect(
        clippy::disallowed_methods,
        reason = "after a crash of the host, either name has the state"
    )]
    pub(crate) fn put_aside(folder: &Path) -> std::io::Result<()> {
        let path = folder.join(STATE);
        let state = match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).ok(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        // On a full disk, perhaps only the exit code was recorded.
        if let Some(whole) = State::load(folder)?
            && state.as_ref() != Some(&whole)
        {
            whole.save(folder)?;
        }
        std::fs::rename(path, folder.join(STATE_BEFORE))?;
        remove_if_there(&folder.join(CODE))
    }

    /// Restores the state after a start that has failed. Has no effect if the start was complete.
    #[expect(
        clippy::disallowed_methods,
        reason = "after a crash of the host, either name has the state"
    )]
    pub(crate) fn restore(folder: &Path) -> std::io::Result<()> {
        if matches!(Self::load(folder)?, Self::Ended(_)) && !folder.join(STATE).exists() {
            remove_if_there(&folder.join(CODE))?;
            std::fs::rename(folder.join(STATE_BEFORE), folder.join(STATE))?;
        }
        Ok(())
    }
}

fn remove_if_there(path: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// How a container ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct End {
    /// Exit of the program, or the exit code that replaces it.
    pub exit: Exit,
    /// Reason, unless the program ended by itself.
    pub reason: Option<Reason>,
}

impl State {
    /// Reads the state from the folder. `None` before the container has started, and if a crash of the host has
    /// truncated the file. If the disk was full, perhaps only the exit code was recorded, and the end is then read
    /// from that record.
    pub fn load(folder: &Path) -> std::io::Result<Option<Self>> {
        let mut state: Option<Self> = match std::fs::read(folder.join(STATE)) {
            Ok(bytes) => serde_json::from_slice(&bytes).ok(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        if let Some(state) = state.as_mut().filter(|it| it.finished.is_none())
            && let Some(code) = Code::open(folder)?
            && let Some((number, words)) = code.look()
        {
            (state.code, state.finished) = (Some(number), Some(code.0.metadata()?.mtime()));
            state.lost = words.contains(LOST);
            let reasons = [Reason::Timeout, Reason::Memory];
            state.reason = reasons.into_iter().find(|it| words.contains(it.word()));
        }
        Ok(state)
    }

    /// Records the start, and reserves the resources to record the end: space, because the container may fill the
    /// disk, and a descriptor, because all may be in use.
    pub fn begin(&self, folder: &Path) -> std::io::Result<Code> {
        let code = File::create(folder.join(CODE))?;
        code.write_all_at(&[b' '; CODE_MAX], 0)?;
        self.save(folder)?;
        if let Err(error) = std::fs::write(folder.join(STATE_NEXT), [b' '; STATE_MAX]) {
            // If this file exists, the container counts as started.
            std::fs::remove_file(folder.join(STATE))?;
            return Err(error);
        }
        // If this fails, the file is ignored, because there is a newer state.
        drop(std::fs::remove_file(folder.join(STATE_BEFORE)));
        Ok(Code(code))
    }

    /// Takes over a program that runs since `now`.
    pub(crate) fn note_run(&mut self, process: &Process, now: i64) {
        let pid = process.pid();
        self.pid = pid.as_raw_nonzero().get().unsigned_abs();
        self.process = ProcessIdentity::from_pid(pid);
        (self.started, self.delay) = (now, None);
    }

    /// Records another run of the program after [`begin`](Self::begin).
    pub(crate) fn begin_again(&self, folder: &Path) -> std::io::Result<()> {
        self.save(folder)?;
        // Without this reserve, a full disk leaves only the exit code.
        drop(std::fs::write(folder.join(STATE_NEXT), [b' '; STATE_MAX]));
        Ok(())
    }

    /// Records the end of a run after which the program is started again.
    pub(crate) fn pause(&mut self, end: End, now: i64, folder: &Path) {
        let (code, reason) = (end.exit.shell_code(), end.reason);
        self.delay = Some(RestartDelay { finished: now, code, reason });
        if let Err(error) = self.begin_again(folder) {
            tracing::debug!(%error, "cannot record that the program is started again");
        }
    }

    /// Writes the state atomically: a reader sees the old or the new one.
    #[expect(
        clippy::disallowed_methods,
        reason = "a container does not survive a crash of the host"
    )]
    fn save(&self, folder: &Path) -> std::io::Result<()> {
        let next = folder.join(STATE_NEXT);
        let bytes = serde_json::to_vec(self)?;
        // The file is not truncated before it is written, because its space could be taken by other files.
        let file = File::options().write(true).create(true).truncate(false).open(&next)?;
        file.write_all_at(&bytes, 0)?;
        file.set_len(bytes.len() as u64)?;
        std::fs::rename(next, folder.join(STATE))
    }

    /// Records the end; `exit` is `None` if it is unknown.
    pub fn finish(&mut self, exit: Option<Exit>, now: i64, folder: &Path) -> std::io::Result<()> {
        // The monitor may have been killed between two runs.
        let last = self.delay.take().map(|it| it.code);
        self.finished = Some(now);
        self.code = exit.map(Exit::shell_code).or(last);
        self.save(folder)
    }
}

/// Exit code of a container, for commands that wait for a container that is removed at its end.
#[derive(Debug)]
pub struct Code(File);

impl Code {
    /// Opens the code while the container lives; `None` if it has not started.
    pub fn open(folder: &Path) -> std::io::Result<Option<Self>> {
        match File::open(folder.join(CODE)) {
            Ok(file) => Ok(Some(Self(file))),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Records the end once more. Call this after the state was saved or could not be saved, because a reader that
    /// finds a code does not read the state.
    pub fn note(&self, state: &State) -> std::io::Result<()> {
        let Some(code) = state.code else { return Ok(()) };
        let lost = state.lost.then_some(LOST);
        let words = lost.into_iter().chain(state.reason.map(Reason::word));
        let words: Vec<_> =
            [code.to_string()].into_iter().chain(words.map(str::to_owned)).collect();
        self.0.write_all_at(words.join(" ").as_bytes(), 0)
    }

    /// Returns the exit code, as shells have it; `None` if it is unknown, or not yet known.
    #[must_use]
    pub fn read(&self) -> Option<i32> {
        self.look().map(|(code, _)| code)
    }

    fn look(&self) -> Option<(i32, String)> {
        let mut bytes = [0; CODE_MAX];
        let length = self.0.read_at(&mut bytes, 0).ok()?;
        let text = std::str::from_utf8(&bytes[..length]).ok()?.trim();
        let (code, words) = text.split_once(' ').unwrap_or((text, ""));
        Some((code.parse().ok()?, words.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_saved_is_loaded() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(State::load(folder.path()).unwrap(), None);
        let mut state = State {
            monitor: 1,
            pid: 2,
            process: ProcessIdentity::from_pid(rustix::process::getpid()),
            started: 3,
            stop_signal: "SIGINT".to_owned(),
            finished: None,
            code: None,
            lost: false,
            reason: Some(Reason::Timeout),
            stop_timeout: None,
            written: None,
            restarts: Some(0),
            delay: None,
        };
        assert!(Code::open(folder.path()).unwrap().is_none());
        let end = state.begin(folder.path()).unwrap();
        assert_eq!(State::load(folder.path()).unwrap(), Some(state.clone()));
        let code = Code::open(folder.path()).unwrap().unwrap();
        assert_eq!(code.read(), None);
        state.finish(Some(Exit::Signal(9)), 7, folder.path()).unwrap();
        assert_eq!(end.read(), None);
        end.note(&state).unwrap();
        let loaded = State::load(folder.path()).unwrap().unwrap();
        assert_eq!((loaded.finished, loaded.code), (Some(7), Some(137)));
        std::fs::remove_file(folder.path().join(CODE)).unwrap();
        assert_eq!(code.read(), Some(137));
        std::fs::write(folder.path().join(STATE), "{").unwrap();
        assert_eq!(State::load(folder.path()).unwrap(), None);
    }

    fn ended(code: i32) -> State {
        let text = r#"{"monitor":1,"pid":2,"started":3,"stop_signal":"TERM"}"#;
        let state = serde_json::from_str::<State>(text).unwrap();
        State { finished: Some(4), code: Some(code), ..state }
    }

    #[test]
    fn a_state_from_before_a_start_comes_back_if_the_start_fails() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let before = || StateBefore::load(folder).unwrap();
        // Without a state, there is no file to put aside.
        StateBefore::put_aside(folder).unwrap();
        StateBefore::restore(folder).unwrap();
        assert_eq!((before(), StateBefore::exists(folder)), (StateBefore::None, false));
        StateBefore::note_created(folder).unwrap();
        StateBefore::restore(folder).unwrap();
        assert_eq!((before(), StateBefore::exists(folder)), (StateBefore::Created, true));
        assert_eq!(State::load(folder).unwrap(), None);
        let code = ended(0).begin(folder).unwrap();
        assert_eq!(before(), StateBefore::None);
        code.note(&ended(5)).unwrap();
        ended(5).save(folder).unwrap();
        let code = Code::open(folder).unwrap().unwrap();
        for _ in 0..2 {
            StateBefore::put_aside(folder).unwrap();
            assert_eq!(
                (before(), State::load(folder).unwrap()),
                (StateBefore::Ended(ended(5)), None)
            );
            assert!(Code::open(folder).unwrap().is_none());
        }
        assert_eq!(code.read(), Some(5));
        StateBefore::restore(folder).unwrap();
        assert_eq!((before(), State::load(folder).unwrap()), (StateBefore::None, Some(ended(5))));
        // A start that is complete is not undone.
        StateBefore::put_aside(folder).unwrap();
        std::fs::copy(folder.join(STATE_BEFORE), folder.join("copy")).unwrap();
        drop(ended(6).begin(folder).unwrap());
        std::fs::copy(folder.join("copy"), folder.join(STATE_BEFORE)).unwrap();
        StateBefore::restore(folder).unwrap();
        assert_eq!(State::load(folder).unwrap(), Some(ended(6)));
        std::fs::write(folder.join(STATE_BEFORE), [0; 100]).unwrap();
        assert_eq!(before(), StateBefore::Unknown);
    }

    /// The exit code is not lost with the file that is removed.
    #[test]
    fn a_state_is_complete_before_it_is_put_aside() {
        let folder = tempfile::tempdir().unwrap();
        let running = State { finished: None, code: None, ..ended(0) };
        let code = running.begin(folder.path()).unwrap();
        code.note(&ended(7)).unwrap();
        StateBefore::put_aside(folder.path()).unwrap();
        let StateBefore::Ended(state) = StateBefore::load(folder.path()).unwrap() else { panic!() };
        assert_eq!(state.code, Some(7));
    }

    #[test]
    fn an_end_whose_state_cannot_be_written_is_known_by_its_code() {
        let folder = tempfile::tempdir().unwrap();
        let bytes =
            r#"{"monitor":1,"pid":2,"started":3,"stop_signal":"TERM","finished":null,"code":null}"#;
        let mut state: State = serde_json::from_str(bytes).unwrap();
        let end = state.begin(folder.path()).unwrap();
        // A directory blocks the name of the state's new file.
        std::fs::remove_file(folder.path().join(STATE_NEXT)).unwrap();
        std::fs::create_dir(folder.path().join(STATE_NEXT)).unwrap();
        for (lost, reason) in
            [(true, Some(Reason::Timeout)), (false, Some(Reason::Memory)), (false, None)]
        {
            (state.lost, state.reason) = (lost, reason);
            state.finish(Some(Exit::Code(255)), 7, folder.path()).unwrap_err();
            end.0.write_all_at(&[b' '; CODE_MAX], 0).unwrap();
            assert_eq!(State::load(folder.path()).unwrap().unwrap().finished, None);
            end.note(&state).unwrap();
            let loaded = State::load(folder.path()).unwrap().unwrap();
            assert_eq!((loaded.code, loaded.lost, loaded.reason), (Some(255), lost, reason));
            let written = std::fs::metadata(folder.path().join(CODE)).unwrap();
            assert_eq!(loaded.finished, Some(written.mtime()));
            assert_eq!(written.len(), CODE_MAX as u64);
        }
    }
}
