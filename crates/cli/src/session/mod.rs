//! Shared parts of verbs: the context with the store, names, times, policies, hints, signals and output files, and the user
//! namespace, cgroup and mounts of users without root.

pub(crate) mod accounts;
pub(crate) mod context;
pub(crate) mod failure;
pub(crate) mod forms;
pub(crate) mod hints;
pub(crate) mod layers;
pub(crate) mod moment;
pub(crate) mod output_file;
pub(crate) mod own_namespace;
pub(crate) mod policy;
#[cfg(feature = "signatures")]
pub(crate) mod prompt;
pub(crate) mod resolve;
pub(crate) mod resources;
pub(crate) mod scope;
pub(crate) mod settings;
pub(crate) mod signals;
pub(crate) mod source_hint;
pub(crate) mod system_programs;
pub(crate) mod target;
pub(crate) mod ways;
