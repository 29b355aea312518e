//! Devices that are filled while they are read, from their layers' blobs (decision 18).
//!
//! [`LayerFiller`] brings a part of a device: it fetches, inflates, compares digests and writes. A [`Door`] is where readers
//! wait for it.
//!

mod door;
mod fill;

pub use door::{Door, DoorError};
pub use fill::{FillError, LayerFiller};
