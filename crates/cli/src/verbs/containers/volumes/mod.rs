//! The verb `volume`.

mod archive;
pub(crate) mod verb;

pub(crate) use verb::{clear_unneeded, clear_unneeded_in};
