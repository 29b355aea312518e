//! The verb `volume`.

mod archive;
pub(crate) mod unneeded;
pub(crate) mod verb;
