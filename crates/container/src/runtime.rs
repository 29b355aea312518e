//! OCI runtimes: how they are found and called, and their input.

pub(crate) mod call;
pub(crate) mod compiled;
mod find;
mod fixes;
pub mod init;
pub(crate) mod program;
pub(crate) mod streams;

pub use crate::bundle::Kind;
pub use find::{Runtime, RuntimeError};
pub use fixes::OldRuntime;
