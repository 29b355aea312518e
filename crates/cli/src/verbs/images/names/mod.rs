//! Verbs that change the names of images.

pub(crate) mod rmi;
pub(crate) mod tag;
pub(crate) mod untag;
