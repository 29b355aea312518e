//! The state of a detached container: one file in its folder, written by its monitor.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;

use kernel::process::{Exit, ProcessIdentity};
use serde::{Deserialize, Serialize};

use crate::folder::{CODE, STATE, STATE_NEXT};

/// In it, of a container of which the disk has lost something.
const LOST: &str = "lost";
/// At least as many bytes as that takes, as `255 lost timeout`, and a state.
const CODE_MAX: usize = 16;
const STATE_MAX: usize = 4096;

/// How a container is doing. Times are seconds since 1970.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The process that watches over it.
    pub monitor: u32,
    /// Its first process, as the host numbers it.
    pub pid: u32,
    /// The name of that process: its number may be another one's by now.
    #[serde(default, with = "identity")]
    pub process: Option<ProcessIdentity>,
    /// Since when it runs.
    pub started: i64,
    /// The signal that asks it to end, as the image names it.
    pub stop_signal: String,
    /// Since when it does not.
    pub finished: Option<i64>,
    /// Its exit code, as shells have it; none as long as it runs, and when its monitor was killed.
    pub code: Option<i32>,
    /// Whether the disk has lost some of its writes.
    #[serde(default)]
    pub lost: bool,
    /// Who ended it, if its program did not.
    #[serde(default)]
    pub reason: Option<Reason>,
    /// For how many seconds `stop` waits before it kills, if that was said.
    #[serde(default)]
    pub stop_timeout: Option<u32>,
    /// Size of its writable layer at the end, in bytes; `None` while it runs, and for a directory of the host.
    #[serde(default)]
    pub written: Option<u64>,
}

/// The name of a process as a text, or null. A text of another version names no process.
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

/// Who ended a container, if its program did not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reason {
    /// Quire: its time was over.
    Timeout,
    /// The kernel: there was no memory left for it.
    Memory,
}

impl Reason {
    /// In few words, for tables.
    #[must_use]
    pub const fn short(self) -> &'static str {
        match self {
            Self::Timeout => "timed out",
            Self::Memory => "out of memory",
        }
    }

    /// For programs.
    const fn word(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::Memory => "memory",
        }
    }

    /// In a sentence.
    #[must_use]
    pub const fn sentence(self) -> &'static str {
        match self {
            Self::Timeout => "the container was killed, since its time was over (--timeout)",
            Self::Memory => {
                "the container ran out of memory, and the kernel killed its program (--memory sets its limit)"
            }
        }
    }
}

/// How a container ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct End {
    /// As its program did, or in the place of that.
    pub exit: Exit,
    /// Why, if it was not the program's own doing.
    pub reason: Option<Reason>,
}

impl State {
    /// Reads the state from the folder; `None` before the container has started, and if a crash of the host cut the
    /// file short. On a full disk only the exit code may have been recorded: the state then has the end from there.
    ///
    /// # Errors
    /// An error of the disk.
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

    /// Records the start, and reserves what it takes to record the end: space, since the container may fill the disk,
    /// and a descriptor, since there may be none left.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn begin(&self, folder: &Path) -> std::io::Result<Code> {
        let code = File::create(folder.join(CODE))?;
        code.write_all_at(&[b' '; CODE_MAX], 0)?;
        self.save(folder)?;
        if let Err(error) = std::fs::write(folder.join(STATE_NEXT), [b' '; STATE_MAX]) {
            // A container that has this has started.
            std::fs::remove_file(folder.join(STATE))?;
            return Err(error);
        }
        Ok(Code(code))
    }

    /// Writes it: whoever reads sees the old one or this.
    ///
    /// # Errors
    /// An error of the disk.
    #[expect(
        clippy::disallowed_methods,
        reason = "a container does not outlive a crash of the host"
    )]
    fn save(&self, folder: &Path) -> std::io::Result<()> {
        let next = folder.join(STATE_NEXT);
        let bytes = serde_json::to_vec(self)?;
        // Not cut short before it is written, or the room would be anybody's.
        let file = File::options().write(true).create(true).truncate(false).open(&next)?;
        file.write_all_at(&bytes, 0)?;
        file.set_len(bytes.len() as u64)?;
        std::fs::rename(next, folder.join(STATE))
    }

    /// Records the end; `exit` is `None` if it is unknown.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn finish(&mut self, exit: Option<Exit>, now: i64, folder: &Path) -> std::io::Result<()> {
        self.finished = Some(now);
        self.code = exit.map(Exit::shell_code);
        self.save(folder)
    }
}

/// Exit code of a container that is removed at its end.
#[derive(Debug)]
pub struct Code(File);

impl Code {
    /// Opens the code while the container lives; `None` if it has not started.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn open(folder: &Path) -> std::io::Result<Option<Self>> {
        match File::open(folder.join(CODE)) {
            Ok(file) => Ok(Some(Self(file))),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Records the end once more. Call it after the state is saved, or could not be saved: a reader that finds a code
    /// looks no further.
    ///
    /// # Errors
    /// An error of the disk.
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
            process: ProcessIdentity::of(rustix::process::getpid()),
            started: 3,
            stop_signal: "SIGINT".to_owned(),
            finished: None,
            code: None,
            lost: false,
            reason: Some(Reason::Timeout),
            stop_timeout: None,
            written: None,
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

    #[test]
    fn an_end_whose_state_cannot_be_written_is_known_by_its_code() {
        let folder = tempfile::tempdir().unwrap();
        let bytes =
            r#"{"monitor":1,"pid":2,"started":3,"stop_signal":"TERM","finished":null,"code":null}"#;
        let mut state: State = serde_json::from_str(bytes).unwrap();
        let end = state.begin(folder.path()).unwrap();
        // In the way of the state's.
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
