//! Removes containers without a monitor, and finds mounts that running containers can share.

use std::path::Path;
use std::time::Duration;

use image::verity::ImageId;
use store::{FoundContainer, Store};

use crate::folder::{self, LATE, RUNTIME_PATH};
use crate::life::background;
use crate::life::end::teardown;
use crate::life::state::{State, StateBefore};
use crate::root::share::Superblock;
use crate::runtime::call::DELETION;

/// Time limit of a command for clearing dead containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sweep {
    /// Waits only a short time for the runtimes, because a start waits for this. If a container's runtime takes
    /// longer, other starts skip the container for [`PUT_OFF`].
    Brief,
    /// Waits as long as the runtimes take.
    Thorough,
}

/// Timeout of the runtime for each container before a start.
const BRIEF: Duration = Duration::from_secs(2);

/// Time during which starts do not retry a container that could not be removed, in seconds.
pub const PUT_OFF: i64 = 600;

impl Sweep {
    /// Returns the timeout of the runtime for each container.
    const fn most(self) -> Duration {
        match self {
            Self::Brief => BRIEF,
            Self::Thorough => DELETION,
        }
    }
}

/// Whether a start has recently failed to clear the container.
fn is_put_off(folder: &Path, now: i64) -> bool {
    let noted = std::fs::read_to_string(folder.join(LATE)).ok();
    let noted = noted.and_then(|it| it.trim().parse::<i64>().ok());
    // A time in the future is ignored, so that a clock that was set back does not defer the container for long.
    noted.and_then(|it| now.checked_sub(it)).is_some_and(|past| (0..PUT_OFF).contains(&past))
}

fn put_off(folder: &Path, id: &str, now: i64) {
    tracing::warn!(id, "cannot remove all remains of a dead container: use `quire rm --force`");
    if let Err(error) = std::fs::write(folder.join(LATE), now.to_string()) {
        tracing::debug!(id, %error, "the next start tries again");
    }
}

/// Removes the remains of dead containers. If remains cannot be removed now, a later command tries again. `now`
/// returns the time, in seconds since 1970.
///
/// Returns the number of removed containers, and the ids of the living ones.
pub fn clear_dead(store: &Store, sweep: Sweep, now: &dyn Fn() -> i64) -> (u64, Vec<String>) {
    if !crate::store_ownership::is_ours(store) {
        // Records in another user's store may be false.
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
    // Paths of runtimes that exceeded their timeout. They would also exceed it for other containers.
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
        if keep && background::is_over(&folder) {
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
        // If there is no state, the container's start was never reported. If the state cannot be read, the start
        // counts as reported. An earlier state is that of a container that was being started again.
        let is_new = matches!(State::load(&folder), Ok(None)) && !StateBefore::exists(&folder);
        let keep = keep && !is_new;
        let locked = match store.containers.lock(&id) {
            Ok(Some(locked)) => locked,
            Ok(None) => continue,
            Err(error) => {
                tracing::warn!(id, %error, "cannot remove a dead container");
                continue;
            }
        };
        // The monitor may have been killed, with or without the container.
        let is_clear = if keep {
            match background::bury_within(&locked, now(), sweep.most()) {
                Ok(is_clear) => is_clear,
                Err(error) => {
                    tracing::warn!(id, %error, "cannot record the end of a container");
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

/// Maximum number of containers that are tried as a source of the image's superblock. If one of them cannot share it,
/// most others cannot either.
const ASKED: usize = 4;

/// Returns superblocks of an image that running containers have mounted.
pub fn share(store: &Store, living: &[String], image: ImageId) -> impl Iterator<Item = Superblock> {
    let alike = living.iter().filter(move |id| store.containers.image_of(id) == Some(image));
    alike.take(ASKED).filter_map(move |id| Superblock::take(&folder::path(store, id)))
}
