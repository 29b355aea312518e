//! Verbs that look into containers, and that reach their programs.

pub(crate) mod attach;
pub(crate) mod cp;
pub(crate) mod inspect;
pub(crate) mod kill;
pub(crate) mod port;
