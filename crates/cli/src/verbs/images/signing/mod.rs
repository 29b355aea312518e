//! Signs images with private keys.

pub(crate) mod private_key;
pub(crate) mod sign;
