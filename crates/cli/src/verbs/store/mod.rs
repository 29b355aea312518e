//! Verbs on the store and the host.

mod completion_words;
pub(crate) mod completions;
pub(crate) mod damage;
pub(crate) mod doctor;
pub(crate) mod du;
pub(crate) mod fsck;
pub(crate) mod gc;
pub(crate) mod heal;
pub(crate) mod info;
pub(crate) mod man;
mod man_markdown;
pub(crate) mod man_pages;
pub(crate) mod memory;
pub(crate) mod share;
pub(crate) mod system;
pub(crate) mod unseal;
pub(crate) mod verify;
pub(crate) mod version;
