//! Containers without a monitor, and mounts that living ones can lend.

use image::verity::ImageId;
use store::{FoundContainer, Store};

use crate::folder;
use crate::life::state::State;
use crate::life::{detached, teardown};
use crate::root::share::Superblock;

/// Removes the remains of dead containers. The next command tries again what cannot be removed now. `now` is the time,
/// in seconds since 1970.
///
/// Returns how many containers were removed, and the ids of those that live.
pub fn clear_dead(store: &Store, now: &dyn Fn() -> i64) -> (u64, Vec<String>) {
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
        // Nobody was told that it runs. What cannot be read may have been told.
        let keep = keep && !matches!(State::load(&folder), Ok(None));
        match store.containers.lock(&id) {
            // Its monitor may have been killed, and the container with it or not.
            Ok(Some(folder)) if keep => {
                if let Err(error) = detached::bury(folder.path(), &id, now()) {
                    tracing::warn!(id, %error, "cannot note the end of a container");
                }
            }
            Ok(Some(folder)) => {
                if !teardown::clear(folder.path(), &id) {
                    tracing::warn!(id, "cannot end all that is left of a dead container");
                    continue;
                }
                match folder.remove() {
                    Ok(()) => cleared += 1,
                    Err(error) => tracing::warn!(id, %error, "cannot remove a dead container"),
                }
            }
            Ok(None) => {}
            Err(error) => tracing::warn!(id, %error, "cannot remove a dead container"),
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
