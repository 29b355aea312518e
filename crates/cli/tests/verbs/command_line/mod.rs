//! The command line itself.

#[cfg(feature = "serve")]
pub(super) mod documents;
pub(super) mod failures;
#[cfg(target_arch = "x86_64")]
pub(super) mod faults;
pub(super) mod habits;
pub(super) mod help;
pub(super) mod hints;
pub(super) mod shells;
mod system;
pub(super) mod version;
pub(super) mod waits;
