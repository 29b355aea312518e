//! Containers without a monitor, and mounts that living ones can lend.

use std::path::Path;
use std::time::Duration;

use image::verity::ImageId;
use store::{FoundContainer, Store};

use crate::folder::{self, LATE, RUNTIME_PATH};
use crate::life::state::State;
use crate::life::{detached, teardown};
use crate::root::share::Superblock;
use crate::runtime::call::DELETION;

/// How much time a command has for containers that are dead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sweep {
    /// Little: a start waits for it. A container whose runtime is late is left alone by other starts for [`PUT_OFF`].
    Brief,
    /// As much as the runtimes take.
    Thorough,
}

/// How long a runtime has for each container before a start.
const BRIEF: Duration = Duration::from_secs(2);

/// For so many seconds no start tries again what could not be removed.
pub const PUT_OFF: i64 = 600;

impl Sweep {
    /// How long a runtime has for each container.
    const fn most(self) -> Duration {
        match self {
            Self::Brief => BRIEF,
            Self::Thorough => DELETION,
        }
    }
}

/// Whether a start has tried it in vain not long ago.
fn is_put_off(folder: &Path, now: i64) -> bool {
    let noted = std::fs::read_to_string(folder.join(LATE)).ok();
    let noted = noted.and_then(|it| it.trim().parse::<i64>().ok());
    // A clock that was set back puts nothing off for long.
    noted.and_then(|it| now.checked_sub(it)).is_some_and(|past| (0..PUT_OFF).contains(&past))
}

fn put_off(folder: &Path, id: &str, now: i64) {
    tracing::warn!(id, "cannot end all that is left of a dead container: `quire rm --force` does");
    if let Err(error) = std::fs::write(folder.join(LATE), now.to_string()) {
        tracing::debug!(id, %error, "the next start tries it again");
    }
}

/// Removes the remains of dead containers. A later command tries again what cannot be removed now. `now` is the time,
/// in seconds since 1970.
///
/// Returns how many containers were removed, and the ids of those that live.
pub fn clear_dead(store: &Store, sweep: Sweep, now: &dyn Fn() -> i64) -> (u64, Vec<String>) {
    if !crate::owner::is_ours(store) {
        // What is written there need not be true.
        return (0, Vec::new());
    }
    let (living, dead) = match store.containers.living_and_dead() {
        Ok(found) => found,
        Err(error) => {
            tracing::warn!(%error, "cannot look for dead containers");
            return (0, Vec::new());
        }
    };
    let mut cleared = 0;
    // Paths of runtimes that did not end a container in time: they would not end the next one either.
    let mut late: Vec<Vec<u8>> = Vec::new();
    for FoundContainer { id, record, .. } in dead {
        let keep = match record {
            Ok(record) => record.keep,
            Err(error) => {
                tracing::warn!("{error}");
                continue;
            }
        };
        let folder = folder::path(store, &id);
        if keep && detached::is_over(&folder) {
            continue;
        }
        if sweep == Sweep::Brief && is_put_off(&folder, now()) {
            continue;
        }
        let runtime = std::fs::read(folder.join(RUNTIME_PATH)).ok();
        if sweep == Sweep::Brief && runtime.as_ref().is_some_and(|it| late.contains(it)) {
            put_off(&folder, &id, now());
            continue;
        }
        // Nobody was told that it runs. What cannot be read may have been told.
        let keep = keep && !matches!(State::load(&folder), Ok(None));
        let locked = match store.containers.lock(&id) {
            Ok(Some(locked)) => locked,
            Ok(None) => continue,
            Err(error) => {
                tracing::warn!(id, %error, "cannot remove a dead container");
                continue;
            }
        };
        // Its monitor may have been killed, and the container with it or not.
        let is_clear = if keep {
            match detached::bury_within(&locked, now(), sweep.most()) {
                Ok(is_clear) => is_clear,
                Err(error) => {
                    tracing::warn!(id, %error, "cannot note the end of a container");
                    continue;
                }
            }
        } else {
            teardown::forget_earlier_boot(&locked);
            teardown::clear_within(locked.path(), &id, sweep.most())
        };
        if !is_clear {
            put_off(locked.path(), &id, now());
            late.extend(runtime);
        } else if !keep {
            match teardown::remove_behind(locked, store.who()) {
                Ok(()) => cleared += 1,
                Err(error) => tracing::warn!(id, %error, "cannot remove a dead container"),
            }
        }
    }
    (cleared, living)
}

/// How many containers of the image are asked for its superblock: where one cannot give it, neither can most others.
const ASKED: usize = 4;

/// The superblocks by an image's name that living containers have mounted.
pub fn share(store: &Store, living: &[String], image: ImageId) -> impl Iterator<Item = Superblock> {
    let alike = living.iter().filter(move |id| store.containers.image_of(id) == Some(image));
    alike.take(ASKED).filter_map(move |id| Superblock::take(&folder::path(store, id)))
}
