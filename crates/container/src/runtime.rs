//! OCI runtimes: how they are found and called, and their input.

pub(crate) mod call;
pub mod caller_fds;
pub(crate) mod elf;
mod find;
mod fixes;
pub(crate) mod gvisor_stdio;
pub mod init;
pub(crate) mod program;
pub(crate) mod seccomp_cache;

pub use crate::bundle::Kind;
pub use find::{Runtime, RuntimeError};
pub use fixes::OldRuntime;
