//! Removes containers.

use std::collections::VecDeque;
use std::time::Instant;

use store::{ContainerError, OperationError, Store, VolumeLock};

use super::{DEATH, KILL, KnownContainer, KnownError, look};
use crate::backoff::GLANCE;
use crate::life::end::own_volumes::OwnVolumes;
use crate::life::end::teardown;
use crate::life::{background, writable_layer};
use crate::store_ownership::check_containers;

/// Action on a running container for which removal is requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IfRunning {
    /// Return an error and keep the container.
    Refuse,
    /// Kill the container first.
    Kill,
}

/// The removal of containers.
#[expect(missing_debug_implementations, reason = "functions have no debug output")]
#[derive(Clone, Copy)]
pub struct Removal<'a> {
    pub store: &'a Store,
    pub if_running: IfRunning,
    pub own_volumes: OwnVolumes,
    /// Returns the time, in seconds since 1970.
    pub now: &'a dyn Fn() -> i64,
    /// The lock of volumes, if the caller has it.
    pub(crate) held: Option<&'a VolumeLock>,
}

/// Number of containers that are killed before the first of them is gone. Their monitors take them down at the same
/// time. More of them would only wait for the processors.
const AT_ONCE: usize = 16;

impl<'a> Removal<'a> {
    #[must_use]
    pub fn new(
        store: &'a Store,
        if_running: IfRunning,
        own_volumes: OwnVolumes,
        now: &'a dyn Fn() -> i64,
    ) -> Self {
        Self { store, if_running, own_volumes, now, held: None }
    }

    /// Removes a container. Returns whether it existed, and was not removed by another command first.
    ///
    /// # Errors
    /// [`KnownError`]; the container stays.
    pub fn remove(&self, name: &str) -> Result<bool, KnownError> {
        match self.begin(name)? {
            Some(begun) => self.finish(begun),
            None => Ok(false),
        }
    }

    /// Removes containers, and passes each name with its result, as of [`Self::remove`], to `removed`. An error does
    /// not end the removal of the others.
    pub fn remove_all(
        &self,
        names: &[String],
        removed: &mut dyn FnMut(&str, Result<bool, KnownError>),
    ) {
        let mut begun = VecDeque::with_capacity(AT_ONCE);
        if let [name] = names {
            return removed(name, self.remove(name));
        }
        for name in names {
            if begun.len() == AT_ONCE
                && let Some((name, begun)) = begun.pop_front()
            {
                removed(name, self.finish(begun));
            }
            match self.begin(name) {
                Ok(Some(mut known)) => {
                    known.ask();
                    begun.push_back((name, known));
                }
                Ok(None) => removed(name, Ok(false)),
                Err(error) => removed(name, Err(error)),
            }
        }
        for (name, begun) in begun {
            removed(name, self.finish(begun));
        }
    }

    /// Marks what the monitor of a container removes with it. Returns the container if it exists.
    fn begin(&self, name: &str) -> Result<Option<Begun>, KnownError> {
        let store = self.store;
        check_containers(store)?;
        let Some(known) = look(store, name)? else { return Ok(None) };
        let id = &known.id;
        if known.is_running() && self.if_running == IfRunning::Refuse {
            return Err(KnownError::Runs(id.clone()));
        }
        // The monitor of a running container removes it when it is killed, and then volumes that nothing needs.
        let record = known.record.as_ref();
        let marked = self.own_volumes.mark(store, id, &known.folder, record, self.held);
        marked
            .map_err(|source| KnownError::Volumes { id: id.clone(), source: Box::new(source) })?;
        if known.is_running()
            && let Err(error) = background::unwant(&known.folder)
        {
            tracing::debug!(id, %error, "cannot inform the monitor that the container is removed");
        }
        Ok(Some(Begun { known, is_asked: false }))
    }

    /// Kills a container, waits for its end, and removes the rest of it.
    fn finish(&self, Begun { known, is_asked }: Begun) -> Result<bool, KnownError> {
        let store = self.store;
        let id = &known.id;
        if known.is_running() {
            known.kill_again(store, is_asked)?;
        }
        // The monitor may still be taking the container down, and other commands may hold the lock briefly to test if
        // the container lives.
        let since = Instant::now();
        let folder = loop {
            match store.containers.lock(id) {
                Ok(Some(folder)) => break folder,
                // Another command has removed the container.
                Err(ContainerError::Absent(_)) => return Ok(false),
                Ok(None) if since.elapsed() < DEATH => {
                    if known.is_alive(store)? {
                        // Another command has started the container again.
                        if self.if_running == IfRunning::Refuse {
                            return Err(KnownError::Runs(id.clone()));
                        }
                        drop(background::unwant(&known.folder));
                        known.kill(store)?;
                    } else {
                        // Data that is still on its way to the disk is not needed any more.
                        writable_layer::give_up(&known.folder);
                    }
                    std::thread::sleep(GLANCE);
                }
                Ok(None) => return Err(KnownError::InUse(id.clone())),
                Err(error) => return Err(error.into()),
            }
        };
        background::bury(&folder, (self.now)())
            .map_err(OperationError::of("record the end of container", id))?;
        teardown::remove_behind(folder, store.who())?;
        Ok(true)
    }
}

/// A container whose removal has begun.
struct Begun {
    known: KnownContainer,
    /// Whether the container was killed, without a wait for its end.
    is_asked: bool,
}

impl Begun {
    /// Kills the container if it runs. If that fails, [`Removal::finish`] tries it again.
    fn ask(&mut self) {
        let known = &self.known;
        self.is_asked = known.is_running()
            && known.note_stopped(KILL).is_ok()
            && background::signal(&known.folder, &known.id, "KILL").is_ok();
    }
}
