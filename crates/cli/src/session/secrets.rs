//! Protects secrets in the memory of this process.

use rustix::process::{
    DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit,
};

/// Makes the kernel write no core dump of this process, and keeps other processes of the user from reading its memory.
pub(crate) fn keep_out_of_dumps() -> std::io::Result<()> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    let most = getrlimit(Resource::Core).maximum;
    Ok(setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: most })?)
}
