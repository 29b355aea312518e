//! What a store keeps, kind by kind. Each kind has a directory of its own, or a part of one.

pub(crate) mod containers;
pub(crate) mod devices;
pub(crate) mod downloads;
pub(crate) mod images;
pub(crate) mod layers;
pub(crate) mod manifests;
pub(crate) mod refs;
