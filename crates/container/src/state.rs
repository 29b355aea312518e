//! What is known of a container that outlives its command: one file in its folder, written by its monitor.

use std::path::Path;

use kernel::process::Exit;
use serde::{Deserialize, Serialize};

const STATE: &str = "state.json";

/// How a container is doing. Times are seconds since 1970.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The process that watches over it.
    pub monitor: u32,
    /// Its first process, as the host numbers it.
    pub pid: u32,
    /// Since when it runs.
    pub started: i64,
    /// The signal that asks it to end, as the image names it.
    pub stop_signal: String,
    /// Since when it does not.
    pub finished: Option<i64>,
    /// Its exit code, as shells have it; none as long as it runs, and when its monitor was killed.
    pub code: Option<i32>,
}

impl State {
    /// What the folder has; none before the container has started, and where a crash of the host has cut it short.
    ///
    /// # Errors
    /// The disk's.
    pub fn load(folder: &Path) -> std::io::Result<Option<Self>> {
        match std::fs::read(folder.join(STATE)) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes it: whoever reads sees the old one or this.
    ///
    /// # Errors
    /// The disk's.
    #[expect(
        clippy::disallowed_methods,
        reason = "a container does not outlive a crash of the host"
    )]
    pub fn save(&self, folder: &Path) -> std::io::Result<()> {
        let next = folder.join("state.next");
        std::fs::write(&next, serde_json::to_vec(self)?)?;
        std::fs::rename(next, folder.join(STATE))
    }

    /// Notes the end.
    ///
    /// # Errors
    /// The disk's.
    pub fn finish(&mut self, exit: Option<Exit>, now: i64, folder: &Path) -> std::io::Result<()> {
        self.finished = Some(now);
        self.code = exit.map(Exit::shell_code);
        self.save(folder)
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
            started: 3,
            stop_signal: "SIGINT".to_owned(),
            finished: None,
            code: None,
        };
        state.save(folder.path()).unwrap();
        assert_eq!(State::load(folder.path()).unwrap(), Some(state.clone()));
        state.finish(Some(Exit::Signal(9)), 7, folder.path()).unwrap();
        let loaded = State::load(folder.path()).unwrap().unwrap();
        assert_eq!((loaded.finished, loaded.code), (Some(7), Some(137)));
        std::fs::write(folder.path().join(STATE), "{").unwrap();
        assert_eq!(State::load(folder.path()).unwrap(), None);
    }
}
