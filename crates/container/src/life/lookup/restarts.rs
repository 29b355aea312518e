//! Containers whose monitor starts their programs again.

use store::OperationError;

use super::{KnownContainer, KnownError};
use crate::life::background;
use crate::life::state::RestartDelay;

impl KnownContainer {
    /// Returns how the last run ended, if the monitor waits before the next one.
    #[must_use]
    pub fn delay(&self) -> Option<&RestartDelay> {
        self.state.as_ref().filter(|_| self.is_watched()).and_then(|it| it.delay.as_ref())
    }

    /// Returns the number of restarts by the monitor.
    #[must_use]
    pub fn restarts(&self) -> u32 {
        self.state.as_ref().and_then(|it| it.restarts).unwrap_or_default()
    }

    /// Whether the monitor waits before it starts the program again.
    ///
    /// # Errors
    /// If the present state cannot be read.
    pub fn is_restarting(&self) -> Result<bool, KnownError> {
        Ok(self.state_now()?.is_some_and(|it| it.delay.is_some()))
    }

    /// Records that a user stops the container by this signal, as [`background::note_stopped`] does.
    ///
    /// # Errors
    /// [`KnownError::Failed`] if it cannot be recorded.
    pub fn note_stopped(&self, signal: u8) -> Result<(), KnownError> {
        let noted = background::note_stopped(&self.folder, signal);
        Ok(noted.map_err(OperationError::of("record the stop of container", &self.id))?)
    }
}
